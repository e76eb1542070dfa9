"""`kvcore report compare`: two reports of one kind side by side: what is different, and by how much?

Tables of the same name are joined by their key columns; every figure of a row that is in both is compared, and every
verdict. A figure that only one of them has is a change, too: a break-even where there was none. A key column with
one value in all of A and another one in all of B is what the comparison is about (two GPUs, two models) and is left out
of the key. Rows that only one of them has are named. Inputs and versions that differ are listed, because they are what
explains the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.reports.page import Bars, Column, Report, Table, Value, read_report, words

Tree = Mapping[str, Any]
SHOWN_MAX = 40
NAMED_MAX = 5
LEAST_CHANGE = 1e-9
RATIO_MAX = 1e12  # beyond it a ratio tells nothing, and a bar of it leaves no room for the others
UNITS = {"seconds": " (s)", "rate": " (B/s)", "bytes": " (B)", "per_s": " (/s)"}
COLUMNS = (
    Column("table", "Table"),
    Column("row", "Row"),
    Column("column", "Figure"),
    Column("before", "A", "number", "as the report A has it"),
    Column("after", "B", "number", "as the report B has it"),
    Column("ratio", "B / A", "ratio", "a dash where A is 0 or one of them has no figure"),
)
INPUT_COLUMNS = (Column("field", "Field", "code"), Column("before", "A"), Column("after", "B"))
_NOISE = ("provenance.created", "provenance.command")


def build(before: Path, after: Path) -> Report:
    """The report; ConfigError for reports that cannot be compared."""
    trees = read_report(before), read_report(after)
    kinds = [tree.get("kind") for tree in trees]
    if kinds[0] != kinds[1]:
        raise ConfigError(f"{before} is a report {kinds[0]!r} and {after} one of {kinds[1]!r}: compare two of one kind")
    try:
        figures = list(_figures(*trees))
        alone = [*_alone(trees[0], trees[1], "A"), *_alone(trees[1], trees[0], "B")]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{before} or {after} is no whole report: {error!r}") from error
    return _report(str(kinds[0]), (before, after), trees, figures, alone)


def _report(
    kind: str, paths: tuple[Path, Path], trees: tuple[Tree, Tree], figures: list[dict[str, Value]], alone: list[str]
) -> Report:
    changed = [row for row in figures if row["before"] != row["after"]]
    inputs = list(_differences(*trees))
    tables = [Table("figures", "Figures that changed", COLUMNS, changed, ("table", "row", "column"))]
    tables.append(Table("inputs", "What else is different", INPUT_COLUMNS, inputs, ("field",)))
    return Report(
        "compare",
        f"Two reports of kind {kind}, side by side",
        tuple(_verdict(paths, figures, changed, inputs, alone)),
        tables=tuple(tables),
        charts=tuple(_chart(changed)),
        records=figures,
        inputs={"a": str(paths[0]), "b": str(paths[1])},
        notes=tuple(f"Only in {line}" for line in alone[:SHOWN_MAX]),
    )


def _verdict(
    paths: tuple[Path, Path],
    figures: list[dict[str, Value]],
    changed: list[dict[str, Value]],
    inputs: list[dict[str, Value]],
    alone: list[str],
) -> Iterator[str]:
    yield f"A is {paths[0]}, B is {paths[1]}."
    if not figures:
        yield "They have no figure in common."
    elif not changed:
        yield f"All {words.count(len(figures), 'figure')} are the same."
    else:
        yield f"{len(changed):,} of {words.count(len(figures), 'figure')} changed."
        if ratios := _with_ratio(changed):
            most = ratios[0]
            ratio = words.shown(most["ratio"], "ratio")
            yield f"The largest change: '{most['column']}' of {most['row']}, {ratio} of A."
    if inputs:
        named = words.listed([str(row["field"]) for row in inputs[:NAMED_MAX]])
        yield f"Inputs and versions that differ: {len(inputs)}; such as {named}."
    if alone:
        yield f"Rows that only one of them has: {len(alone)}."


def _with_ratio(changed: list[dict[str, Value]]) -> list[dict[str, Value]]:
    """The rows with one, the largest change first."""
    rows = [row for row in changed if isinstance(row["ratio"], float) and row["ratio"] > 0]
    return sorted(rows, key=lambda row: -abs(math.log(float(row["ratio"] or 0))))


def _chart(changed: list[dict[str, Value]]) -> Iterator[Bars]:
    if rows := _with_ratio(changed)[:SHOWN_MAX]:
        labels = tuple(f"{row['column']}: {row['row']}" for row in rows)
        yield Bars(
            "ratios", "The largest changes, B / A", "B / A", labels, tuple(float(row["ratio"] or 0) for row in rows)
        )


# ---- joining


def _rows(tree: Tree, other: Tree) -> dict[tuple[str, str], tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Every row of every table with a key, by (table, key), with its columns outside of the key."""
    found = {}
    for table in tree["tables"]:
        key = _key(table, other)
        columns = [each for each in table["columns"] if each["name"] not in table["key"]]
        for row in table["rows"] if key else []:
            found[table["name"], ", ".join(str(row[name]) for name in key)] = (row, columns)
    return found


def _title(column: Mapping[str, Any]) -> str:
    """As the page of the report calls it, with the unit in which its figures come here."""
    return str(column["title"]) + UNITS.get(column["kind"], "")


def _key(table: Mapping[str, Any], other: Tree) -> list[str]:
    """The key columns that tell rows apart (module text)."""
    others = [row for each in other["tables"] if each["name"] == table["name"] for row in each["rows"]]
    kept = [name for name in table["key"] if not _about(name, table["rows"], others)]
    return kept or list(table["key"])


def _about(name: str, rows: list[Mapping[str, Any]], others: list[Mapping[str, Any]]) -> bool:
    """Has the column one value in all rows here, and another one in all rows there?"""
    here, there = {row[name] for row in rows}, {row[name] for row in others}
    return len(here) == len(there) == 1 and here != there


def _figures(before: Tree, after: Tree) -> Iterator[dict[str, Value]]:
    others = _rows(after, before)
    for place, (row, columns) in _rows(before, after).items():
        if place not in others:
            continue
        other = others[place][0]
        for column in columns:
            name = column["name"]
            pair = row.get(name), other.get(name)
            if any(map(_is_number, pair)) or column["kind"] == "verdict":
                yield _figure(place, _title(column), *pair)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _figure(place: tuple[str, str], title: str, before: Value, after: Value) -> dict[str, Value]:
    found: dict[str, Value] = {"table": place[0], "row": place[1], "column": title}
    if not (_is_number(before) and _is_number(after)):
        return {**found, "before": before, "after": after, "ratio": None}
    one, other = float(before or 0), float(after or 0)
    same = abs(one - other) <= LEAST_CHANGE * max(abs(one), abs(other))
    ratio = other / one if one else math.nan
    shown = ratio if abs(ratio) < RATIO_MAX else None
    return {**found, "before": one, "after": one if same else other, "ratio": shown}


def _alone(one: Tree, other: Tree, name: str) -> list[str]:
    known = _rows(other, one)
    return [f"{name}: {table}, {row}" for table, row in _rows(one, other) if (table, row) not in known]


def _differences(before: Tree, after: Tree) -> Iterator[dict[str, Value]]:
    """Fields of inputs and provenance that are not the same."""
    flat = [
        {**dict(_flat(tree.get("inputs", {}), "inputs")), **dict(_flat(tree.get("provenance", {}), "provenance"))}
        for tree in (before, after)
    ]
    for field in dict.fromkeys([*flat[0], *flat[1]]):
        values = [each.get(field) for each in flat]
        if values[0] != values[1] and field not in _NOISE:
            yield {"field": field, "before": _text(values[0]), "after": _text(values[1])}


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _flat(each, f"{name}.{number}")
    else:
        yield name, value


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.15g}"
    return "" if value is None else str(value)

"""`kvcore report peers`: kvcore and another cache side by side, as `scripts/bench_peers.py` has measured them.

Nothing is run here. A figure is the median of the rounds of one run, and how many times as good kvcore is by the
medians. The verdict is bad if a figure that has a bar misses it; what kvcore loses is said first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.reports.page import Bars, Column, Lines, Report, Series, Table, Value, words

SCHEMA = 2
PLAIN = "plain copy"  # a yardstick, of the machine and not of a cache
COLUMNS = (
    Column("group", "Part"),
    Column("what", "Figure"),
    Column("unit", "Unit"),
    Column("kvcore", "kvcore", "number", "median of the rounds"),
    Column("kvcore_min", "least", "number", "of the rounds"),
    Column("kvcore_max", "greatest", "number", "of the rounds"),
    Column("peer", "LMCache", "number", "median of the rounds"),
    Column("peer_min", "least", "number", "of the rounds"),
    Column("peer_max", "greatest", "number", "of the rounds"),
    Column("rounds", "Rounds", "count", "both measured in each, in turn"),
    Column("advantage", "Times as good", "ratio", "by the medians: above 1 kvcore is better"),
    Column("cpu_advantage", "By CPU", "ratio", "the same by processor time, where it was taken"),
    Column("bar", "Bar", "ratio", "how many times as good it has to be"),
    Column("verdict", "Verdict", "verdict", "pass: times as good >= bar"),
)
Figures = Mapping[str, Mapping[str, Any]]


def read_file(path: Path) -> dict[str, Any]:
    """What the script wrote; ConfigError for anything else."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(tree, dict) or tree.get("schema") != SCHEMA or not isinstance(tree.get("figures"), dict):
        raise ConfigError(f"{path} is no comparison of schema {SCHEMA}: was it written by scripts/bench_peers.py?")
    return tree


def build(path: Path) -> Report:
    """The report."""
    tree = read_file(path)
    try:
        figures: Figures = tree["figures"]
        rows = [_row(figure) for figure in figures.values()]
        return Report(
            "peers",
            f"kvcore beside LMCache {tree['versions']['lmcache']['lmcache']}",
            tuple(_verdict(rows)),
            good=all(row["verdict"] != "missed" for row in rows),
            tables=(Table("figures", "Everything that was measured", COLUMNS, rows, ("what",)),),
            charts=(*_ratios(rows), *_batches(figures)),
            inputs={name: tree[name] for name in ("sizes", "versions", "machine")},
            notes=tuple(tree["not_comparable"]),
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} is no whole comparison: {error!r}") from error


def _row(figure: Mapping[str, Any]) -> dict[str, Value]:
    ours, theirs = figure["kvcore"], figure["lmcache"]
    bar = figure["bar"]
    verdict = "" if bar is None else "pass" if figure["advantage"] >= bar else "missed"
    return {
        **{name: figure[name] for name in ("group", "what", "unit", "advantage", "cpu_advantage", "bar")},
        **{f"kvcore{end}": ours[name] for end, name in (("", "median"), ("_min", "min"), ("_max", "max"))},
        **{f"peer{end}": theirs[name] for end, name in (("", "median"), ("_min", "min"), ("_max", "max"))},
        "rounds": ours["n"],
        "verdict": verdict,
    }


def _verdict(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    lost = [row for row in rows if row["advantage"] < 1 and not str(row["what"]).startswith(PLAIN)]
    if lost:
        worst = sorted(lost, key=lambda row: float(row["advantage"]))
        named = words.listed([f"{row['what']} ({words.shown(row['advantage'], 'ratio')})" for row in worst])
        yield f"kvcore loses at {words.count(len(lost), 'figure')}: {named}."
    else:
        yield f"kvcore loses at none of {words.count(len(rows), 'figure')}."
    barred = [row for row in rows if row["bar"] is not None]
    missed = [
        f"{row['what']} ({row['advantage']:.2f} of {row['bar']:g})" for row in barred if row["verdict"] == "missed"
    ]
    yield f"{len(barred) - len(missed)} of {words.count(len(barred), 'bar')} met."
    if missed:
        yield f"Missed: {words.listed(missed)}."


def _ratios(rows: Sequence[Mapping[str, Any]]) -> Iterator[Bars]:
    """By the clock, and by processor time for what has it; the yardstick is left out."""
    shown = [row for row in rows if "processor time" not in row["what"] and not row["what"].startswith(PLAIN)]
    for column, name, title in (
        ("advantage", "times_as_good", "How many times as good kvcore is, by the clock"),
        ("cpu_advantage", "by_processor_time", "How many times as good kvcore is, by processor time"),
    ):
        there = [row for row in shown if row[column] is not None]
        labels = tuple(f"{row['group']}: {row['what']}"[:70] for row in there)
        values = tuple(float(row[column]) for row in there)
        if there:
            note = "1 is equal; the verdict and the table say which bars there are."
            yield Bars(name, title, "times", labels, values, x_log=True, note=note)


def _batches(figures: Figures) -> Iterator[Lines]:
    """L1 over the batch size, if it was measured."""
    batches = sorted(int(name[6:]) for name in figures if name.startswith("cycle_") and name[6:].isdigit())
    if not batches:
        return
    series = tuple(
        Series(label, batches, [figures[f"cycle_{batch}"][side]["median"] for batch in batches], points=True)
        for side, label in (("kvcore", "kvcore"), ("lmcache", "LMCache"))
    )
    title = "L1: reserve, publish, lease, release, delete"
    yield Lines("l1_cycle", title, "keys in a batch", "us per key", series, x_log=True, y_log=True)

"""The page: one HTML file that needs nobody, with its style, its code and its data inside.

Theory of operation
-------------------
The template (assets/page.html) is filled by jinja2 with escaping on. Tables and the verdict are HTML and are there
without any code; charts and widgets are drawn by our own JavaScript from the JSON in the page. A content security
policy in the page forbids everything that is not inside it, so it cannot ask the network even by mistake.

JSON inside a script element must not contain `</script` or `<!--`: every `<` goes in as `\\u003c`, which JSON reads as
the same character.

    draw.js         charts with hover; sorting of tables
    cost.js         the closed forms of reports/cost.py and reports/stream.py
    calculator.js   sliders over cost.js
    prefix.js       the prefix rule of kvcore/groups.py as a picture to click
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from kvcore.reports.page import words
from kvcore.reports.page.document import Column, Report, Table, Value, drawn
from kvcore.reports.page.png import COLOURS

SCRIPTS = ("draw.js", "cost.js", "calculator.js", "prefix.js")
LONG_TEXT = 60  # letters; a column of longer ones is wider, or its rows would be as high as the screen
NUMBERS = ("count", "seconds", "bytes", "rate", "share", "ratio", "per_s", "number")


@cache
def asset(name: str) -> str:
    """A file of assets/ as text."""
    return (files("kvcore.reports.page") / "assets" / name).read_text(encoding="utf-8")


def embedded(tree: Any) -> str:
    """JSON that can stand inside a script element."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def page(report: Report, provenance: Mapping[str, Any], file_names: Sequence[str]) -> str:
    """The whole of index.html."""
    import jinja2

    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(asset("page.html"))
    return template.render(
        report=report,
        provenance=provenance,
        files=file_names,
        style=asset("page.css"),
        script="\n".join(asset(name) for name in SCRIPTS),
        data=embedded(_data(report)),
        tables=[_table(table) for table in report.tables],
        inputs=json.dumps(dict(report.inputs), indent=1),
    )


def _data(report: Report) -> dict[str, Any]:
    return {
        "colours": COLOURS,
        "charts": [drawn(chart) for chart in report.charts],
        "widgets": [{"kind": widget.kind, "data": widget.data} for widget in report.widgets],
    }


def _table(table: Table) -> dict[str, Any]:
    """A table as the template reads it: texts, and the numbers to sort by."""
    top = max((float(row[table.bar] or 0) for row in table.rows), default=0.0) if table.bar else 0.0
    return {
        "table": table,
        "heads": [(column.title, column.formula, column.kind in NUMBERS) for column in table.columns],
        "rows": [[_cell(row, column, table.bar, top) for column in table.columns] for row in table.rows],
    }


def _cell(row: Mapping[str, Value], column: Column, bar: str, top: float) -> dict[str, Any]:
    value = row[column.name]
    cell: dict[str, Any] = {"text": words.shown(value, column.kind), "sort": value, "classes": _classes(column, value)}
    if column.name == bar and top > 0:
        cell["bar"] = round(100 * float(value or 0) / top, 1)
    return cell


def _classes(column: Column, value: Value) -> str:
    if column.kind in NUMBERS:
        return "number"
    if column.kind == "verdict":
        return f"verdict {'good' if value in ('pass', 'met', 'load', True) else 'bad' if value else ''}".strip()
    return "text long" if isinstance(value, str) and len(value) > LONG_TEXT else column.kind

"""What a report consists of, before it is HTML, PNG, JSON or CSV: plain frozen values.

Theory of operation
-------------------
A report module builds one `Report`; `folder.py` writes it in all its forms. Numbers stay numbers, in SI units, until a
form asks for text: `Column.kind` says how a person reads them, the CSV and the JSON hold them as they are.

    verdict     sentences in plain words, the first thing on the page
    widgets     parts of the page that answer to the reader: the calculator, the picture of the prefix rule
    tables      rows are mappings by column name; `key` names the columns by which `compare` joins two reports
    charts      lines, bars or a matrix; drawn in the page by draw.js and as PNG by png.py, from the same numbers
    records     raw data, one JSON object per line
    missing     what was not done because somebody interrupted the work: said on the page, above all numbers

None stands for "there is none" in a cell and is shown as a dash; a number that is not finite is refused, because JSON
has no word for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Value = str | int | float | bool | None
Kind = Literal["text", "count", "seconds", "bytes", "rate", "share", "ratio", "per_s", "number", "verdict", "code"]
NONE = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """`name` is the CSV's, with its unit; `title` the page's; `formula` says how the figure comes about."""

    name: str
    title: str
    kind: Kind = "text"
    formula: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """`bar`: a column that is also shown as a bar. Every row has exactly the columns."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Mapping[str, Value]]
    key: tuple[str, ...] = ()
    note: str = ""
    bar: str = ""

    def __post_init__(self) -> None:
        names = {column.name for column in self.columns}
        assert set(self.key) <= names
        for row in self.rows:
            assert set(row) == names, f"{self.name}: {sorted(set(row) ^ names)}"
            for value in row.values():
                assert not isinstance(value, float) or math.isfinite(value), f"{self.name}: {dict(row)}"


@dataclass(frozen=True, slots=True)
class Series:
    """One line; a missing y is a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    dashed: bool = False
    points: bool = False

    def __post_init__(self) -> None:
        assert len(self.xs) == len(self.ys)


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line with a word."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Lines:
    """Curves over one x axis."""

    name: str
    title: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    x_log: bool = False
    y_log: bool = False
    marks: tuple[Mark, ...] = ()
    note: str = ""
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True, slots=True)
class Bars:
    """Horizontal bars, one per label; `behind` are the wider, paler bars that they are a part of."""

    name: str
    title: str
    x_title: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    behind: tuple[float, ...] = ()
    x_log: bool = False
    note: str = ""
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True, slots=True)
class Matrix:
    """A cell per row and column; None: nothing there. `marked` cells, (row, column), get a frame."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    marked: tuple[tuple[int, int], ...] = ()
    note: str = ""
    kind: Literal["matrix"] = "matrix"


Chart = Lines | Bars | Matrix
DRAWN_DIGITS = 6


def drawn(chart: Chart) -> dict[str, Any]:
    """A chart as JSON, its numbers with as many digits as anybody could see."""
    tree: dict[str, Any] = _short(asdict(chart))
    return tree


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return float(f"{value:.{DRAWN_DIGITS}g}") if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Widget:
    """A part that answers to the reader: the `kind` names its code in assets/, `data` is JSON for it."""

    kind: Literal["calculator", "prefix"]
    title: str
    data: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """See the module text. `good`: None where a report judges nothing."""

    kind: str
    title: str
    verdict: tuple[str, ...]
    good: bool | None = None
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    widgets: tuple[Widget, ...] = ()
    records: Sequence[Mapping[str, Any]] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        assert self.verdict, "a report begins with its verdict"
        names = [part.name for part in (*self.tables, *self.charts)]
        assert len(names) == len(set(names)), "tables and charts are files: their names must differ"

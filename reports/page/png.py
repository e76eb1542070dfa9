"""A chart as PNG, by matplotlib (`pip install kvcore[reports]`). The page draws the same numbers itself (draw.js)."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError
from kvcore.reports.page.document import Bars, Chart, Lines, Matrix

# Okabe and Ito's palette: told apart with any colour vision (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A00")
PALE = "#C9D6DF"
DPI, DPI_TALL = 90, 60
TALL_INCHES = 8


def check_drawing() -> None:
    """ConfigError unless matplotlib and jinja2 are installed; asked before any work."""
    for name in ("matplotlib", "jinja2"):
        if find_spec(name) is None:
            raise ConfigError(f"reports need {name}: pip install kvcore[reports]")


def draw(chart: Chart, path: Path) -> str:
    """Write the PNG; its name."""
    from matplotlib.figure import Figure

    tall = (
        4.2 if isinstance(chart, Lines) else 1.4 + 0.22 * len(chart.rows if isinstance(chart, Matrix) else chart.labels)
    )
    figure = Figure(figsize=(8, max(tall, 2.4)), layout="constrained")
    axes = figure.subplots()
    axes.set_title(_plain(chart.title), loc="left", fontsize=11)
    if isinstance(chart, Lines):
        _lines(axes, chart)
    elif isinstance(chart, Bars):
        _bars(axes, chart)
    else:
        _matrix(axes, chart)
    with warnings.catch_warnings():  # a box in the picture; the page has the letters of all languages
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(path, dpi=DPI if tall < TALL_INCHES else DPI_TALL, metadata={"Software": "kvcore"})
    return path.name


def _plain(text: str) -> str:
    """Names are nobody's formulas: between two dollar signs matplotlib would read one."""
    return text.replace("$", r"\$")


def _lines(axes: Any, chart: Lines) -> None:
    for number, series in enumerate(chart.series):
        style = "--" if series.dashed else "-"
        marker = "o" if series.points else None
        ys = [float("nan") if y is None else y for y in series.ys]
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(series.xs, ys, style, marker=marker, markersize=4, label=_plain(series.name), color=colour)
    for mark in chart.marks:
        axes.axvline(mark.x, color="#777777", linewidth=0.8, linestyle=":")
        axes.text(mark.x, 0.98, f" {_plain(mark.text)}", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
    axes.set_xscale("log" if chart.x_log else "linear")
    axes.set_yscale("log" if chart.y_log else "linear")
    axes.set_xlabel(_plain(chart.x_title))
    axes.set_ylabel(_plain(chart.y_title))
    axes.grid(True, alpha=0.25)
    if chart.series:
        axes.legend(fontsize=8, frameon=False)


def _bars(axes: Any, chart: Bars) -> None:
    places = range(len(chart.labels))
    if chart.behind:
        axes.barh(places, chart.behind, color=PALE)
    axes.barh(places, chart.values, color=COLOURS[0])
    axes.set_yticks(places, list(map(_plain, chart.labels)), fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xscale("log" if chart.x_log else "linear")
    axes.set_xlabel(_plain(chart.x_title))


def _matrix(axes: Any, chart: Matrix) -> None:
    values = [[float("nan") if cell is None else cell for cell in row] for row in chart.values]
    axes.imshow(values, aspect="auto", cmap="Blues", vmin=0)
    for row, cells in enumerate(chart.values):
        for column, cell in enumerate(cells):
            if cell is not None:
                axes.text(column, row, f"{cell:g}", ha="center", va="center", fontsize=7, color="#B04000")
    for row, column in chart.marked:
        axes.plot(column, row, marker="s", markersize=11, markerfacecolor="none", markeredgecolor="#009E73")
    axes.set_xticks(range(len(chart.columns)), list(map(_plain, chart.columns)), fontsize=8, rotation=30)
    axes.set_yticks(range(len(chart.rows)), list(map(_plain, chart.rows)), fontsize=7)

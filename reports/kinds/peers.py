"""`kvcore report peers`: kvcore and another cache side by side, as `scripts/bench_peers.py` has measured them.

Nothing is run here. A figure is the median of the rounds of one run, and how many times as good kvcore is by the
medians. The verdict is bad if a figure that has a bar misses it; what kvcore loses is said first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvcore.errors import ConfigError
from kvcore.reports.files import read_bounded
from kvcore.reports.kinds.results import FILE_BYTES_MAX, Count, Figure
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
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Side(msgspec.Struct, frozen=True):
    """One cache's rounds of one figure."""

    median: Figure
    min: Figure
    max: Figure
    n: Count


class Compared(msgspec.Struct, frozen=True):
    """One figure of both."""

    group: str
    what: str
    unit: str
    kvcore: Side
    lmcache: Side
    advantage: Ratio
    cpu_advantage: Ratio | None
    bar: Ratio | None


class Schema(msgspec.Struct, frozen=True):
    """What tells one version of the file from another, before the rest is read."""

    schema: int


class PeersFile(msgspec.Struct, frozen=True):
    """`scripts/bench_peers.py`."""

    sizes: dict[str, Any]
    versions: dict[str, dict[str, Any]]
    machine: dict[str, Any]
    figures: Annotated[dict[str, Compared], msgspec.Meta(min_length=1)]
    not_comparable: list[str]


Figures = Mapping[str, Compared]


def read_file(path: Path) -> PeersFile:
    """What the script wrote; ConfigError for anything else."""
    try:
        data = read_bounded(path, FILE_BYTES_MAX)
        if msgspec.json.decode(data, type=Schema).schema != SCHEMA:
            raise ConfigError(f"{path} is no comparison of schema {SCHEMA}: was it written by scripts/bench_peers.py?")
        return msgspec.json.decode(data, type=PeersFile)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not what scripts/bench_peers.py writes: {error}") from error


def build(path: Path) -> Report:
    """The report."""
    file = read_file(path)
    rows = [_row(figure) for figure in file.figures.values()]
    return Report(
        "peers",
        f"kvcore beside LMCache {file.versions.get('lmcache', {}).get('lmcache', 'of an unknown version')}",
        tuple(_verdict(rows)),
        good=all(row["verdict"] != "missed" for row in rows),
        tables=(Table("figures", "Everything that was measured", COLUMNS, rows, ("what",)),),
        charts=(*_ratios(rows), *_batches(file.figures)),
        inputs={name: getattr(file, name) for name in ("sizes", "versions", "machine")},
        notes=tuple(file.not_comparable),
    )


def _row(figure: Compared) -> dict[str, Value]:
    bar = figure.bar
    row: dict[str, Value] = {
        name: getattr(figure, name) for name in ("group", "what", "unit", "advantage", "cpu_advantage", "bar")
    }
    for label, side in (("kvcore", figure.kvcore), ("peer", figure.lmcache)):
        row |= {label: side.median, f"{label}_min": side.min, f"{label}_max": side.max}
    verdict = "" if bar is None else "pass" if figure.advantage >= bar else "missed"
    return {**row, "rounds": figure.kvcore.n, "verdict": verdict}


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
    found = {name[6:]: figure for name, figure in figures.items() if name.startswith("cycle_")}
    whole = {int(size): figure for size, figure in found.items() if size.isascii() and size.isdigit()}
    batches = sorted(whole.items())
    if not batches:
        return
    sizes = [size for size, _ in batches]
    series = (
        Series("kvcore", sizes, [figure.kvcore.median for _, figure in batches], points=True),
        Series("LMCache", sizes, [figure.lmcache.median for _, figure in batches], points=True),
    )
    title = "L1: reserve, publish, lease, release, delete"
    yield Lines("l1_cycle", title, "keys in a batch", "us per key", series, x_log=True, y_log=True)

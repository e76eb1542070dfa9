"""Numbers as people read them: three digits, a unit, no false precision."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.reports.page.document import NONE, Kind, Value


def seconds(value: float) -> str:
    """`850 us`, `12.3 ms`, `4.56 s`."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if abs(value) * factor < 1000:
            return f"{digits(value * factor)} {unit}"
    return f"{digits(value)} s"


def size(value: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{digits(value)} {unit}"
        value /= 1024
    return f"{digits(value)} TiB"


def rate(value: float) -> str:
    """Bytes per second in decimal units, as links are sold."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if abs(value) < 1000:
            return f"{digits(value)} {unit}"
        value /= 1000
    return f"{digits(value)} GB/s"


def digits(value: float) -> str:
    """Three significant digits, never with an exponent in between; thousands with commas."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 0.001:
        return f"{value:.3g}"
    return f"{value:.2e}"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def count(number: int, noun: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown(value: Value, kind: Kind) -> str:
    """One cell as text."""
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return _number(value, kind)


def _number(value: int | float, kind: Kind) -> str:
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "seconds":
        return seconds(value)
    if kind == "bytes":
        return size(value)
    if kind == "rate":
        return rate(value)
    if kind == "share":
        return f"{100 * value:.1f} %"
    if kind == "ratio":
        return f"{value:.2f} x"
    if kind == "per_s":
        return f"{digits(value)} /s"
    return digits(value)

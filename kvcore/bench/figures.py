"""Figures of a measurement: percentiles with their number of samples, and medians of repeated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of `n` single operations, in microseconds."""

    n: int
    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latencies:
        ordered = sorted(seconds)
        assert ordered
        return cls(len(ordered), 1e6 * _at(ordered, 0.5), 1e6 * _at(ordered, 0.99))


def median(values: Sequence[float]) -> float:
    return _at(sorted(values), 0.5)


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

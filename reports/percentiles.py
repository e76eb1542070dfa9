"""Percentiles that say nothing rather than something about too few samples.

A p99 of 200 requests is the second worst of them: chance. A percentile is given only where at least `BEYOND_MIN`
samples lie beyond it, so p50 needs 20, p90 100 and p99 1,000; else None, which a page shows as "n < 1,000".
Linear interpolation between the two neighbours (numpy's default).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BEYOND_MIN = 10


def samples_needed(percent: float) -> int:
    """Samples that a percentile needs; both tails count, so p1 needs as many as p99."""
    assert 0 < percent < 100
    return math.ceil(BEYOND_MIN * 100 / min(percent, 100 - percent) - 1e-9)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value below which `percent` of the samples lie; None for too few samples."""
    if len(values) < samples_needed(percent):
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

"""The interval in which a density lies: exact (Clopper and Pearson), so it holds for few catches as well. Pure.

Of n seeds k were catches. The lower bound is the density under which k or more catches have a chance of 2.5 %, the
upper one that under which k or fewer have it. Both are found by bisection over the binomial tail, in logarithms.
A measurement that stops at its thirtieth catch has not asked a fixed number of seeds; the interval is then a little too
high, by less than its own width.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, lgamma, log

_TAIL = 0.025
_STEPS = 50


def interval(catches: int, seeds: int) -> tuple[float, float]:
    """The bounds of the density at 95 %, as shares of 1."""
    assert 0 <= catches <= seeds
    if seeds == 0:
        return 0.0, 1.0
    low = 0.0 if catches == 0 else _bisect(lambda share: 1 - _at_most(catches - 1, seeds, share) < _TAIL)
    high = 1.0 if catches == seeds else _bisect(lambda share: _at_most(catches, seeds, share) > _TAIL)
    return low, high


def _bisect(below: Callable[[float], bool]) -> float:
    """The share at which `below`, true for small ones, becomes false."""
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


def _at_most(count: int, seeds: int, share: float) -> float:
    """The chance of `count` or fewer among `seeds`, each with chance `share`, which is neither 0 nor 1."""
    ways = lgamma(seeds + 1)
    return sum(
        exp(ways - lgamma(k + 1) - lgamma(seeds - k + 1) + k * log(share) + (seeds - k) * log(1 - share))
        for k in range(count + 1)
    )

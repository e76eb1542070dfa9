"""From measured pieces to predicted times, and predicted times against measured ones. Pure.

Theory of operation
-------------------
1. Laws through measured pieces (reports/fitting.py): prefill = fixed + token * n + pair * (n p + n²/2), and for each
   tier load = wait + token * n. The pieces are measured at lengths that are *not* among those predicted.
2. TTFT(recompute) = prefill(p + rest); TTFT(load) = load(p) + prefill(rest after p); the break-even is that of
   reports/breakeven.py on these laws.
3. Then both ways are run. A figure is the median of its runs (of each the fastest try), and every figure is
   taken twice, interleaved, as A and A': the A/A spread is |A - A'| / A, the error that a perfect prediction would
   have. What drifted between measuring the pieces and running (a machine with neighbours) is in it as well: one prefill
   is timed in both phases.
4. A prediction holds if its error is at most max(`ERROR_BAR`, 2 * A/A spread). Both are printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvcore.reports.breakeven import LineLoad, break_even
from kvcore.reports.fitting import fit
from kvcore.reports.model import attention_pairs
from kvcore.reports.prefill import PrefillTerms

ERROR_BAR = 0.15
SPREADS = 2


@dataclass(frozen=True, slots=True)
class Laws:
    """Fitted to the pieces; `loads` by tier."""

    prefill: PrefillTerms
    loads: Mapping[str, LineLoad]

    def ttft_s(self, way: str, prefix: int, rest: int) -> float:
        """`way`: "recompute" or the name of a tier."""
        if way == "recompute":
            return self.prefill.seconds(prefix + rest)
        return self.loads[way].seconds(prefix) + self.prefill.seconds(rest, prefix)

    def break_even_tokens(
        self, tier: str, rest: int, block_tokens: int, tokens_max: int, load_factor: float = 1.0
    ) -> int | None:
        """In whole blocks; None: at no length up to `tokens_max`. `load_factor`: with loads so much slower."""
        load = self.loads[tier]
        load = LineLoad(load.wait_s * load_factor, load.token_s * load_factor)
        return break_even(self.prefill, load, rest_tokens=rest, block_tokens=block_tokens, tokens_max=tokens_max)


@dataclass(frozen=True, slots=True)
class Point:
    """One figure: what was predicted, and the medians of its two halves."""

    way: str
    prefix: int
    predicted_s: float
    a_s: float
    a_again_s: float
    runs: int
    drift: float

    @property
    def measured_s(self) -> float:
        return (self.a_s + self.a_again_s) / 2

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def spread(self) -> float:
        return max(abs(self.a_again_s - self.a_s) / self.a_s, self.drift)

    @property
    def bar(self) -> float:
        return max(ERROR_BAR, SPREADS * self.spread)

    @property
    def holds(self) -> bool:
        return self.error <= self.bar


def fit_laws(prefills: Sequence[tuple[int, int, float]], loads: Mapping[str, Sequence[tuple[int, float]]]) -> Laws:
    """From (new, prefix, seconds) of prefills and (tokens, seconds) of loads."""
    columns = [
        [1.0 for _ in prefills],
        [float(new) for new, _, _ in prefills],
        [attention_pairs(new, prefix) for new, prefix, _ in prefills],
    ]
    fixed, token, pair = fit(columns, [seconds for *_, seconds in prefills]).coefficients
    return Laws(PrefillTerms(fixed, token, pair), {tier: _line(points) for tier, points in loads.items()})


def _line(points: Sequence[tuple[int, float]]) -> LineLoad:
    columns = [[1.0 for _ in points], [float(tokens) for tokens, _ in points]]
    wait, token = fit(columns, [seconds for _, seconds in points]).coefficients
    return LineLoad(wait, token)


def halves(times: Sequence[float]) -> tuple[float, float]:
    """Medians of every second run and of those between."""
    assert len(times) >= 2
    return statistics.median(times[::2]), statistics.median(times[1::2])


def measured_break_even(recompute: Sequence[tuple[int, float]], load: Sequence[tuple[int, float]]) -> float | None:
    """Where the measured curves cross for good, by straight lines between the prefixes measured; None: they do not."""
    gaps = [(prefix, slow - fast) for (prefix, slow), (_, fast) in zip(recompute, load, strict=True)]
    if not gaps or gaps[-1][1] <= 0:
        return None
    for (before, lower), (after, upper) in reversed(list(pairwise(gaps))):
        if lower <= 0 < upper:
            return before + (after - before) * -lower / (upper - lower)
    return float(gaps[0][0])  # loading wins at every length measured: at most the shortest

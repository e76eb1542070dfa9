"""From measured pieces to predicted times, and predicted times against measured ones. Pure.

Theory of operation
-------------------
1. Laws through measured pieces (reports/fitting.py), at lengths that are *not* among those predicted:
   prefill of a whole prompt = fixed + token * n + pair * n²/2; of the rest after a prefix = fixed + token * p; load
   from a tier = wait + token * p + end, where `end` is what the cache still does after it has answered.
   The rest has a law of its own: an engine that masks its scores computes n (p + n) pairs, not the n p + n²/2 of a
   causal kernel, and a prefix in pages must be gathered first. One law for both was 20 % short at small prefixes.
2. TTFT(recompute) = prefill(p + rest); TTFT(load) = load(p) + prefill(rest after p); the break-even is that of
   reports/breakeven.py on these laws.
3. Both ways are run, in the same rounds in which the pieces are measured (reports/calibration/rounds.py). A figure is
   the median of its runs, and every figure is taken twice, interleaved, as A and A': the A/A spread is |A - A'| / A,
   the error that a perfect prediction would have.
4. A prediction holds if its error is at most max(`ERROR_BAR`, 2 * A/A spread). Both are printed. A break-even holds if
   the measured one lies between those predicted with loaded requests faster and slower by that much.
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
class EnginePrefill:
    """`whole` prompts by their tokens, and the same rest of a prompt `after` so many tokens."""

    whole: PrefillTerms
    after: LineLoad

    def seconds(self, new_tokens: int, prefix_tokens: int = 0) -> float:
        return self.after.seconds(prefix_tokens) if prefix_tokens else self.whole.seconds(new_tokens)


@dataclass(frozen=True, slots=True)
class Laws:
    """Fitted to the pieces; `loads` by tier."""

    prefill: EnginePrefill
    loads: Mapping[str, LineLoad]

    def ttft_s(self, way: str, prefix: int, rest: int) -> float:
        """`way`: "recompute" or the name of a tier. `rest`: as measured."""
        if way == "recompute":
            return self.prefill.seconds(prefix + rest)
        return self.loads[way].seconds(prefix) + self.prefill.seconds(rest, prefix)

    def break_even_tokens(
        self, tier: str, rest: int, block_tokens: int, tokens_max: int, ttft_factor: float = 1.0
    ) -> int | None:
        """In whole blocks; None: at no length up to `tokens_max`. `ttft_factor`: if loaded requests take that many
        times as long, all of which is put on the load."""
        load, after, more = self.loads[tier], self.prefill.after, ttft_factor - 1
        load = LineLoad(
            ttft_factor * load.wait_s + more * after.wait_s, ttft_factor * load.token_s + more * after.token_s
        )
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

    @property
    def measured_s(self) -> float:
        return (self.a_s + self.a_again_s) / 2

    @property
    def error(self) -> float:
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def spread(self) -> float:
        return abs(self.a_again_s - self.a_s) / self.a_s

    @property
    def bar(self) -> float:
        return bar_of(self.spread)

    @property
    def holds(self) -> bool:
        return self.error <= self.bar


def bar_of(spread: float) -> float:
    """How large an error may be."""
    return max(ERROR_BAR, SPREADS * spread)


def fit_laws(
    whole: Sequence[tuple[int, float]],
    after: Sequence[tuple[int, float]],
    loads: Mapping[str, Sequence[tuple[int, float]]],
    ends: Mapping[str, float],
) -> Laws:
    """From (tokens, seconds): of whole prompts, of the rest after a prefix, and of loads by tier; and from what the
    cache does after its answer, in seconds."""
    tokens = [new for new, _ in whole]
    columns = [[1.0] * len(whole), [float(new) for new in tokens], [attention_pairs(new, 0) for new in tokens]]
    fixed, token, pair = fit(columns, [seconds for _, seconds in whole]).coefficients
    prefill = EnginePrefill(PrefillTerms(fixed, token, pair), _line(after))
    return Laws(prefill, {tier: _line(points, ends[tier]) for tier, points in loads.items()})


def _line(points: Sequence[tuple[int, float]], end_s: float = 0.0) -> LineLoad:
    columns = [[1.0] * len(points), [float(tokens) for tokens, _ in points]]
    wait, token = fit(columns, [seconds for _, seconds in points]).coefficients
    return LineLoad(wait + end_s, token)


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

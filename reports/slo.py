"""Goodput: requests per second that met every objective they were given.

Theory of operation
-------------------
The syntax is that of `vllm bench serve --goodput`: `ttft:2000 tpot:50 e2el:30000`, each an upper limit in milliseconds,
a request meets the objective when all of its times are at most these (docs.vllm.ai, vllm.benchmarks.serve). As there, a
request of one output token has a TPOT of 0. The definition is DistServe's (Zhong et al., OSDI 2024). Ours says what
happens to the rest:

    completed      counts; good if it met all limits, bad if it missed one
    failed         counts and is bad: an error is no reason to look better
    cancelled      by the end of the run: out of both sides, nobody knows how it would have ended
    unevaluable    completed, but a time that a limit names was not measured: out of both sides

    share          good / (completed + failed)
    rate           good / duration
    tokens         output tokens of good requests / duration

Without an objective there is no goodput: None, not the throughput under another name. A run in which nothing counted
has no share either. `COLUMNS` states the formula of each column for the page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvcore.errors import ConfigError
from kvcore.objective import EXAMPLE, limits_of
from kvcore.reports.numbers import check_positive

COLUMNS = {
    "goodput_share": "requests that met every limit / (completed + failed requests); others left out",
    "goodput_per_s": "requests that met every limit / duration of the run",
    "goodput_tokens_per_s": "output tokens of requests that met every limit / duration of the run",
    "ttft": "time of the first output token - arrival",
    "tpot": "(time of the last output token - time of the first) / (output tokens - 1); 0 for one token",
    "e2el": "time of the last output token - arrival",
}


class Ending(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Seconds; None: not measured."""

    ending: Ending
    output_tokens: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def time_s(self, metric: str) -> float | None:
        if metric == "tpot" and self.output_tokens <= 1:
            return 0.0
        return {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}[metric]


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in milliseconds by metric, in the order given."""

    limits_ms: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return " ".join(f"{metric}:{limit:g}" for metric, limit in self.limits_ms)

    def met_by(self, outcome: Outcome) -> bool | None:
        """Did a completed request meet all limits? None: a time was not measured."""
        times = [(outcome.time_s(metric), limit) for metric, limit in self.limits_ms]
        if any(time is None or math.isnan(time) for time, _ in times):
            return None
        return all(time is not None and time * 1000 <= limit for time, limit in times)


@dataclass(frozen=True, slots=True)
class Goodput:
    """See the module text; `counted` is the denominator of `share`."""

    good: int
    counted: int
    left_out: int
    share: float | None
    per_s: float
    tokens_per_s: float


def parse_slo(words: str | Sequence[str] | None) -> Slo | None:
    """`ttft:2000 tpot:50` as one text or several words; None: no objective."""
    if words is None:
        return None
    parts = words.split() if isinstance(words, str) else [part for word in words for part in word.split()]
    if not parts:
        raise ConfigError(f"the SLO is empty: leave the option out, or {EXAMPLE}")
    return Slo(tuple(limits_of(parts).items()))


def goodput(outcomes: Iterable[Outcome], slo: Slo | None, duration_s: float) -> Goodput | None:
    """Goodput of a run; None without an objective."""
    if slo is None:
        return None
    check_positive("the duration of the run in seconds", duration_s, 1e12)
    good = counted = left_out = tokens = 0
    for outcome in outcomes:
        met = _met(outcome, slo)
        if met is None:
            left_out += 1
            continue
        counted += 1
        good += met
        tokens += outcome.output_tokens if met else 0
    assert good <= counted
    share = good / counted if counted else None
    return Goodput(good, counted, left_out, share, good / duration_s, tokens / duration_s)


def _met(outcome: Outcome, slo: Slo) -> bool | None:
    if outcome.ending is Ending.CANCELLED:
        return None
    return False if outcome.ending is Ending.FAILED else slo.met_by(outcome)

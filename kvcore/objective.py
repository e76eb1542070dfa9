"""An operator's objective, and how far the sequences that decode are from missing it.

Theory of operation
-------------------
The syntax is vLLM's: `ttft:2000 tpot:50`, each an upper limit in milliseconds; a request is good when it met all.
`limits_of` reads it for everybody; an `Objective` is what the admission can act on (`kvcore.admission`): a limit for
the time per output token, and where given, one for the first token.

A prompt that is computed holds the sequences that decode up, by about the time that it takes. `Decodes` knows them, and
tells how much each of those that can still be good may be held up:

    slack = tpot * (tokens by the end - 1) - time since the first token

The tokens by the end are the steps it was in and, since nobody knows when it ends, as many more as answers have on
average (as if answers ended by chance). Those that missed a limit already are left out: nothing is lost with them.
Answers count one token per step; with speculative decoding they have more, and the slack is told too small.

Who holds: numbers only, by name from `began` to `ended`. Nothing here knows the time. A sequence that is preempted ends
here, and begins anew with its next first token.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvcore.errors import ConfigError

METRICS = ("ttft", "tpot", "e2el")
MS_MAX = 1e9
EXAMPLE = "write for instance 'ttft:2000 tpot:50'"
REMEMBERED = 200  # requests that averages are over


def limits_of(parts: Sequence[str]) -> dict[str, float]:
    """Milliseconds by metric, in the order given; each part is one limit."""
    limits: dict[str, float] = {}
    for part in parts:
        metric, limit = _limit_of(part)
        if metric in limits:
            raise ConfigError(f"the SLO names {metric} twice: which limit counts?")
        limits[metric] = limit
    return limits


def _limit_of(part: str) -> tuple[str, float]:
    metric, colon, text = part.partition(":")
    if not colon:
        raise ConfigError(f"the SLO part {part!r} has no colon: {EXAMPLE}")
    if metric not in METRICS:
        near = difflib.get_close_matches(metric.lower(), METRICS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(METRICS)}"
        raise ConfigError(f"the SLO names an unknown metric {metric!r}: {hint}")
    try:
        limit = float(text)
    except ValueError:
        raise ConfigError(f"the SLO part {part!r} needs a number of milliseconds: {EXAMPLE}") from None
    if not math.isfinite(limit) or not 0 < limit <= MS_MAX:
        raise ConfigError(f"the SLO's {metric} in milliseconds must be above 0 and at most {MS_MAX:.4g}: {limit:.4g}")
    return metric, limit


@dataclass(frozen=True, slots=True)
class Objective:
    """Upper limits in seconds, one per output token and one to the first."""

    tpot_s: float
    ttft_s: float = math.inf

    @classmethod
    def read(cls, text: str) -> Objective:
        """Of a configuration. What the admission could not act on is refused."""
        limits = limits_of(text.split())
        if "e2el" in limits:
            raise ConfigError("the admission's objective takes ttft and tpot; nobody knows how long an answer gets")
        if "tpot" not in limits:
            raise ConfigError(
                f"the admission's objective needs a tpot ({EXAMPLE}); early first tokens are sought without one"
            )
        return cls(limits["tpot"] / 1000, limits.get("ttft", math.inf) / 1000)


class Decodes:
    """The sequences that decode (module text). `steps`: of the engine so far, at any call not less than before."""

    __slots__ = ("_began", "_count", "_good", "_objective", "_tokens")

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._began: dict[Hashable, tuple[float, int, bool]] = {}
        self._count = 0
        self._tokens = self._good = 0.0

    def began(self, name: Hashable, now_s: float, ttft_s: float, steps: int) -> None:
        """It has its first token, so long after it came."""
        self._began[name] = (now_s, steps, ttft_s <= self._objective.ttft_s)

    def ended(self, name: Hashable, now_s: float, steps: int) -> None:
        """It has its last token, or is over. Unknown: no effect."""
        if (began := self._began.pop(name, None)) is None:
            return
        first_s, first, prompt = began
        more = steps - first
        assert more >= 0, "steps do not go backwards"
        good = prompt and now_s - first_s <= self._objective.tpot_s * more
        self._count = min(self._count + 1, REMEMBERED)
        self._tokens += (more - self._tokens) / self._count
        self._good += (good - self._good) / self._count

    @property
    def limit_s(self) -> float:
        """For the first token; inf: there is none."""
        return self._objective.ttft_s

    @property
    def good_share(self) -> float:
        """Of the requests that ended last; 1 before the first."""
        return self._good if self._count else 1.0

    def slacks_s(self, now_s: float, steps: int) -> tuple[float, ...]:
        """How long each sequence that can still be good may be held up. Empty before any has ended."""
        if not self._count:
            return ()
        tpot_s, end = self._objective.tpot_s, steps + self._tokens
        slacks = [tpot_s * (end - first) - (now_s - first_s) for first_s, first, can in self._began.values() if can]
        return tuple([slack for slack in slacks if slack > 0])

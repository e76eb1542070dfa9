"""The simulated clock: the loop's virtual nanoseconds as each process sees them, and names out of a seeded stream.

The port promises a monotonic clock per process, and nothing between two processes: machines have started at different
times, a clock may run a little fast or slow, and one that was suspended with its machine has jumped when it is back -
forward. So a process may be given skews, each of which says how far ahead of the world's time its clock is (negative:
behind) at an instant; what it shows never goes back, or the run ends with an assertion. Code outside all processes sees
the world's time.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.ports import TimeNs
from kvcore.sim.loop import SimLoop
from kvcore.sim.process import CURRENT

Skew = Callable[[int], int]
"""The world's time -> how far ahead the process is, in nanoseconds."""


class SimClock:
    """`kvcore.ports.Clock` of a simulated run. Tokens are unique in a run as far as `stream` makes them so."""

    def __init__(self, loop: SimLoop, stream: str = "names") -> None:
        self._loop = loop
        self._stream = stream
        self._skews: dict[str, list[Skew]] = {}  # by process
        self._shown_ns: dict[str, int] = {}

    def now_ns(self) -> TimeNs:
        now_ns = self._loop.now_ns()
        return TimeNs(self._skewed(now_ns) if self._skews else now_ns)

    def token(self, nbytes: int) -> str:
        return self._loop.streams[self._stream].token_bytes(nbytes).hex()

    def skew(self, process: str, skew: Skew) -> None:
        """From now on, and for good: an offset that is there can only end by going back."""
        self._skews.setdefault(process, []).append(skew)

    def _skewed(self, now_ns: int) -> int:
        life = CURRENT.get()
        skews = self._skews.get(life.process.name, ()) if life is not None else ()
        if life is None or not skews:
            return now_ns
        shown_ns = now_ns + sum(skew(now_ns) for skew in skews)
        assert shown_ns >= self._shown_ns.get(life.process.name, shown_ns), "a monotonic clock went back"
        self._shown_ns[life.process.name] = shown_ns
        return shown_ns

"""The simulated clock: the loop's virtual nanoseconds, and names out of a seeded stream."""

from __future__ import annotations

from kvcore.ports import TimeNs
from kvcore.sim.loop import SimLoop


class SimClock:
    """`kvcore.ports.Clock` of a simulated run. Tokens are unique in a run as far as `stream` makes them so."""

    def __init__(self, loop: SimLoop, stream: str = "names") -> None:
        self._loop = loop
        self._stream = stream

    def now_ns(self) -> TimeNs:
        return TimeNs(self._loop.now_ns())

    def token(self, nbytes: int) -> str:
        return self._loop.streams[self._stream].token_bytes(nbytes).hex()

"""`Standstill`: does code run on and on at one instant? Beside the deadlock the other way to get nowhere.

Time moves only when nothing is left to do now, so code that always finds something to do keeps it from moving, and no
deadline ever comes. The loop asks every few thousand callbacks: the count since time was last seen to move must stay
under a bound that no scenario comes near. A world in which time passes and nothing gets done is another matter
(`kvcore.sim.progress`).

Nothing is held but two numbers.
"""

from __future__ import annotations

CALLBACKS_AT_ONE_INSTANT_MAX = 2_000_000


class LivelockError(RuntimeError):
    """Time stands still: code runs on and on at one instant."""


class Standstill:
    """Callbacks since time was last seen to move."""

    __slots__ = ("_began", "_instant_ns")

    def __init__(self, now_ns: int) -> None:
        self._instant_ns = now_ns
        self._began = 0

    def lasts(self, now_ns: int, callbacks_run: int) -> bool:
        """More callbacks than any scenario needs have run at this instant."""
        if now_ns != self._instant_ns:
            self._instant_ns, self._began = now_ns, callbacks_run
        return callbacks_run - self._began > CALLBACKS_AT_ONE_INSTANT_MAX

"""A timer at a point of the clock. The loop's timers are in seconds and may fire a little early; deadlines are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcore.ports import Clock

NS_PER_S = 1_000_000_000
_RETRY_NS_MIN = 1_000  # what a timer that fired early waits at least


class DeadlineTimer:
    """Calls `callback` once, on the loop, when the clock has reached `deadline_ns`. Held and cancelled by its maker."""

    __slots__ = ("_callback", "_clock", "_deadline_ns", "_handle", "_loop")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, deadline_ns: int, callback: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._deadline_ns = deadline_ns
        self._callback = callback
        self._handle = self._arm(0)

    def cancel(self) -> None:
        self._handle.cancel()

    def _arm(self, delay_ns_min: int) -> asyncio.TimerHandle:
        delay_ns = max(delay_ns_min, self._deadline_ns - self._clock.now_ns())
        return self._loop.call_later(delay_ns / NS_PER_S, self._fire)

    def _fire(self) -> None:
        if self._clock.now_ns() < self._deadline_ns:
            self._handle = self._arm(_RETRY_NS_MIN)
        else:
            self._callback()

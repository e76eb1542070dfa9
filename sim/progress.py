"""`ProgressWatch`: says so when time passes and nothing gets done.

A deadlock ends the run by itself: nothing is left to run. A livelock does not: timers ring, polls are sent and
answered, and no request advances, no copy ends, no task of a store completes. Nobody inside can tell it from patience,
so it is judged from outside:

    armed --every limit/4: read--> the reading has changed: start counting anew
                               --> unchanged for `limit_ns`: finding "liveness" with the wait-for graph, once

`reading` answers a value that is another one whenever something got done. What counts is its business; polls, timers,
repeated messages and questions must not. It is called a few times per limit, so it may cost something.

The watch's own timer must not keep a dead world alive: with nothing else left to run it is not set again, and the
loop finds the deadlock. It runs outside all processes, so no crash takes it along.

Who holds: whoever made it, until `stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import Context

from kvcore.errors import CallerError
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.tasks import SimHandle

_READINGS_PER_LIMIT = 4


class ProgressWatch:
    """See the module text. `start` before the work, `stop` when nothing needs to get done any more."""

    def __init__(
        self,
        loop: SimLoop,
        findings: Findings,
        limit_ns: int,
        reading: Callable[[], Hashable],
        *,
        on_stuck: Callable[[str], None] | None = None,
    ) -> None:
        """`on_stuck(report)` is called after the finding: to end the run, for example (`loop.fail`)."""
        if limit_ns < _READINGS_PER_LIMIT:
            raise CallerError(f"a limit of {limit_ns} ns is too short to be watched")
        self._loop = loop
        self._findings = findings
        self._limit_ns = limit_ns
        self._reading = reading
        self._on_stuck = on_stuck
        self._timer: SimHandle | None = None
        self._last: Hashable = None
        self._since_ns = 0
        self.stuck = False

    def start(self) -> None:
        """From now on something must get done within the limit."""
        self.stop()
        self.stuck = False
        self._last, self._since_ns = self._reading(), self._loop.now_ns()
        self._arm()

    def stop(self) -> None:
        """Nothing is expected any more. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer = self._loop.call_later_ns(self._limit_ns // _READINGS_PER_LIMIT, self._look, context=Context())

    def _look(self) -> None:
        self._timer = None
        reading, now_ns = self._reading(), self._loop.now_ns()
        if reading != self._last:
            self._last, self._since_ns = reading, now_ns
        elif now_ns - self._since_ns >= self._limit_ns:
            self._report(now_ns - self._since_ns)
            return
        if not self._loop.nothing_left:
            self._arm()

    def _report(self, idle_ns: int) -> None:
        self.stuck = True
        text = self._loop.waits(f"no progress for {idle_ns} ns, although time passes")
        self._findings.report("liveness", text)
        if self._on_stuck is not None:
            self._on_stuck(text)

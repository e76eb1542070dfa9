"""`Timers`: the entries of a simulated loop that become ready at an instant to come.

Each instant that anybody waits for has one SimPy event, so SimPy's queue orders time, and the loop orders what happens
at one time: when the instant comes, all its entries join what is ready, in the order in which they were set.

Rejected: one SimPy event per entry (see `kvcore.sim.loop`).

Who holds an entry: the instant, until it comes; a cancelled entry stays until then, and is left out. Who frees: the
coming of the instant, or `clear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from kvcore.sim.environment import SimEnvironment
from kvcore.sim.process import CURRENT, SimProcess
from kvcore.sim.tasks import SimHandle


class Timers:
    """See the module's text. `ready` takes an entry whose time has come."""

    def __init__(self, env: SimEnvironment, ready: Callable[[SimHandle], object]) -> None:
        self._env = env
        self._ready = ready
        self._due: dict[int, list[SimHandle]] = {}

    def __iter__(self) -> Iterator[SimHandle]:
        return chain.from_iterable(self._due.values())

    def arm(self, handle: SimHandle) -> None:
        """Make the entry ready at its time, or now if that is past."""
        when_ns = handle.when_ns
        now_ns: int = self._env.now  # type: ignore[assignment]  # SimEnvironment accepts integers only
        if when_ns <= now_ns:
            self._ready(handle)
            return
        due = self._due.get(when_ns)
        if due is None:
            due = self._due[when_ns] = []
            event = self._env.timeout(when_ns - now_ns, due)
            assert event.callbacks is not None
            event.callbacks.append(self._take_in)
        due.append(handle)

    def hasten(self, handles: Iterable[SimHandle], by_ns: int) -> None:
        """Timers that are under way come so much earlier."""
        for handle in handles:
            self._due[handle.when_ns].remove(handle)
            handle.when_ns -= by_ns
            self.arm(handle)

    def of(self, process: SimProcess) -> list[SimHandle]:
        """The timers of asyncio that are under way in the present life of a process."""
        return [
            handle
            for handle in self
            if handle.is_timer and not handle.cancelled() and handle._context.get(CURRENT) is process.life
        ]

    def clear(self) -> None:
        self._due.clear()

    def _take_in(self, event: Any) -> None:
        """The instant of `event` has come."""
        del self._due[self._env.now]  # type: ignore[arg-type]
        for handle in event.value:
            if handle.fifo is not None or not handle.cancelled():
                self._ready(handle)

"""Simulated processes: what a crash takes with it, and what survives it.

Theory of operation
-------------------
A crash is neither `task.cancel()` nor dropping the task: both run `except` and `finally` blocks, which a real crash
does not. Here a process is a mark in a `contextvars` context:

    1.  `restart` (and the first start) makes an `Incarnation` and a fresh, empty context that carries it.
    2.  `spawn` and `run` start code inside a copy of that context. Every task, timer and callback that this code
        makes inherits the mark, because asyncio copies the current context each time.
    3.  `crash` marks the incarnation dead. From then on the loop drops every entry whose context carries it, before
        it runs: no line of the dead process is executed any more.
    4.  Tasks that were pending stay referenced until the loop is closed. If they were released, the interpreter would
        close their coroutines and so run the `finally` blocks in the middle of the run.
    5.  When the loop is closed, the coroutines are disposed of with the incarnation dead and the trace muted, so that
        ports refuse whatever their `finally` blocks try. Ports ask `Incarnation.alive`.
    6.  `on_crash` callbacks run at the crash, in order: a port drops connections, frees file locks, and so on.

A process does not crash itself in the middle of its own code: nothing could stop that code before its next `await`.
`crash_soon` does it right after the running callback has ended, before anything else runs.

The loop holds the processes; a process holds its current incarnation; the dead tasks belong to the loop.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvcore.errors import CallerError
from kvcore.sim.tasks import SimTask

if TYPE_CHECKING:
    from kvcore.sim.loop import SimLoop

T = TypeVar("T")


class DeadProcessError(Exception):
    """A port was used by an incarnation that has crashed. Seen only while a finished run is cleared away."""


class Incarnation:
    """One life of a process, from start to crash."""

    __slots__ = ("alive", "number", "process")

    def __init__(self, process: SimProcess, number: int) -> None:
        self.process = process
        self.number = number
        self.alive = True

    def __str__(self) -> str:
        return f"{self.process.name}#{self.number}"


CURRENT: contextvars.ContextVar[Incarnation | None] = contextvars.ContextVar("kvcore_sim_incarnation", default=None)
"""The incarnation whose code is running; None outside all processes."""


def check_alive() -> None:
    """Raise `DeadProcessError` when the code that is running belongs to a dead incarnation. For ports."""
    incarnation = CURRENT.get()
    if incarnation is not None and not incarnation.alive:
        raise DeadProcessError(f"{incarnation} has crashed")


class SimProcess:
    """A process of the simulated world. Made by `SimLoop.process`."""

    __slots__ = ("_base_context", "_current", "_loop", "_on_crash", "name")

    def __init__(self, loop: SimLoop, name: str) -> None:
        self._loop = loop
        self.name = name
        self._on_crash: list[Callable[[], None]] = []
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._current = Incarnation(self, number)
        self._base_context = contextvars.Context()
        self._base_context.run(CURRENT.set, self._current)

    @property
    def incarnation(self) -> int:
        """0 for the first life, one more after each restart."""
        return self._current.number

    @property
    def alive(self) -> bool:
        return self._current.alive

    @property
    def life(self) -> Incarnation:
        """The mark that code of the current life carries."""
        return self._current

    def context(self) -> contextvars.Context:
        """A context of its own for one callback or task of this life."""
        return self._base_context.copy()

    def spawn(self, coro: Coroutine[Any, Any, T], name: str, *, may_fail: bool = False) -> SimTask[T]:
        """Start a task of this process. An exception that leaves it fails the run, unless it `may_fail`."""
        if not self.alive:
            coro.close()
            raise CallerError(f"process {self.name} is down; restart() it before it can run {name!r}")
        task = self._loop.create_task(coro, name=name, context=self.context())
        if not may_fail:
            task.add_done_callback(self._spawned_done, context=contextvars.Context())
        return task

    def _spawned_done(self, task: Any) -> None:
        if not task.cancelled() and task.exception() is not None and task.incarnation.alive:
            self._loop.fail(task.exception())

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function` now, as code of this process. For building its objects."""
        if not self.alive:
            raise CallerError(f"process {self.name} is down; restart() it first")
        return self.context().run(function, *args)

    def on_crash(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the current life ends in a crash."""
        assert self.alive
        self._on_crash.append(callback)

    def crash(self) -> None:
        """End this life at once. Nothing of it runs again, not even `finally`. Does nothing when already down."""
        if CURRENT.get() is self._current:
            raise CallerError(f"{self.name} cannot crash() inside its own code; use crash_soon()")
        if not self.alive:
            return
        self._loop.bury(self._current)
        self._loop.trace.event("process.crash", self.name, self.incarnation)
        callbacks, self._on_crash = self._on_crash, []
        for callback in callbacks:
            callback()

    def crash_soon(self) -> None:
        """Crash when the callback that is running has ended, before anything else runs."""
        self._loop.after_callback(self._crash_life, self._current)

    def _crash_life(self, life: Incarnation) -> None:
        if life is self._current:
            self.crash()

    def restart(self) -> None:
        """Begin the next life, with an empty context and no tasks."""
        if self.alive:
            raise CallerError(f"process {self.name} is up; crash() it before restart()")
        self._begin(self._current.number + 1)
        self._loop.trace.event("process.start", self.name, self.incarnation)

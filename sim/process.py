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

A *gate* stands before every entry of a process while somebody wants to count or to stop them; else there is none.

* `pause` is SIGSTOP: entries of the process are put aside until `resume`, so messages queue and timers are late. What
  hardware does for it goes on (`runs_while_stopped`): a device finishes the copies it was given. A crash ends a pause.
* `at_step(n, action)` calls `action` right before the n-th entry from now on, whichever life it belongs to; a crash in
  there comes between two steps of the process, and the same n is the same place in every run of the seed.

The loop holds the processes; a process holds its current incarnation; the dead tasks belong to the loop.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvcore.errors import CallerError
from kvcore.sim.tasks import SimHandle, SimTask

if TYPE_CHECKING:
    from kvcore.sim.loop import SimLoop

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


class DeadProcessError(Exception):
    """A port was used by an incarnation that has crashed. Seen only while a finished run is cleared away."""


class Incarnation:
    """One life of a process, from start to crash."""

    __slots__ = ("alive", "gate", "number", "process")

    def __init__(self, process: SimProcess, number: int) -> None:
        self.process = process
        self.number = number
        self.alive = True
        self.gate: Callable[[SimHandle], bool] | None = None

    def __str__(self) -> str:
        return f"{self.process.name}#{self.number}"


CURRENT: contextvars.ContextVar[Incarnation | None] = contextvars.ContextVar("kvcore_sim_incarnation", default=None)
"""The incarnation whose code is running; None outside all processes."""


def check_alive() -> None:
    """Raise `DeadProcessError` when the code that is running belongs to a dead incarnation. For ports."""
    incarnation = CURRENT.get()
    if incarnation is not None and not incarnation.alive:
        raise DeadProcessError(f"{incarnation} has crashed")


def runs_while_stopped(function: F) -> F:
    """Mark what hardware does by itself: it goes on while the process that asked for it is stopped."""
    function.runs_while_stopped = True  # type: ignore[attr-defined]
    return function


class _Countdown:
    """Entries until `action`."""

    __slots__ = ("action", "left")

    def __init__(self, left: int, action: Callable[[], object]) -> None:
        self.left = left
        self.action = action


class SimProcess:
    """A process of the simulated world. Made by `SimLoop.process`."""

    __slots__ = (
        "_aside", "_base_context", "_countdowns", "_current", "_loop", "_on_crash", "_on_pause", "_on_resume",
        "_on_stopped", "name", "stopped",
    )  # fmt: skip

    def __init__(self, loop: SimLoop, name: str) -> None:
        self._loop = loop
        self.name = name
        self._on_crash: list[Callable[[], None]] = []
        self.stopped = False
        self._aside: list[SimHandle] = []
        self._on_pause: list[Callable[[], None]] = []
        self._on_resume: list[Callable[[], None]] = []
        self._on_stopped: Callable[[], None] | None = None
        self._countdowns: list[_Countdown] = []
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._current = Incarnation(self, number)
        self._base_context = contextvars.Context()
        self._base_context.run(CURRENT.set, self._current)
        self._set_gate()

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
        self._let_go()
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

    # ---- the gate

    def pause(self, on_stopped: Callable[[], None] | None = None) -> None:
        """Run nothing of this life until `resume`. `on_stopped` is called once, when something had to wait."""
        if not self.alive or self.stopped:
            raise CallerError(f"process {self.name} is down or stopped already")
        self.stopped = True
        self._on_stopped = on_stopped
        self._set_gate()
        for callback in self._on_pause:
            callback()
        self._loop.trace.event("process.stop", self.name, self.incarnation)

    def on_pause(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever this process is stopped, in whichever life."""
        self._on_pause.append(callback)

    def resume(self) -> None:
        """Run on, with everything that was put aside. Does nothing when it is not stopped."""
        if self.stopped:
            self._loop.trace.event("process.continue", self.name, self.incarnation)
            self._let_go()

    def lets_in(self, later: Callable[[], None]) -> bool:
        """For ports that run code of this process outside its entries (a message arrives): it counts as one.

        False: it is stopped; `later` is called when it runs on, or has died. After True the caller looks whether the
        life is still there.
        """
        if self.stopped:
            self._note_stopped()
            self._on_resume.append(later)
            return False
        self._count()
        return True

    def _note_stopped(self) -> None:
        """Something of this process has to wait because it is stopped."""
        callback, self._on_stopped = self._on_stopped, None
        if callback is not None:
            callback()

    def at_step(self, nth: int, action: Callable[[], object]) -> Callable[[], None]:
        """Call `action` right before the `nth` entry of this process from now on. The answer disarms it."""
        if nth < 1:
            raise CallerError(f"entries are counted from 1, not from {nth}")
        countdown = _Countdown(nth, action)
        self._countdowns.append(countdown)
        self._set_gate()
        return lambda: self._disarm(countdown)

    def _disarm(self, countdown: _Countdown) -> None:
        if countdown in self._countdowns:
            self._countdowns.remove(countdown)
            self._set_gate()

    def _set_gate(self) -> None:
        self._current.gate = self._at_gate if self.stopped or self._countdowns else None

    def _at_gate(self, handle: SimHandle) -> bool:
        """True: the entry has been put aside. Called by the loop before each entry of the current life."""
        callback = handle._callback
        if callback is None or not self.alive:
            return False
        if self.stopped:
            if getattr(callback, "runs_while_stopped", False):
                return False
            self._note_stopped()
            self._aside.append(handle)
            return True
        self._count()
        return False

    def _count(self) -> None:
        for countdown in list(self._countdowns):
            countdown.left -= 1
            if countdown.left == 0:
                self._disarm(countdown)
                countdown.action()

    def _let_go(self) -> None:
        """The pause is over, one way or the other. What waited is ready; after a crash the loop drops it."""
        self.stopped = False
        self._on_stopped = None
        self._set_gate()
        aside, self._aside = self._aside, []
        self._loop.put_back(aside)
        callbacks, self._on_resume = self._on_resume, []
        for callback in callbacks:
            callback()

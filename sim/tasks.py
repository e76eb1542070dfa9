"""Tasks, futures and handles whose identity is a number of the run, not an address.

asyncio keeps tasks and futures in sets (TaskGroup, wait, as_completed, all_tasks) and iterates over them. The default
hash is the address, so the order in which a TaskGroup cancels its children changes from run to run. `SimTask` and
`SimFuture` hash as their sequence number, which the loop counts up from 1. Equality stays identity.

Each also knows the incarnation (see `process.py`) that made it, for the deadlock report and to tell a dead process's
unread exception from a live one's.

`SimHandle` is what `call_soon` and the timers return: one entry of the loop. It replaces asyncio's handle whole and
shares only its type, which callers may ask for. `sequence` is what the trace records when it runs. An entry that
belongs to a FIFO (the callbacks of one future, a channel) names it in `fifo`, and the loop tells that FIFO when it
has taken the entry, so that the next one becomes ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from kvcore.sim.process import Incarnation

T = TypeVar("T")


class SimFuture(asyncio.Future[T]):
    """A future of the loop. `label` says what it stands for; set it where a deadlock report should name it."""

    __slots__ = ("incarnation", "label", "sequence")

    sequence: int
    incarnation: Incarnation | None
    label: str

    def __hash__(self) -> int:
        return self.sequence


class SimTask(asyncio.Task[T]):
    """A task of the loop; its name is deterministic even when none was given."""

    __slots__ = ("context", "incarnation", "sequence")

    def __init__(
        self,
        coro: Coroutine[Any, Any, T],
        loop: asyncio.AbstractEventLoop,
        name: str | None,
        context: Context,
        sequence: int,
        incarnation: Incarnation | None,
    ) -> None:
        self.sequence = sequence  # first: asyncio registers the task in a set while it is being made
        self.context = context
        self.incarnation = incarnation
        super().__init__(coro, loop=loop, name=f"task-{sequence}" if name is None else name, context=context)

    def __hash__(self) -> int:
        return self.sequence


class Fifo(Protocol):
    """Keeps its entries in order and has at most one of them ready at a time."""

    def taken(self, handle: SimHandle) -> None:
        """`handle`, the first entry, has left the ready list: make the next one ready."""
        ...


class SimHandle(asyncio.TimerHandle):
    """One entry of the loop: a callback to run once, at `when_ns` or as soon as it is picked."""

    __slots__ = ("fifo", "following", "future", "is_timer", "sequence", "when_ns")

    _callback: Callable[..., object] | None
    _args: tuple[Any, ...]
    _context: Context

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, sequence: int, when_ns: int
    ) -> None:
        # Every slot that the base class would set and something may read; its own __init__ asks for debug stacks.
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self.sequence = sequence
        self.when_ns = when_ns
        self.fifo: Fifo | None = None
        self.is_timer = False  # of asyncio: it goes by the clock of its process

    following: SimHandle | None
    future: asyncio.Future[Any]

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = None
        self._args = ()

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self.when_ns / 1_000_000_000

    def get_context(self) -> Context:
        return self._context

    @property
    def task(self) -> SimTask[Any] | None:
        """The task that this entry steps or wakes."""
        owner = getattr(self._callback, "__self__", None)
        return owner if isinstance(owner, SimTask) else None

    @property
    def actor(self) -> int | None:
        task = self.task
        return None if task is None else task.sequence

    def describe(self) -> str:
        """The task's name, or the callback's; never an address."""
        task = self.task
        if task is not None:
            return task.get_name()
        return str(getattr(self._callback, "__qualname__", type(self._callback).__qualname__))

    def __repr__(self) -> str:
        state = "cancelled" if self._cancelled else self.describe()
        return f"<SimHandle {self.sequence} {state}>"

    def __hash__(self) -> int:
        return self.sequence

    def __eq__(self, other: object) -> bool:
        return self is other

"""Deadlines of single calls: a lookup is answered in time, a store that hangs is noticed, and work in line is dropped.

*Deadlines answer the caller, resources drain.* What a call still reads or writes cannot be given back early, so the
kinds of work are treated differently:

1. Lookup (`DeadlineAdapter`). At the deadline it is answered with "nothing found". When the true answer comes, the
   locks that it took are given back here.
2. Load and store. Their buffers stay in use until the adapter has completed them; the caller has deadlines of its own
   for its requests (`kvcore.prefetch`, `kvcore.writeback`).
3. Blocking work (`DeadlineExecutor`). A large batch may stand in line for long while the store does its best; that is
   no failure. A store *hangs* when no piece of work has ended for a whole deadline. Then each piece that is overdue
   counts once in `late`, and one that has not begun ends with TimeoutError and never runs, so its buffers are free.
   Whether it has begun is decided by one test-and-set that a thread and the timer race for.

A breaker outside reads the executor's `late` and stops asking (`kvcore.l2.breaker`). A late lookup alone is no failure:
it may have stood in line.

Rejected: bouncing loads through buffers of our own, so that a load could be given up (one more copy of everything for
the sake of the rare case); cancelling running calls (no client library allows it safely); a deadline per batch (a
thousand objects take longer than one).

Who holds: this object the tasks whose answer is still out, and locks of late lookups until they are given back. Who
announces: our own lookup notice; the inner adapter's for the rest. Who frees: `close` ends all timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvcore.errors import CallerError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import TaskId
from kvcore.l2.wrapped import CountingAdapter, WrappedAdapter, chosen
from kvcore.ports import Executor, Notice, Outcome

T = TypeVar("T")

_NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class _Lookup:
    keys: tuple[ObjectKey, ...]
    timer: asyncio.TimerHandle


class DeadlineAdapter(WrappedAdapter):
    """`inner` whose calls are late after `deadline_ns`. `work`: the executor that times its blocking work.

    Made and used on the loop thread.
    """

    def __init__(
        self,
        inner: CountingAdapter,
        notice_factory: Callable[[], Notice],
        deadline_ns: int,
        work: DeadlineExecutor | None = None,
    ) -> None:
        if deadline_ns < 1:
            raise CallerError(f"a deadline of {deadline_ns} ns is none")
        super().__init__(inner)
        self.late = 0
        self.lookup_notice = notice_factory()
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_ns / _NS_PER_S
        self._lookups: dict[TaskId, _Lookup] = {}
        self._answered: dict[TaskId, int] = {}
        self._overdue: dict[TaskId, tuple[ObjectKey, ...]] = {}
        self._closed = False
        inner.lookup_notice.subscribe(self._on_lookups)

    @property
    def work_late(self) -> int:
        """Pieces of the store's work that were overdue while nothing ended; 0 where nobody times them."""
        return self._work.late if self._work is not None else 0

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        task = self.inner.submit_lookup_and_lock(keys)
        timer = self._loop.call_later(self._deadline_s, self._answer_nothing, task)
        self._lookups[task] = _Lookup(tuple(keys), timer)
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        if task in self._answered:
            return self._answered.pop(task)
        if task not in self._lookups:
            return None
        bits = self.inner.take_lookup(task)
        if bits is not None:
            self._lookups.pop(task).timer.cancel()
        return bits

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for one in self._lookups.values():
            one.timer.cancel()
        self._lookups.clear()
        self._answered.clear()
        self._overdue.clear()
        self.inner.close()
        self.lookup_notice.close()

    # -- inside

    def _answer_nothing(self, task: TaskId) -> None:
        self.late += 1
        self._overdue[task] = self._lookups.pop(task).keys
        self._answered[task] = 0
        self._give_back_late_locks()  # it may have completed, with the notice still under way
        self.lookup_notice.signal()

    def _on_lookups(self) -> None:
        if self._closed:
            return
        self._give_back_late_locks()
        self.lookup_notice.signal()

    def _give_back_late_locks(self) -> None:
        done = [(task, bits) for task in self._overdue if (bits := self.inner.take_lookup(task)) is not None]
        for task, bits in done:
            self.inner.submit_unlock(chosen(self._overdue.pop(task), bits))


class DeadlineExecutor:
    """`kvcore.ports.Executor` around `inner`; see 3 of the module text. Closing leaves the inner one to its owner."""

    def __init__(self, inner: Executor, deadline_ns: int) -> None:
        self.late = 0
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_ns / _NS_PER_S
        self._ended_at_s = self._loop.time()
        self._waiting: dict[_Claim, None] = {}
        self._closed = False

    def submit(self, work: Callable[[], T], deliver: Callable[[Outcome[T]], None], cost_bytes: int = 0) -> None:
        claim = _Claim()
        self._inner.submit(partial(_run, claim, work), partial(self._ended, claim, deliver), cost_bytes)
        self._arm(claim, deliver, self._deadline_s)
        self._waiting[claim] = None

    def close(self) -> None:
        self._closed = True
        for claim in self._waiting:
            claim.disarm()
        self._waiting.clear()

    def _arm(self, claim: _Claim, deliver: Callable[[Outcome[T]], None], delay_s: float) -> None:
        claim.timer = self._loop.call_later(delay_s, self._expire, claim, deliver)

    def _expire(self, claim: _Claim, deliver: Callable[[Outcome[T]], None]) -> None:
        left_s = self._ended_at_s + self._deadline_s - self._loop.time()
        if left_s > 0:  # the store works, and this piece stands in line or is slow
            self._arm(claim, deliver, left_s)
            return
        self.late += 1
        del self._waiting[claim]
        claim.timer = None
        if claim.take():
            claim.dropped = True
            deliver(Outcome(None, _never_began()))

    def _ended(self, claim: _Claim, deliver: Callable[[Outcome[T]], None], outcome: Outcome[T]) -> None:
        claim.disarm()
        self._waiting.pop(claim, None)
        if claim.dropped or self._closed:
            return
        self._ended_at_s = self._loop.time()
        deliver(outcome)


class _Claim:
    """Whoever takes it first decides what becomes of a piece of work: the thread that runs it, or the timer."""

    __slots__ = ("_free", "dropped", "timer")

    def __init__(self) -> None:
        self._free = [None]
        self.dropped = False
        self.timer: asyncio.TimerHandle | None = None

    def take(self) -> bool:
        try:
            self._free.pop()  # one step of the interpreter: only one of two threads finds something to pop
        except IndexError:
            return False
        return True

    def disarm(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _run(claim: _Claim, work: Callable[[], T]) -> T:
    if not claim.take():
        raise _never_began()
    return work()


def _never_began() -> TimeoutError:
    return TimeoutError("the store hangs; this work stood in line for longer than its deadline and never began")

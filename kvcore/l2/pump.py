"""One pump per L2 adapter: from "submit, notice, take" to callbacks.

Theory of operation
-------------------
An adapter has one notice per kind of work and lets a result be taken once. The pump is the only subscriber and the
only taker. It keeps one `_Waiting` per submitted task, in order of submission. At a notice it asks for every task of
that kind (a notice may stand for many completions, and may come when nothing is ready) and hands each result to its
callback.

1. `lookup`, `load` and `store` submit and return at once. The callback runs later, on the loop, exactly once.
2. A lookup or store may have a deadline. When it passes, the callback gets None, once; the task itself goes on
   and its result goes to `late` when it comes. *Deadlines answer the caller, resources drain*: what the task may
   still read or write stays reserved by whoever submitted it, and locks that it took are given back on arrival.
3. An adapter that refuses a task with an exception has not taken it: the outcome is delivered as "nothing succeeded",
   from the loop, so that callers see one path for all failures.
4. After `close` nothing is delivered. The adapter announces nothing either, so buffers of tasks that were running are
   never known to be free: their holds stay.

Rejected: futures per task (a result that holds locks would live in a future that a cancelled waiter throws away),
and a coroutine per adapter that awaits an event (one more task whose cancellation has to be got right).

Who holds: the submitter holds buffers and, from the result on, locks. Who announces: the adapter's notice, through
the pump. Who frees: the submitter, in the callback (`late` included).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Adapter, StoreAnswer, TaskId
from kvcore.runtime.confined import LoopConfined

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PumpStatistics:
    name: str
    outstanding: int
    outstanding_late: int
    submitted: int
    refused: int
    deadlines: int
    late: int


class _Waiting(Generic[R]):
    """One submitted task. Exactly one of `answer` (in time) and `late` gets its result."""

    __slots__ = ("answer", "late", "timer")

    def __init__(self, answer: Callable[[R | None], None], late: Callable[[R], None] | None) -> None:
        self.answer: Callable[[R | None], None] | None = answer
        self.late = late
        self.timer: asyncio.TimerHandle | None = None

    def deliver(self, result: R) -> bool:
        """Hand the result on; True when it came after the deadline."""
        if self.timer is not None:
            self.timer.cancel()
        if self.answer is not None:
            answer, self.answer = self.answer, None
            answer(result)
            return False
        assert self.late is not None
        self.late(result)
        return True

    def give_up(self) -> None:
        assert self.answer is not None
        answer, self.answer = self.answer, None
        answer(None)


class AdapterPump:
    """See the module text. Built and used on the loop thread."""

    def __init__(self, adapter: L2Adapter) -> None:
        self.adapter = adapter
        self.name = adapter.name
        self._loop = asyncio.get_running_loop()
        self._confined = LoopConfined()
        self._lookups: dict[TaskId, _Waiting[int]] = {}
        self._loads: dict[TaskId, _Waiting[int]] = {}
        self._stores: dict[TaskId, _Waiting[list[StoreAnswer]]] = {}
        self._refusals: dict[int, asyncio.Handle] = {}
        self._closed = False
        self._submitted = 0
        self._refused = 0
        self._deadlines = 0
        self._late = 0
        adapter.lookup_notice.subscribe(self._on_lookups)
        adapter.load_notice.subscribe(self._on_loads)
        adapter.store_notice.subscribe(self._on_stores)

    @property
    def outstanding(self) -> int:
        """Tasks whose results have not been delivered."""
        return len(self._lookups) + len(self._loads) + len(self._stores) + len(self._refusals)

    def lookup(
        self,
        keys: Sequence[ObjectKey],
        answer: Callable[[int | None], None],
        late: Callable[[int], None],
        deadline_s: float,
    ) -> None:
        """Find and lock. `answer` gets the bits or, at the deadline, None; `late` the bits that come after it."""
        waiting: _Waiting[int] = _Waiting(answer, late)
        task = self._submit(lambda: self.adapter.submit_lookup_and_lock(keys), waiting, 0)
        if task is not None:
            self._lookups[task] = waiting
            self._arm(waiting, deadline_s)

    def load(
        self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview], answer: Callable[[int | None], None]
    ) -> None:
        """Fill buffers; `answer` gets the bits when the adapter will not touch the buffers any more."""
        waiting: _Waiting[int] = _Waiting(answer, None)
        task = self._submit(lambda: self.adapter.submit_load(keys, buffers), waiting, 0)
        if task is not None:
            self._loads[task] = waiting

    def store(
        self,
        keys: Sequence[ObjectKey],
        buffers: Sequence[memoryview],
        answer: Callable[[list[StoreAnswer] | None], None],
        late: Callable[[list[StoreAnswer]], None],
        deadline_s: float,
    ) -> None:
        """Store; like `lookup` for the deadline. The buffers are read until `answer` got a list or `late` ran."""
        waiting: _Waiting[list[StoreAnswer]] = _Waiting(answer, late)
        refusal = [StoreAnswer.FAILED] * len(keys)
        task = self._submit(lambda: self.adapter.submit_store(keys, buffers), waiting, refusal)
        if task is not None:
            self._stores[task] = waiting
            self._arm(waiting, deadline_s)

    def unlock(self, keys: Sequence[ObjectKey]) -> None:
        """Give locks back; the adapter gets it done."""
        self._confined.check()
        if keys and not self._closed:
            self.adapter.submit_unlock(keys)

    def close(self) -> None:
        """Deliver nothing more. The adapter is closed by whoever owns it."""
        self._closed = True
        for table in (self._lookups, self._loads, self._stores):
            for waiting in table.values():
                if waiting.timer is not None:
                    waiting.timer.cancel()
        for handle in self._refusals.values():
            handle.cancel()
        self._refusals.clear()

    def statistics(self) -> PumpStatistics:
        late = sum(waiting.answer is None for waiting in self._lookups.values())
        late += sum(waiting.answer is None for waiting in self._stores.values())
        return PumpStatistics(
            self.name, self.outstanding, late, self._submitted, self._refused, self._deadlines, self._late
        )

    def _submit(self, submit: Callable[[], TaskId], waiting: _Waiting[R], refusal: R) -> TaskId | None:
        self._confined.check()
        assert not self._closed
        self._submitted += 1
        try:
            return submit()
        except Exception:
            # The adapter is somebody else's code and may fail in any way; a task it refused is a task that failed.
            self._refused += 1
            number = self._refused
            self._refusals[number] = self._loop.call_soon(self._refuse, number, waiting, refusal)
            return None

    def _refuse(self, number: int, waiting: _Waiting[R], refusal: R) -> None:
        del self._refusals[number]
        if not self._closed:
            waiting.deliver(refusal)

    def _arm(self, waiting: _Waiting[R], deadline_s: float) -> None:
        waiting.timer = self._loop.call_later(deadline_s, self._expire, waiting)

    def _expire(self, waiting: _Waiting[R]) -> None:
        waiting.timer = None
        if waiting.answer is not None and not self._closed:
            self._deadlines += 1
            waiting.give_up()

    def _on_lookups(self) -> None:
        self._drain(self._lookups, self.adapter.take_lookup)

    def _on_loads(self) -> None:
        self._drain(self._loads, self.adapter.take_load)

    def _drain(self, table: dict[TaskId, _Waiting[int]], take: Callable[[TaskId], int | None]) -> None:
        self._confined.check()
        if self._closed:
            return
        done = [(task, bits) for task in table if (bits := take(task)) is not None]
        ready = [(table.pop(task), bits) for task, bits in done]
        for waiting, bits in ready:
            self._late += waiting.deliver(bits)

    def _on_stores(self) -> None:
        self._confined.check()
        if self._closed:
            return
        for task, answers in self.adapter.pop_completed_stores().items():
            waiting = self._stores.pop(task, None)
            if waiting is not None:  # a store that somebody else submitted is not ours to judge
                self._late += waiting.deliver(answers)

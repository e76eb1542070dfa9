"""What adapters over a backend have in common: tasks, their results until these are taken, and the end.

`IndexedAdapter` and `SharedAdapter` differ in what they know about the store, not in how a caller meets them. A result
lies here from when the last key of its task is answered until it is taken, once; the notice follows through the loop.

Who holds: tasks belong to the pieces of work that answer them, results to whoever takes them. `close` drops results
that nobody took; after it nothing is announced, and `work_inflight` counts down as running work ends.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Generic, Protocol, TypeVar

from kvcore.errors import CallerError
from kvcore.l2.adapter import LockStrength, StoreAnswer, TaskId
from kvcore.l2.runner import Runner
from kvcore.l2.statistics import L2Counts
from kvcore.l2.tasks import BitTask, StoreTask
from kvcore.ports import Executor, Notice
from kvcore.runtime.confined import LoopConfined


class Closing(Protocol):
    def close(self) -> None: ...


B = TypeVar("B", bound=Closing)


class BackedAdapter(Generic[B]):
    """The part of `kvcore.l2.adapter.L2Adapter` that no store makes a difference to. All of it on the loop thread."""

    store_notice: Notice
    lookup_notice: Notice
    load_notice: Notice

    def __init__(
        self, name: str, lock_strength: LockStrength, capacity_bytes: int | None, executor: Executor, backend: B
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise CallerError(f"the capacity of {name} cannot be {capacity_bytes} bytes")
        self.name = name
        self.lock_strength = lock_strength
        self._counts = L2Counts()
        self._tasks = count(1)
        self._stores_done: dict[TaskId, list[StoreAnswer]] = {}
        self._lookups_done: dict[TaskId, int] = {}
        self._loads_done: dict[TaskId, int] = {}
        self._backend = backend
        self._closed = False
        self._confined = LoopConfined()
        self._runner = Runner(executor, self._confined)

    def _announce_by(self, notices: Callable[[], Notice]) -> None:
        """Last in a constructor: what fails before has no notice to give back."""
        self.store_notice = notices()
        self.lookup_notice = notices()
        self.load_notice = notices()

    @property
    def work_inflight(self) -> int:
        """Pieces of blocking work that have not ended. Until it is 0 buffers may be touched, also after `close`."""
        return self._runner.inflight

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        self._confined.check()
        done, self._stores_done = self._stores_done, {}
        return done

    def take_lookup(self, task: TaskId) -> int | None:
        self._confined.check()
        return self._lookups_done.pop(task, None)

    def take_load(self, task: TaskId) -> int | None:
        self._confined.check()
        return self._loads_done.pop(task, None)

    def close(self) -> None:
        if self._closed:
            return
        self._confined.check()
        self._closed = True
        self._runner.stop()
        for notice in (self.store_notice, self.lookup_notice, self.load_notice):
            notice.close()
        self._stores_done.clear()
        self._lookups_done.clear()
        self._loads_done.clear()
        self._backend.close()

    def _begin_task(self) -> TaskId:
        self._check_open()
        return TaskId(next(self._tasks))

    def _check_open(self) -> None:
        self._confined.check()
        if self._closed:
            raise CallerError(f"the L2 adapter {self.name} is closed")

    def _set_answer(self, batch: StoreTask, position: int, answer: StoreAnswer) -> None:
        """An answer that has been counted, or will be before this call into the adapter ends."""
        answers = batch.answers
        assert answers[position] is None, "each key of a batch is answered once"
        answers[position] = answer
        batch.unanswered -= 1
        if batch.unanswered == 0:
            self._complete_store(batch)

    def _complete_store(self, batch: StoreTask) -> None:
        answers = [answer for answer in batch.answers if answer is not None]
        assert len(answers) == len(batch.answers)
        self._stores_done[batch.task] = answers
        self.store_notice.signal()

    def _complete_lookup(self, batch: BitTask) -> None:
        self._counts.lookup_hits += batch.bits.bit_count()
        self._lookups_done[batch.task] = batch.bits
        self.lookup_notice.signal()

    def _complete_load(self, batch: BitTask) -> None:
        self._loads_done[batch.task] = batch.bits
        self.load_notice.signal()

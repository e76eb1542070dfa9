"""A rig for storage scenarios: a SimLoop of one seed, a real L1, and L2 adapters that are slow, lying or exact.

`rig_of(seed, ...)` builds one. A scenario is an async function that gets the rig; `rig.run(scenario)` runs it and then
holds the world to account: no lease, hold, L2 lock or budget byte may be left, and L1's own books must balance.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l2.adapter import L2Usage, LockKind, LockStrength, StoreAnswer, TaskId
from kvcore.l2.memory import MemoryBackend, memory_adapter
from kvcore.leases import Owner
from kvcore.memory import PlainArena
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.clock import SimClock
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.notice import SimNotice
from kvcore.storage import LookupJob, Storage, StorageConfig

MS = 1_000_000
CHUNK = 16
FULL = ObjectGroup(GroupKind.FULL, 16, 64)
WINDOW = ObjectGroup(GroupKind.WINDOW, 16, 64, 24)
RECURRENT = ObjectGroup(GroupKind.RECURRENT, 16, 128)


def payload_of(key: ObjectKey, size: int) -> bytes:
    """What a cell holds is a function of its whole identity."""
    text = repr((key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)).encode()
    return (hashlib.sha256(text).digest() * (size // 32 + 1))[:size]


@dataclass
class _Task:
    keys: list[ObjectKey]
    buffers: list[memoryview]


class ScriptedAdapter:
    """An L2 whose every completion is the test's to give.

    In *automatic* mode each task ends after a drawn time. Otherwise it is held until `finish_*`. Locks are counted, an
    unlock without a lock fails the run. `lose`: keys whose load fails although they were found.
    """

    def __init__(self, loop: SimLoop, name: str, *, automatic: bool, delay_ns: tuple[int, int] = (1, 5 * MS)) -> None:
        self.name = name
        self.lock_strength = LockStrength(LockKind.STRONG)
        self.store_notice = SimNotice(loop, f"{name}.store")
        self.lookup_notice = SimNotice(loop, f"{name}.lookup")
        self.load_notice = SimNotice(loop, f"{name}.load")
        self.records: dict[ObjectKey, bytes] = {}
        self.locks: dict[ObjectKey, int] = {}
        self.lose: set[ObjectKey] = set()
        self.refuse_submit = False
        self.store_answer: Callable[[ObjectKey], StoreAnswer] = lambda key: StoreAnswer.STORED
        self.automatic = automatic
        self.loads_of: dict[ObjectKey, int] = {}
        self.stores_of: dict[ObjectKey, int] = {}
        self.lookups_of: dict[ObjectKey, int] = {}
        self.lookups: dict[TaskId, _Task] = {}
        self.loads: dict[TaskId, _Task] = {}
        self.stores: dict[TaskId, _Task] = {}
        self.closed = False
        self._loop = loop
        self._delay_ns = delay_ns
        self._random = loop.streams[f"test.{name}"]
        self._serial = 0
        self._results: dict[TaskId, Any] = {}
        self._store_results: dict[TaskId, list[StoreAnswer]] = {}

    # the port

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        for key in keys:
            self.lookups_of[key] = self.lookups_of.get(key, 0) + 1
        return self._begin(self.lookups, keys, [], self.finish_lookup)

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        for key in keys:
            assert self.locks.get(key, 0) > 0, "a load of a cell that is not protected at its source"
            self.loads_of[key] = self.loads_of.get(key, 0) + 1
        return self._begin(self.loads, keys, buffers, self.finish_load)

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        for key in keys:
            self.stores_of[key] = self.stores_of.get(key, 0) + 1
        return self._begin(self.stores, keys, buffers, self.finish_store)

    def _begin(
        self, table: dict[TaskId, _Task], keys: Sequence[ObjectKey], buffers: Sequence[memoryview], finish: Any
    ) -> TaskId:
        if self.refuse_submit:
            raise OSError("the store is not there")
        self._serial += 1
        task = TaskId(self._serial)
        table[task] = _Task(list(keys), list(buffers))
        if self.automatic:
            self._loop.call_later_ns(self._random.random_ns(*self._delay_ns), finish, task)
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        return self._results.pop(task, None)

    def take_load(self, task: TaskId) -> int | None:
        return self._results.pop(task, None)

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        done, self._store_results = self._store_results, {}
        return done

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            assert self.locks.get(key, 0) > 0, "a lock was returned twice"
            self.locks[key] -= 1

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self.records.pop(key, None)

    def usage(self) -> L2Usage:
        return L2Usage(sum(map(len, self.records.values())), None, len(self.records), self.locks_held)

    def keys(self) -> list[ObjectKey]:
        return list(self.records)

    def close(self) -> None:
        self.closed = True

    # the test's side

    @property
    def locks_held(self) -> int:
        return sum(self.locks.values())

    def finish_lookup(self, task: TaskId | None = None) -> None:
        task, keys, _ = self._take(self.lookups, task)
        bits = 0
        for position, key in enumerate(keys):
            if key in self.records:
                self.locks[key] = self.locks.get(key, 0) + 1
                bits |= 1 << position
        self._results[task] = bits
        self._announce(self.lookup_notice)

    def finish_load(self, task: TaskId | None = None) -> None:
        task, keys, buffers = self._take(self.loads, task)
        bits = 0
        for position, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            buffer[:] = b"\xee" * len(buffer)
            if key not in self.lose and len(self.records.get(key, b"")) == len(buffer):
                buffer[:] = self.records[key]
                bits |= 1 << position
        self._results[task] = bits
        self._announce(self.load_notice)

    def finish_store(self, task: TaskId | None = None) -> None:
        task, keys, buffers = self._take(self.stores, task)
        answers = [self.store_answer(key) for key in keys]
        for key, buffer, answer in zip(keys, buffers, answers, strict=True):
            if answer is StoreAnswer.STORED:
                self.records[key] = bytes(buffer)
        self._store_results[task] = answers
        self._announce(self.store_notice)

    def _take(
        self, table: dict[TaskId, _Task], task: TaskId | None
    ) -> tuple[TaskId, list[ObjectKey], list[memoryview]]:
        task = next(iter(table)) if task is None else task
        entry = table.pop(task)
        return task, entry.keys, entry.buffers

    def _announce(self, notice: SimNotice) -> None:
        if not self.closed:
            notice.signal()


class Rig:
    """One world. Times are virtual."""

    def __init__(
        self,
        seed: int,
        *,
        groups: tuple[ObjectGroup, ...] = (FULL,),
        ranks: int = 1,
        l1_cells: int = 64,
        adapters: Sequence[str] = ("a",),
        automatic: bool = True,
        real: bool = False,
        **config: Any,
    ) -> None:
        self.loop = SimLoop(seed)
        self.clock = SimClock(self.loop)
        self.layout = CacheLayout(groups, ranks, CHUNK)
        self.l1 = L1Cache(PlainArena(l1_cells * 128), LruPolicy)
        self.random = self.loop.streams["test.rig"]
        self.config = StorageConfig(**config)
        self.adapters: list[Any] = []
        for name in adapters:
            self.adapters.append(self._real(name) if real else ScriptedAdapter(self.loop, name, automatic=automatic))
        self.storage: Storage = None  # type: ignore[assignment]
        self._owners = 0

    def _real(self, name: str) -> Any:
        executor = SimExecutor(self.loop, f"test.{name}")
        return memory_adapter(
            name, executor=executor, notice_factory=lambda: SimNotice(self.loop, name), backend=MemoryBackend()
        )

    @property
    def a(self) -> Any:
        return self.adapters[0]

    @property
    def b(self) -> Any:
        return self.adapters[1]

    # running

    def run(self, scenario: Callable[[Rig], Coroutine[Any, Any, None]], *, close: bool = True) -> Rig:
        async def whole() -> None:
            self.storage = Storage(
                layout=self.layout,
                model_name="m",
                l1=self.l1,
                adapters=self.adapters,
                clock=self.clock,
                config=self.config,
            )
            await scenario(self)
            if close:
                await self.at_rest()
                await self.storage.close()

        try:
            self.loop.run_until_complete(whole())
        finally:
            self.loop.close()
        self.l1.check()
        return self

    async def at_rest(self) -> None:
        """Nothing is left of anything that has ended."""
        for owner in list(self.storage._prefetch._jobs):
            self.storage.release_owner(owner)
        for adapter in self.adapters:
            if isinstance(adapter, ScriptedAdapter):
                self.finish_all(adapter)
        assert await self.storage.drain(600_000 * MS), self.storage.statistics()
        self.check_rest()

    def finish_all(self, adapter: ScriptedAdapter) -> None:
        """From now on everything that was held ends by itself."""
        if not adapter.automatic:
            adapter.automatic = True
            for table, finish in (
                (adapter.lookups, adapter.finish_lookup),
                (adapter.loads, adapter.finish_load),
                (adapter.stores, adapter.finish_store),
            ):
                for task in list(table):
                    self.loop.call_later_ns(1, finish, task)

    def check_rest(self) -> None:
        statistics = self.storage.statistics()
        assert statistics.l1.leases == 0, statistics
        assert statistics.l1.holds == 0, statistics
        assert statistics.l1.objects_staging == 0, statistics
        assert statistics.l1.bytes_draining == 0, statistics
        assert statistics.prefetch.budget.bytes_used == 0, statistics
        assert statistics.prefetch.budget.waiting == 0, statistics
        assert statistics.prefetch.jobs == 0, statistics
        assert statistics.prefetch.loads.in_flight == 0, statistics
        assert statistics.prefetch.loads.unread == 0, statistics
        assert statistics.prefetch.budget.bytes_used_max <= statistics.prefetch.budget.bytes_capacity
        for adapter in self.adapters:
            assert adapter.usage().locked == 0, f"L2 locks left in {adapter.name}"
        self.l1.check()

    async def pause(self, time_ns: int = MS) -> None:
        """Let virtual time pass."""
        done = self.loop.create_future()
        self.loop.call_later_ns(time_ns, done.set_result, None)
        await done

    # identities

    def hashes(self, chunks: int, prompt: str = "p") -> list[bytes]:
        return [hashlib.sha256(f"{prompt}/{chunk}".encode()).digest() for chunk in range(chunks)]

    def key(self, chunk: int, *, row: int = 0, prompt: str = "p", salt: str = "") -> ObjectKey:
        spec = self.layout.rows[row]
        return ObjectKey(self.hashes(chunk + 1, prompt)[chunk], "m", spec.rank, spec.group, salt)

    def keys(self, chunks: int, *, prompt: str = "p") -> list[ObjectKey]:
        return [self.key(chunk, row=row.index, prompt=prompt) for row in self.layout.rows for chunk in range(chunks)]

    def size(self, key: ObjectKey) -> int:
        return self.layout.cell_bytes(key.object_group_id)

    def owner(self) -> Owner:
        self._owners += 1
        return Owner("s", self._owners, "engine")

    # acts

    def fill_l2(self, adapter: ScriptedAdapter, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            adapter.records[key] = payload_of(key, self.size(key))

    def store(self, keys: Sequence[ObjectKey], holder: str = "w") -> list[Answer]:
        """A worker's store from reservation to commit."""
        sizes = [self.size(key) for key in keys]
        tag = f"t{len(keys)}.{self._owners}"
        answers, slots = self.storage.reserve_store(tag, holder, keys, sizes)
        for key, slot in zip(keys, slots, strict=True):
            if slot is not None:
                self.l1.view(slot)[:] = payload_of(key, self.size(key))
        staged = [key for key, answer in zip(keys, answers, strict=True) if answer is Answer.RESERVED]
        self.storage.commit_store(tag, holder, staged)
        return answers

    def start(
        self, chunks: int, *, prompt: str = "p", owner: Owner | None = None, timeout_ns: int = 1_000 * MS, skip: int = 0
    ) -> LookupJob:
        return self.storage.start_lookup(
            self.owner() if owner is None else owner,
            self.hashes(chunks, prompt),
            salt="",
            prompt_tokens=chunks * CHUNK + 1,
            masks=[(1 << chunks) - 1] * len(self.layout.rows),
            skip_chunks=skip,
            deadline_ns=self.clock.now_ns() + timeout_ns,
        )

    def best(self, job: LookupJob) -> int:
        assert job.state.name == "READY", (job.state, job.reason)
        return self.layout.best(job.lengths)

    def read(self, job: LookupJob, length: int, *, prompt: str = "p") -> list[Answer]:
        """A worker's whole read of what `length` chunks need: the bytes must be the cell's own."""
        cells = job.demand.needed(length)
        keys = [
            self.key(chunk, row=row, prompt=prompt)
            for row, bits in enumerate(cells)
            for chunk in range(bits.bit_length())
            if bits >> chunk & 1
        ]
        slots = self.storage.open_read("w", job.owner, keys)
        for key, slot in zip(keys, slots, strict=True):
            assert slot is not None, "a cell of the answer is not readable"
            assert bytes(self.l1.view(slot)) == payload_of(key, self.size(key)), "foreign bytes"
        return self.storage.close_read("w", job.owner, keys)


@pytest.fixture(scope="session", autouse=True)
def small_collections() -> None:
    """Every SimLoop collects garbage at both ends of its run; what was there before need not be walked each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def rig_of() -> Callable[..., Rig]:
    return Rig

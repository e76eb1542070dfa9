"""The file L2 with its real adapter, index, envelope and backend, on a disk that loses power between any two writes.

Rules store, look up, load, unlock and delete; arm a crash at the n-th file operation from now (with or without loss of
what was not flushed), also during recovery; let operations fail, work end with an unknown outcome, the disk run full,
records rot; and let time pass, so that all of it meets work in flight.

The model: the payload of a key is a function of the key and its size. `sound` keys have been answered STORED or
PRESENT, nothing was done to them since, and nothing makes room at their cost: they must be found, in this life and in
the next ones. A locked one must load, however full the disk is. Whatever loads must be right to the last byte. Bytes:
used <= capacity always; when nothing runs, what is accounted is what lies on the disk, exactly if no operation has
failed in this life.
"""

from __future__ import annotations

import errno
import gc
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.adapter import StoreAnswer, TaskId
from kvcore.l2.backend import Found
from kvcore.l2.envelope import record_bytes
from kvcore.l2.file import MARKER, FileBackend, file_adapter, record_name
from kvcore.l2.index import Entry, Index
from kvcore.l2.indexed import IndexedAdapter
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.clock import SimClock
from kvcore.sim.ports.executor import SimExecutor, WorkFault
from kvcore.sim.ports.files import SimCrash, SimFiles
from kvcore.sim.ports.notice import SimNotice

MS = 1_000_000
KEYS = [ObjectKey(bytes([n]) * 32, "m", 0, 0, "") for n in range(5)]
SIZES = (100, 60)
BATCH = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
SIZE = st.sampled_from((100, 100, 100, 60))
GOOD = (StoreAnswer.STORED, StoreAnswer.PRESENT)
RARELY = st.integers(0, 5).map(lambda number: number == 0)
MOSTLY = st.integers(0, 3).map(lambda number: number > 0)


def payload(key: ObjectKey, size: int) -> bytes:
    return (hashlib.sha256(key.chunk_hash + bytes([size])).digest() * 4)[:size]


@dataclass
class Task:
    """A store or load under way. `certain`: per key, whether it was locked and sound when the load began."""

    keys: list[ObjectKey]
    size: int
    buffers: list[bytearray]
    certain: list[bool]
    doubted: set[ObjectKey] = field(default_factory=set)  # what this store leaves may go at once


class FileMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1 << 16),
        fsync=st.booleans(),
        records=st.sampled_from((None, None, 2, 3, 4)),
        workers=st.integers(1, 3),
    )
    def start(self, seed: int, fsync: bool, records: int | None, workers: int) -> None:
        gc.disable()  # each entry into the loop would collect
        self.loop = SimLoop(seed)
        self.disk = SimFiles(self.loop, fsync=fsync)
        self.capacity = None if records is None else records * record_bytes(KEYS[0], 100) + 30
        self.workers = workers
        self.process = self.loop.process("server")
        self.disk.on_crash = self.process.crash_soon
        self.sound: dict[ObjectKey, int] = {}  # -> its size
        self.rotten: set[ObjectKey] = set()  # PRESENT means nothing for these
        self.lives = 0
        self.adapter: IndexedAdapter | None = None
        self.open()

    def open(self) -> None:
        self.stores: dict[TaskId, Task] = {}
        self.loads: dict[TaskId, Task] = {}
        self.locks: Counter[ObjectKey] = Counter()
        self.trusted = True  # no operation has failed in this life
        self.lives += 1
        self.act(lambda: self.process.run(self.build), 0)

    def build(self) -> None:
        loop = self.loop
        self.executor = SimExecutor(loop, name=f"io{self.lives}", workers=self.workers)
        try:
            self.adapter = file_adapter(
                "tested",
                self.disk,
                executor=self.executor,
                notice_factory=lambda: SimNotice(loop),
                clock=SimClock(loop),
                capacity_bytes=self.capacity,
            )
        except SimCrash:
            return  # during recovery: the process dies as soon as this callback has ended

    def act(self, function: Callable[[], Any], wait_ns: int = 1) -> Any:
        async def step() -> Any:
            result = function()
            done = self.loop.create_future()
            self.loop.call_later_ns(wait_ns, done.set_result, None)
            await done
            return result

        return self.loop.run_until_complete(step())

    def call(self, function: Callable[[], Any]) -> Any:
        """As code of the server, which has to be up."""
        return self.act(lambda: self.process.run(function))

    def is_up(self) -> bool:
        return hasattr(self, "process") and self.process.alive

    def doubt(self, key: ObjectKey) -> None:
        """The record that is there, or is being written, may go."""
        self.sound.pop(key, None)
        for task in self.stores.values():
            task.doubted.add(key)

    def doubt_other_sizes(self, keys: list[ObjectKey], size: int) -> None:
        """A record of another size is replaced by a store, and dropped by a load that cannot use it."""
        for key in keys:
            writing = [task.size for task in self.stores.values() if key in task.keys]
            if {self.sound.get(key, size), *writing} != {size}:
                self.doubt(key)

    # Work

    @precondition(is_up)
    @rule(keys=BATCH, size=SIZE, wait=MOSTLY)
    def store(self, keys: list[ObjectKey], size: int, wait: bool) -> None:
        self.doubt_other_sizes(keys, size)
        buffers = [bytearray(payload(key, size)) for key in keys]
        task = self.call(lambda: self.adapter.submit_store(keys, [memoryview(buffer) for buffer in buffers]))
        others = {key for each in self.stores.values() if each.size != size for key in each.keys}
        self.stores[task] = Task(keys, size, buffers, [], others)
        if wait:
            self.time_passes(20)

    @precondition(is_up)
    @rule(keys=BATCH, size=SIZE, keep=RARELY, wait=MOSTLY)
    def look_up(self, keys: list[ObjectKey], size: int, keep: bool, wait: bool) -> None:
        """Find and lock; then load, and give the locks back at once or later."""
        task = self.call(lambda: self.adapter.submit_lookup_and_lock(keys))
        bits = self.adapter.take_lookup(task)
        found = [key for position, key in enumerate(keys) if bits >> position & 1]
        for key in keys:
            assert key in found or key not in self.sound or self.capacity is not None, "a sound record is not found"
        self.locks.update(found)
        if found:
            self.load(found, size)
        if not keep:
            self.unlock(found)
        if wait:
            self.time_passes(20)

    def load(self, keys: list[ObjectKey], size: int) -> None:
        certain = [self.sound.get(key) == size for key in keys]
        self.doubt_other_sizes(keys, size)
        buffers = [bytearray(size) for _ in keys]
        task = self.call(lambda: self.adapter.submit_load(keys, [memoryview(buffer) for buffer in buffers]))
        self.loads[task] = Task(keys, size, buffers, certain)

    @precondition(is_up)
    @rule(keys=BATCH, size=SIZE)
    def load_without_a_lock(self, keys: list[ObjectKey], size: int) -> None:
        self.load(keys, size)
        if self.capacity is not None:
            self.loads[next(reversed(self.loads))].certain = [False] * len(keys)

    @precondition(lambda self: self.is_up() and self.locks)
    @rule(data=st.data())
    def give_locks_back(self, data: st.DataObject) -> None:
        self.unlock([data.draw(st.sampled_from(sorted(self.locks)))])

    def unlock(self, keys: list[ObjectKey]) -> None:
        if not self.process.alive:
            return
        self.locks.subtract(keys)
        self.locks = +self.locks
        self.call(lambda: self.adapter.submit_unlock(keys))

    @precondition(is_up)
    @rule(keys=BATCH, really=RARELY)
    def delete(self, keys: list[ObjectKey], really: bool) -> None:
        if really:
            for key in keys:
                self.doubt(key)
            self.call(lambda: self.adapter.delete(keys))

    @rule(wait_ms=st.sampled_from((0, 1, 20)))
    def time_passes(self, wait_ms: int) -> None:
        self.act(lambda: None, wait_ms * MS + 1)
        self.collect()

    def collect(self) -> None:
        """Take what has completed and hold it against the model."""
        if not self.process.alive:
            return
        for task, answers in self.adapter.pop_completed_stores().items():
            entry = self.stores.pop(task)
            for key, answer in zip(entry.keys, answers, strict=True):
                assert self.capacity is not None or not self.trusted or answer in (*GOOD, StoreAnswer.RETRY)
                if answer is StoreAnswer.STORED and key not in entry.doubted:
                    self.rotten.discard(key)
                if answer in GOOD and key not in entry.doubted and key not in self.rotten:
                    self.sound[key] = entry.size
        for task in list(self.loads):
            bits = self.adapter.take_load(task)
            if bits is not None:
                self.check_load(self.loads.pop(task), bits)

    def check_load(self, task: Task, bits: int) -> None:
        for position, key in enumerate(task.keys):
            if bits >> position & 1:
                assert bytes(task.buffers[position]) == payload(key, task.size), "a wrong byte"
            elif task.certain[position] and self.trusted and key in self.sound:
                raise AssertionError("a sound record does not load")
            else:
                self.sound.pop(key, None)

    # Trouble

    @precondition(is_up)
    @rule(after=st.integers(0, 9), torn=st.booleans(), really=RARELY)
    def power_will_fail(self, after: int, torn: bool, really: bool) -> None:
        if really:
            self.disk.crash_after(after, torn=torn)

    @precondition(is_up)
    @rule(torn=st.booleans(), really=RARELY)
    def power_fails(self, torn: bool, really: bool) -> None:
        if really:
            self.act(lambda: self.disk.kill(torn=torn))

    @precondition(lambda self: hasattr(self, "process") and not self.process.alive)
    @rule(again=st.none() | st.integers(0, 6), torn=st.booleans())
    def restart(self, again: int | None, torn: bool) -> None:
        """Perhaps the next crash comes during recovery."""
        if not self.disk.fsync:
            self.sound.clear()  # whether a page cache was lost is the draw of whoever crashed
        self.disk.restart()
        self.process.restart()
        if again is not None:
            self.disk.crash_after(again, torn=torn)
        self.open()
        if self.process.alive and again is None:
            self.check_recovered()

    def check_recovered(self) -> None:
        """The index is what lies there; nothing temporary is left; what was sound is found."""
        assert not [name for name in self.disk.names if ".tmp-" in name], "a temporary file outlives a start"
        assert self.adapter.usage().bytes_used == self.disk.bytes_stored - len(MARKER), "accounted is not what is there"
        if self.capacity is None:
            assert self.sound.keys() <= set(self.adapter.keys()), "a restart loses a sound record"

    @precondition(is_up)
    @rule(
        n=st.integers(1, 6),
        number=st.sampled_from((errno.EIO, errno.ENOSPC)),
        kind=st.none() | st.just("unlink"),
        really=RARELY,
    )
    def an_operation_will_fail(self, n: int, number: int, kind: str | None, really: bool) -> None:
        if really:
            self.trusted = False
            self.disk.fail_op(n, number, kind)

    @precondition(is_up)
    @rule(fault=st.sampled_from((None, None, None, WorkFault.FAIL_AFTER)))
    def outcomes_get_lost(self, fault: WorkFault | None) -> None:
        self.trusted = self.trusted and fault is None
        self.executor.before = None if fault is None else lambda index: fault if index % 2 else None

    @precondition(lambda self: hasattr(self, "disk") and self.records())
    @rule(data=st.data(), how=st.sampled_from(("flip", "cut", "lose", "swap")), where=st.integers(0, 1 << 12))
    def a_record_rots(self, data: st.DataObject, how: str, where: int) -> None:
        key, other = data.draw(st.sampled_from(self.records())), self.records()[where % len(self.records())]
        name = record_name(key)
        self.doubt(key)
        self.rotten.add(key)
        self.trusted = False
        size = len(self.disk.data(name))
        if how == "flip" and size:
            self.disk.flip_bit(name, where % (8 * size))
        elif how == "cut":
            self.disk.truncate(name, where % (size + 1))
        elif how == "lose":
            self.disk.vanish(name)
        elif len(self.disk.data(record_name(other))) == size:  # else the bytes of each name are not what was accounted
            self.doubt(other)
            self.rotten.add(other)
            self.disk.swap(name, record_name(other))

    def records(self) -> list[ObjectKey]:
        return [key for key in KEYS if record_name(key) in self.disk.names]

    # What must hold

    @invariant()
    def bytes_add_up(self) -> None:
        if not self.is_up() or self.adapter is None:
            return
        self.adapter.check()
        state = self.adapter.statistics()
        there = self.disk.bytes_stored - len(MARKER)
        assert self.capacity is None or state.bytes_used + state.bytes_reserved <= self.capacity
        assert self.capacity is None or there <= self.capacity, "the disk holds more than its budget"
        if not state.work_inflight:
            assert there <= state.bytes_used, "bytes on the disk that nobody accounts for"
            assert there == state.bytes_used or not self.trusted, "phantom bytes"
        assert state.locked == len(self.locks), "a lock nobody has, or one that was lost"

    def teardown(self) -> None:
        """Trouble ends; all work ends; a last start finds what must be there, and the store works."""
        if not hasattr(self, "loop"):
            return
        try:
            self.finish()
        finally:
            self.loop.close()
            gc.enable()

    def finish(self) -> None:
        if self.process.alive:
            self.disk.crash_after(10**6)
            self.executor.before = None
            self.time_passes(10_000)
            assert self.adapter.work_inflight == 0
            assert not self.stores, "a store never completes"
            assert not self.loads, "a load never completes"
            self.act(lambda: self.disk.kill())
        self.restart(None, False)
        self.locks.clear()
        rotten = KEYS[0] in self.rotten
        loaded = [self.store_and_load() for _ in range(2)]
        assert loaded[-1] == payload(KEYS[0], SIZES[0]), "after all the trouble a record can not be stored and loaded"
        assert loaded[0] == loaded[1] or loaded[0] is None, "a wrong byte"
        assert loaded[0] is not None or rotten, "a good record is a miss"

    def store_and_load(self) -> bytes | None:
        """A record that has rotted counts as PRESENT until its first load has failed."""
        self.store([KEYS[0]], SIZES[0], True)
        buffer = bytearray(SIZES[0])
        task = self.call(lambda: self.adapter.submit_load([KEYS[0]], [memoryview(buffer)]))
        self.act(lambda: None, 20 * MS)
        return bytes(buffer) if self.adapter.take_load(task) else None


TestFileL2 = FileMachine.TestCase
TestFileL2.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2, stateful_step_count=40, deadline=None
)


# --- planted bugs


def test_a_checksum_that_is_not_looked_at_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R16: a torn, flipped or misdirected record is served."""
    monkeypatch.setattr(envelope, "check_record", lambda key, header, into, bytes_read: None)
    assert finds(FileMachine)


def test_a_write_without_a_temporary_file_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R19, R29: "exists" is true while the value is not there; the next start finds half a record, and keeps it."""

    def write(self: FileBackend, key: ObjectKey, data: memoryview) -> None:
        with self._work():
            self._make_directory(record_name(key).partition("/")[0])
            self._files.write(record_name(key), [envelope.encode_header(key, data), data])

    monkeypatch.setattr(FileBackend, "write", write)
    monkeypatch.setattr(FileBackend, "_read_header", _believe_the_header)
    assert finds(FileMachine)


def _believe_the_header(self: FileBackend, name: str, size: int) -> Any:
    key = next(key for key in KEYS if record_name(key) == name)
    return Found(key, SIZES[0], size)


def test_temporary_files_that_a_start_leaves_are_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SimFiles.unlink
    monkeypatch.setattr(SimFiles, "unlink", lambda self, name: None if ".tmp-" in name else original(self, name))
    assert finds(FileMachine) in ("a temporary file outlives a start", "bytes on the disk that nobody accounts for")


def test_an_eviction_of_a_locked_record_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R08: looked up and locked, and gone when the load comes."""
    monkeypatch.setattr(Entry, "idle", property(lambda self: not self.loads))
    assert finds(FileMachine)


def test_an_overwrite_that_counts_twice_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R52: phantom bytes."""
    original = Index.deleted

    def deleted(self: Index, entry: Entry, successor: Entry | None = None) -> None:
        original(self, entry, successor)
        if successor is not None and successor.key == entry.key:
            self.bytes_used += entry.record_bytes

    monkeypatch.setattr(Index, "deleted", deleted)
    assert finds(FileMachine)


def test_a_failed_write_that_is_forgotten_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R19: what a failed store has left behind is neither removed nor accounted."""
    monkeypatch.setattr(FileBackend, "_clean_up", lambda self, key, temporary, name, error: None)
    assert finds(FileMachine)

"""What adapters with an index of their own promise beyond `kvcore.l2.checks`: exact accounting, what runs when, locks.

The checks (`test_l2_checks.py`) hold for every store and see nothing but the adapter. Here the executor is a gate that
keeps work back, so each overlap can be staged, and the index is walked after each scenario.
"""

from __future__ import annotations

import asyncio

import pytest

from kvcore.errors import CallerError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import LockKind, StoreAnswer
from kvcore.l2.checks import bed
from kvcore.l2.envelope import record_bytes
from kvcore.l2.file import file_adapter
from kvcore.l2.memory import MemoryBackend, memory_adapter
from kvcore.quota import Quota
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.files import OsFiles
from kvcore.runtime.notice import EventfdNotice
from kvcore.sim.ports.clock import SimClock
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.files import SimFiles
from kvcore.sim.ports.notice import SimNotice
from kvcore.sim.unreliable import UnreliableAdapter, UnreliableBackend
from kvcore.sim.weak import WeakLocks

STORED, PRESENT, FULL, RETRY = StoreAnswer.STORED, StoreAnswer.PRESENT, StoreAnswer.FULL, StoreAnswer.RETRY
STRONG_PORTS = ["memory", "file", "file-in-memory", "memory-sim-1", "memory-sim-2", "file-sim-1", "file-sim-2"]
STRONG_PORTS += ["unreliable-memory-sim-1", "unreliable-file-sim-2"]  # with nothing that goes wrong
WEAK_PORTS = ["weak-memory", "weak-file", "weak-memory-sim-1", "weak-file-sim-2"]

every_adapter = pytest.mark.parametrize("port", STRONG_PORTS + WEAK_PORTS)
strong_locks = pytest.mark.parametrize("port", STRONG_PORTS)
weak_locks = pytest.mark.parametrize("port", WEAK_PORTS)


class Gate:
    """An executor that can be told to keep what is submitted until it is released."""

    def __init__(self, inner):
        self.inner = inner
        self.held = None
        self.submitted = 0

    def hold(self):
        self.held = []

    def release(self):
        held, self.held = self.held, None
        for arguments in held:
            self.inner.submit(*arguments)

    def submit(self, work, deliver, cost_bytes=0):
        self.submitted += 1
        if self.held is None:
            self.inner.submit(work, deliver, cost_bytes)
        else:
            self.held.append((work, deliver, cost_bytes))

    def close(self):
        self.inner.close()


class Place:
    """One store (a directory, a dict) and the adapters opened on it one after the other."""

    def __init__(self, port, path):
        self.port = port
        self.medium = self._medium(path)

    def _medium(self, path):
        if "memory" in self.port and "file" not in self.port:
            return MemoryBackend()
        return OsFiles(path) if self.port in ("file", "weak-file") else SimFiles()

    def open(self, capacity_bytes=None, quota=None):
        loop = asyncio.get_running_loop()
        simulated = "sim-" in self.port
        self.gate = Gate(SimExecutor(loop, latency_ns=(1_000, 90_000)) if simulated else ThreadExecutor(loop, 3))
        shared = {
            "executor": self.gate,
            "notice_factory": lambda: SimNotice(loop) if simulated else EventfdNotice(loop),
            "capacity_bytes": capacity_bytes,
            "quota": quota,
        }
        if isinstance(self.medium, MemoryBackend):
            strong = memory_adapter("tested", backend=self.medium, **shared)
        else:
            clock = SimClock(loop) if simulated else SystemClock()
            strong = file_adapter("tested", self.medium, clock=clock, **shared)
        adapter = WeakLocks(strong) if self.port.startswith("weak") else strong
        if self.port.startswith("unreliable"):
            strong._backend = UnreliableBackend(strong._backend)
            adapter = UnreliableAdapter(strong, loop)
        return Client(adapter, strong, self.gate)


class Client(bed.Client):
    """With the adapter below the weak locks, and the gate before the executor."""

    def __init__(self, adapter, strong, gate):
        super().__init__(adapter, gate)
        self.strong, self.gate = strong, gate

    def close(self):
        super().close()
        self.gate.close()


def key(name, *, salt="", model="model", rank=0, group=0):
    return ObjectKey(str(name).encode().ljust(32, b"."), model, rank, group, salt)


def many(count, size=100):
    keys = [key(number) for number in range(count)]
    return keys, [payload(number, size) for number in range(count)]


def payload(number, size=100):
    return bytes((number * 7 + position) % 251 for position in range(size))


def size_of(count, size=100):
    """Capacity for exactly `count` records of `many`."""
    return count * record_bytes(key(0), size)


@pytest.fixture
def check(world, port, tmp_path):
    """Run a scenario with an opened client; at its end the index must be sound."""

    def run(scenario, capacity_bytes=None, quota=None):
        async def opened():
            place = Place(port, tmp_path / "store")
            client = place.open(capacity_bytes, quota)
            assert client.adapter.lock_strength.kind is (LockKind.NONE if port.startswith("weak") else LockKind.STRONG)
            arguments = (client, place) if scenario.__code__.co_argcount == 2 else (client,)
            await scenario(*arguments)
            if client.gate.held is None and client.gate is place.gate:
                await settle(client)
            client.close()

        world.run(opened)

    return run


async def settle(client):
    if not client.strong._closed:
        await client.at_rest()
        client.strong.check()


# --- results and notices -------------------------------------------------------------------------------------------


@every_adapter
def test_a_task_that_is_running_or_unknown_answers_none(check):
    async def scenario(client):
        keys, payloads = many(1)
        await client.store(keys, payloads)
        client.gate.hold()
        load = client.adapter.submit_load(keys, [memoryview(bytearray(100))])
        assert client.adapter.take_load(load) is None
        assert client.adapter.take_load(load + 1000) is None
        assert client.adapter.take_lookup(load) is None
        store = client.adapter.submit_store([key("new")], [memoryview(b"x")])
        assert client.adapter.pop_completed_stores() == {}
        client.gate.release()
        assert await client.loaded(load) == 1
        assert await client.stored(store) == [STORED]

    check(scenario)


# --- batches -------------------------------------------------------------------------------------------------------


@every_adapter
def test_a_key_twice_in_a_store_is_written_once_and_answered_twice(check):
    async def scenario(client):
        keys, payloads = many(2)
        answers = await client.store([keys[0], keys[1], keys[0]], [payloads[0], payloads[1], payloads[0]])
        assert answers == [STORED, STORED, PRESENT]
        assert client.adapter.usage().objects == 2
        assert client.adapter.usage().bytes_used == size_of(2)

    check(scenario)


@strong_locks
def test_a_key_twice_in_a_lookup_is_locked_twice(check):
    async def scenario(client):
        keys, payloads = many(2)
        await client.store(keys[:1], payloads[:1])
        assert await client.lookup(keys[:1] * 2) == 0b11
        client.adapter.submit_unlock(keys[:1])
        assert client.adapter.usage().locked == 1
        assert await client.store(keys[1:], payloads[1:]) == [FULL]
        client.adapter.submit_unlock(keys[:1])
        assert client.adapter.usage().locked == 0
        assert await client.store(keys[1:], payloads[1:]) == [STORED]

    check(scenario, capacity_bytes=size_of(1))


# --- names, sizes, buffers -----------------------------------------------------------------------------------------


@every_adapter
def test_wrong_buffers_are_the_callers_mistake_and_change_nothing(check):
    async def scenario(client):
        good = memoryview(bytearray(8))
        for keys, buffers in [([key(1)], []), ([key(1), key(2)], [good]), ([key(1)], [good[::2]]), ([key(1)], [b"x"])]:
            with pytest.raises(CallerError):
                client.adapter.submit_store(keys, buffers)
            with pytest.raises(CallerError):
                client.adapter.submit_load(keys, buffers)
        with pytest.raises(CallerError):
            client.adapter.submit_load([key(1)], [memoryview(b"read-only")])
        assert client.adapter.usage().objects == 0
        assert client.gate.submitted == 0

    check(scenario)


@every_adapter
def test_a_load_of_another_size_is_a_miss_and_not_a_remembered_yes(check):
    """R17 b: a lookup must not go on promising what no load can deliver."""

    async def scenario(client):
        for wrong_bytes in (0, 99, 101, 5000):
            assert await client.store([key("odd")], [payload(1)]) == [STORED]
            bits, _ = await client.load([key("odd")], [wrong_bytes])
            assert bits == 0
            assert await client.lookup([key("odd")]) == 0
        assert client.strong.statistics().other_size == 4

    check(scenario)


@every_adapter
def test_a_store_of_another_size_replaces_the_record(check):
    """R52: overwriting by another size must not leave phantom bytes."""

    async def scenario(client):
        for size in (100, 10, 180, 100):
            assert await client.store([key("a")], [payload(1, size)]) == [STORED]
            assert client.adapter.usage().bytes_used == record_bytes(key("a"), size)
            assert (await client.load([key("a")], [size]))[1] == [payload(1, size)]

    check(scenario, capacity_bytes=size_of(1, 200))


# --- delete, scan, usage -------------------------------------------------------------------------------------------


@every_adapter
def test_a_deleted_object_is_gone(check):
    async def scenario(client):
        keys, payloads = many(3)
        await client.store(keys, payloads)
        client.adapter.delete([keys[1], key("unknown"), keys[1]])
        assert await client.lookup(keys) == 0b101
        assert client.adapter.keys() == [keys[0], keys[2]]
        assert (await client.load(keys, [100] * 3))[0] == 0b101
        client.adapter.submit_unlock([keys[0], keys[2]])
        await client.at_rest()
        assert client.adapter.usage().bytes_used == size_of(2)

    check(scenario)


@every_adapter
def test_a_key_deleted_while_it_is_written_is_gone_afterwards(check):
    async def scenario(client):
        keys, payloads = many(1)
        client.gate.hold()
        task = client.adapter.submit_store(keys, [memoryview(payloads[0])])
        client.adapter.delete(keys)
        client.gate.release()
        assert await client.stored(task) == [STORED]
        assert await client.lookup(keys) == 0
        await client.at_rest()
        assert client.adapter.usage().bytes_used == 0

    check(scenario)


@every_adapter
def test_usage_is_the_sum_of_what_is_there(check):
    async def scenario(client):
        usage = client.adapter.usage()
        assert (usage.bytes_used, usage.objects, usage.locked) == (0, 0, 0)
        assert usage.bytes_capacity == 10_000
        keys, payloads = many(4)
        await client.store(keys, payloads)
        await client.store(keys, payloads)
        usage = client.adapter.usage()
        assert (usage.bytes_used, usage.objects) == (size_of(4), 4)

    check(scenario, capacity_bytes=10_000)


@every_adapter
def test_store_and_delete_a_thousand_times_leave_nothing_behind(check):
    """R52: counters that drift."""

    async def scenario(client):
        keys, payloads = many(20)
        for _ in range(50):
            assert await client.store(keys, payloads) == [STORED] * 20
            client.adapter.delete(keys)
        await client.at_rest()
        usage = client.adapter.usage()
        assert (usage.bytes_used, usage.objects, usage.locked) == (0, 0, 0)

    check(scenario, capacity_bytes=size_of(20))


# --- capacity and eviction -----------------------------------------------------------------------------------------


@every_adapter
def test_a_full_store_evicts_what_was_not_used_for_longest(check):
    async def scenario(client):
        keys, payloads = many(5)
        await client.store(keys[:3], payloads[:3])
        client.adapter.submit_unlock(keys[:1] if await client.lookup(keys[:1]) else [])
        assert await client.store(keys[3:], payloads[3:]) == [STORED] * 2
        assert client.adapter.keys() == [keys[0], keys[3], keys[4]]
        assert client.adapter.usage().bytes_used == size_of(3)
        assert client.strong.statistics().evictions == 2

    check(scenario, capacity_bytes=size_of(3))


@every_adapter
def test_of_a_prefix_that_was_looked_up_the_end_is_evicted_first(check):
    """S39: what is left of a prefix without its beginning serves nobody."""

    async def scenario(client):
        keys, payloads = many(6)
        await client.store(keys[:4], payloads[:4])
        assert await client.lookup(keys[:4]) == 0b1111
        client.adapter.submit_unlock(keys[:4])
        assert await client.store(keys[4:], payloads[4:]) == [STORED] * 2
        assert client.adapter.keys() == [keys[0], keys[1], keys[4], keys[5]]

    check(scenario, capacity_bytes=size_of(4))


@every_adapter
def test_a_put_that_is_repeated_costs_no_room(check):
    """R52: budget 2S; put a, put a again, put b: b is accepted and 2S are used."""

    async def scenario(client):
        keys, payloads = many(2)
        assert await client.store(keys[:1], payloads[:1]) == [STORED]
        assert await client.store(keys[:1], payloads[:1]) == [PRESENT]
        assert await client.store(keys[1:], payloads[1:]) == [STORED]
        assert client.adapter.usage().bytes_used == size_of(2)
        assert await client.lookup(keys) == 0b11

    check(scenario, capacity_bytes=size_of(2))


@every_adapter
def test_an_object_larger_than_the_store_is_refused_and_evicts_nothing(check):
    async def scenario(client):
        keys, payloads = many(2)
        await client.store(keys, payloads)
        assert await client.store([key("huge")], [payload(9, 10_000)]) == [FULL]
        assert client.adapter.keys() == keys

    check(scenario, capacity_bytes=size_of(3))


@every_adapter
def test_a_batch_larger_than_the_store_stops_at_the_capacity(check):
    async def scenario(client):
        keys, payloads = many(10)
        answers = await client.store(keys, payloads)
        assert answers == [STORED] * 4 + [FULL] * 6
        assert client.adapter.usage().bytes_used == size_of(4)

    check(scenario, capacity_bytes=size_of(4) + 50)


@every_adapter
def test_a_tenant_with_a_quota_evicts_only_its_own(check):
    async def scenario(client):
        a = [key(number, salt="a") for number in range(4)]
        b = [key(number, salt="b") for number in range(4)]
        for number in range(4):
            assert await client.store([a[number], b[number]], [payload(number)] * 2) == [STORED] * 2
        assert client.adapter.keys() == [b[0], b[1], a[2], b[2], a[3], b[3]]
        assert await client.store([key("big", salt="a")], [payload(1, 1000)]) == [FULL]

    one = record_bytes(key(0, salt="a"), 100)
    check(scenario, capacity_bytes=20 * one, quota=Quota({"a": 2 * one}))


@strong_locks
def test_locked_objects_are_never_evicted(check):
    async def scenario(client):
        keys, payloads = many(4)
        await client.store(keys[:2], payloads[:2])
        assert await client.lookup(keys[:2]) == 0b11
        assert await client.store(keys[2:3], payloads[2:3]) == [FULL]
        assert (await client.load(keys[:2], [100] * 2))[1] == payloads[:2]
        client.adapter.submit_unlock(keys[:1])
        assert await client.store(keys[2:], payloads[2:]) == [STORED, FULL]
        assert client.adapter.keys() == [keys[1], keys[2]]

    check(scenario, capacity_bytes=size_of(2))


@every_adapter
def test_an_object_that_is_being_loaded_is_not_evicted(check):
    async def scenario(client):
        keys, payloads = many(2)
        await client.store(keys[:1], payloads[:1])
        client.gate.hold()
        buffer = bytearray(100)
        load = client.adapter.submit_load(keys[:1], [memoryview(buffer)])
        assert await client.store(keys[1:], payloads[1:]) == [FULL]
        client.gate.release()
        assert await client.loaded(load) == 1
        assert buffer == payloads[0]
        assert await client.store(keys[1:], payloads[1:]) == [STORED]

    check(scenario, capacity_bytes=size_of(1))


@every_adapter
def test_room_is_reserved_when_a_store_is_submitted(check):
    async def scenario(client):
        keys, payloads = many(3)
        client.gate.hold()
        first = client.adapter.submit_store(keys[:2], [memoryview(data) for data in payloads[:2]])
        assert await client.store(keys[2:], payloads[2:]) == [FULL]
        assert client.adapter.usage().bytes_used == 0
        client.gate.release()
        assert await client.stored(first) == [STORED] * 2

    check(scenario, capacity_bytes=size_of(2))


# --- two at once ---------------------------------------------------------------------------------------------------


@every_adapter
def test_a_store_of_a_present_key_needs_no_io(check):
    async def scenario(client):
        keys, payloads = many(3)
        await client.store(keys, payloads)
        submitted = client.gate.submitted
        assert await client.store(keys, payloads) == [PRESENT] * 3
        assert client.gate.submitted == submitted

    check(scenario)


@every_adapter
def test_a_lookup_needs_no_io(check):
    async def scenario(client):
        keys, payloads = many(3)
        await client.store(keys, payloads)
        client.gate.hold()
        assert await client.lookup(keys) == 0b111
        assert client.gate.held == []
        client.gate.release()

    check(scenario)


@every_adapter
def test_a_second_store_of_a_key_joins_the_first(check):
    async def scenario(client):
        keys, payloads = many(1)
        client.gate.hold()
        tasks = [client.adapter.submit_store(keys, [memoryview(payloads[0])]) for _ in range(3)]
        assert len(client.gate.held) == 1
        client.gate.release()
        assert [await client.stored(task) for task in tasks] == [[STORED], [PRESENT], [PRESENT]]
        assert client.strong.statistics().bytes_in == 100

    check(scenario)


@every_adapter
def test_a_joined_store_of_another_size_has_the_last_word(check):
    async def scenario(client):
        client.gate.hold()
        tasks = [client.adapter.submit_store([key(1)], [memoryview(payload(1, size))]) for size in (50, 80)]
        client.gate.release()
        assert [await client.stored(task) for task in tasks] == [[STORED], [STORED]]
        assert (await client.load([key(1)], [80]))[1] == [payload(1, 80)]

    check(scenario)


@every_adapter
def test_what_is_being_written_is_not_visible(check):
    async def scenario(client):
        keys, payloads = many(1)
        client.gate.hold()
        task = client.adapter.submit_store(keys, [memoryview(payloads[0])])
        assert await client.lookup(keys) == 0
        assert (await client.load(keys, [100]))[0] == 0
        assert client.adapter.keys() == []
        client.gate.release()
        assert await client.stored(task) == [STORED]
        assert await client.lookup(keys) == 1

    check(scenario)


@every_adapter
def test_a_store_during_a_deletion_waits_for_it(check):
    async def scenario(client):
        keys, _ = many(1)
        await client.store(keys, [payload(1)])
        client.gate.hold()
        client.adapter.delete(keys)
        tasks = [client.adapter.submit_store(keys, [memoryview(payload(2))]) for _ in range(2)]
        assert len(client.gate.held) == 1
        assert await client.lookup(keys) == 0
        client.gate.release()
        assert [await client.stored(task) for task in tasks] == [[STORED], [PRESENT]]
        assert (await client.load(keys, [100]))[1] == [payload(2)]

    check(scenario)


@every_adapter
def test_a_store_of_an_evicted_key_waits_for_its_eviction(check):
    async def scenario(client):
        keys, payloads = many(3)
        await client.store(keys[:2], payloads[:2])
        client.gate.hold()
        first = client.adapter.submit_store(keys[2:], [memoryview(payloads[2])])
        again = client.adapter.submit_store(keys[:1], [memoryview(payloads[0])])
        assert len(client.gate.held) == 1
        client.gate.release()
        assert await client.stored(first) == [STORED]
        assert await client.stored(again) == [STORED]
        assert sorted(client.adapter.keys()) == sorted([keys[0], keys[2]])
        assert (await client.load(keys[:1], [100]))[1] == payloads[:1]

    check(scenario, capacity_bytes=size_of(2))


# --- locks ---------------------------------------------------------------------------------------------------------


@strong_locks
def test_a_deleted_object_that_is_locked_goes_with_its_last_unlock(check):
    async def scenario(client):
        keys, payloads = many(1)
        await client.store(keys, payloads)
        assert await client.lookup(keys * 2) == 0b11
        client.adapter.delete(keys)
        assert await client.lookup(keys) == 0
        assert client.adapter.keys() == []
        assert await client.store(keys, payloads) == [RETRY]
        client.adapter.submit_unlock(keys)
        assert (await client.load(keys, [100]))[1] == payloads
        client.adapter.submit_unlock(keys)
        assert (await client.load(keys, [100]))[0] == 0
        await client.at_rest()
        assert client.adapter.usage().bytes_used == 0
        assert await client.store(keys, payloads) == [STORED]

    check(scenario)


@strong_locks
def test_an_unlock_without_a_lock_is_counted_and_takes_nobody_elses(check):
    async def scenario(client):
        keys, payloads = many(2)
        await client.store(keys[:1], payloads[:1])
        client.adapter.submit_unlock([keys[0], key("unknown")])
        assert client.strong.statistics().unlocks_unmatched == 2
        assert await client.lookup(keys[:1]) == 1
        client.adapter.submit_unlock(keys[1:])
        assert client.adapter.usage().locked == 1
        assert await client.store(keys[1:], payloads[1:]) == [FULL]
        client.adapter.submit_unlock(keys[:1])
        client.adapter.submit_unlock(keys[:1])
        assert client.strong.statistics().unlocks_unmatched == 4
        assert await client.store(keys[1:], payloads[1:]) == [STORED]

    check(scenario, capacity_bytes=size_of(1))


@strong_locks
def test_an_unlock_needs_no_completed_lookup(check):
    async def scenario(client):
        keys, payloads = many(1)
        await client.store(keys, payloads)
        task = client.adapter.submit_lookup_and_lock(keys)
        assert client.adapter.usage().locked == 1
        assert await client.looked_up(task) == 1
        client.adapter.submit_unlock(keys)
        assert client.adapter.usage().locked == 0

    check(scenario)


@weak_locks
def test_with_weak_locks_a_key_may_vanish_between_lookup_and_load(check):
    async def scenario(client):
        keys, payloads = many(3)
        await client.store(keys[:2], payloads[:2])
        assert await client.lookup(keys[:2]) == 0b11
        assert client.adapter.usage().locked == 0
        assert await client.store(keys[2:], payloads[2:]) == [STORED]
        bits, buffers = await client.load(keys[:2], [100] * 2)
        assert bits == 0b01
        assert buffers[0] == payloads[0]
        client.adapter.submit_unlock(keys[:2])

    check(scenario, capacity_bytes=size_of(2))


@weak_locks
def test_an_unlock_of_a_weak_lock_unlocks_nothing_twice(check):
    async def scenario(client):
        keys, payloads = many(1)
        await client.store(keys, payloads)
        assert await client.lookup(keys * 3) == 0b111
        client.adapter.submit_unlock(keys * 3)
        assert client.strong.statistics().unlocks_unmatched == 0
        assert client.adapter.unlocks_ignored == 3

    check(scenario)


# --- close and restart ---------------------------------------------------------------------------------------------


@every_adapter
def test_close_with_work_outstanding_announces_nothing_more(check):
    async def scenario(client):
        keys, payloads = many(2)
        await client.store(keys[:1], payloads[:1])
        before = dict(client.notices)
        client.gate.hold()
        store = client.adapter.submit_store(keys[1:], [memoryview(payloads[1])])
        load = client.adapter.submit_load(keys[:1], [memoryview(bytearray(100))])
        lookup = client.adapter.submit_lookup_and_lock(keys)
        client.adapter.close()
        client.gate.release()
        await client.at_rest()
        assert client.notices == before
        assert store not in client.adapter.pop_completed_stores()
        assert client.adapter.take_load(load) is None
        assert client.adapter.take_lookup(lookup) is None

    check(scenario)


@every_adapter
def test_a_restart_finds_the_records_and_not_the_locks(check):
    async def scenario(client, place):
        keys, payloads = many(6)
        await client.store(keys, payloads)
        await client.lookup(keys[:3])
        client.adapter.delete(keys[5:])
        await client.at_rest()
        client.close()
        again = place.open(10_000)
        usage = again.adapter.usage()
        assert (usage.bytes_used, usage.objects, usage.locked) == (size_of(5), 5, 0)
        assert sorted(again.adapter.keys()) == sorted(keys[:5])
        assert await again.store(keys[:1], payloads[:1]) == [PRESENT]
        bits, buffers = await again.load(keys, [100] * 6)
        assert bits == 0b11111
        assert buffers[:5] == payloads[:5]
        again.close()

    check(scenario)


@every_adapter
def test_a_restart_with_less_room_shrinks_to_it(check):
    async def scenario(client, place):
        keys, payloads = many(8)
        await client.store(keys, payloads)
        client.close()
        again = place.open(size_of(3) + 5)
        assert again.adapter.usage().objects == 3
        assert again.adapter.usage().bytes_used == size_of(3)
        assert (await again.load(again.adapter.keys(), [100] * 3))[0] == 0b111
        again.close()

    check(scenario)


@every_adapter
def test_the_index_stays_sound_under_many_overlapping_batches(check):
    """All kinds of work in flight at once; every load is the right bytes or a miss, and nothing leaks."""

    async def scenario(client):
        async def user(number):
            for step in range(12):
                chosen = [key((number * 5 + step * 3 + offset) % 16) for offset in range(4)]
                data = [payload(int(one.chunk_hash.rstrip(b".")), 100) for one in chosen]
                await client.store(chosen, data)
                found = await client.lookup(chosen)
                held = [one for position, one in enumerate(chosen) if found >> position & 1]
                bits, buffers = await client.load(chosen, [100] * 4)
                assert all(buffers[i] == data[i] for i in range(4) if bits >> i & 1)
                if client.adapter.lock_strength.kind is LockKind.STRONG:
                    assert bits & found == found
                if step % 3 == number % 3:
                    client.adapter.delete(chosen[:1])
                client.adapter.submit_unlock(held)
                assert client.adapter.usage().bytes_used <= size_of(6)

        async with asyncio.TaskGroup() as users:
            for number in range(5):
                users.create_task(user(number))
        await client.at_rest()
        assert client.adapter.usage().locked == 0
        assert client.strong.statistics().unlocks_unmatched == 0
        assert client.strong.statistics().load_hits > 0

    check(scenario, capacity_bytes=size_of(6))

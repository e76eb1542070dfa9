"""The adapter over a store that others use too: what it may believe, what it must ask, and what it never does."""

from __future__ import annotations

import pytest

from kvcore.errors import CallerError, ConfigError, StoreError
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.quota import Quota

STORED, PRESENT, FULL, RETRY = StoreAnswer.STORED, StoreAnswer.PRESENT, StoreAnswer.FULL, StoreAnswer.RETRY


@pytest.fixture
def store(kit):
    return kit.store()


@pytest.fixture
def begin(kit, store):
    """Processes on the store; at the end each must be sound."""
    processes = []

    def make(**limits):
        processes.append(kit.process(store, **limits))
        return processes[-1].ready()

    yield make
    for process in processes:
        process.hands.run_all()
        process.adapter.check()


def test_what_one_process_stored_another_finds_and_loads(kit, begin):
    first, second = begin(), begin()
    keys, payloads = kit.many(range(10))
    assert first.store(keys, payloads) == [STORED] * 10
    assert second.lookup([*keys, kit.key(99)]) == (1 << 10) - 1
    bits, buffers = second.load(keys, [100] * 10)
    assert bits == (1 << 10) - 1
    assert buffers == payloads
    assert second.adapter.usage().bytes_used == kit.size_of(10)  # a load tells the length
    assert second.adapter.usage().locked == 10
    second.adapter.submit_unlock(keys)
    assert second.adapter.usage().locked == 0


def test_a_key_twice_is_written_once_and_read_into_both_buffers(kit, store, begin):
    process = begin()
    keys, payloads = kit.many([1, 1, 2])
    assert process.store(keys, payloads) == [STORED, PRESENT, STORED]
    assert store.writes == 2
    assert process.load(keys, [100] * 3) == (0b111, payloads)
    assert process.lookup(keys) == 0b111
    process.adapter.submit_unlock(keys[:1])
    assert process.adapter.usage().locked == 2


def test_a_second_store_of_a_key_waits_for_the_first_and_shares_its_failure(kit, store, begin):
    process = begin()
    keys, payloads = kit.many([1])
    views = [memoryview(payloads[0])]
    store.failing.add(keys[0])
    tasks = [process.adapter.submit_store(keys, views) for _ in range(3)]
    assert len(process.hands.pieces) == 1
    process.hands.run_all()
    assert process.adapter.pop_completed_stores() == {task: [RETRY] for task in tasks}
    assert process.adapter.statistics().io_errors == 1


def test_a_waiting_store_of_another_length_is_written_after_the_first(kit, store, begin):
    process = begin()
    key = kit.key(1)
    first = process.adapter.submit_store([key], [memoryview(bytes(10))])
    second = process.adapter.submit_store([key], [memoryview(bytes(20))])
    process.hands.run_all()
    assert process.adapter.pop_completed_stores() == {first: [STORED], second: [STORED]}
    assert process.load([key], [20]) == (1, [bytes(20)])
    assert process.adapter.usage().bytes_used == kit.size_of(1, 20)


def test_results_are_per_key_whatever_the_store_does_to_the_others(kit, store, begin):
    process = begin()
    keys, payloads = kit.many(range(9))
    store.failing.update(keys[1::3])
    assert process.store(keys, payloads) == [STORED, RETRY, STORED] * 3
    assert process.lookup(keys) == 0b101101101
    assert process.load(keys, [100] * 9)[0] == 0b101101101


def test_a_store_that_raises_or_miscounts_loses_no_batch(kit, store, begin, monkeypatch):
    process = begin()
    keys, payloads = kit.many(range(6))
    store.down = OSError(5, "down")
    assert process.store(keys, payloads) == [RETRY] * 6
    assert process.lookup(keys) == 0
    assert process.load(keys, [100] * 6)[0] == 0
    store.down = None
    monkeypatch.setattr(process.client, "find", lambda keys: [True])
    assert process.lookup(keys) == 0
    assert process.adapter.usage().locked == 0


def test_work_that_breaks_off_is_a_miss_and_a_retry(kit, begin):
    process = begin()
    keys, payloads = kit.many([1])
    task = process.adapter.submit_store(keys, [memoryview(payloads[0])])
    process.hands.break_off()
    assert process.adapter.pop_completed_stores() == {task: [RETRY]}
    for submit, take in (
        (lambda: process.adapter.submit_lookup_and_lock(keys), process.adapter.take_lookup),
        (lambda: process.adapter.submit_load(keys, [memoryview(bytearray(1))]), process.adapter.take_load),
    ):
        task = submit()
        process.hands.break_off()
        assert take(task) == 0
    process.adapter.delete(keys)
    process.hands.break_off()
    assert process.adapter.work_inflight == 0


# --- opening and scanning --------------------------------------------------------------------------------------------


def test_a_store_that_refuses_for_good_is_told_at_once(kit, store):
    store.refused = ConfigError("wrong password")
    with pytest.raises(ConfigError, match="wrong password"):
        kit.process(store)


def test_a_store_that_is_away_at_the_start_is_used_when_it_comes(kit, store, begin):
    store.put(kit.key(7), kit.payload(7))
    store.down = StoreError("away")
    process = begin()
    keys, payloads = kit.many([7, 8])
    assert process.lookup(keys) == 0
    assert process.load(keys, [100, 100])[0] == 0
    assert process.store(keys, payloads) == [RETRY, RETRY]
    store.down = None
    process.adapter.submit_lookup_and_lock([])  # the next batch, whatever it is, tries again
    process.hands.run_all()
    assert process.adapter.opened
    assert process.lookup(keys) == 0b01
    assert process.adapter.statistics().recovered == 1


def test_one_attempt_to_open_at_a_time(kit, store, begin):
    store.down = StoreError("away")
    process = begin()
    for _ in range(5):
        process.adapter.submit_lookup_and_lock([kit.key(1)])
    assert len(process.hands.pieces) == 1


def test_the_scan_rebuilds_the_accounting_in_pages(kit, store, begin):
    for number in range(2500):
        store.put(kit.key(number), b"x")
    store.strangers = 3
    process = begin()
    usage = process.adapter.usage()
    assert (usage.objects, usage.bytes_used) == (2500, sum(map(len, store.records.values())))
    assert usage.bytes_capacity == 12345  # what the store says
    assert set(process.adapter.keys()) == set(store.records)
    assert process.adapter.statistics().recovered == 2500


def test_a_start_with_less_capacity_evicts_the_oldest(kit, store, begin):
    for number in range(40):
        store.put(kit.key(number), kit.payload(number), age_s=number)
    process = begin(capacity_bytes=kit.size_of(10))
    assert set(store.records) == {kit.key(number) for number in range(10)}
    statistics = process.adapter.statistics()
    assert (statistics.evictions, statistics.objects) == (30, 10)


def test_a_scan_that_fails_forgets_nothing(kit, store, begin):
    process = begin(capacity_bytes=kit.size_of(100), rescan_bytes=1)
    keys, payloads = kit.many(range(3))
    process.adapter.submit_store(keys, [memoryview(payload) for payload in payloads])
    process.hands.run()
    assert len(process.hands.pieces) == 1  # the scan that follows
    store.down = OSError(5, "down")
    process.hands.run_all()
    assert process.adapter.usage().objects == 3


def test_a_scan_that_failed_is_done_again_when_the_store_answers(kit, store, begin):
    other, process = begin(), kit.process(store)
    other.store(*kit.many(range(3)))
    store.down = OSError(5, "down")
    process.hands.run_all()  # the scan at the start fails
    process.store(*kit.many([9]))
    assert process.adapter.usage().objects == 0
    assert process.hands.pieces == []
    store.down = None
    process.store(*kit.many([9]))
    assert process.adapter.usage().objects == 4


def test_another_process_is_noticed_by_the_next_scan(kit, begin):
    ours, other = begin(capacity_bytes=kit.size_of(8)), begin()
    other.store(*kit.many(range(100, 104)))
    assert ours.adapter.usage().objects == 0
    ours.store(*kit.many(range(2)))  # a quarter of the capacity is written: look around
    assert ours.adapter.usage().objects == 6
    ours.store(*kit.many(range(2, 8)))
    assert ours.adapter.usage().bytes_used <= kit.size_of(8)


def test_what_others_removed_is_forgotten(kit, store, begin):
    process = begin()
    keys, payloads = kit.many(range(3))
    process.store(keys, payloads)
    store.records.clear()
    assert process.lookup(keys[:1]) == 0
    assert process.adapter.usage().objects == 2
    assert process.load(keys[1:], [100] * 2)[0] == 0
    assert process.adapter.usage().objects == 0
    assert process.adapter.statistics().missing == 2


def test_an_old_answer_does_not_undo_what_was_written_since(kit, begin):
    process = begin()
    keys, payloads = kit.many([1])
    lookup = process.adapter.submit_lookup_and_lock(keys)
    deliver = process.hands.begin()  # the store says "no" ...
    process.adapter.submit_store(keys, [memoryview(payloads[0])])
    process.hands.run()
    deliver()  # ... and we hear it when it is not true any more
    assert process.adapter.take_lookup(lookup) == 0
    assert process.adapter.usage().objects == 1


# --- room ------------------------------------------------------------------------------------------------------------


def test_the_oldest_goes_first_and_use_makes_young(kit, store, begin):
    process = begin(capacity_bytes=kit.size_of(4), rescan_bytes=1 << 40)
    keys, payloads = kit.many(range(4))
    process.store(keys, payloads)
    process.lookup(keys[:1])
    process.adapter.submit_unlock(keys[:1])
    process.load(keys[1:2], [100])
    assert process.store(*kit.many([10, 11])) == [STORED] * 2
    assert set(store.records) == {kit.key(number) for number in (0, 1, 10, 11)}
    assert process.adapter.statistics().evictions == 2


@pytest.mark.parametrize("use", ["stored", "looked up", "loaded"])
def test_of_a_prefix_the_end_is_evicted_first(kit, store, begin, use):
    """S39: what is left of a prefix without its beginning serves nobody."""
    process = begin(capacity_bytes=kit.size_of(4), rescan_bytes=1 << 40)
    keys, payloads = kit.many(range(4))
    for one, payload in zip(keys, payloads) if use != "stored" else ():
        process.store([one], [payload])
    if use == "stored":
        process.store(keys, payloads)
    elif use == "looked up":
        process.lookup(keys)
        process.adapter.submit_unlock(keys)
    else:
        process.load(keys, [100] * 4)
    assert process.store(*kit.many([10, 11])) == [STORED] * 2
    assert set(store.records) == {kit.key(number) for number in (0, 1, 10, 11)}


def test_what_is_locked_loading_or_being_looked_up_is_never_evicted(kit, store, begin):
    process = begin(capacity_bytes=kit.size_of(3), rescan_bytes=1 << 40)
    keys, payloads = kit.many(range(3))
    process.store(keys, payloads)
    assert process.lookup(keys[:1]) == 1
    load = process.adapter.submit_load(keys[1:2], [memoryview(bytearray(100))])
    lookup = process.adapter.submit_lookup_and_lock(keys[2:])
    store_task = process.adapter.submit_store([kit.key(9)], [memoryview(bytes(100))])
    assert process.adapter.pop_completed_stores() == {store_task: [FULL]}
    process.hands.run_all()
    assert process.adapter.take_load(load) == 1
    assert process.adapter.take_lookup(lookup) == 1
    assert process.store(*kit.many([9])) == [STORED]  # only the one that was loaded is idle
    assert set(store.records) == {kit.key(number) for number in (0, 2, 9)}
    process.adapter.submit_unlock([keys[0], keys[2]])
    assert process.store(*kit.many([10, 11])) == [STORED] * 2


def test_a_record_that_never_fits_is_full_and_evicts_nothing(kit, store, begin):
    process = begin(capacity_bytes=kit.size_of(3))
    process.store(*kit.many(range(3)))
    assert process.store([kit.key(9)], [bytes(10_000)]) == [FULL]
    assert len(store.records) == 3
    assert process.adapter.statistics().bytes_reserved == 0


def test_the_store_itself_is_full(kit, store, begin):
    process = begin()
    store.full = True
    assert process.store(*kit.many(range(2))) == [FULL] * 2
    assert process.adapter.usage().bytes_used == 0


def test_a_tenant_over_its_quota_evicts_only_its_own(kit, store, begin):
    limit = kit.size_of(2, salt="a")
    process = begin(quota=Quota({"a": limit}))
    process.store(*kit.many(range(3), salt="b"))
    process.store(*kit.many(range(4), salt="a"))
    left = [key.cache_salt for key in store.records]
    assert (left.count("a"), left.count("b")) == (2, 3)
    second = begin(quota=Quota({"b": kit.size_of(1, salt="b")}))  # and what a scan finds beyond it
    assert [key.cache_salt for key in store.records].count("b") == 1
    second.adapter.check()


def test_a_victim_that_the_store_does_not_let_go_stays_accounted(kit, store, begin):
    process = begin(capacity_bytes=kit.size_of(2), rescan_bytes=1 << 40)
    keys, payloads = kit.many(range(2))
    process.store(keys, payloads)
    store.failing.add(keys[1])
    assert process.store(*kit.many([5])) == [STORED]
    assert process.adapter.usage().objects == 3
    assert process.adapter.statistics().io_errors == 1
    store.failing.clear()
    assert process.store(*kit.many([6])) == [STORED]
    assert process.adapter.usage().bytes_used <= kit.size_of(2)


# --- defects ---------------------------------------------------------------------------------------------------------


def flip(store, key):
    record = bytearray(store.records[key])
    record[-1] ^= 1
    store.records[key] = bytes(record)


def test_a_bad_record_is_a_miss_invisible_at_once_and_discarded(kit, store, begin):
    process = begin()
    keys, payloads = kit.many(range(2))
    process.store(keys, payloads)
    flip(store, keys[0])
    load = process.adapter.submit_load(keys, [memoryview(bytearray(100)) for _ in keys])
    process.hands.run()
    assert process.adapter.take_load(load) == 0b10
    lookup = process.adapter.submit_lookup_and_lock(keys[:1])
    assert process.adapter.take_lookup(lookup) == 0  # without asking: the discard has not run
    process.hands.run_all()
    assert store.discards == [(keys[0], Defect.FLIPPED)]
    assert set(store.records) == {keys[1]}
    assert process.adapter.statistics().flipped == 1


def test_a_miss_that_was_seen_before_a_write_is_not_believed_after_it(kit, begin):
    process = begin()
    keys, payloads = kit.many([1])
    process.adapter.submit_load(keys, [memoryview(bytearray(100))])
    deliver = process.hands.begin()
    process.adapter.submit_store(keys, [memoryview(payloads[0])])
    process.hands.run()
    deliver()
    assert process.adapter.usage().objects == 1


def test_a_bad_record_is_not_discarded_under_another_load_of_ours(kit, store, begin):
    process = begin()
    keys, payloads = kit.many([1])
    process.store(keys, payloads)
    flip(store, keys[0])
    loads = [process.adapter.submit_load(keys, [memoryview(bytearray(100))]) for _ in range(2)]
    process.hands.run()
    assert len(process.hands.pieces) == 1  # the other load, and no discard yet
    process.hands.run_all()
    assert [process.adapter.take_load(load) for load in loads] == [0, 0]
    assert store.records == {}


def test_two_loads_of_a_bad_record_discard_it_once(kit, store, begin):
    process = begin()
    keys, payloads = kit.many([1])
    process.store(keys, payloads)
    flip(store, keys[0])
    for _ in range(2):
        process.adapter.submit_load(keys, [memoryview(bytearray(100))])
    process.hands.run_all()
    assert len(store.discards) == 1
    assert process.adapter.statistics().flipped == 1


def test_a_newer_record_survives_the_discard_of_an_older_one(kit, store, begin):
    process, other = begin(), begin()
    keys, payloads = kit.many([1])
    process.store(keys, payloads)
    flip(store, keys[0])
    process.adapter.submit_load(keys, [memoryview(bytearray(100))])
    process.hands.run()
    store.records.clear()
    other.store(keys, payloads)
    process.hands.run_all()
    assert process.load(keys, [100]) == (1, payloads)


def test_a_store_waits_for_the_discard_of_its_key(kit, store, begin):
    process = begin()
    keys, payloads = kit.many([1])
    process.store(keys, payloads)
    flip(store, keys[0])
    process.adapter.submit_load(keys, [memoryview(bytearray(100))])
    process.hands.run()
    task = process.adapter.submit_store(keys, [memoryview(payloads[0])])
    process.hands.run_all()
    assert process.adapter.pop_completed_stores() == {task: [STORED]}
    assert process.load(keys, [100]) == (1, payloads)


def test_a_defect_that_was_seen_before_a_write_is_not_held_against_the_new_record(kit, store, begin):
    process = begin()
    keys, payloads = kit.many([1])
    store.records[keys[0]] = b"junk"
    process.adapter.submit_load(keys, [memoryview(bytearray(100))])
    deliver = process.hands.begin()
    task = process.adapter.submit_store(keys, [memoryview(payloads[0])])
    process.hands.run()
    deliver()
    process.hands.run_all()
    assert process.adapter.pop_completed_stores() == {task: [STORED]}
    assert store.discards == []
    assert process.lookup(keys) == 1


# --- delete and close ------------------------------------------------------------------------------------------------


def test_delete_removes_the_idle_and_dooms_what_is_in_use(kit, store, begin):
    process = begin()
    keys, payloads = kit.many(range(3))
    process.store(keys, payloads)
    assert process.lookup(keys[:1] * 2) == 0b11
    process.adapter.delete(keys)
    process.hands.run_all()
    assert set(store.records) == {keys[0]}
    assert process.lookup(keys) == 0
    assert process.load(keys[:1], [100])[0] == 1  # its holders still can
    assert process.store(keys[:1], payloads[:1]) == [RETRY]
    process.adapter.submit_unlock(keys[:1])
    process.hands.run_all()
    assert set(store.records) == {keys[0]}
    process.adapter.submit_unlock(keys[:1])
    process.hands.run_all()
    assert store.records == {}


def test_what_is_deleted_while_it_is_looked_up_is_not_found(kit, store, begin):
    process = begin()
    keys, payloads = kit.many([1])
    process.store(keys, payloads)
    lookup = process.adapter.submit_lookup_and_lock(keys)
    process.adapter.delete(keys)
    process.hands.run_all()
    assert process.adapter.take_lookup(lookup) == 0
    assert store.records == {}


def test_what_is_deleted_while_it_is_written_goes_when_it_is_written(kit, store, begin):
    process = begin()
    keys, payloads = kit.many([1])
    task = process.adapter.submit_store(keys, [memoryview(payloads[0])])
    process.adapter.delete(keys)
    process.hands.run_all()
    assert process.adapter.pop_completed_stores() == {task: [STORED]}
    assert store.records == {}
    assert process.adapter.usage().objects == 0


def test_an_unlock_without_a_lock_is_counted(kit, begin):
    process = begin()
    process.adapter.submit_unlock([kit.key(1)] * 2)
    assert process.adapter.statistics().unlocks_unmatched == 2


def test_close_with_work_outstanding_announces_nothing_more(kit, store, begin):
    process = kit.process(store).ready()
    keys, payloads = kit.many(range(2))
    process.adapter.submit_store(keys[:1], [memoryview(payloads[0])])
    process.adapter.submit_lookup_and_lock(keys)
    process.adapter.close()
    rung = [bell.rung for bell in process.bells]
    assert process.adapter.work_inflight == 2
    process.hands.run_all()
    assert process.adapter.work_inflight == 0
    assert [bell.rung for bell in process.bells] == rung
    assert process.client.closed
    process.adapter.submit_unlock(keys)
    process.adapter.close()
    with pytest.raises(CallerError):
        process.adapter.submit_lookup_and_lock(keys)


def test_buffers_that_cannot_work_are_refused(kit, begin):
    process = begin()
    with pytest.raises(CallerError):
        process.adapter.submit_store([kit.key(1)], [])
    with pytest.raises(CallerError):
        process.adapter.submit_load([kit.key(1)], [memoryview(b"read only")])
    with pytest.raises(CallerError):
        process.adapter.submit_store([kit.key(1)], [memoryview(bytes(10))[::2]])
    assert process.hands.pieces == []

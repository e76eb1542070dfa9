"""L1, one sentence at a time. The state machine in tests/machines looks for what these sentences forget."""

from __future__ import annotations

from itertools import permutations

import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.eviction import LruPolicy, PolicyFactory, S3FifoPolicy
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.leases import Owner
from kvcore.memory import PlainArena, Slot, SlotState, VirtualArena
from kvcore.quota import Quota

SIZE = 64
ANN, BEN = Owner("ann", 1, "read"), Owner("ben", 1, "read")
K = [ObjectKey(bytes([n]) * 32, "m", 0) for n in range(20)]
POLICIES = pytest.mark.parametrize("policy", [LruPolicy, S3FifoPolicy])


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, ObjectKey]] = []

    def published(self, key: ObjectKey, slot: Slot, temporary: bool) -> None:
        self.heard.append(("temporary" if temporary else "durable", key))

    def removed(self, key: ObjectKey) -> None:
        self.heard.append(("removed", key))


def cache(
    objects: int = 8, quota: Quota | None = None, listener: Listener | None = None, policy: PolicyFactory = LruPolicy
) -> L1Cache:
    return L1Cache(PlainArena(objects * SIZE), policy, quota, listener)


def store(l1: L1Cache, *keys: ObjectKey, tag: str = "w") -> list[Answer]:
    answers, _ = l1.reserve_write(tag, keys, SIZE)
    reserved = [key for key, answer in zip(keys, answers, strict=True) if answer is Answer.RESERVED]
    l1.finish_write(tag, reserved)
    l1.check()
    return answers


def staged(l1: L1Cache, key: ObjectKey, tag: str = "w", deadline_ns: int | None = None) -> Slot:
    slot = l1.reserve_write(tag, [key], SIZE, deadline_ns=deadline_ns)[1][0]
    assert slot is not None
    return slot


# Writing and publishing


def test_nobody_sees_an_object_before_it_is_published() -> None:
    l1 = cache()
    slot = staged(l1, K[0])
    assert l1.reserve_read(ANN, [K[0]]) == [Answer.UNKNOWN]
    assert not l1.contains(K[0])
    assert l1.finish_write("w", [K[0]]) == [Answer.PUBLISHED]
    assert l1.slot_of(K[0]) is slot
    assert l1.reserve_read(ANN, [K[0]]) == [Answer.RESERVED]


def test_two_writers_of_one_key_in_every_order_leave_one_whole_object() -> None:
    """S24; R29: the first to commit wins, the loser is told, and a reader misses, then finds one writer's bytes."""
    steps = [("w1", "reserve"), ("w1", "finish"), ("w2", "reserve"), ("w2", "finish")]
    orders = [
        o
        for o in permutations(steps)
        if o.index(steps[0]) < o.index(steps[1]) and o.index(steps[2]) < o.index(steps[3])
    ]
    assert len(orders) == 6
    for order in orders:
        l1 = cache()
        winner = ""
        for tag, step in order:
            if step == "reserve":
                answers, slots = l1.reserve_write(tag, [K[0]], SIZE)
                assert answers == [Answer.RESIDENT if winner else Answer.RESERVED]
                if slots[0] is not None:
                    l1.view(slots[0])[:] = tag.encode() * (SIZE // 2)
            else:
                (answer,) = l1.finish_write(tag, [K[0]])
                if not winner:
                    winner = tag
                    assert answer is Answer.PUBLISHED
                else:
                    assert answer in (Answer.DISCARDED, Answer.UNKNOWN)  # UNKNOWN: it was told RESIDENT before
            slot = l1.slot_of(K[0])
            assert (slot is not None) is bool(winner)
            assert slot is None or bytes(l1.view(slot)) == winner.encode() * (SIZE // 2)
        assert l1.statistics().bytes_used == SIZE
        l1.check()


def test_a_second_writer_of_a_resident_key_is_discarded_and_the_reader_keeps_its_bytes() -> None:
    l1 = cache()
    first, second = staged(l1, K[0], "w1"), staged(l1, K[0], "w2")
    l1.view(first)[:] = b"1" * SIZE
    l1.view(second)[:] = b"2" * SIZE
    l1.finish_write_and_reserve_read("w1", [K[0]], [ANN])
    assert l1.finish_write_and_reserve_read("w2", [K[0]], [BEN]) == [Answer.DISCARDED]
    assert l1.slot_of(K[0]) is first
    assert bytes(l1.view(first)) == b"1" * SIZE
    assert second.state is SlotState.FREE
    assert l1.finish_read(BEN, [K[0]]) == [Answer.RELEASED], "the loser has a lease on the resident object"
    assert l1.delete([K[0]]) == [Answer.LOCKED]
    assert l1.statistics().discarded == 1


def test_the_same_writer_cannot_stage_a_key_twice() -> None:
    l1 = cache()
    staged(l1, K[0])
    assert l1.reserve_write("w", [K[0], K[1]], SIZE)[0] == [Answer.BUSY, Answer.RESERVED]


@pytest.mark.parametrize("resident", [False, True])
def test_the_second_occurrence_of_a_key_in_a_batch_is_busy_and_leaks_nothing(resident: bool) -> None:
    l1 = cache()
    if resident:
        store(l1, K[0])
    answers, slots = l1.reserve_write("w", [K[0], K[0], K[1], K[0]], SIZE)
    assert answers == [Answer.RESIDENT if resident else Answer.RESERVED, Answer.BUSY, Answer.RESERVED, Answer.BUSY]
    assert [slot is None for slot in slots] == [resident, True, False, True]
    l1.abort_write("w", [K[0], K[1]])
    assert l1.clear() == resident
    assert l1.statistics().largest_free == 8 * SIZE
    l1.check()


def test_a_key_with_another_size_is_refused_and_counted_and_stays_as_it_is() -> None:
    """R52: an overwrite by another size changes neither the object nor the accounts."""
    l1 = cache()
    l1.reserve_write("late", [K[0]], 2 * SIZE)
    store(l1, K[0])
    assert l1.reserve_write("w", [K[0]], 2 * SIZE) == ([Answer.MISMATCH], [None])
    assert l1.finish_write_and_reserve_read("late", [K[0]], [ANN]) == [Answer.MISMATCH]
    assert l1.finish_read(ANN, [K[0]]) == [Answer.UNKNOWN], "nobody gets a lease on an object of another size"
    assert l1.statistics().mismatches == 2
    assert l1.statistics().bytes_used == SIZE
    l1.check()


def test_a_batch_of_any_length_may_name_a_size_for_each_key() -> None:
    count = 300
    keys = [ObjectKey(n.to_bytes(32, "big"), "m", 0) for n in range(count)]
    l1 = cache(2 * count)
    answers, slots = l1.reserve_write("w", keys, [SIZE] * count)
    assert answers == [Answer.RESERVED] * count
    assert None not in slots
    with pytest.raises(CallerError, match="300 keys with 299 sizes"):
        l1.reserve_write("v", keys, [SIZE] * (count - 1))


def test_a_batch_may_mix_sizes() -> None:
    l1 = cache()
    answers, slots = l1.reserve_write("w", K[:4], [10, 100, 100, 64])
    assert answers == [Answer.RESERVED] * 4
    assert [slot.size for slot in slots if slot is not None] == [10, 100, 100, 64]
    assert l1.statistics().bytes_staging == 64 + 128 + 128 + 64
    l1.check()


def test_publish_is_refused_while_the_copy_into_it_runs() -> None:
    l1 = cache()
    slot = staged(l1, K[0])
    assert l1.hold_write("gpu", "w", [K[0], K[1]]) == [slot, None]
    assert l1.finish_write("w", [K[0]]) == [Answer.BUSY]
    assert not l1.contains(K[0])
    assert l1.unhold("gpu", [slot]) == [Answer.RELEASED]
    assert l1.finish_write("w", [K[0]]) == [Answer.PUBLISHED]


def test_giving_up_a_failed_load_never_publishes_it_whoever_looks_in_between() -> None:
    """R20: cleanup is one step from write-locked to gone; the background store runs between any two calls."""
    heard = Listener()
    l1 = cache(listener=heard)

    def background_store_finds_nothing() -> None:
        assert l1.reserve_read(BEN, [K[0]]) == [Answer.UNKNOWN]
        assert heard.heard == []

    slot = staged(l1, K[0])
    background_store_finds_nothing()
    l1.hold_write("", "w", [K[0]])
    assert l1.abort_write("w", [K[0]]) == [Answer.ABORTED]
    background_store_finds_nothing()
    assert l1.finish_write("w", [K[0]]) == [Answer.UNKNOWN]
    l1.unhold("", [slot])
    background_store_finds_nothing()
    assert l1.statistics().bytes_used == 0
    l1.check()


def test_an_expired_reservation_is_aborted_and_its_memory_waits_for_the_writer() -> None:
    """R21: expiry is not completion; the late finish is refused; the bytes are not reused while they may be written."""
    l1 = cache(objects=1)
    slot = staged(l1, K[0], deadline_ns=10)
    l1.hold_write("gpu", "w", [K[0]])
    assert l1.expire(9) == 0
    assert l1.expire(10) == 1
    assert l1.reserve_read(ANN, [K[0]]) == [Answer.UNKNOWN]
    assert (slot.state, l1.statistics().quarantined_bytes) == (SlotState.DRAINING, SIZE)
    assert l1.reserve_write("other", [K[1]], SIZE)[0] == [Answer.NO_SPACE]
    assert l1.finish_write("w", [K[0]]) == [Answer.EXPIRED]
    assert l1.finish_write("w", [K[0]]) == [Answer.UNKNOWN]
    l1.unhold("gpu", [slot])
    assert l1.reserve_write("other", [K[1]], SIZE)[0] == [Answer.RESERVED]
    l1.check()


def test_the_same_tag_gets_a_fresh_buffer_after_expiry_while_the_old_one_drains() -> None:
    l1 = cache()
    old = staged(l1, K[0], deadline_ns=10)
    l1.hold_write("gpu", "w", [K[0]])
    l1.expire(10)
    new = staged(l1, K[0], deadline_ns=20)
    assert (new is old, new.offset == old.offset, new.generation > old.generation) == (False, False, True)
    assert l1.finish_write("w", [K[0]]) == [Answer.PUBLISHED]
    assert l1.finish_write("w", [K[0]]) == [Answer.UNKNOWN], "nothing of the expired reservation answers"
    assert l1.statistics().bytes_draining == SIZE
    l1.unhold("gpu", [old])
    assert l1.slot_of(K[0]) is new
    assert l1.expire(99) == 0
    l1.check()


# Reading


def test_a_reader_keeps_its_object_through_delete_and_eviction() -> None:
    """S15; R27: the matched object survives an eviction of everything."""
    l1 = cache()
    store(l1, K[0], K[1])
    l1.reserve_read(ANN, [K[0]])
    assert l1.delete([K[0]]) == [Answer.LOCKED]
    assert l1.evict(8 * SIZE) == SIZE
    assert list(l1.resident_keys()) == [K[0]]
    assert l1.finish_read(ANN, [K[0]]) == [Answer.RELEASED]
    assert l1.evict(1) == SIZE


def test_an_object_under_a_copy_but_without_a_lease_is_not_evicted() -> None:
    """S17; R27: the bytes of a batch stay until the last copy of them has ended."""
    l1 = cache()
    store(l1, K[0], K[1])
    l1.reserve_read(ANN, [K[0]], deadline_ns=10)
    (slot,) = l1.hold_read("gpu", ANN, [K[0]])
    assert slot is not None
    l1.expire(10)
    assert l1.evict(8 * SIZE) == SIZE
    assert l1.contains(K[0])
    l1.unhold("gpu", [slot])
    assert l1.evict(8 * SIZE) == SIZE
    l1.check()


@pytest.mark.parametrize("use", ["published", "read", "copied", "renewed"])
def test_the_first_of_a_batch_is_evicted_last(use: str) -> None:
    """S39: what is left of a prefix without its beginning serves nobody."""
    l1 = cache()
    if use == "published":
        store(l1, *K[:4])
    for key in K[:4] if use != "published" else ():
        store(l1, key)
    if use in ("read", "copied"):
        l1.reserve_read(ANN, K[:4], deadline_ns=10)
    slots = l1.hold_read("gpu", ANN, K[:4]) if use == "copied" else []
    if use == "copied":
        l1.expire(10)
    l1.unhold("gpu", slots)
    l1.finish_read(ANN, K[:4])
    if use == "renewed":
        l1.reserve_read(ANN, [K[4 - 1]])
        l1.renew([K[5], K[3], K[2], K[1], K[0]])
        assert l1.evict(SIZE) == SIZE
        assert not l1.contains(K[2]), "the last one has a reader"
        return
    assert l1.evict(2 * SIZE) == 2 * SIZE
    assert list(l1.resident_keys()) == [*K[:2]]


def test_a_deleted_object_under_a_copy_is_gone_and_its_slot_drains() -> None:
    l1 = cache(objects=1)
    store(l1, K[0])
    l1.reserve_read(ANN, [K[0]])
    (slot,) = l1.hold_read("", ANN, [K[0]])
    assert slot is not None
    l1.finish_read(ANN, [K[0]])
    assert l1.delete([K[0]]) == [Answer.DELETED]
    assert l1.reserve_write("w", [K[0]], SIZE)[0] == [Answer.NO_SPACE]
    assert (l1.statistics().bytes_draining, l1.statistics().quarantined_bytes) == (SIZE, 0)
    assert l1.unhold("gpu", [slot]) == [Answer.UNKNOWN], "somebody else's copy"
    assert l1.unhold("", [slot]) == [Answer.RELEASED]
    assert l1.unhold("", [slot]) == [Answer.UNKNOWN]
    assert l1.statistics().bytes_free == SIZE


def test_a_copy_begins_only_under_a_live_lease_of_its_own_owner() -> None:
    l1 = cache()
    store(l1, K[0])
    l1.reserve_read(ANN, [K[0]], deadline_ns=10)
    assert l1.hold_read("gpu", BEN, [K[0], K[1]]) == [None, None]
    assert l1.hold_read("gpu", ANN, [K[0]]) == [l1.slot_of(K[0])]
    l1.expire(10)
    assert l1.hold_read("gpu", ANN, [K[0]]) == [None]
    assert l1.statistics().holds == 1


def test_after_a_read_lease_has_expired_finish_read_says_so_and_changes_nothing() -> None:
    l1 = cache()
    store(l1, K[0])
    l1.reserve_read(ANN, [K[0]], deadline_ns=10)
    l1.reserve_read(BEN, [K[0]])
    assert l1.expire(10) == 1
    assert l1.finish_read(ANN, [K[0]]) == [Answer.EXPIRED]
    assert l1.delete([K[0]]) == [Answer.LOCKED], "the other reader is still there"
    assert l1.finish_read(ANN, [K[0]]) == [Answer.UNKNOWN]


def test_only_the_leases_that_a_request_uses_stay_and_all_counts_end_at_zero() -> None:
    """R22: the lookup leases four chunks, the engine has the first and loads the rest."""
    l1 = cache()
    store(l1, *K[:4])
    l1.reserve_read(ANN, K[:4])
    assert l1.finish_read(ANN, K[:1]) == [Answer.RELEASED]
    assert l1.delete(K[:4]) == [Answer.DELETED, *[Answer.LOCKED] * 3]
    assert l1.finish_read(ANN, K[1:4]) == [Answer.RELEASED] * 3
    assert l1.statistics().leases == 0
    l1.reserve_read(BEN, K[1:4])
    assert l1.release_owner(BEN) == 3, "b: the engine decides on no load"
    assert l1.clear() == 3


def test_storing_and_reading_twice_the_capacity_never_fills_the_cache_up() -> None:
    """R26: after each round the only reference is the cache's own."""
    l1 = cache(objects=4)
    for key in K[:8]:
        assert store(l1, key) == [Answer.RESERVED]
        assert l1.reserve_read(ANN, [key]) == [Answer.RESERVED]
        assert l1.finish_read(ANN, [key]) == [Answer.RELEASED]
        assert l1.finish_read(ANN, [key]) == [Answer.UNKNOWN]
        assert l1.statistics().leases == 0
    assert list(l1.resident_keys()) == K[4:8]


# Temporary objects


def test_a_temporary_object_goes_with_its_last_reader_and_not_before() -> None:
    """R65: the write-back leases and releases it in between, in its own name."""
    heard = Listener()
    l1 = cache(listener=heard)
    staged(l1, K[0])
    l1.finish_write_and_reserve_read("w", [K[0]], [ANN, BEN], temporary=True)
    write_back = Owner("write-back", 0, "store")
    l1.reserve_read(write_back, [K[0]])
    l1.finish_read(write_back, [K[0]])
    assert l1.finish_read(write_back, [K[0]]) == [Answer.UNKNOWN]
    l1.finish_read(ANN, [K[0]])
    assert l1.contains(K[0])
    l1.finish_read(BEN, [K[0]])
    assert not l1.contains(K[0])
    assert heard.heard == [("temporary", K[0]), ("removed", K[0])]
    assert l1.statistics().bytes_used == 0


def test_a_temporary_object_that_nobody_waits_for_is_not_resident_at_all() -> None:
    heard = Listener()
    l1 = cache(listener=heard)
    slot = staged(l1, K[0])
    assert l1.finish_write("w", [K[0]], temporary=True) == [Answer.PUBLISHED]
    assert (l1.contains(K[0]), slot.state, heard.heard) == (False, SlotState.FREE, [])
    l1.check()


@pytest.mark.parametrize("at_reserve", [False, True])
def test_a_durable_writer_makes_a_temporary_object_durable(at_reserve: bool) -> None:
    heard = Listener()
    l1 = cache(listener=heard)
    if not at_reserve:
        staged(l1, K[0], "durable")
    staged(l1, K[0], "load")
    l1.finish_write_and_reserve_read("load", [K[0]], [ANN], temporary=True)
    if at_reserve:
        assert l1.reserve_write("loader", [K[0]], SIZE, temporary=True)[0] == [Answer.RESIDENT]
        assert heard.heard == [("temporary", K[0])], "another temporary writer changes nothing"
        assert l1.reserve_write("durable", [K[0]], SIZE)[0] == [Answer.RESIDENT]
    else:
        assert l1.finish_write("durable", [K[0]]) == [Answer.DISCARDED]
    assert heard.heard == [("temporary", K[0]), ("durable", K[0])]
    l1.finish_read(ANN, [K[0]])
    assert l1.contains(K[0])
    assert l1.evict(1) == SIZE


def test_making_an_object_temporary_removes_it_once_it_is_unread() -> None:
    l1 = cache()
    store(l1, K[0], K[1])
    l1.reserve_read(ANN, [K[0]])
    assert l1.set_temporary(K[:3], True) == [Answer.RESIDENT, Answer.DELETED, Answer.UNKNOWN]
    l1.finish_read(ANN, [K[0]])
    assert list(l1.resident_keys()) == []
    l1.check()


def test_a_temporary_object_whose_readers_expire_drains_under_its_copy() -> None:
    l1 = cache()
    slot = staged(l1, K[0])
    l1.finish_write_and_reserve_read("w", [K[0]], [ANN], temporary=True, deadline_ns=10)
    l1.hold_read("gpu", ANN, [K[0]])
    l1.expire(10)
    assert not l1.contains(K[0])
    assert l1.statistics().quarantined_bytes == SIZE
    assert l1.release_holder("gpu") == 1
    assert slot.state is SlotState.FREE


# Owners and holders that vanish


def test_the_end_of_a_session_ends_its_leases_and_leaves_its_copies_running() -> None:
    l1 = cache()
    store(l1, K[0])
    l1.reserve_read(ANN, [K[0]])
    (slot,) = l1.hold_read("gpu", ANN, [K[0]])
    assert l1.release_owner(ANN) == 1
    assert l1.evict(SIZE) == 0
    l1.unhold("gpu", [slot])
    assert l1.evict(SIZE) == SIZE


def test_a_silent_holder_keeps_its_memory_until_it_is_proven_dead() -> None:
    l1 = cache(objects=2)
    slots = [staged(l1, key, deadline_ns=10) for key in K[:2]]
    l1.hold_write("worker", "w", K[:2])
    l1.expire(10)
    assert l1.expire(10**18) == 0, "time alone never ends a hold"
    assert l1.reserve_write("w2", [K[2]], SIZE)[0] == [Answer.NO_SPACE]
    assert l1.statistics().quarantined_bytes == 2 * SIZE
    assert l1.release_holder("worker") == 2
    assert [slot.state for slot in slots] == [SlotState.FREE] * 2
    assert l1.reserve_write("w2", [K[2]], SIZE)[0] == [Answer.RESERVED]
    l1.check()


# Room


@POLICIES
def test_unprotected_objects_make_room_by_bytes_and_pinned_ones_stay(policy: PolicyFactory) -> None:
    l1 = cache(objects=4, policy=policy)
    store(l1, *K[:4])
    l1.reserve_read(ANN, [K[1]])
    assert l1.reserve_write("w", [K[10]], 2 * SIZE)[0] == [Answer.RESERVED]  # fits only where 2 and 3 were
    assert l1.contains(K[1])
    assert l1.statistics().evictions in (2, 3)
    l1.check()


def test_a_cache_full_of_pinned_objects_refuses_and_recovers_as_soon_as_they_are_released() -> None:
    """R57: the first attempt fails cleanly, the one after the release succeeds at once."""
    l1 = cache()
    store(l1, *K[:8])
    l1.reserve_read(ANN, K[:8])
    assert l1.reserve_write("w", K[8:10], SIZE) == ([Answer.NO_SPACE] * 2, [None, None])
    l1.check()
    l1.release_owner(ANN)
    assert l1.reserve_write("w", K[8:10], SIZE)[0] == [Answer.RESERVED] * 2
    assert l1.statistics().no_space == 2


def test_fragmentation_is_cured_by_eviction_or_reported_by_the_longest_free_run() -> None:
    """R57 b: sizes 3,1,3,1 with the threes gone; 6 fits after the one between them has been evicted."""
    for pinned in (False, True):
        l1 = cache()
        l1.reserve_write("w", K[:4], [3 * SIZE, SIZE, 3 * SIZE, SIZE])
        l1.finish_write("w", K[:4])
        l1.reserve_read(ANN, K[1:4:2] if pinned else [])
        l1.delete([K[0], K[2]])
        assert l1.statistics().largest_free == 3 * SIZE
        expected = Answer.NO_SPACE if pinned else Answer.RESERVED
        assert l1.reserve_write("w", [K[9]], 6 * SIZE)[0] == [expected]
        assert l1.contains(K[1]) is pinned
        l1.check()


def test_an_object_larger_than_the_cache_is_refused_without_emptying_it() -> None:
    l1 = cache()
    store(l1, *K[:8])
    assert l1.reserve_write("w", [K[9]], 9 * SIZE)[0] == [Answer.NO_SPACE]
    assert l1.statistics().evictions == 0


def test_a_batch_that_does_not_fit_keeps_its_first_keys() -> None:
    """S59: what fits is kept, and it is the beginning."""
    l1 = cache(objects=3)
    answers, slots = l1.reserve_write("w", K[:5], SIZE)
    assert answers == [Answer.RESERVED] * 3 + [Answer.NO_SPACE] * 2
    assert [slot is None for slot in slots] == [False] * 3 + [True] * 2
    l1.check()


@POLICIES
def test_refusing_costs_the_same_however_many_objects_are_pinned(policy: PolicyFactory) -> None:
    """R71: counted in objects looked at, not in time."""
    objects = 30_000
    l1 = L1Cache(VirtualArena(objects * SIZE), policy)
    keys = [ObjectKey(n.to_bytes(4, "big"), "m", 0) for n in range(objects)]
    l1.reserve_write("w", keys, SIZE)
    l1.finish_write("w", keys)
    l1.reserve_read(ANN, keys)
    l1.reserve_write("w", [K[0]], SIZE)
    after_one = l1._order.steps
    for key in K[1:]:
        assert l1.reserve_write("w", [key], SIZE)[0] == [Answer.NO_SPACE]
    assert after_one <= objects
    assert l1._order.steps == after_one


def test_accounts_do_not_drift() -> None:
    """R52: put, put again, put another; a thousand rounds of put and remove; a failed put."""
    l1 = cache(objects=2)
    assert store(l1, K[0]) == [Answer.RESERVED]
    assert store(l1, K[0]) == [Answer.RESIDENT]
    assert store(l1, K[1]) == [Answer.RESERVED]
    assert l1.statistics().bytes_used == 2 * SIZE
    l1.reserve_read(ANN, K[:2])
    assert store(l1, K[2]) == [Answer.NO_SPACE]
    assert l1.statistics().bytes_used == 2 * SIZE
    l1.release_owner(ANN)
    for _ in range(1000):
        l1.delete(K[:2])
        l1.reserve_write("w", K[:2], SIZE)
        l1.finish_write("w", K[:2])
    l1.delete(K[:2])
    assert l1.statistics().bytes_used == 0
    assert l1.statistics().largest_free == 2 * SIZE


# Tenants


def of(salt: str, *numbers: int) -> list[ObjectKey]:
    return [ObjectKey(bytes([n]), "m", 0, 0, salt) for n in numbers]


def test_a_tenant_over_its_quota_evicts_its_own_objects_only() -> None:
    """S51: a store beyond a quota says so."""
    l1 = cache(quota=Quota({"small": 2 * SIZE}))
    store(l1, *of("big", 1, 2, 3))
    store(l1, *of("small", 1, 2))
    assert store(l1, *of("small", 3)) == [Answer.RESERVED]
    assert list(l1.resident_keys()) == [*of("big", 1, 2, 3), *of("small", 1, 3)]
    l1.reserve_read(ANN, of("small", 1, 3))
    assert store(l1, *of("small", 4)) == [Answer.NO_SPACE]
    assert store(l1, *of("big", 4, 5, 6)) == [Answer.RESERVED] * 3, "there was room all the time"
    assert l1.reserve_write("w", of("small", 5), 3 * SIZE)[0] == [Answer.NO_SPACE]


def test_abandoned_writes_count_against_the_quota_until_their_copies_have_ended() -> None:
    l1 = cache(quota=Quota(default_bytes=SIZE))
    (key,) = of("a", 1)
    slot = staged(l1, key)
    l1.hold_write("gpu", "w", [key])
    l1.abort_write("w", [key])
    assert store(l1, *of("a", 2)) == [Answer.NO_SPACE]
    assert store(l1, *of("b", 2)) == [Answer.RESERVED]
    l1.unhold("gpu", [slot])
    assert store(l1, *of("a", 2)) == [Answer.RESERVED]


# Misuse


def test_misuse_raises_before_anything_has_changed() -> None:
    l1 = cache()
    for sizes in (0, -1, [SIZE, -1], [SIZE], [SIZE, 1.5]):
        with pytest.raises(CallerError):
            l1.reserve_write("w", K[:2], sizes)  # type: ignore[arg-type]
    with pytest.raises(CallerError, match="ObjectKeys"):
        l1.reserve_write("w", [K[0], b"raw"], SIZE)  # type: ignore[list-item]
    with pytest.raises(CallerError, match="text"):
        l1.reserve_write(7, K[:1], SIZE)  # type: ignore[arg-type]
    with pytest.raises(CallerError, match="Owner"):
        l1.reserve_read(("ann", 1, "read"), K[:1])  # type: ignore[arg-type]
    staged(l1, K[3])
    with pytest.raises(CallerError, match="Owner"):
        l1.finish_write_and_reserve_read("w", [K[3]], ["ann"])  # type: ignore[list-item]
    with pytest.raises(CallerError, match="evict"):
        l1.evict(-1)
    assert l1.staging_keys("w") == [K[3]]
    assert l1.statistics().bytes_used == SIZE
    l1.check()

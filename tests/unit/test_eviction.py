"""Policies choose only what is unprotected, without walking what is pinned; tenants pay for themselves."""

from __future__ import annotations

import pytest

from kvcore.errors import ConfigError
from kvcore.eviction import EvictionPolicy, LruPolicy, PolicyFactory, S3FifoPolicy, TenantOrder
from kvcore.keys import ObjectKey
from kvcore.memory import Slot, VirtualArena
from kvcore.quota import Quota, QuotaLedger

POLICIES = pytest.mark.parametrize("make", [LruPolicy, S3FifoPolicy])


def slots_of(names: str, size: int = 64, salt: str = "") -> list[Slot]:
    keys = [ObjectKey(name.encode(), "m", 0, 0, salt) for name in names]
    return VirtualArena(1 << 30).allocate_batch(size, keys)


def names(slots: list[Slot]) -> str:
    return "".join(slot.key.chunk_hash.decode() for slot in slots)


def drain(policy: EvictionPolicy) -> list[Slot]:
    victims = []
    while (slot := policy.victim()) is not None:
        victims.append(slot)
    return victims


def pin(policy: EvictionPolicy, slots: list[Slot]) -> None:
    for slot in slots:
        slot.readers += 1
    policy.pin(slots)


def unpin(policy: EvictionPolicy, slots: list[Slot]) -> None:
    for slot in slots:
        slot.readers -= 1
    policy.add(slots)


@POLICIES
def test_objects_that_nobody_read_go_in_the_order_in_which_they_came(make: PolicyFactory) -> None:
    policy = make()
    policy.add(slots_of("abcd"))
    assert names(drain(policy)) == "abcd"
    assert policy.victim() is None


@POLICIES
def test_a_pinned_object_is_never_a_victim_and_comes_back_when_unpinned(make: PolicyFactory) -> None:
    policy = make()
    a, b, c = slots_of("abc")
    policy.add([a, b, c])
    pin(policy, [a, c])
    assert drain(policy) == [b]
    unpin(policy, [a, c])
    assert drain(policy) == [a, c]


@POLICIES
def test_a_removed_object_is_forgotten_whether_it_was_pinned_or_not(make: PolicyFactory) -> None:
    policy = make()
    a, b, c, d = slots_of("abcd")
    policy.add([a, b, c, d])
    pin(policy, [a, b])
    policy.remove([a, c])
    assert drain(policy) == [d]
    unpin(policy, [b])
    assert drain(policy) == [b]


@POLICIES
def test_a_full_house_of_pinned_objects_costs_no_steps_to_refuse(make: PolicyFactory) -> None:
    """R71: each pinned object is looked at once at most, however often room is asked for."""
    policy = make()
    slots = VirtualArena(1 << 40).allocate_batch(64, range(100_000))
    policy.add(slots)
    pin(policy, slots)
    for _ in range(1000):
        assert policy.victim() is None
    assert policy.steps <= 100_000
    before = policy.steps
    for _ in range(1000):
        assert policy.victim() is None
    assert policy.steps == before


def test_lru_evicts_what_was_released_longest_ago() -> None:
    policy = LruPolicy()
    a, b, c = slots_of("abc")
    policy.add([a, b, c])
    pin(policy, [a])
    unpin(policy, [a])
    assert names(drain(policy)) == "bca"


def test_lru_looks_at_one_object_per_victim() -> None:
    policy = LruPolicy()
    policy.add(slots_of("abcdefgh"))
    drain(policy)
    assert policy.steps == 8


def read(policy: EvictionPolicy, slot: Slot, times: int) -> None:
    for _ in range(times):
        pin(policy, [slot])
        unpin(policy, [slot])


def test_s3_fifo_keeps_what_is_read_often_through_a_scan() -> None:
    """The same scan would flush an LRU."""
    policy, lru = S3FifoPolicy(), LruPolicy()
    for cache in (policy, lru):
        hot, *scan = slots_of("H" + "".join(chr(97 + n) for n in range(20)))
        cache.add([hot])
        read(cache, hot, 3)
        cache.add(scan)
        victims = [cache.victim() for _ in range(15)]
        assert (hot in victims) is (cache is lru)


def test_s3_fifo_gives_an_object_another_round_per_read_and_not_more_than_three() -> None:
    policy = S3FifoPolicy()
    hot, cold = slots_of("hc")
    policy.add([hot, cold])
    read(policy, hot, 50)
    assert policy.victim() is cold
    assert policy.victim() is hot
    assert policy.steps <= 6


@pytest.mark.parametrize(("in_main", "goes"), [(1, "N"), (8, "N"), (9, "a"), (10, "a"), (19, "a")])
def test_s3_fifo_takes_from_small_only_while_small_holds_more_than_a_tenth_of_the_bytes(
    in_main: int, goes: str
) -> None:
    policy = S3FifoPolicy()
    often = slots_of("abcdefghijklmnopqrst"[:in_main])
    (once,) = slots_of("x", size=1 << 20)  # so large that small is crowded until it has gone
    policy.add([*often, once])
    for slot in often:
        read(policy, slot, 2)
    assert policy.victim() is once, "those that were read went into main"
    policy.add(slots_of("N"))
    victim = policy.victim()
    assert victim is not None
    assert names([victim]) == goes


def test_s3_fifo_gives_an_object_in_main_one_more_round_per_read() -> None:
    policy = S3FifoPolicy()
    policy.add(slots_of("ab"))
    assert names(drain(policy)) == "ab"
    (b,) = slots_of("b")  # remembered, so it comes straight into main
    policy.add([b])
    read(policy, b, 2)
    before = policy.steps
    assert policy.victim() is b
    assert policy.steps == before + 3
    assert policy.victim() is None


def test_s3_fifo_gives_a_parked_object_its_place_and_its_reads_back() -> None:
    policy = S3FifoPolicy()
    hot, cold, newer = slots_of("hcn")
    policy.add([hot, cold])
    read(policy, hot, 2)
    pin(policy, [hot])
    assert policy.victim() is cold, "the search parks the pinned object on its way"
    assert len(policy) == 0
    unpin(policy, [hot])
    policy.add([newer])
    assert policy.victim() is newer
    assert policy.victim() is hot


def test_s3_fifo_takes_an_object_that_comes_back_straight_into_main() -> None:
    policy = S3FifoPolicy()
    a, b = slots_of("ab")
    policy.add([a, b])
    assert policy.victim() is a
    (again,) = slots_of("a")
    policy.add([again])
    (c,) = slots_of("c")
    policy.add([c])
    assert names(drain(policy)) == "bca"


def test_the_ghost_is_bounded() -> None:
    policy = S3FifoPolicy()
    for slot in VirtualArena(1 << 30).allocate_batch(64, range(10_000)):
        policy.add([slot])
        if len(policy) > 10:
            policy.victim()
    assert len(policy._ghost) <= 10


def test_the_ghost_forgets_what_was_evicted_longest_ago() -> None:
    policy = S3FifoPolicy()
    policy.add(slots_of("abcd"))
    assert names([victim for victim in (policy.victim(), policy.victim()) if victim]) == "ab"
    assert policy.victim() is not None  # c: with one object left the ghost remembers one
    policy.add(slots_of("bce"))
    assert names(drain(policy)) == "dbec", "c came back straight into main, b is new"


@POLICIES
def test_a_tenant_gives_up_its_own_objects_only(make: PolicyFactory) -> None:
    order = TenantOrder(make)
    mine, theirs = slots_of("abc", salt="me"), slots_of("xyz", salt="you")
    for own, other in zip(mine, theirs, strict=True):
        order.add([other, own])
    assert [order.victim_of("me") for _ in range(4)] == [*mine, None]
    assert order.victim_of("nobody") is None
    assert drain(order) == theirs
    assert order.victim_of("you") is None


@POLICIES
def test_both_orders_of_a_tenant_forget_an_object_together(make: PolicyFactory) -> None:
    order = TenantOrder(make)
    a, b, c = slots_of("abc", salt="me")
    order.add([a, b, c])
    order.remove([a])
    pin(order, [b])
    assert order.victim() is c
    assert order.victim_of("me") is None
    unpin(order, [b])
    assert order.victim_of("me") is b
    assert len(order) == 0


def test_every_tenant_without_a_limit_of_its_own_gets_the_default_by_itself() -> None:
    quota = Quota({"vip": 1000}, default_bytes=100)
    assert [quota.limit_of(salt) for salt in ("vip", "a", "b", "")] == [1000, 100, 100, 100]
    ledger = QuotaLedger(quota)
    ledger.charge("a", 100)
    assert (ledger.excess("a", 1), ledger.excess("b", 100)) == (1, 0)
    assert Quota().limit_of("anyone") is None


def test_charges_and_credits_cancel_out() -> None:
    ledger = QuotaLedger(Quota())
    for _ in range(1000):
        ledger.charge("a", 64)
        ledger.credit("a", 64)
    assert ledger.bytes_total == ledger.bytes_used("a") == 0


def test_a_tenant_may_be_allowed_nothing() -> None:
    ledger = QuotaLedger(Quota({"a": 0}, default_bytes=0))
    for salt in ("a", "b"):
        assert ledger.excess(salt, 1) == 1
        assert not ledger.can_ever_hold(salt, 1)


def test_an_object_of_exactly_the_quota_can_be_held() -> None:
    ledger = QuotaLedger(Quota({"a": 10}))
    assert ledger.can_ever_hold("a", 10)
    assert not ledger.can_ever_hold("a", 11)
    assert ledger.can_ever_hold("b", 1 << 60)
    ledger.charge("a", 7)
    assert [ledger.excess("a", more) for more in (0, 3, 4, 9)] == [0, 0, 1, 6]
    ledger.credit("a", 3)
    assert (ledger.bytes_used("a"), ledger.excess("a", 7)) == (4, 1)


def test_a_negative_quota_is_refused() -> None:
    with pytest.raises(ConfigError, match="negative"):
        Quota({"a": -1})
    with pytest.raises(ConfigError, match="negative"):
        Quota(default_bytes=-1)

"""Write-back: in the background, bounded, and without a way to hurt a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.l2.adapter import StoreAnswer

MS = 1_000_000
SEEDS = range(50)

RigOf = Callable[..., Any]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_published_reaches_every_adapter_and_stays_in_l1(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        keys = rig.keys(5)
        rig.store(keys)
        await rig.storage.drain()
        for adapter in rig.adapters:
            assert list(adapter.records) == keys
            assert set(adapter.stores_of.values()) == {1}
        assert all(map(rig.l1.contains, keys))
        assert rig.a.records == rig.b.records
        statistics = rig.storage.statistics().writeback
        assert statistics.stored == 10
        assert statistics.bytes_stored == 10 * 64

    rig_of(seed, adapters=("a", "b")).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_in_flight_stay_under_the_limit(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        for chunk in range(12):
            rig.store([rig.key(chunk)])
        await rig.storage.drain()
        assert len(rig.a.records) == 12
        assert rig.storage.statistics().writeback.bytes_inflight_peak == 3 * 64

    rig_of(seed, writeback_bytes_inflight_max=3 * 64 + 10).run(scenario)


def test_an_object_larger_than_the_limit_goes_alone(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(3))
        await rig.storage.drain()
        assert len(rig.a.records) == 3
        assert rig.storage.statistics().writeback.bytes_inflight_peak == 64

    rig_of(0, writeback_bytes_inflight_max=10).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_of_retry_is_tried_again_later_and_not_for_ever(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        good, bad = rig.keys(2)
        tries = {good: 0, bad: 0}

        def answer(key: Any) -> StoreAnswer:
            tries[key] += 1
            return StoreAnswer.STORED if key == good and tries[key] == 3 else StoreAnswer.RETRY

        rig.a.store_answer = answer
        rig.store([good, bad])
        await rig.storage.drain()
        assert tries == {good: 3, bad: 4}
        statistics = rig.storage.statistics().writeback
        assert (statistics.stored, statistics.failed, statistics.retried) == (1, 1, 5)
        assert rig.clock.now_ns() >= (10 + 20 + 40) * MS, "the pauses double"
        assert rig.l1.contains(bad), "a failed write-back takes nothing away"

    rig_of(seed, store_attempts_max=4, store_backoff_ns=10 * MS).run(scenario)


@pytest.mark.parametrize("answer", [StoreAnswer.FULL, StoreAnswer.FAILED])
def test_a_store_that_fails_is_counted_and_not_repeated(rig_of: RigOf, answer: StoreAnswer) -> None:
    """S48: a store that takes nothing is seen in the statistics."""

    async def scenario(rig: Any) -> None:
        rig.a.store_answer = lambda key: answer
        rig.store(rig.keys(2))
        await rig.storage.drain()
        statistics = rig.storage.statistics().writeback
        assert statistics.full + statistics.failed == 2
        assert set(rig.a.stores_of.values()) == {1}
        assert rig.best(rig.start(2)) == 2

    rig_of(0).run(scenario)


def test_a_store_that_cannot_be_submitted_fails_and_leaves_no_lease(rig_of: RigOf) -> None:
    """S46: what was locked for it is let go."""

    async def scenario(rig: Any) -> None:
        rig.a.refuse_submit = True
        rig.store(rig.keys(2))
        await rig.storage.drain()
        assert rig.storage.statistics().writeback.failed == 2
        rig.check_rest()

    rig_of(0).run(scenario)


def test_a_hung_adapter_pins_only_what_is_in_flight_and_that_only_until_its_deadline(rig_of: RigOf) -> None:
    """S18."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(6))
        await rig.pause()
        assert rig.storage.statistics().l1.leases == 2
        await rig.pause(100 * MS)
        statistics = rig.storage.statistics()
        assert statistics.l1.leases == 0, "the lease is over"
        assert statistics.l1.holds == 2, "the adapter may still read these bytes"
        assert statistics.writeback.deadlines == 1
        assert statistics.writeback.bytes_inflight == 2 * 64, "and they count until it has let go"
        assert rig.storage.drop_l1() == 6
        assert rig.storage.statistics().l1.bytes_draining == 2 * 64
        assert rig.storage.statistics().writeback.dropped == 4
        rig.a.finish_store()
        await rig.pause()
        rig.check_rest()

    rig_of(0, automatic=False, writeback_bytes_inflight_max=2 * 64, store_deadline_ns=50 * MS).run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_a_hung_adapter_does_not_hold_up_the_other(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.b.automatic = True
        rig.store(rig.keys(8))
        await rig.pause(200 * MS)
        assert len(rig.b.records) == 8
        assert rig.a.records == {}

    rig_of(seed, adapters=("a", "b"), automatic=False, writeback_bytes_inflight_max=4 * 64).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_objects_that_are_evicted_before_their_turn_are_dropped_and_counted(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        for chunk in range(30):
            rig.store([rig.key(chunk)])
            await rig.pause(rig.random.randint(0, MS))
        await rig.storage.drain()
        statistics = rig.storage.statistics().writeback
        assert statistics.stored + statistics.dropped == 30
        assert statistics.dropped > 0
        assert len(rig.a.records) == statistics.stored

    rig_of(seed, l1_cells=4, writeback_bytes_inflight_max=64).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_skip_l1_leaves_the_object_to_its_readers_once_it_is_stored(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        keys = rig.keys(3)
        rig.store(keys)
        job = rig.start(1)
        await rig.storage.drain()
        assert [rig.l1.contains(key) for key in keys] == [True, False, False]
        assert list(rig.a.records) == list(rig.b.records) == keys
        rig.read(job, 1)
        assert not rig.l1.contains(keys[0])

    rig_of(seed, adapters=("a", "b"), skip_l1=True).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_skip_l1_waits_for_the_last_target_and_one_success_is_enough(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        key = rig.key(0)
        rig.a.store_answer = lambda key: StoreAnswer.FAILED
        rig.a.automatic = True
        rig.store([key])
        await rig.pause(10 * MS)
        assert rig.l1.contains(key), "the other target still needs it"
        rig.b.finish_store()
        await rig.pause()
        assert not rig.l1.contains(key)

    rig_of(seed, adapters=("a", "b"), automatic=False, skip_l1=True).run(scenario)


def test_skip_l1_keeps_an_ordinary_copy_when_no_target_has_stored(rig_of: RigOf) -> None:
    """S19."""

    async def scenario(rig: Any) -> None:
        for adapter in rig.adapters:
            adapter.store_answer = lambda key: StoreAnswer.FULL
        rig.store(rig.keys(2))
        await rig.storage.drain()
        job = rig.start(2)
        assert rig.best(job) == 2
        rig.read(job, 2)
        assert all(map(rig.l1.contains, rig.keys(2)))

    rig_of(0, adapters=("a", "b"), skip_l1=True).run(scenario)


def test_an_intact_record_that_was_there_already_counts_as_stored(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.a.store_answer = lambda key: StoreAnswer.PRESENT
        rig.store(rig.keys(1))
        await rig.storage.drain()
        assert rig.storage.statistics().writeback.present == 1
        assert not rig.l1.contains(rig.key(0))

    rig_of(0, skip_l1=True).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_key_that_goes_and_comes_back_is_stored_again_and_ends_clean(rig_of: RigOf, seed: int) -> None:
    """The second life of a key must not inherit the first one's retries or its verdict."""

    async def scenario(rig: Any) -> None:
        rig.a.store_answer = lambda key: rig.random.pick([StoreAnswer.STORED, StoreAnswer.RETRY, StoreAnswer.FAILED])
        for _ in range(6):
            rig.store(rig.keys(2))
            await rig.pause(rig.random.randint(0, 12 * MS))
            rig.storage.drop_l1()
        await rig.storage.drain()

    rig_of(seed, skip_l1=True, store_backoff_ns=3 * MS, store_deadline_ns=4 * MS).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_store_never_slows_a_lookup(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(4))
        job = rig.start(4)
        assert rig.best(job) == 4
        assert rig.read(job, 4) == [Answer.RELEASED] * 4
        assert rig.clock.now_ns() == 0

    rig_of(seed, automatic=False).run(scenario)

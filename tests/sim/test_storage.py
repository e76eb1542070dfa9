"""The door to L1 and L2: stores, reads, deaths, and closing with work outstanding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError, ConfigError
from kvcore.l2.adapter import StoreAnswer
from kvcore.storage import Storage, StorageConfig

MS = 1_000_000
SEEDS = range(50)

RigOf = Callable[..., Any]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_stored_survives_l1_in_the_real_adapter(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(6))
        assert await rig.storage.drain()
        assert rig.storage.idle
        assert rig.storage.drop_l1() == 6
        job = rig.start(6)
        await job.wait()
        assert rig.best(job) == 6
        rig.read(job, 6)

    rig_of(seed, real=True).run(scenario)


def test_a_second_writer_of_a_resident_key_has_nothing_to_write(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(1))
        assert rig.store(rig.keys(1)) == [Answer.RESIDENT]

    rig_of(0, adapters=()).run(scenario)


def test_the_second_of_two_writers_is_discarded_and_readers_keep_their_bytes(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        key = rig.key(0)
        for tag in ("one", "two"):
            _, slots = rig.storage.reserve_store(tag, tag, [key], [64])
            rig.l1.view(slots[0])[:] = (tag * 32).encode()[:64]
        assert rig.storage.commit_store("one", "one", [key]) == [Answer.PUBLISHED]
        job = rig.start(1)
        assert rig.storage.commit_store("two", "two", [key]) == [Answer.DISCARDED]
        slot = rig.storage.open_read("r", job.owner, [key])[0]
        assert bytes(rig.l1.view(slot)[:6]) == b"oneone"
        assert rig.storage.close_read("r", job.owner, [key]) == [Answer.RELEASED]

    rig_of(0, adapters=()).run(scenario)


def test_an_aborted_store_is_never_visible_and_a_repeated_commit_changes_nothing(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        keys = rig.keys(2)
        rig.storage.reserve_store("t", "w", keys, 64)
        assert rig.storage.abort_store("t", "w", keys[:1]) == [Answer.ABORTED]
        assert rig.storage.commit_store("t", "other", keys) == [Answer.UNKNOWN] * 2, "not that worker's staging"
        assert rig.storage.commit_store("t", "w", keys) == [Answer.UNKNOWN, Answer.PUBLISHED]
        assert rig.storage.commit_store("t", "w", keys) == [Answer.UNKNOWN] * 2
        assert not rig.l1.contains(keys[0])
        await rig.storage.drain()
        assert list(rig.a.records) == keys[1:]

    rig_of(0).run(scenario)


def test_a_store_whose_deadline_passes_publishes_nothing_and_drains_with_its_worker(rig_of: RigOf) -> None:
    """R21: expiry is an abort; the memory is not reused while the worker may still write."""

    async def scenario(rig: Any) -> None:
        key = rig.key(0)
        rig.storage.reserve_store("t", "w", [key], 64, deadline_ns=10 * MS)
        await rig.pause(11 * MS)
        assert rig.storage.statistics().l1.bytes_draining == 64
        rig.storage.reserve_store("t", "w", [key], 64, deadline_ns=30 * MS)
        assert rig.storage.statistics().l1.bytes_draining == 64, "a fresh buffer beside the draining one"
        assert rig.storage.commit_store("t", "w", [key]) == [Answer.PUBLISHED]
        assert rig.storage.statistics().l1.bytes_draining == 0

    rig_of(0, adapters=()).run(scenario)


def test_a_late_commit_is_told_that_it_expired(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        key = rig.key(0)
        rig.storage.reserve_store("t", "w", [key], 64, deadline_ns=10 * MS)
        await rig.pause(11 * MS)
        assert rig.storage.commit_store("t", "w", [key]) == [Answer.EXPIRED]
        assert not rig.l1.contains(key)
        rig.check_rest()

    rig_of(0, adapters=()).run(scenario)


def test_a_dead_worker_publishes_nothing_and_its_memory_returns(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(1, prompt="q"))
        job = rig.start(1, prompt="q")
        rig.storage.open_read("w", job.owner, [rig.key(0, prompt="q")])
        rig.storage.reserve_store("t", "w", rig.keys(3), 64)
        assert rig.storage.release_holder("w") == 4
        assert rig.storage.commit_store("t", "w", rig.keys(3)) == [Answer.UNKNOWN] * 3
        assert job.leases == 1, "the lease is the session's, not the worker's"
        statistics = rig.storage.statistics()
        assert (statistics.stagings, statistics.readings, statistics.l1.holds) == (0, 0, 0)

    rig_of(0, adapters=()).run(scenario)


def test_opening_twice_takes_one_hold(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(2))
        job = rig.start(2)
        keys = rig.keys(2)
        first = rig.storage.open_read("w", job.owner, keys)
        assert rig.storage.open_read("w", job.owner, [*keys, keys[0]]) == [*first, first[0]]
        assert rig.storage.statistics().l1.holds == 2
        assert rig.storage.close_read("w", job.owner, [*keys, keys[0]]) == [
            Answer.RELEASED,
            Answer.RELEASED,
            Answer.UNKNOWN,
        ]
        assert rig.storage.open_read("w", job.owner, keys) == [None, None]

    rig_of(0, adapters=()).run(scenario)


def test_releasing_an_owner_lets_a_running_copy_finish_on_memory_of_its_own(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(1))
        job = rig.start(1)
        slot = rig.storage.open_read("w", job.owner, rig.keys(1))[0]
        before = bytes(rig.l1.view(slot))
        assert rig.storage.release_owner(job.owner) == 1
        assert rig.storage.release_owner(job.owner) == 0
        rig.storage.drop_l1()
        for chunk in range(40):
            rig.store([rig.key(chunk, prompt="flood")])
        assert bytes(rig.l1.view(slot)) == before
        assert rig.storage.close_read("w", job.owner, rig.keys(1)) == [Answer.UNKNOWN]

    rig_of(0, adapters=(), l1_cells=2).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_closing_with_work_outstanding_is_bounded_and_publishes_nothing_more(rig_of: RigOf, seed: int) -> None:
    """R41's shape: a hung store, a running load, a waiting lookup; close returns in time, twice."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(3, prompt="q"))
        rig.store(rig.keys(3))
        loading = rig.start(3, prompt="q")
        rig.a.finish_lookup()
        await rig.pause()
        waiting = rig.start(3, prompt="other")
        backlog = rig.storage.statistics().prefetch.jobs_waiting
        assert backlog == 1
        began = rig.clock.now_ns()
        await rig.storage.close()
        await rig.storage.close()
        assert rig.clock.now_ns() - began == 40 * MS
        assert loading.state.name == waiting.state.name == "FAILED"
        assert rig.a.closed
        statistics = rig.storage.statistics()
        assert statistics.l1.leases == 0
        assert statistics.l1.objects_staging == 0
        assert statistics.prefetch.jobs == 0
        assert statistics.prefetch.budget.bytes_used == 0
        assert statistics.l1.holds == 6, "whatever the adapter may still touch keeps its memory"
        rig.a.finish_load()
        await rig.pause()
        assert not rig.l1.contains(rig.key(0, prompt="q"))
        with pytest.raises(CallerError, match="closed"):
            rig.start(1)
        with pytest.raises(CallerError, match="closed"):
            rig.storage.reserve_store("t", "w", rig.keys(1), 64)

    rig_of(seed, automatic=False, close_deadline_ns=40 * MS, prefetch_budget_bytes=4 * 64).run(scenario, close=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_closing_at_any_moment_of_a_busy_life_leaves_no_lease(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.a.store_answer = lambda key: rig.random.pick([StoreAnswer.STORED, StoreAnswer.RETRY])
        rig.fill_l2(rig.b, rig.keys(6, prompt="q"))
        for chunk in range(6):
            rig.store([rig.key(chunk)])
            rig.start(6, prompt="q")
            rig.start(chunk + 1)
            await rig.pause(rig.random.randint(0, 3 * MS))
        await rig.storage.close()
        rig.check_rest()

    rig_of(seed, adapters=("a", "b"), prefetch_budget_bytes=5 * 64).run(scenario, close=False)


def test_a_closed_storage_closes_quickly_when_nothing_runs(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        await rig.storage.close()
        assert rig.clock.now_ns() == 0

    rig_of(0).run(scenario, close=False)


def test_drain_gives_up_at_its_timeout_and_the_work_goes_on(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(1))
        assert not await rig.storage.drain(20 * MS)
        assert rig.clock.now_ns() == 20 * MS
        rig.a.finish_store()
        assert await rig.storage.drain(20 * MS)

    rig_of(0, automatic=False).run(scenario)


def test_two_adapters_of_one_name_are_refused(rig_of: RigOf) -> None:
    with pytest.raises(ConfigError, match="same name"):
        rig_of(0, adapters=("a", "a")).run(_nothing)


async def _nothing(rig: Any) -> None:
    assert isinstance(rig.storage, Storage)


@pytest.mark.parametrize("field", ["lease_ns", "store_attempts_max", "close_deadline_ns"])
def test_a_configuration_that_cannot_work_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        StorageConfig(**{field: 0})
    with pytest.raises(ConfigError, match="prefetch_budget_bytes"):
        StorageConfig(prefetch_budget_bytes=-1)


def test_misshapen_lookups_are_refused_before_anything_is_leased(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(2))
        good = {
            "salt": "",
            "prompt_tokens": 100,
            "masks": [3],
            "skip_chunks": 0,
            "deadline_ns": MS,
        }
        for wrong in ({"masks": [3, 3]}, {"masks": [-1]}, {"skip_chunks": -1}, {"prompt_tokens": 31}):
            with pytest.raises(CallerError):
                rig.storage.start_lookup(rig.owner(), rig.hashes(2), **{**good, **wrong})
        rig.check_rest()

    rig_of(0, adapters=()).run(scenario)

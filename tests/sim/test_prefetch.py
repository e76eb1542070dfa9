"""Lookups that observe, look up, plan once, load and answer; in many orders, with everything given back at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.groups import GroupKind, ObjectGroup

MS = 1_000_000
FULL = ObjectGroup(GroupKind.FULL, 16, 64)
WINDOW = ObjectGroup(GroupKind.WINDOW, 16, 64, 24)
RECURRENT = ObjectGroup(GroupKind.RECURRENT, 16, 128)
SEEDS = range(50)

RigOf = Callable[..., Any]


def test_without_adapters_the_answer_is_immediate(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(3))
        job = rig.start(5)
        assert rig.best(job) == 3
        assert job.leases == 3

    rig_of(0, adapters=()).run(scenario)


@pytest.mark.parametrize("stored", [0, 3])
def test_a_deadline_is_watched_for_leases_only_and_a_miss_leaves_no_job_and_no_keys(rig_of: RigOf, stored: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(stored))
        job = rig.start(5)
        assert rig.best(job) == stored
        assert (job.timer is None) == (stored == 0)
        assert (rig.storage.statistics().prefetch.jobs == 0) == (stored == 0)
        if stored == 0:
            with pytest.raises(ValueError, match="zip"):
                job.cells.keys(job.demand.required)  # its keys are gone, and asking for them shows

    rig_of(0, adapters=()).run(scenario)


def test_what_l1_serves_alone_asks_no_adapter(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(4))
        assert rig.best(rig.start(4)) == 4
        assert rig.a.lookups_of == {}

    rig_of(0).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_l1_and_two_adapters_make_one_prefix_and_every_byte_is_right(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        keys = rig.keys(8)
        rig.store(keys[:2])
        await rig.storage.drain()
        rig.fill_l2(rig.a, keys[1:5])
        rig.fill_l2(rig.b, keys[3:])
        job = rig.start(8)
        await job.wait()
        assert rig.best(job) == 8
        job.settle(8)
        assert rig.a.locks_held == rig.b.locks_held == 0
        assert all(count == 1 for adapter in rig.adapters for count in adapter.loads_of.values())
        assert rig.read(job, 8) == [Answer.RELEASED] * 8
        assert job.leases == 0
        assert [rig.l1.contains(key) for key in keys] == [True] * 2 + [False] * 6, "loaded cells are temporary"

    rig_of(seed, adapters=("a", "b")).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_hybrid_rows_load_windows_and_snapshots_only(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(6))
        job = rig.start(6)
        await job.wait()
        assert rig.best(job) == 6
        assert sorted(rig.a.loads_of.values()) == [1] * 2 * (6 + 2 + 1)
        rig.read(job, 6)

    rig_of(seed, groups=(FULL, WINDOW, RECURRENT), ranks=2).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failed_cell_shortens_the_hit_and_is_a_miss_the_next_time(rig_of: RigOf, seed: int) -> None:
    """R16, R17: lookup said yes, the load delivered less; nothing loops on the remembered yes."""

    async def scenario(rig: Any) -> None:
        keys = rig.keys(4)
        rig.fill_l2(rig.a, keys)
        rig.a.lose = {keys[2]}
        job = rig.start(4)
        await job.wait()
        assert rig.best(job) == 2
        assert job.leases == 2, "the fourth chunk came but is unusable, and is not kept"
        rig.read(job, 2)
        rig.a.delete([keys[2]])
        again = rig.start(4)
        await again.wait()
        assert rig.best(again) == 2
        assert rig.a.loads_of[keys[2]] == 1

    rig_of(seed).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failed_load_is_never_visible_never_announced_and_never_written_back(rig_of: RigOf, seed: int) -> None:
    """R20: between any two steps of the clean-up the background storer may run."""

    async def scenario(rig: Any) -> None:
        keys = rig.keys(4)
        rig.fill_l2(rig.a, keys)
        rig.a.lose = set(keys)
        seen: list[Any] = []
        inner = rig.storage._writeback.published
        rig.storage._writeback.published = lambda key, slot, temporary: (seen.append(key), inner(key, slot, temporary))
        job = rig.start(4)
        await job.wait()
        assert rig.best(job) == 0
        assert not any(map(rig.l1.contains, keys))
        await rig.storage.drain()
        assert seen == []
        assert rig.b.records == {}

    rig_of(seed, adapters=("a", "b"), retain=True).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_adapter_that_refuses_a_task_outright_is_a_miss(rig_of: RigOf, seed: int) -> None:
    """R18: the submission itself fails."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(3))
        rig.fill_l2(rig.b, rig.keys(3)[:1])
        rig.a.refuse_submit = True
        job = rig.start(3)
        await job.wait()
        assert rig.best(job) == 1
        rig.a.refuse_submit = False

    rig_of(seed, adapters=("a", "b")).run(scenario)


def test_a_load_that_is_refused_outright_returns_locks_and_bytes(rig_of: RigOf) -> None:
    """R18: found and locked, then the load cannot even be submitted."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(3))
        job = rig.start(3)
        rig.a.refuse_submit = True
        rig.a.finish_lookup()
        await job.wait()
        assert rig.best(job) == 0
        rig.a.refuse_submit = False

    rig_of(0, automatic=False).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_requests_for_the_same_cells_load_them_once(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(6))
        jobs = []
        for _ in range(4):
            jobs.append(rig.start(6))
            await rig.pause(rig.random.randint(0, 2 * MS))
        for job in jobs:
            await job.wait()
            assert rig.best(job) == 6
        assert set(rig.a.loads_of.values()) == {1}
        for job in jobs:
            rig.read(job, 6)

    rig_of(seed).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_joined_load_outlives_the_cancel_of_the_request_that_began_it(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(4))
        first = rig.start(4)
        rig.a.finish_lookup()
        await rig.pause()
        second = rig.start(4)
        first.cancel()
        assert first.state.name == "FAILED"
        rig.a.finish_load()
        await second.wait()
        assert rig.best(second) == 4
        rig.read(second, 4)

    rig_of(seed, automatic=False).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_that_nobody_waits_for_any_more_is_dropped(rig_of: RigOf, seed: int) -> None:
    """R24: abort while the prefetch runs; whichever comes first, everything is freed once."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(4))
        job = rig.start(4)
        rig.a.finish_lookup()
        await rig.pause()
        job.cancel()
        job.cancel()
        assert rig.a.locks_held == 4, "the source stays protected while it is read"
        assert rig.storage.statistics().l1.holds == 4, "the buffer belongs to the adapter"
        rig.a.finish_load()
        await rig.pause()
        assert not any(map(rig.l1.contains, rig.keys(4)))
        rig.check_rest()

    rig_of(seed, automatic=False).run(scenario)


@pytest.mark.parametrize("seed", range(80))
def test_cancel_at_any_moment_gives_everything_back(rig_of: RigOf, seed: int) -> None:
    """R24, R22b: the abort may come before, between and after any two steps."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(6)[:4])
        rig.fill_l2(rig.b, rig.keys(6)[2:])
        rig.store(rig.keys(6)[:1])
        jobs = [rig.start(6) for _ in range(3)]
        for job in jobs[:2]:
            await rig.pause(rig.random.randint(0, 8 * MS))
            if rig.random.chance(1, 2):
                job.cancel()
            else:
                rig.storage.release_owner(job.owner)
            assert job.leases == 0
        await jobs[2].wait()
        assert rig.best(jobs[2]) == 6
        rig.read(jobs[2], 6)

    rig_of(seed, adapters=("a", "b")).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_engine_decides_on_no_load_and_all_leases_go(rig_of: RigOf, seed: int) -> None:
    """R22 variant b."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(4))
        job = rig.start(4)
        await job.wait()
        job.settle(0)
        job.settle(0)
        assert job.leases == 0
        rig.check_rest()

    rig_of(seed).run(scenario)


def test_settle_keeps_exactly_the_leases_of_the_length_less_what_the_engine_has(rig_of: RigOf) -> None:
    """R22: chunk 1 is local, chunks 2 to 4 are fetched; each lease ends once."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(6))
        job = rig.start(6, skip=1)
        assert job.leases == 5
        job.settle(4)
        assert job.leases == 3
        assert rig.read(job, 4) == [Answer.RELEASED] * 3
        assert rig.storage.close_read("w", job.owner, [rig.key(1)]) == [Answer.UNKNOWN]

    rig_of(0, adapters=()).run(scenario)


def test_only_the_missing_chunks_are_read_when_the_engine_has_most_of_the_prompt(rig_of: RigOf) -> None:
    """R67."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(10))
        job = rig.start(10, skip=9)
        await job.wait()
        assert rig.best(job) == 10
        assert list(rig.a.lookups_of) == list(rig.a.loads_of) == [rig.key(9)]

    rig_of(0).run(scenario)


def test_a_late_lookup_is_unlocked_on_arrival_and_does_not_change_the_answer(rig_of: RigOf) -> None:
    """R37: the timed-out lookup's locks go; asking again is a fresh lookup."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(3))
        job = rig.start(3)
        await job.wait()
        assert rig.best(job) == 0
        again = rig.start(3)
        rig.a.finish_lookup()
        await rig.pause()
        assert rig.a.locks_held == 0
        assert rig.best(job) == 0
        rig.a.finish_lookup()
        await rig.pause()
        rig.a.finish_load()
        await again.wait()
        assert rig.best(again) == 3

    rig_of(0, automatic=False, lookup_deadline_ns=10 * MS).run(scenario)


def test_one_slow_adapter_does_not_keep_the_other_from_the_plan(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(4))
        rig.fill_l2(rig.b, rig.keys(2))
        job = rig.start(4)
        rig.b.finish_lookup()
        await rig.pause(11 * MS)
        rig.b.finish_load()
        await job.wait()
        assert rig.best(job) == 2
        assert rig.clock.now_ns() < 20 * MS

    rig_of(0, adapters=("a", "b"), automatic=False, lookup_deadline_ns=10 * MS).run(scenario)


def test_cells_are_published_per_adapter_not_after_the_slowest(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(2))
        rig.fill_l2(rig.b, rig.keys(4)[2:])
        job = rig.start(4, timeout_ns=50 * MS)
        rig.a.finish_lookup()
        rig.b.finish_lookup()
        await rig.pause()
        rig.a.finish_load()
        await rig.pause()
        assert [rig.l1.contains(key) for key in rig.keys(4)] == [True, True, False, False]
        await job.wait()
        assert rig.best(job) == 2, "at the deadline the answer is what is held"
        rig.read(job, 2)

    rig_of(0, adapters=("a", "b"), automatic=False).run(scenario)


def test_a_load_that_never_ends_answers_at_the_deadline_and_keeps_only_its_buffer(rig_of: RigOf) -> None:
    """R35: the request goes on; the memory that may still be written is not reused."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(1))
        rig.fill_l2(rig.a, rig.keys(3))
        job = rig.start(3, timeout_ns=20 * MS)
        rig.a.finish_lookup()
        await job.wait()
        assert rig.best(job) == 1
        assert rig.clock.now_ns() == 20 * MS
        statistics = rig.storage.statistics()
        assert statistics.l1.bytes_staging == 2 * 64
        assert statistics.prefetch.budget.bytes_used == 2 * 64
        again = rig.start(3, timeout_ns=20 * MS)
        await again.wait()
        assert rig.best(again) == 1, "a second request waits for its own deadline only"

    rig_of(0, automatic=False).run(scenario)


def test_a_lookup_that_is_hurried_while_it_loads_answers_with_what_has_arrived(rig_of: RigOf) -> None:
    """What comes later is the cache's, as after a deadline; what it asks of the answer is there."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(2))
        rig.fill_l2(rig.b, rig.keys(4)[2:])
        job = rig.start(4)
        rig.a.finish_lookup()
        rig.b.finish_lookup()
        await rig.pause()
        rig.a.finish_load()
        await rig.pause()
        job.hurry()
        assert rig.best(job) == 2
        job.hurry()
        assert rig.storage.statistics().prefetch.hurried == 1
        again = rig.start(4)
        rig.read(job, 2)
        rig.b.finish_load()
        await again.wait()
        assert rig.best(again) == 4, "the load goes on for who came later"
        assert rig.best(job) == 2
        again.hurry()
        assert rig.storage.statistics().prefetch.hurried == 1
        assert rig.storage.statistics().prefetch.deadlines == 0

    rig_of(0, adapters=("a", "b"), automatic=False).run(scenario)


def test_a_lookup_that_is_hurried_while_stores_are_asked_gives_back_what_they_lock(rig_of: RigOf) -> None:
    """One store has answered and one has not: the locks of both go back, those of the late one when it answers."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(1))
        rig.fill_l2(rig.a, rig.keys(3))
        rig.fill_l2(rig.b, rig.keys(3))
        job = rig.start(3)
        rig.a.finish_lookup()
        await rig.pause()
        assert rig.a.locks_held == 2
        job.hurry()
        assert rig.best(job) == 1
        assert rig.a.locks_held == 0
        rig.b.finish_lookup()
        await rig.pause()
        assert rig.b.locks_held == 0
        assert not rig.b.loads

    rig_of(0, adapters=("a", "b"), automatic=False).run(scenario)


async def behind_a_big_one(rig: Any, **options: Any) -> Any:
    """A lookup of five chunks that waits for bytes: two are in L1, all in L2, and another one has the whole budget."""
    rig.store(rig.keys(2))
    await rig.storage.drain()
    rig.fill_l2(rig.a, [*rig.keys(5), *rig.keys(4, prompt="big")])
    big = rig.start(4, prompt="big")
    await big.wait()
    return rig.start(5, **options)


def test_a_lookup_that_is_hurried_while_it_waits_for_bytes_leaves_the_line(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        job = await behind_a_big_one(rig)
        assert rig.storage.statistics().prefetch.jobs_waiting == 1
        job.hurry()
        assert rig.storage.statistics().prefetch.jobs_waiting == 0
        assert rig.best(job) == 2
        assert rig.a.lookups_of.get(rig.key(3)) is None

    rig_of(0, prefetch_budget_bytes=4 * 64).run(scenario)


def test_a_hurry_after_the_end_changes_nothing(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(2))
        job = rig.start(2)
        job.cancel()
        job.hurry()
        assert (job.state.name, job.reason) == ("FAILED", "cancelled")
        assert rig.storage.statistics().prefetch.hurried == 0

    rig_of(0).run(scenario)


def test_a_failed_cell_ends_the_wait_for_loads_that_cannot_help_any_more(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        keys = rig.keys(4)
        rig.fill_l2(rig.a, keys[:2])
        rig.fill_l2(rig.b, keys[2:])
        rig.a.lose = {keys[1]}
        job = rig.start(4)
        rig.a.finish_lookup()
        rig.b.finish_lookup()
        await rig.pause()
        rig.a.finish_load()
        await rig.pause()
        assert rig.best(job) == 1
        assert rig.storage.statistics().prefetch.replanned == 1
        assert len(rig.b.loads) == 1, "the useless load still runs and still owns its buffers"

    rig_of(0, adapters=("a", "b"), automatic=False).run(scenario)


def test_a_failed_cell_does_not_end_the_wait_for_loads_in_front_of_it(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        keys = rig.keys(4)
        rig.fill_l2(rig.a, keys[:2])
        rig.fill_l2(rig.b, keys[2:])
        rig.b.lose = {keys[3]}
        job = rig.start(4)
        rig.a.finish_lookup()
        rig.b.finish_lookup()
        await rig.pause()
        rig.b.finish_load()
        await rig.pause()
        assert job.state.name == "PENDING", "two chunks are still on their way, and the third is there"
        rig.a.finish_load()
        await job.wait()
        assert rig.best(job) == 3
        rig.read(job, 3)

    rig_of(0, adapters=("a", "b"), automatic=False).run(scenario)


def test_no_space_after_admission_is_a_shorter_hit_and_never_a_wait(rig_of: RigOf) -> None:
    """R36: room for 8 cells, 6 of them pinned."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(6, prompt="pinned"))
        pinned = rig.start(6, prompt="pinned")
        assert rig.best(pinned) == 6
        rig.fill_l2(rig.a, rig.keys(4))
        job = rig.start(4)
        await job.wait()
        assert rig.best(job) == 2
        assert rig.a.locks_held == 0
        assert set(rig.a.loads_of) == set(rig.keys(2)), "cells behind the refused one are not read"

    rig_of(0, l1_cells=4).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_many_prefetches_share_a_small_budget_and_all_end(rig_of: RigOf, seed: int) -> None:
    """R36: whole demands, in turn; no spinning, no wait for ever, the peak stays under the budget."""

    async def scenario(rig: Any) -> None:
        jobs = {}
        for number in range(5):
            prompt = f"q{number}"
            rig.fill_l2(rig.a, rig.keys(3, prompt=prompt))
            jobs[rig.start(3, prompt=prompt)] = prompt

        for job, prompt in jobs.items():
            await job.wait()
            assert rig.best(job) == 3
            await rig.pause(rig.random.randint(0, 3 * MS))
            rig.read(job, 3, prompt=prompt)
        budget = rig.storage.statistics().prefetch.budget
        assert budget.waited >= 3
        assert budget.bytes_used_max <= 4 * 64

    rig_of(seed, prefetch_budget_bytes=4 * 64).run(scenario)


def test_a_demand_over_the_whole_budget_is_cut_to_the_longest_prefix_that_fits(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(8))
        job = rig.start(8)
        await job.wait()
        assert rig.best(job) == 3
        rig.read(job, 3)

    rig_of(0, prefetch_budget_bytes=3 * 64 + 63).run(scenario)


def test_a_request_that_waits_for_bytes_is_answered_from_l1_at_its_deadline(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        job = await behind_a_big_one(rig, timeout_ns=30 * MS)
        before = rig.clock.now_ns()
        await job.wait()
        assert rig.clock.now_ns() - before == 30 * MS
        assert rig.best(job) == 2
        assert rig.a.lookups_of.get(rig.key(3)) is None, "it was never admitted, so nothing was looked up"

    rig_of(0, prefetch_budget_bytes=4 * 64).run(scenario)


def test_bytes_come_back_when_a_reader_vanishes(rig_of: RigOf) -> None:
    """What gives bytes back never waits for another request: a lease ends at its deadline by itself."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, [*rig.keys(4), *rig.keys(4, prompt="next")])
        vanished = rig.start(4, timeout_ns=100 * MS)
        await vanished.wait()
        slots = rig.storage.open_read("w", vanished.owner, [rig.key(0)])
        job = rig.start(4, prompt="next", timeout_ns=5_000 * MS)
        await job.wait()
        assert rig.best(job) == 4
        assert rig.clock.now_ns() >= 300 * MS
        assert bytes(rig.l1.view(slots[0]))[:1] != b"", "the copy that still runs keeps its memory"
        assert rig.storage.statistics().l1.bytes_draining > 0
        assert rig.storage.close_read("w", vanished.owner, [rig.key(0)]) == [Answer.EXPIRED]

    rig_of(0, prefetch_budget_bytes=4 * 64, lease_ns=200 * MS).run(scenario)


def test_those_in_line_for_cells_that_another_begins_to_load_join_it_and_cost_nothing(rig_of: RigOf) -> None:
    """R58's shape: sharers wait for one load, not for each other's leases."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(4))
        jobs = [rig.start(4) for _ in range(6)]
        for job in jobs:
            await job.wait()
            assert rig.best(job) == 4
        assert rig.clock.now_ns() < 20 * MS
        assert set(rig.a.loads_of.values()) == {1}
        assert rig.storage.statistics().prefetch.budget.bytes_used == 4 * 64
        for job in jobs:
            assert rig.storage.statistics().prefetch.budget.bytes_used == 4 * 64, "unread until the last reader ends"
            rig.read(job, 4)

    rig_of(0, prefetch_budget_bytes=4 * 64).run(scenario)


def test_a_temporary_object_lives_until_both_its_readers_are_done(rig_of: RigOf) -> None:
    """R65: and it is not stored again where it came from."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(2))
        first, second = rig.start(2), rig.start(2)
        await first.wait()
        await second.wait()
        rig.read(first, 2)
        assert all(map(rig.l1.contains, rig.keys(2)))
        rig.read(second, 2)
        assert not any(map(rig.l1.contains, rig.keys(2)))
        await rig.storage.drain()
        assert rig.a.stores_of == {}

    rig_of(0).run(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_retained_cells_go_to_the_other_adapter_and_not_back_to_their_own(rig_of: RigOf, seed: int) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(3))
        job = rig.start(3)
        await job.wait()
        rig.read(job, 3)
        assert all(map(rig.l1.contains, rig.keys(3)))
        await rig.storage.drain()
        assert rig.a.stores_of == {}
        assert rig.b.records == rig.a.records

    rig_of(seed, adapters=("a", "b"), retain=True).run(scenario)


def test_a_cell_that_a_worker_stores_while_it_loads_is_leased_where_it_is(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(2))
        job = rig.start(2)
        rig.a.finish_lookup()
        await rig.pause()
        rig.store(rig.keys(1))
        rig.a.finish_load()
        await job.wait()
        assert rig.best(job) == 2
        assert rig.storage.statistics().prefetch.loads.discarded == 1
        rig.read(job, 2)
        assert rig.l1.contains(rig.key(0)), "the worker's copy is durable"
        assert not rig.l1.contains(rig.key(1))

    rig_of(0, automatic=False).run(scenario)


def test_an_object_that_becomes_durable_is_not_the_prefetchs_any_more(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(1))
        job = rig.start(1)
        await job.wait()
        assert rig.storage.statistics().prefetch.budget.bytes_used == 64
        rig.store(rig.keys(1))
        assert rig.storage.statistics().prefetch.budget.bytes_used == 0
        rig.read(job, 1)
        assert rig.l1.contains(rig.key(0))

    rig_of(0).run(scenario)


def test_an_owner_has_one_lookup_at_a_time(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(1))
        owner = rig.owner()
        job = rig.start(1, owner=owner)
        with pytest.raises(CallerError, match="still has a lookup"):
            rig.start(1, owner=owner)
        rig.storage.release_owner(owner)
        assert rig.best(rig.start(1, owner=owner)) == 1
        assert job.leases == 0

    rig_of(0, adapters=()).run(scenario)


def test_settling_at_a_length_that_was_not_answered_is_refused(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(2))
        job = rig.start(4)
        with pytest.raises(CallerError, match="pending"):
            job.settle(1)
        await job.wait()
        for length in (3, -1, 1 << 20):
            with pytest.raises(CallerError, match="not one of"):
                job.settle(length)
        job.settle(2)
        job.settle(2)
        with pytest.raises(CallerError, match="settled at 2"):
            job.settle(1)

    rig_of(0).run(scenario)


def test_repeated_hashes_of_a_hostile_peer_end_the_prefix(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(3))
        hashes = rig.hashes(3)
        job = rig.storage.start_lookup(
            rig.owner(),
            [*hashes, hashes[1], hashes[0]],
            salt="",
            prompt_tokens=1000,
            masks=[(1 << 5) - 1],
            skip_chunks=0,
            deadline_ns=10 * MS,
        )
        assert rig.best(job) == 3
        assert job.leases == 3

    rig_of(0, adapters=()).run(scenario)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_storm_of_lookups_over_real_adapters_leaves_nothing_behind(rig_of: RigOf, seed: int) -> None:
    """Several prompts, tiny L1, tiny budget, aborts and deadlines, over the production adapter in simulated time."""

    async def scenario(rig: Any) -> None:
        prompts = [f"q{number}" for number in range(4)]
        for prompt in prompts:
            for key in rig.keys(4, prompt=prompt):
                rig.store([key])
                await rig.storage.drain()
        rig.storage.drop_l1()
        jobs = []
        for _ in range(12):
            prompt = rig.random.pick(prompts)
            jobs.append((rig.start(4, prompt=prompt, timeout_ns=rig.random.randint(1, 4 * MS)), prompt))
            await rig.pause(rig.random.randint(0, MS // 2))
            if rig.random.chance(1, 3):
                rig.random.pick(jobs)[0].cancel()
        served = 0
        for job, prompt in jobs:
            if await job.wait() and job.state.name == "READY" and job.leases:
                length = rig.best(job)
                job.settle(length)
                rig.read(job, length, prompt=prompt)
                served += length
        assert served > 0

    rig_of(seed, real=True, l1_cells=14, groups=(FULL, RECURRENT), prefetch_budget_bytes=16 * 64).run(scenario)


def test_equal_seeds_give_equal_runs(rig_of: RigOf) -> None:
    def digest() -> Any:
        async def scenario(rig: Any) -> None:
            rig.fill_l2(rig.a, rig.keys(6))
            rig.fill_l2(rig.b, rig.keys(6))
            for job in [rig.start(6) for _ in range(3)]:
                await job.wait()

        rig = rig_of(7, adapters=("a", "b")).run(scenario)
        return rig.loop.now_ns(), rig.loop.callbacks_run

    assert digest() == digest()


def test_a_second_reader_of_a_loaded_cell_keeps_its_bytes_counted(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(2))
        first = rig.start(2)
        await first.wait()
        second = rig.start(2)
        assert rig.best(second) == 2
        rig.read(first, 2)
        assert rig.storage.statistics().prefetch.budget.bytes_used == 2 * 64
        rig.read(second, 2)
        assert rig.storage.statistics().prefetch.budget.bytes_used == 0

    rig_of(0).run(scenario)


def test_cells_behind_a_refused_one_are_given_up_before_they_are_read(rig_of: RigOf) -> None:
    """The first adapter's cells got the last room, and are useless without those of the second."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(6, prompt="pinned"))
        assert rig.best(rig.start(6, prompt="pinned")) == 6
        rig.fill_l2(rig.a, rig.keys(4)[2:])
        rig.fill_l2(rig.b, rig.keys(2))
        job = rig.start(4)
        await job.wait()
        assert rig.best(job) == 0
        assert rig.a.loads_of == rig.b.loads_of == {}
        assert rig.a.locks_held == rig.b.locks_held == 0
        assert rig.storage.statistics().l1.objects_staging == 0

    rig_of(0, l1_cells=4, adapters=("a", "b")).run(scenario)

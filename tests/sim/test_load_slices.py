"""A long load comes in slices: what has arrived is readable, and what nobody waits for any more is not hauled.

Cells are 64 bytes, slices (unless said otherwise) 4 cells: two chunks of two rows, or four of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.groups import GroupKind, ObjectGroup
from kvcore.keys import ObjectKey
from kvcore.loads import SLICES_RUNNING

MS = 1_000_000
FULL = ObjectGroup(GroupKind.FULL, 16, 64)
WINDOW = ObjectGroup(GroupKind.WINDOW, 16, 64, 24)
RECURRENT = ObjectGroup(GroupKind.RECURRENT, 16, 128)
SLICE = 4 * 64

RigOf = Callable[..., Any]


async def begin(rig: Any, chunks: int, timeout_ns: int = 1_000 * MS) -> Any:
    """A lookup whose cells are all in `a`, up to the first loads."""
    rig.fill_l2(rig.a, rig.keys(chunks))
    job = rig.start(chunks, timeout_ns=timeout_ns)
    rig.a.finish_lookup()
    await rig.pause(1)
    return job


async def finish_first(rig: Any) -> None:
    rig.a.finish_load()
    await rig.pause(1)


def sent(rig: Any) -> list[list[ObjectKey]]:
    """The cells of each load that the adapter works on."""
    return [task.keys for task in rig.a.loads.values()]


def chunks_of(rig: Any, keys: list[ObjectKey]) -> list[int]:
    hashes = rig.hashes(64)
    return [hashes.index(key.chunk_hash) for key in keys]


def test_leading_chunks_of_all_rows_are_readable_before_the_last_slice(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        job = await begin(rig, 8, timeout_ns=20 * MS)
        assert [chunks_of(rig, keys) for keys in sent(rig)] == [[0, 0, 1, 1], [2, 2, 3, 3]]
        await finish_first(rig)
        assert job.leases == 4
        assert [chunks_of(rig, keys) for keys in sent(rig)] == [[2, 2, 3, 3], [4, 4, 5, 5]]
        await finish_first(rig)
        await job.wait()
        assert rig.clock.now_ns() == 20 * MS
        assert rig.best(job) == 4
        rig.read(job, 4)

    rig_of(0, ranks=2, automatic=False, load_slice_bytes=SLICE).run(scenario)


def test_windows_and_snapshots_come_in_the_order_of_their_chunks(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        job = await begin(rig, 6)
        seen: list[list[ObjectKey]] = []
        chunks: list[int] = []
        while rig.a.loads:
            seen.append(sent(rig)[0])
            chunks += chunks_of(rig, seen[-1])
            await finish_first(rig)
        assert rig.best(job) == 6
        assert chunks == [0, 1, 2, 3, 4, 4, 5, 5, 5]
        assert all(sum(map(rig.size, keys)) <= SLICE for keys in seen)
        rig.read(job, 6)

    rig_of(0, groups=(FULL, WINDOW, RECURRENT), automatic=False, load_slice_bytes=SLICE).run(scenario)


@pytest.mark.parametrize("slice_bytes", [64 << 20, 2 * 6 * 64])
def test_what_fits_one_slice_is_one_task_in_the_order_of_the_rows(rig_of: RigOf, slice_bytes: int) -> None:
    async def scenario(rig: Any) -> None:
        await begin(rig, 6)
        assert sent(rig) == [rig.keys(6)]

    rig_of(0, ranks=2, automatic=False, load_slice_bytes=slice_bytes).run(scenario)


def test_a_cell_larger_than_a_slice_is_a_slice(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        job = await begin(rig, 5)
        while rig.a.loads:
            assert [len(keys) for keys in sent(rig)] <= [1] * SLICES_RUNNING
            await finish_first(rig)
        assert rig.best(job) == 5

    rig_of(0, automatic=False, load_slice_bytes=1).run(scenario)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("ends", ["cancel", "deadline"])
def test_when_the_reader_leaves_midway_the_rest_is_never_submitted(rig_of: RigOf, ends: str, retain: bool) -> None:
    async def scenario(rig: Any) -> None:
        job = await begin(rig, 20, timeout_ns=20 * MS)
        await finish_first(rig)
        await (job.wait() if ends == "deadline" else rig.pause(1))
        rig.storage.release_owner(job.owner)
        await rig.pause(1)
        state = rig.storage.statistics()
        assert state.prefetch.loads.in_flight == state.l1.objects_staging == rig.a.locks_held == 8, "what runs"
        assert state.prefetch.budget.bytes_used == state.l1.bytes_staging == 8 * 64
        assert state.prefetch.loads.abandoned == state.prefetch.loads.dropped == 8
        while rig.a.loads:
            await finish_first(rig)
        rig.check_rest()
        loads = rig.storage.statistics().prefetch.loads
        assert (loads.started, loads.abandoned) == (12, 8 if retain else 16)
        assert list(rig.a.loads_of) == rig.keys(12)
        assert [rig.l1.contains(key) for key in rig.keys(20)] == [retain] * 12 + [False] * 8
        assert await rig.storage.drain(0), "nothing more is to come"

    rig_of(0, automatic=False, retain=retain, load_slice_bytes=SLICE).run(scenario)


@pytest.mark.parametrize("leaves_first", [False, True])
def test_a_reader_that_joins_midway_keeps_the_rest_coming(rig_of: RigOf, leaves_first: bool) -> None:
    """Also when the load has lost its last reader just now, and has not been dropped yet."""

    async def scenario(rig: Any) -> None:
        first = await begin(rig, 16)
        await finish_first(rig)
        if leaves_first:
            first.cancel()
        second = rig.start(14)
        assert list(second.joined) == rig.keys(14)[4:]
        if not leaves_first:
            await rig.pause(1)
            first.cancel()
        await rig.pause(1)
        while rig.a.loads:
            await finish_first(rig)
        assert rig.best(second) == 14
        rig.read(second, 14)
        assert list(rig.a.loads_of.values()) == [1] * 14, "once each, and not the two that nobody waited for"

    rig_of(0, automatic=False, retain=True, load_slice_bytes=SLICE).run(scenario)


def test_a_slice_that_hangs_holds_up_its_own_lookup_only(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        hung = await begin(rig, 20, timeout_ns=20 * MS)
        hanging = list(rig.a.loads)
        other = rig.start(20, prompt="q", timeout_ns=10 * MS)
        rig.fill_l2(rig.a, rig.keys(20, prompt="q"))
        rig.a.finish_lookup()
        await rig.pause(1)
        while running := [task for task in rig.a.loads if task not in hanging]:
            rig.a.finish_load(running[0])
            await rig.pause(1)
        assert rig.best(other) == 20
        rig.read(other, 20, prompt="q")
        await hung.wait()
        await rig.pause(1)
        assert rig.best(hung) == 0
        state = rig.storage.statistics()
        assert state.l1.holds == state.l1.objects_staging == rig.a.locks_held == 8, "only what hangs is kept"
        assert state.prefetch.budget.bytes_used == 8 * 64

    rig_of(0, automatic=False, load_slice_bytes=SLICE).run(scenario)


@pytest.mark.parametrize("lost", [{5}, {4, 5, 6, 7}])
def test_behind_a_cell_that_is_lost_nothing_more_is_sent(rig_of: RigOf, lost: set[int]) -> None:
    async def scenario(rig: Any) -> None:
        rig.a.lose = {rig.key(chunk) for chunk in lost}
        job = await begin(rig, 20)
        await finish_first(rig)
        await finish_first(rig)
        assert rig.best(job) == min(lost)
        assert len(sent(rig)) == 1, "the one that was under way"
        assert rig.storage.statistics().prefetch.loads.in_flight == 4
        await finish_first(rig)
        rig.read(job, min(lost))
        rig.check_rest()
        assert list(rig.a.loads_of) == rig.keys(12)

    rig_of(0, automatic=False, load_slice_bytes=SLICE).run(scenario)


def test_what_a_lost_cell_does_not_make_useless_goes_on(rig_of: RigOf) -> None:
    """A cell is lost that one lookup needs and the other does not: it has these chunks on its GPU."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(8))
        rig.a.lose = {rig.key(1)}
        long, short = rig.start(8), rig.start(8, skip=2)
        while rig.a.lookups:
            rig.a.finish_lookup()
            await rig.pause(1)
        while rig.a.loads:
            await finish_first(rig)
        assert rig.best(long) == 1
        assert rig.best(short) == 8

    rig_of(0, automatic=False, load_slice_bytes=2 * 64).run(scenario)


def test_a_store_that_refuses_slices_is_a_miss(rig_of: RigOf) -> None:
    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(20))
        job = rig.start(20)
        rig.a.finish_lookup()
        rig.a.refuse_submit = True
        await job.wait()
        assert rig.best(job) == 0
        await rig.pause(1)
        rig.check_rest()
        assert rig.storage.statistics().adapters[0].refused == SLICES_RUNNING

    rig_of(0, automatic=False, load_slice_bytes=SLICE).run(scenario)


@pytest.mark.parametrize("answers", [False, True])
def test_close_midway_waits_for_what_runs_and_sends_nothing_more(rig_of: RigOf, answers: bool) -> None:
    async def scenario(rig: Any) -> None:
        await begin(rig, 20)
        await finish_first(rig)
        if answers:
            rig.loop.call_later_ns(MS, rig.a.finish_load)
            rig.loop.call_later_ns(MS, rig.a.finish_load)
        began_ns = rig.clock.now_ns()
        await rig.storage.close()
        assert rig.clock.now_ns() - began_ns < (2 * MS if answers else 41 * MS)
        assert list(rig.a.loads_of) == rig.keys(12)
        state = rig.storage.statistics()
        assert state.prefetch.loads.in_flight == state.l1.objects_staging == state.prefetch.budget.bytes_used == 0
        assert state.l1.holds == state.l1.bytes_draining // 64 == (0 if answers else 8)
        assert rig.a.locks_held == state.l1.holds, "whoever closes an adapter that hangs loses its locks with it"

    rig_of(0, automatic=False, load_slice_bytes=SLICE, close_deadline_ns=40 * MS).run(scenario, close=False)


@pytest.mark.parametrize("seed", range(10))
def test_a_close_that_is_cancelled_at_once_leaves_nothing_waiting(rig_of: RigOf, seed: int) -> None:
    """Its lookups have just left their loads: the drop that is due finds nothing, or has come before."""

    async def scenario(rig: Any) -> None:
        await begin(rig, 20)
        closing = rig.loop.create_task(rig.storage.close())
        while not rig.storage._closed:
            await asyncio.sleep(0)
        closing.cancel()
        await rig.pause(1)
        state = rig.storage.statistics()
        assert state.prefetch.loads.in_flight == state.l1.objects_staging == state.prefetch.budget.bytes_used == 0
        assert state.prefetch.loads.abandoned == 20

    rig_of(seed, automatic=False, load_slice_bytes=SLICE).run(scenario, close=False)

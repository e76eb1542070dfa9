"""Public reports, sections H, I and J: liveness and messages, ranks that must agree, identity of keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.keys import ChunkHasher, Namespace

MS = 1_000_000
S = 1_000_000_000
CHUNK = 16

DeskOf = Callable[..., Any]
RigOf = Callable[..., Any]


# --- H. liveness and messages


def test_a_key_whose_write_never_ends_is_a_miss_at_once_and_not_a_wait(rig_of: RigOf) -> None:
    """R35: the store of k2 hangs; q2 has k1 and k2. It is told one chunk, without a wait, as often as it asks."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(1))
        rig.storage.reserve_store("hung", "w", [rig.key(1)], [64])
        for _ in range(3):
            job = rig.start(2)
            await job.wait()
            assert rig.best(job) == 1
            rig.read(job, 1)
        assert rig.clock.now_ns() < 20 * MS
        assert not rig.l1.contains(rig.key(1))
        rig.storage.release_holder("w")

    rig_of(0).run(scenario)


def test_polling_of_a_lookup_that_never_ends_backs_off_and_ends(service: Any) -> None:
    """R35: the server goes on saying PENDING; the wait has a deadline of its own, and asks seldom."""

    async def scenario(world: Any) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(service.RANKS):
            await world.store(rank, 1, hashes)
        await world.sleep(S)
        for node in world.nodes:
            node.storage.drop_l1()
            node.storage._pumps[0].load = lambda keys, buffers, answer: None  # L2 is asked and never answers
        began = world.loop.now_ns()
        outcome = await world.ask("q", 1, hashes)
        assert outcome.best == 0
        waited = world.loop.now_ns() - began
        assert waited <= service.SchedulerConfig().lookup_timeout_ns
        for node in world.nodes:
            asked = node.server.statistics().requests_by_operation["query"]
            assert 1 < asked < 20 + waited // (10 * MS), f"{asked} questions in {waited // MS} ms"
        world.scheduler.end("q")

    service.World(1).run(scenario)


def test_an_abort_of_a_finished_request_and_a_late_sent_free_its_blocks_once(desk_of: DeskOf) -> None:
    """R39, the variant: the blocks wait for their reader when the abort comes; then "sent" arrives."""

    async def scenario(desk: Any) -> None:
        job = desk.job("q1", 64)
        await desk.compute(job)
        assert desk.finish(job) is True, "a store still reads the blocks"
        assert desk.finish(job) is False, "the abort finds nothing to end"
        sent: list[str] = []
        await desk.settle()
        for _ in range(4):
            sent += (await desk.step()).finished.sent
        assert sent == ["q1"]

    desk_of(page_ns=(100_000, 100_000)).run(scenario)


HUNG = """
import threading
from kvcore.runtime.executor import ThreadExecutor
import asyncio

async def main():
    executor = ThreadExecutor(asyncio.get_running_loop(), threads=2)
    for _ in range(3):
        executor.submit(threading.Event().wait, lambda outcome: None)
    if {close}:
        executor.close()
        executor.close()
    await asyncio.sleep(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("close", [True, False])
def test_a_process_with_hung_work_exits_with_or_without_close(close: bool) -> None:
    """R41: the work waits for an event that nobody sets."""
    done = subprocess.run([sys.executable, "-c", HUNG.format(close=close)], timeout=600, check=False)
    assert done.returncode == 0


# --- I. ranks must agree


def test_every_rank_loads_its_own_shard(desk_of: DeskOf) -> None:
    """R42 b: if only rank 0 loads, the others compute on garbage, on the hot pass only."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 70)
        external = await desk.ask(second)
        assert external == 64
        desk.admit(second, external)
        await desk.step((second, 6))
        assert [worker.statistics().cells_loaded for worker in desk.workers] == [4, 4, 4]
        assert desk.right(second, 70), "each rank's words differ, and each is looked at"
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of(ranks=3, servers=3).run(scenario)


def test_pressure_on_one_rank_cannot_take_what_all_ranks_promised(service: Any) -> None:
    """R42: two chunks on all ranks are pinned on all; then rank 1's server is flooded; then all ranks load."""

    async def scenario(world: Any) -> None:
        hashes = world.hashes(1, 4)
        await world.store(0, 1, hashes)
        await world.store(1, 1, hashes[:2])
        outcome = await world.ask("q", 1, hashes)
        assert outcome.best == 2
        world.scheduler.settle("q", 1, 2)
        for family in range(2, 8):
            await world.store(1, family, world.hashes(family, 6))
        assert world.nodes[1].l1.statistics().evictions > 0
        assert [node.l1.statistics().leases for node in world.nodes] == [2, 2], "k3 and k4 of rank 0 are free again"
        assert [await world.load(rank, "q", 1, hashes, 2) for rank in range(2)] == [2, 2]
        world.scheduler.end("q")

    service.World(2, capacity_bytes=8 * service.CELL_BYTES).run(scenario)


# --- J. identity of keys


@pytest.mark.parametrize("real", [True, False])
def test_after_an_update_of_the_weights_no_tier_gives_the_old_kv(rig_of: RigOf, real: bool) -> None:
    """R50: version 1 is in L1 and L2, and a store of it is still under way when version 2 begins."""
    one, two = (ChunkHasher(Namespace("m", model_revision=each, chunk_tokens=CHUNK)) for each in ("1", "2"))
    tokens = list(range(3 * CHUNK))

    async def scenario(rig: Any) -> None:
        versions = {"v1": one.hash_tokens(tokens), "v2": two.hash_tokens(tokens)}
        rig.hashes = lambda chunks, prompt="v1": versions[prompt][:chunks]
        rig.store(rig.keys(2, prompt="v1"))
        await rig.storage.drain()
        late = rig.key(2, prompt="v1")
        rig.storage.reserve_store("late", "w", [late], [64])
        for drop in (False, True):  # from L1, then from L2
            if drop:
                rig.storage.drop_l1()
            job = rig.start(3, prompt="v2")
            await job.wait()
            assert rig.best(job) == 0
            rig.storage.release_owner(job.owner)
        assert rig.storage.commit_store("late", "w", [late]) == [Answer.PUBLISHED]
        job = rig.start(3, prompt="v2")
        await job.wait()
        assert rig.best(job) == 0, "what ends late ends under its own version"
        old = rig.start(3, prompt="v1")
        await old.wait()
        assert rig.best(old) == 3, "a sleep and wake-up of the same weights may keep it"
        rig.storage.release_owner(old.owner)

    rig_of(0, real=real).run(scenario)

"""Public reports, section K (storage, capacity), section L (cost) and the short reports that belong to them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.file import file_adapter, record_name
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.files import SimFiles
from kvcore.sim.ports.notice import SimNotice

MS = 1_000_000
S = 1_000_000_000

DeskOf = Callable[..., Any]
RigOf = Callable[..., Any]


def on_files(rig: Any) -> SimFiles:
    """Give the rig a real file adapter on a simulated disk."""
    disk = SimFiles(rig.loop)
    rig.executor = SimExecutor(rig.loop, "test.disk")
    adapter = file_adapter(
        "disk", disk, executor=rig.executor, notice_factory=lambda: SimNotice(rig.loop), clock=rig.clock
    )
    rig.adapters = [adapter]
    return disk


# --- K. storage, capacity


def fail(number: int) -> Callable[[Any, SimFiles], None]:
    def trouble(rig: Any, disk: SimFiles) -> None:
        for n in range(1, 200):
            disk.fail_op(n, number)

    return trouble


def read_only(rig: Any, disk: SimFiles) -> None:
    disk.writable = False


def full(rig: Any, disk: SimFiles) -> None:
    disk.capacity_bytes = disk.bytes_stored


def slow(rig: Any, disk: SimFiles) -> None:
    rig.executor.latency_ns = (30 * S, 30 * S)


def refused(rig: Any, disk: SimFiles) -> None:
    rig.a.submit_store = rig.a.submit_lookup_and_lock = _refuse


def _refuse(*arguments: Any) -> Any:
    raise ConnectionRefusedError(errno.ECONNREFUSED, "not yet started")


def heal(rig: Any, disk: SimFiles) -> None:
    disk.writable, disk.capacity_bytes = True, None
    disk._errors.clear()
    rig.executor.latency_ns = (10_000, 200_000)
    for name in ("submit_store", "submit_lookup_and_lock"):
        rig.a.__dict__.pop(name, None)


@pytest.mark.parametrize(
    "trouble",
    [fail(errno.EIO), fail(errno.ENOSPC), read_only, full, slow, refused],
    ids=["reset", "ENOSPC", "read-only", "full", "slow 30 s", "refused"],
)
def test_a_backend_in_trouble_costs_a_miss_and_is_used_again_when_it_is_back(
    rig_of: RigOf, trouble: Callable[[Any, SimFiles], None]
) -> None:
    """R53: a request's own store and lookup go on, in bounded time; nothing stays locked."""
    rig = rig_of(0, real=True, store_attempts_max=2, store_deadline_ns=2 * S, lookup_deadline_ns=50 * MS)
    disk = on_files(rig)

    async def scenario(rig: Any) -> None:
        trouble(rig, disk)
        assert rig.store(rig.keys(3)) == [Answer.RESERVED] * 3
        before = rig.clock.now_ns()
        job = rig.start(3)
        assert rig.best(job) == 3, "L1 serves"
        assert rig.clock.now_ns() == before, "and waits for nobody"
        rig.read(job, 3)
        other = rig.start(3, prompt="other", timeout_ns=100 * MS)
        await other.wait()
        assert rig.best(other) == 0
        assert rig.clock.now_ns() - before <= 100 * MS
        await rig.pause(70 * S)
        written = rig.storage.statistics().writeback
        assert written.failed + written.full + rig.storage.statistics().adapters[0].refused >= 1, "counted"
        assert rig.storage.statistics().l1.leases == 0
        heal(rig, disk)
        again = rig.keys(2, prompt="again")
        rig.store(again)
        assert await rig.storage.drain(10 * S)
        rig.storage.drop_l1()
        job = rig.start(2, prompt="again")
        await job.wait()
        assert rig.best(job) == 2, "the backend is used again"
        rig.read(job, 2, prompt="again")

    rig.run(scenario)


def test_an_entry_that_lost_its_bytes_is_a_miss_and_is_replaced_by_the_next_store(rig_of: RigOf) -> None:
    """R54's shape, for the store that is here: one entry per object; the disk loses it between lookup and load."""
    rig = rig_of(0, real=True)
    disk = on_files(rig)

    async def scenario(rig: Any) -> None:
        keys = rig.keys(3)
        rig.store(keys)
        await rig.storage.drain()
        rig.storage.drop_l1()
        disk.vanish(record_name(keys[1]))
        job = rig.start(3)
        await job.wait()
        assert rig.best(job) == 1
        rig.read(job, 1)
        rig.store(keys)
        await rig.storage.drain()
        rig.storage.drop_l1()
        job = rig.start(3)
        await job.wait()
        assert rig.best(job) == 3
        rig.read(job, 3)

    rig.run(scenario)


def test_a_store_batch_that_fails_at_one_key_shows_exactly_the_keys_that_are_whole(rig_of: RigOf) -> None:
    """R19: k2 of k1, k2, k3 fails for good; the hit is k1, before and after a restart of the store."""
    rig = rig_of(0, real=True, store_attempts_max=1)
    disk = on_files(rig)

    async def scenario(rig: Any) -> None:
        keys = rig.keys(3)
        rename = disk.rename

        def refuse(source: str, target: str) -> None:
            if target == record_name(keys[1]):
                raise OSError(errno.EIO, "lost")
            rename(source, target)

        disk.rename = refuse
        rig.store(keys)
        await rig.storage.drain()
        rig.storage.drop_l1()
        assert rig.storage.statistics().writeback.failed == 1
        assert not [name for name in disk.names if ".tmp-" in name]
        job = rig.start(3)
        await job.wait()
        assert rig.best(job) == 1, "k3 is there and useless"
        rig.read(job, 1)

    rig.run(scenario)
    disk.restart()
    reopened = file_adapter("disk", disk, executor=rig.executor, notice_factory=_Silent, clock=rig.clock)
    there = reopened.keys()
    assert {key.chunk_hash for key in there} == {rig.key(0).chunk_hash, rig.key(2).chunk_hash}


class _Silent:
    def signal(self) -> None: ...

    def subscribe(self, callback: Any) -> None: ...

    def close(self) -> None: ...


# --- L. cost


@pytest.mark.parametrize("sharers", [2, 50])
def test_sharers_of_one_prefix_wait_for_one_copy_and_not_for_each_other(rig_of: RigOf, sharers: int) -> None:
    """R58: fifty requests with one shared prefix cost one load, and all are answered when that has ended."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, rig.keys(4))
        jobs = [rig.start(4) for _ in range(sharers)]
        ended: list[int] = []
        for job in jobs:
            await job.wait()
            assert rig.best(job) == 4
            ended.append(rig.clock.now_ns())
        assert set(rig.a.loads_of.values()) == {1}
        assert ended[-1] == ended[0], "a convoy: the last sharer is answered later than the first"
        assert ended[0] <= 3 * 5 * MS, "the time of one lookup and one load, however many share"
        for job in jobs:
            rig.read(job, 4)

    rig_of(0, prefetch_budget_bytes=4 * 64).run(scenario)


def test_a_prompt_that_the_engine_has_itself_costs_the_core_nothing(desk_of: DeskOf) -> None:
    """R58: with 100 % local hits no lookup is made at all."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        before = desk.scheduler.statistics().lookups
        second = desk.job("second", 64)
        assert await desk.ask(second, 63 // 4 * 4) == 3
        third = desk.job("third", 65)
        assert desk.scheduler.matched_tokens(third.view(), 64) == (0, False)
        assert desk.scheduler.statistics().lookups == before + 1, "for the second alone, which misses three tokens"
        for job in (second, third):
            desk.finish(job)

    desk_of().run(scenario)


def test_hits_of_the_engine_and_of_the_cache_are_counted_once_each(desk_of: DeskOf) -> None:
    """R60: 1,000 tokens, 600 local, 192 in the cache beyond; allocation fails three times; then a load that fails."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 800)
        second = desk.job("second", 1_000)
        for _ in range(3):
            assert await desk.ask(second, 600) == 200
        before = desk.scheduler.statistics()
        desk.admit(second, await desk.ask(second, 600), 600)
        desk.fail_loads(second.tables[0][160:164])
        report = await desk.step((second, 1))
        after = desk.scheduler.statistics()
        assert after.tokens_queried - before.tokens_queried == 400
        assert after.tokens_hit - before.tokens_hit == 200
        assert after.load_failures - before.load_failures == 1, "a failed load is shown as such"
        good = [cell for cell in report.meta.loads[0].cells if not report.errors & set(cell.blocks)]
        worker = desk.workers[0].statistics()
        assert worker.cells_loaded == len(good) == 12
        block_bytes = desk.layout.groups[0].bytes_per_block
        assert worker.bytes_loaded == sum(block > 0 for cell in good for block in cell.blocks) * block_bytes
        desk.preempt(second)
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of(l1_bytes=1 << 18).run(scenario)


# --- short reports


def test_two_lookups_that_interleave_each_leave_their_own_recency(rig_of: RigOf) -> None:
    """R72: no "keys of this request" are shared; what both have used stays a hit under unrelated writes."""

    async def scenario(rig: Any) -> None:
        prompts = ("a", "b", "idle")
        for prompt in prompts:
            rig.store(rig.keys(2, prompt=prompt))
        first, second = rig.start(2, prompt="a"), rig.start(2, prompt="b")
        rig.read(second, 2, prompt="b")
        rig.read(first, 2, prompt="a")
        for number in range(2):
            rig.store([rig.key(0, prompt=f"unrelated{number}")])
        best = {}
        for prompt in prompts:
            job = rig.start(2, prompt=prompt)
            best[prompt] = rig.best(job)
            rig.storage.release_owner(job.owner)
        assert best == {"a": 2, "b": 2, "idle": 0}

    rig_of(0, adapters=(), l1_cells=3).run(scenario)


def test_a_node_that_comes_back_empty_gets_its_share_of_the_writes_and_no_more(service: Any) -> None:
    """R73: placement goes by the hash, not by who has room; and no store waits for another server."""

    async def scenario(world: Any) -> None:
        shares = []
        for round_ in range(2):
            before = [node.l1.statistics().published for node in world.nodes]
            for family in range(round_ * 20, round_ * 20 + 20):
                await world.store(0, family + 1, world.hashes(family, 6))
            after = [node.l1.statistics().published for node in world.nodes]
            shares.append([new - old for new, old in zip(after, before, strict=True)])
            if round_ == 0:
                world.nodes[0].restart()
                await world.sleep(S)
                await world.store(0, 1_000, world.hashes(99, 6))  # the first one may find the connection gone
                await world.sleep(S)
        for share in shares:
            assert sum(share) == 120
            assert all(25 <= count <= 55 for count in share), shares

    service.World(4, servers=3, mode="chunk").run(scenario)


def test_many_small_cells_are_split_into_messages_that_a_server_takes(service: Any) -> None:
    """R68 b: each part is rounded up by itself; no buffer or message is sized for the sum of the tokens."""

    async def scenario(world: Any) -> None:
        for node in world.nodes:
            node.server._limits = node.server._checks._limits = service.wire.ServerLimits(batch_cells_max=4)
        hashes = world.hashes(1, 30)
        await world.store(0, 1, hashes[:1])
        assert await world.store(0, 2, hashes[1:]) == [Answer.PUBLISHED] * 29

    service.World(5, servers=1).run(scenario)


def test_a_retry_is_worth_it_only_where_the_store_says_so(rig_of: RigOf) -> None:
    """R53: FULL and FAILED are not repeated, so a dead store costs one attempt per object."""

    async def scenario(rig: Any) -> None:
        rig.a.store_answer = lambda key: StoreAnswer.FULL
        rig.store(rig.keys(5))
        await rig.storage.drain()
        assert set(rig.a.stores_of.values()) == {1}

    rig_of(0).run(scenario)

"""Public reports, sections F and G: locks, pins and references; writers, leases, crashes and restarts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.l2.adapter import StoreAnswer
from kvcore.service.client import LoadCell

MS = 1_000_000
S = 1_000_000_000

DeskOf = Callable[..., Any]
RigOf = Callable[..., Any]


# --- F. locks, pins, references


@pytest.mark.parametrize("seed", range(10))
def test_aborted_prefetches_never_use_up_the_limit(rig_of: RigOf, seed: int) -> None:
    """R24 c: many requests are given up while they wait, look up or load; the next one is served at once."""

    async def scenario(rig: Any) -> None:
        rig.fill_l2(rig.a, [*rig.keys(4), *rig.keys(4, prompt="next")])
        for _ in range(40):
            job = rig.start(4)
            await rig.pause(rig.random.randint(0, 3 * MS))
            rig.storage.release_owner(job.owner)
        await rig.pause(20 * MS)
        statistics = rig.storage.statistics()
        assert (statistics.prefetch.jobs, statistics.prefetch.budget.bytes_used) == (0, 0)
        job = rig.start(4, prompt="next")
        await job.wait()
        assert rig.best(job) == 4
        rig.read(job, 4, prompt="next")

    rig_of(seed, prefetch_budget_bytes=4 * 64).run(scenario)


@pytest.mark.parametrize("order", ["finish, report", "report, finish", "finish, finish, report", "preempt, finish"])
def test_the_hooks_of_an_abort_may_come_in_any_order(desk_of: DeskOf, order: str) -> None:
    """R24 c: two caches need them in opposite order; here any order leaves nothing and frees once."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 70)
        desk.admit(second, await desk.ask(second))
        await desk.step()
        received: list[str] = []
        for hook in order.split(", "):
            if hook == "report":
                received += (await desk.receive()).finished.received
            elif hook == "preempt":
                desk.preempt(second)
            else:
                assert desk.finish(second) is False
        await desk.settle()
        for _ in range(3):
            received += (await desk.step()).finished.received
        assert received == ["second"], "reported exactly once"
        assert desk.scheduler.statistics().orphans == 0

    desk_of(load_async=True, page_ns=(100_000, 100_000)).run(scenario)


def test_a_stored_and_loaded_object_keeps_no_reference_however_often(rig_of: RigOf) -> None:
    """R26: store and retrieve for twice the capacity; after each the only reference is the cache's own."""

    async def scenario(rig: Any) -> None:
        for number in range(16):
            prompt = f"p{number}"
            assert rig.store([rig.key(0, prompt=prompt)]) == [Answer.RESERVED]
            job = rig.start(1, prompt=prompt)
            assert rig.read(job, 1, prompt=prompt) == [Answer.RELEASED]
            state = rig.storage.statistics().l1
            assert (state.leases, state.holds) == (0, 0)

    rig_of(0, adapters=(), l1_cells=4).run(scenario)


# --- G. writers, leases, crashes, restarts


@pytest.mark.parametrize("seed", range(30))
def test_two_writers_of_one_key_and_a_reader_that_never_sees_half_a_value(rig_of: RigOf, seed: int) -> None:
    """R29: every interleaving of reserve, copy and commit; exists means whole; the loser is told and goes on."""

    async def scenario(rig: Any) -> None:
        key = rig.key(0)
        seen: list[bytes | None] = []
        outcomes: list[Answer] = []
        first_commit: list[int] = []

        async def writer(name: str) -> None:
            await rig.pause(rig.random.randint(1, 4))
            answers, slots = rig.storage.reserve_store(name, name, [key], [64])
            if answers != [Answer.RESERVED]:
                outcomes.extend(answers)
                return
            value = name.encode() * 64
            for part in range(0, 64, 16):
                await rig.pause(rig.random.randint(1, 3))
                rig.l1.view(slots[0])[part : part + 16] = value[part : part + 16]
            await rig.pause(rig.random.randint(1, 3))
            outcomes.extend(rig.storage.commit_store(name, name, [key]))
            first_commit.append(len(seen))

        async def reader() -> None:
            for _ in range(40):
                await rig.pause(1)
                job = rig.start(1)
                if rig.best(job) == 0:
                    seen.append(None)
                else:
                    slot = rig.storage.open_read("r", job.owner, [key])[0]
                    seen.append(bytes(rig.l1.view(slot)))
                    rig.storage.close_read("r", job.owner, [key])
                rig.storage.release_owner(job.owner)

        tasks = [rig.loop.create_task(each) for each in (writer("1"), writer("2"), reader())]
        for task in tasks:
            await task
        assert set(seen) in ({None, b"1" * 64}, {None, b"2" * 64}), "one writer's value, whole, or a miss"
        assert seen.index(next(value for value in seen if value)) >= min(first_commit) - 1, "a miss before the commit"
        assert outcomes.count(Answer.PUBLISHED) == 1
        assert set(outcomes) - {Answer.PUBLISHED} <= {Answer.DISCARDED, Answer.RESIDENT}

    rig_of(seed, adapters=()).run(scenario)


@pytest.mark.parametrize("seed", range(10))
def test_two_writers_of_one_record_and_a_reader_of_the_real_adapter(rig_of: RigOf, seed: int) -> None:
    """S20; R29, in L2: a lookup says yes only when a load gives the whole value; a second store is told PRESENT."""

    async def scenario(rig: Any) -> None:
        key, value, pump = rig.key(0), b"v" * 64, rig.storage._pumps[0]
        answers: list[StoreAnswer] = []
        for _ in range(2):
            pump.store([key], [memoryview(value)], answers.extend, answers.extend, 10.0)
        verdicts: list[bool] = []

        def found(bits: int) -> None:
            if not bits:
                verdicts.append(False)
                return
            buffer = bytearray(64)

            def loaded(arrived: int) -> None:
                assert arrived == 1, "it exists, and its value is not there"
                assert bytes(buffer) == value
                pump.unlock([key])
                verdicts.append(True)

            pump.load([key], [memoryview(buffer)], loaded)

        for _ in range(60):
            pump.lookup([key], found, found, 10.0)
            await rig.pause(10_000)
        await rig.pause(5 * MS)
        assert len(verdicts) == 60
        assert verdicts[0] is False
        assert verdicts[-1] is True
        assert sorted(answer.name for answer in answers) == ["PRESENT", "STORED"]

    rig_of(seed, real=True).run(scenario)


@pytest.mark.parametrize("members", [1, 3])
def test_a_read_that_outlives_its_lease_is_thrown_away_member_by_member(rig_of: RigOf, members: int) -> None:
    """R30: the key has been put again elsewhere by then, so asking whether it exists would say yes."""

    async def scenario(rig: Any) -> None:
        keys = rig.keys(members)
        rig.store(keys)
        job = rig.start(members, timeout_ns=MS)
        slots = rig.storage.open_read("w", job.owner, keys)
        before = [bytes(rig.l1.view(slot)) for slot in slots]
        await rig.pause(20 * MS)  # the lease was over at 6 ms
        assert rig.storage.drop_l1() == members
        rig.store([rig.key(chunk, prompt="k9") for chunk in range(2)])
        rig.store(keys)
        assert [bytes(rig.l1.view(slot)) for slot in slots] == before, "memory under a copy is given to nobody"
        assert all(rig.l1.slot_of(key) is not slot for key, slot in zip(keys, slots, strict=True))
        assert rig.storage.close_read("w", job.owner, keys) == [Answer.EXPIRED] * members

    rig_of(0, adapters=(), lease_ns=5 * MS).run(scenario)


def test_a_consumer_that_comes_after_the_deadline_is_refused(rig_of: RigOf) -> None:
    """R30, the variant: the producer has freed by timeout; the slow consumer does not read what lies there now."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(2))
        job = rig.start(2, timeout_ns=MS)
        await rig.pause(20 * MS)
        rig.storage.drop_l1()
        rig.store(rig.keys(2, prompt="k9"))
        rig.store(rig.keys(2))
        assert rig.storage.open_read("w", job.owner, rig.keys(2)) == [None, None]

    rig_of(0, adapters=(), lease_ns=5 * MS, l1_cells=2).run(scenario)


def test_a_dead_client_whose_clean_up_hangs_freezes_nobody(service: Any) -> None:
    """R31: C1 holds locks and a read when it dies, and nobody can prove its death: the check hangs. C2 is served, C1's
    locks end by idleness, its memory is quarantined and not reused."""

    async def scenario(world: Any) -> None:
        hashes = world.hashes(1, 3)
        for rank in range(service.RANKS):
            await world.store(rank, 1, hashes)
        await world.ask("c1", 1, hashes)
        held = await world.workers[0].open_read("c1", 1, [LoadCell(0, 0, hashes[0])])
        world.network.partition("scheduler.0")
        world.network.partition("worker0.0")
        second = service.SchedulerClient(world.connect("c2"), world.placement, world.layout, world.clock)
        began = world.loop.now_ns()
        second.start("c2", 1, hashes, prompt_tokens=13)
        assert (await second.wait("c2", 1)).best == 3
        assert world.loop.now_ns() - began < 10 * MS
        second.end("c2")
        await world.sleep(3 * S)
        state = world.nodes[0].l1.statistics()
        assert (state.leases, state.holds) == (0, 1), "idle for two seconds: the locks are over, the copy may still run"
        world.nodes[0].storage.drop_l1()
        assert world.nodes[0].l1.statistics().quarantined_bytes == service.CELL_BYTES
        assert bytes(held[0].view) == service.payload(hashes[0], 0)
        world.nodes[0].server.worker_died("worker0")
        assert world.nodes[0].l1.statistics().quarantined_bytes == 0

    service.World(7, idle_ns=2 * S).run(scenario)


def test_a_handle_of_a_peers_previous_life_is_refused_and_a_refresh_keeps_the_valid_ones(service: Any) -> None:
    """R32: a server that restarted is another one. A worker that merely registers again keeps its open stores."""

    async def scenario(world: Any) -> None:
        hashes = world.hashes(1, 2)
        worker = world.workers[0]
        grants = await worker.reserve_store("worker0:5", [service.StoreCell(0, each) for each in hashes])
        for grant, chunk_hash in zip(grants, hashes, strict=True):
            grant.view[:] = service.payload(chunk_hash, 0)
        reply = await worker._connections[0].call(service.wire.Register("worker0", 0))  # a refresh, same life
        assert not isinstance(reply, service.wire.Error)
        assert await worker.commit_store("worker0:5", [True, True]) == [Answer.PUBLISHED] * 2
        grants = await worker.reserve_store("worker0:6", [service.StoreCell(0, b"z" * 32)])
        world.nodes[0].restart()
        assert await worker.commit_store("worker0:6", [True]) == [Answer.UNKNOWN]
        assert await world.store(0, 7, hashes) in ([Answer.UNKNOWN] * 2, [Answer.PUBLISHED] * 2)
        await world.sleep(5 * S)
        assert await world.store(0, 8, hashes) in ([Answer.PUBLISHED] * 2, [Answer.UNKNOWN] * 2)
        assert world.nodes[0].l1.statistics().objects_resident == 2
        assert not any(key.chunk_hash == b"z" * 32 for key in world.nodes[0].l1.resident_keys())

    service.World(8).run(scenario)


def test_a_client_that_outlives_its_server_runs_without_the_cache_until_it_is_registered_again(service: Any) -> None:
    """R31 b: the server restarts while C1 keeps its handles; they are refused, and nothing waits for ever."""

    async def scenario(world: Any) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(service.RANKS):
            await world.store(rank, 1, hashes)
        assert (await world.ask("before", 1, hashes)).best == 2
        for node in world.nodes:
            node.restart()
        began = world.loop.now_ns()
        cells = [LoadCell(0, i, chunk_hash) for i, chunk_hash in enumerate(hashes)]
        assert await world.workers[0].open_read("before", 1, cells) == [None, None], "the old handle opens nothing"
        assert (await world.ask("between", 1, hashes)).best == 0, "computed without the cache"
        assert world.loop.now_ns() - began <= service.SchedulerConfig().lookup_timeout_ns
        await world.sleep(S)
        for rank in range(service.RANKS):
            await world.store(rank, 2, hashes)
            await world.store(rank, 3, hashes)
        assert world.workers[0].statistics().registrations >= 2
        assert world.nodes[0].server.statistics().workers == 1, "it was told, and has registered again"
        assert (await world.ask("after", 1, hashes)).best == 2
        for name in ("before", "between", "after"):
            world.scheduler.end(name)

    service.World(9).run(scenario)

"""Public reports, sections A and B: blocks and asynchronous copies, and the order of device queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.service.client import LoadCell

MS = 1_000_000
S = 1_000_000_000
SLOW = (300_000, 300_000)

DeskOf = Callable[..., Any]


# --- A. block lifetime


def test_a_preemption_waits_for_every_store_of_the_request_on_every_rank(desk_of: DeskOf) -> None:
    """R01 c: two stores of one request are under way, one per step; a slot per request would hide the first."""

    async def scenario(desk: Any) -> None:
        first = desk.job("q1", 64)
        desk.admit(first, await desk.ask(first))
        await desk.step((first, 32))
        await desk.step((first, 32))
        await desk.pause(MS // 4)
        inflight = [worker.stores_inflight("q1") for worker in desk.workers]
        assert inflight == [2, 2], "one per step and rank"
        tables = desk.preempt(first)
        thief = desk.job("thief", list(range(5000, 5064)), salt="other")
        desk.admit(thief, await desk.ask(thief), tables=tables)
        await desk.step((thief, 64))  # the desk's forward pass fails if a store still reads what it writes
        for worker in desk.workers:
            state = worker.statistics()
            assert state.fences_waited + state.stores_cancelled >= 2, "both stores were waited for or cancelled"
        for job in (first, thief):
            desk.finish(job)
        await desk.settle()
        await desk.step()

    desk_of(ranks=2, page_ns=SLOW).run(scenario)


def test_a_load_whose_reader_vanished_is_reclaimed_by_its_proven_death_and_a_later_signal_is_ignored(
    service: Any,
) -> None:
    """R02 c: the sender is silent too. Leases end with the request; memory is quarantined until the death is proven."""

    async def scenario(world: Any) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(service.RANKS):
            await world.store(rank, 1, hashes)
        await world.ask("q", 1, hashes)
        cells = [LoadCell(0, i, chunk_hash) for i, chunk_hash in enumerate(hashes)]
        grants = await world.workers[0].open_read("q", 1, cells)
        world.scheduler.end("q")  # aborted; the worker says nothing
        await world.sleep(60 * S)
        node = world.nodes[0]
        assert node.storage.drop_l1() == 2
        state = node.l1.statistics()
        assert (state.leases, state.quarantined_bytes) == (0, 2 * service.CELL_BYTES)
        for family in range(2, 6):
            await world.store(0, family, world.hashes(family, 6))
        right = [service.payload(each, 0) for each in hashes]
        assert [bytes(grant.view) for grant in grants] == right, "nobody else's bytes"
        node.server.worker_died("worker0")
        assert node.l1.statistics().quarantined_bytes == 0
        assert await world.workers[0].close_read("q", 1, cells) == [False, False], "the late signal changes nothing"
        node.l1.check()

    service.World(3).run(scenario)


def test_an_abort_just_after_the_load_has_been_reported_frees_at_once(desk_of: DeskOf) -> None:
    """R02: no further signal comes, so nothing may wait for one."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 70)
        desk.admit(second, await desk.ask(second))
        await desk.receive()
        assert desk.leases() == 0
        assert desk.finish(second) is False, "nothing reads or writes the blocks any more"
        report = await desk.step()
        assert not report.finished.received
        assert not report.finished.sent

    desk_of(load_async=True).run(scenario)


# --- B. ordering on device queues


@pytest.mark.parametrize("seed", range(8))
def test_a_store_reads_its_blocks_only_after_the_kernel_that_fills_them(desk_of: DeskOf, seed: int) -> None:
    """R04: the host runs ahead; "computed" is bookkeeping until the event of the compute queue says so."""

    async def scenario(desk: Any) -> None:
        device = desk.devices[0]
        began: list[tuple[str, int]] = []
        device.on_begin = lambda ticket: began.append((ticket.stream.name, desk.loop.now_ns()))
        job = desk.job("q1", 64)
        desk.admit(job, await desk.ask(job))
        held_ns = 40 * MS
        device.run_compute(lambda: None, held_ns)  # the queue is busy: everything of the step comes behind it
        step = desk.loop.create_task(desk.step((job, 64)))
        await desk.pause(20 * MS)
        assert "store" not in [name for name, _ in began], "the copy queue was free at t1"
        await step
        desk.finish(job)
        await desk.settle()
        assert [at for name, at in began if name == "store"]
        assert min(at for name, at in began if name == "store") > held_ns
        await desk.step()
        assert desk.resident(job) == [1] * 4

    desk_of(seed, page_ns=(1, 50_000)).run(scenario)  # the desk compares every published cell with its own words


@pytest.mark.parametrize("seed", range(8))
def test_a_block_that_is_cleared_late_is_not_cleared_after_it_was_loaded(desk_of: DeskOf, seed: int) -> None:
    """R05: clearing and loading sit on different queues; the load waits for what was submitted before it."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 64)
        external = await desk.ask(second)
        desk.admit(second, external)
        blocks = second.tables[0][:16]

        def zero() -> None:
            desk.pages[0][0][blocks] = 0

        desk.devices[0].run_compute(zero, 10 * MS)  # held: by then a free copy queue would have loaded long ago
        await desk.step((second, 1))
        assert desk.right(second, 64), "the cleared block was loaded afterwards"
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of(seed).run(scenario)


def test_a_cleared_block_whose_load_fails_is_reported_and_not_left_as_it_was(desk_of: DeskOf) -> None:
    """R05, the failure path: the engine hears which blocks hold no KV, and computes them."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 70)
        desk.admit(second, await desk.ask(second))
        blocks = second.tables[0][8:12]
        desk.fail_loads(blocks)
        desk.devices[0].run_compute(lambda: None, 10 * MS)
        report = await desk.step((second, 6))
        assert report.errors == frozenset(blocks)
        second.computed = 32
        desk.devices[0].fault = None
        await desk.step((second, 38))
        assert desk.right(second, 70)
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of().run(scenario)


@pytest.mark.parametrize("load_async", [False, True])
def test_a_load_does_not_overwrite_a_block_that_an_earlier_kernel_still_reads(
    desk_of: DeskOf, load_async: bool
) -> None:
    """S26; R05 b: the last reader of the reused block is on the compute queue."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 64)
        desk.admit(second, await desk.ask(second))
        blocks = second.tables[0][:16]
        before = desk.pages[0][0][blocks].copy()
        seen: list[Any] = []
        desk.devices[0].run_compute(lambda: seen.append(desk.pages[0][0][blocks].copy()), 10 * MS)
        await (desk.receive() if load_async else desk.step((second, 1)))
        assert (seen[0] == before).all(), "the kernel read what a load had put there"
        assert desk.right(second, 63)
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of(load_async=load_async).run(scenario)


def test_every_layer_waits_for_the_load_that_fills_it(desk_of: DeskOf) -> None:
    """R62's shape: no accessor of a layer reads before the layer is there; here all layers arrive together."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 64)
        desk.admit(second, await desk.ask(second))
        worker, forward = desk.workers[0], desk._forward
        waited = []
        original = worker.wait_load

        def wait_load(layer: int) -> Any:
            waits = [original(each) for each in (layer, layer + 1, layer + 7)]
            waited.append([wait is not None for wait in waits])
            for wait in filter(None, waits[1:]):
                wait.close()
            return waits[0]

        worker.wait_load = wait_load
        desk._forward = lambda rank, entries: (waited.append(desk.right(second, 63)), forward(rank, entries))
        await desk.step((second, 1))
        assert waited == [[True, True, True], True]
        worker.wait_load = original
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of(page_ns=SLOW).run(scenario)

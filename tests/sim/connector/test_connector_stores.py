"""Stores, fences, preemption, ends and reused ids, with the real connector against a real server in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.connectors.views import Finished
from kvcore.connectors.worker import WorkerConnectorConfig
from kvcore.errors import ConfigError, InternalError
from kvcore.groups import GroupKind, ObjectGroup

DeskOf = Callable[..., Any]
MS = 1_000_000
SLOW = (300_000, 300_000)  # ns per block: a cell of four blocks lasts several steps


def stored_chunks(report: Any) -> list[int]:
    return [cell.chunk for plan in report.meta.stores for cell in plan.cells]


async def take_blocks(desk: Any, tables: list[list[int]], name: str = "thief") -> Any:
    """Another request gets these blocks and writes them in the next step."""
    thief = desk.job(name, list(range(5000, 5000 + 4 * len(tables[0]))), salt="other")
    assert await desk.ask(thief) == 0
    desk.admit(thief, 0, tables=[list(table) for table in tables])
    await desk.step((thief, len(thief.tokens)))
    return thief


# --- what is stored


@pytest.mark.parametrize("cuts", [(70,), (10, 20, 40), (16, 16, 16, 16, 6), (1,) * 70])
def test_stores_are_disjoint_increasing_whole_chunks_of_computed_tokens(desk_of: DeskOf, cuts: tuple[int, ...]) -> None:
    """S13; P1."""

    async def scenario(desk: Any) -> None:
        job = desk.job("one", 70)
        desk.admit(job, await desk.ask(job))
        chunks: list[int] = []
        for count in cuts:
            report = await desk.step((job, count))
            chunks += stored_chunks(report)
            assert len(chunks) == job.computed // 16
        assert chunks == [0, 1, 2, 3]
        desk.finish(job)
        await desk.settle()
        await desk.step()

    desk_of().run(scenario)


def test_the_slot_of_the_last_sampled_token_is_never_stored(desk_of: DeskOf) -> None:
    """R11: 31 prompt tokens, the 32nd is sampled; at the end the second chunk is full of tokens but not of KV."""

    async def scenario(desk: Any) -> None:
        job = desk.job("one", 31)
        await desk.compute(job)
        job.tokens.append(99)
        desk.know(job.tokens)
        assert desk.finish(job) is True
        report = await desk.step()
        assert not stored_chunks(report)
        await desk.settle()
        assert desk.resident(job) == [1, 0]
        await desk.step()

    desk_of().run(scenario)


def test_draft_tokens_are_not_stored_before_they_are_accepted(desk_of: DeskOf) -> None:
    """R11 b, hazard 1: the step runs over 4 drafts beyond the 30 known tokens; they end a chunk that nobody knows."""

    async def scenario(desk: Any) -> None:
        job = desk.job("one", 30)
        desk.admit(job, await desk.ask(job), tables=desk.table(64))
        report = await _step_with(desk, job, 34, [*job.tokens, 1, 2, 3, 4])
        assert stored_chunks(report) == [0]
        job.computed = 30
        job.tokens += [50, 51]
        desk.know(job.tokens)
        assert stored_chunks(await desk.step((job, 2))) == [1]
        desk.finish(job)
        await desk.settle()
        await desk.step()

    desk_of().run(scenario)


async def _step_with(desk: Any, job: Any, count: int, written: list[int]) -> Any:
    """A step that computes `written`, of which the scheduler knows only `job.tokens`."""
    forward = desk._forward

    def with_drafts(rank: int, entries: Any) -> None:
        known, job.tokens = job.tokens, written
        forward(rank, entries)
        job.tokens = known

    desk._forward = with_drafts
    report = await desk.step((job, count))
    desk._forward = forward
    return report


def test_a_request_that_ends_in_the_step_of_its_load_stores_its_last_chunks(desk_of: DeskOf) -> None:
    """S54: The load is confirmed by that step's output, and only then is there something to store."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 32)
        second = desk.job("second", 64)
        report = await desk.compute(second)
        assert not stored_chunks(report)
        assert desk.finish(second) is True
        assert stored_chunks(await desk.step()) == [2, 3]
        await desk.settle()
        report = await desk.step()
        assert report.finished.sent == {"second"}
        assert desk.resident(second) == [1] * 4

    desk_of().run(scenario)


def test_a_request_that_shares_blocks_which_are_being_loaded_stores_nothing_over_a_failure(desk_of: DeskOf) -> None:
    """R16 c: an engine that names blocks at allocation lets `third` find the blocks of `second`'s load in its own cache
    in the same step; the load fails on one of them."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 48)
        second, third = desk.job("second", 64), desk.job("third", [*desk.job("", 48).tokens, *range(900, 932)])
        assert await desk.ask(second) == 48
        assert await desk.ask(third, 48) == 0
        desk.admit(second, 48)
        desk.fail_loads(second.tables[0][4:8])
        shared = second.tables[0][:12]
        desk.admit(third, 0, 48, tables=[shared + desk.table(48)[0]], shared=shared)
        report = await desk.step((second, 16), (third, 32))
        assert report.errors == frozenset(shared[4:8])
        for job in (second, third):
            desk.finish(job)
        assert stored_chunks(await desk.step()) == [0], "the chunk before the hole is right"
        await desk.settle()
        await desk.step()

    desk_of().run(scenario)


def test_cells_loaded_are_not_stored_and_those_before_the_lookup_are(desk_of: DeskOf) -> None:
    """Chunk 0 is the engine's own and was not looked up; chunks 1 to 3 came from the cache; chunk 4 is new."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 90)
        assert await desk.ask(second, 16) == 48
        desk.admit(second, 48, 16)
        await desk.step((second, 10))
        assert stored_chunks(await desk.step((second, 16))) == [0, 4]
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of().run(scenario)


# --- fences


def test_blocks_of_a_preempted_request_are_fenced_before_they_are_written(desk_of: DeskOf) -> None:
    """R01: the store of q1 is under way when q2 gets its blocks. q3 never sees q2's bytes; q1 stores again later."""

    async def scenario(desk: Any) -> None:
        first = desk.job("q1", 64)
        await desk.compute(first)
        await desk.pause()  # the copies have begun
        tables = desk.preempt(first)
        thief = await take_blocks(desk, tables)
        state = desk.workers[0].statistics()
        assert state.fences_waited == 1, "one cell was being read"
        assert state.stores_cancelled == 1
        external = await desk.ask(first)
        assert external == 16, "the cell that had begun, and no other"
        desk.admit(first, external)
        await desk.step((first, 48))
        await desk.step((first, 0))
        for job in (first, thief):
            desk.finish(job)
        await desk.settle()
        await desk.step()
        third = desk.job("q3", 64)
        assert await desk.ask(third) == 63
        desk.finish(third)

    desk_of(page_ns=SLOW).run(scenario)


def test_a_store_that_is_still_asking_gives_way_at_once(desk_of: DeskOf) -> None:
    """R01: the server's grant comes after the blocks have a new owner; nothing is read, staging is given back."""

    async def scenario(desk: Any) -> None:
        first = desk.job("q1", 64)
        desk.world.network.clog("worker0>server0", 5 * MS)
        await desk.compute(first)
        tables = desk.preempt(first)
        thief = await take_blocks(desk, tables)
        state = desk.workers[0].statistics()
        assert (state.fences_waited, state.stores_cancelled) == (0, 1)
        await desk.settle()
        assert desk.resident(first) == [0] * 4
        desk.finish(first)
        desk.finish(thief)
        await desk.settle()
        await desk.step()

    desk_of(in_process=False).run(scenario)


def test_blocks_that_a_load_still_writes_are_fenced_whoever_gave_them_away(desk_of: DeskOf) -> None:
    """No engine that keeps its rules does so; the next owner's KV must not be overwritten all the same."""

    async def scenario(desk: Any) -> None:
        await desk.store("q1", 64)
        second = desk.job("q2", 65)
        desk.admit(second, await desk.ask(second))
        await desk.step()
        assert desk.workers[0].idle is False, "the load is under way"
        thief = await take_blocks(desk, second.tables)
        state = desk.workers[0].statistics()
        assert state.fences_waited + state.loads_cancelled > 0
        await desk.settle()
        assert desk.right(thief, 64)
        for job in (second, thief):
            desk.finish(job)
        await desk.settle()
        await desk.step()

    desk_of(page_ns=SLOW, load_async=True).run(scenario)


def test_a_block_that_left_the_window_is_waited_for_while_its_request_runs_on(desk_of: DeskOf) -> None:
    """R61: blocks are fenced by id, whoever had them; nobody would store these cells again, so the fence waits."""

    async def scenario(desk: Any) -> None:
        first = desk.job("q1", 64)
        await desk.compute(first)
        await desk.pause()
        left = first.tables[1][:4]
        first.tables[1][:4] = [0] * 4
        thief = desk.job("q2", 16, salt="other")
        await desk.ask(thief)
        desk.admit(thief, 0, tables=[desk.table(16)[0], left[2:]])
        await desk.step((first, 0), (thief, 16))
        state = desk.workers[0].statistics()
        assert (state.fences_waited, state.stores_cancelled) == (1, 0)
        await desk.settle()
        assert desk.resident(first) == [2, 2, 2, 2]
        for job in (first, thief):
            desk.finish(job)
        await desk.settle()
        await desk.step()

    desk_of(groups=_full_and_window(), page_ns=SLOW).run(scenario)


def test_a_preempted_request_loses_only_the_cells_whose_blocks_are_taken(desk_of: DeskOf) -> None:
    """R01: it will be computed again; the cells that nobody disturbs are stored all the same."""

    async def scenario(desk: Any) -> None:
        first = desk.job("q1", 64)
        await desk.compute(first)
        await desk.pause()
        (table,) = desk.preempt(first)
        thief = await take_blocks(desk, [table[8:12]])
        await desk.settle()
        assert desk.resident(first) == [1, 1, 0, 1]
        assert desk.workers[0].statistics().stores_cancelled == 1
        for job in (first, thief):
            desk.finish(job)
        await desk.settle()
        await desk.step()

    desk_of(page_ns=SLOW).run(scenario)


def _full_and_window() -> Any:
    return (ObjectGroup(GroupKind.FULL, 4, 32), ObjectGroup(GroupKind.WINDOW, 8, 64, 24))


def test_a_resumed_request_may_ask_while_its_old_stores_are_under_way(desk_of: DeskOf) -> None:
    """R01 b, R09 b: a hit, or nothing yet, but no confusion with the old generation; the whole token list is asked."""

    async def scenario(desk: Any) -> None:
        first = desk.job("q1", 64)
        await desk.compute(first)
        first.tokens += range(300, 316)
        desk.know(first.tokens)
        desk.preempt(first)
        assert await desk.ask(first) in (0, 16, 32, 48, 64)
        await desk.settle()
        desk.preempt(first)
        assert await desk.ask(first) == 64
        desk.admit(first, 64)
        report = await desk.step((first, 16))
        assert desk.scheduler.statistics().resumes_with_load == 1
        assert not report.errors
        desk.finish(first)
        await desk.step()
        await desk.settle()
        await desk.step()

    desk_of(page_ns=SLOW).run(scenario)


@pytest.mark.parametrize("config", ["fence", "copy"])
def test_a_copy_that_never_ends_stops_the_worker_and_never_lets_the_step_go_on(desk_of: DeskOf, config: str) -> None:
    limits = {"fence": WorkerConnectorConfig(0.01, 60.0), "copy": WorkerConnectorConfig(60.0, 0.01)}[config]

    async def scenario(desk: Any) -> None:
        first = desk.job("q1", 64)
        desk.devices[0].page_ns = (10**12, 10**12)
        await desk.compute(first)
        await desk.pause()
        tables = desk.preempt(first)
        with pytest.raises(InternalError, match="restart the worker"):
            await take_blocks(desk, tables)
        with pytest.raises(InternalError, match="has stopped"):
            await desk.step()

    desk_of(worker=limits).run(scenario, at_rest=False)


def test_a_load_job_that_dies_wakes_the_engine_with_an_error(desk_of: DeskOf) -> None:
    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        desk.admit(second, await desk.ask(second))

        async def broken(*arguments: Any) -> Any:
            raise RuntimeError("a bug")

        desk.workers[0]._client.open_read = broken
        with pytest.raises(InternalError, match="a bug"):
            await desk.step((second, 6))
        with pytest.raises(InternalError, match="a bug"):
            desk.workers[0].finished(())

    desk_of().run(scenario, at_rest=False)


def test_a_store_job_that_dies_stops_the_worker(desk_of: DeskOf) -> None:
    async def scenario(desk: Any) -> None:
        async def broken(*arguments: Any) -> Any:
            raise RuntimeError("a bug")

        desk.workers[0]._client.reserve_store = broken
        first = desk.job("q1", 64)
        await desk.ask(first)
        desk.admit(first, 0)
        with pytest.raises(InternalError, match="a bug"):
            await desk.step((first, 64))
        with pytest.raises(InternalError, match="a bug"):
            await desk.step()

    desk_of().run(scenario, at_rest=False)


def test_pages_that_are_not_the_layouts_are_refused(desk_of: DeskOf) -> None:
    async def scenario(desk: Any) -> None:
        with pytest.raises(ConfigError, match="32"):
            desk.workers[0].register([desk.pages[0][0][:, :, :2]], desk.devices[0])
        with pytest.raises(ConfigError, match="groups"):
            desk.workers[0].register([], desk.devices[0])

    desk_of().run(scenario)


# --- ends


@pytest.mark.parametrize("settle_first", [False, True], ids=["done after the abort", "done before it"])
def test_an_aborted_asynchronous_load_is_still_reported_and_leaves_nothing(desk_of: DeskOf, settle_first: bool) -> None:
    """R02: the engine keeps the blocks until the report, which comes in any case."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 70)
        desk.admit(second, await desk.ask(second))
        await desk.step()
        if settle_first:
            await desk.settle()
        assert desk.finish(second) is False
        report = await desk.receive()
        assert report.finished.received == {"second"}
        await desk.settle()
        assert not (await desk.step()).finished.received

    desk_of(load_async=True, page_ns=SLOW).run(scenario)


def test_a_request_aborted_before_its_load_was_handed_over_is_reported_too(desk_of: DeskOf) -> None:
    """R02 b, R24: the report is what the engine waits for, so the load is sent and finds no leases."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 70)
        desk.admit(second, await desk.ask(second))
        desk.finish(second)
        report = await desk.receive()
        assert report.finished.received == {"second"}

    desk_of(load_async=True).run(scenario)


@pytest.mark.parametrize("when_ns", [0, 30_000, 200_000, 5 * MS])
def test_an_abort_while_the_lookup_runs_leaves_nothing(desk_of: DeskOf, when_ns: int) -> None:
    """S14; R24: whichever comes first, with no further traffic."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 70)
        assert desk.scheduler.matched_tokens(second.view(), 0) == (None, False)
        await desk.pause(when_ns)
        desk.finish(second)

    desk_of(in_process=False, servers=2).run(scenario)


def test_a_reused_id_waits_for_its_own_stores_only(desk_of: DeskOf) -> None:
    """R40: the old life was preempted and aborted while its stores ran. The new one offers a chunk that is there
    already: its blocks are free at once, whatever the old copies do."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 16)
        old = desk.job("x", list(range(700, 800)))
        desk.devices[0].page_ns = SLOW
        await desk.compute(old)
        desk.preempt(old)
        assert desk.finish(old) is False, "its blocks are gone already"
        new = desk.job("x", 20)
        desk.admit(new, await desk.ask(new, 16), 16)
        await desk.step((new, 4))
        assert desk.finish(new) is True
        await desk.pause()
        report = await desk.step()
        assert desk.workers[0].stores_inflight("x") == 1, "the old one still reads"
        assert report.finished.sent == {"x"}
        await desk.settle()
        assert not (await desk.step()).finished.sent, "sent twice"

    desk_of().run(scenario)


def test_the_report_of_an_old_load_does_not_end_the_new_load_of_the_same_name(desk_of: DeskOf) -> None:
    """R40: until the old life's load has been reported the new one is computed without the cache."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        old = desk.job("x", 70)
        desk.admit(old, await desk.ask(old))
        await desk.step()
        desk.finish(old)
        new = desk.job("x", 70)
        assert desk.scheduler.matched_tokens(new.view(), 0) == (0, False)
        assert desk.scheduler.statistics().orphans == 1
        await desk.receive()
        assert await desk.ask(new) == 64
        desk.admit(new, 64)
        report = await desk.step()
        assert not report.finished.received, "its own load has just begun"
        await desk.receive()
        assert desk.right(new, 64)
        desk.finish(new)

    desk_of(load_async=True, page_ns=SLOW).run(scenario)


def test_a_job_that_ended_is_not_walked_into_the_next_step(desk_of: DeskOf) -> None:
    """R68: plans of a request that ended are handed over once."""

    async def scenario(desk: Any) -> None:
        job = desk.job("one", 64)
        await desk.compute(job)
        desk.finish(job)
        assert [ended.request_id for ended in (await desk.step()).meta.ended] == ["one"]
        report = await desk.step()
        assert (report.meta.ended, report.meta.stores, report.meta.loads) == ((), (), ())
        desk.scheduler.update_output(Finished(), frozenset())
        await desk.settle()
        await desk.step()

    desk_of().run(scenario)

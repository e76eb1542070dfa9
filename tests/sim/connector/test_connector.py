"""Questions, promises and loads, with the real connector against a real server in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.errors import CallerError

DeskOf = Callable[..., Any]
MS = 1_000_000


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize(("ranks", "servers", "in_process"), [(1, 1, True), (2, 1, True), (2, 2, False), (1, 2, False)])
def test_what_one_request_stored_is_loaded_by_the_next(
    desk_of: DeskOf, load_async: bool, ranks: int, servers: int, in_process: bool
) -> None:
    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        assert await desk.ask(second) == 64
        desk.admit(second, 64)
        report = await desk.receive() if load_async else await desk.step((second, 6))
        assert not report.errors
        assert desk.right(second, 64)
        desk.finish(second)
        await desk.step()

    desk_of(load_async=load_async, ranks=ranks, servers=servers, in_process=in_process).run(scenario)


@pytest.mark.parametrize(
    ("stored", "asked", "local", "promised"),
    [
        (64, 64, 0, 63),
        (64, 65, 0, 64),
        (16, 16, 0, 15),
        (64, 64, 60, 3),
        (64, 1, 0, 0),
        (64, 64, 63, 0),
        (64, 15, 0, 0),
    ],
)
def test_a_promise_leaves_the_last_token_to_be_computed(
    desk_of: DeskOf, stored: int, asked: int, local: int, promised: int
) -> None:
    """R07: n = 4 chunks, one more, one chunk, one token, and a local prefix of n - 1."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", stored)
        second = desk.job("second", asked)
        assert await desk.ask(second, local) == promised
        desk.admit(second, promised, local)
        report = await desk.step((second, asked - second.computed))
        assert sum(len(plan.cells) for plan in report.meta.loads) == (4 if promised >= 63 else promised > 0)
        assert desk.right(second, asked)
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)


def test_a_shorter_hit_than_the_engines_own_prefix_is_nothing(desk_of: DeskOf) -> None:
    """R09: the cache has 32 tokens, the engine 40 of 60: no load, no lease, and the store begins at the right place."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 32)
        second = desk.job("second", 60)
        assert await desk.ask(second, 40) == 0
        desk.admit(second, 0, 40)
        report = await desk.step((second, 20))
        assert not report.meta.loads
        assert [cell.chunk for plan in report.meta.stores for cell in plan.cells] == [0, 1, 2]
        await desk.settle()
        assert desk.leases() == 0
        assert desk.resident(second) == [1, 1, 1]
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)


def test_asking_again_has_no_effect_and_one_lookup_is_made(desk_of: DeskOf) -> None:
    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        answers = [await desk.ask(second) for _ in range(5)]
        assert answers == [64] * 5
        assert desk.scheduler.statistics().lookups == 2
        desk.finish(second)

    desk_of().run(scenario)


def test_a_local_prefix_that_grows_makes_the_promise_shorter_and_leaves_no_lease(desk_of: DeskOf) -> None:
    """R22: chunk 0 is the engine's by now, chunk 1 straddles its prefix; all leases are back after the load."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        assert await desk.ask(second) == 64
        assert await desk.ask(second, 24) == 40
        desk.admit(second, 40, 24)
        report = await desk.step((second, 6))
        (plan,) = report.meta.loads
        assert [(cell.chunk, [block == 0 for block in cell.blocks]) for cell in plan.cells] == [
            (1, [True, True, False, False]),
            (2, [False] * 4),
            (3, [False] * 4),
        ]
        assert desk.right(second, 70)
        await desk.settle()
        assert desk.leases() == 0, "a lease outlived the load"
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)


def test_a_local_prefix_that_shrinks_is_asked_for_again(desk_of: DeskOf) -> None:
    """The lookup relied on 32 tokens of the engine's; blocks were evicted before the allocation succeeded."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        assert await desk.ask(second, 32) == 32
        assert await desk.ask(second, 16) == 48
        assert desk.scheduler.statistics().generations == 3
        desk.admit(second, 48, 16)
        await desk.step((second, 6))
        assert desk.right(second, 70)
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)


def test_only_the_missing_chunks_are_read(desk_of: DeskOf) -> None:
    """R67: the engine has 90 % of a stored prompt."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 161)
        second = desk.job("second", 161)
        assert await desk.ask(second, 144) == 16
        assert desk.leases() == 1
        desk.admit(second, 16, 144)
        await desk.step((second, 1))
        assert desk.workers[0].statistics().cells_loaded == 1
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)


def test_a_promise_that_is_not_taken_gives_all_leases_back(desk_of: DeskOf) -> None:
    """R22 b."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        assert await desk.ask(second) == 64
        assert desk.leases() == 4
        desk.admit(second, 0)
        await desk.step((second, 70))
        await desk.settle()
        assert desk.leases() == 0
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)


def test_the_engine_may_not_take_what_was_not_promised(desk_of: DeskOf) -> None:
    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        await desk.ask(second)
        with pytest.raises(CallerError, match="64 were promised"):
            desk.admit(second, 48)
        with pytest.raises(CallerError, match="not called"):
            await desk.step((second, 1))
        desk.finish(second)

    desk_of().run(scenario)


def test_the_hybrid_hit_ends_at_a_snapshot_and_loads_nothing_outside_the_window(desk_of: DeskOf, hybrid: Any) -> None:
    """R13, R14: a window of 24 and a recurrent state; steps ended at 32 and 64, so the hit for 70 tokens is 64, for 63
    it is 32, and the full hit of 64 falls back to 32."""

    async def scenario(desk: Any) -> None:
        first = desk.job("first", 70)
        desk.admit(first, await desk.ask(first))
        for count in (32, 32, 6):
            await desk.step((first, count))
        desk.finish(first)
        await desk.settle()
        await desk.step()
        for tokens, hit in ((70, 64), (63, 32), (64, 32)):
            other = desk.job(f"n{tokens}", tokens)
            assert await desk.ask(other) == hit
            tables = desk.table(tokens + 16)
            tables[1][: (hit - 23) // 8] = [0] * ((hit - 23) // 8)
            tables[2][: hit // 16 - 1] = [0] * (hit // 16 - 1)
            desk.admit(other, hit, tables=tables)
            report = await desk.step((other, tokens - hit))
            assert not report.errors
            assert desk.right(other, tokens)
            desk.finish(other)
        await desk.step()

    desk_of(groups=hybrid).run(scenario)


def test_a_failed_cell_is_reported_with_its_blocks_and_the_rest_is_recomputed(desk_of: DeskOf) -> None:
    """R16: chunks 2 and 3 of 4 do not arrive: their blocks are named. What was computed over the hole is not stored;
    an abort before the next step does not change that."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", [*desk.job("", 64).tokens, *range(1000, 1040)])
        tables = desk.table(120)
        assert await desk.ask(second) == 64
        desk.fail_loads([tables[0][14], *tables[0][8:10]])
        desk.admit(second, 64, tables=tables)
        report = await desk.step((second, 40))
        assert report.errors == frozenset(tables[0][8:16]), "whole cells"
        assert not report.meta.stores, "nothing is stored in the step of a load"
        second.computed = 32
        assert desk.finish(second) is False, "an abort stores nothing that rests on the hole"
        await desk.step()

    desk_of().run(scenario)


def test_after_a_partial_failure_the_recomputed_chunks_are_stored(desk_of: DeskOf) -> None:
    """R16, R14 b: a skipped chunk is stored later."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", [*desk.job("", 64).tokens, *range(1000, 1040)])
        tables = desk.table(120)
        await desk.ask(second)
        desk.fail_loads(tables[0][8:14])
        desk.admit(second, 64, tables=tables)
        await desk.step((second, 40))
        second.computed = 32
        report = await desk.step((second, 72))
        assert [cell.chunk for plan in report.meta.stores for cell in plan.cells] == [2, 3, 4, 5]
        await desk.settle()
        assert desk.resident(second) == [1] * 6
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)


def test_the_failure_of_one_rank_poisons_nothing_on_the_other(desk_of: DeskOf) -> None:
    """R16 b: rank 1 loses its load; rank 0's forward pass ran over the sum of both."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        before = len(list(desk.servers[0].l1.resident_keys()))
        second = desk.job("second", [*desk.job("", 64).tokens, *range(1000, 1040)])
        tables = desk.table(120)
        await desk.ask(second)
        desk.fail_loads(tables[0][0:4], rank=1)
        desk.admit(second, 64, tables=tables)
        report = await desk.step((second, 40))
        assert report.errors == frozenset(tables[0][0:4])
        desk.preempt(second)
        desk.finish(second)
        await desk.step()
        await desk.settle()
        assert len(list(desk.servers[0].l1.resident_keys())) == before

    desk_of(ranks=2).run(scenario)


def test_ranks_that_report_in_different_steps_still_make_one_failure(desk_of: DeskOf) -> None:
    """Rank 0 fails at once, rank 1 loads slowly and well: the load has failed when the last report has come."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 100)
        tables = desk.table(120)
        await desk.ask(second)
        desk.fail_loads(tables[0][4:8], rank=0)
        desk.devices[1].page_ns = (400_000, 400_000)
        desk.admit(second, 64, tables=tables)
        await desk.pause(MS // 2)
        first = await desk.step()
        await desk.pause(MS // 2)
        second_step = await desk.step()
        assert first.errors | second_step.errors == frozenset(tables[0][4:8])
        assert not (await desk.receive()).errors, "the report of rank 1 comes later and is good"
        assert desk.scheduler.statistics().load_failures == 1
        second.computed = 16
        report = await desk.step((second, 84))
        assert [cell.chunk for plan in report.meta.stores for cell in plan.cells] == [1, 2, 3, 4, 5]
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of(ranks=2, load_async=True).run(scenario)


def test_with_several_groups_a_failed_load_is_named_by_request(desk_of: DeskOf, hybrid: Any) -> None:
    """R16 c: no block list can say where a hybrid model may go on; the null block is never reported."""

    async def scenario(desk: Any) -> None:
        first = desk.job("first", 40)
        desk.admit(first, await desk.ask(first))
        await desk.step((first, 32))
        await desk.step((first, 8))
        desk.finish(first)
        await desk.settle()
        await desk.step()
        second = desk.job("second", 40)
        tables = desk.table(56)
        tables[1][0] = 0
        assert await desk.ask(second) == 32
        desk.fail_loads([tables[1][2]])
        desk.admit(second, 32, tables=tables)
        report = await desk.receive()
        assert report.finished.failed == {"second"}
        assert report.errors
        assert 0 not in report.errors
        desk.preempt(second)
        desk.finish(second)

    desk_of(groups=hybrid, load_async=True).run(scenario)


def test_failing_loads_end_and_the_request_is_computed(desk_of: DeskOf) -> None:
    """R17: a verdict that was wrong twice is not believed a third time."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        desk.fail_loads(range(1, 500))
        promises = []
        for _ in range(4):
            external = await desk.ask(second)
            promises.append(external)
            desk.admit(second, external)
            await desk.step((second, 70 - external))
            if external:
                desk.preempt(second)
        assert promises == [64, 64, 0, 0]
        assert desk.right(second, 70)
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)


def test_a_device_that_takes_no_copy_fails_the_load_and_nothing_else(desk_of: DeskOf) -> None:
    """R18: `submit` raises at once; all blocks are reported and no hit is counted as loaded."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        tables = desk.table(86)
        await desk.ask(second)
        original = desk.devices[0].submit

        def refuse(copies: Any, *, stream: str, after: Any = ()) -> Any:
            if stream == "load":
                raise OSError("no DMA channel is left")
            return original(copies, stream=stream, after=after)

        desk.devices[0].submit = refuse
        desk.admit(second, 64, tables=tables)
        report = await desk.step((second, 6))
        assert report.errors == frozenset(tables[0][:16])
        state = desk.workers[0].statistics()
        assert (state.copies_refused, state.cells_loaded, state.bytes_loaded, state.loads_failed) == (4, 0, 0, 1)
        desk.preempt(second)
        desk.finish(second)

    desk_of().run(scenario)


def test_a_load_without_leases_touches_nothing_and_is_reported(desk_of: DeskOf) -> None:
    """R08, R16: the session is gone at the server when the worker comes (idle expiry, a restart)."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        tables = desk.table(86)
        await desk.ask(second)
        desk.servers[0].server._sessions.clear()
        desk.admit(second, 64, tables=tables)
        report = await desk.step((second, 6))
        assert report.errors == frozenset(tables[0][:16])
        assert not desk.pages[0][0][tables[0][:16]].any(), "bytes without a lease"
        desk.preempt(second)
        desk.finish(second)

    desk_of().run(scenario)


def test_bytes_that_lost_their_lease_while_they_were_copied_do_not_count(desk_of: DeskOf) -> None:
    """R08: the session ends at the server in the middle of the copy; the slots may have been anything."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        tables = desk.table(86)
        desk.devices[0].page_ns = (100_000, 100_000)
        desk.admit(second, await desk.ask(second), tables=tables)
        await desk.step()
        desk.servers[0].server._sessions.clear()
        report = await desk.receive()
        assert report.errors == frozenset(tables[0][:16])
        assert desk.right(second, 64), "the bytes had arrived all the same"
        desk.preempt(second)
        desk.finish(second)

    desk_of(load_async=True).run(scenario)


def test_a_load_that_was_reported_twice_ends_once(desk_of: DeskOf) -> None:
    """R39."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 70)
        second = desk.job("second", 70)
        desk.admit(second, await desk.ask(second))
        report = await desk.receive()
        desk.scheduler.update_output(report.finished, frozenset())
        await desk.step((second, 6))
        desk.scheduler.update_output(report.finished, frozenset())
        desk.finish(second)
        desk.scheduler.update_output(report.finished, frozenset())
        await desk.settle()
        await desk.step()

    desk_of(load_async=True).run(scenario)


def test_a_finished_load_is_not_asked_for_or_loaded_again(desk_of: DeskOf) -> None:
    """R63: the engine passes the waiting request once more after its asynchronous load has ended."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 64)
        second = desk.job("second", 64)
        desk.admit(second, await desk.ask(second))
        assert desk.scheduler.matched_tokens(second.view(), 0) == (None, False), "its blocks are being written"
        await desk.receive()
        assert desk.scheduler.matched_tokens(second.view(), 60) == (0, False), "63 tokens, seen in whole blocks"
        desk.scheduler.after_alloc(second.view(), tuple(second.tables), 0)
        report = await desk.step((second, 1))
        assert not report.meta.loads
        state = desk.scheduler.statistics()
        assert (state.lookups, state.loads_planned) == (2, 1)
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of(load_async=True).run(scenario)


def test_hits_are_counted_once_however_often_allocation_fails(desk_of: DeskOf) -> None:
    """S25; R60: 161 tokens, 80 local, 48 in the cache beyond: queried 81, hit 48."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 130)
        second = desk.job("second", 161)
        for _ in range(4):
            assert await desk.ask(second, 80) == 48
        before = desk.scheduler.statistics()
        desk.admit(second, 48, 80)
        await desk.step((second, 33))
        after = desk.scheduler.statistics()
        assert after.tokens_queried - before.tokens_queried == 81
        assert after.tokens_hit - before.tokens_hit == 48
        desk.finish(second)
        await desk.step()

    desk_of().run(scenario)

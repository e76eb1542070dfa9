"""Public reports found since the list was made: the rows S01 and on of `docs/public-reports.md`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from kvcore.answers import Answer
from kvcore.keys import ChunkHasher

MS = 1_000_000
S = 1_000_000_000
CHUNK = 16

DeskOf = Callable[..., Any]
RigOf = Callable[..., Any]


class RenewingHasher(ChunkHasher):
    """As an engine's whose weights change: `renew` begins other keys."""

    def renew(self) -> None:
        self._digest = blake3(b"new weights", key=self._digest).digest()


def renewing(desk: Any) -> Any:
    desk.hasher = RenewingHasher(desk.namespace)
    return desk


def renew(desk: Any, *jobs: Any) -> None:
    """The keys change while these jobs are open."""
    desk.hasher.renew()
    desk.scheduler.keys_changed()
    for job in jobs:
        desk.know(job.tokens)


async def end(desk: Any, *jobs: Any) -> None:
    for job in jobs:
        desk.finish(job)
    await desk.settle()
    for _ in range(3):
        await desk.step()


# --- C. the hit-length contract


def test_a_request_that_must_be_computed_is_stored_and_never_looked_up(desk_of: DeskOf) -> None:
    """S01: log-probabilities of a prompt need every row computed; a lookup is work and leases for nothing."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 2 * CHUNK)
        before = desk.scheduler.statistics()
        job = desk.job("second", 4 * CHUNK)
        view = replace(job.view(), reads_cache=False)
        assert desk.scheduler.matched_tokens(view, 0) == (0, False), "at once, and not 'ask again'"
        desk.admit(job, 0)
        await desk.step((job, 4 * CHUNK))
        after = desk.scheduler.statistics()
        assert (after.lookups, after.tokens_queried) == (before.lookups, before.tokens_queried)
        await end(desk, job)
        assert desk.resident(job) == [1, 1, 1, 1]

    desk_of().run(scenario)


# --- J. identity of keys


@pytest.mark.parametrize("when", ["before it asks", "while it is looked up", "promised", "preempted after a load"])
def test_after_the_keys_have_changed_nothing_old_is_loaded_by_a_request_that_was_there(
    desk_of: DeskOf, when: str
) -> None:
    """S02: the engine resets its cache with requests under way, as it does when it pauses for new weights."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 3 * CHUNK)
        job = desk.job("second", 4 * CHUNK)
        if when == "while it is looked up":
            assert desk.scheduler.matched_tokens(job.view(), 0) == (None, False)
        if when in ("promised", "preempted after a load"):
            assert await desk.ask(job) == 3 * CHUNK
        if when == "preempted after a load":
            desk.admit(job, 3 * CHUNK)
            await desk.step((job, 4))
            desk.preempt(job)
        renew(desk, job)
        assert await desk.ask(job) == 0, "everything that was found is under keys that nobody makes any more"
        assert desk.leases() == 0
        desk.admit(job, 0)
        await desk.step((job, 4 * CHUNK))
        await end(desk, job)
        third = desk.job("third", 4 * CHUNK + 1)
        assert await desk.ask(third) == 4 * CHUNK, "the new keys' chunks are found"
        await end(desk, third)

    renewing(desk_of()).run(scenario)


@pytest.mark.parametrize("tokens", [CHUNK // 2, 2 * CHUNK])
def test_what_a_request_computed_across_a_change_of_keys_is_in_the_cache_under_no_new_key(
    desk_of: DeskOf, tokens: int
) -> None:
    """S02: it runs on over blocks of the old weights; with less than a chunk it has not even an old key yet."""

    async def scenario(desk: Any) -> None:
        job = desk.job("one", 4 * CHUNK)
        desk.admit(job, await desk.ask(job))
        await desk.step((job, tokens))
        renew(desk, job)
        report = await desk.step((job, 4 * CHUNK - tokens))
        assert not report.meta.stores
        await end(desk, job)
        assert desk.resident(job) == [0, 0, 0, 0]

    renewing(desk_of()).run(scenario)


def test_a_request_that_comes_after_a_change_of_keys_is_served_as_ever_under_an_old_name(desk_of: DeskOf) -> None:
    """S02."""

    async def scenario(desk: Any) -> None:
        job = desk.job("name", 2 * CHUNK)
        await desk.compute(job)
        renew(desk, job)
        await end(desk, job)
        again = desk.job("name", 2 * CHUNK)
        await desk.compute(again)
        await end(desk, again)
        assert desk.resident(again) == [1, 1]

    renewing(desk_of()).run(scenario)


# --- E. a failed load


@pytest.mark.parametrize("brought", [True, False])
def test_what_another_connector_loads_is_stored_after_its_report_and_never_where_it_failed(
    desk_of: DeskOf, brought: bool
) -> None:
    """S38: it loads two chunks for one request, which another one of the same step finds in the engine's cache. When
    that load has failed the first is computed anew, and the second is aborted before it can be."""

    async def scenario(desk: Any) -> None:
        first, second = desk.job("first", 4 * CHUNK), desk.job("second", 3 * CHUNK)
        assert [await desk.ask(first), await desk.ask(second, 2 * CHUNK)] == [0, 0]
        desk.admit(first, 0, 2 * CHUNK if brought else 0)
        theirs = first.tables[0][: 2 * CHUNK // 4]
        desk.admit(second, 0, 2 * CHUNK, [theirs + desk.table(2 * CHUNK)[0]], shared=theirs)
        first.computed, first.brought = 2 * CHUNK, range(2 * CHUNK)
        report = await desk.step((first, 2 * CHUNK), (second, CHUNK), not_brought=() if brought else theirs)
        assert not report.meta.stores
        if not brought:
            await end(desk, second)
            assert desk.resident(first) == [0, 0, 0, 0]
            first.computed = 0
            await desk.step((first, 4 * CHUNK))
        await end(desk, first, second)
        assert desk.resident(first) == [1, 1, 1, 1]

    desk_of().run(scenario)


# --- F. pins


def test_the_end_of_one_request_leaves_the_pins_of_another_on_the_same_chunks(desk_of: DeskOf) -> None:
    """S05: the first of two that found the same chunks loads, ends and is ended again; the room is wanted."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 2 * CHUNK)
        one, two = desk.job("one", 2 * CHUNK + 1), desk.job("two", 2 * CHUNK + 1)
        assert [await desk.ask(one), await desk.ask(two)] == [2 * CHUNK] * 2
        desk.admit(one, 2 * CHUNK)
        await desk.step((one, 1))
        for _ in range(2):
            desk.finish(one)
        await desk.settle()
        [server] = desk.servers
        assert server.l1.evict(1 << 20) == 0, "what the second was promised stays"
        desk.admit(two, 2 * CHUNK)
        await desk.step((two, 1))
        assert desk.right(two, 2 * CHUNK)
        await end(desk, two)

    desk_of().run(scenario)


def test_an_answer_that_the_engine_gives_up_holds_nothing_until_somebody_asks_again(desk_of: DeskOf) -> None:
    """S05: the promised chunks may go while the request waits, however long, for its next question."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 2 * CHUNK)
        job = desk.job("second", 2 * CHUNK + 1)
        assert await desk.ask(job) == 2 * CHUNK
        assert desk.leases() == 2
        desk.scheduler.preempted(job.name)
        await desk.settle()
        assert desk.leases() == 0
        await end(desk, job)

    desk_of().run(scenario)


# --- G, H. the living and the dead


def test_a_worker_that_has_had_nothing_to_do_for_hours_is_not_taken_for_dead(service: Any) -> None:
    """S08: an idle worker sends no sign of life; its first store and its first load after hours are kept."""

    async def scenario(world: Any) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(service.RANKS):
            assert await world.store(rank, 1, hashes) == [Answer.PUBLISHED] * 2
        await world.sleep(5 * 3600 * S)
        outcome = await world.ask("q", 1, hashes)
        assert outcome.best == 2
        world.scheduler.settle("q", 1, 2)
        assert [await world.load(rank, "q", 1, hashes, 2) for rank in range(service.RANKS)] == [2] * service.RANKS
        world.scheduler.end("q")
        for rank in range(service.RANKS):
            assert await world.store(rank, 2, world.hashes(2, 1)) == [Answer.PUBLISHED]
        await world.sleep(S)
        world.assert_at_rest()

    service.World(3).run(scenario)


# --- I. ranks must agree


def test_a_rank_that_lost_its_shard_gets_it_again_from_the_recompute(desk_of: DeskOf) -> None:
    """S11: rank 0 has everything and says so; that must not keep rank 1 from storing, or it misses for ever."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 2 * CHUNK)
        [adapter] = desk.servers[1].storage._adapters
        adapter.delete(adapter.keys())
        desk.servers[1].storage.drop_l1()
        await desk.settle()
        second = desk.job("second", 2 * CHUNK + 1)
        assert len((await desk.compute(second)).meta.stores) == 1
        await end(desk, second)
        third = desk.job("third", 2 * CHUNK + 1)
        assert await desk.ask(third) == 2 * CHUNK
        await end(desk, third)

    desk_of(ranks=2, servers=2).run(scenario)


# --- K. storage and capacity


def test_a_store_that_found_no_room_can_be_made_again_as_soon_as_there_is_some(rig_of: RigOf) -> None:
    """S12: the refused key is not "being written", and what was there is not evicted for one that can never fit."""

    async def scenario(rig: Any) -> None:
        small, large, wanted = rig.key(0), rig.key(1), rig.key(2)
        assert rig.store([small]) == [Answer.RESERVED]
        assert rig.storage.reserve_store("huge", "w", [large], [1 << 20])[0] == [Answer.NO_SPACE]
        assert rig.l1.contains(small), "nothing was evicted for it"
        job = rig.start(1)
        others = [rig.key(number) for number in range(3, 6)]
        assert rig.storage.reserve_store("fill", "w", others, [64] * 3)[0] == [Answer.RESERVED] * 3
        assert rig.storage.reserve_store("again", "w", [wanted], [64])[0] == [Answer.NO_SPACE]
        rig.storage.release_owner(job.owner)
        assert rig.storage.reserve_store("again", "w", [wanted], [64])[0] == [Answer.RESERVED]
        rig.storage.release_holder("w")

    rig_of(0, adapters=(), l1_cells=2).run(scenario)


@pytest.mark.parametrize("how", ["computed at once", "computed in steps", "loaded", "kept by the engine"])
def test_the_end_of_a_prefix_is_evicted_before_its_beginning(desk_of: DeskOf, how: str) -> None:
    """S39: what is left of a prefix without its beginning serves nobody."""
    tokens = list(range(1000, 1000 + 10 * CHUNK))
    others = list(range(5000, 5000 + 5 * CHUNK))

    async def scenario(desk: Any) -> None:
        if how != "computed in steps":
            await desk.store("first", tokens)
        job = desk.job("request", [*tokens, 1])
        if how == "kept by the engine":
            await desk.store("between", others[: 2 * CHUNK])
            assert await desk.ask(job, local=8 * CHUNK) == 2 * CHUNK
            desk.admit(job, 2 * CHUNK, local=8 * CHUNK)
            await desk.step((job, 1))
        elif how != "computed at once":
            got = await desk.ask(job)
            desk.admit(job, got)
            while job.computed < len(job.tokens):
                await desk.step((job, min(2 * CHUNK, len(job.tokens) - job.computed)))
        await end(desk, job)
        await desk.store("more", [token + 9000 for token in others])
        left = desk.resident(job)
        assert 0 < sum(left) < 10
        assert left[: sum(left)] == [1] * sum(left), left

    desk_of(l1_bytes=12 * CHUNK * 8).run(scenario)


def test_loads_from_a_lower_tier_take_the_place_of_what_is_idle_in_l1(rig_of: RigOf) -> None:
    """S47: 18 of 28 places are taken by what nobody reads, and a prefix of 11 is wanted."""

    async def scenario(rig: Any) -> None:
        rig.store(rig.keys(18, prompt="idle"))
        await rig.storage.drain()
        rig.fill_l2(rig.a, rig.keys(11))
        job = rig.start(11)
        await job.wait()
        assert rig.best(job) == 11
        assert sum(map(rig.l1.contains, rig.keys(18, prompt="idle"))) == 17
        rig.read(job, 11)

    rig_of(0, l1_cells=14, prefetch_budget_bytes=28 * 64).run(scenario)


def test_every_chunk_of_a_long_prefix_is_the_right_one(rig_of: RigOf) -> None:
    """S43: more than 128 chunks, some of them in L1 and the others in the store."""
    chunks = 300

    async def scenario(rig: Any) -> None:
        keys = rig.keys(chunks)
        rig.store(keys[::3])
        await rig.storage.drain()
        rig.fill_l2(rig.a, keys)
        job = rig.start(chunks)
        await job.wait()
        assert rig.best(job) == chunks
        rig.read(job, chunks)

    rig_of(0, l1_cells=chunks, prefetch_budget_bytes=chunks * 64).run(scenario)


def test_chunks_that_are_generated_are_stored_while_the_request_runs(desk_of: DeskOf) -> None:
    """S58: a chunk whose last token is sampled in one step is full of KV after the next."""

    async def scenario(desk: Any) -> None:
        job = desk.job("one", 20)
        desk.admit(job, await desk.ask(job), tables=desk.table(5 * CHUNK))
        await desk.step((job, 20))
        for number in range(3 * CHUNK):
            job.tokens.append(700 + number)
            desk.know(job.tokens)
            await desk.step((job, 1))
        await desk.settle()
        assert desk.resident(job) == [1, 1, 1, 1]
        await end(desk, job)

    desk_of().run(scenario)

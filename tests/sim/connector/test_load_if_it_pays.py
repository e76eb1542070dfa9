"""The admission in the connector: measured rates decide, a promise stays one, and what is not promised goes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.admission import Limits
from kvcore.connectors.admission import LoadAll
from kvcore.connectors.tracker import Phase, RequestTracker

DeskOf = Callable[..., Any]
MS = 1_000_000
TOKEN_NS = 20_000
"""To compute one token; a block has four."""
FAST, SLOW = (1_000, 3_000), (400_000, 400_000)
"""Of one block's copy: a twentieth of what its tokens take, and five times as much."""


async def serve(desk: Any, name: str, tokens: int | list[int]) -> int:
    """A request from its question to its end; what it was promised."""
    job = desk.job(name, tokens)
    promised = await desk.ask(job)
    desk.admit(job, promised)
    if promised and desk.load_async:
        await desk.receive()
    await desk.step((job, len(job.tokens) - job.computed))
    assert desk.right(job, len(job.tokens))
    desk.finish(job)
    await desk.settle()
    await desk.step()
    return int(promised)


async def measure(desk: Any) -> None:
    """Prompts of several lengths are stored, and one is loaded until that is measured: the first time is a warm-up."""
    for base, tokens in ((1_000, 40), (2_000, 100), (3_000, 70)):
        await desk.store(f"new{base}", [base + at for at in range(tokens)])
    for attempt in range(5):
        assert await serve(desk, f"old{attempt}", [1_000 + at for at in range(40)]) == 32


@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize(("page_ns", "promised"), [(FAST, 64), (SLOW, 0)])
def test_the_measured_rates_decide(desk_of: DeskOf, load_async: bool, page_ns: tuple[int, int], promised: int) -> None:
    async def scenario(desk: Any) -> None:
        await measure(desk)
        assert await serve(desk, "again", [3_000 + at for at in range(70)]) == promised
        state, rates = desk.scheduler.statistics(), desk.scheduler.admission.statistics()
        assert (state.tokens_refused > 0 or state.lookups_unwanted > 0) is (promised == 0)
        assert rates.prefill_token_s == pytest.approx(TOKEN_NS / 1e9, rel=0.2)
        assert rates.loads_measured >= 5
        assert rates.load_byte_s == pytest.approx(sum(page_ns) / 2 / 32 / 1e9, rel=0.5)  # a block has 32 bytes
        assert rates.lookups_measured >= 5
        assert rates.lookup_byte_s is not None

    desk_of(load_async=load_async, page_ns=page_ns, token_ns=TOKEN_NS, limits=Limits()).run(scenario)


def test_one_slow_load_at_the_start_closes_no_way(desk_of: DeskOf) -> None:
    """Threads, pages and connections are made at the first one; five hundred requests must not pay for that."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 40)
        await desk.store("second", [9_000 + at for at in range(100)])
        desk.devices[0].page_ns = (20 * MS, 20 * MS)
        assert await serve(desk, "warm-up", 40) == 32
        desk.devices[0].page_ns = FAST
        assert [await serve(desk, f"r{at}", 40) for at in range(6)] == 6 * [32]

    desk_of(page_ns=FAST, token_ns=TOKEN_NS, limits=Limits()).run(scenario)


def test_what_is_not_promised_goes_back_at_once(desk_of: DeskOf) -> None:
    """While the request waits to be admitted, and not only when it is: the leases block room that others want."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 40)
        second = desk.job("second", 70)
        assert await desk.ask(second) == 0
        await desk.settle()
        assert desk.leases() == 0
        assert desk.scheduler.statistics().tokens_refused == 32
        assert desk.scheduler.tracker("second").lengths > 1, "it was found"
        desk.admit(second, 0)
        await desk.step((second, 70))
        desk.finish(second)
        await desk.settle()
        await desk.step()

    desk_of(limits=Limits(floor_tokens=33)).run(scenario)


def test_a_decision_is_told_again_and_not_made_again(desk_of: DeskOf) -> None:
    """The engine had no room and asks in every step; meanwhile the rates change, and nobody sees it."""

    async def scenario(desk: Any) -> None:
        await measure(desk)
        tokens = [3_000 + at for at in range(70)]
        waiting, other = desk.job("waiting", tokens), desk.job("other", tokens)
        assert await desk.ask(waiting) == 64
        desk.devices[0].page_ns = (9 * MS, 9 * MS)
        assert await desk.ask(other) == 64
        desk.admit(other, 64)
        await desk.step((other, 6))
        assert await desk.ask(desk.job("third", tokens)) == 0, "the link has become slow"
        assert await desk.ask(waiting) == 64
        desk.admit(waiting, 64)
        await desk.step((waiting, 6))
        for name in ("waiting", "other", "third"):
            desk.finish(desk.job(name, tokens))
        await desk.settle()
        await desk.step()

    desk_of(page_ns=FAST, token_ns=TOKEN_NS, limits=Limits()).run(scenario)


def test_after_a_preemption_it_is_decided_anew(desk_of: DeskOf) -> None:
    async def scenario(desk: Any) -> None:
        await measure(desk)
        job = desk.job("again", [3_000 + at for at in range(70)])
        assert await desk.ask(job) == 64
        desk.admit(job, 64)
        await desk.step((job, 2))
        desk.preempt(job)
        desk.devices[0].page_ns = (9 * MS, 9 * MS)
        assert await serve(desk, "slow", [2_000 + at for at in range(100)]) == 96
        assert await desk.ask(job) == 0
        desk.admit(job, 0)
        await desk.step((job, 70))
        desk.finish(job)
        await desk.settle()
        await desk.step()

    desk_of(page_ns=FAST, token_ns=TOKEN_NS, limits=Limits()).run(scenario)


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize("load_async", [False, True])
def test_when_waiting_does_not_pay_any_more_what_has_arrived_is_kept(
    desk_of: DeskOf, load_async: bool, in_process: bool
) -> None:
    """Half of the prefix is there, and the store hangs with the other half: that half is computed."""

    async def scenario(desk: Any) -> None:
        await measure(desk)
        tokens = [3_000 + at for at in range(70)]
        desk.servers[0].storage.drop_l1()
        assert await serve(desk, "front", tokens[:40]) == 32
        desk.servers[0].executor.latency_ns = (400 * MS, 400 * MS)
        before, begin_ns = desk.scheduler.admission.statistics(), desk.loop.now_ns()
        job = desk.job("again", tokens)
        assert await desk.ask(job) == 32
        assert desk.loop.now_ns() - begin_ns < 20 * MS, "it did not wait for the store"
        desk.admit(job, 32)
        if load_async:
            await desk.receive()
        await desk.step((job, 38))
        assert desk.right(job, 70)
        assert desk.loop.now_ns() - begin_ns < 40 * MS, "nor did its load"
        assert desk.leases() == 0
        desk.finish(job)
        await desk.settle()
        await desk.step()
        state, after = desk.scheduler.statistics(), desk.scheduler.admission.statistics()
        assert (state.lookups_hurried, state.lookups_unwanted, state.tokens_refused) == (1, 0, 0)
        assert after.lookups_measured == before.lookups_measured, "its end was not its own"
        assert desk.servers[0].storage.statistics().prefetch.hurried == 1

    desk_of(load_async=load_async, in_process=in_process, page_ns=FAST, token_ns=TOKEN_NS, limits=Limits()).run(
        scenario
    )


@pytest.mark.parametrize("begins", ["acknowledged", "unheard"])
def test_a_server_that_does_not_even_tell_what_it_has_costs_one_more_question(desk_of: DeskOf, begins: str) -> None:
    """The answers of one of two servers do not arrive. Nobody waits for it, and no later answer is used."""

    async def scenario(desk: Any) -> None:
        await measure(desk)
        job = desk.job("again", [3_000 + at for at in range(70)])
        for server in desk.servers:
            server.storage.drop_l1()
            server.executor.latency_ns = (400 * MS, 400 * MS)
        if begins == "unheard":
            desk.world.network.partition("scheduler>server1", to_client=True)
        assert desk.scheduler.matched_tokens(job.view(), 0) == (None, False)
        await desk.pause(MS)
        desk.world.network.partition("scheduler>server1", to_client=True)
        while not desk.scheduler.statistics().lookups_hurried:
            assert desk.scheduler.matched_tokens(job.view(), 0) == (None, False)
            await desk.pause(MS // 5)
        assert desk.scheduler.matched_tokens(job.view(), 0) == (0, False)
        assert desk.scheduler.matched_tokens(job.view(), 0) == (0, False)
        desk.world.network.heal("scheduler>server1")
        await desk.pause(20_000 * MS)  # what was asked and not heard is given up by then
        desk.admit(job, 0)
        await desk.step((job, 70))
        desk.finish(job)
        await desk.settle()
        await desk.step()
        state = desk.scheduler.statistics()
        assert (state.lookups_hurried, state.lookups_unwanted) == (1, 1)
        assert desk.leases() == 0

    desk_of(servers=2, in_process=False, page_ns=FAST, token_ns=TOKEN_NS, limits=Limits()).run(scenario)


class Hasty(LoadAll):
    """Waits as long as it is patient, and keeps what it gets."""

    patient = False

    def worth_asking(self, tracker: RequestTracker, tokens: int, local_tokens: int) -> bool:
        return self.patient or tracker.phase is Phase.IDLE


@pytest.mark.parametrize("load_async", [False, True])
def test_what_a_store_has_brought_by_then_is_loaded_and_the_rest_is_not_even_fetched(
    desk_of: DeskOf, load_async: bool
) -> None:
    """A prompt of six chunks comes from the store chunk by chunk; after some of them the engine will not wait."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 100)
        storage = desk.servers[0].storage
        storage.drop_l1()
        desk.servers[0].executor.latency_ns = (5 * MS, 5 * MS)
        desk.scheduler.admission = hasty = Hasty()
        hasty.patient = True
        job = desk.job("second", 100)
        while sum(desk.resident(job)) < 2:
            assert desk.scheduler.matched_tokens(job.view(), 0) == (None, False)
            await desk.pause(MS // 5)
        hasty.patient = False
        assert await desk.ask(job) == 32
        desk.admit(job, 32)
        if load_async:
            await desk.receive()
        await desk.step((job, 68))
        assert desk.right(job, 100)
        desk.finish(job)
        await desk.settle()
        await desk.step()
        assert desk.scheduler.statistics().tokens_hit == 32
        assert storage.statistics().prefetch.loads.dropped == 2, "two of four had not begun"

    desk_of(load_async=load_async, load_slice_bytes=4 * 32).run(scenario)


@pytest.mark.parametrize("gone", ["finished", "other tokens", "new keys"])
def test_a_hurried_request_that_does_not_ask_again_keeps_nothing(desk_of: DeskOf, gone: str) -> None:
    """Its leases are taken by the answer to the hurry, after the last question of the attempt."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 40)
        desk.scheduler.admission = Hasty()
        job = desk.job("second", 40)
        assert desk.scheduler.matched_tokens(job.view(), 0) == (None, False)
        assert desk.scheduler.tracker("second").hurried
        await desk.settle()
        assert desk.leases() == 2
        if gone == "other tokens":
            job.tokens = job.tokens[:36]
            assert desk.scheduler.matched_tokens(job.view(), 0) == (None, False)
            assert desk.scheduler.statistics().lookups_hurried == 2, "another attempt is hurried for itself"
            await desk.settle()
            assert desk.scheduler.matched_tokens(job.view(), 0) == (32, False)
        elif gone == "new keys":
            desk.scheduler.keys_changed()
            assert not desk.scheduler.tracker("second").hurried
        desk.finish(job)
        await desk.settle()
        await desk.step()
        assert desk.leases() == 0

    desk_of().run(scenario)


def test_a_lookup_in_a_slow_store_is_given_up(desk_of: DeskOf) -> None:
    """What it asked for goes back, also what arrives later."""

    async def scenario(desk: Any) -> None:
        await measure(desk)
        desk.servers[0].storage.drop_l1()
        desk.servers[0].executor.latency_ns = (400 * MS, 400 * MS)
        begin_ns = desk.loop.now_ns()
        job = desk.job("again", [3_000 + at for at in range(70)])
        assert await desk.ask(job) == 0
        assert desk.loop.now_ns() - begin_ns < 20 * MS, "it did not wait for the store"
        desk.admit(job, 0)
        await desk.step((job, 70))
        desk.finish(job)
        await desk.settle()
        await desk.step()
        assert desk.scheduler.statistics().lookups_hurried == 1
        assert desk.leases() == 0
        assert desk.client.statistics().lookups_pending == 0

    desk_of(page_ns=FAST, token_ns=TOKEN_NS, limits=Limits()).run(scenario)


def test_a_way_that_was_left_is_tried_again(desk_of: DeskOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that was slow has become fast. Nobody would know, if nothing ever went over it."""

    async def scenario(desk: Any) -> None:
        await measure(desk)
        desk.devices[0].page_ns = FAST
        tokens = [3_000 + at for at in range(70)]
        answers = [await serve(desk, f"r{at}", tokens) for at in range(12)]
        assert answers == 8 * [0] + 4 * [64]

    monkeypatch.setattr("kvcore.admission.PROBE_AFTER", 8)
    desk_of(page_ns=SLOW, token_ns=TOKEN_NS, limits=Limits()).run(scenario)


@pytest.mark.parametrize(
    ("limits", "promised"), [(Limits(33), 0), (Limits(32), 32), (Limits(0, 32), 32), (Limits(0, 0), 32)]
)
def test_the_limits_have_the_last_word(desk_of: DeskOf, limits: Limits, promised: int) -> None:
    """Slow as the link is, a ceiling that is reached loads; fast as it may be, a floor that is not computes."""

    async def scenario(desk: Any) -> None:
        await desk.store("first", 40)
        assert await serve(desk, "second", 40) == promised

    desk_of(token_ns=TOKEN_NS, limits=limits).run(scenario)

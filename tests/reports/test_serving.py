"""The serving simulation: what is conserved, what is exact, what is monotone; the production core decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.admission import Limits, Reason
from kvcore.errors import ConfigError
from kvcore.reports import parameters, traces
from kvcore.reports.cost import Model, Tier, decode_step_s, host_memory, prefill_s, ttft_s
from kvcore.reports.prefix_lru import prefix_lru
from kvcore.reports.serving import (
    CacheTier,
    Cell,
    Eviction,
    Policy,
    Record,
    Router,
    ServingResult,
    Setting,
    simulate,
    sweep,
)
from kvcore.reports.serving.gpu import Batch, Part
from kvcore.reports.serving.layout import layout_of
from kvcore.reports.serving.link import Haul, Line
from kvcore.reports.serving.loads import STOPPED
from kvcore.reports.slo import Ending, parse_slo
from kvcore.reports.traces import Request, Trace

KNOWN = parameters.builtin()
LLAMA, H100 = KNOWN.model("Llama-3.1-8B"), KNOWN.host("H100")
DRAM = host_memory(H100)
CHUNK = 512
CHUNK_BYTES = CHUNK * LLAMA.kv_bytes_per_token()
FREE = Tier(name="free", t0_s=0.0, bytes_per_s=1e18)
TRACE = traces.generate(250, seed=5)


def setting(policy: Policy = Policy.ALWAYS, *tiers: tuple[Tier, int], **options: Any) -> Setting:
    """Host memory for 4,000 chunks, unless said otherwise; a light load."""
    places = tuple(CacheTier(tier, chunks * CHUNK_BYTES) for tier, chunks in tiers or ((DRAM, 4000),))
    return Setting(**{"model": LLAMA, "host": H100, "tiers": places, "policy": policy, "load": 0.3, **options})


def prompt(at: float, tokens: int, first: int = 0, output: int = 1) -> Request:
    """A prompt whose blocks are numbered from `first`, so that equal numbers share."""
    return Request(at, tokens, output, tuple(range(first, first - (-tokens // CHUNK))))


def trace(*requests: Request) -> Trace:
    return Trace("by hand", CHUNK, requests)


def hits(result: ServingResult) -> list[int]:
    return [record.hit_tokens for record in result.records]


def ttft(record: Record) -> float:
    assert record.ttft_s is not None
    return record.ttft_s


# --- conservation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", list(Policy))
def test_hit_and_computed_tokens_are_the_input_and_bytes_follow(policy: Policy, overlap: bool) -> None:
    slow = KNOWN.tier("S3")
    result = simulate(TRACE, setting(policy, (DRAM, 400), (slow, 4000), overlap=overlap))
    assert len(result.records) == len(TRACE)
    for record, request in zip(result.records, TRACE.requests):
        assert record.ending is Ending.COMPLETED
        assert record.hit_tokens + record.computed_tokens == record.input_tokens == request.input_tokens
        assert record.hit_tokens <= record.found_tokens < record.input_tokens
        whole = -(-record.hit_tokens // CHUNK)  # a prompt found whole has its last token computed all the same
        assert record.loaded_bytes == whole * CHUNK_BYTES
    assert (sum(hits(result)) > 0) is (policy is not Policy.NEVER)
    if policy is not Policy.NEVER:
        assert result.links[0].loaded_bytes == sum(record.loaded_bytes for record in result.records)


def test_every_time_is_in_order() -> None:
    for record in simulate(TRACE, setting(Policy.PAYS)).completed():
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert record.tpot_s is not None
        assert 0 < record.ttft_s <= record.e2e_s
        decoded = (record.e2e_s - record.ttft_s) / max(record.output_tokens - 1, 1)
        assert record.tpot_s == pytest.approx(decoded)


def test_the_same_arguments_give_the_same_result() -> None:
    one, other = (simulate(TRACE, setting(Policy.SPLIT, workers=3)) for _ in range(2))
    assert one == other


# --- exact against the closed forms --------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tier", [DRAM, KNOWN.tier("S3"), FREE])
def test_alone_a_request_takes_what_the_cost_model_says(tier: Tier, overlap: bool) -> None:
    """Loading and computing, in one step, without a queue."""
    alone = trace(prompt(0, 8000), prompt(100, 8000))
    result = simulate(alone, setting(Policy.ALWAYS, (tier, 100), load=1.0, overlap=overlap, step_tokens=10**6))
    first, second = result.records
    assert ttft(first) == pytest.approx(ttft_s(LLAMA, H100, None, 8000))
    assert second.hit_tokens == 8000 // CHUNK * CHUNK
    predicted = ttft_s(LLAMA, H100, tier, 8000, second.hit_tokens, overlap=overlap)
    assert ttft(second) == pytest.approx(predicted, rel=1e-9)


@pytest.mark.parametrize("tier", [DRAM, KNOWN.tier("100G RDMA")])
def test_a_replica_loads_every_ranks_copy(tier: Tier) -> None:
    """16 ranks share 8 KV heads: each byte exists twice."""
    model, host = KNOWN.model("Llama-3.1-70B"), H100.replica(16)
    alone = trace(prompt(0, 8000), prompt(100, 8000))
    tiers = (CacheTier(tier, 10**12),)
    result = simulate(alone, setting(model=model, host=host, tiers=tiers, load=1.0, step_tokens=10**6))
    second = result.records[1]
    assert second.loaded_bytes == 2 * second.hit_tokens * model.kv_bytes_per_token()
    assert ttft(second) == pytest.approx(ttft_s(model, host, tier, 8000, second.hit_tokens), rel=1e-9)


def test_a_split_computes_the_front_while_the_back_is_loaded() -> None:
    """Lots of idle time, a tier about as fast as computing: the split is faster than both."""
    even = Tier(name="even", t0_s=0.0, bytes_per_s=LLAMA.kv_bytes_per_token() / (prefill_s(LLAMA, H100, 8000) / 8000))
    requests = [prompt(50 * at, 30_000 + 512 * at) for at in range(40)]
    times = {}
    for policy in (Policy.ALWAYS, Policy.NEVER, Policy.SPLIT):
        result = simulate(trace(*requests), setting(policy, (even, 400), load=1.0, step_tokens=10**6))
        times[policy] = ttft(result.records[-1])
        assert 0 <= result.records[-1].hit_tokens < requests[-1].input_tokens
    assert result.records[-1].decision == "split"
    assert times[Policy.SPLIT] < 0.8 * min(times[Policy.ALWAYS], times[Policy.NEVER])


def test_a_transfer_that_costs_nothing_gives_the_time_without_a_miss() -> None:
    """Each request as if its prefix had been on the GPU: prefill of the rest after the prefix and nothing else."""
    spaced = [dataclasses.replace(request, arrival_s=60.0 * at) for at, request in enumerate(TRACE.requests)]
    result = simulate(
        dataclasses.replace(TRACE, requests=tuple(spaced)),
        setting(Policy.ALWAYS, (FREE, 100_000), load=1.0, step_tokens=10**6),
    )
    assert result.hit_rate > 0.1
    for record in result.completed():
        expected = H100.request_s + prefill_s(LLAMA, H100, record.computed_tokens, record.hit_tokens)
        assert ttft(record) == pytest.approx(expected, rel=1e-6)


def test_the_batch_takes_what_prefill_and_decode_of_the_cost_model_take() -> None:
    batch = Batch(setting(Policy.NEVER))
    assert batch.mixed_s([Part(4000, 2000)]) == pytest.approx(prefill_s(LLAMA, H100, 4000, 2000))
    for _ in range(7):
        batch.join(Job(1000, 500))
    assert batch.decode_s(1) == pytest.approx(decode_step_s(LLAMA, H100, 7, 1000))
    assert batch.decode_s(2) - batch.decode_s(1) == pytest.approx(decode_step_s(LLAMA, H100, 7, 1001))


@dataclasses.dataclass
class Job:
    prompt_tokens: int
    output_tokens: int


@pytest.mark.parametrize("batch_size", [1, 40, 2000])
def test_many_decode_steps_at_once_take_what_they_take_one_by_one(batch_size: int) -> None:
    """Also across the step at which computing becomes slower than reading memory."""
    for prompt_tokens in (10, 3000):
        at_once, one_by_one = Batch(setting(Policy.NEVER)), Batch(setting(Policy.NEVER))
        for at in range(batch_size):
            for batch in (at_once, one_by_one):
                batch.join(Job(prompt_tokens, 900 + at))
        total = 0.0
        for _ in range(899):
            total += one_by_one.decode_s(1)
            one_by_one.advance(1)
        assert at_once.decode_s(899) == pytest.approx(total, rel=1e-9)


def test_a_batch_that_crosses_from_memory_to_compute_is_in_the_test_above() -> None:
    """The crossing itself: a model with so little to read that growing contexts make attention the slower side."""
    small = dataclasses.replace(LLAMA, kv_heads=1, heads=32, head_dim=512, weight_bytes=2e11)
    host = dataclasses.replace(H100, gpus=8, hbm_bytes=1e12)
    batch = Batch(Setting(model=small, host=host, policy=Policy.NEVER))
    for _ in range(600):
        batch.join(Job(1, 200_000))
    steps, total = 60_000, 0.0
    first, last = batch.decode_s(1), 0.0
    walk = Batch(Setting(model=small, host=host, policy=Policy.NEVER))
    for _ in range(600):
        walk.join(Job(1, 200_000))
    for _ in range(60):
        total += walk.decode_s(1000)
        walk.advance(1000)
        last = walk.decode_s(1)
    assert last > 1.5 * first
    assert batch.decode_s(steps) == pytest.approx(total, rel=1e-9)


# --- monotone ------------------------------------------------------------------------------------------------------


def test_more_bandwidth_is_never_slower() -> None:
    means = []
    for rate in (1e9, 4e9, 16e9, 64e9, 256e9):
        tier = Tier(name="tier", t0_s=1e-4, bytes_per_s=rate)
        means.append(simulate(TRACE, setting(Policy.ALWAYS, (tier, 4000), load=0.2)).ttft_mean_s or 0.0)
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.8 * means[0]


def test_more_room_is_never_slower() -> None:
    results = [simulate(TRACE, setting(Policy.ALWAYS, (DRAM, chunks))) for chunks in (10, 100, 400, 1600, 6400)]
    rates = [result.hit_rate for result in results]
    means = [result.ttft_mean_s or 0.0 for result in results]
    assert rates == sorted(rates)
    assert rates[-1] > 3 * rates[0]
    assert means == sorted(means, reverse=True)


# --- the cache -----------------------------------------------------------------------------------------------------


def test_the_second_of_two_equal_prompts_loads_all_but_the_last_token() -> None:
    result = simulate(trace(prompt(0, 2048), prompt(10, 2048)), setting())
    assert hits(result) == [0, 2047]
    assert result.records[1].loaded_bytes == 4 * CHUNK_BYTES


def test_a_prompt_shorter_than_a_chunk_is_nobodys_business() -> None:
    result = simulate(trace(prompt(0, 500), prompt(10, 500)), setting(Policy.PAYS))
    assert hits(result) == [0, 0]
    assert result.records[0].decision == "nothing found"


def test_what_does_not_fit_any_more_leaves_and_the_beginning_of_a_prompt_leaves_last() -> None:
    """Room for six chunks: four of the first prompt, then four of a second; the first keeps its first two."""
    requests = (prompt(0, 2100), prompt(10, 2100, first=100), prompt(20, 2100), prompt(30, 2100, first=100))
    result = simulate(trace(*requests), setting(Policy.ALWAYS, (DRAM, 6), load=1.0))
    assert hits(result)[2] == 2 * CHUNK
    assert result.evictions > 0


def test_production_lru_hits_as_the_published_rule_says() -> None:
    """One request after the other, whole chunks only: L1 with LRU is the reference of reports/prefix_lru.py."""
    whole = tuple(
        Request(100.0 * at, len(row.blocks[: row.input_tokens // CHUNK]) * CHUNK + 1, 1, row.blocks)
        for at, row in enumerate(TRACE.requests)
        if row.input_tokens % CHUNK and row.input_tokens < 60_000
    )
    for chunks in (150, 700, 3000):
        result = simulate(Trace("whole", CHUNK, whole), setting(Policy.ALWAYS, (DRAM, chunks), load=1.0))
        half = result.records[len(whole) // 2 :]
        prompts = [(request.input_tokens, request.blocks[:-1]) for request in whole]
        expected = prefix_lru(prompts, chunks, CHUNK)
        ours = 100 * sum(record.hit_tokens for record in half) / sum(record.input_tokens for record in half)
        print(f"{chunks} chunks: L1 {ours:.3f} %, the rule {expected.percent:.3f} %")
        assert expected.percent > 1
        assert ours == pytest.approx(expected.percent, abs=0.1)


def test_a_hybrid_model_loads_its_window_and_state_and_no_more() -> None:
    hybrid = dataclasses.replace(
        LLAMA, layers_full=4, layers_window=16, window_tokens=1024, layers_recurrent=12, state_bytes=10**7
    )
    layout = layout_of(hybrid, H100, CHUNK)
    assert len(layout.groups) == 3
    result = simulate(
        trace(prompt(0, 5000), prompt(10, 5500), prompt(20, 5000)),
        setting(tiers=(CacheTier(DRAM, 100 * sum(layout.cell_bytes_rows)),), model=hybrid),
    )
    full, window, state = layout.cell_bytes_rows
    assert hits(result)[1] == 9 * CHUNK
    assert result.records[1].loaded_bytes == 9 * full + 2 * window + state


def test_what_left_host_memory_comes_back_from_the_store_behind_it() -> None:
    requests = (prompt(0, 2100), prompt(10, 2100, first=100), prompt(20, 2100))
    store = Tier(name="store", t0_s=0.5, bytes_per_s=1e9)
    both = simulate(trace(*requests), setting(Policy.ALWAYS, (DRAM, 4), (store, 100), load=1.0))
    assert hits(both)[2] == 4 * CHUNK
    assert both.links[1].loaded_bytes == 4 * CHUNK_BYTES
    assert both.links[0].loaded_bytes == 4 * CHUNK_BYTES, "and over the first link to the GPU"
    assert ttft(both.records[2]) > 0.5 + 4 * CHUNK_BYTES / 1e9


def test_a_store_is_shared_by_all_workers_or_by_none() -> None:
    requests = [prompt(10 * at, 2100) for at in range(4)]
    found = {}
    for shared in (False, True):
        tiers = (CacheTier(DRAM, 4 * CHUNK_BYTES), CacheTier(KNOWN.tier("S3"), 100 * CHUNK_BYTES, shared))
        options = {"tiers": tiers, "workers": 2, "router": Router.ROUND}
        found[shared] = hits(simulate(trace(*requests), setting(Policy.ALWAYS, **options)))
    assert found[False] == [0, 0, 2048, 2048]
    assert found[True] == [0, 2048, 2048, 2048]


def test_a_load_that_finds_no_room_in_host_memory_takes_what_is_there() -> None:
    requests = (prompt(0, 4200), prompt(10, 600, first=90), prompt(20, 4200))
    store = KNOWN.tier("S3")
    result = simulate(trace(*requests), setting(Policy.ALWAYS, (DRAM, 4), (store, 100), load=1.0))
    assert result.records[2].decision == "no room"
    assert result.records[2].hit_tokens < 4 * CHUNK


# --- eviction ------------------------------------------------------------------------------------------------------


def hit_rates(requests: Trace, chunks: int) -> dict[Eviction, float]:
    return {
        eviction: simulate(requests, setting(Policy.ALWAYS, (DRAM, chunks), eviction=eviction, load=0.1)).hit_rate
        for eviction in Eviction
    }


def test_beladys_bound_is_above_every_other_order() -> None:
    for chunks in (150, 600):
        rates = hit_rates(TRACE, chunks)
        print(chunks, {eviction.value: round(rate, 4) for eviction, rate in rates.items()})
        assert rates[Eviction.BELADY] == max(rates.values())
        assert rates[Eviction.BELADY] > rates[Eviction.LRU] > rates[Eviction.FIFO], "they are different orders"


def test_fifo_forgets_what_is_read_all_the_time_and_lfu_keeps_it() -> None:
    """One chunk read between ever new ones, room for four."""
    fresh = [prompt(10.0 * at, 600, first=at if at % 3 else 0) for at in range(60)]
    rates = hit_rates(trace(*fresh), 4)
    assert rates[Eviction.FIFO] < rates[Eviction.LRU] == rates[Eviction.LFU] == rates[Eviction.BELADY]


# --- several workers -----------------------------------------------------------------------------------------------


def test_the_prefix_router_sends_a_conversation_where_its_prefix_is() -> None:
    requests = [prompt(10.0 * at, 5000, first=100 * (at % 3)) for at in range(12)]
    by_prefix = simulate(trace(*requests), setting(workers=4))
    assert len({record.worker for record in by_prefix.records}) == 3
    assert sum(hit > 0 for hit in hits(by_prefix)) == 9
    in_turn = simulate(trace(*requests), setting(workers=4, router=Router.ROUND))
    assert sum(hit > 0 for hit in hits(in_turn)) == 0
    assert [record.worker for record in in_turn.records] == [0, 1, 2, 3] * 3


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    """A burst of one prompt's continuations: with all of them on one worker the others would be idle."""
    burst = [prompt(0, 20_000)] + [prompt(100 + 0.001 * at, 40_000) for at in range(16)]
    result = simulate(trace(*burst), setting(workers=2, load=1.0))
    assert {record.worker for record in result.records[1:]} == {0, 1}


def test_prefix_routing_hits_more_than_the_least_loaded_worker() -> None:
    prefix, least = (
        simulate(TRACE, setting(workers=4, router=router, load=1.0)) for router in (Router.PREFIX, Router.LEAST)
    )
    assert prefix.hit_rate > 1.3 * least.hit_rate


# --- policies ------------------------------------------------------------------------------------------------------


def test_a_store_that_costs_more_than_it_spares_is_left_alone() -> None:
    far = Tier(name="far", t0_s=5.0, bytes_per_s=1e8)
    never, always, pays = (
        simulate(TRACE, setting(policy, (far, 4000))) for policy in (Policy.NEVER, Policy.ALWAYS, Policy.PAYS)
    )
    assert (always.ttft_mean_s or 0) > 3 * (never.ttft_mean_s or 0)
    assert (pays.ttft_mean_s or 0) < 1.5 * (never.ttft_mean_s or 0), "it has to find out first"
    assert sum(record.hit_tokens > 0 for record in pays.records) < 20


SLOW = Tier(name="slow", t0_s=0.0, bytes_per_s=8 * CHUNK_BYTES)


def stops(tier: Tier, policy: Policy = Policy.PAYS) -> tuple[Record, float, ServingResult]:
    """A store that is known; then a prompt that it has, a long one before it and short ones behind it. The middle one,
    and how long the GPU computed the short ones while it was loading."""
    known = [prompt(100.0 * at, 40 * CHUNK + 52) for at in range(4)]
    behind = [prompt(400.0, 4 * CHUNK, first=2000 + 10 * at) for at in range(8)]
    requests = (*known, prompt(400.0, 100 * CHUNK, first=1000), prompt(400.0, 40 * CHUNK + 52), *behind)
    result = simulate(trace(*requests), setting(policy, (tier, 1000), load=1.0, step_tokens=256 * CHUNK))
    long, middle, short = result.records[4:7]
    return middle, ttft(short) - ttft(long), result


def test_a_load_is_stopped_when_the_gpu_has_nothing_else_and_what_has_arrived_is_kept() -> None:
    """It would take 5 s for what computing does in 1 s."""
    middle, behind_s, result = stops(SLOW)
    assert middle.decision == STOPPED
    assert 0 < middle.hit_tokens == int(8 * behind_s) * CHUNK < middle.found_tokens
    assert middle.loaded_bytes == middle.hit_tokens // CHUNK * CHUNK_BYTES
    assert middle.computed_tokens == middle.input_tokens - middle.hit_tokens
    rest_s = prefill_s(LLAMA, H100, middle.computed_tokens, middle.hit_tokens)
    assert ttft(middle) == pytest.approx(ttft(result.records[-1]) + rest_s, rel=0.02)
    assert result.links[0].loaded_bytes == sum(record.loaded_bytes for record in result.records)


def test_a_fast_load_and_one_of_policy_always_are_not_stopped() -> None:
    assert stops(DRAM)[0].decision == Reason.PAYS.value
    middle = stops(SLOW, Policy.ALWAYS)[0]
    assert (middle.decision, middle.hit_tokens) == (Policy.ALWAYS.value, middle.found_tokens)


@pytest.mark.parametrize("bytes_per_s", [1e4, 1e6])
def test_a_tier_that_nobody_has_measured_may_be_as_slow_as_it_likes(bytes_per_s: float) -> None:
    """At the slowest, the first prefix would take a day."""
    far = Tier(name="far", t0_s=0.0, bytes_per_s=bytes_per_s)
    pays, never = (simulate(TRACE, setting(policy, (far, 4000))) for policy in (Policy.PAYS, Policy.NEVER))
    assert pays.ttft_mean_s <= 1.01 * never.ttft_mean_s


def test_a_load_that_is_stopped_frees_its_line_for_the_next_one() -> None:
    """Three hauls of 10 s; the second leaves the line before it began, the first in the middle of its own."""
    events: list[tuple[float, Callable[[float], None]]] = []
    line = Line(
        Tier(name="slow", t0_s=1.0, bytes_per_s=1.0), LLAMA, H100, lambda at, call: events.append((at, call)), CHUNK
    )
    began: list[Haul] = []
    hauls = [line.haul(0.0, 10, 1, began.append, lambda now_s: None) for _ in range(3)]
    assert began == hauls[:1]
    assert [line.stoppable(haul) for haul in hauls] == [True] * 3
    line.stop(2.0, hauls[1], 0)
    line.stop(5.0, hauls[0], 4)
    assert began == [hauls[0], hauls[2]]
    assert line.arrived_share(11.0, hauls[2]) == pytest.approx(0.5)
    while events:
        at, call = min(events, key=lambda event: event[0])
        events.remove((at, call))
        call(at)
    assert not line.stoppable(hauls[2])
    assert (line.loaded_bytes, line.busy_s) == (4 + 10, pytest.approx(5.0 + 10.0))
    assert line.measured(20.0).queue.work_s == 0, "nothing is on its way"


def test_a_store_that_was_given_up_is_tried_again_with_a_small_piece() -> None:
    far = Tier(name="far", t0_s=5.0, bytes_per_s=1e8)
    result = simulate(trace(*[prompt(5.0 * at, 2100) for at in range(600)]), setting(Policy.PAYS, (far, 100), load=1.0))
    probes = [record for record in result.records if record.decision == Reason.PROBE.value]
    assert [record.hit_tokens for record in probes] == [CHUNK]
    assert result.decisions()[Reason.COMPUTE.value] > 500


def test_host_memory_is_used_as_if_there_was_no_question() -> None:
    always, pays = (simulate(TRACE, setting(policy)) for policy in (Policy.ALWAYS, Policy.PAYS))
    assert pays.ttft_mean_s == pytest.approx(always.ttft_mean_s, rel=0.01)


def test_the_floor_and_the_ceiling_hold() -> None:
    none = simulate(TRACE, setting(Policy.PAYS, limits=Limits(floor_tokens=10**6)))
    assert none.hit_rate == 0
    assert "below the floor" in none.decisions()
    far = Tier(name="far", t0_s=5.0, bytes_per_s=1e8)
    everything = simulate(TRACE, setting(Policy.PAYS, (far, 4000), limits=Limits(0, 0)))
    assert everything.hit_rate == simulate(TRACE, setting(Policy.ALWAYS, (far, 4000))).hit_rate


def test_goodput_counts_what_met_the_objective() -> None:
    result = simulate(TRACE, setting())
    good = result.goodput(parse_slo("ttft:2000 tpot:100"))
    assert good is not None
    assert 0 < good.good <= good.counted == len(TRACE)
    assert result.goodput(None) is None


# --- bad input -----------------------------------------------------------------------------------------------------


def test_a_request_that_no_gpu_can_hold_fails_and_is_counted_as_failed() -> None:
    too_long = Setting(model=LLAMA, host=H100, policy=Policy.NEVER).room_tokens + 1
    result = simulate(trace(prompt(0, too_long), prompt(1, 1000)), setting())
    assert [record.ending for record in result.records] == [Ending.FAILED, Ending.COMPLETED]
    good = result.goodput(parse_slo("ttft:100000"))
    assert good is not None
    assert (good.good, good.counted) == (1, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tiers": ()}, "needs a tier"),
        ({"tiers": (CacheTier(DRAM, 10**12, shared=True),)}, "cannot be shared"),
        ({"workers": 0}, "workers must be from"),
        ({"load": -1.0}, "load must be above 0"),
        ({"model": KNOWN.model("Llama-3.1-70B")}, "use more GPUs per replica"),
        ({"lookup_s": float("nan")}, "lookup_s"),
        ({"step_tokens": 0}, "step_tokens"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        setting(**options)


def test_a_tier_smaller_than_a_chunk_is_refused_before_any_work() -> None:
    tiers = (CacheTier(DRAM, CHUNK_BYTES - 1),)
    with pytest.raises(ConfigError, match="cannot hold one chunk of 512 tokens"):
        simulate(TRACE, setting(Policy.ALWAYS, tiers=tiers))
    with pytest.raises(ConfigError, match="nothing to serve"):
        simulate(Trace("empty", CHUNK, ()), setting())


# --- sweeps --------------------------------------------------------------------------------------------------------

FEW = TRACE.first(40)


def cells() -> list[Cell]:
    return [Cell(FEW, setting(policy, load=load)) for policy in (Policy.NEVER, Policy.PAYS) for load in (0.2, 0.4)]


def test_a_sweep_gives_the_cells_results_in_their_order_with_any_number_of_jobs() -> None:
    steps: list[tuple[int, int]] = []
    alone = sweep(cells(), 1, lambda done, of: steps.append((done, of)))
    assert alone.results == tuple(simulate(cell.trace, cell.setting) for cell in cells())
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sweep(cells(), 2) == alone


def test_an_interrupted_sweep_keeps_what_is_done_and_names_the_rest() -> None:
    def stop(done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    swept = sweep(cells(), 1, stop)
    assert len(swept.results) == 2
    assert swept.missing == tuple(cells()[2:])
    with pytest.raises(ConfigError, match="jobs"):
        sweep(cells(), 0)


# --- the public trace ----------------------------------------------------------------------------------------------


def test_the_conversation_trace_is_served_whole(trace_file: Callable[[str], Path]) -> None:
    conversation = traces.read(trace_file("conversation_trace.jsonl"), limit=1000)
    result = simulate(conversation, setting(Policy.PAYS, workers=4, load=1.0))
    assert len(list(result.completed())) == 1000
    assert result.hit_rate > 0.1


def test_models_of_every_kind_are_served() -> None:
    for model in KNOWN.models.values():
        served = simulate(FEW.first(15), kind_setting(model))
        assert all(record.ending is Ending.COMPLETED for record in served.records)


def kind_setting(model: Model) -> Setting:
    host = KNOWN.host("B200").replica(16)
    size = 2000 * sum(layout_of(model, host, CHUNK).cell_bytes_rows)
    return setting(Policy.PAYS, model=model, host=host, tiers=(CacheTier(DRAM, size),), load=10.0)

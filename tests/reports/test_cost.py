"""Prefill, load and TTFT: what must hold for any model, host and tier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import CallerError, ConfigError
from kvcore.reports import parameters
from kvcore.reports.cost import (
    TOKENS_MAX,
    Busy,
    Host,
    Tier,
    attention_flops,
    break_even_tokens,
    decode_step_s,
    host_memory,
    kv_bytes,
    load_pays,
    load_s,
    load_terms,
    marginal_bandwidth,
    paying_ranges,
    prefill_s,
    prefill_terms,
    split_tokens,
    ttft_s,
    weights_touched_bytes,
)

KNOWN = parameters.builtin()
LLAMA, H100 = KNOWN.model("Llama-3.1-8B"), KNOWN.host("H100")
MODELS = st.sampled_from(list(KNOWN.models.values()))
HOSTS = st.sampled_from(list(KNOWN.hosts.values()))
GPUS = st.sampled_from([1, 2, 8, 16])
TIERS = st.builds(
    Tier,
    name=st.just("any"),
    t0_s=st.floats(0, 0.1),
    bytes_per_s=st.floats(1e7, 1e12),
    per_block_s=st.floats(0, 1e-4),
    per_gpu=st.booleans(),
)
PROMPTS = st.integers(1, 100_000)
FREE = Tier(name="free", t0_s=0.0, bytes_per_s=1e18)


def test_prefill_is_the_sum_of_its_terms_where_the_batch_is_large() -> None:
    new, prefix = 8_192, 4_096
    linear = 2 * 6.98e9 * new / (989e12 * 0.66)
    attention = 4 * 32 * 32 * 128 * (new * prefix + new**2 / 2) / (989e12 * 0.56)
    assert prefill_s(LLAMA, H100, new, prefix) == pytest.approx(0.0005 + linear + attention)


def test_window_layers_attend_to_their_window() -> None:
    model = KNOWN.model("gpt-oss-120b")
    attention = attention_flops(model, 8_192, 4_096) / (989e12 * 0.56)
    linear = 2 * 4.55e9 * 8_192 / (989e12 * 0.66)
    assert prefill_terms(model, H100).compute_s(8_192, 4_096) == pytest.approx(linear + attention)
    assert attention_flops(model, 8_192, 4_096) < 0.6 * attention_flops(LLAMA, 8_192, 4_096) * 36 / 32


def test_a_single_token_costs_a_read_of_the_weights_and_of_the_prefix() -> None:
    memory = (16.06e9 + 50_000 * 131_072) / (3.35e12 * 0.8)
    assert prefill_s(LLAMA, H100, 1, 50_000) == pytest.approx(0.0005 + memory)


def test_nothing_to_compute_costs_nothing() -> None:
    assert prefill_s(LLAMA, H100, 0, 1_000) == 0.0
    assert decode_step_s(LLAMA, H100, 0, 1_000) == 0.0
    assert load_s(LLAMA, FREE, 0) == 0.0


def test_a_mixture_reads_more_experts_the_more_tokens_it_has_and_a_dense_model_all() -> None:
    mixture = KNOWN.model("Qwen3-30B-A3B")
    one, few, many = (weights_touched_bytes(mixture, tokens) for tokens in (1, 8, 10_000))
    assert one == pytest.approx(mixture.weight_bytes * 2.73 / 30.5)
    assert one < few < many == pytest.approx(mixture.weight_bytes)
    assert weights_touched_bytes(LLAMA, 1) == LLAMA.weight_bytes


@given(MODELS, HOSTS, GPUS, st.integers(1, 50_000), st.integers(1, 50_000))
def test_prefill_grows_with_tokens_and_prefix_and_shrinks_with_gpus(
    model: Any, host: Host, gpus: int, new: int, prefix: int
) -> None:
    cost = prefill_s(model, host, new, prefix)
    assert prefill_s(model, host, new + 1, prefix) >= cost
    assert prefill_s(model, host, new, prefix + 1) >= cost
    assert prefill_s(model, host.replica(gpus), new, prefix) <= cost * (1 + 1e-12) or model.shard_copies(gpus) > 1


@given(MODELS, HOSTS, st.integers(1, 20_000), st.integers(1, 20_000))
def test_two_chunks_compute_as_much_as_the_whole(model: Any, host: Host, first: int, then: int) -> None:
    terms = prefill_terms(model, host)
    chunks = terms.compute_s(first, 0) + terms.compute_s(then, first)
    assert chunks == pytest.approx(terms.compute_s(first + then, 0))


@given(MODELS, HOSTS, st.integers(0, 100_000))
def test_the_marginal_second_is_the_slope_of_prefill(model: Any, host: Host, prefix: int) -> None:
    terms = prefill_terms(model, host)
    low, high = terms.compute_s(1, prefix), terms.compute_s(1, prefix + 1)
    assert low * (1 - 1e-9) <= (terms.marginal_s(prefix) + terms.marginal_s(prefix + 1)) / 2 <= high * (1 + 1e-9)


def test_decode_reads_weights_once_and_each_sequence_its_own_kv() -> None:
    one, two = (decode_step_s(LLAMA, H100, batch, 4_000) for batch in (1, 2))
    assert two - one == pytest.approx(kv_bytes(LLAMA, 4_000) / (3.35e12 * 0.8))


def test_a_copy_kernel_makes_decode_slower_by_the_sms_it_takes() -> None:
    alone, beside = (decode_step_s(LLAMA, H100, 8, 1_000, sm_share=share) for share in (0.0, 0.5))
    assert beside - H100.step_s == pytest.approx(2 * (alone - H100.step_s))


def test_load_is_lookup_and_latency_and_copies_and_bytes() -> None:
    tier = Tier(name="t", t0_s=0.01, bytes_per_s=1e9, per_block_s=1e-3)
    expected = 0.5 + 0.01 + 7 * 2 * 1e-3 + 100 * 131_072 / 1e9
    assert load_s(LLAMA, tier, 100, 16, copies_per_block=2, lookup_s=0.5) == pytest.approx(expected)


def test_small_blocks_are_slow_by_dma_and_less_so_by_kernel() -> None:
    """The crossing of figure 4: the kernel wins small blocks, DMA's higher peak wins large ones."""
    dma, kernel = host_memory(H100), host_memory(H100, kernel=True)
    small = [load_s(LLAMA, tier, 65_536, 16, copies_per_block=64) for tier in (dma, kernel)]
    large = [load_s(LLAMA, tier, 65_536, 256) for tier in (dma, kernel)]
    assert small[0] > small[1]
    assert large[0] < large[1]


@pytest.mark.parametrize(
    ("gpus", "per_gpu", "share"), [(1, False, 1.0), (8, True, 1 / 8), (8, False, 1.0), (16, True, 1 / 8)]
)
def test_ranks_with_own_links_load_their_shares_side_by_side(gpus: int, per_gpu: bool, share: float) -> None:
    tier = Tier(name="t", t0_s=0.0, bytes_per_s=1e9, per_gpu=per_gpu)
    one = load_s(LLAMA, Tier(name="t", t0_s=0.0, bytes_per_s=1e9), 1_000)
    assert load_s(LLAMA, tier, 1_000, gpus=gpus) == pytest.approx(one * share)


def test_ranks_that_share_a_pipe_queue_their_copies_in_it() -> None:
    alone, shared = (
        load_s(LLAMA, Tier(name="t", t0_s=0.0, bytes_per_s=1e18, per_block_s=1e-3, per_gpu=per_gpu), 160, 16, gpus=8)
        for per_gpu in (True, False)
    )
    assert (alone, shared) == (pytest.approx(0.01), pytest.approx(0.08))


def test_a_load_of_nothing_does_not_occupy_the_link() -> None:
    assert load_terms(KNOWN.model("gpt-oss-20b"), KNOWN.tier("S3")).link_s(0) == 0.0


def test_every_rank_loads_the_whole_of_an_mla_cache() -> None:
    deepseek = KNOWN.model("DeepSeek-V3")
    tier = Tier(name="t", t0_s=0.0, bytes_per_s=1e9, per_gpu=True)
    assert load_s(deepseek, tier, 1_000, gpus=8) == pytest.approx(load_s(deepseek, tier, 1_000))
    shared = replace(tier, per_gpu=False)
    assert load_s(deepseek, shared, 1_000, gpus=8) == pytest.approx(8 * load_s(deepseek, shared, 1_000))


def test_what_comes_from_far_passes_host_memory() -> None:
    far, near = KNOWN.tier("S3"), host_memory(H100)
    pieces, whole = far.through(near), far.through(near, pipelined=False)
    assert pieces.bytes_per_s == 1e9
    assert whole.bytes_per_s == pytest.approx(1 / (1 / 1e9 + 1 / 51e9))
    assert pieces.t0_s == far.t0_s + near.t0_s
    assert load_s(LLAMA, pieces, 1_000) < load_s(LLAMA, whole, 1_000)


@given(MODELS, HOSTS, PROMPTS, st.data())
def test_a_transfer_that_costs_nothing_leaves_the_time_of_the_rest(
    model: Any, host: Host, prompt: int, data: Any
) -> None:
    prefix = data.draw(st.integers(0, prompt))
    loaded = min(prefix, prompt - 1) // 16 * 16
    rest = host.request_s + prefill_s(model, host, prompt - loaded, loaded)
    assert ttft_s(model, host, FREE, prompt, prefix) == pytest.approx(rest, rel=1e-9, abs=1e-7)


@given(MODELS, HOSTS, TIERS, PROMPTS, st.floats(1, 10), st.booleans(), st.data())
def test_ttft_falls_with_bandwidth(
    model: Any, host: Host, tier: Tier, prompt: int, factor: float, overlap: bool, data: Any
) -> None:
    prefix = data.draw(st.integers(0, prompt))
    faster = replace(tier, bytes_per_s=tier.bytes_per_s * factor)
    slow, fast = (ttft_s(model, host, one, prompt, prefix, overlap=overlap) for one in (tier, faster))
    assert fast <= slow * (1 + 1e-12)


@given(MODELS, HOSTS, TIERS, st.integers(1, 50_000))
def test_overlap_is_never_slower_and_never_faster_than_either_part(
    model: Any, host: Host, tier: Tier, prompt: int
) -> None:
    prefix = prompt * 3 // 4
    serial, overlapped = (ttft_s(model, host, tier, prompt, prefix, overlap=one) for one in (False, True))
    free = ttft_s(model, host, FREE, prompt, prefix)
    assert overlapped <= serial * (1 + 1e-9)
    assert overlapped >= free * (1 - 1e-6)


@given(MODELS, HOSTS, TIERS, st.integers(0, 60_000))
def test_a_split_is_never_slower_than_loading_all_or_computing_all(
    model: Any, host: Host, tier: Tier, prefix: int
) -> None:
    prefill, load = prefill_terms(model, host), load_terms(model, tier)
    front = split_tokens(model, host, tier, prefix)
    time = max(prefill.seconds(front), load.seconds(prefix - front))
    assert 0 <= front <= prefix
    assert time <= load.seconds(prefix) * (1 + 1e-12)
    assert time <= prefill.seconds(prefix) * (1 + 1e-12)


def test_queue_and_lookup_and_request_come_on_top() -> None:
    host = replace(H100, request_s=1.0)
    base = ttft_s(LLAMA, replace(H100, request_s=0.0), FREE, 1_000, 500)
    assert ttft_s(LLAMA, host, FREE, 1_000, 500, queue_s=10.0, lookup_s=100.0) == pytest.approx(base + 111.0)


def test_recomputing_pays_for_no_lookup() -> None:
    assert ttft_s(LLAMA, H100, None, 1_000, 500, lookup_s=100.0) == ttft_s(LLAMA, H100, None, 1_000)


def test_a_split_ttft_computes_the_front_beside_the_load() -> None:
    tier = Tier(name="t", t0_s=0.0, bytes_per_s=8e9)
    prompt, prefix = 20_001, 20_000
    front = split_tokens(LLAMA, H100, tier, prefix)
    assert 0 < front < prefix
    split = ttft_s(LLAMA, H100, tier, prompt, prefix, front_tokens=front)
    assert split < 0.75 * min(ttft_s(LLAMA, H100, one, prompt, prefix) for one in (tier, None))


@pytest.mark.parametrize(("prompt", "prefix"), [(0, 0), (10, 11), (10, -1), (-5, -5)])
def test_a_prefix_longer_than_its_prompt_is_refused(prompt: int, prefix: int) -> None:
    with pytest.raises(CallerError, match="cannot have a prefix"):
        ttft_s(LLAMA, H100, FREE, prompt, prefix)


def test_the_marginal_bandwidth_is_kv_times_flops_times_mfu_over_two_p() -> None:
    assert marginal_bandwidth(LLAMA, H100) == pytest.approx(131_072 * 989e12 * 0.66 / (2 * 6.98e9))
    assert marginal_bandwidth(LLAMA, H100, 50_000) < marginal_bandwidth(LLAMA, H100)
    assert marginal_bandwidth(LLAMA, H100.replica(4)) == pytest.approx(4 * marginal_bandwidth(LLAMA, H100))
    copies = 2  # 16 ranks share 8 KV heads
    assert marginal_bandwidth(LLAMA, H100.replica(16)) == pytest.approx(16 * copies * marginal_bandwidth(LLAMA, H100))


@given(MODELS, HOSTS, st.floats(1.05, 3))
def test_above_the_marginal_bandwidth_some_prefix_pays_and_below_none_does_without_attention(
    model: Any, host: Host, factor: float
) -> None:
    """The marginal form is exact where attention costs nothing and the batch is past its memory floor."""
    still = replace(host, efficiency_attention=1.0, hbm_Bps=1e20)
    flat = replace(model, heads=1, kv_heads=1, head_dim=1, qk_dim=1, v_dim=1, latent_dim=model.layer_bytes_per_token())
    floor = marginal_bandwidth(flat, still)
    assert break_even_tokens(flat, still, Tier(name="t", t0_s=0.0, bytes_per_s=floor * factor)) is not None
    assert break_even_tokens(flat, still, Tier(name="t", t0_s=0.0, bytes_per_s=floor / factor)) is None


@given(MODELS, HOSTS, TIERS, GPUS, st.integers(1, 4_000), st.floats(0, 0.02))
@settings(max_examples=40)
def test_loading_pays_exactly_within_the_ranges(
    model: Any, host: Host, tier: Tier, gpus: int, rest: int, lookup: float
) -> None:
    replica = host.replica(gpus)
    load = load_terms(model, tier, gpus=gpus, lookup_s=lookup)
    ranges = paying_ranges(prefill_terms(model, replica), load, rest_tokens=rest, block_tokens=16)
    edges = {edge + step for pair in ranges for edge in pair for step in (-16, 0, 16)}
    for prefix in sorted(edges | {16 * 2**power for power in range(14)} - {0}):
        inside = any(first <= prefix <= last for first, last in ranges)
        wins = load_pays(model, replica, tier, prefix, rest_tokens=rest, lookup_s=lookup)
        assert wins == inside or prefix > TOKENS_MAX or prefix == 0
    found = break_even_tokens(model, replica, tier, rest_tokens=rest, lookup_s=lookup)
    assert found == (ranges[-1][0] if ranges and ranges[-1][1] == TOKENS_MAX else None)


def test_a_mixture_may_pay_short_and_long_but_not_between() -> None:
    """Its first tokens read more and more experts, which a load spares; the break-even is the long range."""
    model, tier = KNOWN.model("Qwen3-30B-A3B"), Tier(name="t", t0_s=0.0, bytes_per_s=3e9)
    ranges = paying_ranges(prefill_terms(model, H100), load_terms(model, tier), block_tokens=16)
    print("Qwen3-30B-A3B on H100 at 3 GB/s pays", ranges)
    assert len(ranges) == 2
    assert break_even_tokens(model, H100, tier) == ranges[1][0] > 10_000


def test_the_verdict_of_the_introduction() -> None:
    """H100, Llama-3.1-8B: over PCIe5 load from some hundred tokens on, over S3 do not."""
    near, far = KNOWN.tier("host DRAM over PCIe5"), KNOWN.tier("S3")
    found = break_even_tokens(LLAMA, H100, near)
    print("Llama-3.1-8B on H100 over PCIe5: from", found, "tokens; with 5 ms of lookup:",
          break_even_tokens(LLAMA, H100, near, lookup_s=0.005))  # fmt: skip
    assert found is not None
    assert 100 < found < 1_000
    assert break_even_tokens(LLAMA, H100, far) is None
    assert load_pays(LLAMA, H100, near, 2_000)
    assert not load_pays(LLAMA, H100, far, 2_000)


def test_a_saturated_link_never_pays_and_a_saturated_gpu_does() -> None:
    near = KNOWN.tier("host DRAM over PCIe5")
    assert not load_pays(LLAMA, H100, near, 50_000, busy=Busy(gpu=0.99, link=1.0))
    assert load_pays(LLAMA, H100, near, 64, busy=Busy(gpu=1.0, link=0.5)) is False, "64 tokens save no GPU time at all"
    assert load_pays(LLAMA, H100, near, 50_000, busy=Busy(gpu=1.0, link=0.99))
    assert not load_pays(LLAMA, H100, near, 50_000, busy=Busy(gpu=1.0, link=1.0)), "a load that never ends"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": ""}, "gpu is empty"),
        ({"gpus": 0}, "gpus must be from 1"),
        ({"flops": 989.0}, "given in TFLOP/s"),
        ({"flops": float("inf")}, "flops must be above 0"),
        ({"hbm_Bps": 0.0}, "hbm_Bps must be above 0"),
        ({"link_Bps": -1.0}, "link_Bps must be above 0"),
        ({"efficiency_linear": 1.2}, "efficiency_linear must be above 0 and at most 1"),
        ({"step_s": -0.1}, "step_s must be from 0"),
    ],
)
def test_a_host_that_cannot_be_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(H100, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name is empty"),
        ({"t0_s": -1.0}, "t0_s must be from 0"),
        ({"t0_s": float("nan")}, "t0_s must be from 0"),
        ({"bytes_per_s": 0.0}, "bytes_per_s must be above 0"),
        ({"sm_share": 1.0}, "sm_share must be from 0"),
    ],
)
def test_a_tier_that_cannot_be_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(FREE, **change)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_tokens must be from 1"):
        load_s(LLAMA, FREE, 10, 0)

"""Every row of the bars table that concerns the cost model, with its figure printed (`pytest -s` shows them)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.reports import parameters, published, tier
from kvcore.reports.cost import host_memory, ttft_s
from kvcore.reports.fitting import Fit
from kvcore.reports.prefix_lru import Prompt, prefix_lru
from kvcore.reports.published import Check

HERE = Path(__file__).parent


def report(check: Check) -> None:
    print(check)
    assert check.passed, str(check)


@pytest.mark.parametrize("check", tuple(published.checks()), ids=lambda check: check.name)
def test_a_published_figure_is_found_again(check: Check) -> None:
    report(check)


def test_every_bar_of_the_table_is_checked() -> None:
    bars = [(check.name.split(",")[0], check.bar, check.unit) for check in published.checks()]
    assert bars == [
        ("Mooncake eq. 2", 0.5, "%"),
        ("Mooncake eq. 2", 0.5, "%"),
        ("vLLM blog figure 1", 5.0, "%"),
        ("vLLM blog figure 2", 8.0, "%"),
        ("vLLM blog figure 4", 5.0, "%"),
        ("llm-d crossover", 2047.0, "tokens"),
        ("llm-d crossover", 15.0, "%"),
    ]


def test_every_check_names_its_source() -> None:
    assert all(check.source for check in published.checks())


def test_an_error_beyond_its_bar_is_missed() -> None:
    check = Check("a figure", 5.1, 5.0, "%", "detail", "source")
    assert not check.passed
    assert "5.1 % (bar 5, MISSED)" in str(check)


def test_parameters_come_from_one_half_and_the_error_from_the_other() -> None:
    compute, load = published.figure_1_fits()
    assert (len(compute.errors), len(load.errors)) == (5, 5), "eleven points: six fitted, five asked for"
    other, _ = published.figure_1_fits(first=1)
    assert len(other.errors) == 6
    assert other.coefficients != compute.coefficients


def _mean(fits: list[Fit]) -> float:
    errors = [error for one in fits for error in one.errors]
    return 100 * sum(errors) / len(errors)


def test_the_other_half_knows_no_fixed_cost_as_the_module_says() -> None:
    """A negative fact, stated in the module: without the shortest point the fixed cost is not in the data."""
    compute, load = published.figure_1_fits(first=1)
    figures = (compute.error_mean * 100, _mean([compute, load]), _mean(list(published.figure_4_fits(first=1).values())))
    print("the other way round: figure 1 compute {:.2f} %, figure 1 {:.2f} %, figure 4 {:.2f} %".format(*figures))
    assert compute.coefficients[0] == 0.0
    assert figures == (pytest.approx(6.8, abs=0.05), pytest.approx(4.96, abs=0.05), pytest.approx(5.4, abs=0.05))


def test_one_point_makes_figure_4_miss_the_other_way_round() -> None:
    """A copy of 4 KiB that takes longer than one of 8 KiB: from the points around it nobody could predict that."""
    blog = published.figures()["vllm_offloading_blog"]
    four, eight = (kib / rate for kib, rate in zip((4, 8), blog["fig4_d2h_kernel_gbps"]))
    assert four > 2 * eight
    fits = published.figure_4_fits(first=1)
    errors = [error for one in fits.values() for error in one.errors]
    odd = fits["d2h_kernel"].errors[0]
    rest = 100 * (sum(errors) - odd) / (len(errors) - 1)
    print(
        f"figure 4 the other way round: {odd:.0%} at that point, {rest:.2f} % at the {len(errors) - 1} others (bar 5)"
    )
    assert odd == max(errors)
    assert rest < 5


def test_the_copy_laws_are_those_of_the_tiers() -> None:
    """Host to device: 3.30 us and 51.8 GB/s for DMA, 0.23 us and 47.9 GB/s for the kernel."""
    found = published.figure_4_fits()
    dma, kernel = found["h2d_dma"].coefficients, found["h2d_kernel"].coefficients
    assert (dma[0] * 1e6, 1e-9 / dma[1]) == (
        pytest.approx(tier.DMA_BLOCK_S * 1e6, rel=0.05),
        pytest.approx(51.8, rel=0.01),
    )
    assert (kernel[0] * 1e6, 1e-9 / kernel[1]) == (
        pytest.approx(tier.KERNEL_BLOCK_S * 1e6, rel=0.05),
        pytest.approx(51.8 * tier.KERNEL_PEAK_SHARE, rel=0.01),
    )


def test_perfect_overlap_does_not_explain_figure_2() -> None:
    blog = published.figures()["vllm_offloading_blog"]
    computed, loaded = published.figure_2_fit().coefficients
    hits = [percent / 100 for percent in blog["fig2_hit_percent"]]
    overlap = [1 / max((1 - hit) * computed, hit * loaded) for hit in hits]
    worst = max(ours / rate - 1 for ours, rate in zip(overlap, blog["fig2_tokens_per_s"]))
    print(f"perfect overlap is off by up to {worst:+.0%}")
    assert worst > 0.8


def test_the_built_in_parameters_predict_figure_1_unfitted() -> None:
    """Not a bar: what a reader gets from the tables alone, without a fit. Within a quarter, from 10,000 tokens on."""
    blog = published.figures()["vllm_offloading_blog"]
    known = parameters.builtin()
    model, host = known.model(blog["model"]), known.host(blog["host"])
    ours, theirs = [], []
    for kilo, compute, load in zip(
        *(blog[f"fig1_{key}"] for key in ("prompt_ktokens", "compute_ttft_ms", "cpu_load_ttft_ms"))
    ):
        tokens = 1000 * kilo
        ours += [ttft_s(model, host, None, tokens), ttft_s(model, host, host_memory(host), tokens, tokens)]
        theirs += [compute / 1000, load / 1000]
    errors = [abs(one / other - 1) for one, other in zip(ours, theirs)]
    print(f"figure 1 from the tables alone: mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}")
    assert max(errors[2:]) < 0.25


@pytest.mark.parametrize("row", published.figures()["llmd_crossovers"], ids=lambda row: row["name"])
def test_no_single_point_decides_a_crossover(row: dict[str, Any]) -> None:
    found = {without: published.crossover_tokens(row, without) for without in (None, *row["tokens"])}
    print(row["name"], found)
    for tokens in found.values():
        assert tokens is not None
        if "crossover_tokens" in row:
            assert abs(tokens / row["crossover_tokens"] - 1) < 0.15
        else:
            assert tokens < row["crossover_below_tokens"]


def _prompts(rows: list[dict[str, Any]]) -> list[Prompt]:
    return [(row["input_length"], row["hash_ids"]) for row in rows]


@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_prefix_lru_hit_rates_are_those_published(trace: str, trace_file: Callable[[str], Path]) -> None:
    lines = trace_file(f"{trace}_trace.jsonl").read_text().splitlines()
    checks = list(published.hit_rate_checks(trace, _prompts([json.loads(line) for line in lines])))
    assert len(checks) == {"conversation": 6, "synthetic": 5}[trace]
    for check in checks:
        report(check)


def test_prefix_lru_hit_rates_of_the_stand_in_are_those_of_a_plain_list() -> None:
    tree = json.loads((HERE / "standin.json").read_text())
    prompts = _prompts(tree["requests"])
    for capacity, expected in tree["percent"].items():
        ours = prefix_lru(prompts, int(capacity), tree["block_tokens"]).percent
        print(f"stand-in, {capacity} blocks: {ours:.2f} % against {expected:.2f} %")
        assert ours == pytest.approx(expected, abs=0.0001)
    assert len(set(tree["percent"].values())) == len(tree["percent"]), (
        "a rate that never changes would hide a wrong rule"
    )

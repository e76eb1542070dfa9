"""Our formulas against figures that others published: each check has its figure, its bar and its source.

Theory of operation
-------------------
A cost model that nobody has held against a measurement is an opinion. These are the measurements
(`parameters/published.json`, with sources), and what is asked of the model:

    Mooncake, eq. 2            the bandwidth from which reuse pays, within 0.5 %
    vLLM blog, figure 1        TTFT of computing and of loading by prompt length: mean error at most 5 %
    vLLM blog, figure 2        throughput by hit rate: at most 8 %
    vLLM blog, figure 4        copy rate by block size, four curves: at most 5 %
    llm-d crossovers           below 2,048 and at 13,648 tokens, within 15 % from the measured times of both ways
    prefix-LRU hit rates       within 0.1 points, given the traces

For the figures of the blog the parameters come from every second point beginning with the first, and the error is that
of the points between. The other way round the shortest point is asked for and not given, and a fixed cost that nothing
shows cannot be found: computing in figure 1 then errs by 6.8 %, figure 4 by 5.4 %. `first=1` shows it. In figure 4 that
is one point of 28: the kernel's copy of 4 KiB to the host, at 5.3 GB/s, takes twice as long as its copy of 8 KiB. No
law that grows with the size says so; without that point the other way round errs by 3.2 %.

Of the two laws proposed for figure 2 the serial one holds, 1/((1-h)/Rc + h/Rl): hits take their time beside the
computing ones, not under them. Perfect overlap is off by up to 94 %, so the serving simulation overlaps nothing by
default.

llm-d's times are whole TTFTs: what both ways pay cancels, and the wait of a load is the difference of the two fixed
parts, below 0 where computing has the larger one. The published crossover's own point is not among the inputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kvcore.reports import parameters
from kvcore.reports.breakeven import LineLoad, bandwidth_floor, break_even
from kvcore.reports.fitting import Fit, fit, held_out
from kvcore.reports.model import attention_flops, attention_pairs, kv_bytes
from kvcore.reports.prefill import PrefillTerms
from kvcore.reports.prefix_lru import Prompt, prefix_lru

COPIES = ("h2d_dma", "h2d_kernel", "d2h_dma", "d2h_kernel")


@dataclass(frozen=True, slots=True)
class Check:
    """One figure against its bar. `error` and `bar` in `unit`; `detail` is what a reader wants beside the error."""

    name: str
    error: float
    bar: float
    unit: str
    detail: str
    source: str

    @property
    def passed(self) -> bool:
        return self.error <= self.bar

    def __str__(self) -> str:
        verdict = "met" if self.passed else "MISSED"
        return f"{self.name}: {self.error:,.4g} {self.unit} (bar {self.bar:g}, {verdict}); {self.detail}"


@functools.cache
def figures() -> Mapping[str, Any]:
    """The published figures, as in `parameters/published.json`."""
    text = (files(parameters.__name__) / "published.json").read_text(encoding="utf-8")
    tree: dict[str, Any] = json.loads(text)
    return tree


def checks() -> Iterator[Check]:
    """All checks that need no trace."""
    yield from mooncake_checks()
    yield figure_1_check()
    yield figure_2_check()
    yield figure_4_check()
    yield from crossover_checks()


def mooncake_checks() -> Iterator[Check]:
    """Equation 2: reuse pays where B/G > 2 d s / (gqa (a p d + b d^2)); whole machines, full attention, MFU 1."""
    paper = figures()["mooncake"]
    for host in paper["hosts"]:
        prefill = _mooncake_prefill(paper, host["flops_per_s"])
        tokens = paper["prompt_tokens"]
        kv = 2 * paper["layers"] * paper["hidden"] * paper["value_bytes"] / paper["gqa"]
        ours = bandwidth_floor(kv, prefill.seconds(tokens) / tokens)
        error = abs(ours / host["bytes_per_s"] - 1) * 100
        detail = f"{ours / 1e9:.3f} GB/s against {host['bytes_per_s'] / 1e9:.2f}"
        yield Check(f"Mooncake eq. 2, {host['name']}", error, 0.5, "%", detail, paper["source"])


def _mooncake_prefill(paper: Mapping[str, Any], flops_per_s: float) -> PrefillTerms:
    width, layers = paper["hidden"], paper["layers"]
    # a p d counts every token with every token; causal pairs are half of them, so each weighs twice as much.
    pair_s = 2 * paper["attention_factor"] * width * layers / flops_per_s
    return PrefillTerms(0.0, paper["linear_factor"] * width**2 * layers / flops_per_s, pair_s)


def figure_1_fits(first: int = 0) -> tuple[Fit, Fit]:
    """Compute: fixed s, 1/e_lin, 1/e_attn. Load: fixed s, s per byte. Errors on the other half."""
    blog = figures()["vllm_offloading_blog"]
    known = parameters.builtin()
    model, host = known.model(blog["model"]), known.host(blog["host"])
    tokens = [1000 * kilo for kilo in blog["fig1_prompt_ktokens"]]
    ones = [1.0] * len(tokens)
    linear = [model.flops_per_token() * count / host.flops for count in tokens]
    attention = [attention_flops(model, count, 0) / host.flops for count in tokens]
    compute = held_out([ones, linear, attention], _seconds(blog["fig1_compute_ttft_ms"]), first)
    stored = [float(kv_bytes(model, count)) for count in tokens]
    return compute, held_out([ones, stored], _seconds(blog["fig1_cpu_load_ttft_ms"]), first)


def figure_1_check() -> Check:
    """TTFT by prompt length, both ways."""
    compute, load = figure_1_fits()
    fixed, linear, attention = compute.coefficients
    detail = (
        f"compute {compute.error_mean:.2%} with {fixed * 1e3:.1f} ms, MFU linear {1 / linear:.3f}, attention"
        f" {1 / attention:.3f}; load {load.error_mean:.2%} with {load.coefficients[0] * 1e3:.1f} ms,"
        f" {1e-9 / load.coefficients[1]:.1f} GB/s"
    )
    return _blog_check("figure 1", _mean_percent((compute, load)), 5.0, detail)


def figure_2_fit(first: int = 0) -> Fit:
    """Serial law: seconds per computed token, seconds per loaded token."""
    blog = figures()["vllm_offloading_blog"]
    hits = [percent / 100 for percent in blog["fig2_hit_percent"]]
    misses = [1 - hit for hit in hits]
    return held_out([misses, hits], [1 / rate for rate in blog["fig2_tokens_per_s"]], first)


def figure_2_check() -> Check:
    """Throughput by hit rate."""
    found = figure_2_fit()
    computed, loaded = (1 / seconds for seconds in found.coefficients)
    detail = f"serial law with {computed:,.0f} tokens/s computed and {loaded:,.0f} loaded"
    return _blog_check("figure 2", _mean_percent((found,)), 8.0, detail)


def figure_4_fits(first: int = 0) -> dict[str, Fit]:
    """Seconds per block and per byte, for each way to copy."""
    blog = figures()["vllm_offloading_blog"]
    sizes = [1024.0 * kib for kib in blog["fig4_block_kib"]]
    ones = [1.0] * len(sizes)
    return {
        copy: held_out(
            [ones, sizes], [size / rate / 1e9 for size, rate in zip(sizes, blog[f"fig4_{copy}_gbps"])], first
        )
        for copy in COPIES
    }


def figure_4_check() -> Check:
    """Copy rate by block size, all four curves."""
    found = figure_4_fits()
    detail = ", ".join(
        f"{copy} {one.error_mean:.1%} with {one.coefficients[0] * 1e6:.2f} us and {1e-9 / one.coefficients[1]:.1f} GB/s"
        for copy, one in found.items()
    )
    return _blog_check("figure 4", _mean_percent(tuple(found.values())), 5.0, detail)


def crossover_tokens(row: Mapping[str, Any], without: int | None = None) -> int | None:
    """Break-even from one of llm-d's tables; `without` leaves one length out of the inputs."""
    kept = [at for at, tokens in enumerate(row["tokens"]) if tokens != without]
    tokens = [float(row["tokens"][at]) for at in kept]
    ones = [1.0] * len(tokens)
    pairs = [attention_pairs(int(count), 0) for count in tokens]
    fixed, linear, attention = fit([ones, tokens, pairs], [row["recompute_s"][at] for at in kept]).coefficients
    pull = fit([ones, tokens], [row["pull_s"][at] for at in kept]).coefficients
    return break_even(PrefillTerms(fixed, linear, attention), LineLoad(pull[0] - fixed, pull[1]))


def crossover_checks() -> Iterator[Check]:
    """Where pulling from a peer beats recomputing."""
    for row in figures()["llmd_crossovers"]:
        found = crossover_tokens(row, row.get("crossover_tokens", row.get("crossover_below_tokens")))
        assert found is not None, "both tables cross"
        if "crossover_below_tokens" in row:
            below = row["crossover_below_tokens"]
            detail = f"from {found:,} tokens on, below {below:,}"
            yield Check(f"llm-d crossover, {row['name']}", float(found), below - 1.0, "tokens", detail, row["source"])
        else:
            wanted = row["crossover_tokens"]
            error = abs(found / wanted - 1) * 100
            detail = f"{found:,} tokens against {wanted:,}"
            yield Check(f"llm-d crossover, {row['name']}", error, 15.0, "%", detail, row["source"])


def hit_rate_checks(trace: str, prompts: Sequence[Prompt]) -> Iterator[Check]:
    """All published points of one trace (`conversation` or `synthetic`)."""
    row = next(one for one in figures()["prefix_lru"] if one["trace"] == trace)
    for capacity, percent in zip(row["capacity_blocks"], row["percent"]):
        ours = prefix_lru(prompts, capacity, row["block_tokens"]).percent
        detail = f"{ours:.2f} % against {percent:.2f} %"
        name = f"prefix-LRU, {trace}, {capacity:,} blocks"
        yield Check(name, abs(ours - percent), 0.1, "points", detail, row["source"])


def _blog_check(figure: str, error: float, bar: float, detail: str) -> Check:
    return Check(f"vLLM blog {figure}", error, bar, "%", detail, figures()["vllm_offloading_blog"]["source"])


def _mean_percent(fits: Sequence[Fit]) -> float:
    errors = [error for one in fits for error in one.errors]
    return 100 * sum(errors) / len(errors)


def _seconds(milliseconds: Sequence[float]) -> list[float]:
    return [one / 1000 for one in milliseconds]

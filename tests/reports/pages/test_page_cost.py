"""The page computes what Python computes: cost.js against reports/cost.py and reports/stream.py, over drawn cases."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.reports import parameters
from kvcore.reports.cost import (
    Busy,
    Host,
    Model,
    Tier,
    attention_pairs,
    break_even,
    host_memory,
    kv_bytes,
    load_terms,
    marginal_bandwidth,
    overlapped_s,
    paying_ranges,
    pays,
    prefill_terms,
)
from kvcore.reports.kinds.breakeven import Question, build
from kvcore.reports.page import Work
from kvcore.reports.page.calculator import plain
from kvcore.reports.page.html import asset
from kvcore.reports.stream import Requests, hits_floor, load_range, stream

Js = Callable[[str, str, Any], Any]
CASES = 200
BUSY_CHOICES = (0.0, 0.3, 0.97, 1.0, 1.4)

COMPUTE = """data.map((one) => {
  const prefill = Cost.prefillTerms(one.model, one.host);
  const load = Cost.loadTerms(one.model, one.tier, one.block, one.host.gpus, one.lookup);
  const at = Cost.stream(prefill, load, one);
  const ends = (value) => (Number.isFinite(value) ? value : null);
  return {
    kv: Cost.kvBytes(one.model, one.prefix), pairs: Cost.attentionPairs(one.rest, one.prefix, 1024),
    full: prefill.seconds(one.prefix + one.rest), short: prefill.seconds(one.rest, one.prefix),
    marginal: prefill.marginal(one.prefix), link: load.link(one.prefix), load: load.seconds(one.prefix),
    pays: Cost.pays(prefill, load, one.prefix, one.rest, one.busy),
    ranges: Cost.payingRanges(prefill, load, one.rest, one.block, one.busy),
    threshold: Cost.breakEven(prefill, load, one.rest, one.block, one.busy),
    floor: Cost.marginalBandwidth(one.model, one.host, one.prefix),
    overlapped: Cost.overlapped(load, one.prefix, prefill.seconds(one.rest, one.prefix), Cost.layers(one.model)),
    never: ends(at.never), always: ends(at.always), gpu: at.gpu, linkBusy: at.link, capacity: at.capacity,
    hitsFloor: Cost.hitsFloor(prefill, load, one), loads: Cost.loadRange(prefill, load, one),
  };
})"""


def drawn(draw: random.Random) -> dict[str, Any]:
    """One case over the built-in tables, as Python values."""
    known = parameters.read(None)
    host = draw.choice(list(known.hosts.values())).replica(draw.choice((1, 2, 8)))
    tiers = [*known.tiers.values(), host_memory(host), host_memory(host, kernel=True)]
    return {
        "model": draw.choice(list(known.models.values())),
        "host": host,
        "tier": draw.choice(tiers),
        "block": draw.choice((1, 16, 256)),
        "lookup": draw.choice((0.0, 0.003)),
        "prefix": round(2 ** draw.uniform(0, 17)),
        "rest": round(2 ** draw.uniform(0, 13)),
        "hits": draw.choice((0.0, 1.0, draw.random())),
        "load": draw.choice((0.0, 0.95, draw.random())),
        "sharers": draw.choice((1, 1, 8)),
        "busy": Busy(draw.choice(BUSY_CHOICES), draw.choice(BUSY_CHOICES)),
    }


def as_json(case: dict[str, Any]) -> dict[str, Any]:
    shown = {name: plain(value) if isinstance(value, Model | Host | Tier) else value for name, value in case.items()}
    return {**shown, "busy": {"gpu": case["busy"].gpu, "link": case["busy"].link}}


def expected(case: dict[str, Any]) -> dict[str, Any]:
    """The same figures by Python."""
    model, host, prefix, rest = case["model"], case["host"], case["prefix"], case["rest"]
    block, busy, lookup = case["block"], case["busy"], case["lookup"]
    prefill = prefill_terms(model, host)
    load = load_terms(model, case["tier"], block_tokens=block, gpus=host.gpus, lookup_s=lookup)
    requests = Requests(prefix, rest, case["hits"], case["load"], lookup, case["sharers"])
    at = stream(prefill, load, requests)
    loads = load_range(prefill, load, requests)
    asked = {"rest_tokens": rest, "block_tokens": block, "busy": busy}
    return {
        "kv": kv_bytes(model, prefix),
        "pairs": attention_pairs(rest, prefix, 1024),
        "full": prefill.seconds(prefix + rest),
        "short": prefill.seconds(rest, prefix),
        "marginal": prefill.marginal_s(prefix),
        "link": load.link_s(prefix),
        "load": load.seconds(prefix),
        "pays": pays(prefill, load, prefix, rest, busy),
        "ranges": [list(each) for each in paying_ranges(prefill, load, **asked)],
        "threshold": break_even(prefill, load, **asked),
        "floor": marginal_bandwidth(model, host, prefix),
        "overlapped": overlapped_s(load, prefix, prefill.seconds(rest, prefix), model.layers),
        "never": at.never_s if math.isfinite(at.never_s) else None,
        "always": at.always_s if math.isfinite(at.always_s) else None,
        "gpu": at.gpu,
        "linkBusy": at.link,
        "capacity": at.capacity,
        "hitsFloor": hits_floor(prefill, load, requests),
        "loads": None if loads is None else list(loads),
    }


def test_the_page_gives_the_figures_of_the_cost_model(javascript: Js) -> None:
    draw = random.Random(7)
    cases = [drawn(draw) for _ in range(CASES)]
    found = javascript("cost.js", COMPUTE, [as_json(case) for case in cases])
    wanted = [expected(case) for case in cases]
    for number, (page, python) in enumerate(zip(found, wanted, strict=True)):
        for name, value in python.items():
            right = pytest.approx(value, rel=1e-9, abs=1e-15) if isinstance(value, float) else value
            assert page[name] == right, f"case {number} ({cases[number]}): {name}"
    # The cases must have met what they are about.
    thresholds = [python["threshold"] for python in wanted]
    assert None in thresholds
    assert any(value is not None and value > 1 for value in thresholds)
    assert any(len(python["ranges"]) > 1 for python in wanted)
    assert any(python["always"] is None for python in wanted)
    assert any(python["loads"] is not None and python["loads"][1] < 0.9 for python in wanted)


START = f"""(() => {{
  const rate = String, seconds = String, digits = String;
  {asset("calculator.js")}
  return data.map((widget) => {{
    const {{ at, host, ...shown }} = solve(widget, widget.start);
    const [never, always] = [at.never, at.always].map((wait) => wait + host.request_s);
    return {{ ...shown, never, always, capacity: at.capacity }};
  }});
}})()"""
FIGURES = {
    "recompute": "recompute_s",
    "loaded": "load_s",
    "threshold": "break_even_rest_tokens",
    "busyThreshold": "break_even_busy_tokens",
    "minimum": "bandwidth_floor_Bps",
    "hitsFloor": "hits_floor",
    "never": "ttft_never_s",
    "always": "ttft_always_s",
    "capacity": "capacity",
}
"""Of the calculator, and the table's columns."""


def test_the_calculator_starts_with_the_first_row_of_the_table(javascript: Js) -> None:
    """Whatever was asked for: it began with 8,192 tokens at half the load and half the hits, and let host memory be
    shared."""
    questions = [
        Question(tiers=(tier,), sharers=8, prefix_tokens=prefix, hits=hits, load=load, lookup_s=0.002, block_tokens=64)
        for tier in ("host memory (DMA)", "S3", "100G RDMA")
        for prefix, hits, load in ((2000, 0.9, 0.2), (40_000, 0.1, 0.8))
    ]
    reports = [build(parameters.read(None), question, Work(lambda line: None)) for question in questions]
    found = javascript("cost.js", START, [report.widgets[0].data for report in reports])
    for question, report, shown in zip(questions, reports, found, strict=True):
        row = report.tables[0].rows[0]
        for name, column in FIGURES.items():
            assert shown[name] == pytest.approx(row[column]), (question, name)
        assert (shown["loads"] or [None, None]) == [row["load_from"], row["load_to"]], question

"""`kvcore report breakeven`: from which prefix length on is loading cheaper, by model, machine and tier?

Closed forms only (reports/cost.py, reports/stream.py): no simulation, no measurement. Each tier is taken as it is
named, alone; "host memory" is that of the GPU's own link. A replica has as many GPUs as the weights need, unless told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcore.errors import ConfigError
from kvcore.reports.cost import (
    Busy,
    PrefillTerms,
    break_even,
    load_terms,
    marginal_bandwidth,
    paying_ranges,
    prefill_terms,
)
from kvcore.reports.host import Host
from kvcore.reports.model import Model
from kvcore.reports.page import Column, Lines, Mark, Report, Series, Table, Value, words
from kvcore.reports.page.calculator import calculator
from kvcore.reports.page.work import Work
from kvcore.reports.parameters import Parameters
from kvcore.reports.stream import Requests, finite, hits_floor, load_range, stream
from kvcore.reports.tier import LoadTerms, Tier, host_memory

HOST_MEMORY, HOST_MEMORY_KERNEL = "host memory (DMA)", "host memory (kernel)"
FARTHER = ("100G RDMA", "local NVMe gen4", "S3")
GPU_STEPS = (1, 2, 4, 8, 16, 32, 64)
HBM_SHARE = 0.9  # of the memory that engines take by default (vLLM: gpu_memory_utilization)
VERDICTS_MAX = 5
PREFIXES = (512, 2048, 8192, 32768)
CURVE_POINTS = 49
TOKENS_LOW, TOKENS_HIGH = 16, 131_072

COLUMNS = (
    Column("model", "Model"),
    Column("host", "GPU"),
    Column("gpus", "GPUs", "count", "per tensor-parallel replica"),
    Column("tier", "Tier"),
    Column(
        "break_even_tokens",
        "Load from",
        "count",
        "smallest prefix, with one new token after it, from which on saved prefill > load",
    ),
    Column(
        "break_even_rest_tokens", "Load from, with rest", "count", "the same with the new tokens asked for after it"
    ),
    Column("also_tokens", "Also pays", "text", "shorter ranges that pay as well (mixtures of experts)"),
    Column("break_even_busy_tokens", "Load from, busy", "count", "the same at the load and hit rate asked for"),
    Column("bandwidth_Bps", "Tier has", "rate", "bytes per second of the tier"),
    Column(
        "bandwidth_floor_Bps",
        "A tier needs",
        "rate",
        "KV bytes per token / marginal prefill time = kv * G * MFU / (2 P)",
    ),
    Column("recompute_s", "Recompute", "seconds", "request + prefill(prefix + rest), prefix as asked for"),
    Column("load_s", "Load", "seconds", "request + load(prefix) + prefill(rest after prefix)"),
    Column("hits_floor", "From hit rate", "share", "smallest hit rate at which loading wins at this load"),
    Column("load_from", "At loads from", "share", "smallest load at which loading wins at this hit rate"),
    Column("load_to", "to", "share", "largest load at which loading wins at this hit rate"),
    Column("capacity", "Requests", "ratio", "highest rate when loading / highest rate without a cache"),
    Column("ttft_never_s", "TTFT, no cache", "seconds", "request + prefill(prefix + rest) / (1 - load)"),
    Column(
        "ttft_always_s",
        "TTFT, loading",
        "seconds",
        "request + work / (1 - rho_gpu) + hits (wait + link / (1 - rho_link)) + misses * lookup",
    ),
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `gpus` 0: as many as the weights need. `load` and `hits` from 0 to 1; `sharers`
    replicas load over a tier's one link, where it is not the GPU's own."""

    models: tuple[str, ...] = ("Llama-3.1-8B",)
    hosts: tuple[str, ...] = ("H100-SXM",)
    tiers: tuple[str, ...] = (HOST_MEMORY, *FARTHER)
    gpus: int = 0
    block_tokens: int = 16
    prefix_tokens: int = 8192
    rest_tokens: int = 512
    lookup_s: float = 0.0
    load: float = 0.5
    hits: float = 0.5
    sharers: int = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one replica with one tier, and its terms."""

    model: Model
    host: Host
    tier: Tier
    prefill: PrefillTerms
    load: LoadTerms

    @property
    def name(self) -> str:
        return f"{self.model.name} on {replica_name(self.host)}, {self.tier.name}"


def replica_name(host: Host) -> str:
    return host.gpu if host.gpus == 1 else f"{host.gpus} x {host.gpu}"


def gpus_needed(model: Model, host: Host) -> int:
    """GPUs per replica, a power of two, whose memory holds the weights."""
    for gpus in GPU_STEPS:
        if model.weight_bytes < HBM_SHARE * host.hbm_bytes * gpus:
            return gpus
    raise ConfigError(f"{model.name} fits on no {GPU_STEPS[-1]} x {host.gpu}: give --gpus if it does for you")


def tier_of(known: Parameters, name: str, host: Host) -> Tier:
    """A tier by name; host memory is the GPU's own."""
    own = {HOST_MEMORY_KERNEL: host_memory(host, kernel=True), HOST_MEMORY: host_memory(host)}
    for title, tier in own.items():
        if name.strip().casefold() == title.casefold() and title not in known.tiers:
            return tier
    return replace(known, tiers={**own, **known.tiers}).tier(name)  # "host memory" alone is the last, by DMA


def cells_of(known: Parameters, question: Question) -> list[Cell]:
    """Everything that is asked for, once, checked before anything is computed."""
    models = [known.model(name) for name in question.models]
    hosts = [known.host(name) for name in question.hosts]
    asked = [_cell(known, question, model, host, name) for model in models for host in hosts for name in question.tiers]
    return list({cell.name: cell for cell in asked}.values())


def _cell(known: Parameters, question: Question, model: Model, host: Host, tier_name: str) -> Cell:
    host = host.replica(question.gpus or gpus_needed(model, host))
    tier = tier_of(known, tier_name, host)
    load = load_terms(model, tier, block_tokens=question.block_tokens, gpus=host.gpus, lookup_s=question.lookup_s)
    return Cell(model, host, tier, prefill_terms(model, host), load)


def build(known: Parameters, question: Question, work: Work) -> Report:
    """The report."""
    cells = cells_of(known, question)
    rows = work.run((cell.name, _row_of(cell, question)) for cell in cells)
    done = [cell for cell in cells if cell.name in rows]
    table = Table(
        "breakeven", "Break-even by model, GPU and tier", COLUMNS, list(rows.values()), ("model", "host", "tier")
    )
    first = cells[0]
    widget = calculator(
        known,
        first.model,
        first.host,
        first.tier,
        block_tokens=question.block_tokens,
        requests=replace(requests_of(first, question), sharers=question.sharers),  # for the tiers that are shared
    )
    return Report(
        "breakeven",
        "When is loading KV cheaper than recomputing it?",
        tuple(_verdict(done, rows, question.rest_tokens)) or ("Nothing was computed.",),
        tables=(table, *_by_length(done, question)),
        charts=tuple(_charts(done, question)),
        widgets=(widget,),
        inputs=_inputs(question, cells),
        notes=_notes(cells),
        missing=tuple(work.missing),
    )


def _row_of(cell: Cell, question: Question) -> Callable[[], dict[str, Value]]:
    return lambda: _row(cell, question)


def _row(cell: Cell, question: Question) -> dict[str, Value]:
    prefix, rest = question.prefix_tokens, question.rest_tokens
    requests = requests_of(cell, question)
    at = stream(cell.prefill, cell.load, requests)
    loads = load_range(cell.prefill, cell.load, requests) or (None, None)
    return {
        "model": cell.model.name,
        "host": cell.host.gpu,
        "gpus": cell.host.gpus,
        "tier": cell.tier.name,
        "break_even_tokens": threshold(cell, question, rest=1),
        "break_even_rest_tokens": threshold(cell, question),
        "also_tokens": _also(cell, question),
        "break_even_busy_tokens": threshold(cell, question, Busy(at.gpu, at.link)),
        "bandwidth_Bps": cell.tier.bytes_per_s,
        "bandwidth_floor_Bps": marginal_bandwidth(cell.model, cell.host),
        "recompute_s": cell.host.request_s + cell.prefill.seconds(prefix + rest),
        "load_s": cell.host.request_s + cell.load.seconds(prefix) + cell.prefill.seconds(rest, prefix),
        "hits_floor": hits_floor(cell.prefill, cell.load, requests),
        "load_from": loads[0],
        "load_to": loads[1],
        "capacity": at.capacity,
        "ttft_never_s": finite(at.never_s + cell.host.request_s),
        "ttft_always_s": finite(at.always_s + cell.host.request_s),
    }


def requests_of(cell: Cell, question: Question) -> Requests:
    """The stream that is asked about; a GPU's own link is not shared."""
    sharers = 1 if cell.tier.per_gpu else question.sharers
    return Requests(
        question.prefix_tokens, question.rest_tokens, question.hits, question.load, question.lookup_s, sharers
    )


def threshold(cell: Cell, question: Question, busy: Busy | None = None, rest: int | None = None) -> int | None:
    """Break-even of a cell, in whole blocks; with the question's new tokens after it unless told otherwise."""
    return break_even(
        cell.prefill,
        cell.load,
        rest_tokens=question.rest_tokens if rest is None else rest,
        block_tokens=question.block_tokens,
        busy=busy or Busy(),
    )


def _also(cell: Cell, question: Question) -> str:
    ranges = paying_ranges(cell.prefill, cell.load, rest_tokens=1, block_tokens=question.block_tokens)
    whole = threshold(cell, question, rest=1)
    return ", ".join(f"{first:,} to {last:,}" for first, last in ranges if first != whole)


def _verdict(cells: Sequence[Cell], rows: dict[str, dict[str, Value]], rest: int) -> list[str]:
    """A sentence per model and replica: 'On H100-SXM with Llama-3.1-8B: over A load from 610 tokens on; ...'"""
    pairs: dict[str, list[dict[str, Value]]] = {}
    for cell in cells:
        pairs.setdefault(f"On {replica_name(cell.host)} with {cell.model.name}", []).append(rows[cell.name])
    sentences = [f"{where}: {'; '.join(map(_rule, group))}." for where, group in pairs.items()]
    if len(sentences) > VERDICTS_MAX:
        left = len(sentences) - VERDICTS_MAX
        sentences = [*sentences[:VERDICTS_MAX], f"{words.count(left, 'further pair')} of model and GPU: see the table."]
    if sentences:
        sentences.append(_rest_sentence(next(iter(pairs.values())), rest, len(pairs) > 1))
    return sentences


def _rule(row: Mapping[str, Value]) -> str:
    tokens = row["break_even_tokens"]
    return f"over {row['tier']} " + ("do not load" if tokens is None else f"load from {tokens:,} tokens on")


def _rest_sentence(rows: list[dict[str, Value]], rest: int, of_several: bool) -> str:
    """The first figures are for one new token. For a dense model that is the most cautious case; a mixture of experts
    reads few weights for one token and most of them for a full batch, with a prefix or not: there it is the boldest."""
    other = [row for row in rows if row["break_even_rest_tokens"] != row["break_even_tokens"]]
    head = "That is for a prompt which is all prefix"
    if not other:
        return f"{head}; with {words.count(rest, 'new token')} after it nothing changes."
    named = [f"{_from(row['break_even_rest_tokens'])} over {row['tier']}" for row in other[:4]]
    first = " the first of these pays" if of_several else " it pays"
    return f"{head}. With {words.count(rest, 'new token')} after the prefix{first} {words.listed(named)}."


def _from(tokens: Value) -> str:
    return "not at all" if tokens is None else f"from {tokens:,} on"


def _by_length(cells: Sequence[Cell], question: Question) -> list[Table]:
    """Idle TTFT both ways at round prefix lengths."""
    columns = (
        Column("model", "Model"),
        Column("host", "GPU"),
        Column("tier", "Tier"),
        Column("prefix_tokens", "Prefix", "count", "tokens that the cache has"),
        Column("kv_bytes", "KV", "bytes", "what the sequence holds; more travels where ranks keep copies"),
        Column("recompute_s", "Recompute", "seconds", "request + prefill(prefix + rest)"),
        Column("load_s", "Load", "seconds", "request + load(prefix) + prefill(rest after prefix)"),
        Column("faster", "Faster", "verdict", "the smaller of the two"),
    )
    rows = [_length_row(cell, question, prefix) for cell in cells for prefix in PREFIXES]
    key = ("model", "host", "tier", "prefix_tokens")
    return [Table("lengths", "TTFT by prefix length, idle machine", columns, rows, key)] if rows else []


def _length_row(cell: Cell, question: Question, prefix: int) -> dict[str, Value]:
    from kvcore.reports.cost import kv_bytes

    recompute, load = both_ways(cell, prefix, question.rest_tokens)
    return {
        "model": cell.model.name,
        "host": replica_name(cell.host),
        "tier": cell.tier.name,
        "prefix_tokens": prefix,
        "kv_bytes": kv_bytes(cell.model, prefix),
        "recompute_s": recompute,
        "load_s": load,
        "faster": "load" if load < recompute else "recompute",
    }


def both_ways(cell: Cell, prefix: int, rest: int) -> tuple[float, float]:
    """Idle TTFT of (recomputing, loading)."""
    recompute = cell.host.request_s + cell.prefill.seconds(prefix + rest)
    return recompute, cell.host.request_s + cell.load.seconds(prefix) + cell.prefill.seconds(rest, prefix)


# ---- charts, of the first model and replica


def _charts(cells: Sequence[Cell], question: Question) -> list[Lines]:
    first = [cell for cell in cells if (cell.model, cell.host) == (cells[0].model, cells[0].host)]
    return [_ttft_chart(first, question), _load_chart(first, question)] if first else []


def _ttft_chart(cells: Sequence[Cell], question: Question) -> Lines:
    xs = lengths()
    times = {cell.tier.name: [both_ways(cell, x, question.rest_tokens) for x in xs] for cell in cells}
    first = next(iter(times.values()))
    series = [Series("recompute", xs, [1000 * recompute for recompute, _ in first], dashed=True)]
    series += [Series(name, xs, [1000 * load for _, load in both]) for name, both in times.items()]
    marks = [(threshold(cell, question), cell.tier.name) for cell in cells]
    return Lines(
        "ttft",
        f"TTFT by prefix length: {cells[0].model.name} on {replica_name(cells[0].host)}, idle",
        "Prefix length, tokens",
        "TTFT, ms",
        tuple(series),
        x_log=True,
        y_log=True,
        marks=tuple(Mark(at, name) for at, name in marks if at is not None and at > TOKENS_LOW),
        note=f"{question.rest_tokens:,} new tokens after the prefix. Dotted: from there on, load.",
    )


def _load_chart(cells: Sequence[Cell], question: Question) -> Lines:
    loads = [step / 50 for step in range(49)]
    series: list[Series] = []
    for cell in cells:
        requests = requests_of(cell, question)
        at = [stream(cell.prefill, cell.load, replace(requests, load=load)) for load in loads]
        if not series:
            series.append(Series("no cache", loads, [1000 * one.never_s for one in at], dashed=True))
        series.append(Series(cell.tier.name, loads, [_ms(one.always_s) for one in at]))
    return Lines(
        "load",
        f"Mean TTFT by load: {question.hits:.0%} of the requests hit {question.prefix_tokens:,} tokens, always loaded",
        "Load: how busy the GPU is without a cache",
        "Mean TTFT, ms",
        tuple(series),
        y_log=True,
        note="A curve that ends has reached the load at which its link no longer keeps up.",
    )


def _ms(value: float) -> float | None:
    there = finite(value)
    return None if there is None else 1000 * there


def lengths() -> list[int]:
    """Prefix lengths for a curve, evenly spaced on a logarithmic axis."""
    ratio = TOKENS_HIGH / TOKENS_LOW
    return [round(TOKENS_LOW * ratio ** (point / (CURVE_POINTS - 1))) for point in range(CURVE_POINTS)]


# ---- what the report rests on


def _inputs(question: Question, cells: Sequence[Cell]) -> dict[str, object]:
    from kvcore.reports.page.calculator import plain

    return {
        "question": {name: getattr(question, name) for name in question.__dataclass_fields__},
        "models": list({cell.model.name: plain(cell.model) for cell in cells}.values()),
        "hosts": list({cell.host: plain(cell.host) for cell in cells}.values()),
        "tiers": list({cell.tier: plain(replace(cell.tier)) for cell in cells}.values()),
    }


def _notes(cells: Sequence[Cell]) -> tuple[str, ...]:
    unsure: dict[str, tuple[str, ...]] = {}
    for cell in cells:
        for name, fields in (
            (cell.model.name, cell.model.unsure),
            (cell.host.gpu, cell.host.unsure),
            (cell.tier.name, cell.tier.unsure),
        ):
            if fields:
                unsure[name] = fields
    listed = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in unsure.items())
    general = "Small prefills reach less of a GPU's peak than long ones: a small break-even is an upper bound."
    return (general, f"Values that nobody has confirmed: {listed}.") if listed else (general,)

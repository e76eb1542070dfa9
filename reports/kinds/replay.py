"""What the reports `trace` and `goodput` share: a trace, the cells to serve it in, and a row per cell.

A cell is one `Setting` (reports/serving): a policy, an eviction, a load. All are made, and so checked, before the first
is served. Cells are served one after the other, or in `jobs` processes (reports/serving/sweep.py); an interrupt leaves
those that are done.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcore.config.values import parse_size
from kvcore.errors import ConfigError
from kvcore.reports import traces
from kvcore.reports.kinds.breakeven import gpus_needed, replica_name, tier_of
from kvcore.reports.page import Column, Report, Table, Value, Work, words
from kvcore.reports.page.document import Chart
from kvcore.reports.parameters import Parameters
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
from kvcore.reports.slo import COLUMNS as SLO_FORMULAS
from kvcore.reports.slo import Slo
from kvcore.reports.traces import Trace

POLICY_WORDS = {
    Policy.NEVER: "no cache",
    Policy.ALWAYS: "always load",
    Policy.PAYS: "load if it pays",
    Policy.SPLIT: "split",
}
PERCENTS = (50, 90, 99)

COLUMNS = (
    Column("cell", "Cell"),
    Column("policy", "Policy"),
    Column("eviction", "Eviction"),
    Column("load", "Load", "ratio", "the trace's times are divided by it"),
    Column("requests", "Requests", "count", "of the trace"),
    Column("failed", "Failed", "count", "requests - completed ones"),
    Column("per_s", "Completed", "per_s", "completed requests / duration of the run"),
    Column("ttft_mean_s", "Mean TTFT", "seconds", "mean over completed requests of: first output token - arrival"),
    *(Column(f"ttft_p{p}_s", f"p{p} TTFT", "seconds", "a dash: fewer than ten samples beyond it") for p in PERCENTS),
    Column("tpot_mean_s", "Mean TPOT", "seconds", "(last output token - first) / (output tokens - 1); 0 for one token"),
    Column("e2e_mean_s", "Mean E2E", "seconds", "last output token - arrival"),
    Column("hit_rate", "Loaded", "share", "hit tokens / input tokens of completed requests"),
    Column("found_rate", "Found", "share", "tokens that could have been loaded / input tokens of completed requests"),
    Column("loaded_bytes", "Bytes loaded", "bytes", "over all tiers, sum over requests"),
    Column("gpu_busy", "GPU busy", "share", "time in steps / duration, mean of the workers"),
    Column("link_busy", "Link busy", "share", "time in transfers / duration, of the busiest tier"),
    Column("evictions", "Evictions", "count", "chunks that left a worker's first tier for want of room"),
    Column("goodput_share", "Goodput", "share", SLO_FORMULAS["goodput_share"]),
    Column("goodput_per_s", "Goodput rate", "per_s", SLO_FORMULAS["goodput_per_s"]),
    Column("goodput_tokens_per_s", "Good tokens", "per_s", SLO_FORMULAS["goodput_tokens_per_s"]),
)


@dataclass(frozen=True, slots=True)
class Ask:
    """What the command line asks for, checked as far as texts go. `tiers`: (name, size, shared)."""

    trace: str
    limit: int | None
    raw_timestamps: bool
    seed: int
    model: str = "Llama-3.1-8B"
    host: str = "H100-SXM"
    gpus: int = 0
    tiers: tuple[tuple[str, int, bool], ...] = ()
    policies: tuple[Policy, ...] = (Policy.NEVER, Policy.ALWAYS, Policy.PAYS)
    evictions: tuple[Eviction, ...] = (Eviction.LRU,)
    loads: tuple[float, ...] = (1.0,)
    workers: int = 1
    router: Router = Router.PREFIX
    overlap: bool = False
    slo: Slo | None = None
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace and its cells by name, in order; then the results of those that were served."""

    ask: Ask
    trace: Trace
    cells: dict[str, Setting]
    results: dict[str, ServingResult] = field(default_factory=dict)

    @property
    def setting(self) -> Setting:
        """The first cell's: model, host and tiers are the same in all."""
        return next(iter(self.cells.values()))

    @property
    def place(self) -> str:
        """In words: what served."""
        setting = self.setting
        tiers = [f"{words.size(tier.capacity_bytes)} of {tier.tier.name}" for tier in setting.tiers]
        workers = f"{setting.workers} workers, each " if setting.workers > 1 else ""
        behind = f", caching in {words.listed(tiers)}" if tiers else ""
        return f"{workers}{setting.model.name} on {replica_name(setting.host)}{behind}"

    def of(self, policy: Policy, load: float, eviction: Eviction) -> ServingResult | None:
        """The result of one cell, if it was served. Without a cache there is no eviction."""
        for name, setting in self.cells.items():
            same = setting.policy is policy and setting.load == load
            if same and (policy is Policy.NEVER or setting.eviction is eviction):
                return self.results.get(name)
        return None


def read_tier(text: str) -> tuple[str, int, bool]:
    """`NAME=SIZE` or `NAME=SIZE,shared`."""
    name, equals, rest = text.rpartition("=")
    size, comma, word = rest.partition(",")
    if not equals or (comma and word != "shared"):
        raise ConfigError(f"--tier takes NAME=SIZE or NAME=SIZE,shared, such as 'S3=1TiB,shared', not {text!r}")
    return name, parse_size(size), bool(comma)


def prepare(ask: Ask, parameters_file: Path | None) -> Replay:
    """Read and check everything."""
    from kvcore.reports import parameters

    known = parameters.read(parameters_file)
    cells = {setting.name: setting for setting in _settings(known, ask)}
    trace = traces.read(ask.trace, raw_timestamps=ask.raw_timestamps, limit=ask.limit, seed=ask.seed)
    for setting in cells.values():
        simulate(trace.first(1), setting)  # what no cell can serve is found before the first is served
    return Replay(ask, trace, cells)


def _settings(known: Parameters, ask: Ask) -> list[Setting]:
    model, host = known.model(ask.model), known.host(ask.host)
    host = host.replica(ask.gpus or gpus_needed(model, host))
    tiers = tuple(CacheTier(tier_of(known, name, host), size, shared) for name, size, shared in ask.tiers)
    base = Setting(
        model=model,
        host=host,
        tiers=tiers,
        policy=Policy.NEVER,
        workers=ask.workers,
        router=ask.router,
        overlap=ask.overlap,
    )
    return [
        replace(base, policy=policy, eviction=eviction, load=load, name=_name(ask, policy, eviction, load))
        for load in ask.loads
        for policy in ask.policies
        for eviction in (ask.evictions if policy is not Policy.NEVER else ask.evictions[:1])
    ]


def _name(ask: Ask, policy: Policy, eviction: Eviction, load: float) -> str:
    parts = [way(ask, policy, eviction)]
    parts += [f"load {told(load)}"] if len(ask.loads) > 1 else []
    return ", ".join(parts)


def way(ask: Ask, policy: Policy, eviction: Eviction) -> str:
    """Policy, and eviction where several were asked for."""
    several = len(ask.evictions) > 1 and policy is not Policy.NEVER
    return f"{POLICY_WORDS[policy]}, {eviction.value}" if several else POLICY_WORDS[policy]


def told(load: float) -> str:
    """A load as it was asked for: rounded, two loads might have one name."""
    return repr(load).removesuffix(".0")


def serve(replay: Replay, work: Work) -> Replay:
    """All cells, or as many as an interrupt leaves."""
    if replay.ask.jobs > 1 and len(replay.cells) > 1:
        cells = [Cell(replay.trace, setting) for setting in replay.cells.values()]
        served = work.run_together(list(replay.cells), lambda say: sweep(cells, replay.ask.jobs, say).results)
        return replace(replay, results=served)
    steps = [(name, functools.partial(simulate, replay.trace, setting)) for name, setting in replay.cells.items()]
    return replace(replay, results=work.run(steps))


def row(name: str, result: ServingResult, slo: Slo | None) -> dict[str, Value]:
    """One cell as a row of `COLUMNS`."""
    setting, good = result.setting, result.goodput(slo)
    done = sum(1 for _ in result.completed())
    percentiles = {f"ttft_p{p}_s": result.percentile(_ttft, p) for p in PERCENTS}
    return {
        "cell": name,
        "policy": POLICY_WORDS[setting.policy],
        "eviction": setting.eviction.value if setting.policy is not Policy.NEVER else None,
        "load": setting.load,
        "requests": len(result.records),
        "failed": len(result.records) - done,
        "per_s": done / result.duration_s if result.duration_s else None,
        "ttft_mean_s": result.ttft_mean_s,
        **percentiles,
        "tpot_mean_s": result.mean(lambda record: record.tpot_s),
        "e2e_mean_s": result.mean(lambda record: record.e2e_s),
        "hit_rate": result.hit_rate,
        "found_rate": result.found_rate,
        "loaded_bytes": sum(record.loaded_bytes for record in result.records),
        "gpu_busy": result.gpu_busy,
        "link_busy": max((link.busy for link in result.links), default=None),
        "evictions": result.evictions,
        "goodput_share": good.share if good else None,
        "goodput_per_s": good.per_s if good else None,
        "goodput_tokens_per_s": good.tokens_per_s if good else None,
    }


def _ttft(record: Record) -> float | None:
    return record.ttft_s


def report(
    kind: str,
    title: str,
    replay: Replay,
    work: Work,
    *,
    verdict: Iterable[str],
    charts: Iterable[Chart],
    more_tables: Iterable[Table] = (),
) -> Report:
    """The page of a served trace: all cells as a table, whatever the kind adds, and the raw records."""
    rows = [row(name, result, replay.ask.slo) for name, result in replay.results.items()]
    return Report(
        kind,
        title,
        tuple(verdict),
        tables=(Table("cells", "All cells", COLUMNS, rows, ("cell",)), *more_tables),
        charts=tuple(charts),
        records=records(replay),
        inputs=inputs(replay),
        notes=notes(replay),
        missing=tuple(work.missing),
        seed=replay.ask.seed,
    )


def records(replay: Replay) -> list[dict[str, Any]]:
    """Every request of every cell."""
    found = []
    for name, result in replay.results.items():
        for number, record in enumerate(result.records):
            fields = {key: _rounded(getattr(record, key)) for key in record.__dataclass_fields__}
            found.append({"cell": name, "request": number, **fields, "ending": record.ending.value})
    return found


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def inputs(replay: Replay) -> dict[str, Any]:
    """What the numbers rest on."""
    from kvcore.reports.page.calculator import plain

    ask, setting, trace = replay.ask, replay.setting, replay.trace
    return {
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "input_tokens": trace.input_tokens,
            "output_tokens": trace.output_tokens,
            "duration_s": trace.duration_s,
            "block_tokens": trace.block_tokens,
            "raw_timestamps": ask.raw_timestamps,
        },
        "model": plain(setting.model),
        "host": plain(setting.host),
        "tiers": [
            {**plain(tier.tier), "capacity_bytes": tier.capacity_bytes, "shared": tier.shared} for tier in setting.tiers
        ],
        "workers": setting.workers,
        "router": setting.router.value,
        "overlap": setting.overlap,
        "slo": None if ask.slo is None else str(ask.slo),
    }


def notes(replay: Replay) -> tuple[str, ...]:
    """What was done to the trace, and what the simulation leaves out."""
    said: Sequence[str] = [*replay.trace.notes, *(note for result in replay.results.values() for note in result.notes)]
    return tuple(dict.fromkeys(said))

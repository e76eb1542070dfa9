"""The rung table for terminals: one line per rung, then the failures with one reproducing line each."""

from __future__ import annotations

from kvcore.ladder.result import RUNG_NAMES, LadderResult, RungResult, failures
from kvcore.ladder.swarm_rungs.table import render_storms, reproduce_lines, storm_failures

_COLUMNS = (
    ("requests", "requests"),
    ("tokens", "tokens_compared"),
    ("differ", "mismatches"),
    ("loads ok", "loads_verified"),
    ("stores ok", "stores_verified"),
    ("preempt", "preemptions"),
    ("in flight", "preemptions_store_inflight"),
    ("fenced", "fences_waited"),
    ("cancelled", "stores_cancelled"),
    ("resumes+load", "resumes_with_load"),
)


def render(result: LadderResult) -> str:
    """The tables, the workload they were climbed with, and what failed."""
    climbs = f", {len(result.cells)} configuration(s)" if result.cells else ""
    lines = [f"ladder: target {result.target}{climbs}, seed {result.seed}"]
    lines += [f"workload: {result.workload}"]
    lines += ["", *_climbs(result)] if result.cells else []
    lines += ["", *render_storms(result.storms)] if result.storms else []
    lines += ["", *([f"trace hash {result.trace_hash}"] if result.trace_hash else []), *_speed(result)]
    lines += [f"verdict: {result.verdict}"]
    lines += _failures(result)
    return "\n".join(lines)


def _climbs(result: LadderResult) -> list[str]:
    head = f"{'rung':<7}{'name':<16}" + "".join(f"{title:>13}" for title, _ in _COLUMNS) + f"{'hit share':>11}  verdict"
    return [head, "-" * len(head), *map(_line, result.totals())]


def _line(rung: RungResult) -> str:
    share = rung.counts.hit_share
    cells = "".join(f"{getattr(rung.counts, name):>13,}" for _, name in _COLUMNS)
    shown = "-" if share is None else f"{share:.3f}"
    return f"{rung.rung:<7}{RUNG_NAMES[rung.rung]:<16}{cells}{shown:>11}  {rung.verdict}"


def _speed(result: LadderResult) -> list[str]:
    lines = [_speed_of_climbs(result)] if result.cells else []
    cases = sum(storm.counts.cases for storm in result.storms)
    cpu = sum(storm.cpu_s for storm in result.storms)
    return [*lines, f"{cases:,} cases, {cpu:.1f} s CPU: {cases / cpu:.1f} per CPU second"] if cases and cpu else lines


def _speed_of_climbs(result: LadderResult) -> str:
    cpu = sum(cell.cpu_s for cell in result.cells)
    callbacks = sum(cell.callbacks for cell in result.cells)
    if not cpu or not callbacks:
        return f"{len(result.cells)} climb(s)"
    rate = f"{len(result.cells) / cpu:.2f} climbs and {callbacks / cpu:,.0f} callbacks per CPU second"
    return f"{len(result.cells)} climb(s), {callbacks:,} callbacks, {cpu:.1f} s CPU: {rate}"


def _failures(result: LadderResult) -> list[str]:
    found = [*failures(result.cells), *result.shortfalls]
    shown = [*found[:20], *([f"... and {len(found) - 20} more"] if len(found) > 20 else [])]
    shown += storm_failures(result.storms)
    return ["", "failures:", *(f"  {line}" for line in shown), "", *_reproduce(result)] if shown else []


def _reproduce(result: LadderResult) -> list[str]:
    cells = [cell.reproduce for cell in result.cells if cell.verdict != "pass"][:5]
    return ["reproduce with:", *(f"  {line}" for line in [*cells, *reproduce_lines(result.storms)])]

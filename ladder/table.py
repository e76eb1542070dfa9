"""The rung table for terminals: one line per rung, then the failures with one reproducing line each."""

from __future__ import annotations

from kvcore.ladder.result import RUNG_NAMES, LadderResult, RungResult, failures

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
    """The table, the workload it ran on, and what failed."""
    head = f"{'rung':<7}{'name':<16}" + "".join(f"{title:>13}" for title, _ in _COLUMNS) + f"{'hit share':>11}  verdict"
    lines = [f"ladder: target {result.target}, {len(result.cells)} configuration(s), seed {result.seed}"]
    lines += [f"workload: {result.workload}", "", head, "-" * len(head)]
    lines += [_line(rung) for rung in result.totals()]
    lines += ["", *([f"trace hash {result.trace_hash}"] if result.trace_hash else []), _speed(result)]
    lines += [f"verdict: {result.verdict}"]
    lines += _failures(result)
    return "\n".join(lines)


def _line(rung: RungResult) -> str:
    share = rung.counts.hit_share
    cells = "".join(f"{getattr(rung.counts, name):>13,}" for _, name in _COLUMNS)
    shown = "-" if share is None else f"{share:.3f}"
    return f"{rung.rung:<7}{RUNG_NAMES[rung.rung]:<16}{cells}{shown:>11}  {rung.verdict}"


def _speed(result: LadderResult) -> str:
    cpu = sum(cell.cpu_s for cell in result.cells)
    callbacks = sum(cell.callbacks for cell in result.cells)
    if not cpu or not callbacks:
        return f"{len(result.cells)} climb(s)"
    rate = f"{len(result.cells) / cpu:.2f} climbs and {callbacks / cpu:,.0f} callbacks per CPU second"
    return f"{len(result.cells)} climb(s), {callbacks:,} callbacks, {cpu:.1f} s CPU: {rate}"


def _failures(result: LadderResult) -> list[str]:
    found = [*failures(result.cells), *result.shortfalls]
    if not found:
        return []
    shown = [f"  {line}" for line in found[:20]]
    if len(found) > 20:
        shown.append(f"  ... and {len(found) - 20} more")
    reproduce = [f"  {cell.reproduce}" for cell in result.cells if cell.verdict != "pass"][:5]
    return ["", "failures:", *shown, "", "reproduce with:", *reproduce]

"""`kvcore report trace`: serve a trace with several policies, and say which is worth it.

The verdict compares mean TTFT against no cache at all, per load. A policy that loses to none is called so: nothing here
recommends a cache because of its hit rate.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.reports.kinds import replay
from kvcore.reports.kinds.replay import POLICY_WORDS, Replay, told, way
from kvcore.reports.page import Column, Lines, Report, Series, Table, Value, Work, words
from kvcore.reports.serving import Policy, ServingResult

EQUAL = 0.01  # closer than this is the same
CURVE_POINTS = 100
NAMED_MAX = 6


def build(prepared: Replay, work: Work) -> Report:
    """The report."""
    served = replay.serve(prepared, work)
    title = f"What does a KV cache do for {served.trace.name}?"
    verdict, charts, more = _verdict(served), _charts(served), _decisions(served)
    return replay.report("trace", title, served, work, verdict=verdict, charts=charts, more_tables=more)


def _verdict(served: Replay) -> Iterator[str]:
    trace = served.trace
    yield (
        f"{words.count(len(trace), 'request')} over {words.seconds(trace.duration_s)}, mean prompt "
        f"{trace.input_tokens / len(trace):,.0f} tokens; {served.place}."
    )
    for load in served.ask.loads:
        yield from _at_load(served, load)
    yield from _failed(served)
    if not served.results:
        yield "Nothing was served."


def _at_load(served: Replay, load: float) -> Iterator[str]:
    base = served.of(Policy.NEVER, load, served.ask.evictions[0])
    none = base.ttft_mean_s if base else None
    said = []
    for result in served.results.values():
        if result.setting.load == load and result.setting.policy is not Policy.NEVER and result.ttft_mean_s is not None:
            name = way(served.ask, result.setting.policy, result.setting.eviction)
            said.append(f"{name} {words.seconds(result.ttft_mean_s)}{_against(result.ttft_mean_s, none)}")
    without = [f"no cache {words.seconds(none)}"] if none is not None else []
    if said or without:
        yield f"Mean TTFT at {told(load)} times the trace's rate: {'; '.join([*without, *said])}."


def _failed(served: Replay) -> Iterator[str]:
    """A mean over the requests that were served is no good news about the others."""
    failed = {name: sum(1 for _ in result.completed()) for name, result in served.results.items()}
    parts = [f"{name} {len(served.trace) - done:,}" for name, done in failed.items() if done < len(served.trace)]
    if parts:
        yield f"Not served, of {words.count(len(served.trace), 'request')}: {'; '.join(parts[:NAMED_MAX])}."


def _against(value: float, none: float | None) -> str:
    if none is None or none <= 0:
        return ""
    change = value / none - 1
    if abs(change) <= EQUAL:
        return " (no difference)"
    return f" ({-change:.0%} less)" if change < 0 else f" ({change:.0%} MORE: do not cache)"


def _decisions(served: Replay) -> Iterator[Table]:
    columns = (
        Column("cell", "Cell"),
        Column("decision", "Decision"),
        Column("requests", "Requests", "count", "for which that was decided"),
        Column("share", "Share", "share", "of the cell's requests"),
    )
    rows: list[dict[str, Value]] = [
        {"cell": name, "decision": decision, "requests": count, "share": count / len(result.records)}
        for name, result in served.results.items()
        for decision, count in result.decisions().items()
    ]
    if rows:
        yield Table("decisions", "What was decided, and how often", columns, rows, ("cell", "decision"), bar="requests")


def _charts(served: Replay) -> Iterator[Lines]:
    load = served.ask.loads[0]
    cells = {name: result for name, result in served.results.items() if result.setting.load == load}
    if cells:
        yield Lines(
            "ttft_distribution",
            "TTFT: share of the requests that had their first token by then",
            "TTFT, ms",
            "Share of the requests, %",
            tuple(_distribution(name, result) for name, result in cells.items()),
            x_log=True,
        )
    if len(served.ask.loads) > 1:
        yield _by_load(served)


def _distribution(name: str, result: ServingResult) -> Series:
    times = sorted(record.ttft_s for record in result.completed() if record.ttft_s is not None)
    if not times:
        return Series(name, (), ())
    places = [round(point * (len(times) - 1) / CURVE_POINTS) for point in range(CURVE_POINTS + 1)]
    never = result.setting.policy is Policy.NEVER
    return Series(name, [1000 * times[at] for at in places], [float(point) for point in range(CURVE_POINTS + 1)], never)


def _by_load(served: Replay) -> Lines:
    loads = served.ask.loads
    series = []
    for policy in served.ask.policies:
        results = [served.of(policy, load, served.ask.evictions[0]) for load in loads]
        times = [1000 * one.ttft_mean_s if one and one.ttft_mean_s is not None else None for one in results]
        series.append(Series(POLICY_WORDS[policy], loads, times, policy is Policy.NEVER, points=True))
    return Lines(
        "ttft_by_load",
        "Mean TTFT by load",
        "Load: times the trace's rate",
        "Mean TTFT, ms",
        tuple(series),
        y_log=True,
    )

"""The table of the storm rungs: one line per rung, then what failed, the first failure with all of its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcore.ladder.swarm_rungs.result import StormFailure, StormResult

FAILURES_SHOWN = 5
LINES_SHOWN = 40

_COLUMNS: tuple[tuple[str, Callable[[StormResult], str]], ...] = (
    ("cases", lambda storm: f"{storm.counts.cases:,}"),
    ("tokens", lambda storm: f"{storm.counts.tokens_compared:,}"),
    ("loads ok", lambda storm: f"{storm.counts.loads_verified:,}"),
    ("fault kinds", lambda storm: f"{len(storm.kinds) - len(storm.silent)} of {len(storm.kinds)}"),
    ("faults fired", lambda storm: f"{storm.counts.effects:,}"),
    ("rare states", lambda storm: f"{len(storm.marks)} of {storm.marks_total}"),
    ("deaths", lambda storm: f"{storm.counts.deaths:,}"),
    ("recovering", lambda storm: f"{storm.counts.deaths_in_recovery:,}"),
    ("at rest in", lambda storm: f"{storm.converge_ns_max / 1e9:.2f} s"),
    ("hits lost", lambda storm: f"{100 * storm.share_loss_max:.1f} pts"),
)


def render_storms(storms: Sequence[StormResult]) -> list[str]:
    """The table: counts are sums over a rung's cases, times and shares are those of its worst case."""
    head = f"{'rung':<7}{'name':<19}" + "".join(f"{title:>13}" for title, _ in _COLUMNS) + "  verdict"
    return [head, "-" * len(head), *map(_line, storms)]


def _line(storm: StormResult) -> str:
    cells = "".join(f"{text(storm):>13}" for _, text in _COLUMNS)
    return f"{storm.rung:<7}{storm.name:<19}{cells}  {storm.verdict}"


def storm_failures(storms: Sequence[StormResult]) -> Iterator[str]:
    """One line per failure and problem; behind the first failure of a rung the rest of its text: who waits for what."""
    for storm in storms:
        where = f"rung {storm.rung} ({storm.name})"
        for failure in storm.failures[:FAILURES_SHOWN]:
            first, *more = failure.finding.splitlines()
            yield f"{where}, seed {failure.seed}: {first}"
            if failure is storm.failures[0]:
                yield from more[:LINES_SHOWN]
        if len(storm.failures) > FAILURES_SHOWN:
            yield f"{where}: and {len(storm.failures) - FAILURES_SHOWN} cases more"
        yield from (f"{where}: {problem}" for problem in storm.problems)


def reproduce_lines(storms: Sequence[StormResult]) -> Iterator[str]:
    """One per failed case; the whole rung where it only lacks something."""
    for storm in storms:
        yield from map(_reproduce, storm.failures[:FAILURES_SHOWN])
        if storm.problems and not storm.failures:
            yield storm.reproduce


def _reproduce(failure: StormFailure) -> str:
    return f"{failure.reproduce}{f'    # {failure.directory}' if failure.directory else ''}"

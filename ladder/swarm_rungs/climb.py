"""Climbs storm rungs: many cases of the swarm, in worker processes, and one result per rung.

Theory of operation
-------------------
1. Every rung gets so many cases: those of the first seeds that draw a fault of its planes.
2. A fault kind that took effect in none of them gets cases of its own, drawn with that kind alone, in up to
   `len(OWN_CASES)` waves. A wave begins when the one before is over, so which cases are run depends on nothing but the
   seed, however many processes there are.
3. What is still missing then fails the rung (`StormResult.close`).

A stretch of seeds says for which rung and kinds its cases are drawn, and a `StormTask` finds the stretch of a seed. So
one set of worker processes serves all rungs, and the line that runs a case again needs no more than its stretch.

A rung with `failures_max` failures gets no further cases: it has failed, and cases that hang are dear.

`jobs` 0 runs everything in this process, one case after the other: for tests that have changed something in it.

Who holds: the worker processes belong to `run_parallel` and end with the wave. A failure's directory is written when
the failure comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.draw import chosen_kinds, draw_case
from kvcore.ladder.swarm.swarm import ARTIFACTS_MAX, SIZE_FOR_RATES, SwarmOptions
from kvcore.ladder.swarm.worker import Record, Task, planted, run_parallel, run_seed
from kvcore.ladder.swarm_rungs.result import StormFailure, StormResult
from kvcore.ladder.swarm_rungs.rungs import STORM_RUNGS, StormRung
from kvcore.sim.marks import all_marks

OWN_CASES = (6, 12, 24)
"""Cases of a kind that has not taken effect yet, per wave."""
FAILURES_MAX = 20
_TRIES_PER_CASE = 100

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StormOptions:
    """`cases` per rung, besides those that single kinds need. `mutant`: a bug of the zoo that is planted meanwhile."""

    rungs: tuple[str, ...] = tuple(STORM_RUNGS)
    seed: int = 0
    cases: int = 250
    jobs: int = 1
    mutant: str = ""
    artifacts: Path | None = None
    failures_max: int = FAILURES_MAX
    own_cases: tuple[int, ...] = OWN_CASES


@dataclass(frozen=True, slots=True)
class Stretch:
    """Seeds that follow each other, and what their cases are drawn from."""

    first: int
    count: int
    rung: str
    planes: tuple[str, ...] | None
    kinds: tuple[str, ...] | None = None

    def __contains__(self, seed: object) -> bool:
        return isinstance(seed, int) and self.first <= seed < self.first + self.count


@dataclass(frozen=True, slots=True)
class StormTask(Task):
    """What worker processes are told once: all stretches of a wave."""

    stretches: tuple[Stretch, ...] = ()

    def stretch(self, seed: int) -> Stretch:
        return next(stretch for stretch in self.stretches if seed in stretch)

    def case(self, seed: int) -> Case:
        stretch = self.stretch(seed)
        return draw_case(seed, stretch.planes, stretch.kinds, self.mutant)

    def command(self, seed: int) -> str:
        """What runs one case again."""
        stretch = self.stretch(seed)
        return SwarmOptions(task=Task(stretch.planes, stretch.kinds, self.mutant)).command(seed)


def climb_storms(options: StormOptions, progress: Progress | None = None) -> list[StormResult]:
    """Climb the chosen rungs. Whatever the cases find is in the results; nothing is raised."""
    results = {name: _new_result(STORM_RUNGS[name], options) for name in options.rungs}
    wave = [stretch for name in options.rungs for stretch in _first_wave(STORM_RUNGS[name], options)]
    _run_wave(wave, options, results, progress)
    for count in options.own_cases:
        wave = [stretch for result in results.values() for stretch in _own_wave(result, count, options)]
        if not wave:
            break
        _run_wave(wave, options, results, progress)
    for result in results.values():
        result.failures.sort(key=lambda failure: failure.seed)
        result.close()
    return list(results.values())


def _new_result(rung: StormRung, options: StormOptions) -> StormResult:
    kinds = chosen_kinds(rung.planes)
    marks = all_marks()
    large = rung.marks and options.cases >= SIZE_FOR_RATES
    wanted = [mark.name for mark in marks.values() if mark.common and mark.seeds <= options.cases]
    return StormResult(
        rung.rung,
        rung.name,
        tuple(dict.fromkeys(kind.plane for kind in kinds)),
        f"kvcore ladder --rungs {rung.rung} --seed {options.seed} --cases {options.cases}",
        kinds=tuple(kind.name for kind in kinds if kind.common),
        floors=rung.floors,
        marks_total=len(marks),
        marks_wanted=tuple(wanted) if large else (),
    )


# ---- which cases


def _first_wave(rung: StormRung, options: StormOptions) -> list[Stretch]:
    seeds = _seeds(rung.first_seed(options.seed), options.cases, rung.planes, None)
    return _stretches(seeds, rung.rung, rung.planes, None)


def _own_wave(result: StormResult, count: int, options: StormOptions) -> Iterator[Stretch]:
    """Cases for each kind of a rung that has not taken effect, unless the rung has failed by now."""
    if result.failures:
        return
    rung = STORM_RUNGS[result.rung]
    before = max([rung.first_own_seed(options.seed) - 1, *result.hashes])
    for kind in result.silent:
        seeds = _seeds(before + 1, count, rung.planes, (kind,))
        yield from _stretches(seeds, rung.rung, rung.planes, (kind,))
        before = max([before, *seeds])


def _seeds(first: int, count: int, planes: Collection[str] | None, kinds: Collection[str] | None) -> list[int]:
    """The first `count` seeds from `first` on whose cases have a fault; fewer where hardly any has."""
    found: list[int] = []
    for seed in range(first, first + count * _TRIES_PER_CASE):
        if len(found) == count:
            break
        if draw_case(seed, planes, kinds).faults:
            found.append(seed)
    return found


def _stretches(
    seeds: Sequence[int], rung: str, planes: tuple[str, ...] | None, kinds: tuple[str, ...] | None
) -> list[Stretch]:
    """The seeds in as few stretches as they allow."""
    made: list[Stretch] = []
    for seed in seeds:
        if made and made[-1].first + made[-1].count == seed:
            made[-1] = Stretch(made[-1].first, made[-1].count + 1, rung, planes, kinds)
        else:
            made.append(Stretch(seed, 1, rung, planes, kinds))
    return made


# ---- running them


def _run_wave(
    wave: Sequence[Stretch], options: StormOptions, results: dict[str, StormResult], progress: Progress | None
) -> None:
    task = StormTask(mutant=options.mutant, stretches=tuple(wave))
    ranges = _ranges(wave, options, results)
    left = {name: sum(stretch.count for stretch in wave if stretch.rung == name) for name in results}
    for record in run_parallel(ranges, task, options.jobs) if options.jobs else _run_here(ranges, task):
        stretch = task.stretch(record.seed)
        result = results[stretch.rung]
        result.add(record, of_one_kind=stretch.kinds is not None)
        left[stretch.rung] -= 1
        if record.failed is not None:
            _note_failure(result, record, task, options, progress)
        if progress is not None and not left[stretch.rung]:
            progress(f"rung {result.rung} ({result.name}): {result.counts.cases} cases, {len(result.failures)} failed")


def _ranges(
    wave: Sequence[Stretch], options: StormOptions, results: dict[str, StormResult]
) -> Iterator[tuple[int, int]]:
    """Seed by seed: a rung that has failed ends there, and no process is left alone with a long stretch."""
    for stretch in wave:
        for seed in range(stretch.first, stretch.first + stretch.count):
            if len(results[stretch.rung].failures) >= options.failures_max:
                break
            yield seed, 1


def _run_here(ranges: Iterator[tuple[int, int]], task: StormTask) -> Iterator[Record]:
    with planted(task.mutant):
        for first, count in ranges:
            for seed in range(first, first + count):
                yield run_seed(seed, task)


def _note_failure(
    result: StormResult, record: Record, task: StormTask, options: StormOptions, progress: Progress | None
) -> None:
    assert record.failed is not None
    finding = record.failed.findings[0]
    directory = ""
    if options.artifacts is not None and len(result.failures) < ARTIFACTS_MAX:
        from kvcore.ladder.repro.directory import write_failure  # heavy, and only for failures

        place = options.artifacts / f"rung-{result.rung}-seed-{record.seed}"
        directory = str(write_failure(record.failed.case, record.failed, place))
    failure = StormFailure(record.seed, finding.oracle, str(finding), task.command(record.seed), directory)
    result.failures.append(failure)
    if progress is not None:
        progress(f"rung {result.rung}, seed {record.seed}: {failure.finding.splitlines()[0]}")
        progress(f"reproduce: {failure.reproduce}")

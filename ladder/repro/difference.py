"""The first event that differs between two runs, and the nearest run that passes.

Theory of operation
-------------------
Two runs of almost the same case never have the same times: one fault less, and every later delay is another one. So
their steps are aligned by event, not by time:

    1.  Each step belongs to a *lane* that is first in, first out by itself: one direction of one connection, one stream
        of a device, one session at one L1, one kind of work at one store, one request of the engine. Between lanes the
        order is the schedule's, and a swap there is no difference.
    2.  What a step says is compared without its numbers of tickets, tasks and messages, which count what other lanes
        did, too. Polls that were answered "pending" are left out; how many there were is a matter of time.
    3.  In every lane the first step that differs, or that only one run has, is found. The earliest of them all, in
        either run's time, is the first difference: from then on one of the two does what the other does not.

The faults themselves, crashes and findings are no lanes: one of them *is* the difference between the two cases.

The nearest passing run is looked for among the smallest changes of a failing case, kind by kind, until a kind has one
that passes: each fault removed, the last one first; each of the last exceptions of its schedule removed; another
schedule; other seeds of its delays; less to do (each request removed, or one output token less). Of those of one kind
that pass, the one whose first difference comes latest is the nearest: it went along with the failing run for the
longest time. Where a mutant is planted, the same case without it is compared as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any

import msgspec

from kvcore.ladder.repro.line import CannotJudge
from kvcore.ladder.repro.observe import Observed, judge, observe
from kvcore.ladder.repro.shrink import with_faults
from kvcore.ladder.swarm.case import Case, Schedule
from kvcore.sim.charts.steps import Step
from kvcore.sim.trace import Field

NEIGHBOURS_MAX = 24
_CONTEXT = 8
_EXCEPTIONS_TRIED = 4
_SEEDS_TRIED = 3
_SEED_STEP = 1 << 40

_OUTSIDE_LANES = ("fault", "finding", "process", "pick", "executor", "files")
_LANE_FIELDS = {"net": 2, "copy": 2, "l1": 2}
_NUMBERED = {"copy": 2, "l2": 1}  # the position of a running number among the fields
_NUMBER = re.compile(r" ?#\d+$")
_POLLS = ("query", "pending", "ping", "done")

Lane = tuple[Field, ...]
Said = tuple[Field, ...]
Told = list[tuple[int, Said]]
"""What one lane says, with the positions of the steps."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Positions in the two runs' steps; None where a run has no such step. `lane` is where they part."""

    lane: Lane
    first: int | None
    second: int | None
    time_ns: int  # when the earlier of the two happened

    def lines(self, first: Sequence[Step], second: Sequence[Step], names: tuple[str, str] = ("A", "B")) -> list[str]:
        """The two steps, and what came before them in each run."""
        lines = [f"first difference, in {' '.join(map(str, self.lane))}:"]
        lines += _side(names[0], first, self.first, self.lane) + _side(names[1], second, self.second, self.lane)
        return lines


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A passing run near a failing one. `how`: what was changed. `tried`: how many were looked at."""

    how: str
    observed: Observed
    difference: Difference | None
    tried: int


def first_difference(first: Sequence[Step], second: Sequence[Step]) -> Difference | None:
    """See the module's text. None: every lane says the same in both."""
    ours, theirs = _lanes(first), _lanes(second)
    found = [_in_lane(lane, ours.get(lane, []), theirs.get(lane, []), first, second) for lane in {**ours, **theirs}]
    return min((each for each in found if each is not None), key=_moment, default=None)


def _lanes(steps: Sequence[Step]) -> dict[Lane, Told]:
    lanes: dict[Lane, Told] = {}
    for index, step in enumerate(steps):
        plane = step.label.partition(".")[0]
        if plane in _OUTSIDE_LANES or step.fields[1:2] == ("compute",):
            continue  # work of the forward pass has no content of its own
        said = _said(step, plane)
        if said is not None:
            lane = (step.process, plane, *step.fields[: _LANE_FIELDS.get(plane, 1)])
            lanes.setdefault(lane, []).append((index, said))
    return lanes


def _said(step: Step, plane: str) -> Said | None:
    fields = list(step.fields)
    if plane == "net" and len(fields) == 5:
        name = _NUMBER.sub("", str(fields[4]))
        if name.partition(" ")[0] in _POLLS:
            return None
        return step.label, fields[2], name
    number = _NUMBERED.get(plane)
    if number is not None and number < len(fields):
        del fields[number]
    return step.label, *fields


def _moment(difference: Difference) -> tuple[int, int]:
    positions = [each for each in (difference.first, difference.second) if each is not None]
    return difference.time_ns, min(positions)


def _in_lane(lane: Lane, ours: Told, theirs: Told, first: Sequence[Step], second: Sequence[Step]) -> Difference | None:
    """Where the two part in one lane, if they do."""
    for here, there in zip_longest(ours, theirs):
        if here is not None and there is not None and here[1] == there[1]:
            continue
        times = [steps[said[0]].time_ns for steps, said in ((first, here), (second, there)) if said is not None]
        positions = [None if said is None else said[0] for said in (here, there)]
        return Difference(lane, positions[0], positions[1], min(times))
    return None


def _side(name: str, steps: Sequence[Step], at: int | None, lane: Lane) -> list[str]:
    if at is None:
        return [f"  {name}: nothing more happens there"]
    before = [f"      {step.line()}" for step in steps[max(0, at - _CONTEXT) : at]]
    return [f"  {name}: {steps[at].line()}", "    after", *before]


# ---- the nearest run that passes


def nearest_passing(failing: Observed, tries: int = NEIGHBOURS_MAX) -> Neighbour | None:
    """The passing neighbour that goes along with `failing` for the longest time. The mutant is planted already."""
    tried = 0
    for kind in _kinds_of_neighbours(failing.case):
        best: Neighbour | None = None
        for how, case in islice(kind, max(0, tries - tried)):
            tried += 1
            found = _compare(failing, how, case)
            if found is not None and (best is None or _length(found) > _length(best)):
                best = found
        if best is not None:
            return replace(best, tried=tried)
    return None


def without_the_mutant(failing: Observed) -> Neighbour | None:
    """The same case in the code as it is; None if it fails there, too. No mutant may be planted around this."""
    return _compare(failing, "without the mutant", msgspec.structs.replace(failing.case, mutant=""))


def _length(neighbour: Neighbour) -> int:
    return neighbour.difference.time_ns if neighbour.difference is not None else -1


def _compare(failing: Observed, how: str, case: Case) -> Neighbour | None:
    try:
        if judge(case).findings:
            return None
        observed = observe(case)
    except CannotJudge:
        return None
    return Neighbour(how, observed, first_difference(failing.steps, observed.steps), 0)


Neighbours = Iterator[tuple[str, Case]]


def _kinds_of_neighbours(case: Case) -> Iterator[Neighbours]:
    yield _fewer_faults(case)
    yield _fewer_exceptions(case)
    yield _other_schedules(case)
    yield _other_delays(case)
    yield _less_to_do(case)


def _fewer_faults(case: Case) -> Neighbours:
    for index in reversed(range(len(case.faults))):
        kept = [*case.faults[:index], *case.faults[index + 1 :]]
        yield f"without the fault {case.faults[index]}", with_faults(case, kept)


def _fewer_exceptions(case: Case) -> Neighbours:
    ties = sorted(case.schedule.exceptions.items())
    for index in reversed(range(max(0, len(ties) - _EXCEPTIONS_TRIED), len(ties))):
        (tie, choice), fewer = ties[index], dict([*ties[:index], *ties[index + 1 :]])
        how = f"with first in, first out instead of entry {choice} at tie {tie}"
        yield how, _changed(case, schedule=Schedule("replay", exceptions=fewer))


def _other_schedules(case: Case) -> Neighbours:
    if case.schedule.kind != "fifo":
        yield "with a first in, first out schedule", _changed(case, schedule=Schedule("fifo"))
    if case.schedule.kind != "random":
        yield "with a random schedule", _changed(case, schedule=Schedule("random"))


def _other_delays(case: Case) -> Neighbours:
    for number in range(1, _SEEDS_TRIED + 1):
        seed = case.seed + number * _SEED_STEP
        yield f"with other delays (seed {seed})", _changed(case, seed=seed)


def _less_to_do(case: Case) -> Neighbours:
    for field in ("second", "requests"):
        requests = getattr(case, field)
        for index in reversed(range(len(requests))):
            before, request, after = requests[:index], requests[index], requests[index + 1 :]
            if request.output_tokens > 1:
                shorter = msgspec.structs.replace(request, output_tokens=request.output_tokens - 1)
                how = f"with one output token less for {request.request_id}"
                yield how, _changed(case, **{field: (*before, shorter, *after)})
            yield f"without the request {request.request_id}", _changed(case, **{field: (*before, *after)})


def _changed(case: Case, **values: Any) -> Case:
    return msgspec.structs.replace(case, **values)

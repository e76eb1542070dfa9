"""Running a case the way reproduction needs it: with its mutant planted, its steps recorded, its components asked.

A case can be *judged* (it passed, or some oracle fired) or not: a mutant that this revision does not have, a fault kind
that is gone, a configuration that is refused. `CannotJudge` says which; `git bisect run` skips such a revision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcore.errors import CallerError, ConfigError
from kvcore.ladder.repro.components import state_lines
from kvcore.ladder.repro.line import CannotJudge
from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.episode import Episode, run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.ladder.zoo.planted import planted
from kvcore.sim.charts.steps import OUTSIDE, Recorder, Step
from kvcore.sim.faults.catalogue import CATALOGUE
from kvcore.sim.trace import Trace


@dataclass(frozen=True, slots=True)
class Observed:
    """One run with everything that was seen of it. `states`: one line per component, at the first finding, else at the
    step that was asked for, else empty."""

    case: Case
    outcome: Outcome
    steps: list[Step]
    states: list[str]

    @property
    def text(self) -> str:
        """The trace as lines of text."""
        return "".join(step.line() + "\n" for step in self.steps)


@contextmanager
def planting(mutant: str) -> Iterator[None]:
    """With the named mutant of the zoo in the production code; "" plants nothing."""
    if not mutant:
        yield
        return
    try:
        plant = planted(mutant)
        plant.__enter__()
    except (CallerError, ConfigError, KeyError) as error:
        raise CannotJudge(f"the mutant {mutant!r} cannot be planted: {error}") from None
    try:
        yield
    finally:
        plant.__exit__(None, None, None)


def _check_kinds(case: Case) -> None:
    gone = sorted({event.kind for event in case.faults} - CATALOGUE.keys())
    if gone:
        raise CannotJudge(f"there are no faults of kind {', '.join(gone)} in this revision")


def judge(case: Case, *, record_ties: bool = False) -> Outcome:
    """Run a case whose mutant is planted already."""
    _check_kinds(case)
    try:
        return run_case(case, record_ties=record_ties)
    except (CallerError, ConfigError) as error:
        raise CannotJudge(f"the case cannot be run: {error}") from None


def observe(case: Case, states_at: int | None = None) -> Observed:
    """Run a case whose mutant is planted already, and keep all that can be seen. `states_at`: ask the components for
    their states at this step instead of at the first finding."""
    _check_kinds(case)
    trace = Trace()
    recorder = Recorder(trace, at=states_at)

    def watch(episode: Episode) -> None:
        recorder.state = lambda: state_lines(episode)

    try:
        outcome = run_case(case, trace=trace, watch=watch)
    except (CallerError, ConfigError) as error:
        raise CannotJudge(f"the case cannot be run: {error}") from None
    return Observed(case, outcome, [*recorder.steps, *_found_afterwards(outcome, recorder.steps)], recorder.states)


def _found_afterwards(outcome: Outcome, steps: list[Step]) -> list[Step]:
    """A finding that was made when the run was over, by comparing it with others, is a last step."""
    if not outcome.findings or any(step.label == "finding" for step in steps):
        return []
    finding = outcome.findings[0]
    return [Step(finding.time_ns, OUTSIDE, "finding", (finding.oracle, finding.text))]

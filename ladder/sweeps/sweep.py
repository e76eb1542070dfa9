"""One fault at every point: the n-th allocation, call, send, message, copy or callback, for every n that there is.

Theory of operation
-------------------
A sweep is a scenario and a kind. For each target of the kind (a server, an adapter, a client's connection, a device, a
process) the scenario runs with one event, "the n-th", for n = 1, 2, 3, ... Until the fault, such a run is the run
without it; so the first n that does not take effect is behind the last point, and ends the target's sweep. With
`every` = k only each k-th point is tried.

Each run is judged like any case: every oracle, liveness, a second workload. A sweep in which nothing took effect proves
nothing and fails.

Results are values. Nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcore.errors import ConfigError
from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.draw import shape_of
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.ladder.sweeps.scenario import SCENARIOS, Scenario
from kvcore.sim.faults.kind import FaultEvent, Shape


@dataclass(frozen=True, slots=True)
class SweepKind:
    """`fault`: the kind of `FaultEvent`. `targets` names the parts of a configuration that have such points."""

    name: str
    about: str
    fault: str
    targets: Callable[[Shape], tuple[str, ...]]
    amount: int = 0

    def event(self, target: str, nth: int) -> FaultEvent:
        return FaultEvent(self.fault, target=target, nth=nth, amount=self.amount)


_KINDS = (
    SweepKind("crash", "a process dies after its n-th callback", "process.crash_at_step", lambda s: s.processes),
    SweepKind("allocation", "the n-th allocation in L1 finds no room", "l1.no_space_nth", lambda s: s.server_names),
    SweepKind("l2", "the n-th call to an adapter fails", "l2.error_nth", lambda s: s.adapters),
    SweepKind("send", "the n-th send of a connection is refused", "transport.fail_send", lambda s: s.clients),
    SweepKind("message", "the n-th message of a connection is lost", "transport.fail_send", lambda s: s.clients, 1),
    SweepKind("copy", "the n-th page of a device is not copied", "device.fail_copy", lambda s: s.devices),
    SweepKind("submit", "the n-th submission is refused by a device", "device.refuse_submit", lambda s: s.devices),
)

KINDS = {kind.name: kind for kind in _KINDS}


class SweepFinding(msgspec.Struct, frozen=True):
    """What one point led to. `case` is the whole case, to be replayed."""

    event: FaultEvent
    finding: str
    case: Case


@dataclass(slots=True)
class SweepResult:
    """One kind in one scenario. `points`: by target, how many runs; `took_effect`: in how many of them it happened."""

    scenario: str
    kind: str
    points: dict[str, int] = field(default_factory=dict)
    took_effect: dict[str, int] = field(default_factory=dict)
    findings: list[SweepFinding] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """There were targets, and nothing happened to any of them."""
        return bool(self.points) and not any(self.took_effect.values())

    @property
    def verdict(self) -> str:
        return "fail" if self.findings or self.is_empty else "pass"

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "kind": self.kind,
            "targets": sorted(self.points),
            "points": sum(self.points.values()),
            "took_effect": sum(self.took_effect.values()),
            "findings": [{"fault": str(found.event), "finding": found.finding} for found in self.findings],
            "cpu_s": round(self.cpu_s, 3),
            "verdict": self.verdict,
        }


def targets_of(scenario: Scenario, kind: SweepKind) -> tuple[str, ...]:
    """The parts of the scenario's configuration that have points of this kind; often none in-process."""
    return kind.targets(shape_of(scenario.case.config, scenario.case.requests))


def sweep(
    scenario: Scenario, kind: SweepKind, *, every: int = 1, run: Callable[[Case], Outcome] = run_case
) -> SweepResult:
    """All points of one kind in one scenario."""
    if every < 1:
        raise ConfigError(f"every {every}th point cannot be tried; give 1 or more")
    result = SweepResult(scenario.name, kind.name)
    for target in targets_of(scenario, kind):
        result.points[target] = result.took_effect[target] = 0
        nth = 1
        while _point(scenario, kind.event(target, nth), result, run):
            nth += every
    return result


def _point(scenario: Scenario, event: FaultEvent, result: SweepResult, run: Callable[[Case], Outcome]) -> bool:
    """Run one point; whether the fault took effect."""
    case = msgspec.structs.replace(scenario.case, faults=(event,))
    outcome = run(case)
    result.points[event.target] += 1
    result.cpu_s += outcome.cpu_s
    if outcome.findings:
        result.findings.append(SweepFinding(event, str(outcome.findings[0]), case))
    happened = bool(outcome.fired.get(event.kind))
    result.took_effect[event.target] += happened
    return happened


def chosen(names: list[str] | None, known: dict[str, Any], what: str) -> list[Any]:
    """By name, all by default. Raises `ConfigError` for one that does not exist."""
    for name in names or ():
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def sweeps(
    scenarios: list[str] | None = None, kinds: list[str] | None = None, *, every: int = 1
) -> Iterator[SweepResult]:
    """The results, as they come, of each kind in each scenario that has targets for it."""
    for scenario in chosen(scenarios, SCENARIOS, "scenario"):
        for kind in chosen(kinds, KINDS, "kind"):
            if targets_of(scenario, kind):
                yield sweep(scenario, kind, every=every)

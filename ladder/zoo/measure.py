"""How well one mutant is seen: run seeds with it planted, count the catches, minimise the first.

Theory of operation
-------------------
1. Seeds are tried in order until `catches_max` of them were catches, or `seeds_max` were tried. A safe mutant is tried
   over its whole budget.
2. A catch is a seed that fails with the mutant *and passes without*: what is seen is the bug, not the configuration. A
   seed that fails without it is our own bug (or a false alarm) and makes the measurement fail.
3. The first catch is shrunk; what counts is how many fault events are left.
4. A mutant is *good* if the first catch came within its budget, by an oracle that was expected, and, for a hard one,
   if it is seldom enough; a safe one if nothing was seen. A written reason (`note`) excuses a bug that was not caught
   in time; nothing excuses the wrong oracle.

Who holds: nothing outlives a call but the model cache of the swarm, which `planted` empties.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcore.ladder.repro.shrink import shrink_case
from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.draw import draw_case
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.ladder.zoo.catalogue import find_mutant
from kvcore.ladder.zoo.interval import interval
from kvcore.ladder.zoo.mutant import Mutant
from kvcore.ladder.zoo.planted import planted

HARD_DENSITY_MAX = 10.0
SHRINK_S = 30.0
"""A livelock takes seconds to be seen, in every run."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look. `seeds_max` bounds safe mutants as well; `shrink_runs` 0: the first catch is not minimised."""

    first_seed: int = 0
    seeds_max: int = 1000
    catches_max: int = 30
    shrink_runs: int = 200


@dataclass(slots=True)
class Measured:
    """What came out. `first` is the case of the first catch, minimised where `faults_min` is known."""

    mutant: Mutant
    seeds_run: int = 0
    oracles: Counter[str] = field(default_factory=Counter)  # of all catches
    oracle: str = ""  # of the first one
    finding: str = ""
    first_seed: int | None = None
    first: Case | None = None
    seeds_needed: int = 0
    faults_first: int | None = None
    faults_min: int | None = None
    alarms: list[str] = field(default_factory=list)  # seeds that fail without the mutant
    cpu_s: float = 0.0

    @property
    def catches(self) -> int:
        return self.oracles.total()

    @property
    def density(self) -> float:
        """Catches per 1,000 seeds."""
        return 1000 * self.catches / self.seeds_run if self.seeds_run else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """In which the density lies, at 95 %."""
        low, high = interval(self.catches, self.seeds_run)
        return 1000 * low, 1000 * high

    @property
    def problem(self) -> str:
        """Why this mutant is not as the zoo says; "" if it is."""
        if self.alarms:
            return f"fails without the mutant as well: {self.alarms[0]}"
        if self.mutant.kind == "safe":
            return f"is not safe: [{self.oracle}] sees it at seed {self.first_seed}" if self.catches else ""
        if not self.catches or self.seeds_needed > self.mutant.budget_seeds:
            return (
                "" if self.mutant.note else f"was not caught in {min(self.seeds_run, self.mutant.budget_seeds)} seeds"
            )
        if self.oracle not in self.mutant.oracles:
            return f"was caught by [{self.oracle}], expected was {' or '.join(self.mutant.oracles)}"
        if self.mutant.kind == "hard" and self.interval[0] > HARD_DENSITY_MAX:
            return f"is not hard: {self.density:.0f} catches per 1,000 seeds"
        return ""

    def to_json(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "name": self.mutant.name,
            "kind": self.mutant.kind,
            "group": self.mutant.group,
            "caught": bool(self.catches),
            "oracle": self.oracle,
            "finding": self.finding,
            "expected": list(self.mutant.oracles),
            "first_seed": self.first_seed,
            "seeds_run": self.seeds_run,
            "budget_seeds": self.mutant.budget_seeds,
            "planes": list(self.mutant.planes or ()),
            "transfer": self.mutant.transfer,
            "catches": self.catches,
            "oracles": dict(self.oracles),
            "density_per_1000": round(self.density, 1),
            "density_interval": [round(low, 1), round(high, 1)],
            "faults_first": self.faults_first,
            "faults_min": self.faults_min,
            "reason": self.mutant.reason,
            "behind": self.mutant.behind,
            "note": self.mutant.note,
            "problem": self.problem,
            "cpu_s": round(self.cpu_s, 1),
        }


def measure(name: str, effort: Effort) -> Measured:
    """Look for one mutant. Raises `ConfigError` if it does not exist, or does not fit the production code any more."""
    begin = time.process_time()
    mutant = find_mutant(name)
    measured = Measured(mutant)
    seeds_max = effort.seeds_max if mutant.kind != "safe" else min(effort.seeds_max, mutant.budget_seeds)
    caught: list[Outcome] = []
    with planted(name):
        for seed in range(effort.first_seed, effort.first_seed + seeds_max):
            measured.seeds_run += 1
            outcome = run_case(draw_case(seed, mutant.planes, mutant=name, transfer=mutant.transfer))
            if outcome.findings:
                caught.append(outcome)
                if len(caught) == effort.catches_max:
                    break
    for outcome in caught:
        _confirm(measured, outcome, effort)
    if measured.first is not None and effort.shrink_runs:
        _minimise(measured, effort.shrink_runs)
    measured.cpu_s = time.process_time() - begin
    return measured


def _confirm(measured: Measured, outcome: Outcome, effort: Effort) -> None:
    """Count a failure as a catch, unless the same case fails without the mutant."""
    case = outcome.case
    plain = run_case(unplanted(case))
    if plain.findings:
        measured.alarms.append(f"seed {case.seed}: {plain.findings[0]}")
        return
    measured.oracles[outcome.oracle] += 1
    if measured.first is None:
        measured.first, measured.first_seed = case, case.seed
        measured.oracle, measured.finding = outcome.oracle, str(outcome.findings[0])
        measured.seeds_needed = case.seed - effort.first_seed + 1
        measured.faults_first = len(case.faults)


def unplanted(case: Case) -> Case:
    """The same case for the code as it is."""
    return msgspec.structs.replace(case, mutant="")


def _minimise(measured: Measured, runs: int) -> None:
    assert measured.first is not None
    measured.first = shrink_case(measured.first, runs=runs, budget_s=SHRINK_S)
    measured.faults_min = len(measured.first.faults)

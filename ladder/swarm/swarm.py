"""`run_swarm`: many seeds, in several processes, and one verdict over all of them.

A swarm passes when no seed found anything *and* it has shown something: bytes were compared, loads verified, every
common fault kind has fired, every common mark was met. All but the first is asked of swarms of at least
`SIZE_FOR_RATES` seeds only: in a smaller one a kind may well be missing by chance. What a restricted swarm (`planes`,
`kinds`, `transfer`) leaves out is not asked of it.

Who holds: the swarm holds its workers until it ends; a failure's directory is written when the failure comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.ladder.swarm.config_kinds import CONFIG_KINDS
from kvcore.ladder.swarm.draw import chosen_kinds
from kvcore.ladder.swarm.outcome import Outcome, add_counts
from kvcore.ladder.swarm.worker import BATCH, Record, Task, run_parallel
from kvcore.sim.marks import all_marks
from kvcore.sim.sometimes import report, unseen

SCHEMA = 1
SIZE_FOR_RATES = 200
ARTIFACTS_MAX = 20
PROGRESS_S = 10.0

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """Seeds from `first` on: `seeds` of them (0: no end), or as many as `seconds` allow (0.0: no end).

    `artifacts`: where failures are written.
    """

    first: int = 0
    seeds: int = 0
    seconds: float = 0.0
    jobs: int = 1
    task: Task = field(default_factory=Task)
    artifacts: Path | None = None

    def command(self, seed: int) -> str:
        """What runs one seed again."""
        task = self.task
        restricted = f" --planes {','.join(task.planes) or 'none'}" if task.planes is not None else ""
        restricted += f" --kinds {','.join(task.kinds) or 'none'}" if task.kinds is not None else ""
        planted = f" --mutant {task.mutant}" if task.mutant else ""
        copies = f" --transfer {task.transfer}" if task.transfer else ""
        return f"kvcore sim run --seed {seed}{restricted}{copies}{planted}"


@dataclass(slots=True)
class Failure:
    """One seed that found something. `directory`: what was written about it, if anything was."""

    seed: int
    oracle: str
    text: str
    directory: str = ""


@dataclass(slots=True)
class SwarmResult:
    """Sums over all seeds. `enabled` and `fired` count seeds, not events."""

    options: SwarmOptions
    seeds: int = 0
    twice: int = 0
    failures: list[Failure] = field(default_factory=list)
    enabled: dict[str, int] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    bytes_checked: int = 0
    loads_verified: int = 0
    tokens_compared: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, record: Record) -> None:
        self.seeds += 1
        self.twice += record.ran_twice
        add_counts(self.enabled, ((name, 1) for name in record.enabled))
        add_counts(self.fired, ((name, 1) for name in record.fired))
        add_counts(self.marks, record.marks)
        self.bytes_checked += record.bytes_checked
        self.loads_verified += record.loads_verified
        self.tokens_compared += record.tokens_compared
        self.cpu_s += record.cpu_s

    # ---- the verdict

    @property
    def verdict(self) -> str:
        return "fail" if self.failures or self.problems else "pass"

    @property
    def problems(self) -> list[str]:
        """What makes the swarm worthless although no seed found anything."""
        if not self.seeds:
            return ["no seed was run"]
        found = [f"{name} is 0" for name in ("bytes_checked", "tokens_compared") if not getattr(self, name)]
        if self.seeds < SIZE_FOR_RATES:
            return found
        found += [] if self.loads_verified else ["loads_verified is 0"]
        found += [f"{name} never fired" for name in self._silent()]
        return found + [f"the mark {name} was never met" for name in self._unseen()]

    def _kinds(self) -> list[str]:
        task = self.options.task
        return [kind.name for kind in chosen_kinds(task.planes, task.kinds)] + [kind.name for kind in CONFIG_KINDS]

    def _silent(self) -> list[str]:
        """Kinds that should have fired and have not."""
        task = self.options.task
        common = [kind.name for kind in chosen_kinds(task.planes, task.kinds) if kind.common]
        config = [] if task.restricted else [kind.name for kind in CONFIG_KINDS]
        return [name for name in common + config if not self.fired.get(name)]

    def _unseen(self) -> list[str]:
        return [] if self.options.task.restricted else unseen(self.marks, all_marks().values(), seeds=self.seeds)

    # ---- for readers

    @property
    def seeds_per_s(self) -> float:
        return self.seeds / self.wall_s if self.wall_s else 0.0

    @property
    def seeds_per_cpu_s(self) -> float:
        return (self.seeds + self.twice) / self.cpu_s if self.cpu_s else 0.0

    def to_json(self) -> dict[str, Any]:
        kinds = dict.fromkeys([*self._kinds(), *self.enabled])
        return {
            "schema": SCHEMA,
            "first_seed": self.options.first,
            "seeds": self.seeds,
            "failures": len(self.failures),
            "seeds_per_s": round(self.seeds_per_s, 2),
            "seeds_per_cpu_s": round(self.seeds_per_cpu_s, 2),
            "faults": {
                name: {"enabled": self.enabled.get(name, 0), "fired": self.fired.get(name, 0)} for name in kinds
            },
            "sometimes": {
                **report(self.marks),
                "unseen": unseen(self.marks, all_marks().values()),
                "counts": dict(sorted(self.marks.items())),
            },
            "bytes_checked": self.bytes_checked,
            "loads_verified": self.loads_verified,
            "tokens_compared": self.tokens_compared,
            "ran_twice": self.twice,
            "failed": [
                {"seed": each.seed, "oracle": each.oracle, "finding": each.text, "directory": each.directory}
                for each in self.failures
            ],
            "problems": self.problems,
            "reproduce": [self.options.command(each.seed) for each in self.failures],
            "verdict": self.verdict,
        }

    def lines(self) -> list[str]:
        """For people; the last line reproduces the first failure."""
        fired = sum(bool(self.fired.get(name)) for name in self._kinds())
        marks = report(self.marks)
        lines = [f"seed {each.seed}: {each.text}" for each in self.failures]
        lines += [f"problem: {problem}" for problem in self.problems]
        lines += [
            f"{self.seeds} seeds from {self.options.first} on, {self.twice} of them twice: {len(self.failures)} failed",
            f"{fired} of {len(self._kinds())} fault kinds fired, {marks['hit']} of {marks['total']} marks met",
            f"{self.tokens_compared} tokens compared, {self.bytes_checked} bytes checked,"
            f" {self.loads_verified} loads verified",
            f"{self.wall_s:.1f} s, {self.seeds_per_s:.1f} seeds/s, {self.seeds_per_cpu_s:.1f} per CPU second",
            f"verdict: {self.verdict}",
        ]
        return [*lines, *[f"reproduce: {self.options.command(each.seed)}" for each in self.failures[:1]]]


def run_swarm(options: SwarmOptions, progress: Progress | None = None) -> SwarmResult:
    """Run all seeds. Raises `ConfigError` before anything starts, for planes and kinds that do not exist."""
    chosen_kinds(options.task.planes, options.task.kinds)
    result = SwarmResult(options)
    began_s = said_s = time.monotonic()
    for record in run_parallel(_ranges(options, began_s), options.task, options.jobs):
        result.add(record)
        if record.failed is not None:
            _note_failure(result, record.failed, progress)
        now_s = time.monotonic()
        if progress is not None and now_s - said_s >= PROGRESS_S:
            said_s = now_s
            progress(f"{result.seeds} seeds, {len(result.failures)} failed, {result.seeds / (now_s - began_s):.1f}/s")
    result.failures.sort(key=lambda failure: failure.seed)
    result.wall_s = time.monotonic() - began_s
    return result


def _ranges(options: SwarmOptions, began_s: float) -> Iterator[tuple[int, int]]:
    """What is still to be run, in batches; ends when the seeds or the seconds do."""
    first = options.first
    end = first + options.seeds if options.seeds else None
    while (end is None or first < end) and (
        not options.seconds or time.monotonic() - began_s < options.seconds or first == options.first
    ):
        count = BATCH if end is None else min(BATCH, end - first)
        yield first, count
        first += count


def _note_failure(result: SwarmResult, outcome: Outcome, progress: Progress | None) -> None:
    seed, finding = outcome.case.seed, outcome.findings[0]
    failure = Failure(seed, finding.oracle, str(finding))
    result.failures.append(failure)
    artifacts = result.options.artifacts
    if artifacts is not None and len(result.failures) <= ARTIFACTS_MAX:
        failure.directory = str(_write_failure(outcome, artifacts / f"seed-{seed}"))
    if progress is not None:
        progress(f"seed {seed}: {failure.text}")
        progress(f"reproduce: {result.options.command(seed)}")


def _write_failure(outcome: Outcome, path: Path) -> Path:
    from kvcore.ladder.repro.directory import write_failure  # heavy, and only for failures

    return write_failure(outcome.case, outcome, path)

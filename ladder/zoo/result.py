"""`ZooResult`: all measurements of one run, as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvcore.ladder.zoo.measure import HARD_DENSITY_MAX, Measured

SCHEMA = 1
FIRST_CATCH_MEDIAN_MAX = 20
_HEAD = ("mutant", "kind", "caught by", "first seed", "per 1,000 seeds (95 %)", "seeds", "faults")


@dataclass(frozen=True, slots=True)
class ZooResult:
    """`whole`: every mutant of the zoo was measured, so that what holds for the zoo as a whole can be judged."""

    measured: Sequence[Measured]
    whole: bool

    @property
    def first_catch_median(self) -> float:
        """Seeds up to and including the first catch; those that were not caught are left out."""
        needed = [each.seeds_needed for each in self.measured if each.mutant.kind != "safe" and each.catches]
        return float(median(needed)) if needed else 0.0

    @property
    def problems(self) -> list[str]:
        """Why the zoo as it is does not pass."""
        found = [f"{each.mutant.name} {each.problem}" for each in self.measured if each.problem]
        if self.whole and self.first_catch_median > FIRST_CATCH_MEDIAN_MAX:
            found.append(f"the median first catch takes {self.first_catch_median:.0f} seeds")
        return found

    @property
    def verdict(self) -> str:
        return "fail" if self.problems else "pass"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "mutants": [each.to_json() for each in self.measured],
            "first_catch_median": self.first_catch_median,
            "problems": self.problems,
            "verdict": self.verdict,
        }

    def lines(self) -> Iterator[str]:
        """The table, what is not as it should be, and the verdict."""
        rows = [_HEAD, *map(_row, self.measured)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        for row in rows:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()
        yield ""
        yield from (f"PROBLEM: {problem}" for problem in self.problems)
        yield from (f"note: {each.mutant.name}: {each.mutant.note}" for each in self.measured if each.mutant.note)
        yield self._summary()

    def _summary(self) -> str:
        kinds = [each.mutant.kind for each in self.measured]
        hard = sum(each.mutant.kind == "hard" and each.density < HARD_DENSITY_MAX for each in self.measured)
        safe = sum(each.mutant.kind == "safe" and not each.catches for each in self.measured)
        caught = sum(each.catches > 0 for each in self.measured if each.mutant.kind != "safe")
        return (
            f"{caught} of {len(kinds) - kinds.count('safe')} bugs caught, median first catch after "
            f"{self.first_catch_median:.0f} seeds; {hard} hard ones; {safe} of {kinds.count('safe')} removals safe; "
            f"{sum(each.cpu_s for each in self.measured):.0f} s CPU: {self.verdict}"
        )


def _row(each: Measured) -> tuple[str, ...]:
    low, high = each.interval
    faults = "" if each.faults_first is None else str(each.faults_first)
    if each.faults_min is not None:
        faults += f" -> {each.faults_min}"
    return (
        each.mutant.name,
        each.mutant.kind,
        each.oracle or "-",
        "-" if each.first_seed is None else str(each.first_seed),
        f"{each.density:.1f} ({low:.1f}-{high:.1f})",
        str(each.seeds_run),
        faults,
    )

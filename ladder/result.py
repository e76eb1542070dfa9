"""What a climb found: per rung, per matrix cell and over the whole matrix, and its JSON form (schema 1).

Rungs 0 to 4 and the replay are passes over one workload, in many configurations; their sums are here. Rungs 5 to 8 are
cases of the swarm (`kvcore.ladder.swarm_rungs`); a `LadderResult` has their results beside the others.

A rung that did not do what it is for fails, also when every byte was right: no load on rung 3, no preemption with a
store in flight on rung 4, a hit share under its floor. `Floors` are those demands; they belong to a target, because a
small smoke run cannot ask for what the full matrix must show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from blake3 import blake3

from kvcore.ladder.swarm_rungs.result import StormResult

SCHEMA = 1

RUNG_NAMES = {
    "0": "reference",
    "1": "no cache",
    "2": "cold",
    "3": "hot from L1",
    "3b": "hot from L2",
    "4": "hot, preempted",
    "replay": "replay",
    "5": "lying, slow L2",
    "6": "hostile network",
    "7": "crashes, restarts",
    "8": "the whole swarm",
}
STORM_RUNG_FIRST, RUNG_LAST = 5, 8
"""From the first of these on, rungs are cases of the swarm."""


@dataclass(slots=True)
class RungCounts:
    """Counters of one rung. `tokens_loadable`: what a cache that forgot nothing could have loaded. `refusals`: by an
    admission that loads only what pays."""

    requests: int = 0
    tokens_compared: int = 0
    mismatches: int = 0
    loads_verified: int = 0
    stores_verified: int = 0
    cells_byte_checked: int = 0
    preemptions: int = 0
    preemptions_store_inflight: int = 0
    fences_waited: int = 0
    stores_cancelled: int = 0
    resumes_with_load: int = 0
    tokens_loaded: int = 0
    tokens_loadable: int = 0
    refusals: int = 0
    steps: int = 0

    def add(self, other: RungCounts) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def hit_share(self) -> float | None:
        """tokens loaded / tokens loadable; None where nothing was loadable."""
        return self.tokens_loaded / self.tokens_loadable if self.tokens_loadable else None


@dataclass(frozen=True, slots=True)
class Floors:
    """What a rung must at least have done to count."""

    requests: int = 1
    loads_verified: int = 0
    stores_verified: int = 0
    preemptions: int = 0
    preemptions_store_inflight: int = 0
    fences_waited: int = 0
    stores_cancelled: int = 0
    resumes_with_load: int = 0
    refusals: int = 0
    hit_share: float = 0.0

    def scaled(self, numerator: int, denominator: int) -> Floors:
        """The same demands of a climb of another size; what had to happen at all still has to happen once."""
        counts = {
            item.name: -(-getattr(self, item.name) * numerator // denominator)
            for item in fields(self)
            if item.name != "hit_share"
        }
        return replace(self, **counts)

    def unmet(self, counts: RungCounts) -> list[str]:
        """One sentence per floor that was missed."""
        found: list[str] = []
        for item in fields(self):
            wanted, got = getattr(self, item.name), getattr(counts, item.name) or 0
            if got < wanted:
                found.append(f"{item.name} is {got:.3g}, at least {wanted:.3g} is needed to prove anything")
        return found


MATRIX_CELLS_MIN = 36
MATRIX_FLOORS = Floors(preemptions_store_inflight=500, fences_waited=1, stores_cancelled=1, resumes_with_load=1)


@dataclass(slots=True)
class RungResult:
    """One rung of one cell, or the sum over cells."""

    rung: str
    counts: RungCounts = field(default_factory=RungCounts)
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "fail" if self.problems or self.counts.mismatches else "pass"

    def to_json(self) -> dict[str, Any]:
        share = self.counts.hit_share
        return {
            "rung": self.rung,
            "name": RUNG_NAMES[self.rung],
            **asdict(self.counts),
            "hit_share": None if share is None else round(share, 4),
            "verdict": self.verdict,
            "problems": list(self.problems),
        }


@dataclass(slots=True)
class CellResult:
    """One climb in one configuration. `reproduce` is a command line that runs just this cell again."""

    cell: str
    reproduce: str
    rungs: list[RungResult]
    trace_hash: str
    callbacks: int = 0
    cpu_s: float = 0.0
    workload: str = ""

    @property
    def verdict(self) -> str:
        return "pass" if self.rungs and all(rung.verdict == "pass" for rung in self.rungs) else "fail"


@dataclass(slots=True)
class LadderResult:
    """The whole run."""

    target: str
    workload: str
    cells: list[CellResult]
    trace_hash: str
    seed: int
    storms: list[StormResult] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """An empty run has shown nothing, and fails."""
        verdicts = [cell.verdict for cell in self.cells] + [storm.verdict for storm in self.storms]
        good = verdicts and all(verdict == "pass" for verdict in verdicts) and not self.shortfalls
        return "pass" if good else "fail"

    @property
    def shortfalls(self) -> list[str]:
        """What a climb in many configurations must have met somewhere, though not in each of them."""
        rung4 = [rung.counts for rung in self.totals() if rung.rung == "4"]
        if not rung4 or len(self.cells) < MATRIX_CELLS_MIN:
            return []
        missed = MATRIX_FLOORS.unmet(rung4[0])
        return [f"over all configurations, rung 4: {text}" for text in missed]

    def totals(self) -> list[RungResult]:
        """Rungs summed over the cells, in climbing order."""
        total: dict[str, RungResult] = {}
        for rung in (rung for cell in self.cells for rung in cell.rungs):
            into = total.setdefault(rung.rung, RungResult(rung.rung))
            into.counts.add(rung.counts)
            into.problems.extend(rung.problems)
        return [total[rung] for rung in RUNG_NAMES if rung in total]

    def to_json(self) -> dict[str, Any]:
        totals = self.totals()
        replay = [rung.to_json() for rung in totals if rung.rung == "replay"]
        return {
            "schema": SCHEMA,
            "target": self.target,
            "workload": self.workload,
            "seed": self.seed,
            "rungs": [
                *[rung.to_json() for rung in totals if rung.rung != "replay"],
                *[storm.to_json() for storm in self.storms],
            ],
            "replay": replay[0] if replay else {},
            "cells": [cell_to_json(cell) for cell in self.cells],
            "trace_hash": self.trace_hash,
            "verdict": self.verdict,
        }


def cell_to_json(cell: CellResult) -> dict[str, Any]:
    return {
        "cell": cell.cell,
        "verdict": cell.verdict,
        "rungs": [rung.to_json() for rung in cell.rungs],
        "trace_hash": cell.trace_hash,
        "callbacks": cell.callbacks,
        "cpu_s": round(cell.cpu_s, 3),
        "workload": cell.workload,
        "reproduce": cell.reproduce,
    }


def cell_from_json(data: dict[str, Any]) -> CellResult:
    """The inverse of `cell_to_json`: worker processes and test reports send results as JSON."""
    names = [item.name for item in fields(RungCounts)]
    rungs = [
        RungResult(rung["rung"], RungCounts(**{name: rung[name] for name in names}), list(rung["problems"]))
        for rung in data["rungs"]
    ]
    return CellResult(
        data["cell"], data["reproduce"], rungs, data["trace_hash"], data["callbacks"], data["cpu_s"], data["workload"]
    )


def combined_hash(cells: Sequence[CellResult], storms: Sequence[StormResult] = ()) -> str:
    """One hash over the trace hashes of the cells and storm rungs, in the order given. Empty where runs cannot be
    repeated."""
    hashes = [(cell.cell, cell.trace_hash) for cell in cells] + [(storm.rung, storm.trace_hash) for storm in storms]
    if not any(trace for _, trace in hashes):
        return ""
    return blake3("".join(f"{name}={trace};" for name, trace in hashes).encode()).hexdigest()[:32]


def failures(cells: Iterable[CellResult]) -> list[str]:
    """One line per problem, each naming its cell and rung."""
    return [
        f"{cell.cell}, rung {rung.rung} ({RUNG_NAMES[rung.rung]}): {problem}"
        for cell in cells
        for rung in cell.rungs
        for problem in rung.problems or (["a token differs from the reference"] if rung.counts.mismatches else [])
    ]


def parse_rungs(text: str) -> tuple[str, ...]:
    """`0-4`, `0-2`, `3`, `0-8`, `5`: the rungs to climb. Rungs up to 4 always come with rung 0, the reference of the
    others; rungs 3 and 4 come with rung 2, which fills the cache that they are about. The storm rungs need none of
    them.

    Raises ValueError with a sentence for anything else.
    """
    chosen: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdigit() or (dash and not high.isdigit()):
            raise ValueError(f"rungs are numbers from 0 to {RUNG_LAST}, such as 0-4 or 0,2; {text!r} is not")
        first, last = int(low), int(high) if dash else int(low)
        if not 0 <= first <= last <= RUNG_LAST:
            raise ValueError(f"rung {part.strip()!r} does not exist; the ladder has the rungs 0 to {RUNG_LAST}")
        chosen.update(range(first, last + 1))
    if min(chosen) < STORM_RUNG_FIRST:
        chosen.add(0)
    if chosen & {3, 4}:
        chosen.add(2)
    return expand_rungs(sorted(chosen))


def expand_rungs(numbers: Sequence[int]) -> tuple[str, ...]:
    """The passes behind rung numbers: rung 3 is climbed twice, and rung 4 is followed by the replay. A storm rung is
    called by its number alone."""
    passes: list[str] = []
    for number in numbers:
        passes.append(str(number))
        passes.extend({3: ["3b"], 4: ["replay"]}.get(number, []))
    return tuple(passes)


def split_rungs(passes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(passes over one workload, storm rungs)"""
    storms = tuple(name for name in passes if name.isdigit() and int(name) >= STORM_RUNG_FIRST)
    return tuple(name for name in passes if name not in storms), storms

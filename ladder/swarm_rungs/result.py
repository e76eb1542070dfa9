"""What a storm rung came to: sums over its cases, what it must have shown, and its row in the JSON of the ladder.

A rung passes when no case found anything *and* it did what it is for. So it has floors, given per hundred cases, every
fault kind of its planes must have taken effect, no living world may have needed more than `CONVERGE_NS_MAX` to come to
rest, and no second workload may have lost more than `SHARE_LOSS_MAX` of its hit share. A rung in which nothing broke,
nothing died or nothing was loaded proves nothing, and fails.

This module knows the words of the swarm (kinds, marks), but imports none of it: results are also read where no
simulator is installed.

Nothing is held; a result is a value once its last case has been added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from blake3 import blake3

CONVERGE_NS_MAX = 60_000_000_000
SHARE_LOSS_MAX = 0.05
_NS_PER_MS = 1_000_000

_DEATHS = {
    "deaths_server": "process.server_died",
    "deaths_scheduler": "process.scheduler_died",
    "deaths_worker": "process.worker_died",
    "deaths_engine": "process.all_died",
    "deaths_in_recovery": "process.died_recovering",
    "deaths_twice": "process.died_twice",
}
"""Counters and the marks that they are read from."""


class CaseRecord(Protocol):
    """What is read of one case (`kvcore.ladder.swarm.worker.Record`)."""

    seed: int
    trace_hash: str
    enabled: dict[str, int]
    fired: dict[str, int]
    marks: dict[str, int]
    bytes_checked: int
    loads_verified: int
    tokens_compared: int
    converge_ns: int
    share_loss: float
    cpu_s: float
    ran_twice: bool
    failed: Any


@dataclass(slots=True)
class StormCounts:
    """Counters of one rung. Deaths are those of cases without a finding: whatever died, all was served afterwards.

    `effects`: of faults, each time. `cases_hit`: cases in which a fault took effect. `converged`: cases that came to
    rest after the faults. `shares_judged`: cases whose second workload was held against a run without faults.
    """

    cases: int = 0
    cases_of_one_kind: int = 0
    cases_twice: int = 0
    cases_hit: int = 0
    effects: int = 0
    tokens_compared: int = 0
    loads_verified: int = 0
    bytes_checked: int = 0
    deaths_server: int = 0
    deaths_scheduler: int = 0
    deaths_worker: int = 0
    deaths_engine: int = 0
    deaths_in_recovery: int = 0
    deaths_twice: int = 0
    converged: int = 0
    shares_judged: int = 0

    @property
    def deaths(self) -> int:
        """Of any process."""
        return self.deaths_server + self.deaths_scheduler + self.deaths_worker + self.deaths_engine


@dataclass(frozen=True, slots=True)
class StormFloors:
    """What a hundred cases must at least have shown. A rung of another size owes its share, and at least one."""

    cases_hit: int = 60
    effects: int = 100
    tokens_compared: int = 1_000
    loads_verified: int = 500
    bytes_checked: int = 1_000_000
    deaths_server: int = 0
    deaths_scheduler: int = 0
    deaths_worker: int = 0
    deaths_engine: int = 0
    deaths_in_recovery: int = 0
    deaths_twice: int = 0
    converged: int = 95
    shares_judged: int = 40

    def unmet(self, counts: StormCounts) -> list[str]:
        """One sentence per floor that was missed."""
        found: list[str] = []
        for item in fields(self):
            wanted = -(-getattr(self, item.name) * counts.cases // 100)
            got = getattr(counts, item.name)
            if got < wanted:
                found.append(f"{item.name} is {got}, at least {wanted} is needed to prove anything")
        return found


@dataclass(frozen=True, slots=True)
class StormFailure:
    """One case that found something. `reproduce`: the command line. `directory`: what was written about it, if any."""

    seed: int
    oracle: str
    finding: str
    reproduce: str
    directory: str = ""


@dataclass(slots=True)
class StormResult:
    """One rung. `kinds`: those that must take effect; `marks_wanted`: the rare states that must be met, if any.

    `reproduce` runs the whole rung again. `faults`: per kind the cases that had it, the cases in which it took effect,
    and how often it did; `marks`: per rare state the cases that met it.
    """

    rung: str
    name: str
    planes: tuple[str, ...]
    reproduce: str
    kinds: tuple[str, ...] = ()
    floors: StormFloors = field(default_factory=StormFloors)
    marks_total: int = 0
    marks_wanted: tuple[str, ...] = ()
    counts: StormCounts = field(default_factory=StormCounts)
    faults: dict[str, list[int]] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    failures: list[StormFailure] = field(default_factory=list)
    converge_ns_max: int = 0
    share_loss_max: float = 0.0
    cpu_s: float = 0.0
    hashes: dict[int, str] = field(default_factory=dict)
    known_hash: str = ""
    unmet: list[str] | None = None

    # ---- adding up

    def add(self, record: CaseRecord, *, of_one_kind: bool) -> None:
        """Count one case. What was found in it is added by whoever can say how to reproduce it."""
        counts = self.counts
        counts.cases += 1
        counts.cases_of_one_kind += of_one_kind
        counts.cases_twice += record.ran_twice
        self._add_faults(record)
        for name in ("tokens_compared", "loads_verified", "bytes_checked"):
            setattr(counts, name, getattr(counts, name) + getattr(record, name))
        for name in record.marks:
            self.marks[name] = self.marks.get(name, 0) + 1
        self.cpu_s += record.cpu_s
        self.hashes[record.seed] = record.trace_hash
        if record.failed is None:
            self._add_survival(record)

    def _add_faults(self, record: CaseRecord) -> None:
        ours = {kind: record.fired.get(kind, 0) for kind in record.enabled if not kind.startswith("config.")}
        for kind, effects in ours.items():
            row = self.faults.setdefault(kind, [0, 0, 0])
            row[0] += 1
            row[1] += bool(effects)
            row[2] += effects
        self.counts.cases_hit += any(ours.values())
        self.counts.effects += sum(ours.values())

    def _add_survival(self, record: CaseRecord) -> None:
        for name, mark in _DEATHS.items():
            setattr(self.counts, name, getattr(self.counts, name) + record.marks.get(mark, 0))
        if record.converge_ns >= 0:
            self.counts.converged += 1
            self.converge_ns_max = max(self.converge_ns_max, record.converge_ns)
        if record.share_loss >= 0:
            self.counts.shares_judged += 1
            self.share_loss_max = max(self.share_loss_max, record.share_loss)

    def close(self) -> None:
        """All cases are there: only now can be said what is missing."""
        self.unmet = [*self._empty(), *self.floors.unmet(self.counts), *self._missing()]

    def _empty(self) -> Iterable[str]:
        return [] if self.counts.cases else ["no case was run"]

    def _missing(self) -> Iterable[str]:
        yield from (f"{kind} never took effect" for kind in self.silent)
        yield from (f"the rare state {name} was never met" for name in self.marks_wanted if not self.marks.get(name))
        if self.converge_ns_max > CONVERGE_NS_MAX:
            yield f"a world came to rest {self.converge_ns_max / 1e9:.1f} s after the faults, 60 s are allowed"
        if self.share_loss_max > SHARE_LOSS_MAX:
            yield f"a second workload lost {100 * self.share_loss_max:.1f} points of its hit share, 5 are allowed"

    # ---- the verdict

    @property
    def silent(self) -> list[str]:
        """Kinds that have not taken effect so far."""
        return [kind for kind in self.kinds if not self.faults.get(kind, [0, 0])[1]]

    @property
    def problems(self) -> list[str]:
        """What makes the rung worthless although no case found anything; the whole rung must be over."""
        return ["the rung did not end"] if self.unmet is None else self.unmet

    @property
    def verdict(self) -> str:
        return "fail" if self.failures or self.problems else "pass"

    @property
    def trace_hash(self) -> str:
        """Over the traces of all cases, in the order of their seeds."""
        if self.known_hash:
            return self.known_hash
        text = "".join(f"{seed}={trace};" for seed, trace in sorted(self.hashes.items()))
        return blake3(text.encode()).hexdigest()[:32]

    # ---- JSON

    def to_json(self) -> dict[str, Any]:
        return {
            "rung": self.rung,
            "name": self.name,
            "planes": list(self.planes),
            **asdict(self.counts),
            "deaths": self.counts.deaths,
            "kinds": {"fired": len(self.kinds) - len(self.silent), "total": len(self.kinds)},
            "faults": {kind: _fault_row(self.faults.get(kind, [0, 0, 0])) for kind in self._all_kinds()},
            "sometimes": {"hit": len(self.marks), "total": self.marks_total, "cases": dict(sorted(self.marks.items()))},
            "converge_ms_max": round(self.converge_ns_max / _NS_PER_MS, 3),
            "hit_share_loss_max": round(self.share_loss_max, 4),
            "cpu_s": round(self.cpu_s, 3),
            "trace_hash": self.trace_hash,
            "failures": [asdict(failure) for failure in self.failures],
            "problems": self.problems,
            "reproduce": self.reproduce,
            "verdict": self.verdict,
        }

    def _all_kinds(self) -> Iterable[str]:
        return dict.fromkeys([*self.kinds, *self.faults])


def _fault_row(row: list[int]) -> dict[str, int]:
    return {"enabled": row[0], "fired": row[1], "effects": row[2]}


def storm_from_json(data: Mapping[str, Any]) -> StormResult:
    """The inverse of `to_json`, up to the traces of single cases: enough for tables."""
    faults = {kind: [row["enabled"], row["fired"], row["effects"]] for kind, row in data["faults"].items()}
    return StormResult(
        data["rung"],
        data["name"],
        tuple(data["planes"]),
        data["reproduce"],
        kinds=tuple(list(faults)[: data["kinds"]["total"]]),
        marks_total=data["sometimes"]["total"],
        counts=StormCounts(**{item.name: data[item.name] for item in fields(StormCounts)}),
        faults=faults,
        marks=dict(data["sometimes"]["cases"]),
        failures=[StormFailure(**failure) for failure in data["failures"]],
        converge_ns_max=round(data["converge_ms_max"] * _NS_PER_MS),
        share_loss_max=data["hit_share_loss_max"],
        cpu_s=data["cpu_s"],
        known_hash=data["trace_hash"],
        unmet=list(data["problems"]),
    )

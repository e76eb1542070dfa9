"""`Outcome`: what one case came to.

A finding carries the oracle that made it, so that a shrunk case can be asked for the *same* failure: `oracle` is the
first finding's. An outcome is a value and can be sent between processes as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from kvcore.ladder.swarm.case import Case

_FINDING = re.compile(r"\[(?P<oracle>[^\]]+)\] at (?P<time>\d+) ns: (?P<text>.*)", re.DOTALL)


class Finding(msgspec.Struct, frozen=True):
    """What an oracle saw, and when (virtual time since the world began)."""

    oracle: str
    time_ns: int
    text: str

    @classmethod
    def parse(cls, line: str, time_ns: int) -> Finding:
        """From a line of `Findings`; one without a time was seen at the end."""
        match = _FINDING.fullmatch(line)
        if match is None:
            return cls("more", time_ns, line)
        return cls(match["oracle"], int(match["time"]), match["text"])

    def __str__(self) -> str:
        return f"[{self.oracle}] at {self.time_ns} ns: {self.text}"


class Outcome(msgspec.Struct):
    """`fired` and `enabled`: fault kinds; `marks`: "sometimes" marks, each with how often. `notes`: what was not judged
    and why. `ties`: choices other than first in, first out, where the run was asked to record them.

    `converge_ns`: from the end of the faults until all was served and at rest. `hit_share`: of the second workload;
    `share_loss`: by how much it is below that of a run without faults. -1: the run did not come so far, or it could not
    be judged.
    """

    case: Case
    findings: list[Finding] = []
    fired: dict[str, int] = {}
    enabled: dict[str, int] = {}
    marks: dict[str, int] = {}
    notes: list[str] = []
    bytes_checked: int = 0
    cells_checked: int = 0
    loads_verified: int = 0
    stores_verified: int = 0
    tokens_compared: int = 0
    converge_ns: int = -1
    hit_share: float = -1.0
    share_loss: float = -1.0
    trace_hash: str = ""
    events: int = 0
    callbacks: int = 0
    time_ns: int = 0
    cpu_s: float = 0.0
    ties: dict[int, int] = {}

    @property
    def verdict(self) -> str:
        return "fail" if self.findings else "pass"

    @property
    def oracle(self) -> str:
        """Of the first finding; "" when there is none."""
        return self.findings[0].oracle if self.findings else ""

    def to_json(self) -> str:
        return msgspec.json.encode({**msgspec.structs.asdict(self), "verdict": self.verdict}).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Outcome:
        return msgspec.json.decode(text, type=cls)

    def lines(self) -> list[str]:
        """For people."""
        fired = ", ".join(f"{kind} {count}" for kind, count in sorted(self.fired.items())) or "none"
        return [
            *map(str, self.findings),
            *[f"note: {note}" for note in self.notes],
            f"faults fired: {fired}",
            f"{self.tokens_compared} tokens compared, {self.bytes_checked} bytes checked,"
            f" {self.loads_verified} loads verified",
            f"{self.time_ns / 1e6:.1f} ms of virtual time, {self.callbacks} callbacks, {self.cpu_s:.3f} s CPU",
            f"trace {self.trace_hash}",
        ]


def add_counts(total: dict[str, int], more: Iterable[tuple[str, int]] | Mapping[str, int]) -> None:
    """Add counters up in place."""
    for name, count in more.items() if isinstance(more, Mapping) else more:
        total[name] = total.get(name, 0) + count

"""What a storm has done, and what it must have done to prove anything.

A storm that has hit nothing passes for the wrong reason. So everything is counted as it happens, from outside of the
code on trial (the wire, the kernel, the servers' `/status`), and `unmet` names what is missing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvcore.ladder.storm.forecast import Event
from kvcore.ladder.storm.tap import Open

PROBLEMS_MAX = 20


@dataclass(frozen=True, slots=True)
class Happened:
    """An event as it came. `hit`: what was under way then. `in_moment`: the moment it waited for did come."""

    event: Event
    second: float
    in_moment: bool
    hit: Open
    note: str = ""

    def __str__(self) -> str:
        missed = "" if self.in_moment else " (its moment did not come)"
        note = f"; {self.note}" if self.note else ""
        return f"{self.second:6.1f} s {self.event.kind} #{self.event.target} hit {self.hit}{missed}{note}"


@dataclass(slots=True)
class Record:
    """One storm's."""

    happened: list[Happened] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def event(self, happened: Happened) -> None:
        self.happened.append(happened)
        kind, hit = happened.event.kind, happened.hit
        self.counts[kind] += 1
        if kind in ("server.kill", "server.power", "worker.kill"):
            self.counts["kills while storing"] += hit.stores > 0
            self.counts["kills while loading"] += hit.reads > 0
        if kind.startswith("link."):
            self.counts["breaks while talking"] += hit.unanswered > 0

    def problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    def unmet(self, names: tuple[str, ...]) -> list[str]:
        """Those of them that never happened, each once."""
        return [name for name in dict.fromkeys(names) if not self.counts[name]]


MUST_HAPPEN = (
    "requests answered",
    "tokens compared",
    "layers byte-checked",
    "kills while storing",
    "kills while loading",
    "breaks while talking",
    "loads broken",
    "cells without room in L1",
    "connections that came again",
    "clients that met another life of a server",
    "engines that were killed",
    "requests asked for again",
    "records torn",
    "torn records refused",
    "chunks loaded and checked",
)

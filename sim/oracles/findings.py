"""`Findings`: where oracles put what they saw. One per run; the rungs read it after every pass."""

from __future__ import annotations

from collections.abc import Callable

from kvcore.ports import NullTracer, Tracer
from kvcore.sim.sometimes import Sometimes


class Findings:
    """Violations with the virtual time at which they were seen, and the counters that show an oracle has looked at all.

    `loads_verified`: cells found right in engine pages after a load. `stores_verified`: cells found right when
    published by a worker. `cells_byte_checked`: every comparison of a cell's bytes, those included. `tokens_taken`:
    of promises, by the present life of the engine; `loads_short`: its loads that gave less. `sometimes`: rare states
    that were met.

    Each finding is also an event of the run's `tracer`, so that a chart can mark the step.
    """

    def __init__(self, now_ns: Callable[[], int], limit: int = 20, tracer: Tracer | None = None) -> None:
        self.now_ns = now_ns
        self._limit = limit
        self._tracer: Tracer = tracer if tracer is not None else NullTracer()
        self.violations: list[str] = []
        self.violation_count = 0
        self.loads_verified = 0
        self.stores_verified = 0
        self.cells_byte_checked = 0
        self.tokens_taken = 0
        self.loads_short = 0
        self.sometimes = Sometimes()

    def report(self, oracle: str, text: str) -> None:
        """An oracle is sure that something is wrong."""
        self.violation_count += 1
        self._tracer.event("finding", oracle, text)
        if len(self.violations) < self._limit:
            self.violations.append(f"[{oracle}] at {self.now_ns()} ns: {text}")

    def take(self) -> list[str]:
        """What was found since the last call; the first few in words, the rest as a number."""
        found, self.violations = self.violations, []
        hidden, self.violation_count = self.violation_count - len(found), 0
        return [*found, f"... and {hidden} more"] if hidden else found

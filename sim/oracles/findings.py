"""`Findings`: where oracles put what they saw. One per run; the rungs read it after every pass."""

from __future__ import annotations

from collections.abc import Callable


class Findings:
    """Violations with the virtual time at which they were seen, and the counters that show an oracle has looked at all.

    `loads_verified`: cells found right in engine pages after a load. `stores_verified`: cells found right when
    published by a worker. `cells_byte_checked`: every comparison of a cell's bytes, those included.
    """

    def __init__(self, now_ns: Callable[[], int], limit: int = 20) -> None:
        self._now_ns = now_ns
        self._limit = limit
        self.violations: list[str] = []
        self.violation_count = 0
        self.loads_verified = 0
        self.stores_verified = 0
        self.cells_byte_checked = 0

    def report(self, oracle: str, text: str) -> None:
        """An oracle is sure that something is wrong."""
        self.violation_count += 1
        if len(self.violations) < self._limit:
            self.violations.append(f"[{oracle}] at {self._now_ns()} ns: {text}")

    def take(self) -> list[str]:
        """What was found since the last call; the first few in words, the rest as a number."""
        found, self.violations = self.violations, []
        hidden, self.violation_count = self.violation_count - len(found), 0
        return [*found, f"... and {hidden} more"] if hidden else found

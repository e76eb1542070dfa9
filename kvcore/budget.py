"""Admission by bytes, first come first served. Pure.

Theory of operation
-------------------
A lookup that wants to load asks for the worst case of what it may load. It is admitted when that many bytes are free
and nobody waits before it; a demand above the whole capacity is cut to the capacity (its plan then has to fit the
grant). After planning the grant shrinks to what is really loaded, and from then on it is given back cell by cell:
when a load failed, when the last reader of a loaded cell has ended, when the object went away or became durable.

States of a grant:   waiting --admit--> held --give_back to 0--> spent
                     waiting --withdraw--> gone

1. `request` makes a grant. Zero bytes never wait and never overtake anybody: they take nothing from anyone.
2. `revise` lowers what a waiting grant asks for (somebody else began to load the same cells). Never raises it.
3. `admit` returns the grants that can run now, strictly in order of arrival; a small demand behind a large one waits,
   or the large one would starve.
4. Every change that frees bytes is followed by the owner of the budget calling `admit`.

Rejected: counting requests instead of bytes (groups and prompts differ by orders of magnitude), and letting a request
add to its grant later (hold and wait: two requests could each hold what the other needs).

Who holds: the lookup job holds its grant until it has planned; then the loads and the unread cells hold shares of it.
Who announces: `admit`. Who frees: `give_back` and `withdraw`, each exactly once per byte (asserted).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.errors import ConfigError


class Grant:
    """Bytes asked for (`waiting`) or held by one lookup. `limit_bytes` is what its plan may load."""

    __slots__ = ("bytes_held", "bytes_wanted", "waiting")

    def __init__(self, bytes_wanted: int) -> None:
        self.bytes_wanted = bytes_wanted
        self.bytes_held = 0
        self.waiting = True

    @property
    def limit_bytes(self) -> int:
        assert not self.waiting
        return self.bytes_held


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    bytes_capacity: int
    bytes_used: int
    bytes_used_max: int
    waiting: int
    admitted: int
    waited: int
    cut: int


class ByteBudget:
    """See the module text."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ConfigError(f"a prefetch budget of {capacity_bytes} bytes cannot work; give 0 or more")
        self.capacity_bytes = capacity_bytes
        self._used = 0
        self._used_max = 0
        self._queue: dict[Grant, None] = {}
        self._admitted = 0
        self._waited = 0
        self._cut = 0

    @property
    def bytes_used(self) -> int:
        return self._used

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def request(self, bytes_wanted: int) -> Grant:
        """A new grant; `grant.waiting` tells whether it has to wait for `admit`."""
        assert bytes_wanted >= 0
        grant = Grant(min(bytes_wanted, self.capacity_bytes))
        self._cut += bytes_wanted > self.capacity_bytes
        if grant.bytes_wanted == 0 or (not self._queue and self._fits(grant)):
            self._hold(grant)
        else:
            self._queue[grant] = None
            self._waited += 1
        return grant

    def revise(self, grant: Grant, bytes_wanted: int) -> None:
        """Lower what a waiting grant asks for; the caller calls `admit` afterwards."""
        assert grant in self._queue
        grant.bytes_wanted = min(grant.bytes_wanted, bytes_wanted)
        assert grant.bytes_wanted >= 0

    def admit(self) -> list[Grant]:
        """The grants that hold bytes from now on: those that cost nothing, and the head of the line while it fits."""
        ready: list[Grant] = [grant for grant in self._queue if grant.bytes_wanted == 0]
        for grant in ready:
            self._leave(grant)
        while self._queue:
            head = next(iter(self._queue))
            if not self._fits(head):
                break
            self._leave(head)
            ready.append(head)
        return ready

    def withdraw(self, grant: Grant) -> None:
        """Stop waiting."""
        assert grant in self._queue
        assert grant.bytes_held == 0
        del self._queue[grant]
        grant.waiting = False

    def give_back(self, grant: Grant, size: int) -> None:
        assert not grant.waiting
        assert 0 <= size <= grant.bytes_held, "bytes given back twice"
        grant.bytes_held -= size
        self._used -= size
        assert self._used >= 0

    def shrink(self, grant: Grant, keep_bytes: int) -> None:
        """Give back what the plan does not load."""
        assert keep_bytes <= grant.bytes_held, "a plan above its grant"
        self.give_back(grant, grant.bytes_held - keep_bytes)

    def statistics(self) -> BudgetStatistics:
        return BudgetStatistics(
            self.capacity_bytes, self._used, self._used_max, len(self._queue), self._admitted, self._waited, self._cut
        )

    def _fits(self, grant: Grant) -> bool:
        return self._used + grant.bytes_wanted <= self.capacity_bytes

    def _leave(self, grant: Grant) -> None:
        del self._queue[grant]
        self._hold(grant)

    def _hold(self, grant: Grant) -> None:
        assert grant.waiting
        assert self._fits(grant)
        grant.waiting = False
        grant.bytes_held = grant.bytes_wanted
        self._used += grant.bytes_held
        self._used_max = max(self._used_max, self._used)
        self._admitted += 1

"""Tie policies: which of the entries that are ready at one instant runs next.

A policy answers one question, `choose(ready) -> index`, and is asked only when at least two entries are ready. `ready`
is in order of arrival, so index 0 is always "first in, first out" and a recorded list of (tie number, index) replays
a schedule on any policy's run. That is what the shrinker works on: first in, first out except at these ties.

    RandomTies     uniform among what is ready. Not random keys in a heap: an entry with a bad key would starve.
    FifoTies       first in, first out: what asyncio promises and what hides races.
    PriorityTies   random priorities per task with few change points (Burckhardt et al., "A randomized scheduler with
                   probabilistic guarantees of finding bugs", ASPLOS 2010): finds races that need few but well-placed
                   switches. The ready entry of the highest priority runs; at each of `change_points` ties whoever
                   would run falls below everybody else. Since the length of a run is not known, the change points are
                   uniform in magnitude. There is one more every `PATIENCE` ties, so that tasks that poll at one
                   instant cannot starve the rest for ever.
    ReplayTies     first in, first out except at the ties named.

A policy is held by its loop and is good for one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcore.sim.streams import RandomStream

PATIENCE = 5_000
_CHANGE_BITS_MIN = 3
_CHANGE_BITS_MAX = 16


class ReadyEntry(Protocol):
    """What a policy may know of an entry."""

    @property
    def sequence(self) -> int: ...

    @property
    def actor(self) -> int | None:
        """The sequence number of the task that the entry belongs to; None: a plain callback."""
        ...


class TiePolicy(Protocol):
    def choose(self, ready: Sequence[ReadyEntry]) -> int: ...


class RandomTies:
    """Uniform among what is ready."""

    __slots__ = ("_getrandbits",)

    def __init__(self, stream: RandomStream) -> None:
        self._getrandbits = stream.getrandbits

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        count = len(ready)
        bits = (count - 1).bit_length()
        index = self._getrandbits(bits)
        while index >= count:
            index = self._getrandbits(bits)
        return index


class FifoTies:
    """First in, first out."""

    __slots__ = ()

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        return 0


class PriorityTies:
    """Random task priorities, changed at few points."""

    __slots__ = ("_changes", "_floor", "_known", "_priorities", "_stream", "ties")

    def __init__(self, stream: RandomStream, change_points: int) -> None:
        self._stream = stream
        self._priorities: dict[int, int] = {}  # by actor
        self._known: dict[int, int] = {}  # by entry, while it is ready: finding an entry's task is slow
        self._changes = {
            1 + stream.getrandbits(stream.randint(_CHANGE_BITS_MIN, _CHANGE_BITS_MAX)) for _ in range(change_points)
        }  # asked only for membership, never iterated
        self._floor = 0
        self.ties = 0

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        index = self._highest(ready)
        self.ties += 1
        if self.ties in self._changes or self.ties % PATIENCE == 0:
            self._demote(ready[index].actor)
            index = self._highest(ready)
        self._known.pop(ready[index].sequence)
        return index

    def _highest(self, ready: Sequence[ReadyEntry]) -> int:
        known = self._known
        best, best_priority = 0, self._floor - 1
        for index, entry in enumerate(ready):
            priority = known.get(entry.sequence)
            if priority is None:
                priority = known[entry.sequence] = self._priority(entry.actor)
            if priority > best_priority:
                best, best_priority = index, priority
        return best

    def _priority(self, actor: int | None) -> int:
        """A plain callback (a timer, a delivery) has no identity to keep a priority for: it draws its own."""
        if actor is None:
            return self._stream.getrandbits(32)
        priority = self._priorities.get(actor)
        if priority is None:
            priority = self._priorities[actor] = self._stream.getrandbits(32)
        return priority

    def _demote(self, actor: int | None) -> None:
        if actor is not None:
            self._floor -= 1
            self._priorities[actor] = self._floor
        self._known.clear()


class ReplayTies:
    """First in, first out, except that at tie number `k` the entry at `exceptions[k]` runs."""

    __slots__ = ("_exceptions", "ties")

    def __init__(self, exceptions: Mapping[int, int]) -> None:
        self._exceptions = dict(exceptions)
        self.ties = 0

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        index = self._exceptions.get(self.ties, 0)
        self.ties += 1
        return min(index, len(ready) - 1)


class RecordingTies:
    """Any policy, with every choice other than first in, first out written down for `ReplayTies`."""

    __slots__ = ("_inner", "exceptions", "ties")

    def __init__(self, inner: TiePolicy) -> None:
        self._inner = inner
        self.exceptions: dict[int, int] = {}
        self.ties = 0

    def choose(self, ready: Sequence[ReadyEntry]) -> int:
        index = self._inner.choose(ready)
        if index:
            self.exceptions[self.ties] = index
        self.ties += 1
        return index


def make_policy(schedule: str, stream: RandomStream, change_points: int) -> TiePolicy:
    """The policy named "random", "fifo" or "priority"."""
    if schedule == "random":
        return RandomTies(stream)
    if schedule == "fifo":
        return FifoTies()
    assert schedule == "priority", schedule
    return PriorityTies(stream, change_points)

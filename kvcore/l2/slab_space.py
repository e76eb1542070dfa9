"""Free room in a row of units: who gets which run of them. Pure; its user guards it with a lock.

Theory of operation
-------------------
Units (pages of a slab, slots of an index) are numbered through. They lie in *regions* of equal length (one file each),
and a run never crosses the end of a region, so that one run is always one vectored read or write.

 1. `take(n)` gives one run: a free one of exactly n units if there is one, else what follows the run given last, so
    that records written one after the other lie side by side and can be read with one call, else the front of the
    longest one. Where all records are equally long, as in one model's cache, this never splinters anything.
 2. It finds none: `take_scattered(n)` puts n units together from the longest runs. So room that is free can always be
    used, whatever the mixture of sizes was: a store that has evicted enough bytes has enough room.
 3. `give_back` joins a run with its free neighbours.

Free runs stand in bins by length; a heap of the lengths that have a bin finds the longest in O(log lengths). A length
stands in the heap once, and one whose bin is empty is dropped when it surfaces.

Rejected: slots of one size class per slab (room freed in one class is lost to the others until a whole slab is free);
first fit over a bitmap (each search walks the full part of a full store); moving records together (two writers for
bytes that somebody may be reading).

Who holds: a run belongs to whoever took it, until `give_back`. Giving back what is free is an assertion.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple


class Run(NamedTuple):
    start: int
    count: int  # type: ignore[assignment]  # hides `tuple.count`, which nobody asks of a run

    @property
    def end(self) -> int:
        return self.start + self.count


class Space:
    """See the module text. Empty at first: `give_back` is also how room comes in."""

    def __init__(self, region_units: int) -> None:
        assert region_units > 0
        self.region_units = region_units
        self.free_units = 0
        self._count_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}  # end of a free run -> its start
        self._bins: dict[int, dict[int, None]] = {}
        self._longest: list[int] = []  # negated lengths
        self._in_heap: set[int] = set()
        self._cursor = 0  # behind the run that was given last

    def __iter__(self) -> Iterator[Run]:
        """The free runs, in order (tests, oracles)."""
        return iter(sorted(Run(start, count) for start, count in self._count_at.items()))

    def take(self, count: int) -> Run | None:
        """One run of exactly `count` units, or None: no free run is that long."""
        assert count > 0
        following = self._count_at.get(self._cursor, 0)
        if count not in self._bins and following > count:
            return self._cut(self._cursor, following, count)
        length = count if count in self._bins else self._longest_length()
        if length < count:
            return None
        return self._cut(next(iter(self._bins[length])), length, count)

    def take_scattered(self, count: int) -> tuple[Run, ...] | None:
        """`count` units in as few runs as the longest ones allow, or None: so many are not free."""
        if count > self.free_units:
            return None
        runs: list[Run] = []
        while count > 0:
            length = self._longest_length()
            runs.append(self._cut(next(iter(self._bins[length])), length, min(count, length)))
            count -= runs[-1].count
        return tuple(runs)

    def give_back(self, run: Run) -> None:
        """Free a run, or add a region (or a part of one) that was not there before."""
        assert run.count > 0
        assert run.start // self.region_units == (run.end - 1) // self.region_units, "a run lies within one region"
        assert run.start not in self._count_at, "room is given back once"
        start, end = run.start, run.end
        before = self._start_before.get(start)
        if before is not None and start % self.region_units:
            self._remove(before)
            start = before
        after = self._count_at.get(end)
        if after is not None and end % self.region_units:
            self._remove(end)
            end += after
        self._insert(start, end - start)

    def _cut(self, start: int, length: int, count: int) -> Run:
        """Take the front of the free run at `start`."""
        self._remove(start)
        if length > count:
            self._insert(start + count, length - count)
        self._cursor = start + count
        return Run(start, count)

    def _longest_length(self) -> int:
        while self._longest and -self._longest[0] not in self._bins:
            self._in_heap.discard(-heappop(self._longest))
        return -self._longest[0] if self._longest else 0

    def _insert(self, start: int, count: int) -> None:
        self._count_at[start] = count
        self._start_before[start + count] = start
        self._bins.setdefault(count, {})[start] = None
        self.free_units += count
        if count not in self._in_heap:
            self._in_heap.add(count)
            heappush(self._longest, -count)

    def _remove(self, start: int) -> None:
        count = self._count_at.pop(start)
        del self._start_before[start + count]
        same = self._bins[count]
        del same[start]
        if not same:
            del self._bins[count]
        self.free_units -= count
        assert self.free_units >= 0


class Claims:
    """Which units are taken, while a start rebuilds a space from what it has found. One byte a unit."""

    def __init__(self, units: int) -> None:
        self._taken = bytearray(units)

    def claim(self, runs: tuple[Run, ...]) -> bool:
        """Take the runs, all or none. False: some unit is out of range or taken already, perhaps by the same runs."""
        done: list[Run] = []
        for run in runs:
            if run.end > len(self._taken) or self._taken.find(1, run.start, run.end) >= 0:
                self._release(done)
                return False
            self._taken[run.start : run.end] = b"\1" * run.count
            done.append(run)
        return True

    def free_runs(self, region_units: int) -> Iterator[Run]:
        """What nobody has claimed, cut at the ends of regions."""
        for begin in range(0, len(self._taken), region_units):
            end = min(begin + region_units, len(self._taken))
            start = self._taken.find(0, begin, end)
            while start >= 0:
                stop = self._taken.find(1, start, end)
                stop = end if stop < 0 else stop
                yield Run(start, stop - start)
                start = self._taken.find(0, stop, end)

    def _release(self, runs: list[Run]) -> None:
        for run in runs:
            self._taken[run.start : run.end] = bytes(run.count)

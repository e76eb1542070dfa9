"""Which byte ranges of an arena are free. Offsets and lengths only; no memory is touched here.

Theory of operation
-------------------
A KV cache allocates few sizes very often: the cells of one group all have one size. So there are two layers:

1. *Quick bins*: per exact length a stack of ranges that were given back lately. Taking and giving there is one
   list operation. Ranges in a quick bin are free but not coalesced.
2. *The coalescing store*: maximal free runs. `_size_of` (start -> length) and `_start_of` (end -> start) find both
   neighbours of a range in O(1). Runs are filed by the power of two of their length; each of these classes is a sorted
   list of (length, start), and the bits of `_classes` say which are not empty.

Taking `count` ranges of `length`:

a. from the quick bin of exactly that length;
b. for what is missing: empty all quick bins into the coalescing store (*flush*), then carve whole runs: the smallest
   run that holds everything, else the largest run there is, again and again.

A run fits exactly: within its own class by bisection, above it by the lowest non-empty class. Therefore a range is
found iff `largest_free >= length`; good-fit schemes that round the wish up to the next class would refuse runs which
do fit, and a refusal costs an eviction here. Cost: O(1) in a quick bin; otherwise O(log n) comparisons, plus the
memory move inside one sorted list. A flush costs O(ranges given back since the last one), so every give pays for its
own coalescing once; `QUICK_RANGES_MAX` bounds how long one flush can take.

Rejected: a buddy system (a third of the memory is lost at the usual cell sizes), one free list with first fit (O(n)
when fragmented), and coalescing at every give (most ranges come back in the size in which they are taken again).

Everything is deterministic: ties go to the lowest offset; nothing depends on hash or address order.

Who holds, announces, frees: a range taken belongs to whoever took it, who says it is free by `give`, once. Giving
a range back twice is our own bug; `check` finds it, because the free runs then overlap.
"""

from __future__ import annotations

from bisect import bisect_left, insort

QUICK_RANGES_MAX = 4096


class Allocator:
    """Free ranges of [0, capacity). All lengths are multiples of one alignment, which the caller sees to."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.free = capacity
        self._quick: dict[int, list[int]] = {}
        self._quick_ranges = 0
        self._size_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._runs: list[list[tuple[int, int]]] = [[] for _ in range(capacity.bit_length() + 1)]
        self._classes = 0
        self._file(0, capacity)

    def take(self, length: int, count: int) -> list[int]:
        """Up to `count` offsets of free ranges of `length`; fewer only if no free run holds another one."""
        assert length > 0
        assert count >= 0
        stack = self._quick.get(length)
        if stack is not None and len(stack) >= count:
            offsets = stack[-count:] if count else []
            del stack[len(stack) - count :]
            self._quick_ranges -= count
        else:
            offsets = self._carve(length, count)
        self.free -= length * len(offsets)
        assert self.free >= 0
        return offsets

    def give(self, length: int, offsets: list[int]) -> None:
        """Put ranges of one length back."""
        assert length > 0
        if self._quick_ranges + len(offsets) > QUICK_RANGES_MAX:
            self._flush()
        stack = self._quick.get(length)
        if stack is None:
            self._quick[length] = stack = []
        stack.extend(offsets)
        self._quick_ranges += len(offsets)
        self.free += length * len(offsets)
        assert self.free <= self.capacity, "more was given back than was taken"

    @property
    def largest_free(self) -> int:
        """Length of the longest free run, everything coalesced."""
        self._flush()
        if not self._classes:
            return 0
        return self._runs[self._classes.bit_length() - 1][-1][0]

    def check(self) -> None:
        """Walk all free runs; assert that they are disjoint, coalesced, filed and add up."""
        self._flush()
        end_before = -1
        total = 0
        for start, length in sorted(self._size_of.items()):
            assert length > 0
            assert start > end_before, "free runs overlap or are not coalesced"
            assert self._start_of[start + length] == start
            assert (length, start) in self._runs[length.bit_length()]
            end_before = start + length
            total += length
        assert end_before <= self.capacity
        assert total == self.free
        assert len(self._start_of) == len(self._size_of) == sum(map(len, self._runs))
        assert [bool(runs) for runs in self._runs] == [bool(self._classes >> c & 1) for c in range(len(self._runs))]

    def _carve(self, length: int, count: int) -> list[int]:
        """The slow path of `take`: what the quick bin has, then whole runs of the coalescing store."""
        offsets = self._quick.pop(length, [])
        self._quick_ranges -= len(offsets)
        assert len(offsets) < count
        self._flush()
        while len(offsets) < count:
            run = self._find((count - len(offsets)) * length) or self._largest(length)
            if run is None:
                break
            size, start = run
            taken = min(size // length, count - len(offsets))
            assert taken > 0
            self._unfile(start)
            offsets.extend(range(start, start + taken * length, length))
            if size > taken * length:
                self._file(start + taken * length, size - taken * length)
        return offsets

    def _find(self, length: int) -> tuple[int, int] | None:
        """The smallest run of at least `length` (the lowest one among equals)."""
        order = length.bit_length()
        if order >= len(self._runs):
            return None
        runs = self._runs[order]
        at = bisect_left(runs, (length, 0))
        if at < len(runs):
            return runs[at]
        above = self._classes >> (order + 1) << (order + 1)
        if not above:
            return None
        return self._runs[(above & -above).bit_length() - 1][0]

    def _largest(self, length: int) -> tuple[int, int] | None:
        """The longest run if it holds one range of `length`."""
        if not self._classes:
            return None
        run = self._runs[self._classes.bit_length() - 1][-1]
        return run if run[0] >= length else None

    def _flush(self) -> None:
        """Move everything from the quick bins into the coalescing store, neighbours merged first."""
        if not self._quick_ranges:
            return
        ranges = sorted((offset, length) for length, stack in self._quick.items() for offset in stack)
        self._quick.clear()
        self._quick_ranges = 0
        start, end = ranges[0][0], ranges[0][0]
        for offset, length in ranges:
            if offset != end:
                self._join(start, end)
                start = offset
            end = offset + length
        self._join(start, end)

    def _join(self, start: int, end: int) -> None:
        """File the free range [start, end) together with the free runs that touch it."""
        assert start < end
        before = self._start_of.get(start)
        if before is not None:
            self._unfile(before)
            start = before
        after = self._size_of.get(end)
        if after is not None:
            self._unfile(end)
            end += after
        self._file(start, end - start)

    def _file(self, start: int, length: int) -> None:
        order = length.bit_length()
        insort(self._runs[order], (length, start))
        self._classes |= 1 << order
        self._size_of[start] = length
        self._start_of[start + length] = start

    def _unfile(self, start: int) -> None:
        length = self._size_of.pop(start)
        del self._start_of[start + length]
        order = length.bit_length()
        runs = self._runs[order]
        at = bisect_left(runs, (length, start))
        assert runs[at] == (length, start)
        del runs[at]
        if not runs:
            self._classes &= ~(1 << order)

"""Eviction orders to compare the product's with: FIFO, LFU, and Belady's bound.

They follow the production protocol (kvcore.eviction.EvictionPolicy) and run inside the production L1, but live here:
no operator has a reason to choose them. FIFO forgets what is read all the time, LFU never forgets what was read a lot
once, and Belady's knows the future. Against LRU and S3-FIFO they say how much an eviction order can be worth at all.

    FIFO      the object that came first
    LFU       the one read least often, of equals the one least lately released
    Belady    the one whose next use is furthest away; of equals the last released, which is the deepest of a prompt

Belady's order is the best for objects of one size when all misses cost the same (Belady, IBM Systems Journal 5, 1966).
Here a miss also costs what lies behind it in the prompt, which for chains used together is the same choice. The
next use is by position in the trace; with several workers the next use may come to another worker, so that the bound
is exact for one.

One class does it: a heap of (rank, serial, slot), of which only a slot's newest entry counts. A pinned object has
no entry; it gets one, by its rank of that moment, when it is released. `steps` counts live entries taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from kvcore.eviction import LruPolicy, PolicyFactory, S3FifoPolicy
from kvcore.memory import Slot
from kvcore.reports.serving.setting import Eviction
from kvcore.reports.traces.trace import Trace

NEVER = 1 << 60
SWEEP_MIN = 1024


class RankedPolicy:
    """The evictable object of the lowest rank goes first. `rank(slot, reads, births)` is asked at each release."""

    def __init__(self, rank: Callable[[Slot, int, int], int]) -> None:
        self._rank = rank
        self._heap: list[tuple[int, int, Slot]] = []
        self._entry: dict[Slot, int] = {}
        self._reads: dict[Slot, int] = {}
        self._births: dict[Slot, int] = {}
        self._serial = 0
        self.steps = 0

    def __len__(self) -> int:
        return len(self._entry)

    def add(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._serial += 1
            birth = self._births.setdefault(slot, self._serial)
            rank = self._rank(slot, self._reads.get(slot, 0), birth)
            self._entry[slot] = self._serial
            heappush(self._heap, (rank, self._serial, slot))
        if len(self._heap) > SWEEP_MIN + 2 * len(self._entry):
            self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def pin(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            del self._entry[slot]
            self._reads[slot] = self._reads.get(slot, 0) + 1

    def remove(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._entry.pop(slot, None)
            self._forget(slot)

    def renew(self, slots: Sequence[Slot]) -> None:
        """A rank is a rank, whoever ends."""

    def victim(self) -> Slot | None:
        while self._heap:
            _, serial, slot = heappop(self._heap)
            if self._entry.get(slot) == serial:
                self.steps += 1
                del self._entry[slot]
                self._forget(slot)
                return slot
        assert not self._entry
        return None

    def _forget(self, slot: Slot) -> None:
        self._births.pop(slot, None)
        self._reads.pop(slot, None)


class Future:
    """When each block is used next. `at` is the position in the trace that is being served."""

    def __init__(self, trace: Trace) -> None:
        self._uses: dict[bytes, list[int]] = {}
        self.at = -1
        ids: dict[int, list[int]] = {}
        for position, request in enumerate(trace.requests):
            for block in request.blocks[: request.input_tokens // trace.block_tokens]:
                ids.setdefault(block, []).append(position)
        self._uses = {block.to_bytes(8, "little"): uses for block, uses in ids.items()}

    def next_use(self, key: Any) -> int:
        uses = self._uses[key.chunk_hash]
        at = bisect_right(uses, self.at)
        return uses[at] if at < len(uses) else NEVER


def policy_factory(eviction: Eviction, future: Future | None) -> PolicyFactory:
    """A factory for the production L1. Belady's needs the future."""
    if eviction is Eviction.LRU:
        return LruPolicy
    if eviction is Eviction.S3_FIFO:
        return S3FifoPolicy
    if eviction is Eviction.FIFO:
        return lambda: RankedPolicy(lambda slot, reads, birth: birth)
    if eviction is Eviction.LFU:
        return lambda: RankedPolicy(lambda slot, reads, birth: reads)
    assert future is not None
    return lambda: RankedPolicy(lambda slot, reads, birth: -future.next_use(slot.key))

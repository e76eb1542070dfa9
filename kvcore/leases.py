"""Who protects an object: read leases of owners and I/O holds of copies.

Theory of operation
-------------------
There are two kinds of protection, and neither stands in for the other.

*A read lease* belongs to an `Owner` (session, generation, role). It keeps the object in the cache. It is given back
exactly once, by that owner, under the same identity, or it runs out at its deadline. Per owner there is a dict
`slot -> grant`; so a release looks only into the owner's own leases, a stale or foreign release finds nothing and
changes nothing, and `release_owner` costs O(leases held). The number of leases on a slot, over all owners, is
`slot.readers`.

*An I/O hold* belongs to a holder (the name of a process; "" for this one). It keeps the bytes from being reused. It
ends when the copy has ended, or by proven death of the holder, never by a deadline. The number of holds on a slot is
`slot.holds`.

Deadlines are kept per *batch*: all leases of one call share one `LeaseBatch`, and one heap entry. The steps:

1. `take` files each slot under its owner with the batch as grant. An owner that holds a slot already gets a stack of
   grants, the one that ends first on top; it must give the object back as often as it took it.
2. `release` takes the grant that would end first, and answers RELEASED.
3. `expire(now)` pops due batches and ends those of its leases which are still filed under exactly this batch. Each
   leaves a mark in `LateMarks`: the owner's next release answers EXPIRED, once, and then UNKNOWN.
4. `release_owner` ends everything and forgets the owner's marks.

Batches whose leases have all ended stay in the heap until their deadline or until the heap has doubled since it was
last swept; so the heap is bounded by the live batches.

Marks of owners that never come back are bounded too (`LATE_MARKS_MAX`, the owner marked longest ago is forgotten first;
it is then answered UNKNOWN, which is as harmless).

Rejected: anonymous counts (a late release would take another reader's lock), one lease object per key (half of the
whole cycle's time), and a deadline per slot (readers with different deadlines share a slot).

Who holds, announces, frees: a lease is held by its owner, ended by the owner's release or its deadline, and forgotten
here. A hold is held by whoever runs the copy, ended by it when the device or the peer says that the copy is over, and
L1 then frees what only the hold kept.

Nothing here knows the time; `now_ns` is an argument.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from kvcore.answers import Answer
from kvcore.memory import Slot

LATE_MARKS_MAX = 1 << 16
HEAP_SWEEP_MIN = 64

_NEVER_NS = 1 << 100
_RELEASED = Answer.RELEASED
_EXPIRED = Answer.EXPIRED
_UNKNOWN = Answer.UNKNOWN


class Owner(NamedTuple):
    """Who a read lease belongs to. All three must match for a release to count."""

    session: str
    generation: int
    role: str


class LeaseBatch:
    """The leases of one call: they share a holder and a deadline. `live` counts those not ended yet."""

    __slots__ = ("deadline_ns", "holder", "live", "slots")

    def __init__(self, holder: Any, deadline_ns: int, slots: Sequence[Slot]) -> None:
        self.holder = holder
        self.deadline_ns = deadline_ns
        self.slots = slots
        self.live = len(slots)


Grant = LeaseBatch | list[LeaseBatch]


def _ends_last_first(batch: LeaseBatch) -> int:
    return -batch.deadline_ns


class Deadlines:
    """Batches by deadline. Equal deadlines come due in the order in which they were set."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, LeaseBatch]] = []
        self._serial = 0
        self._sweep_at = HEAP_SWEEP_MIN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, batch: LeaseBatch) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[2].live]
            heapify(self._heap)
            self._sweep_at = max(HEAP_SWEEP_MIN, 2 * len(self._heap))
        self._serial += 1
        heappush(self._heap, (batch.deadline_ns, self._serial, batch))

    def due(self, now_ns: int) -> Iterator[LeaseBatch]:
        """Remove and give out the batches whose deadline has come, oldest first."""
        heap = self._heap
        while heap and heap[0][0] <= now_ns:
            batch = heappop(heap)[2]
            if batch.live:
                yield batch


class LateMarks:
    """Remembers whose lease on which key has expired, so that the late call can be told."""

    def __init__(self, marks_max: int = LATE_MARKS_MAX) -> None:
        assert marks_max > 0
        self._marks: OrderedDict[Hashable, dict[Any, int]] = OrderedDict()
        self._count = 0
        self._marks_max = marks_max

    def __len__(self) -> int:
        return self._count

    def add(self, who: Hashable, key: Any) -> None:
        marks = self._marks.setdefault(who, {})
        marks[key] = marks.get(key, 0) + 1
        self._count += 1
        while self._count > self._marks_max:
            self._count -= sum(self._marks.popitem(last=False)[1].values())

    def take(self, who: Hashable, key: Any) -> bool:
        """True once per mark."""
        marks = self._marks.get(who)
        if marks is None or key not in marks:
            return False
        self._count -= 1
        marks[key] -= 1
        if not marks[key]:
            del marks[key]
        if not marks:
            del self._marks[who]
        return True

    def forget(self, who: Hashable) -> None:
        marks = self._marks.pop(who, None)
        if marks is not None:
            self._count -= sum(marks.values())


class LeaseTable:
    """All read leases. `slot.readers` is written here and nowhere else."""

    def __init__(self) -> None:
        self._held: dict[Owner, dict[Slot, Grant]] = {}
        self._late = LateMarks()
        self._deadlines = Deadlines()
        self._endless = LeaseBatch(None, _NEVER_NS, ())
        self.count = 0
        self.expired = 0

    def take(self, owner: Owner, slots: Sequence[Slot], deadline_ns: int | None) -> list[Slot]:
        """Lease all slots (each occurrence counts) to `owner`; the slots that had no reader before."""
        batch = self._endless if deadline_ns is None else LeaseBatch(owner, deadline_ns, slots)
        held = self._held.get(owner)
        if held is None:
            if not slots:
                return []
            self._held[owner] = held = {}
        fresh: list[Slot] = []
        for slot in slots:
            readers = slot.readers
            if not readers:
                fresh.append(slot)
            slot.readers = readers + 1
            if slot in held:
                _stack(held, slot, batch)
            else:
                held[slot] = batch
        self.count += len(slots)
        if deadline_ns is not None and slots:
            self._deadlines.add(batch)
        return fresh

    def release(
        self, owner: Owner, keys: Sequence[Any], find: Callable[[Any], Slot | None]
    ) -> tuple[list[Answer], list[Slot]]:
        """Give back one lease per key: (answers, the slots whose last reader this was)."""
        held = self._held.get(owner)
        if held is None:
            return [self._answer_late(owner, key) for key in keys], []
        answers: list[Answer] = []
        idle: list[Slot] = []
        answer = answers.append
        released = 0
        for key in keys:
            slot = find(key)
            if slot is None or slot not in held:
                answer(self._answer_late(owner, key))
                continue
            grant = held.pop(slot)
            if grant.__class__ is list:
                grant = _unstack(held, slot, grant)
            grant.live -= 1  # type: ignore[union-attr]
            readers = slot.readers - 1
            slot.readers = readers
            if not readers:
                idle.append(slot)
            released += 1
            answer(_RELEASED)
        self.count -= released
        if not held:
            del self._held[owner]
        return answers, idle

    def release_owner(self, owner: Owner) -> tuple[int, list[Slot]]:
        """Give back all that `owner` holds: (number of leases, the slots whose last reader this was)."""
        self._late.forget(owner)
        count = 0
        idle: list[Slot] = []
        for slot, grant in self._held.pop(owner, {}).items():
            batches = grant if isinstance(grant, list) else [grant]
            for batch in batches:
                batch.live -= 1
            assert slot.readers >= len(batches)
            slot.readers -= len(batches)
            count += len(batches)
            if not slot.readers:
                idle.append(slot)
        self.count -= count
        assert self.count >= 0
        return count, idle

    def expire(self, now_ns: int) -> tuple[int, list[Slot]]:
        """End the leases whose deadline has come: (number, the slots whose last reader this was)."""
        count = 0
        idle: list[Slot] = []
        for batch in self._deadlines.due(now_ns):
            held = self._held[batch.holder]
            for slot in batch.slots:
                if not _unfile(held, slot, batch):
                    continue
                slot.readers -= 1
                assert slot.readers >= 0
                count += 1
                self._late.add(batch.holder, slot.key)
                if not slot.readers:
                    idle.append(slot)
            assert not batch.live
            if not held:
                del self._held[batch.holder]
        self.count -= count
        self.expired += count
        return count, idle

    def holds(self, owner: Owner, slot: Slot) -> bool:
        """Whether `owner` has a live lease on exactly this object."""
        held = self._held.get(owner)
        return held is not None and slot in held

    def check(self) -> dict[Slot, int]:
        """Readers per slot, counted anew."""
        readers: dict[Slot, int] = {}
        for held in self._held.values():
            assert held, "an owner without leases is kept"
            for slot, grant in held.items():
                readers[slot] = readers.get(slot, 0) + (len(grant) if isinstance(grant, list) else 1)
        assert sum(readers.values()) == self.count
        return readers

    def _answer_late(self, owner: Owner, key: Any) -> Answer:
        return _EXPIRED if self._late.take(owner, key) else _UNKNOWN


class HoldTable:
    """All I/O holds. `slot.holds` is written here and nowhere else."""

    def __init__(self) -> None:
        self._held: dict[str, dict[Slot, int]] = {}
        self.count = 0

    def take(self, holder: str, slots: Sequence[Slot]) -> None:
        held = self._held.setdefault(holder, {}) if slots else {}
        for slot in slots:
            held[slot] = held.get(slot, 0) + 1
            slot.holds += 1
        self.count += len(slots)

    def end(self, holder: str, slot: Slot) -> bool:
        """One hold of `holder` on `slot` is over. False: there is none."""
        held = self._held.get(holder)
        if held is None or slot not in held:
            return False
        assert slot.holds > 0
        slot.holds -= 1
        self.count -= 1
        held[slot] -= 1
        if not held[slot]:
            del held[slot]
        if not held:
            del self._held[holder]
        return True

    def release_holder(self, holder: str) -> tuple[int, list[Slot]]:
        """The holder is dead: (number of holds ended, the slots that are now without any)."""
        held = self._held.pop(holder, {})
        for slot, count in held.items():
            assert slot.holds >= count
            slot.holds -= count
        ended = sum(held.values())
        self.count -= ended
        return ended, [slot for slot in held if not slot.holds]

    def slots_named(self) -> dict[Slot, None]:
        """Slots under a hold of another process (the holder has a name)."""
        return {slot: None for holder, held in self._held.items() if holder for slot in held}

    def check(self) -> dict[Slot, int]:
        """Holds per slot, counted anew."""
        holds: dict[Slot, int] = {}
        for held in self._held.values():
            assert held, "a holder without holds is kept"
            for slot, count in held.items():
                assert count > 0
                holds[slot] = holds.get(slot, 0) + count
        assert sum(holds.values()) == self.count
        return holds


def _stack(held: dict[Slot, Grant], slot: Slot, batch: LeaseBatch) -> None:
    """The owner holds this slot already: put one more grant on, the one that ends first last in the list."""
    grant = held[slot]
    if not isinstance(grant, list):
        held[slot] = grant = [grant]
    insort(grant, batch, key=_ends_last_first)


def _unstack(held: dict[Slot, Grant], slot: Slot, grant: Any) -> LeaseBatch:
    """Take the grant that ends first off a stack that was just popped from `held`."""
    batch: LeaseBatch = grant.pop()
    held[slot] = grant if len(grant) > 1 else grant[0]
    return batch


def _unfile(held: dict[Slot, Grant], slot: Slot, batch: LeaseBatch) -> bool:
    """Take exactly `batch` off the owner's grants on `slot`. False: it has ended before."""
    grant = held.get(slot)
    if grant is batch:
        del held[slot]
    elif isinstance(grant, list) and batch in grant:
        grant.remove(batch)
        if len(grant) == 1:
            held[slot] = grant[0]
    else:
        return False
    batch.live -= 1
    return True

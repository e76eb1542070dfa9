"""A pool of memory that processes of one machine share: which records lie where. Pure; nothing here moves a byte.

    reserved    room for a record that its writer is filling; nobody else sees it
    there       found, located, evicted when room is needed, least recently used first
    pinned      there, and a reader copies from it just now: it may be replaced or removed, but its room stays

A record is told from an older one of the same name by its number. Whoever reserves or pins is an *owner* (a
connection). What an owner holds goes back when he ends: a dead writer's room is free again, a dead reader's pins are
gone. That is safe because bytes are moved by the owner's process itself, and a dead process moves none.

Making room evicts until a run of free memory is long enough; pinned and reserved records stay. FULL if that is not
enough.

Who holds: the pool all room; an owner what he has reserved and pinned. Who frees: `commit` and `release` end a hold,
`leave` ends all of an owner's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count

from kvcore.memory import BufferArena, Slot

Owner = Hashable


@dataclass(slots=True, eq=False)
class PoolRecord:
    """`listed`: it is what its name means now; otherwise it goes with its last pin."""

    name: bytes
    number: int
    slot: Slot
    used_ns: int
    pins: int = 0
    listed: bool = False


@dataclass(slots=True)
class _Holds:
    reserved: dict[int, PoolRecord] = field(default_factory=dict)
    pinned: list[PoolRecord] = field(default_factory=list)


class MemoryPool:
    """See the module text. Not thread-safe: it stays in its server's event loop."""

    def __init__(self, arena: BufferArena) -> None:
        self.arena = arena
        self.bytes_used = 0
        self._records: OrderedDict[bytes, PoolRecord] = OrderedDict()  # the least recently used first
        self._writing: set[bytes] = set()
        self._holds: dict[Owner, _Holds] = {}
        self._numbers = count(1)

    def find(self, name: bytes, now_ns: int) -> int | None:
        """How long the record is. It counts as used."""
        record = self._records.get(name)
        if record is None:
            return None
        self._use(record, now_ns)
        return record.slot.size

    def reserve(self, owner: Owner, name: bytes, size: int, now_ns: int) -> PoolRecord | str:
        """Room to write to; "present": one of this length is there; "busy": somebody writes it; "full": no room."""
        record = self._records.get(name)
        if record is not None and record.slot.size == size:
            return "present"
        if name in self._writing:
            return "busy"
        slot = self._room(size) if size <= self.arena.capacity_bytes else None
        if slot is None:
            return "full"
        made = PoolRecord(name, next(self._numbers), slot, now_ns)
        self._writing.add(name)
        self._holds.setdefault(owner, _Holds()).reserved[made.number] = made
        return made

    def commit(self, owner: Owner, number: int, good: bool, now_ns: int) -> bool:
        """The writer is done. False: he had reserved no such record."""
        record = self._holds.setdefault(owner, _Holds()).reserved.pop(number, None)
        if record is None:
            return False
        self._writing.discard(record.name)
        if not good:
            self.arena.free(record.slot)
            return True
        self.remove(record.name, None)
        record.listed = True
        self._records[record.name] = record
        self._use(record, now_ns)
        self.bytes_used += record.slot.size
        return True

    def pin(self, owner: Owner, name: bytes, now_ns: int) -> PoolRecord | None:
        record = self._records.get(name)
        if record is not None:
            self._use(record, now_ns)
            record.pins += 1
            self._holds.setdefault(owner, _Holds()).pinned.append(record)
        return record

    def release(self, owner: Owner) -> None:
        """All pins of this owner."""
        holds = self._holds.setdefault(owner, _Holds())
        pinned, holds.pinned = holds.pinned, []
        for record in pinned:
            assert record.pins > 0
            record.pins -= 1
            if not record.listed and record.pins == 0:
                self.arena.free(record.slot)

    def leave(self, owner: Owner) -> None:
        self.release(owner)
        for number in list(self._holds[owner].reserved):
            self.commit(owner, number, False, 0)
        del self._holds[owner]

    def remove(self, name: bytes, number: int | None) -> None:
        """`number`: only if it still is that one."""
        record = self._records.get(name)
        if record is None or number not in (None, record.number):
            return
        del self._records[name]
        record.listed = False
        self.bytes_used -= record.slot.size
        if record.pins == 0:
            self.arena.free(record.slot)

    def records(self) -> Iterator[PoolRecord]:
        return iter(self._records.values())

    @property
    def objects(self) -> int:
        return len(self._records)

    def check(self) -> None:
        """Assert the sums by a full walk (tests)."""
        assert self.bytes_used == sum(record.slot.size for record in self._records.values())
        held = {record for holds in self._holds.values() for record in [*holds.reserved.values(), *holds.pinned]}
        extents = sum(record.slot.extent for record in held | set(self._records.values()))
        assert extents + self.arena.bytes_free == self.arena.capacity_bytes
        self.arena.check()

    def _use(self, record: PoolRecord, now_ns: int) -> None:
        record.used_ns = now_ns
        self._records.move_to_end(record.name)

    def _room(self, size: int) -> Slot | None:
        slot = self.arena.allocate(size)
        idle = iter([record for record in self._records.values() if not record.pins]) if slot is None else iter(())
        for record in idle:
            self.remove(record.name, None)
            slot = self.arena.allocate(size)
            if slot is not None:
                break
        return slot

"""Arenas: one block of memory each, cut into slots.

Theory of operation
-------------------
An arena owns a fixed number of bytes. `allocate_batch` cuts aligned *slots* out of it, `free_batch` takes them back;
which ranges are free is the `Allocator`'s business. Three kinds share all of that and differ in what lies behind it:

* `PlainArena`: private memory of this process.
* `SharedArena` (in `kvcore.runtime.shared_memory`, because it talks to the operating system): a POSIX shared memory
  segment that other processes map.
* `VirtualArena`: nothing at all. It accounts for every byte, so simulations of a terabyte fit in a laptop.

A `Slot` is one allocation, from the moment it is handed out until it is freed. It is never recycled: the same bytes
handed out again are a new `Slot` with a higher `generation`, so whoever kept an old one cannot act on the new owner's
bytes, and another process that remembers (offset, generation) can tell that its bytes have moved.

The slot is also the *one* record per cached object: L1 keeps the object's key and state in it, the lease table its
readers, the hold table its I/O holds. One object per key instead of four is what makes a cycle of reserve, publish,
read and delete cost microseconds. Each field has one writer, named in the class text.

Sizes: `size` is what was asked for and what a view shows; `extent` is what it occupies (a multiple of the alignment).
All accounting is in extents, so used + free = capacity holds exactly.

Who holds, announces, frees
---------------------------
The arena's bytes are held by the arena's creator, which closes it after everything that uses them has ended. A slot's
bytes are held by L1 from allocate to free; L1 frees when the object is gone *and* no I/O hold is left. Views are
borrowed: they are valid as long as the slot is, and nobody announces their end but the hold that covers them.

Rejected: recycling slot objects (saves 0.2 us per key and turns every stale reference into a silent alias), and
handing out numpy arrays (a memoryview costs a third and every copier takes one).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, unique
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvcore.allocator import Allocator
from kvcore.errors import CallerError, ConfigError, OutOfRoomError

if TYPE_CHECKING:
    from kvcore.leases import LeaseBatch

ALIGNMENT_BYTES = 64


@unique
class SlotState(Enum):
    __hash__ = object.__hash__  # by identity; Enum's own runs in Python, and L1's table is asked in every batch

    STAGING = "staging"  # being written, invisible to readers
    RESIDENT = "resident"  # published
    DRAINING = "draining"  # the object is gone, a copy still touches the bytes
    FREE = "free"  # given back; this Slot object means nothing any more


_STAGING = SlotState.STAGING
_FREE = SlotState.FREE


class Slot:
    """One allocation and the cached object in it.

    Written by the arena: offset, size, extent (bytes occupied), generation. By L1: key, state, temporary, and `lease`
    (the write lease's batch while staging). By the lease table: readers. By the hold table: holds.
    Compared by identity; two slots are never the same allocation.
    """

    __slots__ = ("extent", "generation", "holds", "key", "lease", "offset", "readers", "size", "state", "temporary")

    def __init__(self, offset: int, size: int, extent: int, generation: int, key: Any) -> None:
        self.offset = offset
        self.size = size
        self.extent = extent
        self.generation = generation
        self.key = key
        self.state = _STAGING
        self.readers = 0
        self.holds = 0
        self.temporary = False
        self.lease: LeaseBatch | None = None

    def __repr__(self) -> str:
        return (
            f"Slot({self.state.value} at {self.offset}+{self.size}, generation {self.generation}, "
            f"{self.readers} readers, {self.holds} holds)"
        )


class Arena(Protocol):
    """What L1 needs from memory. `segment` names it for other processes; "" if they cannot map it."""

    @property
    def capacity_bytes(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def segment(self) -> str: ...
    @property
    def bytes_free(self) -> int: ...
    @property
    def largest_free(self) -> int: ...

    def extent(self, size: int) -> int: ...
    def allocate(self, size: int) -> Slot | None: ...
    def allocate_batch(self, size: int, keys: Sequence[Any]) -> list[Slot]: ...
    def free(self, slot: Slot) -> None: ...
    def free_batch(self, slots: Iterable[Slot]) -> None: ...
    def view(self, slot: Slot) -> memoryview: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


class VirtualArena:
    """Accounting without memory. Also the base of the arenas that have some."""

    def __init__(self, capacity_bytes: int, alignment: int = ALIGNMENT_BYTES) -> None:
        if alignment <= 0 or alignment & (alignment - 1):
            raise ConfigError(f"arena alignment must be a power of two, not {alignment}")
        if capacity_bytes < alignment:
            raise ConfigError(
                f"an arena of {capacity_bytes} bytes cannot hold a single object of one alignment unit "
                f"({alignment} bytes); give the cache more memory"
            )
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes & -alignment  # the tail that cannot be aligned is not ours
        self._allocator = Allocator(self.capacity_bytes)
        self._generation = 0

    @property
    def segment(self) -> str:
        return ""

    @property
    def bytes_free(self) -> int:
        return self._allocator.free

    @property
    def largest_free(self) -> int:
        """Bytes of the longest free run: the largest object that fits without an eviction."""
        return self._allocator.largest_free

    def extent(self, size: int) -> int:
        """Bytes that an object of `size` occupies."""
        return (size + self.alignment - 1) & -self.alignment

    def allocate(self, size: int) -> Slot | None:
        slots = self.allocate_batch(size, (None,))
        return slots[0] if slots else None

    def allocate_batch(self, size: int, keys: Sequence[Any]) -> list[Slot]:
        """One slot of `size` bytes for each of the first keys; fewer than keys when no free run is long enough."""
        if size <= 0:
            raise CallerError(f"an object must have a positive size, not {size}")
        extent = (size + self.alignment - 1) & -self.alignment
        offsets = self._allocator.take(extent, len(keys))
        first = self._generation + 1
        self._generation += len(offsets)
        return list(map(Slot, offsets, repeat(size), repeat(extent), count(first), keys))

    def free(self, slot: Slot) -> None:
        self.free_batch((slot,))

    def free_batch(self, slots: Iterable[Slot]) -> None:
        """Take slots back. Each is dead from here on."""
        extent = 0
        offsets: list[int] = []
        for slot in slots:
            assert slot.state is not _FREE, "freed twice"
            assert not slot.holds, "freed while a copy touches it"
            slot.state = _FREE
            if slot.extent != extent:
                if offsets:
                    self._allocator.give(extent, offsets)
                extent = slot.extent
                offsets = []
            offsets.append(slot.offset)
        if offsets:
            self._allocator.give(extent, offsets)

    def view(self, slot: Slot) -> memoryview:
        raise CallerError("a virtual arena accounts for memory but has none; use a PlainArena or a SharedArena")

    def check(self) -> None:
        self._allocator.check()
        assert self._allocator.capacity == self.capacity_bytes

    def close(self) -> None:
        return None


class BufferArena(VirtualArena):
    """An arena over a writable buffer of at least its capacity."""

    def __init__(self, capacity_bytes: int, buffer: memoryview, alignment: int = ALIGNMENT_BYTES) -> None:
        super().__init__(capacity_bytes, alignment)
        if buffer.nbytes < self.capacity_bytes or buffer.readonly:
            raise CallerError(f"the buffer has {buffer.nbytes} bytes; the arena needs {self.capacity_bytes} writable")
        self._buffer = buffer.cast("B")

    @property
    def buffer(self) -> memoryview:
        """All of it; empty after `close`."""
        return self._buffer

    def view(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable. Valid as long as the slot."""
        assert slot.state is not _FREE, "view of a freed slot"
        return self._buffer[slot.offset : slot.offset + slot.size]

    def close(self) -> None:
        """Give the memory back. Views that are still out keep it alive, but nothing new is handed out."""
        self._buffer = memoryview(b"")


class PlainArena(BufferArena):
    """Private memory; pages are touched when first used."""

    def __init__(self, capacity_bytes: int, alignment: int = ALIGNMENT_BYTES) -> None:
        super().__init__(capacity_bytes, _private_memory(capacity_bytes, alignment), alignment)


def _private_memory(capacity_bytes: int, alignment: int) -> memoryview:
    """Zeroed memory that starts at a multiple of `alignment`."""
    try:
        memory = np.zeros(max(capacity_bytes, 0) + alignment, np.uint8)
    except MemoryError as error:
        raise OutOfRoomError(f"no room for an arena of {capacity_bytes} bytes; configure a smaller cache") from error
    address: int = memory.__array_interface__["data"][0]
    return memoryview(memory.data)[-address % alignment :]

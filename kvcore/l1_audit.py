"""All invariants of L1 by a full walk. Asserts; changes nothing; for tests and oracles, O(everything)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcore.keys import ObjectKey
from kvcore.l1_room import Room
from kvcore.l1_staging import Staging
from kvcore.l1_statistics import L1Statistics
from kvcore.leases import HoldTable, LeaseTable
from kvcore.memory import Slot, SlotState


def check_states(resident: Mapping[ObjectKey, Slot], staging: Staging, draining: Sequence[Slot], room: Room) -> None:
    """Every slot is where its state says, and what may be evicted can be found."""
    staging.check()
    for key, slot in resident.items():
        assert slot.key == key
        assert slot.state is SlotState.RESIDENT
        assert slot.readers or not slot.temporary, "a temporary object without a reader is resident"
        assert slot.lease is None
    for slot in draining:
        assert slot.state is SlotState.DRAINING
        assert slot.holds, "a draining slot without a hold was not freed"
        assert not slot.readers
    evictable = sum(not slot.readers and not slot.holds for slot in resident.values())
    assert len(room.order) >= evictable, "an unprotected object is missing in the eviction order"


def check_memory(slots: Sequence[Slot], room: Room, shown: L1Statistics) -> None:
    """Bytes shown are bytes occupied, and no byte has two owners."""
    room.check()
    for state, counted in (
        (SlotState.RESIDENT, shown.bytes_resident),
        (SlotState.STAGING, shown.bytes_staging),
        (SlotState.DRAINING, shown.bytes_draining),
    ):
        assert counted == sum(slot.extent for slot in slots if slot.state is state), state
    assert shown.bytes_used == shown.bytes_resident + shown.bytes_staging + shown.bytes_draining
    assert shown.bytes_used + shown.bytes_free == shown.bytes_capacity
    assert shown.quarantined_bytes <= shown.bytes_draining
    end_before = 0
    for slot in sorted(slots, key=lambda slot: slot.offset):
        assert slot.offset >= end_before, "two slots overlap"
        end_before = slot.offset + slot.extent
    assert end_before <= shown.bytes_capacity


def check_protection(slots: Sequence[Slot], leases: LeaseTable, holds: HoldTable) -> None:
    """The counts in the slots are the leases and holds that exist."""
    readers = leases.check()
    held = holds.check()
    for slot in slots:
        assert slot.readers == readers.pop(slot, 0)
        assert slot.holds == held.pop(slot, 0)
    assert not readers, "a lease on an object that is gone"
    assert not held, "a hold on memory that was freed"

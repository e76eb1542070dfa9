"""The audit of L1 sees each kind of damage, and nothing where there is none. Tests and oracles rely on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvcore.answers import Answer
from kvcore.eviction import LruPolicy
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.leases import Owner
from kvcore.memory import PlainArena, SlotState
from kvcore.quota import Quota

SIZE = 64
ANN = Owner("ann", 1, "read")
K = [ObjectKey(bytes([n]) * 32, "m", 0) for n in range(8)]


def house() -> SimpleNamespace:
    """A cache with two free objects, one that is read, one that drains under a copy, and one that is being written."""
    l1 = L1Cache(PlainArena(8 * SIZE), LruPolicy, Quota())
    l1.reserve_write("w", K[:4], SIZE)
    l1.finish_write("w", K[:4])
    l1.reserve_read(ANN, K[2:4])
    l1.hold_read("gpu", ANN, [K[3]])
    l1.finish_read(ANN, [K[3]])
    first, second, read, draining = (l1.slot_of(key) for key in K[:4])
    assert l1.delete([K[3]]) == [Answer.DELETED]
    staging = l1.reserve_write("w", [K[5]], SIZE)[1][0]
    return SimpleNamespace(l1=l1, first=first, second=second, read=read, draining=draining, staging=staging)


def test_a_house_in_order_passes() -> None:
    rooms = house()
    rooms.l1.check()
    shown = rooms.l1.statistics()
    assert (shown.objects_resident, shown.objects_draining, shown.objects_staging) == (3, 1, 1)
    assert (shown.bytes_resident, shown.bytes_draining, shown.bytes_staging) == (3 * SIZE, SIZE, SIZE)
    assert (shown.bytes_used, shown.bytes_free, shown.quarantined_bytes) == (5 * SIZE, 3 * SIZE, SIZE)


def test_a_new_cache_has_done_nothing() -> None:
    shown = dataclasses.asdict(L1Cache(PlainArena(8 * SIZE), LruPolicy).statistics())
    assert {name: value for name, value in shown.items() if value} == {
        "bytes_capacity": 8 * SIZE,
        "bytes_free": 8 * SIZE,
        "largest_free": 8 * SIZE,
    }


def set_to(slot: str, field: str, value: object) -> Callable[[SimpleNamespace], None]:
    return lambda rooms: setattr(getattr(rooms, slot), field, value)


def counted(field: str) -> Callable[[SimpleNamespace], None]:
    """A counter that shows one slot too many."""

    def damage(rooms: SimpleNamespace) -> None:
        setattr(rooms.l1._counters, field, getattr(rooms.l1._counters, field) + SIZE)

    return damage


DAMAGE: dict[str, Callable[[SimpleNamespace], None]] = {
    "a resident slot holds another key": set_to("first", "key", K[7]),
    "a resident slot says it is staging": set_to("first", "state", SlotState.STAGING),
    "a resident slot says it is free": set_to("read", "state", SlotState.FREE),
    "a temporary object is read by nobody": set_to("first", "temporary", True),
    "a staging slot says it is resident": set_to("staging", "state", SlotState.RESIDENT),
    "a staging slot has a reader": set_to("staging", "readers", 1),
    "a staging slot is temporary": set_to("staging", "temporary", True),
    "a draining slot says it is resident": set_to("draining", "state", SlotState.RESIDENT),
    "a draining slot has no hold": set_to("draining", "holds", 0),
    "a draining slot has a reader": set_to("draining", "readers", 1),
    "two slots overlap": set_to("second", "offset", 0),
    "two slots overlap by a byte": set_to("second", "offset", SIZE - 1),
    "a slot ends behind the arena": set_to("staging", "offset", 8 * SIZE),
    "a reader nobody leased for": set_to("first", "readers", 1),
    "a lease that no slot counts": set_to("read", "readers", 2),
    "a hold nobody has": set_to("first", "holds", 1),
    "a free object cannot be found for eviction": lambda rooms: rooms.l1._order.remove([rooms.first]),
    "resident bytes are wrong": counted("bytes_resident"),
    "draining bytes are wrong": counted("bytes_draining"),
    "a draining slot is forgotten": lambda rooms: rooms.l1._draining.clear(),
    "a lease on an object that is gone": lambda rooms: rooms.l1._resident.pop(K[2]),
    "a tenant is charged for nothing": lambda rooms: rooms.l1._room._ledger.charge("", SIZE),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen(damage: str) -> None:
    rooms = house()
    DAMAGE[damage](rooms)
    with pytest.raises(AssertionError):
        rooms.l1.check()

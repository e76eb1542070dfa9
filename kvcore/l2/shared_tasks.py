"""What a shared adapter remembers of the keys of batches (`kvcore.l2.tasks`) while blocking work of theirs runs.

Held by the piece of work that they belong to, and, stores that wait for another one, by their key's activity. Tuples,
since one of each is made per key on the loop: they cost it least.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvcore.keys import ObjectKey
from kvcore.l2.activity import WRITING, Activity
from kvcore.l2.ledger import Room
from kvcore.l2.tasks import BitTask, StoreTask


class StoreItem(NamedTuple):
    """One key of one store batch."""

    batch: StoreTask
    position: int
    key: ObjectKey
    payload: memoryview
    record_bytes: int


class Write(NamedTuple):
    item: StoreItem
    activity: Activity
    room: Room


class Use(NamedTuple):
    """One key of a lookup, or of a load with its buffer. `writes`: those that had ended when it was asked for."""

    batch: BitTask
    position: int
    activity: Activity
    writes: int
    into: memoryview

    @property
    def fresh(self) -> bool:
        """No write of ours has come between: what the store has said is so still, as far as we know."""
        return self.activity.writes == self.writes and self.activity.busy is not WRITING


# tuple.__new__ runs without a Python frame per key
make_item: Callable[[tuple[StoreTask, int, ObjectKey, memoryview, int]], StoreItem] = partial(tuple.__new__, StoreItem)
make_write: Callable[[tuple[StoreItem, Activity, Room]], Write] = partial(tuple.__new__, Write)
make_use: Callable[[tuple[BitTask, int, Activity, int, memoryview]], Use] = partial(tuple.__new__, Use)

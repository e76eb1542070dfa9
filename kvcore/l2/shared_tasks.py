"""What a shared adapter remembers of batches and their keys while blocking work of theirs runs.

Held by the piece of work that they belong to, and, stores that wait for another one, by their key's activity. A task is
complete, and announced, when `unanswered` is 0. Tuples where one is made per key on the loop: they cost it least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcore.keys import ObjectKey
from kvcore.l2.activity import Activity, Busy
from kvcore.l2.adapter import StoreAnswer, TaskId
from kvcore.l2.ledger import Room


@dataclass(slots=True, eq=False)
class StoreTask:
    task: TaskId
    answers: list[StoreAnswer]
    unanswered: int


@dataclass(slots=True, eq=False)
class BitTask:
    """A lookup or a load."""

    task: TaskId
    unanswered: int
    bits: int = 0


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
        return self.activity.writes == self.writes and self.activity.busy is not Busy.WRITING

"""What one process does right now with the keys of a shared store. Pure and loop-confined.

An `Activity` exists as long as something of its key goes on: locks that are held, lookups and loads that run (*pins*),
one write or removal (`busy`), stores that wait for it, and what has to happen when its last use ends. The store knows
nothing of this; other processes have their own.

    doomed      somebody asked for its deletion: no lookup finds it, its holders can load it, its last use removes it
    broken      a read has shown a defect: invisible, not loaded again, discarded when no pin is left
    REMOVING    the deletion runs: absent

Who holds: the adapter. `drop` frees an activity in which nothing goes on any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import Any

from kvcore.keys import ObjectKey
from kvcore.l2.envelope import Defect


@unique
class Busy(Enum):
    NOT = "not"
    WRITING = "writing"
    REMOVING = "removing"


# Asking the class for a member takes 0.1 us (Python 3.11), a dozen times per key.
NOT_BUSY, WRITING, REMOVING = Busy


@dataclass(slots=True, eq=False)
class Activity:
    key: ObjectKey
    locks: int = 0
    pins: int = 0
    writes: int = 0  # that have ended: a result that is older than one of them says nothing about now
    busy: Busy = NOT_BUSY
    doomed: bool = False
    broken: Defect | None = None
    waiting: tuple[Any, ...] = ()  # the adapter's stores that wait for what runs

    @property
    def in_use(self) -> bool:
        return self.locks > 0 or self.pins > 0

    @property
    def leaving(self) -> bool:
        return self.doomed or self.broken is not None or self.busy is REMOVING


class Activities:
    """All activities of one adapter, by key."""

    def __init__(self) -> None:
        self.locked = 0  # keys with at least one lock
        self._of_key: dict[ObjectKey, Activity] = {}

    def get(self, key: ObjectKey) -> Activity | None:
        return self._of_key.get(key)

    def exists(self, key: ObjectKey) -> bool:
        return key in self._of_key

    def is_leaving(self, key: ObjectKey) -> bool:
        """Lookups answer "absent" without asking the store."""
        activity = self._of_key.get(key)
        return activity is not None and activity.leaving

    def is_unreadable(self, key: ObjectKey) -> bool:
        """Loads answer "absent" without asking the store."""
        activity = self._of_key.get(key)
        return activity is not None and (activity.broken is not None or activity.busy is REMOVING)

    def pin(self, key: ObjectKey) -> Activity:
        activity = self._ensure(key)
        activity.pins += 1
        return activity

    def unpin(self, activity: Activity) -> None:
        assert activity.pins > 0
        activity.pins -= 1

    def lock(self, activity: Activity) -> None:
        assert self._of_key[activity.key] is activity
        self.locked += activity.locks == 0
        activity.locks += 1

    def unlock(self, activity: Activity) -> None:
        assert activity.locks > 0
        activity.locks -= 1
        self.locked -= activity.locks == 0

    def begin(self, key: ObjectKey, busy: Busy) -> Activity:
        """A write or removal begins. Never two at a time for one key."""
        activity = self._ensure(key)
        assert activity.busy is NOT_BUSY
        activity.busy = busy
        return activity

    def end(self, activity: Activity) -> None:
        assert activity.busy is not NOT_BUSY
        activity.writes += activity.busy is WRITING
        activity.busy = NOT_BUSY

    def drop(self, activity: Activity) -> bool:
        """Let go of it if nothing goes on any more (True)."""
        if activity.locks or activity.pins or activity.busy is not NOT_BUSY:
            return False
        if self._of_key.get(activity.key) is not activity:
            return False
        assert not activity.waiting
        assert not activity.leaving
        del self._of_key[activity.key]
        return True

    def check(self) -> None:
        """Assert the invariants by a full walk (tests)."""
        activities = list(self._of_key.values())
        assert self.locked == sum(activity.locks > 0 for activity in activities)
        for activity in activities:
            assert activity.in_use or activity.busy is not NOT_BUSY, "nothing goes on, and it was not dropped"
            assert activity.busy is not NOT_BUSY or not activity.waiting, "nobody would wake them"

    def _ensure(self, key: ObjectKey) -> Activity:
        activity = self._of_key.get(key)
        if activity is None:
            activity = self._of_key[key] = Activity(key)
        return activity

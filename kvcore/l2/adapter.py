"""The L2 port: "submit, wait for the notice, take the result".

An adapter puts objects into an outer store. It is driven from the loop thread; its own work happens
elsewhere and is announced through three separate notices, so that events never mix.

Who holds, announces, frees
---------------------------
* Buffers passed to `submit_store` and `submit_load` belong to the caller, who keeps them reserved until
  the adapter reports the task complete. Giving up a wait frees nothing.
* Completion is announced by the notice of its kind and fetched exactly once (`pop_completed_stores`,
  `take_lookup`, `take_load`). Fetching a second time answers as for an unknown task: None.
* A lookup that reports a key has *locked* it, as strongly as `lock_strength` says. `submit_unlock` gives
  it back, is never retried by the caller, and the adapter must get it done.

`None` ("not finished") and an empty bitmap ("finished, nothing found") are different answers.
Result bitmaps are Python integers: bit i stands for keys[i] of the submitted batch.
Faults of the store are never exceptions here: they are missing bits, counted by kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import NewType, Protocol

from kvcore.keys import ObjectKey
from kvcore.ports import Notice

TaskId = NewType("TaskId", int)


@unique
class LockKind(Enum):
    STRONG = "strong"  # a locked object stays until it is unlocked
    LEASE = "lease"  # it stays for `lease_s` at least
    NONE = "none"  # existence only: a load may fail at any time


@dataclass(frozen=True, slots=True)
class LockStrength:
    kind: LockKind
    lease_s: float = 0.0


@unique
class StoreAnswer(Enum):
    STORED = "stored"
    PRESENT = "present"  # an intact record of this key was already there
    FULL = "full"  # no room; trying again soon is pointless
    RETRY = "retry"  # failed, and a later attempt may succeed
    FAILED = "failed"  # failed for good


# For those who meet them once per key: asking the class for a member takes 0.1 us (Python 3.11).
STORED, PRESENT, FULL, RETRY, FAILED = StoreAnswer


@dataclass(frozen=True, slots=True)
class L2Usage:
    bytes_used: int
    bytes_capacity: int | None
    objects: int
    locked: int


class L2Adapter(Protocol):
    """See the module text. `name` is unique among the adapters of one cache."""

    name: str
    lock_strength: LockStrength
    store_notice: Notice
    lookup_notice: Notice
    load_notice: Notice

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId: ...

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]: ...

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId: ...

    def take_lookup(self, task: TaskId) -> int | None: ...

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        """Fill buffers[i] with the payload of keys[i]. A buffer whose bit stays 0 has undefined content."""
        ...

    def take_load(self, task: TaskId) -> int | None: ...

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None: ...

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        """Remove what is not locked; locked objects go with their last unlock."""
        ...

    def usage(self) -> L2Usage: ...

    def keys(self) -> list[ObjectKey]: ...

    def close(self) -> None:
        """Stop accepting work, bounded in time; tasks that have not completed are never announced."""
        ...

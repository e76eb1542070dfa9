"""`WeakLocks`: any adapter, turned into one whose lookup says "there" and protects nothing.

Object stores and caches that evict on their own are like that. Wrapping a STRONG adapter gives the same interface and
the same records with lock strength NONE: the lock that the inner lookup took is given back at the moment its result
is taken, so that the key may vanish (evicted, deleted) before the load that follows. A load that then fails is an
answer, not an error.

Who holds: nobody holds a lock after `take_lookup`; `submit_unlock` has nothing to give back and is only counted.
Everything else belongs to the inner adapter, the notices included.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Adapter, L2Usage, LockKind, LockStrength, StoreAnswer, TaskId


class WeakLocks:
    """`kvcore.l2.adapter.L2Adapter` with `LockKind.NONE` over `inner`."""

    def __init__(self, inner: L2Adapter) -> None:
        self.inner = inner
        self.name = inner.name
        self.lock_strength = LockStrength(LockKind.NONE)
        self.store_notice = inner.store_notice
        self.lookup_notice = inner.lookup_notice
        self.load_notice = inner.load_notice
        self.unlocks_ignored = 0
        self._looked_up: dict[TaskId, list[ObjectKey]] = {}

    @property
    def work_inflight(self) -> int:
        """Pieces of blocking work of the inner adapter that have not ended."""
        return int(getattr(self.inner, "work_inflight", 0))

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        return self.inner.submit_store(keys, buffers)

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        return self.inner.pop_completed_stores()

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        task = self.inner.submit_lookup_and_lock(keys)
        self._looked_up[task] = list(keys)
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        bits = self.inner.take_lookup(task)
        if bits is not None:
            keys = self._looked_up.pop(task)
            self.inner.submit_unlock([key for position, key in enumerate(keys) if bits >> position & 1])
        return bits

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        return self.inner.submit_load(keys, buffers)

    def take_load(self, task: TaskId) -> int | None:
        return self.inner.take_load(task)

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        self.unlocks_ignored += len(keys)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self.inner.delete(keys)

    def usage(self) -> L2Usage:
        return self.inner.usage()

    def keys(self) -> list[ObjectKey]:
        return self.inner.keys()

    def close(self) -> None:
        self._looked_up.clear()
        self.inner.close()

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
from kvcore.l2.adapter import LockKind, LockStrength, TaskId
from kvcore.l2.wrapped import CountingAdapter, WrappedAdapter, chosen


class WeakLocks(WrappedAdapter):
    """`kvcore.l2.adapter.L2Adapter` with `LockKind.NONE` over `inner`."""

    def __init__(self, inner: CountingAdapter) -> None:
        super().__init__(inner)
        self.lock_strength = LockStrength(LockKind.NONE)
        self.unlocks_ignored = 0
        self._looked_up: dict[TaskId, list[ObjectKey]] = {}

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        task = self.inner.submit_lookup_and_lock(keys)
        self._looked_up[task] = list(keys)
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        bits = self.inner.take_lookup(task)
        if bits is not None:
            self.inner.submit_unlock(chosen(self._looked_up.pop(task), bits))
        return bits

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        self.unlocks_ignored += len(keys)

    def close(self) -> None:
        self._looked_up.clear()
        super().close()

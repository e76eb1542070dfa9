"""What every wrapper around an L2 adapter shares: it passes all calls on.

A wrapper is itself an `L2Adapter`, so wrappers stack in any order. The usual stack, outermost first:

    BreakerAdapter    asks a store that fails nothing more for a while
    RetryAdapter      asks again where that is safe
    DeadlineAdapter   answers a lookup in time, and counts what is late
    FaultyAdapter     breaks calls on purpose (tests of a deployment only)
    the adapter

The notices are the inner adapter's own unless a wrapper has to announce something earlier than the inner adapter does.
Wrappers look at results where their caller takes them: nothing happens between two calls except on timers of the
running loop, so that all of them run in virtual time as well.

Who holds: buffers stay the caller's until the wrapped task has completed; no wrapper shortens that. Who announces: the
inner adapter's notices. Who frees: `close` closes the inner adapter too; a wrapper holds nothing that outlives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Adapter, L2Usage, StoreAnswer, TaskId
from kvcore.l2.statistics import L2Statistics

FailuresSeen = Callable[[], int]
"""How many failures of the store have been seen so far, by whoever sees them. Only its growth is looked at."""


class CountingAdapter(L2Adapter, Protocol):
    """An adapter that tells what it has counted and how much of its work may still touch buffers."""

    @property
    def work_inflight(self) -> int: ...

    def statistics(self) -> L2Statistics: ...


class WrappedAdapter:
    """`CountingAdapter` around `inner`; see the module text. Subclasses override what they change."""

    def __init__(self, inner: CountingAdapter) -> None:
        self.inner = inner
        self.name = inner.name
        self.lock_strength = inner.lock_strength
        self.store_notice = inner.store_notice
        self.lookup_notice = inner.lookup_notice
        self.load_notice = inner.load_notice

    @property
    def work_inflight(self) -> int:
        return self.inner.work_inflight

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        return self.inner.submit_store(keys, buffers)

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        return self.inner.pop_completed_stores()

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        return self.inner.submit_lookup_and_lock(keys)

    def take_lookup(self, task: TaskId) -> int | None:
        return self.inner.take_lookup(task)

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        return self.inner.submit_load(keys, buffers)

    def take_load(self, task: TaskId) -> int | None:
        return self.inner.take_load(task)

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        self.inner.submit_unlock(keys)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self.inner.delete(keys)

    def usage(self) -> L2Usage:
        return self.inner.usage()

    def keys(self) -> list[ObjectKey]:
        return self.inner.keys()

    def statistics(self) -> L2Statistics:
        return self.inner.statistics()

    def close(self) -> None:
        self.inner.close()


def chosen(keys: Sequence[ObjectKey], bits: int) -> list[ObjectKey]:
    """The keys whose bit is set, in order."""
    return [key for position, key in enumerate(keys) if bits >> position & 1]

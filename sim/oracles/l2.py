"""`WatchedAdapter`: any L2 adapter with a judge at the port.

Counts locks by lookups and unlocks, and loads by key: no cell is loaded twice at once, everything that is loaded was
locked as strongly as the adapter promises, every lock comes back, and what is handed over to be stored is what its key
stands for. Counts calls and bytes too, from the calls and their answers alone; at rest the adapter's own statistics
must say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Adapter, L2Usage, LockKind, LockStrength, StoreAnswer, TaskId
from kvcore.l2.index import Index
from kvcore.l2.statistics import L2Statistics
from kvcore.ports import Notice, Tracer
from kvcore.quota import Quota
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.l1 import LoadBook
from kvcore.sim.oracles.quota import over_quota
from kvcore.sim.oracles.truth import Truth

COUNTED = ("lookups", "lookup_hits", "loads", "load_hits", "stored", "retry", "bytes_in", "bytes_out")
"""Fields of the adapter's statistics that are counted here as well."""


class WatchedAdapter:
    """Passes every call on. `loading` is shared by the adapters of one cache: the key is loaded from one of them only,
    and what has failed to arrive must not be published. `counts`: what was seen, under the names of `COUNTED`."""

    def __init__(
        self,
        inner: L2Adapter,
        truth: Truth,
        findings: Findings,
        tracer: Tracer,
        loading: LoadBook,
        quota: Quota | None = None,
    ) -> None:
        self._quota = quota
        self._inner = inner
        self._truth = truth
        self._findings = findings
        self._tracer = tracer
        self._loading = loading
        self._tasks: dict[tuple[str, TaskId], tuple[ObjectKey, ...]] = {}
        self._sizes: dict[tuple[str, TaskId], list[int]] = {}
        self.counts: Counter[str] = Counter()
        self._locks: dict[ObjectKey, int] = {}
        self.name: str = inner.name
        self.lock_strength: LockStrength = inner.lock_strength
        self.store_notice: Notice = inner.store_notice
        self.lookup_notice: Notice = inner.lookup_notice
        self.load_notice: Notice = inner.load_notice

    @property
    def inner(self) -> L2Adapter:
        return self._inner

    def interpose(self, wrap: Callable[[L2Adapter], L2Adapter]) -> L2Adapter:
        """From now on calls go to what `wrap` makes of the adapter below; answers it. For faults: the judge stays
        outside. The notices stay those of the adapter at the bottom."""
        self._inner = wrap(self._inner)
        return self._inner

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        for key, buffer in zip(keys, buffers):
            self._truth.check(key, buffer, f"handed to L2 {self.name}")
        task = self._inner.submit_store(keys, buffers)
        self._sizes["store", task] = [buffer.nbytes for buffer in buffers]
        self._tracer.event("l2.store", self.name, task, len(keys))
        return task

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        done = self._inner.pop_completed_stores()
        for task, answers in done.items():
            sizes = self._sizes.pop(("store", task), ())
            self.counts["answers"] += len(sizes)
            for answer, size in zip(answers, sizes):
                self.counts["stored"] += answer is StoreAnswer.STORED
                self.counts["retry"] += answer is StoreAnswer.RETRY
                self.counts["bytes_in"] += size if answer is StoreAnswer.STORED else 0
            self._tracer.event("l2.stored", self.name, task, *[answer.value for answer in answers])
        return done

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        task = self._inner.submit_lookup_and_lock(keys)
        self._tasks["lookup", task] = tuple(keys)
        self.counts["lookups"] += len(keys)
        self._tracer.event("l2.lookup", self.name, task, len(keys))
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        found = self._inner.take_lookup(task)
        if found is None:
            return None
        self.counts["lookup_hits"] += found.bit_count()
        self._tracer.event("l2.found", self.name, task, found.bit_count())
        for index, key in enumerate(self._tasks.pop(("lookup", task))):
            if found >> index & 1 and self.lock_strength.kind is not LockKind.NONE:
                self._locks[key] = self._locks.get(key, 0) + 1
        return found

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        for key in keys:
            if key in self._loading:
                self._report(f"a cell is loaded from {self.name} while it is loaded from {self._loading[key]}")
            if self.lock_strength.kind is not LockKind.NONE and not self._locks.get(key):
                self._report("a cell is loaded without a lock at its source")
        task = self._inner.submit_load(keys, buffers)  # an adapter that refuses has not taken it
        for key in keys:
            self._loading[key] = self.name
            self._loading.failed.pop(key, None)
        self._tasks["load", task] = tuple(keys)
        self._sizes["load", task] = [buffer.nbytes for buffer in buffers]
        self.counts["loads"] += len(keys)
        self._tracer.event("l2.load", self.name, task, len(keys))
        return task

    def take_load(self, task: TaskId) -> int | None:
        loaded = self._inner.take_load(task)
        if loaded is not None:
            self._tracer.event("l2.loaded", self.name, task, loaded.bit_count())
            self._loads_ended(task, loaded)
        return loaded

    def _loads_ended(self, task: TaskId, loaded: int) -> None:
        sizes = self._sizes.pop(("load", task))
        for index, key in enumerate(self._tasks.pop(("load", task))):
            self._loading.pop(key, None)
            if loaded >> index & 1:
                self.counts["load_hits"] += 1
                self.counts["bytes_out"] += sizes[index]
            else:
                self._loading.failed[key] = self.name

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            count = self._locks.get(key, 0) - 1
            if self.lock_strength.kind is not LockKind.NONE and count < 0:
                self._report("a lock was given back that nobody held")
            self._locks[key] = count
            if count <= 0:
                self._locks.pop(key)
        self._inner.submit_unlock(keys)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._inner.delete(keys)

    def usage(self) -> L2Usage:
        return self._inner.usage()

    def keys(self) -> list[ObjectKey]:
        return self._inner.keys()

    def close(self) -> None:
        self._inner.close()

    def check_at_rest(self) -> None:
        """No lock, lookup or load is open, and the adapter has counted what has happened."""
        if self._locks or self._inner.usage().locked:
            self._report(f"at rest, {len(self._locks)} keys are locked ({self._inner.usage().locked} by its own count)")
        if self._tasks:
            self._report(f"at rest, {len(self._tasks)} tasks were never taken")
        self._check_index()
        self._check_counts()

    def keys_loading(self, task: TaskId) -> tuple[ObjectKey, ...]:
        """The keys of a load whose result has not been taken."""
        return self._tasks.get(("load", task), ())

    def own_statistics(self) -> L2Statistics:
        """What the adapter at the bottom counts."""
        statistics: L2Statistics = self.bottom.statistics()
        return statistics

    @property
    def bottom(self) -> Any:
        """The adapter itself."""
        bottom: Any = self._inner
        while hasattr(bottom, "inner"):  # what only weakens its locks, or refuses calls, which then do not count
            bottom = bottom.inner
        return bottom

    def _check_index(self) -> None:
        """The index agrees with itself, and no tenant has more than its share."""
        index: Index = self.bottom._index
        try:
            index.check()
        except AssertionError as error:
            self._findings.report("memory", f"L2 {self.name}: the index's own check failed: {error}")
        for text in over_quota(self._quota, self._record_sizes(index)):
            self._findings.report("quota", f"L2 {self.name}: {text}")

    def _record_sizes(self, index: Index) -> Iterator[tuple[str, int]]:
        """With the tenant of each."""
        for key in self.keys():
            entry = index.get(key)
            assert entry is not None
            yield key.cache_salt, entry.record_bytes

    def _check_counts(self) -> None:
        statistics = self.own_statistics()
        for name in COUNTED:
            if getattr(statistics, name) != self.counts[name]:
                self._findings.report(
                    "counters", f"L2 {self.name}: {name} is {getattr(statistics, name)}, seen were {self.counts[name]}"
                )

    def _report(self, text: str) -> None:
        self._findings.report("plan", f"L2 {self.name}: {text}")

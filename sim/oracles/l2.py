"""`WatchedAdapter`: any L2 adapter with a judge at the port.

Counts locks by lookups and unlocks, and loads by key: no cell is loaded twice at once, everything that is loaded was
locked as strongly as the adapter promises, every lock comes back, and what is handed over to be stored is what its key
stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Adapter, L2Usage, LockKind, LockStrength, StoreAnswer, TaskId
from kvcore.ports import Notice, Tracer
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.truth import Truth


class WatchedAdapter:
    """Passes every call on. `loading` is shared by the adapters of one cache: the key is loaded from one of them
    only."""

    def __init__(
        self, inner: L2Adapter, truth: Truth, findings: Findings, tracer: Tracer, loading: dict[ObjectKey, str]
    ) -> None:
        self._inner = inner
        self._truth = truth
        self._findings = findings
        self._tracer = tracer
        self._loading = loading
        self._tasks: dict[tuple[str, TaskId], tuple[ObjectKey, ...]] = {}
        self._locks: dict[ObjectKey, int] = {}
        self.name: str = inner.name
        self.lock_strength: LockStrength = inner.lock_strength
        self.store_notice: Notice = inner.store_notice
        self.lookup_notice: Notice = inner.lookup_notice
        self.load_notice: Notice = inner.load_notice

    @property
    def inner(self) -> L2Adapter:
        return self._inner

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        for key, buffer in zip(keys, buffers):
            self._truth.check(key, buffer, f"handed to L2 {self.name}")
        task = self._inner.submit_store(keys, buffers)
        self._tracer.event("l2.store", self.name, task, len(keys))
        return task

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        done = self._inner.pop_completed_stores()
        for task, answers in done.items():
            self._tracer.event("l2.stored", self.name, task, *[answer.value for answer in answers])
        return done

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        task = self._inner.submit_lookup_and_lock(keys)
        self._tasks["lookup", task] = tuple(keys)
        self._tracer.event("l2.lookup", self.name, task, len(keys))
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        found = self._inner.take_lookup(task)
        if found is None:
            return None
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
            self._loading[key] = self.name
        task = self._inner.submit_load(keys, buffers)
        self._tasks["load", task] = tuple(keys)
        self._tracer.event("l2.load", self.name, task, len(keys))
        return task

    def take_load(self, task: TaskId) -> int | None:
        loaded = self._inner.take_load(task)
        if loaded is not None:
            for key in self._tasks.pop(("load", task)):
                self._loading.pop(key, None)
            self._tracer.event("l2.loaded", self.name, task, loaded.bit_count())
        return loaded

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
        """No lock, lookup or load is open."""
        if self._locks or self._inner.usage().locked:
            self._report(f"at rest, {len(self._locks)} keys are locked ({self._inner.usage().locked} by its own count)")
        if self._tasks:
            self._report(f"at rest, {len(self._tasks)} tasks were never taken")

    def _report(self, text: str) -> None:
        self._findings.report("plan", f"L2 {self.name}: {text}")

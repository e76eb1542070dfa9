"""`UnreliableAdapter` and `UnreliableBackend`: an L2 that works, except where a hook says otherwise.

They stand around the production adapter, at its two sides: the adapter's port, where tasks are submitted and taken, and
the backend's, where one record at a time is read, written or removed. Without hooks both pass every call on.

What a hook may do at the port stays inside the port's contract, which says that a store's faults are never more than
missing bits:

    refuse a task        an exception at submit: the adapter has not taken it
    keep an answer back  the result of a lookup cannot be taken yet; the notice comes (again) when it can
    say it twice         a notice without anything new, a completed store in two lists
    fail an unlock       it is tried again after a moment, for an adapter must get it done
    lose a lock          what was found is no longer protected and goes; its unlock, when it comes, is not passed on

Who holds: what is kept back, and locks that were lost, belong here until they are let out or the adapter is closed.
Buffers are none of our business. The notices are the inner adapter's.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Adapter, L2Usage, StoreAnswer, TaskId
from kvcore.l2.backend import Backend, Scan
from kvcore.l2.envelope import Defect
from kvcore.ports import Notice
from kvcore.sim.loop import SimLoop

WITHHELD = -1
"""What `CallHook.delays` answers for a lookup whose answer shall not come by itself."""

UNLOCK_RETRY_NS = 1_000_000


class CallHook:
    """Somebody who meddles with the calls of one adapter. The methods here do nothing; override one."""

    def submits(self, operation: str, keys: Sequence[ObjectKey]) -> None:
        """A "store", "lookup", "load" or "unlock" is about to be passed on. Raise StoreError to refuse it."""

    def delays(self, task: TaskId) -> int:
        """Nanoseconds for which a lookup's answer is kept back, or WITHHELD."""
        return 0

    def found(self, keys: Sequence[ObjectKey]) -> None:
        """A lookup answers that these are there and locked. Its caller learns it when this returns."""

    def repeats(self, operation: str) -> bool:
        """A "store", "lookup" or "load" has completed. Shall it be announced a second time?"""
        return False


class UnreliableAdapter:
    """`kvcore.l2.adapter.L2Adapter` around `inner`. See the module's text."""

    def __init__(self, inner: L2Adapter, loop: SimLoop) -> None:
        self.inner = inner
        self.name = inner.name
        self.lock_strength = inner.lock_strength
        self.store_notice = inner.store_notice
        self.lookup_notice = inner.lookup_notice
        self.load_notice = inner.load_notice
        self.hooks: list[CallHook] = []
        self._loop = loop
        self._closed = False
        self._looked_up: dict[TaskId, tuple[ObjectKey, ...]] = {}
        self._withheld: dict[TaskId, None] = {}
        self._said_twice: dict[TaskId, list[StoreAnswer]] = {}
        self._locks: dict[ObjectKey, int] = {}
        self._lost: dict[ObjectKey, int] = {}
        self._unlocks_due = 0

    # --- store and load

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        self._ask("store", keys)
        return self.inner.submit_store(keys, buffers)

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        again, self._said_twice = self._said_twice, {}
        done = self.inner.pop_completed_stores()
        if done and self._repeated("store", self.store_notice):
            self._said_twice = dict(done)
        return {**again, **done}

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        self._ask("load", keys)
        return self.inner.submit_load(keys, buffers)

    def take_load(self, task: TaskId) -> int | None:
        bits = self.inner.take_load(task)
        if bits is not None:
            self._repeated("load", self.load_notice)
        return bits

    # --- lookup and locks

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        self._ask("lookup", keys)
        task = self.inner.submit_lookup_and_lock(keys)
        self._looked_up[task] = tuple(keys)
        delays_ns = [hook.delays(task) for hook in tuple(self.hooks)]
        if any(delays_ns):
            self._withheld[task] = None
            if WITHHELD not in delays_ns:
                self._loop.call_later_ns(sum(delays_ns), self.let_out, task)
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        bits = None if task in self._withheld else self.inner.take_lookup(task)
        if bits is None:
            return None
        found = [key for position, key in enumerate(self._looked_up.pop(task)) if bits >> position & 1]
        for key in found:
            self._locks[key] = self._locks.get(key, 0) + 1
        for hook in tuple(self.hooks) if found else ():
            hook.found(found)
        self._repeated("lookup", self.lookup_notice)
        return bits

    def let_out(self, task: TaskId) -> None:
        """The answer of this lookup can be taken now. Nothing happens if it could before."""
        if self._withheld.pop(task, self) is not self and not self._closed:
            self.lookup_notice.signal()

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        self._pass_unlocks([key for key in keys if not self._was_lost(key)])

    def _pass_unlocks(self, kept: Sequence[ObjectKey]) -> None:
        try:
            self._ask("unlock", kept)
        except StoreError:
            self._unlocks_due += 1
            self._loop.call_later_ns(UNLOCK_RETRY_NS, self._unlock_again, kept)
        else:
            self.inner.submit_unlock(kept)

    def can_lose(self, key: ObjectKey) -> bool:
        """There is a lock on `key` that has not been lost."""
        return self._locks.get(key, 0) > self._lost.get(key, 0)

    def lose_lock(self, key: ObjectKey) -> None:
        """One lock on `key` is not worth anything any more, and the record goes as soon as no other holds it."""
        assert self.can_lose(key)
        self._lost[key] = self._lost.get(key, 0) + 1
        self.inner.submit_unlock([key])
        self.inner.delete([key])

    # --- the rest

    @property
    def work_inflight(self) -> int:
        """Blocking work, and unlocks still to be done."""
        return int(getattr(self.inner, "work_inflight", 0)) + self._unlocks_due

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self.inner.delete(keys)

    def usage(self) -> L2Usage:
        return self.inner.usage()

    def keys(self) -> list[ObjectKey]:
        return self.inner.keys()

    def close(self) -> None:
        self._closed = True
        self._withheld.clear()
        self._looked_up.clear()
        self._said_twice.clear()
        self.inner.close()

    # --- inside

    def _ask(self, operation: str, keys: Sequence[ObjectKey]) -> None:
        for hook in tuple(self.hooks):
            hook.submits(operation, keys)

    def _repeated(self, operation: str, notice: Notice) -> bool:
        wanted = [hook.repeats(operation) for hook in tuple(self.hooks)]
        if any(wanted):
            notice.signal()
        return any(wanted)

    def _was_lost(self, key: ObjectKey) -> bool:
        """An unlock has come. Is it for a lock that was lost? Each of those is met once."""
        _take_one(self._locks, key)
        return _take_one(self._lost, key)

    def _unlock_again(self, keys: Sequence[ObjectKey]) -> None:
        self._unlocks_due -= 1
        self._pass_unlocks(keys)


def _take_one(counts: dict[ObjectKey, int], key: ObjectKey) -> bool:
    """Count one less. False: there was none."""
    count = counts.get(key, 0)
    if count > 1:
        counts[key] = count - 1
    else:
        counts.pop(key, None)
    return count > 0


class RecordHook:
    """Somebody who meddles with single records. Called inside blocking work; the methods here do nothing."""

    def before(self, operation: str, key: ObjectKey) -> None:
        """A "write", "read" or "delete" of `key` is about to happen. Raise an OSError to let it fail."""

    def after(self, operation: str, key: ObjectKey) -> None:
        """It has happened, and its caller takes it for done."""


class UnreliableBackend:
    """`kvcore.l2.backend.Backend` around `inner`. See the module's text."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.hooks: list[RecordHook] = []

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return self.inner.record_bytes(key, payload_bytes)

    def open(self) -> Scan:
        return self.inner.open()

    def write(self, key: ObjectKey, payload: memoryview) -> None:
        self._before("write", key)
        self.inner.write(key, payload)
        self._after("write", key)

    def read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        self._before("read", key)
        defect = self.inner.read(key, into)
        self._after("read", key)
        return defect

    def delete(self, key: ObjectKey) -> None:
        self._before("delete", key)
        self.inner.delete(key)
        self._after("delete", key)

    def close(self) -> None:
        self.inner.close()

    def _before(self, operation: str, key: ObjectKey) -> None:
        for hook in tuple(self.hooks):
            hook.before(operation, key)

    def _after(self, operation: str, key: ObjectKey) -> None:
        for hook in tuple(self.hooks):
            hook.after(operation, key)

"""L2 faults of calls at the adapter's port: what the cache is told, and when."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import TaskId
from kvcore.sim.faults.kind import MS, End, FaultEvent, Kind, Shape, counted
from kvcore.sim.faults.l2_attach import by_count, either, everywhere, for_a_while, hooked, throughout
from kvcore.sim.faults.l2_site import L2Site
from kvcore.sim.faults.trigger import Trigger
from kvcore.sim.streams import RandomStream
from kvcore.sim.unreliable import WITHHELD, CallHook, RecordHook

OPERATIONS = ("any", "store", "lookup", "load", "unlock", "delete")
"""What `amount` of "l2.error_nth" stands for. "any" is any of the four calls; deletions count record by record."""

_IO_OF = {"store": "write", "load": "read"}


def store_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class _FailKeys(RecordHook):
    """Lets the next I/O of marked keys fail."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self._marked: dict[tuple[str, ObjectKey], None] = {}

    def mark(self, operation: str, keys: Sequence[ObjectKey]) -> None:
        self._marked.update(dict.fromkeys((_IO_OF[operation], key) for key in keys))

    def forget(self, operation: str, keys: Sequence[ObjectKey]) -> None:
        """A new task for these: what an earlier one did not need to do does not fail this one."""
        for key in keys:
            self._marked.pop((_IO_OF[operation], key), None)

    def before(self, operation: str, key: ObjectKey) -> None:
        if self._marked.pop((operation, key), self) is not self:
            self._trigger.fired()
            raise store_error(errno.EIO)


class _ErrorNth(CallHook):
    """Fails whole calls of one operation, or of any."""

    def __init__(self, trigger: Trigger, records: _FailKeys) -> None:
        self._trigger = trigger
        self._records = records
        self._wanted = OPERATIONS[trigger.event.amount]

    def submits(self, operation: str, keys: Sequence[ObjectKey]) -> None:
        if operation in _IO_OF:
            self._records.forget(operation, keys)
        if self._wanted not in ("any", operation) or not keys or not self._trigger.comes():
            return
        if operation in _IO_OF:
            self._records.mark(operation, keys)
            return
        self._trigger.fired()
        raise StoreError(f"the store did not answer a {operation}")


class _ErrorDelete(RecordHook):
    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    def before(self, operation: str, key: ObjectKey) -> None:
        if operation == "delete" and self._trigger.hits():
            raise store_error(errno.EIO)


class _Partial(CallHook):
    """Fails some keys of a batch and never all of them."""

    def __init__(self, trigger: Trigger, stream: RandomStream, records: _FailKeys) -> None:
        self._trigger = trigger
        self._stream = stream
        self._records = records

    def submits(self, operation: str, keys: Sequence[ObjectKey]) -> None:
        if operation not in _IO_OF:
            return
        self._records.forget(operation, keys)
        if len(keys) < 2 or not self._trigger.comes():
            return
        spared = self._stream.sample_index(len(keys))
        failed = (spared + 1) % len(keys)  # one that surely fails; each other one perhaps
        bad = [
            key
            for position, key in enumerate(keys)
            if position == failed or (position != spared and self._stream.chance(self._trigger.event.amount, 1000))
        ]
        self._records.mark(operation, bad)


class _Refuse(CallHook):
    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    def submits(self, operation: str, keys: Sequence[ObjectKey]) -> None:
        if operation != "unlock" and self._trigger.hits():
            raise StoreError("the store is not connected")


class _DelayLookup(CallHook):
    """Keeps answers back, for `amount` ns or until they are let out."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self.tasks: list[TaskId] = []

    def delays(self, task: TaskId) -> int:
        if not self._trigger.hits():
            return 0
        self.tasks.append(task)
        return self._trigger.event.amount or WITHHELD


class _Twice(CallHook):
    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    def repeats(self, operation: str) -> bool:
        return self._trigger.hits()


class _AfterFound(CallHook):
    """Takes one of the keys that a lookup has found: its record, or only the lock on it."""

    def __init__(self, site: L2Site, trigger: Trigger, stream: RandomStream, lock: bool) -> None:
        self._site = site
        self._trigger = trigger
        self._stream = stream
        self._lock = lock

    def found(self, keys: Sequence[ObjectKey]) -> None:
        there = list(filter(self._can_go, keys))
        if not there or not self._trigger.hits():
            return
        key = self._stream.pick(there)
        if self._lock:
            self._site.port.lose_lock(key)
        else:
            self._site.medium.remove(key)

    def _can_go(self, key: ObjectKey) -> bool:
        return self._site.port.can_lose(key) if self._lock else self._site.medium.read(key) is not None


def _error_nth(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    if OPERATIONS[trigger.event.amount] == "delete":
        return hooked(site.backend.hooks, _ErrorDelete(trigger))
    records = _FailKeys(trigger)
    return _both(hooked(site.backend.hooks, records), hooked(site.port.hooks, _ErrorNth(trigger, records)))


def _partial_batch(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    records = _FailKeys(trigger)
    return _both(hooked(site.backend.hooks, records), hooked(site.port.hooks, _Partial(trigger, stream, records)))


def _both(first: End, second: End) -> End:
    def end() -> None:
        first()
        second()

    return end


def _refused(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.port.hooks, _Refuse(trigger))


def _delayed_lookups(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    hook = _DelayLookup(trigger)
    take_out = hooked(site.port.hooks, hook)

    def end() -> None:
        take_out()
        for task in hook.tasks:
            site.call(site.port.let_out, task)

    return end


def _duplicate(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.port.hooks, _Twice(trigger))


def _key_gone(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.port.hooks, _AfterFound(site, trigger, stream, lock=False))


def _lock_lost(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.port.hooks, _AfterFound(site, trigger, stream, lock=True))


def _draw_error_nth(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    """One event per operation that is drawn, so that each operation comes in some run."""
    drawn = [stream.randint(1, len(OPERATIONS) - 1) for _ in range(stream.randint(1, 4))]
    early = replace(shape, horizon_ns=shape.horizon_ns // 2)
    events: list[FaultEvent] = []
    for operation in sorted(set(drawn)):
        amount = (operation, operation)
        events += counted("l2.error_nth", stream, early, shape.adapters, nth=(1, 6), amount=amount)
    return events


CALL_KINDS = (
    Kind(
        "l2.error_nth",
        "a call fails as a whole: with an I/O error (store, load, delete), unanswered (lookup), or at its first try "
        "(unlock); `amount` says which operation: 0 any call, 1 store, 2 lookup, 3 load, 4 unlock, 5 delete",
        _draw_error_nth,
        everywhere(_error_nth),
    ),
    Kind(
        "l2.partial_batch",
        "some keys of a batch fail, others do not; each further one in `amount` of 1000 cases",
        either(
            throughout("l2.partial_batch", amount=(100, 900)),
            by_count("l2.partial_batch", nth=(1, 3), amount=(100, 900)),
        ),
        everywhere(_partial_batch),
    ),
    Kind(
        "l2.refused",
        "the adapter refuses lookups, loads and stores with an exception",
        either(for_a_while("l2.refused"), by_count("l2.refused")),
        everywhere(_refused),
    ),
    Kind(
        "l2.lookup_hang",
        "lookups are not answered before the fault ends; what they have locked stays locked",
        either(for_a_while("l2.lookup_hang"), by_count("l2.lookup_hang", nth=(1, 4))),
        everywhere(_delayed_lookups),
    ),
    Kind(
        "l2.late_lookup",
        "a lookup is answered `amount` ns later, after its caller's deadline",
        by_count("l2.late_lookup", nth=(1, 4), amount=(2 * MS, 200 * MS)),
        everywhere(_delayed_lookups),
    ),
    Kind(
        "l2.duplicate_completion",
        "a completed task is announced twice, a completed store also listed twice",
        either(for_a_while("l2.duplicate_completion"), by_count("l2.duplicate_completion")),
        everywhere(_duplicate),
    ),
    Kind(
        "l2.key_gone",
        "a record that a lookup has found is gone before it is loaded",
        either(throughout("l2.key_gone"), by_count("l2.key_gone", nth=(1, 2))),
        everywhere(_key_gone),
    ),
    Kind(
        "l2.lock_lost",
        "a lock that a lookup has taken is lost, and the record with it as soon as nobody else holds it",
        either(throughout("l2.lock_lost"), by_count("l2.lock_lost", nth=(1, 2))),
        everywhere(_lock_lost),
    ),
)

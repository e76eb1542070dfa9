"""Breaking a real store on purpose: every L2 fault of the simulation, at the place where it would happen.

    FaultyAdapter     calls: refused, late, announced twice, locks lost
    FaultyExecutor    blocking work: slow, hanging, lost, done and reported as failed
    faulty_backend    operations on records (errors, keys that go) and the records' bytes

Theory of operation
-------------------
Faults stay inside what each port promises, as in the simulation: beyond that nothing could be expected of the code
above. So bytes are damaged *below* a check: `faulty_backend` puts a record with an envelope of its own into each
payload and damages that; the reader checks it with the production code (`kvcore.l2.envelope`). The store's own envelope
around it stays whole. Each damaged record is thus a defect of its kind, and served bytes are right or none.

Nothing sleeps: what is late is kept back on a timer of the loop. `kvcore.l2.faults` says what strikes when.

For tests of a deployment, and only with `unsafe_faults=true` in the URL. A store that is opened with faults and later
without (or the other way round) finds records that it cannot read: they are misses and are removed.

Who holds: outcomes and lookups that are kept back belong here until their timer; `close` drops them. Buffers of work
that is kept back stay in use: its completion has not been announced. Who announces: the inner notices.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import xxhash

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.adapter import StoreAnswer, TaskId
from kvcore.l2.backend import Backend
from kvcore.l2.coded import coded
from kvcore.l2.envelope import Defect
from kvcore.l2.faults import FaultPlan
from kvcore.l2.shared_backend import SharedBackend
from kvcore.l2.wrapped import CountingAdapter, WrappedAdapter, chosen
from kvcore.l2.wrapped_backend import AnyBackend, WrappedBackend, WrappedShared, is_exclusive, is_shared
from kvcore.ports import Executor, Outcome

T = TypeVar("T")

_NS_PER_S = 1_000_000_000


def _error(number: int) -> OSError:
    return OSError(number, f"{os.strerror(number)} (injected)")


# -- calls


class FaultyAdapter(WrappedAdapter):
    """`inner`, whose calls go wrong as `plan` says. Made and used on the loop thread."""

    def __init__(self, inner: CountingAdapter, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan
        self._loop = asyncio.get_running_loop()
        self._lookups: dict[TaskId, tuple[ObjectKey, ...]] = {}
        self._kept_back: dict[TaskId, asyncio.TimerHandle] = {}
        self._said_twice: dict[TaskId, list[StoreAnswer]] = {}
        self._lost: dict[ObjectKey, int] = {}

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        self._refuse("store")
        return self.inner.submit_store(keys, buffers)

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        again, self._said_twice = self._said_twice, {}
        done = self.inner.pop_completed_stores()
        if done and self.plan.strikes("l2.duplicate_completion"):
            self._said_twice = dict(done)
            self.store_notice.signal()
        return {**again, **done}

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        self._refuse("load")
        return self.inner.submit_load(keys, buffers)

    def take_load(self, task: TaskId) -> int | None:
        bits = self.inner.take_load(task)
        if bits is not None and self.plan.strikes("l2.duplicate_completion"):
            self.load_notice.signal()
        return bits

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        self._refuse("lookup")
        task = self.inner.submit_lookup_and_lock(keys)
        self._lookups[task] = tuple(keys)
        for kind in ("l2.lookup_hang", "l2.late_lookup"):
            if task not in self._kept_back and self.plan.strikes(kind):
                delay_s = self.plan.amount_ns(kind) / _NS_PER_S
                self._kept_back[task] = self._loop.call_later(delay_s, self._let_out, task)
        return task

    def take_lookup(self, task: TaskId) -> int | None:
        bits = None if task in self._kept_back else self.inner.take_lookup(task)
        if bits is None:
            return None
        for key in chosen(self._lookups.pop(task), bits):
            if self.plan.strikes("l2.lock_lost"):
                self._lose(key)
        if self.plan.strikes("l2.duplicate_completion"):
            self.lookup_notice.signal()
        return bits

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        self.inner.submit_unlock([key for key in keys if not self._was_lost(key)])

    def close(self) -> None:
        for timer in self._kept_back.values():
            timer.cancel()
        self._kept_back.clear()
        self._lookups.clear()
        self._said_twice.clear()
        self.inner.close()

    def _refuse(self, call: str) -> None:
        if self.plan.strikes("l2.refused"):
            raise StoreError(f"the store refuses a {call} (injected)")

    def _let_out(self, task: TaskId) -> None:
        del self._kept_back[task]
        self.lookup_notice.signal()

    def _lose(self, key: ObjectKey) -> None:
        self._lost[key] = self._lost.get(key, 0) + 1
        self.inner.submit_unlock([key])
        self.inner.delete([key])

    def _was_lost(self, key: ObjectKey) -> bool:
        count = self._lost.pop(key, 0)
        if count > 1:
            self._lost[key] = count - 1
        return count > 0


# -- blocking work


class FaultyExecutor:
    """`kvcore.ports.Executor` around `inner`. Closing leaves the inner one to its owner."""

    def __init__(self, inner: Executor, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def submit(self, work: Callable[[], T], deliver: Callable[[Outcome[T]], None], cost_bytes: int = 0) -> None:
        plan = self._plan
        if plan.strikes("l2.error_nth"):
            self._inner.submit(partial(_fail, _error(errno.EIO)), deliver, cost_bytes)
        elif plan.strikes("l2.work_lost"):
            self._inner.submit(partial(_fail, TimeoutError("no answer (injected)")), deliver, cost_bytes)
        elif plan.strikes("l2.worker_lost"):
            lost = partial(_fail, TimeoutError("the thread that did this is gone (injected)"))
            self._inner.submit(lost, self._later(deliver, plan.amount_ns("l2.worker_lost")), cost_bytes)
        elif plan.strikes("l2.timeout_unknown"):
            self._inner.submit(work, partial(_deny, deliver), cost_bytes)
        else:
            self._inner.submit(work, self._perhaps_later(deliver), cost_bytes)

    def close(self) -> None:
        self._closed = True

    def _perhaps_later(self, deliver: Callable[[Outcome[T]], None]) -> Callable[[Outcome[T]], None]:
        for kind in ("l2.hang", "l2.late_completion"):
            if self._plan.strikes(kind):
                return self._later(deliver, self._plan.amount_ns(kind))
        if self._plan.strikes("l2.slow_tail"):
            return self._later(deliver, self._plan.part_ns("l2.slow_tail"))
        return deliver

    def _later(self, deliver: Callable[[Outcome[T]], None], delay_ns: int) -> Callable[[Outcome[T]], None]:
        def keep_back(outcome: Outcome[T]) -> None:
            self._loop.call_later(delay_ns / _NS_PER_S, self._deliver, deliver, outcome)

        return keep_back

    def _deliver(self, deliver: Callable[[Outcome[T]], None], outcome: Outcome[T]) -> None:
        if not self._closed:
            deliver(outcome)


def _fail(error: Exception) -> T:  # type: ignore[type-var]
    raise error


def _deny(deliver: Callable[[Outcome[T]], None], outcome: Outcome[T]) -> None:
    deliver(Outcome(None, TimeoutError("no answer in time; it may have been done (injected)")))


# -- operations on records


class _Operations:
    """What may go wrong with one operation on one key."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.known: dict[ObjectKey, None] = {}

    def trouble(self, operation: str) -> OSError | None:
        strikes = self.plan.strikes
        if operation == "write" and strikes("l2.full"):
            return _error(errno.ENOSPC)
        if operation in ("write", "delete") and strikes("l2.read_only"):
            return _error(errno.EROFS)
        if operation == "delete":
            return _error(errno.EIO) if strikes("l2.unlink_fails") else None
        if strikes("l2.shortage"):
            return _error(errno.EMFILE)
        return _error(errno.EIO) if strikes("l2.partial_batch") else None

    def raise_trouble(self, operation: str) -> None:
        error = self.trouble(operation)
        if error is not None:
            raise error

    def gone(self, key: ObjectKey) -> list[ObjectKey]:
        """What vanishes from the store just before `key` is read."""
        if self.plan.strikes("l2.empty"):
            return list(self.known)
        return [key] if self.plan.strikes("l2.key_gone") else []


class _FaultyBackend(WrappedBackend):
    def __init__(self, inner: Backend, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._operations = _Operations(plan)

    def write(self, key: ObjectKey, payload: memoryview) -> None:
        self._operations.raise_trouble("write")
        self._operations.known[key] = None
        self.inner.write(key, payload)

    def read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        self._operations.raise_trouble("read")
        for gone in self._operations.gone(key):
            self.inner.delete(gone)
        return self.inner.read(key, into)

    def delete(self, key: ObjectKey) -> None:
        self._operations.raise_trouble("delete")
        self.inner.delete(key)


class _FaultyShared(WrappedShared):
    def __init__(self, inner: SharedBackend, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._operations = _Operations(plan)

    def write(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[StoreAnswer | Exception]:
        troubles = [self._operations.trouble("write") for _ in orders]
        self._operations.known.update((key, None) for key, _ in orders)
        done = iter(self.inner.write([order for order, trouble in zip(orders, troubles) if trouble is None]))
        return [next(done) if trouble is None else _answer_of(trouble) for trouble in troubles]

    def read(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
        troubles = [self._operations.trouble("read") for _ in orders]
        gone = [one for key, _ in orders for one in self._operations.gone(key)]
        if gone:
            self.inner.delete(gone)
        done = iter(self.inner.read([order for order, trouble in zip(orders, troubles) if trouble is None]))
        return [next(done) if trouble is None else trouble for trouble in troubles]

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        troubles = [self._operations.trouble("delete") for _ in keys]
        done = iter(self.inner.delete([key for key, trouble in zip(keys, troubles) if trouble is None]))
        return [next(done) if trouble is None else trouble for trouble in troubles]


def _answer_of(trouble: OSError) -> StoreAnswer | Exception:
    return StoreAnswer.FULL if trouble.errno == errno.ENOSPC else trouble


# -- the bytes of records

_LENGTH = struct.Struct("<Q")
_VERSION_AT = 8
_CHECKED_BYTES = envelope.FIXED_BYTES - 8


class FaultyCodec:
    """`kvcore.l2.coded.Codec`: a record inside the payload, damaged when it is written, checked when it is read."""

    frame_bytes = _LENGTH.size + envelope.FIXED_BYTES

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan

    def bytes_max(self, key: ObjectKey, payload_bytes: int) -> int:
        return _LENGTH.size + envelope.record_bytes(key, payload_bytes)

    def lengths(self, key: ObjectKey, payload_bytes: int) -> Sequence[int]:
        return [self.bytes_max(key, payload_bytes)]

    def payload_bytes(self, stored_bytes: int, frame: memoryview) -> int | None:
        header = envelope.parse_header(frame[_LENGTH.size :])
        return None if isinstance(header, Defect) else header.payload_bytes

    def encode(self, key: ObjectKey, payload: memoryview) -> bytes | bytearray:
        record = self._record(key, payload)
        whole = bytearray(self.bytes_max(key, len(payload)))
        record = record[: len(whole) - _LENGTH.size]
        whole[: _LENGTH.size] = _LENGTH.pack(len(record))
        whole[_LENGTH.size : _LENGTH.size + len(record)] = record
        return whole

    def decode(self, key: ObjectKey, stored: memoryview, into: memoryview) -> Defect | None:
        (length,) = _LENGTH.unpack_from(stored)
        split = envelope.header_bytes(key)
        record = stored[_LENGTH.size : _LENGTH.size + length]
        body = record[split:]
        count = min(len(body), len(into))
        into[:count] = body[:count]
        return envelope.check_record(key, bytes(record[:split]).ljust(split, b"\0"), into, len(record))

    def _record(self, key: ObjectKey, payload: memoryview) -> bytes:
        """What lies in the store instead of the record, or the record."""
        strikes = self._plan.strikes
        if strikes("l2.misdirected"):
            return _whole(key._replace(chunk_hash=bytes(byte ^ 1 for byte in key.chunk_hash)), payload)
        if strikes("l2.other_model"):
            return _whole(key._replace(model_name=f"{key.model_name[:-1]}~"), payload)
        if strikes("l2.other_tenant"):
            return _whole(key._replace(cache_salt=f"{key.cache_salt[:-1]}~"), payload)
        if strikes("l2.stale_record"):
            return _whole(key, payload[: len(payload) // 2])
        return self._damaged(_whole(key, payload), envelope.header_bytes(key))

    def _damaged(self, record: bytes, split: int) -> bytes:
        plan = self._plan
        if plan.strikes("l2.stale_format"):
            return _older(record)
        if plan.strikes("l2.torn_write"):
            return record[: plan.place("l2.torn_write", len(record))]
        if plan.strikes("l2.bit_flip_header"):
            return _flipped(record, plan.place("l2.bit_flip_header", 8 * split))
        if len(record) > split and plan.strikes("l2.bit_flip_payload"):
            return _flipped(record, 8 * split + plan.place("l2.bit_flip_payload", 8 * (len(record) - split)))
        return record


def _whole(key: ObjectKey, payload: memoryview) -> bytes:
    return b"".join([envelope.encode_header(key, payload), payload])


def _flipped(record: bytes, bit: int) -> bytes:
    damaged = bytearray(record)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def _older(record: bytes) -> bytes:
    """The same record as an earlier version would have written it, its check in order."""
    older = bytearray(record)
    struct.pack_into("<H", older, _VERSION_AT, envelope.FORMAT_VERSION - 1)
    struct.pack_into("<Q", older, _CHECKED_BYTES, xxhash.xxh3_64_intdigest(bytes(older[:_CHECKED_BYTES])))
    return bytes(older)


def faulty_backend(backend: AnyBackend, plan: FaultPlan) -> AnyBackend:
    """`backend`, not yet opened, with what `plan` does to operations and records."""
    if is_shared(backend):
        return coded(_FaultyShared(backend, plan), FaultyCodec(plan))
    assert is_exclusive(backend)
    return coded(_FaultyBackend(backend, plan), FaultyCodec(plan))

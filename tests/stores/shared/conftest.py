"""A shared store in a dict, and adapters on it whose blocking work the test runs by hand, so every order can be shown.

Two adapters on one `Store` are two processes. Nothing here is a thread or a loop: `Hands` is the executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.adapter import L2Usage, LockKind, LockStrength, StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.shared import SharedAdapter
from kvcore.l2.shared_backend import Stored
from kvcore.ports import Outcome


class Hands:
    """An executor whose work is begun, and its outcome delivered, when the test says so."""

    def __init__(self):
        self.pieces = []
        self.closed = False

    def submit(self, work, deliver, cost_bytes=0):
        self.pieces.append((work, deliver))

    def close(self):
        self.closed = True

    def run(self, position=0):
        work, deliver = self.pieces.pop(position)
        deliver(Outcome(work(), None))

    def begin(self, position=0):
        """Do the work now; what is given back delivers its outcome."""
        work, deliver = self.pieces.pop(position)
        outcome = Outcome(work(), None)
        return lambda: deliver(outcome)

    def break_off(self, position=0):
        _, deliver = self.pieces.pop(position)
        deliver(Outcome(None, SystemExit()))

    def run_all(self):
        for _ in range(10_000):
            if not self.pieces:
                return
            self.run()
        raise AssertionError("work that makes work without end")


class Bell:
    def __init__(self):
        self.rung = 0
        self.closed = False

    def signal(self):
        self.rung += 1

    def subscribe(self, callback):
        raise AssertionError("the tests look by themselves")

    def close(self):
        self.closed = True


class Ticks:
    def __init__(self):
        self.ns = 0

    def now_ns(self):
        self.ns += 1_000_000
        return self.ns


@dataclass
class Store:
    """What all processes see. `ages_s` for scans; `failing` keys answer every call with an error."""

    records: dict[ObjectKey, bytes] = field(default_factory=dict)
    ages_s: dict[ObjectKey, float] = field(default_factory=dict)
    failing: set[ObjectKey] = field(default_factory=set)
    down: Exception | None = None
    refused: Exception | None = None
    full: bool = False
    strangers: int = 0
    writes: int = 0
    discards: list = field(default_factory=list)

    def put(self, key, payload, age_s=None):
        self.records[key] = envelope.encode_header(key, payload) + bytes(payload)
        if age_s is not None:
            self.ages_s[key] = age_s


class StoreClient:
    """`SharedBackend` on a `Store`: one process's connection."""

    lock_strength = LockStrength(LockKind.NONE)
    batch_keys = 4
    batch_bytes = 1 << 20

    def __init__(self, store):
        self.store = store
        self.closed = False
        self.scans = 0

    def record_bytes(self, key, payload_bytes):
        return envelope.record_bytes(key, payload_bytes)

    def open(self):
        if self.store.refused is not None:
            raise self.store.refused
        self._check()

    def _check(self):
        if self.store.down is not None:
            raise self.store.down

    def _each(self, keys, call):
        self._check()
        assert len(keys) <= self.batch_keys
        return [StoreError("this key fails") if key in self.store.failing else call(key) for key in keys]

    def find(self, keys):
        return self._each(keys, self.store.records.__contains__)

    def write(self, orders):
        payloads = dict(orders)
        return self._each([key for key, _ in orders], lambda key: self._write(key, payloads[key]))

    def _write(self, key, payload):
        if len(self.store.records.get(key, b"")) == self.record_bytes(key, len(payload)):
            return StoreAnswer.PRESENT
        if self.store.full:
            return StoreAnswer.FULL
        self.store.put(key, payload)
        self.store.writes += 1
        return StoreAnswer.STORED

    def read(self, orders):
        self._check()
        return [StoreError("this key fails") if key in self.store.failing else self._read(key, into)
                for key, into in orders]  # fmt: skip

    def _read(self, key, into):
        record = self.store.records.get(key)
        if record is None:
            return Defect.MISSING
        split = envelope.header_bytes(key)
        body = record[split : split + len(into)]
        into[: len(body)] = body
        return envelope.check_record(key, record[:split].ljust(split, b"\0"), into, len(record))

    def discard(self, key, defect):
        self._check()
        self.store.discards.append((key, defect))
        record = self.store.records.get(key)
        if record is not None:
            split = envelope.header_bytes(key)
            payload = memoryview(record[split:])
            judged = envelope.check_record(key, record[:split].ljust(split, b"\0"), payload, len(record))
            if judged is not None or defect is Defect.OTHER_SIZE:
                del self.store.records[key]

    def delete(self, keys):
        def gone(key):
            self.store.records.pop(key, None)

        return self._each(keys, gone)

    def scan(self):
        self.scans += 1
        self._check()
        for number in range(self.store.strangers):
            yield Stored(None, f"stranger {number}", 10)
        for key, record in list(self.store.records.items()):
            self._check()
            yield Stored(key, repr(key), len(record), self.store.ages_s.get(key))

    def usage(self):
        self._check()
        return L2Usage(0, 12345, 0, 0)

    def close(self):
        self.closed = True


class Process:
    """An adapter and its hands."""

    def __init__(self, store, **limits):
        self.hands = Hands()
        self.client = StoreClient(store)
        self.bells = [Bell(), Bell(), Bell()]
        bells = iter(self.bells)
        self.adapter = SharedAdapter("shared", self.client, self.hands, lambda: next(bells), Ticks(), **limits)

    def ready(self):
        """The scan at the start has ended."""
        self.hands.run_all()
        return self

    def store(self, keys, payloads):
        task = self.adapter.submit_store(keys, [memoryview(payload) for payload in payloads])
        self.hands.run_all()
        return self.adapter.pop_completed_stores()[task]

    def lookup(self, keys):
        task = self.adapter.submit_lookup_and_lock(keys)
        self.hands.run_all()
        return self.adapter.take_lookup(task)

    def load(self, keys, sizes):
        buffers = [bytearray(size) for size in sizes]
        task = self.adapter.submit_load(keys, [memoryview(buffer) for buffer in buffers])
        self.hands.run_all()
        return self.adapter.take_load(task), buffers


@dataclass(frozen=True)
class Kit:
    """What the tests build from (they cannot import this file)."""

    process: Callable[..., Process] = Process
    store: Callable[[], Store] = Store

    @staticmethod
    def key(number, salt=""):
        return ObjectKey(b"%032d" % number, "model", 0, 0, salt)

    @staticmethod
    def payload(number, size=100):
        return bytes([number % 251]) * size

    def many(self, numbers, size=100, salt=""):
        numbers = list(numbers)
        return [self.key(number, salt) for number in numbers], [self.payload(number, size) for number in numbers]

    def size_of(self, records, size=100, salt=""):
        return records * envelope.record_bytes(self.key(0, salt), size)


@pytest.fixture
def kit():
    return Kit()

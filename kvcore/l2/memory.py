"""An L2 in this process's memory: for tests, for the simulation, and as the smallest example of a backend.

Records carry the same envelope as everywhere else, so that what is done to them (`records` is open to tests and to
the simulated world's faults) is found the same way. The backend outlives its adapter: a restarted server
that is given the same `MemoryBackend` finds its L2 warm. One adapter at a time uses it.

Who holds the memory: `records`, as immutable bytes; a write copies the caller's payload, a read copies into the
caller's buffer. The adapter announces. A record is freed by `delete` or replaced by the next write of its key.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey, encode_key
from kvcore.l2 import envelope
from kvcore.l2.backend import Found, Scan
from kvcore.l2.envelope import Defect
from kvcore.l2.indexed import IndexedAdapter
from kvcore.ports import Executor, Notice
from kvcore.quota import Quota


class MemoryBackend:
    """`kvcore.l2.backend.Backend` on a dict. Each method is one dict operation, so threads need no lock."""

    def __init__(self) -> None:
        self.records: dict[ObjectKey, bytes] = {}
        self._open = False

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return envelope.record_bytes(key, payload_bytes)

    def open(self) -> Scan:
        self._open = True
        found: list[Found] = []
        defects: dict[Defect, int] = {}
        for key, record in list(self.records.items()):
            defect = _defect_of(key, record)
            if defect is None:
                found.append(Found(key, len(record) - envelope.header_bytes(key), len(record)))
            else:
                defects[defect] = defects.get(defect, 0) + 1
                del self.records[key]
        return Scan(tuple(found), defects)

    def write(self, key: ObjectKey, payload: memoryview) -> None:
        self._check_open()
        self.records[key] = b"".join([envelope.encode_header(key, payload), payload])

    def read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        self._check_open()
        record = self.records.get(key)
        if record is None:
            return Defect.MISSING
        split = envelope.header_bytes(key)
        body = memoryview(record)[split:]
        count = min(len(body), len(into))
        into[:count] = body[:count]
        return envelope.check_record(key, record[:split].ljust(split, b"\0"), into, len(record))

    def delete(self, key: ObjectKey) -> None:
        self._check_open()
        self.records.pop(key, None)

    def close(self) -> None:
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError("the memory store is closed")


def _defect_of(key: ObjectKey, record: bytes) -> Defect | None:
    """Everything but the payload's checksum, which each read checks."""
    header = envelope.parse_header(record)
    if isinstance(header, Defect):
        return header
    if header.record_bytes != len(record):
        return Defect.TORN if len(record) < header.record_bytes else Defect.LONG
    encoded = envelope.key_of(header, record)
    if isinstance(encoded, Defect):
        return encoded
    return None if encoded == encode_key(key) else Defect.FOREIGN


def memory_adapter(
    name: str,
    *,
    executor: Executor,
    notice_factory: Callable[[], Notice],
    capacity_bytes: int | None = None,
    quota: Quota | None = None,
    backend: MemoryBackend | None = None,
) -> IndexedAdapter:
    """An adapter on `backend` (default: a fresh, empty one). `capacity_bytes` includes the envelopes."""
    backend = MemoryBackend() if backend is None else backend
    return IndexedAdapter(name, backend, executor, notice_factory, capacity_bytes, quota=quota)

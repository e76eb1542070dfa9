"""Object stores: S3 and what speaks like it, Google Cloud Storage, Azure Blob, a directory, memory. Through obstore.

One object per record, named by its key (`kvcore.l2.objectstore_names`): header and payload as one body.

    s3://bucket/prefix?endpoint=http://127.0.0.1:8333&region=...    gs://bucket/prefix    az://container/prefix
    objectstore+file:///var/cache/objects                           objectstore+memory:

Opening: GET the marker. There and right: nothing is written, so a bucket that only may be read serves hits. Of
another format, no such bucket, refused: ConfigError. Missing: the marker is put, which shows that writing works.

Write: HEAD first. An object of the record's length is PRESENT; of another length it is bad or of another shape, and is
overwritten. None: a create-only put, so the second of two writers changes nothing under a reader; where the store does
not know that, a plain put. An object appears as a whole or not at all: that is the store's promise for a single put.

Read: one GET, streamed. The size it announces is that of the version whose body follows; header and payload are
checked as everywhere. A body that breaks off is an error of the store and keeps the object.

Copies between the caller's buffer and the socket: none on the way out beside the client's own (the client sends header
and payload as they lie), one on the way in (the client receives into chunks of its own; it cannot be given ours).

Discard: a record whose checksum failed is read once more, and kept if it is good (the flip happened on the way). Then
the bad read's ETag is compared with a HEAD before the delete. A newer record that is put in between those two
requests (about a millisecond) is lost, which is a miss. S3 has no conditional delete everywhere, so it stays at that.

Lock strength: NONE. Others may delete at any time, and lifecycle rules do. Capacity: none of its own; the adapter's
ledger keeps the limit, by listing. Restart: everything is there again; nothing is kept in this process.
Limits: one request per record and direction, `requests_parallel` at once; a put is one body, so records stay below the
store's limit for single puts (5 GB on S3). GCS and Azure are built the same way and not tested against a real server.

Who holds: buffers stay the caller's, and when a call returns the client has let go of them. Results announce; `delete`
and `discard` free. The request threads belong to this backend until `close`, which does not wait for running requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.adapter import L2Usage, LockKind, LockStrength, StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.file import MARKER
from kvcore.l2.objectstore_client import (
    ExistsError,
    FullError,
    Meta,
    MissingBucketError,
    ObjectClient,
    ObjectStoreOptions,
    RefusedError,
    check_options,
)
from kvcore.l2.objectstore_names import MARKER_NAME, below, joined, key_of_name, needs_header, object_name
from kvcore.l2.shared_backend import Stored
from kvcore.runtime.calls import RequestThreads
from kvcore.runtime.wall import wall_s

T = TypeVar("T")
R = TypeVar("R")

_BATCH_KEYS = 64
_BATCH_BYTES = 64 * 1024 * 1024
_HEAD_BYTES = 1024


class ObjectStoreBackend:
    """`kvcore.l2.shared_backend.SharedBackend` over one bucket and prefix."""

    lock_strength = LockStrength(LockKind.NONE)
    batch_keys = _BATCH_KEYS
    batch_bytes = _BATCH_BYTES

    def __init__(self, options: ObjectStoreOptions, client: ObjectClient | None = None) -> None:
        """`client`: one that is there already (the memory kind, after a restart); else it is made by `open`."""
        check_options(options)
        self._options = options
        self._client = client
        self._bad: dict[ObjectKey, Meta] = {}  # bad records, from the read to the discard
        self._requests = RequestThreads(options.requests_parallel, "kvcore-objects")
        self._closed = False

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return envelope.record_bytes(key, payload_bytes)

    # --- opening -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        if self._client is None:
            self._client = ObjectClient(self._options)
        try:
            self._check_marker(self._client)
        except MissingBucketError as error:
            raise ConfigError(
                f"there is no bucket {self._options.bucket!r}: {error}; create it, or check the name"
            ) from error
        except RefusedError as error:
            raise ConfigError(
                f"the bucket {self._options.bucket!r} refuses us: {error}; check keys and rights"
            ) from error

    def close(self) -> None:
        self._closed = True
        self._requests.close()

    def _check_marker(self, client: ObjectClient) -> None:
        path = self._path(MARKER_NAME)
        text = bytearray(len(MARKER))
        meta = client.get(path, [memoryview(text)])
        if meta is None:
            client.put(path, [MARKER], create=False)
        elif meta.size != len(MARKER) or text != MARKER:
            raise ConfigError(
                f"{self._options.bucket!r} has another format below {self._options.prefix!r}; use another prefix"
            )

    # --- batches -------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
        return self._each(self._find, keys)

    def write(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[StoreAnswer | Exception]:
        return self._each(self._write, orders)

    def read(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
        return self._each(self._read, orders)

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        paths = [self._object_path(key) for key in keys]
        try:
            self._ready().delete(paths)
        except StoreError as error:
            if len(paths) == 1:
                return [error]
            return self._each(self._delete, paths)
        return [None] * len(paths)

    def discard(self, key: ObjectKey, defect: Defect) -> None:
        client = self._ready()
        bad = self._bad.pop(key, None)
        if bad is None or (defect is Defect.FLIPPED and self._is_good(key, bad)):
            return
        path = self._object_path(key)
        there = client.head(path)
        if there is not None and there.e_tag == bad.e_tag:
            client.delete([path])

    def scan(self) -> Iterator[Stored]:
        now_s = wall_s()
        for meta in self._ready().listing(self._options.prefix):
            name = below(self._options.prefix, meta.path)
            if name != MARKER_NAME:
                key = self._key_of(name, meta.path)
                yield Stored(key, name, meta.size, max(0.0, now_s - meta.modified_s))

    def usage(self) -> L2Usage:
        """A bucket does not say how full it is."""
        return L2Usage(0, None, 0, 0)

    # --- one record ----------------------------------------------------------------------------------------------

    def _find(self, key: ObjectKey) -> bool:
        meta = self._ready().head(self._object_path(key))
        return meta is not None and meta.size >= envelope.header_bytes(key)

    def _write(self, order: tuple[ObjectKey, memoryview]) -> StoreAnswer:
        key, payload = order
        client, path = self._ready(), self._object_path(key)
        there = client.head(path)
        if there is not None and there.size == self.record_bytes(key, len(payload)):
            return StoreAnswer.PRESENT
        try:
            client.put(path, [envelope.encode_header(key, payload), payload], create=there is None)
        except ExistsError:
            return StoreAnswer.RETRY  # somebody was faster; the next try finds out with what
        except FullError:
            return StoreAnswer.FULL
        return StoreAnswer.STORED

    def _read(self, order: tuple[ObjectKey, memoryview]) -> Defect | None:
        key, into = order
        head = bytearray(envelope.header_bytes(key))
        meta = self._ready().get(self._object_path(key), [memoryview(head), into])
        if meta is None:
            return Defect.MISSING
        defect = envelope.check_record(key, memoryview(head), into, meta.size)
        if defect is not None:
            self._bad[key] = meta
        return defect

    def _is_good(self, key: ObjectKey, bad: Meta) -> bool:
        """Whether a second look finds the record whole: then the damage was done on the way."""
        payload_bytes = bad.size - envelope.header_bytes(key)
        return payload_bytes >= 0 and self._read((key, memoryview(bytearray(payload_bytes)))) is None

    def _delete(self, path: str) -> None:
        self._ready().delete([path])

    def _key_of(self, name: str, path: str) -> ObjectKey | None:
        return self._key_in(path, _HEAD_BYTES) if needs_header(name) else key_of_name(name)

    def _key_in(self, path: str, head_bytes: int) -> ObjectKey | None:
        """The key in a record's header. None: it is not a record, or it is gone."""
        head = bytearray(head_bytes)
        meta = self._ready().get(path, [memoryview(head)])
        header = envelope.parse_header(memoryview(head)[: 0 if meta is None else meta.size])
        if isinstance(header, Defect):
            return None
        if header.header_bytes > head_bytes:
            return self._key_in(path, header.header_bytes)
        key = envelope.object_key_of(header, memoryview(head))
        return None if isinstance(key, Defect) else key

    # --- the rest ------------------------------------------------------------------------------------------------

    def _each(self, call: Callable[[T], R], orders: Sequence[T]) -> list[R | Exception]:
        """`call` for each order, several at once. An error is the result of its own order."""
        self._ready()
        return self._requests.map(partial(_outcome, call), orders)

    def _ready(self) -> ObjectClient:
        if self._closed or self._client is None:
            raise StoreError("the object store is closed" if self._closed else "the object store is not open")
        return self._client

    def _path(self, name: str) -> str:
        return joined(self._options.prefix, name)

    def _object_path(self, key: ObjectKey) -> str:
        return self._path(object_name(key))


def _outcome(call: Callable[[T], R], order: T) -> R | Exception:
    try:
        return call(order)
    except (OSError, StoreError) as error:
        return error


def open_backend(options: ObjectStoreOptions) -> ObjectStoreBackend:
    """The backend of these options. ConfigError: they can never work. No I/O before `open`."""
    return ObjectStoreBackend(options)

"""NIXL over UCX's shared memory: a pool of memory that the processes of one machine share.

    kvcore store pool /run/kvcore/pool.sock --memory 64GiB          the pool, a process of its own
    nixl+ucx:///run/kvcore/pool.sock                                its users

The pool says over its socket what lies where; bytes go straight between the caller's buffer and the pool's memory, in
one copy, by this process's own NIXL agent (UCX takes cross-memory attach where the kernel allows it, else its loopback
TCP). A batch is one transfer.

Write: reserve room for all records (PRESENT where one of the key and length is there, FULL where no room can be made),
move header and payload, commit. A record is visible when it is committed. Read: locate (which pins), move, check the
envelope, release. A record that turns out bad is removed by its number, so a newer one of the key is never touched.

Lock strength: NONE; the pool evicts what was not used for longest when it needs room. Capacity: the pool's; a
`capacity` here limits what this cluster keeps beside others. Restart: of this process, nothing is lost; of the pool,
everything is, and the next call joins the new one. A process that dies gives back what it had reserved and pinned.

Copies between the caller's buffer and the pool: one (the transfer) where the buffer lies in a region given to
`register_region`, two elsewhere.

Limits: one machine; one transfer at a time per process, since an agent belongs to one thread at a time, and a second
agent takes seconds to come up. `timeout_s` bounds the talk with the pool, not a transfer: put a deadline around the
adapter. All users run as the pool's user.

Who holds: this object its agent, frames and connections; the pool the memory; buffers stay the caller's. A region is
held until `close` and the end of the last transfer.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey, decode_key, encode_key
from kvcore.l2 import envelope
from kvcore.l2 import nixl_pool_wire as wire
from kvcore.l2.adapter import L2Usage, LockKind, LockStrength, StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.nixl_agent import NixlAgent, Span
from kvcore.l2.shared_backend import Stored
from kvcore.runtime.clock import SystemClock

_BATCH_KEYS = 512
_BATCH_BYTES = 16 * 1024 * 1024
_TOKEN_BYTES = 8
_PAGE = 1000
_IDLE_MAX = 8
_SUSPECTS_MAX = 4096
_NS_PER_S = 1_000_000_000

Order = tuple[ObjectKey, memoryview]
Placed = tuple[wire.Place, ObjectKey, memoryview]
Piece = tuple[memoryview, int]
"""Bytes here, and their offset in the pool."""

T = TypeVar("T")
A = TypeVar("A", bound=wire.Answer)


@dataclass(frozen=True, slots=True)
class UcxOptions:
    """`path`: the pool's socket."""

    path: str
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError("timeout_s of a NIXL pool is above 0")


class _Link:
    """A connection to the pool. Used by one thread at a time."""

    def __init__(self, options: UcxOptions) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(options.timeout_s)
            self.sock.connect(options.path)
            self.pool = self.ask(wire.Join(wire.VERSION), wire.Welcome)
        except BaseException:
            self.sock.close()
            raise
        if self.pool.version != wire.VERSION:
            self.sock.close()
            raise ConfigError(f"the memory pool speaks version {self.pool.version}, this is version {wire.VERSION}")

    def ask(self, message: wire.Ask, kind: type[A]) -> A:
        wire.send(self.sock, message)
        answer = wire.receive_answer(self.sock)
        if not isinstance(answer, kind):
            raise StoreError("the memory pool answered something else than it was asked")
        return answer


class _Mover(NixlAgent):
    """This process's agent, and the pool that it knows."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "UCX", {})
        self._pool = ""
        self._peer = ""

    def move(self, operation: str, pool: wire.Welcome, pieces: Sequence[Piece]) -> None:
        """READ from or WRITE to the pool. OSError: it did not work, or the pool is gone."""
        spans = [(Span.of(view), pool.base + offset) for view, offset in pieces if len(view)]
        try:
            self._meet(pool)
            local = self._native.get_xfer_descs([(span.first, span.length, 0) for span, _ in spans], "DRAM")
            remote = self._native.get_xfer_descs([(at, span.length, 0) for span, at in spans], "DRAM")
            self.transfer(operation, local, remote, self._peer)
        except Exception as error:  # the package's own types
            self._pool = ""  # the next call introduces itself again
            raise OSError(errno.EIO, f"NIXL did not {operation.lower()} {len(spans)} pieces: {error}") from error

    def _meet(self, pool: wire.Welcome) -> None:
        if self._pool == pool.pool:
            return
        if self._peer:
            with suppress(Exception):  # it is dead, and the package says so with types of its own
                self._native.remove_remote_agent(self._peer)
        name = self._native.add_remote_agent(pool.metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._pool = pool.pool


class UcxBackend:
    """`kvcore.l2.shared_backend.SharedBackend`. See the module text."""

    lock_strength = LockStrength(LockKind.NONE)
    batch_keys = _BATCH_KEYS
    batch_bytes = _BATCH_BYTES

    def __init__(self, options: UcxOptions) -> None:
        self._options = options
        self._idle: deque[_Link] = deque()
        self._regions: list[memoryview] = []
        self._moving = threading.Lock()  # one transfer at a time; guards the mover and its frame
        self._mover: _Mover | None = None
        self._suspects: OrderedDict[ObjectKey, int] = OrderedDict()  # numbers of records that reads have found bad
        self._closed = False

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return envelope.record_bytes(key, payload_bytes)

    def register_region(self, region: memoryview) -> None:
        """Buffers inside `region` (the arena) are used as they lie."""
        self._regions.append(region)

    def open(self) -> None:
        """ConfigError: NIXL or its UCX plugin is missing. OSError: nobody listens on the socket."""
        if self._closed:
            raise StoreError("the NIXL pool is closed")
        with self._moving:
            if self._mover is None:
                self._mover = _new_mover()
        self._talk(lambda link: None)

    def close(self) -> None:
        self._closed = True
        self._drop_idle()
        self._regions.clear()
        self._forget_regions()

    # --- batches -------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
        answer = self._talk(lambda link: link.ask(wire.Find([encode_key(key) for key in keys]), wire.Lengths))
        return [length is not None for length in answer.lengths]

    def write(self, orders: Sequence[Order]) -> list[StoreAnswer | Exception]:
        return self._talk(lambda link: self._write(link, orders))

    def read(self, orders: Sequence[Order]) -> list[Defect | Exception | None]:
        return self._talk(lambda link: self._read(link, orders))

    def discard(self, key: ObjectKey, defect: Defect) -> None:
        """Never touches a newer record: it has another number."""
        number = self._suspects.pop(key, None)
        if number is not None:
            self._talk(lambda link: link.ask(wire.Remove([(encode_key(key), number)]), wire.Done))

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        self._talk(lambda link: link.ask(wire.Remove([(encode_key(key), None) for key in keys]), wire.Done))
        return [None] * len(keys)

    def scan(self) -> Iterator[Stored]:
        link = self._link()
        try:
            page = link.ask(wire.List(True, _PAGE), wire.Listed)
            while page.records:
                for name, length, unused_ns in page.records:
                    yield Stored(_key(name), name.hex(), length, unused_ns / _NS_PER_S)
                page = link.ask(wire.List(False, _PAGE), wire.Listed)
        finally:
            link.sock.close()

    def usage(self) -> L2Usage:
        measured = self._talk(lambda link: link.ask(wire.Measure(), wire.Measured))
        return L2Usage(measured.bytes_used, measured.bytes_capacity, measured.objects, 0)

    # --- records -------------------------------------------------------------------------------------------------

    def _write(self, link: _Link, orders: Sequence[Order]) -> list[StoreAnswer | Exception]:
        wanted = [(encode_key(key), envelope.record_bytes(key, len(payload))) for key, payload in orders]
        places = link.ask(wire.Reserve(wanted), wire.Places).places
        reserved = [
            (place, *order) for place, order in zip(places, orders, strict=True) if isinstance(place, wire.Place)
        ]
        failure = self._put(link.pool, reserved) if reserved else None
        if reserved:
            link.ask(wire.Commit([(place.number, failure is None) for place, _, _ in reserved]), wire.Done)
        return [_ANSWERS[place] if isinstance(place, str) else failure or StoreAnswer.STORED for place in places]

    def _put(self, pool: wire.Welcome, orders: Sequence[Placed]) -> OSError | None:
        parts = [(memoryview(envelope.encode_header(key, payload)), payload) for _, key, payload in orders]
        with self._alone() as mover:
            pieces = self._pieces(mover, [place for place, _, _ in orders], parts)
            for (target, _), source in zip(pieces, [view for both in parts for view in both], strict=True):
                if target is not source:
                    target[:] = source
            return self._moved(mover, "WRITE", pool, pieces)

    def _read(self, link: _Link, orders: Sequence[Order]) -> list[Defect | Exception | None]:
        names = [encode_key(key) for key, _ in orders]
        places = link.ask(wire.Locate(names), wire.Places).places
        there = _placed(places, orders)
        results = iter(self._get(link.pool, there) if there else ())
        answers = [next(results) if isinstance(place, wire.Place) else Defect.MISSING for place in places]
        link.ask(wire.Release(), wire.Done)
        return answers

    def _get(self, pool: wire.Welcome, orders: Sequence[Placed]) -> list[Defect | Exception | None]:
        heads = [memoryview(bytearray(envelope.header_bytes(key))) for _, key, _ in orders]
        parts = [_room(place, head, into) for (place, _, into), head in zip(orders, heads, strict=True)]
        with self._alone() as mover:
            pieces = self._pieces(mover, [place for place, _, _ in orders], parts)
            failure = self._moved(mover, "READ", pool, pieces)
            if failure is not None:
                return [failure] * len(orders)
            for (source, _), target in zip(pieces, [view for both in parts for view in both], strict=True):
                if target is not source:
                    target[:] = source
        return [self._judge(*order, head) for order, head in zip(orders, heads, strict=True)]

    def _judge(self, place: wire.Place, key: ObjectKey, into: memoryview, head: memoryview) -> Defect | None:
        defect = envelope.check_record(key, head, into, place.length)
        if defect is not None:
            self._suspects[key] = place.number
            if len(self._suspects) > _SUSPECTS_MAX:
                with suppress(KeyError):
                    self._suspects.popitem(last=False)
        return defect

    # --- memory --------------------------------------------------------------------------------------------------

    def _pieces(
        self, mover: _Mover, places: Sequence[wire.Place], parts: Sequence[tuple[memoryview, memoryview]]
    ) -> list[Piece]:
        """Each part as it lies where it is registered, else its place in the frame; with its offset in the pool."""
        regions = self._regions
        direct = [[mover.registered(part, regions) for part in both] for both in parts]
        flat = [(part, as_is) for both, known in zip(parts, direct) for part, as_is in zip(both, known)]
        rest = mover.frame(sum(len(part) for part, as_is in flat if not as_is))
        pieces: list[Piece] = []
        for place, both, known in zip(places, parts, direct, strict=True):
            offset = place.offset
            for part, as_is in zip(both, known):
                pieces.append((part if as_is else rest[: len(part)], offset))
                rest = rest if as_is else rest[len(part) :]
                offset += len(part)
        return pieces

    def _moved(self, mover: _Mover, operation: str, pool: wire.Welcome, pieces: Sequence[Piece]) -> OSError | None:
        try:
            mover.move(operation, pool, pieces)
        except OSError as error:
            return error
        return None

    @contextmanager
    def _alone(self) -> Iterator[_Mover]:
        """The mover, and its frame, for one transfer."""
        try:
            with self._moving:
                yield self._ready()
        finally:
            if self._closed:
                self._forget_regions()

    def _ready(self) -> _Mover:
        if self._mover is None or self._closed:
            raise StoreError("the NIXL pool is not open")
        return self._mover

    def _forget_regions(self) -> None:
        """After `close`. Does not wait: whoever has the mover now comes here when he has given it back."""
        if self._moving.acquire(blocking=False):
            try:
                if self._mover is not None:
                    self._mover.forget_regions()
            finally:
                self._moving.release()

    # --- connections ---------------------------------------------------------------------------------------------

    def _talk(self, exchange: Callable[[_Link], T]) -> T:
        """On the connection that was idle last; once more on a fresh one if that has ended meanwhile."""
        with suppress(IndexError):
            link = self._idle.pop()
            with suppress(ConnectionError):
                return self._exchange(link, exchange)
            self._drop_idle()  # the pool has restarted
        return self._exchange(self._link(), exchange)

    def _exchange(self, link: _Link, exchange: Callable[[_Link], T]) -> T:
        try:
            result = exchange(link)
        except BaseException:
            link.sock.close()
            raise
        self._idle.append(link)
        if self._closed or len(self._idle) > _IDLE_MAX:
            self._drop_idle()
        return result

    def _link(self) -> _Link:
        if self._closed:
            raise StoreError("the NIXL pool is closed")
        return _Link(self._options)

    def _drop_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().sock.close()


def _placed(places: Sequence[wire.Place | str], orders: Sequence[Order]) -> list[Placed]:
    """Those that have a place."""
    return [(place, *order) for place, order in zip(places, orders, strict=True) if isinstance(place, wire.Place)]


_ANSWERS = {"present": StoreAnswer.PRESENT, "busy": StoreAnswer.RETRY, "full": StoreAnswer.FULL}


def _room(place: wire.Place, head: memoryview, into: memoryview) -> tuple[memoryview, memoryview]:
    """Where a record goes. Of one that has not the wanted length only the header is worth reading."""
    return (head, into) if place.length == len(head) + len(into) else (head[: place.length], into[:0])


def _key(name: bytes) -> ObjectKey | None:
    try:
        return decode_key(name)
    except StoreError:
        return None


def _new_mover() -> _Mover:
    try:
        return _Mover(f"kvcore-{os.getpid()}-{SystemClock().token(_TOKEN_BYTES)}")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"NIXL has no UCX plugin that works here: {error}") from error


def open_backend(options: UcxOptions) -> UcxBackend:
    """The backend of these options. No I/O before `open`."""
    return UcxBackend(options)

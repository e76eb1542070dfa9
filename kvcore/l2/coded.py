"""Backends whose payloads are changed on the way: compressed, sealed with a key, or damaged on purpose.

Theory of operation
-------------------
A `Codec` turns a payload into other bytes and back. `coded` puts one around a backend of either family; the result is a
backend again, so codecs stack. The store's own envelope is around what the last codec made, so a damaged record is
found before a codec sees it; a codec checks all the same what it is given, for whoever can write the store can write
a well-formed record.

Length. A backend reads a record only into a buffer of exactly its payload's length, and what a payload of n bytes
became may have several lengths. So a codec names the lengths it may have made, few and likeliest first, and a read
tries them in order until one is not OTHER_SIZE. The likeliest is the one that the last payload of this length had: the
objects of one model compress alike, so one read is enough nearly always.

An exclusive store is scanned at the start, and its index must know how long each *payload* is. Where the stored
length does not tell, the first bytes of each record are read (`frame_bytes`); a record without a good frame is removed.

Copies: one more than without a codec, in each direction. Scratch memory is kept per thread: fresh pages would cost more
than the copy.

Capacity counts the length that a payload may have at most (`Codec.bytes_max`), until the next start or scan shows what
it really has.

Who holds: the caller its buffers; each thread its scratch, until it ends. Nothing else is held.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvcore.errors import KvcoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.backend import Found, Scan
from kvcore.l2.envelope import Defect
from kvcore.l2.wrapped_backend import AnyBackend, WrappedBackend, WrappedShared, is_exclusive, is_shared


class Codec(Protocol):
    """See the module text. Used by several threads at once."""

    frame_bytes: int
    """So many first bytes of what `encode` made tell the payload's length."""

    def bytes_max(self, key: ObjectKey, payload_bytes: int) -> int:
        """The greatest length that a payload of this length may get. Pure."""
        ...

    def lengths(self, key: ObjectKey, payload_bytes: int) -> Sequence[int]:
        """All lengths that it may have got, the likeliest first."""
        ...

    def encode(self, key: ObjectKey, payload: memoryview) -> bytes | bytearray:
        """What to store. A KvcoreError or OSError fails the store of this key."""
        ...

    def decode(self, key: ObjectKey, stored: memoryview, into: memoryview) -> Defect | None:
        """Fill `into`. `stored` has been found intact by the envelope and is still hostile input."""
        ...

    def payload_bytes(self, stored_bytes: int, frame: memoryview) -> int | None:
        """How long the payload of a record is, from its first bytes. None: it is no record of ours."""
        ...


class _Scratch(threading.local):
    """Memory of one thread that is used again and again."""

    def __init__(self) -> None:
        self.held = bytearray()

    def take(self, lengths: Sequence[int]) -> list[memoryview]:
        """One view per length, beside each other. Valid until the next call in this thread."""
        if len(self.held) < sum(lengths):
            self.held = bytearray(sum(lengths))
        whole, start, views = memoryview(self.held), 0, []
        for length in lengths:
            views.append(whole[start : start + length])
            start += length
        return views


class CodedBackend(WrappedBackend):
    """An exclusive store behind `codec`."""

    def __init__(self, inner: AnyBackend, codec: Codec) -> None:
        assert is_exclusive(inner)
        super().__init__(inner)
        self._codec = codec
        self._scratch = _Scratch()

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return self.inner.record_bytes(key, self._codec.bytes_max(key, payload_bytes))

    def open(self) -> Scan:
        scan = self.inner.open()
        kept = [record for found in scan.records if (record := self._seen(found)) is not None]
        lost = len(scan.records) - len(kept)
        defects = dict(scan.defects)
        if lost:
            defects[Defect.FOREIGN] = defects.get(Defect.FOREIGN, 0) + lost
        return replace(scan, records=tuple(kept), defects=defects)

    def write(self, key: ObjectKey, payload: memoryview) -> None:
        self.inner.write(key, memoryview(self._codec.encode(key, payload)))

    def read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        for length in self._codec.lengths(key, len(into)):
            [stored] = self._scratch.take([length])
            defect = self.inner.read(key, stored)
            if defect is None:
                return self._codec.decode(key, stored, into)
            if defect is not Defect.OTHER_SIZE:
                return defect
        return Defect.OTHER_SIZE

    def _seen(self, found: Found) -> Found | None:
        """The record with its payload's true length; one that has none is removed."""
        payload_bytes = self._length_of(found)
        if payload_bytes is not None:
            return replace(found, payload_bytes=payload_bytes)
        self.inner.delete(found.key)
        return None

    def _length_of(self, found: Found) -> int | None:
        """A short read shows the frame, if the store fills what it was given; else the whole record is read."""
        frame_bytes = min(self._codec.frame_bytes, found.payload_bytes)
        frame = memoryview(bytearray(frame_bytes))
        self.inner.read(found.key, frame)
        length = self._codec.payload_bytes(found.payload_bytes, frame)
        if length is None:
            [whole] = self._scratch.take([found.payload_bytes])
            if self.inner.read(found.key, whole) is None:
                length = self._codec.payload_bytes(found.payload_bytes, whole[:frame_bytes])
        return length


class CodedShared(WrappedShared):
    """A shared store behind `codec`."""

    def __init__(self, inner: AnyBackend, codec: Codec) -> None:
        assert is_shared(inner)
        super().__init__(inner)
        self._codec = codec
        self._scratch = _Scratch()

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return self.inner.record_bytes(key, self._codec.bytes_max(key, payload_bytes))

    def write(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[StoreAnswer | Exception]:
        results: list[StoreAnswer | Exception] = []
        encoded: list[tuple[ObjectKey, memoryview]] = []
        failed: dict[int, Exception] = {}
        for position, (key, payload) in enumerate(orders):
            try:
                encoded.append((key, memoryview(self._codec.encode(key, payload))))
            except (KvcoreError, OSError) as error:
                failed[position] = error
        written = iter(self.inner.write(encoded) if encoded else [])
        for position in range(len(orders)):
            results.append(failed[position] if position in failed else next(written))
        return results

    def read(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
        results: list[Defect | Exception | None] = [Defect.OTHER_SIZE] * len(orders)
        lengths = [list(self._codec.lengths(key, len(into))) for key, into in orders]
        left = list(range(len(orders)))
        while left := [position for position in left if lengths[position]]:
            self._read_once(orders, left, [lengths[position].pop(0) for position in left], results)
            left = [position for position in left if results[position] is Defect.OTHER_SIZE]
        return results

    def _read_once(
        self,
        orders: Sequence[tuple[ObjectKey, memoryview]],
        chosen: list[int],
        lengths: list[int],
        results: list[Defect | Exception | None],
    ) -> None:
        scratch = self._scratch.take(lengths)
        answers = self.inner.read([(orders[position][0], view) for position, view in zip(chosen, scratch)])
        for position, view, answer in zip(chosen, scratch, answers):
            key, into = orders[position]
            results[position] = self._codec.decode(key, view, into) if answer is None else answer


def coded(backend: AnyBackend, codec: Codec) -> AnyBackend:
    """`backend` behind `codec`, of the same family."""
    return CodedShared(backend, codec) if is_shared(backend) else CodedBackend(backend, codec)

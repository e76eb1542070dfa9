"""Blocking work of a shared adapter: what runs inside the executor, away from the loop.

Plain values in, plain values out, as in `kvcore.l2.work`. A backend that raises for a whole batch, or that gives back a
list of the wrong length (our bug, which must not lose a batch), has raised for each key. A write deletes its victims
first; it is not held back by one that does not go, since in a shared store room is never ours for certain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

from kvcore.errors import CallerError, InternalError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Usage, StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.shared_backend import SharedBackend, Stored

T = TypeVar("T")
R = TypeVar("R")

SCAN_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Written:
    """How one piece of writing ended: which victims were to go, their errors, and the records' answers."""

    victims: Sequence[ObjectKey]
    errors: list[Exception | None]
    answers: list[StoreAnswer | Exception]


@dataclass(frozen=True, slots=True)
class Page:
    """Part of a scan. `last`: the scan has ended; `error` says how if not well, `usage` what the store says then."""

    records: list[Stored]
    last: bool
    error: Exception | None = None
    usage: L2Usage | None = None


def find_all(backend: SharedBackend, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
    return _each(keys, backend.find)


def write_all(
    backend: SharedBackend, victims: Sequence[ObjectKey], orders: Sequence[tuple[ObjectKey, memoryview]]
) -> Written:
    return Written(victims, delete_all(backend, victims), _each(orders, backend.write))


def not_written(victims: Sequence[ObjectKey], orders: Sequence[object], error: StoreError) -> Written:
    """The result of a `write_all` that has broken off."""
    return Written(victims, [error] * len(victims), [error] * len(orders))


def read_all(backend: SharedBackend, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
    return _each(orders, backend.read)


def delete_all(backend: SharedBackend, keys: Sequence[ObjectKey]) -> list[Exception | None]:
    return _each(keys, backend.delete)


def discard(backend: SharedBackend, key: ObjectKey, defect: Defect) -> list[Exception | None]:
    return _outcome(partial(backend.discard, key, defect))


def open_backend(backend: SharedBackend) -> list[Exception | None]:
    return _outcome(backend.open)


def next_page(backend: SharedBackend, scan: Iterator[Stored]) -> Page:
    records: list[Stored] = []
    try:
        records.extend(islice(scan, SCAN_PAGE))
        last = len(records) < SCAN_PAGE
        return Page(records, last, usage=backend.usage() if last else None)
    except Exception as error:
        return Page(records, last=True, error=error)


def no_page(error: StoreError) -> Page:
    """The result of a `next_page` that has broken off."""
    return Page([], last=True, error=error)


def cut(items: Sequence[T], sizes_bytes: Sequence[int], keys_max: int, bytes_max: int) -> Iterator[list[T]]:
    """Cut a batch, in order, into pieces of at most `keys_max` items and, beyond one item, `bytes_max` bytes."""
    assert len(items) == len(sizes_bytes)
    assert keys_max >= 1
    piece: list[T] = []
    piece_bytes = 0
    for item, size in zip(items, sizes_bytes):
        if piece and (len(piece) == keys_max or piece_bytes + size > bytes_max):
            yield piece
            piece, piece_bytes = [], 0
        piece.append(item)
        piece_bytes += size
    if piece:
        yield piece


def byte_views(keys: Sequence[ObjectKey], buffers: Sequence[memoryview], *, writable: bool) -> list[memoryview]:
    """The buffers as plain bytes. CallerError: one of them cannot be read, or filled, as such."""
    if len(keys) != len(buffers):
        raise CallerError(f"{len(keys)} keys but {len(buffers)} buffers")
    for buffer in buffers:
        if not isinstance(buffer, memoryview) or not buffer.c_contiguous:
            raise CallerError("buffers are contiguous memoryviews")
        if writable and buffer.readonly:
            raise CallerError("a buffer to load into must be writable")
    return [buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B") for buffer in buffers]


def _each(orders: Sequence[T], call: Callable[[Sequence[T]], list[R | Exception]]) -> list[R | Exception]:
    if not orders:
        return []
    try:
        results = call(orders)
    except Exception as error:  # also a bug in a backend must not lose the batch
        return [error] * len(orders)
    if len(results) != len(orders):
        return [InternalError(f"a store answered {len(results)} results to {len(orders)} keys")] * len(orders)
    return results


def _outcome(call: Callable[[], None]) -> list[Exception | None]:
    try:
        call()
    except Exception as error:
        return [error]
    return [None]

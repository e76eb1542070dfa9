"""Blocking work of an indexed adapter: what runs inside the executor, away from the loop.

Every piece is a plain value in and a plain value out: keys, buffers and a backend, never an index entry. One
piece may carry several keys (`slices`), so that small objects do not pay for a thread switch each; each
key has its own result, and an error of one does not touch the others.

A write first deletes its victims, in order, and gives up at the first that does not go: their room is what
it was promised.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeGuard, TypeVar

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.backend import Backend, BatchBackend, LeftoverError
from kvcore.l2.envelope import Defect
from kvcore.l2.shared_work import cut

T = TypeVar("T")

Order = tuple[ObjectKey, memoryview]

SLICE_BYTES = 4 * 1024 * 1024
SLICE_BYTES_MAX = 16 * 1024 * 1024
SLICE_KEYS = 128
_SLICES = 4  # of a large batch: enough for a few threads

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FOR_GOOD = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EFBIG, errno.ENOTDIR})
_OUR_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})


class Written(NamedTuple):
    answer: StoreAnswer
    victims_deleted: int
    error: Exception | None = None
    unknown: bool = False  # something of the record may be left; `Backend.delete` of the key removes it


class Loaded(NamedTuple):
    """`LOADED`, or why not. Only `error`: we failed, the record may be fine."""

    defect: Defect | None = None
    error: Exception | None = None


LOADED = Loaded()
"""The buffer holds the payload. The only value without defect and error, so `is` tells it from all others."""

_STORED = Written(StoreAnswer.STORED, 0)
WRITE_BROKEN_OFF = Written(StoreAnswer.FAILED, 0, StoreError("the work broke off"), unknown=True)
READ_BROKEN_OFF = Loaded(error=StoreError("the work broke off"))
_CLEAR: tuple[int, Exception | None] = (0, None)


def write_all(backend: Backend, orders: Sequence[Order], victims: Mapping[int, Sequence[ObjectKey]]) -> list[Written]:
    """`victims`: what must go before the order at a place, for the places that have some."""
    if len(orders) > 1 and _moves_many(backend):
        return _write_many(backend, orders, victims)
    return [_write(backend, key, payload, victims.get(place, ())) for place, (key, payload) in enumerate(orders)]


def read_all(backend: Backend, orders: Sequence[Order]) -> list[Loaded]:
    if len(orders) > 1 and _moves_many(backend):
        return _read_many(backend, orders)
    return [_read(backend, key, into) for key, into in orders]


def broken_off(result: T, count: int, error: StoreError) -> list[T]:
    """The results of a piece of work that has broken off; `error` says why."""
    return [result] * count


def _moves_many(backend: Backend) -> TypeGuard[BatchBackend]:
    return hasattr(backend, "write_many")  # `isinstance` of a protocol costs as much as moving a small record


def delete_all(backend: Backend, keys: Sequence[ObjectKey]) -> list[Exception | None]:
    return [_delete(backend, key) for key in keys]


def slices(orders: Sequence[T], sizes_bytes: Sequence[int]) -> Iterator[tuple[list[T], int]]:
    """Cut a batch, in order, into pieces of at most `SLICE_KEYS`: (orders, bytes).

    A piece has about `SLICE_BYTES`. Each costs the loop's thread some 50 us, and threads that hand the interpreter to
    each other lose more, so where there would be many they are longer, up to `SLICE_BYTES_MAX`.
    """
    assert len(orders) == len(sizes_bytes)
    bytes_max = min(max(SLICE_BYTES, sum(sizes_bytes) // _SLICES), SLICE_BYTES_MAX)
    piece: list[T] = []
    piece_bytes = 0
    for order, size in zip(orders, sizes_bytes):
        if piece and (piece_bytes + size > bytes_max or len(piece) == SLICE_KEYS):
            yield piece, piece_bytes
            piece, piece_bytes = [], 0
        piece.append(order)
        piece_bytes += size
    if piece:
        yield piece, piece_bytes


def _write(backend: Backend, key: ObjectKey, payload: memoryview, victims: Sequence[ObjectKey]) -> Written:
    deleted, error = _delete_victims(backend, victims)
    if error is None:
        try:
            backend.write(key, payload)
        except Exception as failure:  # also a bug in a backend must not lose the other keys' results
            error = failure
    return _written(deleted, error)


def _write_many(
    backend: BatchBackend, orders: Sequence[Order], victims: Mapping[int, Sequence[ObjectKey]]
) -> list[Written]:
    """All victims first, so that their room can be taken in one piece."""
    cleared = {place: _delete_victims(backend, keys) for place, keys in victims.items()}
    held_up = {place for place, (_, error) in cleared.items() if error is not None}
    ready = [order for place, order in enumerate(orders) if place not in held_up] if held_up else orders
    errors = _written_in_parts(backend, ready)
    if not cleared:
        return [_STORED if error is None else _written(0, error) for error in errors]
    results: list[Written] = []
    for place in range(len(orders)):
        deleted, error = cleared.get(place, _CLEAR)
        results.append(_written(deleted, next(errors) if error is None else error))
    return results


def _written_in_parts(backend: BatchBackend, orders: Sequence[Order]) -> Iterator[Exception | None]:
    """In parts that a processor's cache holds, so that what is checked there is written before it has left it."""
    for part in cut(orders, [len(payload) for _, payload in orders], SLICE_KEYS, SLICE_BYTES):
        try:
            yield from backend.write_many(part)
        except Exception as failure:
            yield from [failure] * len(part)


def _delete_victims(backend: Backend, victims: Sequence[ObjectKey]) -> tuple[int, Exception | None]:
    deleted = 0
    try:
        for victim in victims:
            backend.delete(victim)
            deleted += 1
    except Exception as error:
        return deleted, error
    return deleted, None


def _written(deleted: int, error: Exception | None) -> Written:
    if error is None:
        return _STORED if deleted == 0 else Written(StoreAnswer.STORED, deleted)
    unknown = isinstance(error, LeftoverError) or not isinstance(error, OSError | StoreError)
    return Written(answer_of(error), deleted, error, unknown)


def _read(backend: Backend, key: ObjectKey, into: memoryview) -> Loaded:
    try:
        defect = backend.read(key, into)
    except Exception as error:
        return _not_loaded(error)
    return LOADED if defect is None else Loaded(defect)


def _read_many(backend: BatchBackend, orders: Sequence[Order]) -> list[Loaded]:
    try:
        results = backend.read_many(orders)
    except Exception as error:
        return [_not_loaded(error)] * len(orders)
    return [LOADED if result is None else _loaded(result) for result in results]


def _loaded(result: Defect | Exception) -> Loaded:
    return _not_loaded(result) if isinstance(result, Exception) else Loaded(result)


def _not_loaded(error: Exception) -> Loaded:
    return Loaded(None if is_ours(error) else Defect.UNREADABLE, error)


def is_ours(error: Exception) -> bool:
    """It is we who failed or lack something: what was asked for may be fine."""
    return not isinstance(error, OSError) or error.errno in _OUR_SHORTAGE


def _delete(backend: Backend, key: ObjectKey) -> Exception | None:
    try:
        backend.delete(key)
    except Exception as error:
        return error
    return None


def answer_of(error: Exception) -> StoreAnswer:
    """What a failed write means for the caller: no room, hopeless, or worth another try."""
    cause = error.__cause__ if isinstance(error, LeftoverError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    if number in _FULL:
        return StoreAnswer.FULL
    return StoreAnswer.FAILED if number in _FOR_GOOD else StoreAnswer.RETRY

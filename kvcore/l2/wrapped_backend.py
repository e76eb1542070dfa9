"""What wrappers around a backend share: they pass all calls on, for exclusive and for shared stores.

A wrapped backend is a backend of the same family. These wrappers run where backends run, inside executor work, and hold
no state that two threads could disturb.

`opened` lets the blocking `open` happen in a thread and the adapter be made on the loop afterwards: an adapter
opens its backend in its constructor, and a store that does not answer must not stop the loop for that long.

Who holds: the wrapper the inner backend. Who announces: nobody, calls return. Who frees: `close` passes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeGuard

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Usage, StoreAnswer
from kvcore.l2.backend import Backend, BatchBackend, Scan
from kvcore.l2.envelope import Defect
from kvcore.l2.shared_backend import SharedBackend, Stored

AnyBackend: TypeAlias = Backend | SharedBackend


def is_shared(backend: AnyBackend) -> TypeGuard[SharedBackend]:
    """A shared store is asked what it has; an exclusive one is known by its scan."""
    return hasattr(backend, "find")


def is_exclusive(backend: AnyBackend) -> TypeGuard[Backend]:
    return not is_shared(backend)


class WrappedBackend:
    """`kvcore.l2.backend.Backend` around `inner`."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return self.inner.record_bytes(key, payload_bytes)

    def open(self) -> Scan:
        return self.inner.open()

    def write(self, key: ObjectKey, payload: memoryview) -> None:
        self.inner.write(key, payload)

    def read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        return self.inner.read(key, into)

    def delete(self, key: ObjectKey) -> None:
        self.inner.delete(key)

    def close(self) -> None:
        self.inner.close()


class WrappedShared:
    """`kvcore.l2.shared_backend.SharedBackend` around `inner`."""

    def __init__(self, inner: SharedBackend) -> None:
        self.inner = inner
        self.lock_strength = inner.lock_strength
        self.batch_keys = inner.batch_keys
        self.batch_bytes = inner.batch_bytes

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return self.inner.record_bytes(key, payload_bytes)

    def open(self) -> None:
        self.inner.open()

    def find(self, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
        return self.inner.find(keys)

    def write(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[StoreAnswer | Exception]:
        return self.inner.write(orders)

    def read(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
        return self.inner.read(orders)

    def discard(self, key: ObjectKey, defect: Defect) -> None:
        self.inner.discard(key, defect)

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        return self.inner.delete(keys)

    def scan(self) -> Iterator[Stored]:
        return self.inner.scan()

    def usage(self) -> L2Usage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()


class _Opened(WrappedBackend):
    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self._scan = inner.open()

    def open(self) -> Scan:
        return self._scan


class _OpenedShared(WrappedShared):
    def __init__(self, inner: SharedBackend) -> None:
        inner.open()
        super().__init__(inner)  # after the open: what a store says about itself is known now

    def open(self) -> None:
        return None


class _OpenedBatch(_Opened):
    """For a backend that moves several records at once."""

    def __init__(self, inner: BatchBackend) -> None:
        super().__init__(inner)
        self.write_many = inner.write_many
        self.read_many = inner.read_many


def opened(backend: AnyBackend) -> AnyBackend:
    """Open it, blocking; what comes back opens at once. Raises what `open` raises; it is closed then."""
    try:
        return _OpenedShared(backend) if is_shared(backend) else _opened_exclusive(backend)
    except BaseException:
        backend.close()
        raise


def _opened_exclusive(backend: AnyBackend) -> Backend:
    assert is_exclusive(backend)
    return _OpenedBatch(backend) if isinstance(backend, BatchBackend) else _Opened(backend)

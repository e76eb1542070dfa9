"""What an indexed adapter needs from the place where records lie.

All methods block and are called only inside executor work, possibly from several threads at once, but never
twice at the same time for one key: the adapter's index sees to that. `open` is the exception, it is called
once, before anything else. A backend keeps no counts and no index; it moves bytes.

Who holds the memory: the caller's buffers stay the caller's; a backend uses them only inside the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.envelope import Defect


@dataclass(frozen=True, slots=True)
class Found:
    """One intact-looking record met by the scan at start."""

    key: ObjectKey
    payload_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What `Backend.open` found: the records, and how many bad ones it removed, by kind."""

    records: tuple[Found, ...] = ()
    defects: dict[Defect, int] = field(default_factory=dict)
    temporary_files_removed: int = 0


class LeftoverError(StoreError):
    """A write failed and could not clean up: part of the record may be left. Raised `from` the first error."""


class Backend(Protocol):
    """See the module text. Errors are `OSError`s; expected defects of a record are values."""

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        """What a record occupies, envelope included. Pure: the adapter calls it on the loop."""
        ...

    def open(self) -> Scan:
        """Take the place for this adapter, clean it and list it. ConfigError: it cannot be used."""
        ...

    def write(self, key: ObjectKey, payload: memoryview) -> None:
        """Put the record there as a whole or not at all. LeftoverError: not even that; `delete` cleans up."""
        ...

    def read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        """Fill `into` with the payload. A defect leaves its content undefined."""
        ...

    def delete(self, key: ObjectKey) -> None:
        """Remove the record; one that is already gone is fine."""
        ...

    def close(self) -> None:
        """Begin no more work and give the place back when the running work has ended. Never blocks."""
        ...


@runtime_checkable
class BatchBackend(Backend, Protocol):
    """A backend that moves several records in fewer calls than one each. Used wherever a backend has these two."""

    def write_many(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Exception | None]:
        """Like `write` for each: what it would raise is the key's result, and touches no other key's."""
        ...

    def read_many(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
        """Like `read` for each."""
        ...

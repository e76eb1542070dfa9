"""What a shared adapter needs from a store that other processes write and evict from too.

An exclusive store (`kvcore.l2.backend`) is described by our index. Here the store is the truth: it is asked at each
lookup, and whatever it has said may be wrong a moment later.

Rules for every backend
-----------------------
* All methods but `record_bytes` block. They run in executor threads, several at once. `open` comes first and again
  after it has failed; `close` comes last and does not wait for calls that still run: these may fail from then on.
* The adapter never runs two of write, discard and delete for one key at a time. Other processes may.
* Every record begins with the header of `kvcore.l2.envelope`.
* Results are per key and in the order of the keys; one key's error says nothing about its neighbours. An exception
  in a result list is an `OSError` or a `StoreError`; so is what a method raises for a whole batch, which the adapter
  counts for each of its keys. No client library's own type comes out (it is the `__cause__`), no text has a secret.
* A store whose client moves bytes without a copy only from and into memory that it was told of is a `RegionBackend`.
* Every wait on the outer world has a bound (a socket timeout): a thread that hangs for ever is a thread lost.

Who holds the memory: the caller's buffers stay the caller's; a backend uses them only inside the call. After a call
has returned or raised, nothing touches them any more, so a client library that copies later has to be waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Usage, LockStrength, StoreAnswer
from kvcore.l2.envelope import Defect


@dataclass(frozen=True, slots=True)
class Stored:
    """One thing that `scan` met under our prefix. `key` None: its header cannot be read, or it is not a record."""

    key: ObjectKey | None
    name: str
    record_bytes: int
    age_s: float | None = None
    """Since it was written or last used, whichever the store can tell; rounded up, or what is old seems young."""
    removed: Defect | None = None
    """The scan has found it bad, for this reason, and removed it."""


class SharedBackend(Protocol):
    """See the module text. `batch_keys` and `batch_bytes` say how the adapter cuts batches into pieces of work.

    A piece holds at least one key and no more than `batch_keys`; `batch_bytes` limits reads and writes beyond one key.
    """

    lock_strength: LockStrength
    batch_keys: int
    batch_bytes: int

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        """What a record occupies in the store, envelope included. Pure: the adapter calls it on the loop."""
        ...

    def open(self) -> None:
        """Connect and look around. ConfigError: it can never work (wrong password, no such bucket).

        StoreError or OSError: the store does not answer now. The adapter serves misses and calls again.
        """
        ...

    def find(self, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
        """Which are there (and leased, where `lock_strength` says so). An exception: unknown, served as a miss."""
        ...

    def write(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[StoreAnswer | Exception]:
        """Put each record there as a whole, or leave nothing that can be seen.

        PRESENT: an intact-looking record of the same key and length is there, where the store can say so cheaply.
        An exception counts as RETRY.
        """
        ...

    def read(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
        """Fill the buffers with the payloads. None: it is good. Otherwise the buffer's content is undefined.

        MISSING is a plain miss. After any other defect the adapter calls `discard`.
        """
        ...

    def discard(self, key: ObjectKey, defect: Defect) -> None:
        """Remove the record that a read found bad, without touching a newer one that has come in its place.

        A backend says how far its store allows that. A record that looks good by now is kept.
        """
        ...

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        """Remove the records, whoever wrote them; one that is already gone is fine."""
        ...

    def scan(self) -> Iterator[Stored]:
        """Everything under our prefix, once, lazily and in pages; what comes or goes meanwhile may be missed.

        May be iterated by different threads, one after the other. Closing the iterator frees what it holds.
        """
        ...

    def usage(self) -> L2Usage:
        """What the store itself says, if it can; cheap. `bytes_capacity` None: it does not say."""
        ...

    def close(self) -> None:
        """Begin no more work and free what is idle now, the rest as running calls end. Never blocks for long."""
        ...


@runtime_checkable
class RegionBackend(Protocol):
    """A backend whose client moves bytes without a copy where they lie in memory that it knows."""

    def register_region(self, region: memoryview) -> None:
        """Make `region` (the arena) known, before `open` or after it. StoreError: the client refuses.

        The backend holds the view, so what is behind it stays mapped. It lets go by itself: after `close`, when no
        call of the client runs any more, the client forgets the region first.
        """
        ...

"""What a cache must offer to be held against the contract: one class of fifteen short methods.

Theory of operation
-------------------
A *peer* opens caches. Each run of the search gets a fresh one, which is empty and has room for `room` objects of one
size. Keys are small numbers, writers are known by a tag, readers by an owner; the peer turns them into its own.

Every answer is a *word*. Best are the words of `kvcore.answers.Answer` (`WORDS` lists them per call). A peer with words
of its own says in `means` what they stand for, as call -> word -> words of the contract:

    means = {"finish_write": {"SUCCESS": ["published", "discarded"]}}

A word that stands for two things is reported as such: a difference in what callers can know, not in what happens.

Time: leases and reservations run out `LEASE_UNITS` units after they were taken. `pass_time` lets units pass, however
the peer does it (a clock of its own making, or waiting). If it cannot use its real clock there, `real_cache` opens
one that does, and what was found is played once more on it.

Bytes: an object's content is one number. A writer's copy begins (`begin_copy`: the peer remembers which memory it goes
to) and ends (`end_copy`: the number lands in exactly that memory, whatever has happened to it meanwhile, because that
is what a device copy does). `read` is what a reader sees.

Who holds, announces, frees: a cache belongs to the run that opened it, which closes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

LEASE_UNITS = 2

WORDS: dict[str, tuple[str, ...]] = {
    "reserve_write": ("reserved", "resident", "busy", "no_space"),
    "begin_copy": ("copying", "unknown"),
    "end_copy": ("ended",),
    "finish_write": ("published", "discarded", "busy", "expired", "unknown"),
    "publish_and_read": ("published", "discarded", "busy", "expired", "unknown"),
    "abort_write": ("aborted", "expired", "unknown"),
    "reserve_read": ("reserved", "unknown"),
    "finish_read": ("released", "expired", "unknown"),
    "delete": ("deleted", "locked", "unknown"),
}
"""The words of the contract, per call that is answered with one."""


class PeerCache(Protocol):
    """One cache, empty, with room for as many objects as it was opened for."""

    def reserve_write(self, tag: str, keys: Sequence[int], temporary: bool) -> Sequence[str]:
        """A word per key, in order. `temporary`: what will be published goes with its last reader."""
        ...

    def begin_copy(self, copy: int, tag: str, key: int) -> str:
        """Copy number `copy` into what `tag` stages for `key` begins."""
        ...

    def end_copy(self, copy: int, value: int) -> str:
        """It ends: `value` lands where the copy has begun."""
        ...

    def finish_write(self, tag: str, key: int) -> str: ...

    def publish_and_read(self, tag: str, owner: str, key: int) -> str:
        """Publish and lease to `owner` in one step."""
        ...

    def abort_write(self, tag: str, key: int) -> str: ...

    def reserve_read(self, owner: str, key: int) -> str: ...

    def read(self, owner: str, key: int) -> int | None:
        """What `owner`, who has a lease, reads; None: nothing can be read."""
        ...

    def finish_read(self, owner: str, key: int) -> str: ...

    def delete(self, key: int) -> str: ...

    def pass_time(self, units: int) -> None: ...

    def resident(self) -> Sequence[int]:
        """The keys that readers can see."""
        ...

    def used(self) -> int:
        """Objects' worth of memory that nobody else could get now."""
        ...

    def close(self) -> None: ...


class PrefixRule(Protocol):
    """`lookup` is the JSON form of `kvcore.ladder.conformance.prefix.Lookup`."""

    def fold(self, lookup: Mapping[str, Any]) -> Sequence[int]:
        """The lengths, in chunks, that every row can serve."""
        ...

    def unfold(self, lookup: Mapping[str, Any], length: int) -> Sequence[Sequence[int]]:
        """Per row the chunks that serving `length` uses."""
        ...


@runtime_checkable
class Peer(Protocol):
    """`--peer package.module:factory`: what `factory()` returns. `prefix`: None where there is no such rule."""

    name: str
    means: Mapping[str, Mapping[str, Sequence[str]]]
    prefix: PrefixRule | None

    def cache(self, room: int) -> PeerCache: ...

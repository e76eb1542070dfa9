"""What L1 counts and shows: metrics, `repr`, the state line of a failing run and tests all read this."""

from __future__ import annotations

from dataclasses import dataclass


class L1Counters:
    """Written by L1 only. Bytes are extents (what objects occupy); the rest only ever grows."""

    __slots__ = (
        "bytes_draining",
        "bytes_resident",
        "discarded",
        "evictions",
        "expired_writes",
        "mismatches",
        "no_space",
        "published",
    )

    def __init__(self) -> None:
        self.bytes_resident = 0
        self.bytes_draining = 0
        self.published = 0
        self.discarded = 0
        self.evictions = 0
        self.expired_writes = 0
        self.mismatches = 0
        self.no_space = 0

    def shown(self) -> dict[str, int]:
        """Every counter under its own name, which is its field in `L1Statistics`."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class L1Statistics:
    """One moment of L1. used + free = capacity and used = resident + staging + draining, always."""

    bytes_capacity: int
    bytes_used: int
    bytes_free: int
    bytes_resident: int
    bytes_staging: int
    bytes_draining: int  # the object is gone, a copy still touches the bytes
    quarantined_bytes: int  # the part of draining that another (named) process holds
    largest_free: int  # bytes of the longest free run
    objects_resident: int
    objects_staging: int
    objects_draining: int
    leases: int  # read leases alive
    holds: int  # I/O holds open
    published: int
    discarded: int  # writers who came second
    evictions: int
    expired_leases: int
    expired_writes: int
    mismatches: int  # same key, other size
    no_space: int  # keys that were refused for lack of room or quota

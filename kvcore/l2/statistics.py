"""What an L2 adapter counts. Every event is counted once, where it becomes known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.envelope import Defect


@dataclass(frozen=True, slots=True)
class L2Statistics:
    """A snapshot. Counts are keys (not batches) since the adapter was opened."""

    objects: int
    locked: int
    bytes_used: int  # in the store now, envelopes included
    bytes_reserved: int  # for running writes, beyond what they delete first
    bytes_capacity: int | None
    work_inflight: int  # pieces of blocking work that may still touch buffers
    stored: int
    present: int  # stores of a key that was there or was just being written
    full: int
    retry: int
    failed: int
    lookups: int
    lookup_hits: int
    loads: int
    load_hits: int
    bytes_in: int  # payload bytes stored
    bytes_out: int  # payload bytes loaded
    short: int
    torn: int
    long: int
    foreign: int
    stale_version: int
    flipped: int
    other_size: int
    missing: int
    unreadable: int
    io_errors: int  # errors of the store, of any operation
    evictions: int
    bytes_evicted: int
    deletes: int  # records removed by `delete`, a defect, a replacement or an unknown outcome
    unlocks_unmatched: int
    recovered: int  # records found at start
    temporary_files_removed: int

    @property
    def defects(self) -> int:
        return (
            self.short
            + self.torn
            + self.long
            + self.foreign
            + self.stale_version
            + self.flipped
            + self.other_size
            + self.missing
            + self.unreadable
        )


@dataclass(slots=True)
class L2Counts:
    """The running counts behind `L2Statistics`. Held and changed by one adapter alone."""

    answers: Counter[StoreAnswer] = field(default_factory=Counter)
    defects: Counter[Defect] = field(default_factory=Counter)
    lookups: int = 0
    lookup_hits: int = 0
    loads: int = 0
    load_hits: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    io_errors: int = 0
    evictions: int = 0
    bytes_evicted: int = 0
    deletes: int = 0
    unlocks_unmatched: int = 0
    recovered: int = 0
    temporary_files_removed: int = 0

    def of_answers(self) -> Mapping[str, int]:
        return {
            "stored": self.answers[StoreAnswer.STORED],
            "present": self.answers[StoreAnswer.PRESENT],
            "full": self.answers[StoreAnswer.FULL],
            "retry": self.answers[StoreAnswer.RETRY],
            "failed": self.answers[StoreAnswer.FAILED],
        }

    def of_defects(self) -> Mapping[str, int]:
        return {defect.value: self.defects[defect] for defect in Defect}

    def snapshot(
        self,
        *,
        objects: int,
        locked: int,
        bytes_used: int,
        bytes_reserved: int,
        bytes_capacity: int | None,
        work_inflight: int,
    ) -> L2Statistics:
        assert 0 <= self.lookup_hits <= self.lookups
        assert 0 <= self.load_hits <= self.loads
        assert bytes_used >= 0
        assert bytes_reserved >= 0
        return L2Statistics(
            objects=objects,
            locked=locked,
            bytes_used=bytes_used,
            bytes_reserved=bytes_reserved,
            bytes_capacity=bytes_capacity,
            work_inflight=work_inflight,
            lookups=self.lookups,
            lookup_hits=self.lookup_hits,
            loads=self.loads,
            load_hits=self.load_hits,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            io_errors=self.io_errors,
            evictions=self.evictions,
            bytes_evicted=self.bytes_evicted,
            deletes=self.deletes,
            unlocks_unmatched=self.unlocks_unmatched,
            recovered=self.recovered,
            temporary_files_removed=self.temporary_files_removed,
            **self.of_answers(),
            **self.of_defects(),
        )

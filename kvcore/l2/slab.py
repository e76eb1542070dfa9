"""The slab backend: large preallocated files on a local disk that one process owns.

Theory of operation
-------------------
A file per record costs a creation, a rename and a removal for each. Here the payload goes into pages of files that are
there already, and what names it into an index file beside them (`kvcore.l2.slab_files`, `kvcore.l2.slab_entry`). Free
pages and slots are kept in memory (`kvcore.l2.slab_space`).

Write: 1. take pages and slots; 2. write the payload; 3. write the entry, which makes the record exist. A failure in
2 gives the room back and nothing has been seen; a failure in 3 erases the entry first. Records of one call that lie
side by side are written with one vectored call, their entries with another.

Read: one vectored call per run of neighbouring records, straight into the callers' buffers, then the checksum. The
envelope headers stay in memory, where nobody can change them, so a read touches payloads only.

Delete: the entry is erased on disk, then its room is free. So no two entries ever claim one page, as long as the
operating system lives. Eviction is reuse: the adapter's index chooses victims, the next record takes their pages.

Start: the index file alone is read (256 bytes a record, as a rule). Entries that are damaged, overlap with a later
one, repeat a later one's key or lie where the slab ends too early are erased and counted. What remains is the index
of the adapter, oldest first: the order of writing survives a restart, that of use does not. Payloads are not read; the
checksum judges them at each load. A capacity smaller than before drops what lies beyond it, whatever its age.

Crashes. The process dies (kill -9): between 2 and 3 the room is free again at the next start; an entry is either whole
or not there. The machine dies: without `fsync` an entry may be on the disk and its payload not, or two entries may
claim one page; the checksum and the start find either. With `fsync` the payload is flushed before the entry.

Limits: local disks (or tmpfs) with room for the whole capacity, which is allocated at the start; records of at most one
slab's pages; 16 TiB. Two processes never share a directory (lock strength STRONG). `record_bytes` counts whole pages
and the slots of an entry of one run; an entry of many runs may need more slots, 8 bytes per run, which are not counted.

Who holds: pages and slots belong to the records in `_records`, those of unfinished writes to the call, those that could
not be erased to `_leftovers`; the rest lies in the two spaces. The lock of the directory is held from `open` to the end
of the last piece of work after `close`. Nothing here announces anything.

Rejected: headers in front of payloads (a start would read all slabs, and a payload can imitate a header); one size
class per slab; a log of changes with checkpoints (an entry is one write, and replay is one more way to be wrong);
O_DIRECT (buffers and lengths would need the disk's alignment, and small objects lose).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.backend import Found, LeftoverError, Scan
from kvcore.l2.envelope import Defect
from kvcore.l2.indexed import IndexedAdapter
from kvcore.l2.slab_entry import ENTRY_BYTES_MORE, PAGE_BYTES, SLOT_BYTES, encode_entry, slots_for
from kvcore.l2.slab_files import SlabFiles
from kvcore.l2.slab_jobs import (
    Grouping,
    Job,
    Record,
    entry_neighbours,
    make_job,
    make_record,
    make_run,
    neighbours,
    pieces,
    whole_pages,
)
from kvcore.l2.slab_recovery import recover
from kvcore.l2.slab_space import Run, Space
from kvcore.l2.work import SLICE_BYTES
from kvcore.ports import Executor, Notice
from kvcore.quota import Quota
from kvcore.runtime.clock import SystemClock

SLAB_BYTES = 1 << 30
INDEX_REGION_SLOTS = 16 * 1024  # one entry lies within a region: the longest legal one fits
_SLAB_BYTES_MIN = 64 * 1024
_CAPACITY_BYTES_MAX = PAGE_BYTES << 32
_TOKEN_BYTES = 8
_PADDING = memoryview(bytes(PAGE_BYTES))
# What is read at once is checked while a cache still holds it. Shorter calls cost more: threads take turns at each end.
_CACHED_BYTES = 2 * 1024 * 1024

Order = tuple[ObjectKey, memoryview]


@dataclass(frozen=True, slots=True)
class SlabOptions:
    """`directory`: a place of this store alone, made if missing. `capacity_bytes` is allocated at the start."""

    directory: str
    capacity_bytes: int
    slab_bytes: int = SLAB_BYTES
    fsync: bool = False

    def check(self) -> None:
        """ConfigError: these options can never work."""
        if self.slab_bytes < _SLAB_BYTES_MIN or self.slab_bytes % PAGE_BYTES:
            raise ConfigError(f"a slab is a multiple of {PAGE_BYTES} bytes, at least {_SLAB_BYTES_MIN}")
        if not PAGE_BYTES <= self.capacity_bytes <= _CAPACITY_BYTES_MAX:
            raise ConfigError(f"the capacity of a slab store lies between {PAGE_BYTES} and {_CAPACITY_BYTES_MAX} bytes")


_Place = tuple[tuple[Run, ...], Run]  # pages and slots


class SlabBackend:
    """`kvcore.l2.backend.BatchBackend`. See the module text."""

    def __init__(self, options: SlabOptions, token: str) -> None:
        options.check()
        self._where = f"the slab directory {options.directory}"
        self._slab_pages = options.slab_bytes // PAGE_BYTES
        self._pages_total = options.capacity_bytes // PAGE_BYTES
        self._files = SlabFiles(
            options.directory, self._pages_total, self._slab_pages, options.fsync, token, self._where
        )
        self._lock = threading.Lock()  # guards everything below; never held during I/O
        self._pages = Space(self._slab_pages)
        self._slots = Space(INDEX_REGION_SLOTS)
        self._slots_total = 0
        self._sequence = 0
        self._records: dict[ObjectKey, Record] = {}
        self._leftovers: dict[ObjectKey, Record] = {}
        self._running = 0
        self._closed = True

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        slots = _entry_slots(len(key.chunk_hash), key.model_name, key.cache_salt)
        return (-(-payload_bytes // PAGE_BYTES) or 1) * PAGE_BYTES + slots * SLOT_BYTES

    # --- start and end -----------------------------------------------------------------------------------------

    def open(self) -> Scan:
        try:
            self._files.open()
        except OSError as error:
            raise ConfigError(f"{self._where} cannot be used: {error.strerror or error}") from error
        try:
            scan = self._recover()
        except BaseException:
            self._files.close()
            raise
        self._closed = False
        return scan

    def close(self) -> None:
        with self._lock:
            last = not self._closed and self._running == 0
            self._closed = True
        if last:
            self._files.close()

    def _recover(self) -> Scan:
        try:
            found = recover(self._files, self._pages_total, INDEX_REGION_SLOTS)
        except OSError as error:
            raise ConfigError(f"{self._where} cannot be read or repaired: {error.strerror or error}") from error
        for run in found.free_pages:
            self._pages.give_back(run)
        for run in found.free_slots:
            self._slots.give_back(run)
        self._slots_total = found.slots_total
        records: list[Found] = []
        for entry, slots in found.entries:
            record = Record(entry.payload_bytes, entry.runs, slots, entry.sequence, entry.header)
            self._records[entry.key] = record
            self._sequence = entry.sequence
            records.append(Found(entry.key, entry.payload_bytes, self.record_bytes(entry.key, entry.payload_bytes)))
        return Scan(tuple(records), found.defects)

    # --- write -----------------------------------------------------------------------------------------------------

    def write(self, key: ObjectKey, payload: memoryview) -> None:
        error = self.write_many([(key, payload)])[0]
        if error is not None:
            raise error

    def write_many(self, orders: Sequence[Order]) -> list[Exception | None]:
        results: list[Exception | None] = [None] * len(orders)
        self._enter()
        try:
            jobs = self._place(orders, results)
            jobs = self._write_grouped(jobs, results, self._neighbours, self._write_payloads, self._release)
            jobs = self._write_grouped(jobs, results, entry_neighbours, self._write_entries, self._withdraw)
            self._adopt(jobs)
        finally:
            self._leave()
        return results

    def _place(self, orders: Sequence[Order], results: list[Exception | None]) -> list[Job]:
        """Take room for every record, side by side if there is a place for all of them."""
        if not orders:
            return []
        headers = [envelope.encode_header(key, payload) for key, payload in orders]
        pages = [-(-len(payload) // PAGE_BYTES) or 1 for _, payload in orders]
        slots = [-(-(len(header) + ENTRY_BYTES_MORE) // SLOT_BYTES) for header in headers]
        with self._lock:
            places: Sequence[_Place | None] | None = self._take_rows(pages, slots)
            if places is None:
                places = [self._take_place(count, len(header)) for count, header in zip(pages, headers)]
            first = self._sequence + 1
            self._sequence += len(orders)
        jobs = [
            make_job((position, key, payload, make_record((len(payload), *place, first + position, header))))
            for position, ((key, payload), header, place) in enumerate(zip(orders, headers, places))
            if place is not None
        ]
        if len(jobs) < len(orders):
            for position, place in enumerate(places):
                if place is None:
                    results[position] = OSError(errno.ENOSPC, "no room in the slabs")
        return jobs

    def _take_rows(self, pages: list[int], slots: list[int]) -> list[_Place] | None:
        page_row = _row(self._pages, pages)
        if page_row is None:
            return None
        slot_row = _row(self._slots, slots)
        if slot_row is None:  # regions can always be added, and an entry of one run fits into one
            slot_row = (run for count in slots if (run := self._take_slots(count)) is not None)
        places: list[_Place] = list(zip(zip(page_row), slot_row))
        assert len(places) == len(pages)
        return places

    def _take_place(self, pages: int, header_bytes: int) -> _Place | None:
        """Wherever there is room."""
        runs = self._take_pages(pages)
        if runs is None:
            return None
        slots = self._take_slots(slots_for(header_bytes, len(runs)))
        if slots is None:
            self._give_back_pages(runs)
            return None
        return runs, slots

    def _take_pages(self, count: int) -> tuple[Run, ...] | None:
        run = self._pages.take(count) if count <= self._slab_pages else None
        return (run,) if run is not None else self._pages.take_scattered(count)

    def _take_slots(self, count: int) -> Run | None:
        run = self._slots.take(count)
        if run is None and count <= INDEX_REGION_SLOTS:
            self._slots.give_back(Run(self._slots_total, INDEX_REGION_SLOTS))
            self._slots_total += INDEX_REGION_SLOTS
            run = self._slots.take(count)
        return run

    def _write_grouped(
        self,
        jobs: list[Job],
        results: list[Exception | None],
        grouped: Grouping,
        write: Callable[[list[Job]], None],
        undo: Callable[[Job, Exception], Exception],
    ) -> list[Job]:
        """Write groups of neighbours, one by one where a group fails; the jobs that are still good."""
        good: list[Job] = []
        for group in grouped(jobs):
            try:
                write(group)
                good += group
                continue
            except Exception as error:  # whatever it is, the room is given back
                if len(group) == 1:
                    results[group[0].position] = undo(group[0], error)
                    continue
            for job in group:
                good += self._write_grouped([job], results, grouped, write, undo)
        return good

    def _neighbours(self, jobs: list[Job]) -> Iterator[list[Job]]:
        return neighbours(jobs, self._slab_pages, SLICE_BYTES)

    def _write_payloads(self, group: list[Job]) -> None:
        if len(group[0].record.runs) > 1:
            for run, part in pieces(group[0]):
                padding = _PADDING[: run.count * PAGE_BYTES - len(part)]
                self._files.write_pages(run.start, [part, padding] if padding else [part])
            return
        self._files.write_pages(group[0].record.runs[0].start, whole_pages(group, _PADDING))

    def _write_entries(self, group: list[Job]) -> None:
        seed = self._files.seed
        records = [job.record for job in group]
        entries = [encode_entry(header, runs, sequence, seed) for _, runs, _, sequence, header in records]
        self._files.write_slots(group[0].record.slots.start, b"".join(entries))

    def _release(self, job: Job, error: Exception) -> Exception:
        """Nothing of the record is visible."""
        self._free(job.record)
        return error

    def _withdraw(self, job: Job, error: Exception) -> Exception:
        """Perhaps its entry was written."""
        try:
            self._erase(job.record)
        except Exception:
            with self._lock:
                self._leftovers[job.key] = job.record
            left = LeftoverError(f"{self._where}: a failed write could not be removed")
            left.__cause__ = error
            return left
        self._free(job.record)
        return error

    def _adopt(self, jobs: list[Job]) -> None:
        """The records exist. One that was there under the same key goes."""
        replaced: list[tuple[ObjectKey, Record]] = []
        with self._lock:
            for _, key, _, record in jobs:
                old = self._records.get(key)
                if old is not None:
                    replaced.append((key, old))
                self._records[key] = record
        for key, record in replaced:
            self._remove(key, record)

    # --- read ------------------------------------------------------------------------------------------------------

    def read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        result = self.read_many([(key, into)])[0]
        if isinstance(result, Exception):
            raise result
        return result

    def read_many(self, orders: Sequence[Order]) -> list[Defect | Exception | None]:
        results: list[Defect | Exception | None] = [None] * len(orders)
        jobs: list[Job] = []
        self._enter()
        try:
            for position, (key, into) in enumerate(orders):
                record = self._records.get(key)
                if record is None:
                    results[position] = Defect.MISSING
                elif record.payload_bytes != len(into):
                    results[position] = Defect.OTHER_SIZE
                else:
                    jobs.append(make_job((position, key, into, record)))
            for group in neighbours(jobs, self._slab_pages, _CACHED_BYTES):
                self._read_group(group, results)
        finally:
            self._leave()
        return results

    def _read_group(self, group: list[Job], results: list[Defect | Exception | None]) -> None:
        """One call for all; what fails or ends early is read one by one to find whose fault it is."""
        try:
            whole = self._read_payloads(group)
        except OSError as error:
            if len(group) == 1:
                results[group[0].position] = error
                return
            whole = False
        if not whole and len(group) > 1:
            for job in group:
                self._read_group([job], results)
            return
        for position, _, payload, record in group:
            if not whole:
                results[position] = Defect.TORN
            elif not envelope.payload_matches(record.header, payload):
                results[position] = Defect.FLIPPED

    def _read_payloads(self, group: list[Job]) -> bool:
        if len(group) == 1:
            return all(self._files.read_pages(run.start, [part]) == len(part) for run, part in pieces(group[0]))
        parts = whole_pages(group, memoryview(bytearray(PAGE_BYTES)))
        return self._files.read_pages(group[0].record.runs[0].start, parts) == sum(map(len, parts))

    # --- delete ----------------------------------------------------------------------------------------------------

    def delete(self, key: ObjectKey) -> None:
        self._enter()
        try:
            for records in (self._leftovers, self._records):
                record = records.get(key)
                if record is not None:
                    self._erase(record)
                    with self._lock:
                        del records[key]
                    self._free(record)
        finally:
            self._leave()

    def _remove(self, key: ObjectKey, record: Record) -> None:
        try:
            self._erase(record)
        except OSError:
            with self._lock:
                self._leftovers[key] = record
            return
        self._free(record)

    def _erase(self, record: Record) -> None:
        self._files.write_slots(record.slots.start, bytes(record.slots.count * SLOT_BYTES))

    def _free(self, record: Record) -> None:
        with self._lock:
            self._give_back_pages(record.runs)
            self._slots.give_back(record.slots)

    def _give_back_pages(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self._pages.give_back(run)

    # --- the rest --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that every page and slot is free or belongs to one record (tests and oracles; nothing may run)."""
        records = [*self._records.values(), *self._leftovers.values()]
        _check_partition([run for record in records for run in record.runs], self._pages, self._pages_total)
        _check_partition([record.slots for record in records], self._slots, self._slots_total)

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._where} is closed")
            self._running += 1

    def _leave(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._closed and self._running == 0
        if last:
            with suppress(OSError):
                self._files.close()


def _row(space: Space, counts: list[int]) -> Iterator[Run] | None:
    """One run after the other out of a long one, or None: there is no place for all of them."""
    total = sum(counts)
    row = space.take(total) if total <= space.region_units else None
    if row is None:
        return None
    starts = accumulate(counts, initial=row.start)
    return map(make_run, zip(starts, counts))


@lru_cache(4096)
def _entry_slots(hash_bytes: int, model_name: str, cache_salt: str) -> int:
    """Slots of an entry of one run. Asked for once per key, and the same for all keys of a model and tenant."""
    return slots_for(envelope.header_bytes(ObjectKey(bytes(hash_bytes), model_name, 0, 0, cache_salt)))


def _check_partition(taken: list[Run], space: Space, total: int) -> None:
    end = 0
    for run in sorted([*taken, *space]):
        assert run.start == end, "units are neither lost nor given twice"
        end = run.end
    assert end == total
    assert space.free_units == total - sum(run.count for run in taken)


def open_backend(options: SlabOptions) -> SlabBackend:
    """No I/O yet: that happens in `SlabBackend.open`."""
    return SlabBackend(options, SystemClock().token(_TOKEN_BYTES))


def slab_adapter(
    name: str,
    options: SlabOptions,
    *,
    executor: Executor,
    notice_factory: Callable[[], Notice],
    quota: Quota | None = None,
) -> IndexedAdapter:
    """Open the directory and return its adapter. Blocking (allocation, reading the index); for start-up."""
    backend = open_backend(options)
    return IndexedAdapter(name, backend, executor, notice_factory, options.capacity_bytes, quota=quota)

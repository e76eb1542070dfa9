"""`IndexedAdapter`: the L2 contract over any blocking `Backend`.

Theory of operation
-------------------
The adapter owns its store alone (the backend's `open` makes sure of it), so the index in memory (`kvcore.l2.index`)
is the truth about what is there, and locks are STRONG. All bookkeeping happens on the loop thread, in plain
calls that run to completion; only bytes move in the executor, as plain values (`kvcore.l2.work`).

Lookup. Answered from the index at submit, no I/O: present keys get a lock each, a key that occurs twice in the batch
two. The result can be taken at once; the notice follows through the loop as for everything else.

Store, per key:
 1. an intact record of the same length is there: PRESENT, no I/O;
 2. it is being written or deleted: wait. After a good write look again (which answers PRESENT), after a failed one
    share its answer, after a deletion start at 1. So one name never has two writers;
 3. a record of another length, or one whose deletion has failed, is there: if it is locked or being loaded RETRY,
    otherwise replace it;
 4. make room (FULL if the index says that none can be made: everything else is locked, loading or being written),
    reserve it, and write.
A batch is complete when each of its keys is answered. A key that occurs twice is STORED once and PRESENT once.

Load, per key: 0 at once if the key is unknown or being written, or if the buffer is not as long as the payload
(OTHER_SIZE, the record is dropped: it would be a "yes" that never loads). Otherwise the record cannot go while it
is read. A key that occurs twice is read into both buffers. A load needs no lock, but without one the
record may be evicted before the load is submitted.

Defects. A bad record becomes invisible at once and is deleted when nobody holds or loads it any more. A newer record of
the same key is never hit by that: while the old entry exists no new record can be written, and a deletion
in flight makes stores of its key wait. An error of ours (no descriptors, no memory) keeps the record.

Delete. Removes idle records; a locked or loading one becomes invisible and goes with its last unlock or load
(its holders can still load it); one being written goes when it is written. A deletion that the store refuses leaves
the record invisible and accounted, after a few tries; the next store of the key, need for room or `delete` tries again.

Unknown outcomes. When a piece of work ends with an exception of its own (a timeout, a crash of its thread) nobody knows
what it has done. A write is then answered FAILED, everything that may lie there stays accounted, and it is deleted
to be sure. A read is a miss. A deletion is done again: it is idempotent.

Unlock without a lock is counted and ignored. So is any unlock after `close`.

Who holds, announces, frees
---------------------------
* Buffers: the caller's. Pieces of work hold views until they end. After `close` nothing is announced any more, and
  running work may still touch buffers until `work_inflight` is 0.
* "Done": the three notices, signalled on the loop after the result can be taken. Results belong to whoever takes them.
* Index entries: the index; records on the medium: the backend. `close` gives the backend back once running work ends.
* The executor is the caller's, may be shared, and is closed after the adapter.

Rejected: asking the store at each lookup (a round trip to learn what we know, and a lock that is none); one piece of
work per batch (its slowest key would hold back all); futures (a result nobody awaits would be lost with its locks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvcore.keys import ObjectKey
from kvcore.l2 import work
from kvcore.l2.adapter import STORED, L2Usage, LockKind, LockStrength, StoreAnswer, TaskId
from kvcore.l2.backed import BackedAdapter
from kvcore.l2.backend import Backend
from kvcore.l2.envelope import Defect
from kvcore.l2.index import DELETING, DOOMED, PRESENT, WRITING, Entry, Index
from kvcore.l2.indexed_tasks import Read, StoreItem, Write, make_read, make_write
from kvcore.l2.shared_work import byte_views
from kvcore.l2.statistics import L2Statistics
from kvcore.l2.tasks import BitTask, StoreTask
from kvcore.ports import Executor, Notice
from kvcore.quota import Quota

_DELETE_TRIES = 3

STRONG = LockStrength(LockKind.STRONG)


class IndexedAdapter(BackedAdapter[Backend]):
    """`kvcore.l2.adapter.L2Adapter` over `backend`. Opens the backend: blocking, meant for start-up.

    `capacity_bytes` counts whole records (envelope and payload). Raises ConfigError when the backend refuses.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        executor: Executor,
        notices: Callable[[], Notice],
        capacity_bytes: int | None,
        lock_strength: LockStrength = STRONG,
        quota: Quota | None = None,
    ) -> None:
        super().__init__(name, lock_strength, capacity_bytes, executor, backend)
        self._index = Index(capacity_bytes, quota)
        self._recover()
        self._announce_by(notices)

    # --- lookup and locks --------------------------------------------------------------------------------------

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        batch = BitTask(self._begin_task(), 0)
        for position, key in enumerate(keys):
            entry = self._index.visible(key)
            if entry is not None:
                self._index.lock(entry)
                batch.bits |= 1 << position
        self._counts.lookups += len(keys)
        self._complete_lookup(batch)
        return batch.task

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        self._confined.check()
        if self._closed:
            return
        gone: list[Entry] = []
        for key in reversed(keys):  # the beginning of a prefix is evicted last
            entry = self._index.get(key)
            if entry is None or entry.locks == 0:
                self._counts.unlocks_unmatched += 1
            elif self._index.unlock(entry):
                self._retire(entry, gone)
        self._launch_deletes(gone)

    # --- store -------------------------------------------------------------------------------------------------

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        views = byte_views(keys, buffers, writable=False)
        sizes = [self._backend.record_bytes(key, len(view)) for key, view in zip(keys, views)]
        batch = StoreTask(self._begin_task(), [None] * len(keys), len(keys))
        writes: list[Write] = []
        for position, (key, view, size) in enumerate(zip(keys, views, sizes)):
            self._store(batch, position, key, view, size, writes)
        if not keys:
            self._complete_store(batch)
        self._launch_writes(writes)
        return batch.task

    def _store(
        self, batch: StoreTask, place: int, key: ObjectKey, payload: memoryview, record_bytes: int, writes: list[Write]
    ) -> None:
        """Steps 1 to 4 of the module text; appends to `writes` what has to be written."""
        entry = self._index.get(key)
        if entry is not None:
            if entry.state is WRITING or entry.state is DELETING:
                item = StoreItem(batch, place, key, payload, record_bytes)
                entry.waiting = [*(entry.waiting or ()), item]
                return
            if entry.state is PRESENT and entry.payload_bytes == len(payload):
                self._index.touch(entry)
                self._answer(batch, place, StoreAnswer.PRESENT)
                return
            if not entry.idle:
                self._answer(batch, place, StoreAnswer.RETRY)
                return
        replaces = entry is not None and entry.state is PRESENT
        admission = self._index.admit(key, len(payload), record_bytes)
        if admission is None:
            self._answer(batch, place, StoreAnswer.FULL)
            return
        if replaces:
            self._counts.defects[Defect.OTHER_SIZE] += 1
        writes.append(make_write((batch, place, payload, *admission)))

    def _launch_writes(self, writes: list[Write]) -> None:
        for piece, piece_bytes in work.slices(writes, [write.entry.payload_bytes for write in writes]):
            orders = [(write.entry.key, write.payload) for write in piece]
            victims = {place: [old.key for old in write.victims] for place, write in enumerate(piece) if write.victims}
            run = partial(work.write_all, self._backend, orders, victims)
            broken = partial(work.broken_off, work.WRITE_BROKEN_OFF, len(piece))
            self._runner.submit(run, partial(self._writes_ended, piece), broken, piece_bytes)

    def _writes_ended(self, piece: list[Write], results: list[work.Written]) -> None:
        more: list[Write] = []
        gone: list[Entry] = []
        stored = stored_bytes = 0
        for write, result in zip(piece, results, strict=True):
            batch, position, _, entry, victims = write
            answer = result.answer
            if answer is STORED:
                stored += 1
                stored_bytes += entry.payload_bytes
                self._settle_stored(write, gone)
            else:
                self._counts.answers[answer] += 1
                self._settle_failed(write, result, gone)
            self._set_answer(batch, position, answer)
            if entry.waiting:
                self._wake(entry, answer, more)
            for victim in victims:
                self._restart(victim, more)
        self._counts.answers[STORED] += stored
        self._counts.bytes_in += stored_bytes
        self._launch_writes(more)
        self._launch_deletes(gone)

    def _settle_stored(self, write: Write, gone: list[Entry]) -> None:
        """Bring the index up to date with what the work has done, victims first."""
        entry, victims = write.entry, write.victims
        if victims:
            self._settle_victims(write, len(victims))
        if self._index.written(entry):
            self._retire(entry, gone)

    def _settle_failed(self, write: Write, result: work.Written, gone: list[Entry]) -> None:
        self._counts.io_errors += result.error is not None
        self._settle_victims(write, result.victims_deleted)
        kept = write.victims[result.victims_deleted :]
        if result.unknown:
            for entry in self._index.perhaps_written(write.entry, kept):
                self._retire(entry, gone)
            return
        self._index.not_written(write.entry)
        for victim in kept:
            self._index.not_deleted(victim)

    def _settle_victims(self, write: Write, deleted: int) -> None:
        for victim in write.victims[:deleted]:
            self._count_removal(victim)
            self._index.deleted(victim, write.entry)

    def _wake(self, entry: Entry, answer: StoreAnswer, more: list[Write]) -> None:
        """Stores that waited for this work: look again after success, share the answer of a failure."""
        if answer is StoreAnswer.STORED:
            self._restart(entry, more)
            return
        waiting, entry.waiting = entry.waiting, None
        for item in waiting or ():
            self._answer(item.batch, item.position, answer)

    def _restart(self, entry: Entry, more: list[Write]) -> None:
        waiting, entry.waiting = entry.waiting, None
        for item in waiting or ():
            self._store(item.batch, item.position, item.key, item.payload, item.record_bytes, more)

    def _answer(self, batch: StoreTask, position: int, answer: StoreAnswer) -> None:
        self._counts.answers[answer] += 1
        self._set_answer(batch, position, answer)

    # --- load --------------------------------------------------------------------------------------------------

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        views = byte_views(keys, buffers, writable=True)
        batch = BitTask(self._begin_task(), 1)  # this call itself: what ends meanwhile completes nothing
        gone: list[Entry] = []
        reads: list[Read] = []
        for position, (key, view) in enumerate(zip(keys, views)):
            entry = self._loadable(key, view, gone)
            if entry is not None:
                self._index.begin_load(entry)
                reads.append(make_read((batch, position, entry, view)))
                batch.unanswered += 1
        self._counts.loads += len(keys)
        self._launch_reads(reads)
        self._read_answered(batch)
        self._launch_deletes(gone)
        return batch.task

    def _loadable(self, key: ObjectKey, into: memoryview, gone: list[Entry]) -> Entry | None:
        entry = self._index.get(key)
        if entry is None or entry.broken:
            return None
        present = entry.state is PRESENT
        if not present and entry.state is not DOOMED:
            return None
        if entry.payload_bytes == len(into):
            # A doomed record that is idle is one whose deletion failed: it may be half gone.
            return entry if present or not entry.idle else None
        if present:
            self._counts.defects[Defect.OTHER_SIZE] += 1
            self._doom(entry, gone)
        return None

    def _launch_reads(self, reads: list[Read]) -> None:
        for piece, piece_bytes in work.slices(reads, [len(read.into) for read in reads]):
            orders = [(read.entry.key, read.into) for read in piece]
            run, ended = partial(work.read_all, self._backend, orders), partial(self._reads_ended, piece)
            broken = partial(work.broken_off, work.READ_BROKEN_OFF, len(piece))
            self._runner.submit(run, ended, broken, piece_bytes)

    def _reads_ended(self, piece: list[Read], results: list[work.Loaded]) -> None:
        gone: list[Entry] = []
        hits = hit_bytes = 0
        for (batch, position, entry, _), result in zip(piece, results, strict=True):
            if result is work.LOADED:
                batch.bits |= 1 << position
                hits += 1
                hit_bytes += entry.payload_bytes
            if self._index.end_load(entry):
                self._retire(entry, gone)
            if result is not work.LOADED:
                self._settle_failed_read(entry, result, gone)
            self._read_answered(batch)
        self._counts.load_hits += hits
        self._counts.bytes_out += hit_bytes
        self._launch_deletes(gone)

    def _settle_failed_read(self, entry: Entry, result: work.Loaded, gone: list[Entry]) -> None:
        self._counts.io_errors += result.error is not None
        if result.defect is not None and not entry.broken:
            entry.broken = True
            self._counts.defects[result.defect] += 1
            self._doom(entry, gone)

    def _read_answered(self, batch: BitTask) -> None:
        batch.unanswered -= 1
        if batch.unanswered == 0:
            self._complete_load(batch)

    # --- delete ------------------------------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._check_open()
        gone: list[Entry] = []
        for key in keys:
            entry = self._index.get(key)
            if entry is None or entry.state is DELETING:
                continue
            if entry.state is WRITING:
                entry.doom_when_written = True
            else:
                self._doom(entry, gone)
        self._launch_deletes(gone)

    def _doom(self, entry: Entry, gone: list[Entry]) -> None:
        if entry.state is not DELETING and self._index.doom(entry):
            self._retire(entry, gone)

    def _retire(self, entry: Entry, gone: list[Entry]) -> None:
        """Its deletion begins now; the work is launched by the end of this call into the adapter."""
        self._index.begin_delete(entry)
        gone.append(entry)

    def _launch_deletes(self, gone: list[Entry]) -> None:
        for piece, _ in work.slices(gone, [0] * len(gone)):
            keys = [entry.key for entry in piece]
            run, ended = partial(work.delete_all, self._backend, keys), partial(self._deletes_ended, piece)
            self._runner.submit_each(run, ended, keys)

    def _deletes_ended(self, piece: list[Entry], errors: list[Exception | None]) -> None:
        more: list[Write] = []
        again: list[Entry] = []
        for entry, error in zip(piece, errors, strict=True):
            if error is None:
                self._count_removal(entry)
                self._index.deleted(entry)
            elif self._not_deleted(entry, again):
                continue  # stores of its key go on waiting
            self._restart(entry, more)
        self._launch_writes(more)
        self._launch_deletes(again)

    def _not_deleted(self, entry: Entry, again: list[Entry]) -> bool:
        """Try again at once a few times (True), then leave it to the next need."""
        self._counts.io_errors += 1
        self._index.not_deleted(entry)
        entry.deletions_failed += 1
        if entry.deletions_failed % _DELETE_TRIES == 0:
            return False
        self._retire(entry, again)
        return True

    # --- the rest ----------------------------------------------------------------------------------------------

    def usage(self) -> L2Usage:
        index = self._index
        return L2Usage(index.bytes_used, index.capacity_bytes, index.objects, index.locked)

    def keys(self) -> list[ObjectKey]:
        return self._index.keys()

    def statistics(self) -> L2Statistics:
        return self._counts.snapshot(
            objects=self._index.objects,
            locked=self._index.locked,
            bytes_used=self._index.bytes_used,
            bytes_reserved=self._index.bytes_reserved,
            bytes_capacity=self._index.capacity_bytes,
            work_inflight=self._runner.inflight,
        )

    def check(self) -> None:
        """Assert the index's invariants by a full walk (tests and oracles)."""
        self._index.check()

    def _count_removal(self, entry: Entry) -> None:
        if entry.evicted:
            self._counts.evictions += 1
            self._counts.bytes_evicted += entry.record_bytes
        else:
            self._counts.deletes += 1

    def _recover(self) -> None:
        """Take over what the backend's scan has found, and shrink it to the capacity. Blocking, at start."""
        scan = self._backend.open()
        for record in scan.records:
            self._index.adopt(record.key, record.payload_bytes, record.record_bytes)
        self._counts.recovered = len(scan.records)
        self._counts.defects.update(scan.defects)
        self._counts.temporary_files_removed = scan.temporary_files_removed
        for victim in self._index.surplus():
            self._backend.delete(victim.key)
            self._count_removal(victim)
            self._index.deleted(victim)
        self._index.check()

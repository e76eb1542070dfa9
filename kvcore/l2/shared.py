"""`SharedAdapter`: the L2 contract over a store that other processes write and evict from too.

Theory of operation
-------------------
The store is the truth (`kvcore.l2.shared_backend`): lookups ask it, and an object that was found may be gone when it
is loaded, unless the backend declares a lease. What this adapter adds is everything that the store cannot know:
what this process does with a key right now (`kvcore.l2.activity`), and what to evict (`kvcore.l2.ledger`).

Opening. Once in the constructor, blocking, meant for start-up: ConfigError comes out. A store that does not answer
then (StoreError, OSError) does not keep the process from starting: everything is a miss and RETRY, and each batch
that comes starts one attempt in the executor, if none runs. After the first success a scan begins, in the background.

Lookup. Keys that we are removing are absent without asking; the others are asked, in pieces. From the submit on a
key is *pinned*: this process neither evicts nor deletes it. Found keys turn the pin into a lock, the others lose it. A
locked key is protected from this process for certain, and from others as far as `lock_strength` says.

Store, per key:
 1. it is being written or removed by us: wait. After a good write of the same length: PRESENT; after a failed one share
    its answer; otherwise start at 1. So this process never runs two writes of one key;
 2. it is doomed but still in use, or in use with another length: RETRY;
 3. make room in the ledger (FULL if none can be made) and write. The same piece of work deletes the victims first.
A batch is complete when each key is answered. A key that occurs twice is STORED once and PRESENT once.

Load, per key: 0 at once if we are removing it; otherwise pinned and read, in pieces. A key that occurs twice is
read into both buffers. A load needs no lock. A plain miss (MISSING) is forgotten by the ledger.

Defects. A bad record is invisible at once, and discarded when no lookup, load or write of ours uses it; the backend
makes sure as far as it can that a newer record of the key survives that. Errors of the store keep the record.

Delete. Idle keys are removed; a key in use is doomed, invisible to lookups, and goes with its last use. What the store
refuses to delete stays in the ledger and is tried again only when asked for.

A piece of work that breaks off (a crash of its thread) is a miss, or RETRY: the store is the truth, nothing to repair.
Deadlines, breakers and retries are wrappers around this adapter; the bound of a hung call is the backend's.

Who holds, announces, frees
---------------------------
* Buffers: the caller's. Pieces of work hold views until they end. After `close` nothing is announced any more, and
  running work may still touch buffers until `work_inflight` is 0.
* "Done": the three notices, signalled on the loop after the result can be taken. Results belong to whoever takes them.
* Activities and ledger entries: this object. `close` ends the backend. The executor is the caller's.

Rejected: answering lookups from the ledger (other processes' objects would never hit); PRESENT from the ledger (the
store may have evicted it, and then nobody stores it again); one thread per store (a hung call would block all).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import shared_work as work
from kvcore.l2.activity import NOT_BUSY, REMOVING, WRITING, Activities, Activity
from kvcore.l2.adapter import PRESENT, STORED, L2Usage, StoreAnswer, TaskId
from kvcore.l2.backed import BackedAdapter
from kvcore.l2.envelope import Defect
from kvcore.l2.ledger import Ledger
from kvcore.l2.shared_backend import SharedBackend
from kvcore.l2.shared_removal import Remover
from kvcore.l2.shared_scan import Scanner
from kvcore.l2.shared_tasks import StoreItem, Use, Write, make_item, make_use, make_write
from kvcore.l2.statistics import L2Statistics
from kvcore.l2.tasks import BitTask, StoreTask
from kvcore.ports import Clock, Executor, Notice
from kvcore.quota import Quota

_RESCANS_PER_CAPACITY = 4
_log = logging.getLogger("kvcore.l2")


_NOWHERE = memoryview(b"")


class SharedAdapter(BackedAdapter[SharedBackend]):
    """`kvcore.l2.adapter.L2Adapter` over `backend`. Raises ConfigError when the backend refuses for good.

    `capacity_bytes` counts whole records, of all processes as far as the ledger knows them; None: the store sees to it
    alone. `rescan_bytes`: how much is written between two scans (default: a quarter of the capacity).
    """

    def __init__(
        self,
        name: str,
        backend: SharedBackend,
        executor: Executor,
        notices: Callable[[], Notice],
        clock: Clock,
        capacity_bytes: int | None = None,
        quota: Quota | None = None,
        rescan_bytes: int | None = None,
    ) -> None:
        super().__init__(name, backend.lock_strength, capacity_bytes, executor, backend)
        if rescan_bytes is None and capacity_bytes is not None:
            rescan_bytes = max(1, capacity_bytes // _RESCANS_PER_CAPACITY)
        self._clock = clock
        self._activities = Activities()
        self._ledger = Ledger(self._activities.exists, capacity_bytes, quota, rescan_bytes)
        self._opened = False
        self._opening = False
        state = (backend, self._runner, self._ledger, self._activities, self._counts)
        self._remover = Remover(*state, self._settle)
        self._scanner = Scanner(*state, clock, self._remover.evict_surplus)
        self._open_now()
        self._announce_by(notices)

    # --- lookup and locks --------------------------------------------------------------------------------------

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        batch = BitTask(self._begin_task(), len(keys))
        uses: list[Use] = []
        for position, key in enumerate(keys):
            if self._opened and not self._activities.is_leaving(key):
                uses.append(self._use(batch, position, key, _NOWHERE))
        self._counts.lookups += len(keys)
        batch.unanswered = len(uses)
        if not uses:
            self._complete_lookup(batch)
        for piece in work.cut(uses, [0] * len(uses), self._backend.batch_keys, 0):
            asked = [use.activity.key for use in piece]
            self._runner.submit_each(
                partial(work.find_all, self._backend, asked), partial(self._finds_ended, piece), asked
            )
        return batch.task

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        self._confined.check()
        if self._closed:
            return
        for key in keys:
            activity = self._activities.get(key)
            if activity is None or activity.locks == 0:
                self._counts.unlocks_unmatched += 1
            else:
                self._activities.unlock(activity)
                self._settle(activity)

    def _finds_ended(self, piece: list[Use], results: list[bool | Exception]) -> None:
        now_ns = self._clock.now_ns()
        for use, found in zip(piece, results):
            key = use.activity.key
            if isinstance(found, Exception):
                self._counts.io_errors += 1
            elif not found and use.fresh:
                self._ledger.forget(key)
            elif found and not use.activity.leaving:
                self._ledger.touch(key, now_ns - use.position)  # the beginning of a prefix is evicted last
                self._activities.lock(use.activity)
                use.batch.bits |= 1 << use.position
            self._end_use(use, self._complete_lookup)

    # --- store -------------------------------------------------------------------------------------------------

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        views = work.byte_views(keys, buffers, writable=False)
        sizes = [self._backend.record_bytes(key, len(view)) for key, view in zip(keys, views)]
        batch = StoreTask(self._begin_task(), [None] * len(keys), len(keys))
        writes: list[Write] = []
        for position, (key, view, size) in enumerate(zip(keys, views, sizes)):
            self._store(make_item((batch, position, key, view, size)), writes)
        if not keys:
            self._complete_store(batch)
        self._launch_writes(writes)
        return batch.task

    def _store(self, item: StoreItem, writes: list[Write]) -> None:
        """Steps 1 to 3 of the module text; appends to `writes` what has to be written."""
        activity = self._activities.get(item.key)
        if activity is not None and activity.busy is not NOT_BUSY:
            activity.waiting = (*activity.waiting, item)
        elif not self._opened or (activity is not None and self._in_the_way(activity, item)):
            self._answer(item, StoreAnswer.RETRY)
        else:
            self._admit(item, writes)

    def _in_the_way(self, activity: Activity, item: StoreItem) -> bool:
        known = self._ledger.bytes_of(item.key)
        return activity.leaving or (activity.in_use and known not in (None, item.record_bytes))

    def _admit(self, item: StoreItem, writes: list[Write]) -> None:
        activity = self._activities.begin(item.key, WRITING)
        room = self._ledger.admit(item.key, item.record_bytes)
        if room is None:
            self._activities.end(activity)
            self._settle(activity)
            self._answer(item, StoreAnswer.FULL)
            return
        for victim in room.victims:
            self._activities.begin(victim, REMOVING)
        writes.append(make_write((item, activity, room)))

    def _launch_writes(self, writes: list[Write]) -> None:
        sizes = [len(write.item.payload) for write in writes]
        for piece in work.cut(writes, sizes, self._backend.batch_keys, self._backend.batch_bytes):
            victims = [victim for write in piece for victim in write.room.victims]
            orders = [(write.item.key, write.item.payload) for write in piece]
            run, ended = partial(work.write_all, self._backend, victims, orders), partial(self._writes_ended, piece)
            broken = partial(work.not_written, victims, orders)
            self._runner.submit(run, ended, broken, _total(orders))

    def _writes_ended(self, piece: list[Write], result: work.Written) -> None:
        self._remover.ended(result.victims, result.errors, evicted=True)
        now_ns = self._clock.now_ns()
        self._counts.answers[STORED] += result.answers.count(STORED)
        for write, answer in zip(piece, result.answers):
            self._settle_write(write, answer, now_ns)
        if not all(isinstance(answer, Exception) for answer in result.answers):
            self._scanner.begin_if_due()

    def _settle_write(self, write: Write, result: StoreAnswer | Exception, now_ns: int) -> None:
        item, activity, room = write
        answer = result
        if isinstance(answer, Exception):
            self._counts.io_errors += 1
            answer = StoreAnswer.RETRY
        self._ledger.settle(item.key, room.reserved_bytes)
        if answer is STORED or answer is PRESENT:
            self._ledger.note(item.key, item.record_bytes, now_ns - item.position)
        if answer is STORED:  # counted for the whole piece
            self._counts.bytes_in += len(item.payload)
            self._set_answer(item.batch, item.position, answer)
        else:
            self._answer(item, answer)
        self._activities.end(activity)
        if activity.waiting:
            self._share(activity, item, answer)
        self._settle(activity)

    def _share(self, activity: Activity, item: StoreItem, answer: StoreAnswer) -> None:
        """Stores that waited for this write; those with another length look again, in `_settle`."""
        good = answer in (StoreAnswer.STORED, StoreAnswer.PRESENT)
        waiting: tuple[StoreItem, ...] = activity.waiting
        activity.waiting = tuple(other for other in waiting if good and other.record_bytes != item.record_bytes)
        for other in waiting:
            if not good or other.record_bytes == item.record_bytes:
                self._answer(other, StoreAnswer.PRESENT if good else answer)

    def _answer(self, item: StoreItem, answer: StoreAnswer) -> None:
        self._counts.answers[answer] += 1
        self._set_answer(item.batch, item.position, answer)

    # --- load --------------------------------------------------------------------------------------------------

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        views = work.byte_views(keys, buffers, writable=True)
        batch = BitTask(self._begin_task(), 0)
        uses: list[Use] = []
        for position, (key, view) in enumerate(zip(keys, views)):
            if self._opened and not self._activities.is_unreadable(key):
                uses.append(self._use(batch, position, key, view))
        self._counts.loads += len(keys)
        batch.unanswered = len(uses)
        if not uses:
            self._complete_load(batch)
        sizes = [len(use.into) for use in uses]
        for piece in work.cut(uses, sizes, self._backend.batch_keys, self._backend.batch_bytes):
            orders = [(use.activity.key, use.into) for use in piece]
            run, ended = partial(work.read_all, self._backend, orders), partial(self._reads_ended, piece)
            self._runner.submit_each(run, ended, orders, _total(orders))
        return batch.task

    def _reads_ended(self, piece: list[Use], results: list[Defect | Exception | None]) -> None:
        now_ns = self._clock.now_ns()
        for use, result in zip(piece, results):
            self._settle_read(use, result, now_ns)
            self._end_use(use, self._complete_load)

    def _settle_read(self, use: Use, result: Defect | Exception | None, now_ns: int) -> None:
        key = use.activity.key
        if result is None:
            use.batch.bits |= 1 << use.position
            self._ledger.note(key, self._backend.record_bytes(key, len(use.into)), now_ns - use.position)
            self._counts.load_hits += 1
            self._counts.bytes_out += len(use.into)
        elif isinstance(result, Exception):
            self._counts.io_errors += 1
        elif use.activity.broken is None:
            self._counts.defects[result] += 1
            if result is Defect.MISSING and use.fresh:
                self._ledger.forget(key)
            elif result is not Defect.MISSING and use.fresh:
                use.activity.broken = result

    # --- removing ----------------------------------------------------------------------------------------------

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._check_open()
        idle: list[ObjectKey] = []
        for key in dict.fromkeys(keys):
            activity = self._activities.get(key)
            if activity is None:
                idle.append(key)
            elif activity.busy is not REMOVING:
                activity.doomed = True
        if self._opened:
            self._remover.delete(idle)

    def _settle(self, activity: Activity) -> None:
        """Something has ended: begin what waited for it, or let go of the key."""
        if activity.busy is not NOT_BUSY:
            return
        if activity.broken is not None and not activity.pins:
            self._remover.discard(activity, activity.broken)
        elif activity.doomed and not activity.in_use:
            self._remover.delete([activity.key])
        elif activity.waiting:
            self._restart(activity)
        elif self._activities.drop(activity):
            self._ledger.unpark(activity.key)

    def _restart(self, activity: Activity) -> None:
        waiting, activity.waiting = activity.waiting, ()
        writes: list[Write] = []
        for item in waiting:
            self._store(item, writes)
        self._launch_writes(writes)
        if not activity.waiting:
            self._settle(activity)

    # --- opening and scanning ----------------------------------------------------------------------------------

    def _open_now(self) -> None:
        try:
            self._backend.open()
        except ConfigError:
            raise
        except (OSError, StoreError) as error:
            _log.warning("the L2 store %s does not answer (%s); it is tried again with each request", self.name, error)
            self._counts.io_errors += 1
            return
        self._is_open()

    def _open_later(self) -> None:
        if not self._opened and not self._opening:
            self._opening = True
            self._runner.submit_each(partial(work.open_backend, self._backend), self._opening_ended, [self._backend])

    def _opening_ended(self, errors: list[Exception | None]) -> None:
        [error] = errors
        self._opening = False
        if error is None:
            _log.info("the L2 store %s answers now", self.name)
            self._is_open()
        else:
            self._counts.io_errors += 1

    def _is_open(self) -> None:
        self._opened = True
        self._scanner.begin()

    # --- the rest ----------------------------------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        """Whether the store has answered yet."""
        return self._opened

    def usage(self) -> L2Usage:
        """By the ledger: our own view, complete once the first scan has ended. Capacity: ours, else the store's."""
        ledger = self._ledger
        capacity = self._scanner.store_capacity_bytes if ledger.capacity_bytes is None else ledger.capacity_bytes
        return L2Usage(ledger.bytes_used, capacity, ledger.objects, self._activities.locked)

    def keys(self) -> list[ObjectKey]:
        """By the ledger, like `usage`."""
        return self._ledger.keys()

    def statistics(self) -> L2Statistics:
        return self._counts.snapshot(
            objects=self._ledger.objects,
            locked=self._activities.locked,
            bytes_used=self._ledger.bytes_used,
            bytes_reserved=self._ledger.bytes_reserved,
            bytes_capacity=self._ledger.capacity_bytes,
            work_inflight=self._runner.inflight,
        )

    def check(self) -> None:
        """Assert the sums by a full walk (tests)."""
        self._ledger.check()
        self._activities.check()

    def _begin_task(self) -> TaskId:
        task = super()._begin_task()
        self._open_later()
        return task

    def _use(self, batch: BitTask, position: int, key: ObjectKey, into: memoryview) -> Use:
        activity = self._activities.pin(key)
        return make_use((batch, position, activity, activity.writes, into))

    def _end_use(self, use: Use, complete: Callable[[BitTask], None]) -> None:
        self._activities.unpin(use.activity)
        self._settle(use.activity)
        use.batch.unanswered -= 1
        if use.batch.unanswered == 0:
            complete(use.batch)


def _total(orders: Sequence[tuple[ObjectKey, memoryview]]) -> int:
    return sum(len(view) for _, view in orders)

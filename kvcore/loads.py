"""L2 loads in flight, shared by the lookups that wait for them, and the bytes of what they loaded.

Theory of operation
-------------------
A `Load` is one cell on its way from one adapter into one staging buffer. `LoadTable.in_flight` has at most one per
key, so two lookups for the same cell load it once: the second *joins*. A load belongs to the table, not to the
lookup that began it; it outlives that lookup's cancel as long as anybody waits for it.

    absent --stage--> staged --submit--> waiting --its turn--> loading --bit set, a reader left (or retain)--> published
                        |                   |                     `--bit clear or nobody left--------------> aborted
                        |                   `--its last reader has left--> aborted
                        `--drop (the plan got shorter)--> aborted

1. `stage` reserves staging under a tag of its own. NO_SPACE is a failed cell, never a wait.
2. `submit` makes a batch: the loads of one lookup from one adapter. It goes out in *slices* of at most `slice_bytes`,
   the front of the chain first in all rows, so that what has arrived is a prefix that can be served. Most batches are
   one slice, which is sent at once and in the order given.
3. A slice is one adapter task. It takes an I/O hold on its staging buffers in the adapter's name. At most
   `SLICES_RUNNING` of a batch are with the adapter; the others wait.
4. When the adapter reports a slice complete, and not before: the hold ends; each failed cell is aborted while
   it is still write-locked (there is no moment at which its buffer is readable or announced); each good cell is
   published and leased to its readers in one step; the source's locks are returned, once; then the readers are told;
   then the next slice goes.
5. A reader that gave up has left the load before; nothing is leased to it. A load that waits and has lost its last
   reader is dropped soon, also under `retain` (nothing has been spent on it), and at the latest before the next slice
   goes: staging, bytes and lock go back without a word of the adapter. A reader that joins before keeps it coming.
6. Batches know nothing of each other: one that hangs keeps its running slices, and its others as long as they have
   readers. Slices of several lookups take turns at the adapter, so a short one does not wait behind all of a long one.

A lock of a weak store may run out while its load waits; that cell fails, as any that its source has lost.

Bytes: every load carries its share of the grant of the lookup that planned it. The share goes back when the cell
fails, and otherwise passes to the `UnreadLedger`, which holds it until the last reader of that cell has ended, the
object has gone, or it became durable (an ordinary L1 object, no longer the prefetch's).

Rejected: a deadline per load (lookups have one; the buffer stays reserved either way until the adapter has let go);
publishing cell by cell while the adapter still runs (it owns all buffers of a task until the task is complete); one
task for the whole batch (of a long prefix nothing is readable before its last byte, and all of it is hauled for a
reader that has left); asking an adapter to cancel (few stores can, and the buffers are theirs until they answer).

Who holds a staging buffer: the tag's write reservation, and over it, while its slice runs, the adapter's I/O hold. Who
announces: the adapter's load notice, through the pump. Who frees: `_complete`, by publishing or aborting, and `drop`.
An adapter that never answers keeps the buffers of what runs, and their bytes; everything else goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcore.answers import Answer
from kvcore.budget import ByteBudget, Grant
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l2.pump import AdapterPump
from kvcore.leases import Owner

SLICE_BYTES = 64 << 20
"""What one adapter task loads at most. From a store of 1 to 10 GB/s it takes 6 to 60 ms: long beside the fixed cost of
a task (well under a millisecond), short beside the patience of a request. At most `SLICES_RUNNING` of them are read in
vain when a reader leaves."""

SLICES_RUNNING = 2
"""Slices of one batch that an adapter has at a time: while one is announced and published, it works on the other."""

_LEASED = (Answer.PUBLISHED, Answer.DISCARDED)
"""What finish_write answers when the object is resident afterwards: ours, or the one that came first."""


class Reader(Protocol):
    """Who waits for loads: a lookup job."""

    owner: Owner
    lease_deadline_ns: int

    def loads_ended(self, arrived: Sequence[ObjectKey], lost: Sequence[ObjectKey]) -> None:
        """`arrived` cells are published and leased to `owner`; `lost` ones are not and will not be."""
        ...


class Load:
    """One cell on its way. `readers` (ordered) get the lease when it is published. `batch`: where it waits, if so."""

    __slots__ = ("adapter", "batch", "grant", "key", "readers", "size", "tag")

    def __init__(self, key: ObjectKey, size: int, adapter: int, tag: str, grant: Grant) -> None:
        self.key = key
        self.size = size
        self.adapter = adapter
        self.tag = tag
        self.grant = grant
        self.readers: dict[Reader, None] = {}
        self.batch: _Batch | None = None


class _Batch:
    """The loads of one `submit` that wait for their turn, in order, and how many of its slices run."""

    __slots__ = ("running", "waiting")

    def __init__(self, loads: Sequence[Load]) -> None:
        self.waiting = dict.fromkeys(loads)
        self.running = 0
        for load in loads:
            load.batch = self

    def front(self, bytes_max: int) -> list[Load]:
        """As many of the first as fit, at least one."""
        fitting: list[Load] = []
        for load in self.waiting:
            bytes_max -= load.size
            if fitting and bytes_max < 0:
                break
            fitting.append(load)
        return fitting

    def take(self, loads: Sequence[Load]) -> None:
        """These wait no longer."""
        for load in loads:
            assert load.batch is self
            del self.waiting[load]
            load.batch = None


@dataclass(frozen=True, slots=True)
class Staged:
    """The outcome of `stage`, per key: on its way, resident meanwhile, or refused."""

    loads: list[Load]
    resident: list[ObjectKey]
    refused: list[ObjectKey]


class UnreadLedger:
    """Budget bytes of cells that were loaded and not yet read. One entry per key; each is given back once."""

    def __init__(self, budget: ByteBudget, freed: Callable[[], None]) -> None:
        self._budget = budget
        self._freed = freed
        self._entries: dict[ObjectKey, tuple[Grant, int, dict[Owner, None]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: ObjectKey, grant: Grant, size: int, owners: Iterable[Owner]) -> None:
        self.end(key)  # an older copy of the key has gone, whatever became of its readers
        self._entries[key] = (grant, size, dict.fromkeys(owners))
        if not self._entries[key][2]:
            self.end(key)

    def join(self, owner: Owner, keys: Iterable[ObjectKey]) -> None:
        """`owner` has leased these; those that are unread stay so until it ends as well."""
        if not self._entries:
            return
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry[2][owner] = None

    def read(self, owner: Owner, keys: Iterable[ObjectKey]) -> None:
        """`owner`'s leases on these have ended."""
        if not self._entries:
            return
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and owner in entry[2]:
                del entry[2][owner]
                if not entry[2]:
                    self.end(key)

    def end(self, key: ObjectKey) -> None:
        """The object has gone, or nobody needs it counted here any more."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._budget.give_back(entry[0], entry[1])
            self._freed()


@dataclass(frozen=True, slots=True)
class LoadStatistics:
    """Loads, and their bytes. `dropped`: those of the abandoned that waited for their turn."""

    in_flight: int
    in_flight_bytes: int
    unread: int
    started: int
    loaded: int
    bytes_loaded: int
    failed: int
    refused: int
    discarded: int
    abandoned: int
    dropped: int
    joined: int


class LoadTable:
    """See the module text."""

    def __init__(
        self,
        l1: L1Cache,
        pumps: Sequence[AdapterPump],
        budget: ByteBudget,
        slice_bytes: int,
        *,
        retain: bool,
        freed: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.in_flight: dict[ObjectKey, Load] = {}
        self.unread = UnreadLedger(budget, freed)
        self.origins: dict[ObjectKey, int] = {}
        self._l1 = l1
        self._pumps = pumps
        self._budget = budget
        self._slice_bytes = slice_bytes
        self._loop = asyncio.get_running_loop()
        self._left: dict[Load, None] = {}
        self._retain = retain
        self._freed = freed
        self._ended = ended
        self._serial = 0
        self._bytes = 0
        self._started = self._loaded = self._bytes_loaded = self._failed = 0
        self._refused = self._discarded = self._abandoned = self._dropped = self._joined = 0

    # Beginning

    def stage(self, adapter: int, keys: Sequence[ObjectKey], sizes: Sequence[int], grant: Grant) -> Staged:
        """Reserve staging for `keys`, all locked in `adapter`; locks of cells that do not start are returned."""
        self._serial += 1
        tag = f"prefetch:{self._serial}"
        answers, slots = self._l1.reserve_write(tag, keys, sizes, temporary=not self._retain)
        staged = Staged([], [], [])
        for key, size, answer, slot in zip(keys, sizes, answers, slots, strict=True):
            assert key not in self.in_flight, "a cell would be loaded twice"
            if answer is Answer.RESERVED:
                assert slot is not None
                load = Load(key, size, adapter, tag, grant)
                self.in_flight[key] = load
                staged.loads.append(load)
                self._bytes += size
            else:
                (staged.resident if answer is Answer.RESIDENT else staged.refused).append(key)
                self._give_back(grant, size)
        self._refused += len(staged.refused)
        self._pumps[adapter].unlock(staged.resident + staged.refused)
        return staged

    def drop(self, loads: Sequence[Load]) -> None:
        """Give up loads of one tag that no adapter has been asked for."""
        if not loads:
            return
        for load in loads:
            assert not load.readers
            self._forget(load)
            self._give_back(load.grant, load.size)
        keys = [load.key for load in loads]
        self._l1.abort_write(loads[0].tag, keys)
        self._pumps[loads[0].adapter].unlock(keys)
        self._abandoned += len(loads)

    def submit(self, loads: Sequence[Load], cell_of: Callable[[ObjectKey], tuple[int, int] | None]) -> None:
        """Begin staged loads of one tag. `cell_of` gives row and chunk; what does not fit one slice goes by chunk."""
        assert all(load.tag == loads[0].tag for load in loads)
        if sum(load.size for load in loads) > self._slice_bytes:

            def chunk_of(load: Load) -> int:
                cell = cell_of(load.key)
                assert cell is not None, "a load of a cell that its lookup does not have"
                return cell[1]

            loads = sorted(loads, key=chunk_of)
        self._advance(_Batch(loads))

    def _advance(self, batch: _Batch) -> None:
        """Send what may go now."""
        while batch.waiting and batch.running < SLICES_RUNNING:
            loads = batch.front(self._slice_bytes)
            batch.take(loads)
            self._send(batch, loads)

    def _send(self, batch: _Batch, loads: Sequence[Load]) -> None:
        """Start one adapter task; when it has ended, the batch goes on."""
        tag, adapter = loads[0].tag, loads[0].adapter
        keys = [load.key for load in loads]
        holder = f"l2:{self._pumps[adapter].name}"
        slots = [slot for slot in self._l1.hold_write(holder, tag, keys) if slot is not None]
        assert len(slots) == len(keys), "a staging buffer vanished before its load began"
        batch.running += 1
        self._started += len(loads)
        buffers = [self._l1.view(slot) for slot in slots]

        def done(bits: int | None) -> None:
            assert bits is not None, "loads have no deadline of their own"
            batch.running -= 1
            self._l1.unhold(holder, slots)
            self._complete(loads, bits)
            self._drop_left()
            self._advance(batch)

        self._pumps[adapter].load(keys, buffers, done)

    def abandon(self) -> None:
        """The adapters will announce nothing more: nothing in flight may be published. Buffers stay under holds."""
        self._left.clear()
        for load in list(self.in_flight.values()):
            load.readers.clear()
            self._forget(load)
            self._abandoned += 1
            self._l1.abort_write(load.tag, [load.key])
            self._give_back(load.grant, load.size)

    # Waiting

    def join(self, reader: Reader, load: Load) -> None:
        assert load is self.in_flight.get(load.key)
        self._joined += bool(load.readers)
        load.readers[reader] = None

    def leave(self, reader: Reader, load: Load) -> None:
        load.readers.pop(reader, None)
        if load.batch is not None and not load.readers:
            if not self._left:
                # Soon, not now: who leaves one load leaves many, and their locks go back to the adapter in one call.
                self._loop.call_soon(self._drop_left)
            self._left[load] = None

    def _drop_left(self) -> None:
        """Drop what still waits without a reader. A slice of its batch runs; that one's end is the end of the batch."""
        left, self._left = self._left, {}
        unwanted: dict[_Batch, list[Load]] = {}
        for load in left:
            if load.batch is not None and not load.readers:
                unwanted.setdefault(load.batch, []).append(load)
        for batch, loads in unwanted.items():
            batch.take(loads)
            assert batch.running
            self.drop(loads)
            self._dropped += len(loads)

    # Ending

    def _complete(self, loads: Sequence[Load], bits: int) -> None:
        """The adapter has let go of all buffers of this slice."""
        assert loads
        outcome = _Outcome()
        bad: list[Load] = []
        for position, load in enumerate(loads):
            self._forget(load)
            arrived = bool(bits >> position & 1)
            if arrived and (load.readers or self._retain):
                outcome.good.setdefault(tuple(load.readers), []).append(load)
            else:
                self._failed += not arrived
                self._abandoned += arrived
                bad.append(load)
        self._fail(bad, outcome)
        for readers, group in outcome.good.items():
            self._publish(readers, group, outcome)
        self._pumps[loads[0].adapter].unlock([load.key for load in loads])
        self._ended()
        for reader in outcome.touched:
            reader.loads_ended(outcome.arrived.get(reader, ()), outcome.lost.get(reader, ()))

    def _fail(self, loads: Sequence[Load], outcome: _Outcome) -> None:
        if not loads:
            return
        self._l1.abort_write(loads[0].tag, [load.key for load in loads])
        for load in loads:
            self._give_back(load.grant, load.size)
            for reader in load.readers:
                outcome.note(outcome.lost, reader, load.key)

    def _publish(self, readers: tuple[Reader, ...], loads: Sequence[Load], outcome: _Outcome) -> None:
        """Publish cells that have the same readers, and lease them in the same step."""
        keys = [load.key for load in loads]
        for load in loads:
            # Before publishing: the write-back learns of the object while it is being published.
            self.origins[load.key] = load.adapter
        answers = self._publish_and_lease(loads[0].tag, keys, readers)
        broken = []
        for load, answer in zip(loads, answers, strict=True):
            if answer in _LEASED:
                self._account(load, answer, readers)
                for reader in readers:
                    outcome.note(outcome.arrived, reader, load.key)
            else:
                broken.append(load)
                self._failed += 1
                if not self._l1.contains(load.key):
                    self.origins.pop(load.key, None)
        self._fail(broken, outcome)

    def _publish_and_lease(self, tag: str, keys: list[ObjectKey], readers: Sequence[Reader]) -> list[Answer]:
        """The first reader's lease comes with the publication and protects the object while the others take theirs.

        Each has its own deadline, hence its own call; all are made before anybody else runs.
        """
        if not readers:
            assert self._retain
            return self._l1.finish_write(tag, keys, temporary=False)
        first, *others = readers
        answers = self._l1.finish_write_and_reserve_read(
            tag, keys, [first.owner], temporary=not self._retain, deadline_ns=first.lease_deadline_ns
        )
        leased = [key for key, answer in zip(keys, answers, strict=True) if answer in _LEASED]
        for reader in others:
            taken = self._l1.reserve_read(reader.owner, leased, deadline_ns=reader.lease_deadline_ns)
            assert all(answer is Answer.RESERVED for answer in taken), "a leased object vanished"
        return answers

    def _account(self, load: Load, answer: Answer, readers: Sequence[Reader]) -> None:
        owners = [reader.owner for reader in readers]
        self._loaded += 1
        self._bytes_loaded += load.size
        if answer is Answer.PUBLISHED:
            self.unread.add(load.key, load.grant, load.size, owners)
        else:
            self._discarded += 1
            for owner in owners:
                self.unread.join(owner, (load.key,))
            self._give_back(load.grant, load.size)

    def _forget(self, load: Load) -> None:
        assert self.in_flight[load.key] is load
        del self.in_flight[load.key]
        self._bytes -= load.size

    def _give_back(self, grant: Grant, size: int) -> None:
        self._budget.give_back(grant, size)
        self._freed()

    def statistics(self) -> LoadStatistics:
        return LoadStatistics(
            len(self.in_flight),
            self._bytes,
            len(self.unread),
            self._started,
            self._loaded,
            self._bytes_loaded,
            self._failed,
            self._refused,
            self._discarded,
            self._abandoned,
            self._dropped,
            self._joined,
        )


class _Outcome:
    """What one completed task means for whom. Dicts are used as ordered sets."""

    __slots__ = ("arrived", "good", "lost", "touched")

    def __init__(self) -> None:
        self.good: dict[tuple[Reader, ...], list[Load]] = {}
        self.arrived: dict[Reader, list[ObjectKey]] = {}
        self.lost: dict[Reader, list[ObjectKey]] = {}
        self.touched: dict[Reader, None] = {}

    def note(self, kind: dict[Reader, list[ObjectKey]], reader: Reader, key: ObjectKey) -> None:
        kind.setdefault(reader, []).append(key)
        self.touched[reader] = None

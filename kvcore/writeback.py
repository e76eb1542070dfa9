"""Write-back: what is published in L1 goes to the L2 adapters in the background. Shell (one loop thread).

Theory of operation
-------------------
For every durable object that L1 publishes there is one `_Item`, with one entry per adapter that shall get it (all of
them, less the one it was loaded from). Per adapter:

    queued --its turn--> storing --STORED, PRESENT--> done
      ^                     |----RETRY, attempts left--> backing off --timer--> queued
      |                     |----FULL, FAILED, no attempts left, deadline------> failed
      `-- object gone while queued or backing off: dropped

1. `published` and `removed` are L1's own announcements; they only note. The work begins from the loop.
2. A queued item pins nothing. When its turn comes it is leased under `Owner("", n, "writeback")`; if it has gone,
   it is dropped and counted.
3. While it is stored there are a read lease (with a deadline) and an I/O hold in the adapter's name. At the deadline
   the lease ends and the item has failed; the hold stays until the adapter reports the task complete, so that no
   byte is reused under a running transfer.
4. Bytes in flight are bounded per adapter (an equal share of the total), and count until the adapter has let go. So
   a hung adapter keeps that much memory and no more, and cannot starve the others. One object larger than the share
   goes alone.
5. `skip_l1`: when the last adapter of an item has stored or finally failed and at least one has stored, the object
   becomes temporary, under our own lease or right here. If none has, it stays an ordinary object.

Nothing here can fail a request: there is no way back from a store to a lookup.

Rejected: leasing at publication (a slow L2 would pin all of L1), one queue for all adapters (the slowest sets the
pace), and writing temporary objects (they came from L2 and leave with their reader).

Who holds: queued: nobody; storing: our lease and the adapter's hold. Who announces: the adapter's store notice,
through the pump. Who frees: L1, when lease and hold have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcore.answers import Answer
from kvcore.deadlines import NS_PER_S
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.pump import AdapterPump
from kvcore.leases import Owner
from kvcore.memory import Slot
from kvcore.ports import Clock, Tracer


@dataclass(frozen=True, slots=True)
class WritebackConfig:
    """`bytes_inflight_max` is over all adapters; `attempts_max` counts the first attempt."""

    bytes_inflight_max: int
    skip_l1: bool
    store_deadline_ns: int
    attempts_max: int
    backoff_ns: int
    batch_objects_max: int


@dataclass(frozen=True, slots=True)
class WritebackStatistics:
    queued: int
    backing_off: int
    inflight: int
    bytes_inflight: int
    bytes_inflight_peak: int
    stored: int
    bytes_stored: int
    present: int
    dropped: int
    retried: int
    full: int
    failed: int
    deadlines: int
    made_temporary: int


class _Item:
    """One object on its way out. `open` lists the adapters that have not ended."""

    __slots__ = ("attempts", "key", "open", "size", "stored")

    def __init__(self, key: ObjectKey, size: int, targets: Sequence[int]) -> None:
        self.key = key
        self.size = size
        self.open = dict.fromkeys(targets)
        self.attempts = dict.fromkeys(targets, 0)
        self.stored = False


class _Lane:
    """One adapter's queue. All dicts are ordered."""

    __slots__ = ("backing_off", "bytes_inflight", "index", "inflight", "pump", "queue")

    def __init__(self, index: int, pump: AdapterPump) -> None:
        self.index = index
        self.pump = pump
        self.queue: dict[ObjectKey, _Item] = {}
        self.backing_off: dict[ObjectKey, tuple[_Item, asyncio.TimerHandle]] = {}
        self.inflight = 0
        self.bytes_inflight = 0


class _Batch:
    """One store task: `items[i]` from `slots[i]`, leased by `owner` until `leased` is false."""

    __slots__ = ("items", "lane", "leased", "owner", "size", "slots")

    def __init__(self, lane: _Lane, owner: Owner, items: list[_Item], slots: list[Slot]) -> None:
        self.lane = lane
        self.owner = owner
        self.items = items
        self.slots = slots
        self.size = sum(item.size for item in items)
        self.leased = True


class WritebackController:
    """See the module text. `origins` says which adapter a resident object came from."""

    def __init__(
        self,
        *,
        l1: L1Cache,
        pumps: Sequence[AdapterPump],
        clock: Clock,
        tracer: Tracer,
        config: WritebackConfig,
        origins: Mapping[ObjectKey, int],
        ended: Callable[[], None],
    ) -> None:
        self._l1 = l1
        self._clock = clock
        self._tracer = tracer
        self._config = config
        self._origins = origins
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._lanes = [_Lane(index, pump) for index, pump in enumerate(pumps)]
        self._share_bytes = config.bytes_inflight_max // max(1, len(pumps))
        self._items: dict[ObjectKey, _Item] = {}
        self._batches: dict[_Batch, None] = {}
        self._turn: asyncio.Handle | None = None
        self._closed = False
        self._serial = 0
        self._bytes_peak = 0
        self._stored = self._bytes_stored = self._present = self._dropped = self._retried = 0
        self._full = self._failed = self._deadlines = self._made_temporary = 0

    @property
    def idle(self) -> bool:
        """Nothing queued, backing off or being stored."""
        return not any(lane.queue or lane.backing_off or lane.inflight for lane in self._lanes)

    # Announcements of L1

    def published(self, key: ObjectKey, slot: Slot, temporary: bool) -> None:
        if temporary or self._closed:
            return
        origin = self._origins.get(key)
        targets = [lane.index for lane in self._lanes if lane.index != origin]
        if not targets:
            return
        self.removed(key)  # a second life of the key; the first one's entries are void
        item = self._items[key] = _Item(key, slot.size, targets)
        for index in targets:
            self._lanes[index].queue[key] = item
        self._schedule()

    def removed(self, key: ObjectKey) -> None:
        self._items.pop(key, None)
        for lane in self._lanes:
            waited = lane.queue.pop(key, None)
            paused = lane.backing_off.pop(key, None)
            if paused is not None:
                paused[1].cancel()
            self._dropped += (waited is not None) + (paused is not None)

    def _schedule(self) -> None:
        if self._turn is None and not self._closed:
            self._turn = self._loop.call_soon(self._run)

    def _run(self) -> None:
        self._turn = None
        for lane in self._lanes:
            while lane.queue and self._store_next(lane):
                pass
        self._ended()

    # Storing

    def _store_next(self, lane: _Lane) -> bool:
        """Start one task for the head of the queue; False when its bytes have to wait."""
        taken = self._take(lane)
        if not taken:
            return False
        self._serial += 1
        owner = Owner("", self._serial, "writeback")
        deadline_ns = self._clock.now_ns() + self._config.store_deadline_ns
        answers = self._l1.reserve_read(owner, [item.key for item in taken], deadline_ns=deadline_ns)
        items: list[_Item] = []
        for item, answer in zip(taken, answers, strict=True):
            if answer is Answer.RESERVED:
                items.append(item)
            else:
                self._dropped += 1
                self._finish(item, lane)
        if items:
            self._submit(lane, owner, items)
        return True

    def _take(self, lane: _Lane) -> list[_Item]:
        """The next items whose bytes fit beside what is in flight at this adapter."""
        taken: list[_Item] = []
        size = lane.bytes_inflight
        for item in lane.queue.values():
            alone = not taken and not lane.bytes_inflight
            if len(taken) == self._config.batch_objects_max or (size + item.size > self._share_bytes and not alone):
                break
            taken.append(item)
            size += item.size
        for item in taken:
            del lane.queue[item.key]
        return taken

    def _submit(self, lane: _Lane, owner: Owner, items: list[_Item]) -> None:
        keys = [item.key for item in items]
        slots = [slot for slot in self._l1.hold_read(f"l2:{lane.pump.name}", owner, keys) if slot is not None]
        assert len(slots) == len(items), "an object vanished under our lease"
        batch = _Batch(lane, owner, items, slots)
        self._batches[batch] = None
        lane.inflight += 1
        lane.bytes_inflight += batch.size
        self._bytes_peak = max(self._bytes_peak, sum(each.bytes_inflight for each in self._lanes))
        for item in items:
            item.attempts[lane.index] += 1

        def answered(answers: list[StoreAnswer] | None) -> None:
            if answers is None:
                self._give_up(batch)
            else:
                self._let_go(batch)
                self._judge(batch, answers)

        def late(answers: list[StoreAnswer]) -> None:
            self._tracer.event("writeback.late", lane.pump.name, len(answers))
            self._let_go(batch)

        buffers = [self._l1.view(slot) for slot in slots]
        lane.pump.store(keys, buffers, answered, late, self._config.store_deadline_ns / NS_PER_S)

    def _let_go(self, batch: _Batch) -> None:
        """The adapter does not read the buffers any more."""
        self._l1.unhold(f"l2:{batch.lane.pump.name}", batch.slots)
        del self._batches[batch]
        batch.lane.inflight -= 1
        batch.lane.bytes_inflight -= batch.size
        assert batch.lane.inflight >= 0
        assert batch.lane.bytes_inflight >= 0
        self._schedule()
        self._ended()

    def _give_up(self, batch: _Batch) -> None:
        """The deadline: the objects are free to go, their bytes stay under the hold."""
        self._deadlines += 1
        self._tracer.event("writeback.deadline", batch.lane.pump.name, len(batch.items))
        self._failed += len(batch.items)
        self._end(batch, batch.items)

    def _judge(self, batch: _Batch, answers: Sequence[StoreAnswer]) -> None:
        assert len(answers) == len(batch.items)
        over = []
        for item, answer in zip(batch.items, answers, strict=True):
            if answer is StoreAnswer.RETRY and self._back_off(item, batch.lane):
                continue
            self._count(item, answer)
            item.stored = item.stored or answer in (StoreAnswer.STORED, StoreAnswer.PRESENT)
            over.append(item)
        self._end(batch, over)

    def _count(self, item: _Item, answer: StoreAnswer) -> None:
        if answer is StoreAnswer.STORED:
            self._stored += 1
            self._bytes_stored += item.size
        elif answer is StoreAnswer.PRESENT:
            self._present += 1
        elif answer is StoreAnswer.FULL:
            self._full += 1
        else:
            self._failed += 1

    def _end(self, batch: _Batch, over: Sequence[_Item]) -> None:
        """`over` have ended at this adapter. The lease goes last, so that a skipped copy leaves with it."""
        assert batch.leased
        for item in over:
            self._finish(item, batch.lane)
        batch.leased = False
        self._l1.finish_read(batch.owner, [item.key for item in batch.items])
        self._ended()

    def _finish(self, item: _Item, lane: _Lane) -> None:
        """One adapter is done with the item; after the last one decide about the L1 copy."""
        del item.open[lane.index]
        if item.open or self._items.get(item.key) is not item:
            return
        del self._items[item.key]
        if self._config.skip_l1 and item.stored:
            self._made_temporary += 1
            self._l1.set_temporary([item.key], True)

    def _back_off(self, item: _Item, lane: _Lane) -> bool:
        """Try again later, if there are attempts left and the object is still what it was."""
        attempts = item.attempts[lane.index]
        if self._closed or attempts >= self._config.attempts_max or self._items.get(item.key) is not item:
            return False
        self._retried += 1
        delay_ns = self._config.backoff_ns << (attempts - 1)
        timer = self._loop.call_later(delay_ns / NS_PER_S, self._queue_again, item, lane)
        lane.backing_off[item.key] = (item, timer)
        return True

    def _queue_again(self, item: _Item, lane: _Lane) -> None:
        del lane.backing_off[item.key]
        lane.queue[item.key] = item
        self._schedule()

    # Ending

    def close(self) -> None:
        """Drop what has not begun. Stores in flight drain through the pumps."""
        self._closed = True
        for lane in self._lanes:
            self._dropped += len(lane.queue) + len(lane.backing_off)
            lane.queue.clear()
            for _, timer in lane.backing_off.values():
                timer.cancel()
            lane.backing_off.clear()
        self._items.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def abandon(self) -> None:
        """The adapters will announce nothing more: end our leases. The holds stay, for the bytes may still be read."""
        assert self._closed
        for batch in self._batches:
            if batch.leased:
                self._give_up(batch)

    def statistics(self) -> WritebackStatistics:
        return WritebackStatistics(
            queued=sum(len(lane.queue) for lane in self._lanes),
            backing_off=sum(len(lane.backing_off) for lane in self._lanes),
            inflight=sum(lane.inflight for lane in self._lanes),
            bytes_inflight=sum(lane.bytes_inflight for lane in self._lanes),
            bytes_inflight_peak=self._bytes_peak,
            stored=self._stored,
            bytes_stored=self._bytes_stored,
            present=self._present,
            dropped=self._dropped,
            retried=self._retried,
            full=self._full,
            failed=self._failed,
            deadlines=self._deadlines,
            made_temporary=self._made_temporary,
        )

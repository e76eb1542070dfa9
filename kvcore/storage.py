"""`Storage`: L1, the L2 adapters, prefetch and write-back behind one door. Shell (one loop thread).

Theory of operation
-------------------
Storage adds no policy of its own. It keeps three records that its parts share, so that each thing ends once:

* `_stagings`, per (holder, tag): the slots that a worker copies into. `reserve_store` opens them under the worker's
  I/O hold; `commit_store` and `abort_store` end the hold and then publish or give up. A buffer whose reservation has
  expired keeps its hold until then: the worker may still write.
* `_readings`, per holder: the slots that it copies out of, by (owner, key). `close_read` ends hold and lease
  together.
* the lookup jobs (`kvcore.prefetch`), which own all read leases of engines.

    worker --reserve_store--> staging + hold --copy--> commit_store --> resident --> write-back --> L2
    engine --start_lookup--> leases --open_read--> + hold --copy--> close_read

Storage is L1's observer: `published` goes to the write-back (durable objects only) and `removed` to everybody who
keeps something about a resident object. Both only note; the work happens from the loop.

Repeated messages are harmless: a second open_read of the same cell by the same holder gets the same slot and no
second hold; a second commit or close answers UNKNOWN.

Closing is bounded: lookups are cancelled, queued write-backs dropped, and what runs gets `close_deadline_ns` to end.
What has not ended by then is abandoned: leases end, nothing is published, and the memory stays under its I/O holds,
because an adapter that does not answer may still use it.

Rejected: letting workers call L1 directly (budget bytes would not learn that a loaded cell has been read).

Who holds: workers hold their copies' slots; jobs hold leases; adapters hold the buffers of running tasks. Who
announces: commit, abort and close; the adapters' notices; `release_holder` on proven death. Who frees: L1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.answers import Answer
from kvcore.deadlines import NS_PER_S, DeadlineTimer
from kvcore.errors import CallerError, ConfigError
from kvcore.groups import CacheLayout
from kvcore.keys import ObjectKey, object_keys
from kvcore.l1 import L1Cache, L1Observer
from kvcore.l1_statistics import L1Statistics
from kvcore.l2.adapter import L2Adapter
from kvcore.l2.pump import AdapterPump, PumpStatistics
from kvcore.leases import Owner
from kvcore.loads import SLICE_BYTES
from kvcore.lookup_job import LookupJob, LookupState
from kvcore.memory import Slot
from kvcore.ports import Clock, NullTracer, Tracer
from kvcore.prefetch import PrefetchController, PrefetchStatistics
from kvcore.runtime.confined import LoopConfined
from kvcore.writeback import WritebackConfig, WritebackController, WritebackStatistics

__all__ = ["LookupJob", "LookupState", "Storage", "StorageConfig", "StorageStatistics"]

_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """Sizes, deadlines and policies of one Storage.

    `retain`: what was loaded from L2 stays in L1 after its last reader. `skip_l1`: what has been written to L2
    leaves L1 with its last reader. `lease_ns` counts from the deadline of the lookup. `load_slice_bytes`: what one load
    task of an adapter brings at most; what has been loaded is readable slice by slice.
    """

    prefetch_budget_bytes: int = 1 << 30
    load_slice_bytes: int = SLICE_BYTES
    writeback_bytes_inflight_max: int = 256 << 20
    retain: bool = False
    skip_l1: bool = False
    lease_ns: int = 60_000 * _MS
    lookup_deadline_ns: int = 2_000 * _MS
    store_deadline_ns: int = 30_000 * _MS
    store_attempts_max: int = 4
    store_backoff_ns: int = 100 * _MS
    store_batch_objects_max: int = 64
    close_deadline_ns: int = 5_000 * _MS

    def __post_init__(self) -> None:
        for name in ("prefetch_budget_bytes", "writeback_bytes_inflight_max"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must not be negative")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be positive")


_POSITIVE = (
    "load_slice_bytes",
    "lease_ns",
    "lookup_deadline_ns",
    "store_deadline_ns",
    "store_attempts_max",
    "store_backoff_ns",
    "store_batch_objects_max",
    "close_deadline_ns",
)


@dataclass(frozen=True, slots=True)
class StorageStatistics:
    l1: L1Statistics
    prefetch: PrefetchStatistics
    writeback: WritebackStatistics
    adapters: tuple[PumpStatistics, ...]
    stagings: int
    readings: int


class _Staging:
    """What one worker copies under one tag. A key can have an expired buffer besides the live one: both drain here."""

    __slots__ = ("slots", "timers")

    def __init__(self) -> None:
        self.slots: dict[ObjectKey, list[Slot]] = {}
        self.timers: list[DeadlineTimer] = []


class Storage:
    """See the module text. Built inside the running loop; takes over `adapters`, which `close` closes."""

    def __init__(
        self,
        *,
        layout: CacheLayout,
        model_name: str,
        l1: L1Cache,
        adapters: Sequence[L2Adapter],
        clock: Clock,
        config: StorageConfig,
        tracer: Tracer | None = None,
    ) -> None:
        names = [adapter.name for adapter in adapters]
        if len(set(names)) != len(names):
            raise ConfigError(f"two adapters have the same name among {names}")
        tracer = tracer if tracer is not None else NullTracer()
        self.layout = layout
        self._model_name = model_name
        self.config = config
        self._l1 = l1
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._confined = LoopConfined()
        self._adapters = tuple(adapters)
        self._pumps = [AdapterPump(adapter) for adapter in adapters]
        self._stagings: dict[tuple[str, str], _Staging] = {}
        self._readings: dict[str, dict[tuple[Owner, ObjectKey], Slot]] = {}
        self._idle_waiters: dict[asyncio.Future[None], None] = {}
        self._closed = False
        self._tracer = tracer
        self._prefetch = PrefetchController(
            layout=layout,
            model_name=model_name,
            l1=l1,
            pumps=self._pumps,
            clock=clock,
            tracer=tracer,
            budget_bytes=config.prefetch_budget_bytes,
            slice_bytes=config.load_slice_bytes,
            lease_ns=config.lease_ns,
            lookup_deadline_ns=config.lookup_deadline_ns,
            retain=config.retain,
            ended=self._something_ended,
        )
        self._writeback = WritebackController(
            l1=l1,
            pumps=self._pumps,
            clock=clock,
            tracer=tracer,
            config=_writeback_config(config),
            origins=self._prefetch.loads.origins,
            ended=self._something_ended,
        )
        _observe(l1, self)

    # Lookups

    def start_lookup(
        self,
        owner: Owner,
        hashes: Sequence[bytes],
        *,
        salt: str,
        prompt_tokens: int,
        masks: Sequence[int],
        skip_chunks: int,
        deadline_ns: int,
    ) -> LookupJob:
        """Begin a lookup; the job may be READY already. `masks`: per row, the cells this server is responsible for.

        Raises CallerError when `owner` still has a lookup or the arguments do not fit the layout.
        """
        self._confined.check()
        return self._prefetch.start(
            owner,
            hashes,
            salt=salt,
            prompt_tokens=prompt_tokens,
            masks=masks,
            skip_chunks=skip_chunks,
            deadline_ns=deadline_ns,
        )

    def release_owner(self, owner: Owner) -> int:
        """Cancel the owner's lookup and end all its leases; copies that still run keep their holds. Leases ended."""
        self._confined.check()
        return self._prefetch.release_owner(owner)

    def renew(self, hashes: Sequence[bytes], salt: str) -> None:
        """A request with this chain has ended: what L1 has of it is as young as the end, its beginning youngest."""
        self._confined.check()
        backwards = hashes[::-1]
        rows = [object_keys(backwards, self._model_name, row.rank, row.group, salt) for row in self.layout.rows]
        self._l1.renew([key for chunk in zip(*rows, strict=True) for key in chunk])

    # Stores

    def reserve_store(
        self,
        tag: str,
        holder: str,
        keys: Sequence[ObjectKey],
        sizes: int | Sequence[int],
        deadline_ns: int | None = None,
    ) -> tuple[list[Answer], list[Slot | None]]:
        """Staging for `holder` to copy into, under its I/O hold. Per key: RESERVED and a slot, or why not."""
        self._confined.check()
        if self._closed:
            raise CallerError("the storage is closed; nothing can be stored")
        answers, slots = self._l1.reserve_write(tag, keys, sizes, deadline_ns=deadline_ns)
        reserved = [key for key, answer in zip(keys, answers, strict=True) if answer is Answer.RESERVED]
        if not reserved:
            return answers, slots
        staging = self._stagings.setdefault((holder, tag), _Staging())
        for key, slot in zip(reserved, self._l1.hold_write(holder, tag, reserved), strict=True):
            assert slot is not None, "just reserved"
            staging.slots.setdefault(key, []).append(slot)
        if deadline_ns is not None:
            staging.timers.append(DeadlineTimer(self._loop, self._clock, deadline_ns, self._expire))
        self._tracer.event("store.begin", holder, tag, len(keys), len(reserved), _bytes_of(slots))
        return answers, slots

    def commit_store(self, tag: str, holder: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        """The copies have ended well: publish. The write-back follows by itself."""
        known = self._end_staging(tag, holder, keys)
        answers = self._l1.finish_write(tag, list(known))
        self._trace_end("store.commit", holder, tag, len(known), answers.count(Answer.PUBLISHED))
        return self._answer_known(keys, known, answers)

    def abort_store(self, tag: str, holder: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        """The copies have ended and their bytes must not be used: give the staging up while it is write-locked."""
        known = self._end_staging(tag, holder, keys, aborting=True)
        self._trace_end("store.abort", holder, tag, len(known), len(known))
        return self._answer_known(keys, known, list(known.values()))

    def _end_staging(
        self, tag: str, holder: str, keys: Sequence[ObjectKey], *, aborting: bool = False
    ) -> dict[ObjectKey, Answer]:
        """End the holds on those of `keys` that `holder` stages; when aborting, give them up before."""
        self._confined.check()
        staging = self._stagings.get((holder, tag))
        if staging is None:
            return {}
        known = {key: slots for key in keys if (slots := staging.slots.pop(key, None)) is not None}
        answers = self._l1.abort_write(tag, list(known)) if aborting else [Answer.UNKNOWN] * len(known)
        self._l1.unhold(holder, [slot for slots in known.values() for slot in slots])
        if not staging.slots:
            self._drop_staging(holder, tag)
        return dict(zip(known, answers, strict=True))

    def _trace_end(self, label: str, holder: str, tag: str, cells: int, done: int) -> None:
        """Some cells of a store have been decided; was it the last of them?"""
        if cells:
            self._tracer.event(label, holder, tag, done)
            if (holder, tag) not in self._stagings:
                self._tracer.event("store.end", holder, tag)

    def _drop_staging(self, holder: str, tag: str) -> None:
        for timer in self._stagings.pop((holder, tag)).timers:
            timer.cancel()

    @staticmethod
    def _answer_known(
        keys: Sequence[ObjectKey], known: dict[ObjectKey, Answer], answers: Sequence[Answer]
    ) -> list[Answer]:
        """One answer per key of the call; keys that were not staged, and repetitions, are UNKNOWN."""
        found = dict(zip(known, answers, strict=True))
        return [found.pop(key, Answer.UNKNOWN) for key in keys]

    # Reads

    def open_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        """`holder` begins to copy out, under `owner`'s leases. None: not leased (any more), so not readable."""
        self._confined.check()
        open_slots = self._readings.setdefault(holder, {})
        fresh = [key for key in dict.fromkeys(keys) if (owner, key) not in open_slots]
        held = self._l1.hold_read(holder, owner, fresh)
        for key, slot in zip(fresh, held, strict=True):
            if slot is not None:
                open_slots[owner, key] = slot
        self._trace_read("read.begin", holder, owner, [slot for slot in held if slot is not None])
        result = [open_slots.get((owner, key)) for key in keys]
        if not open_slots:
            del self._readings[holder]
        return result

    def close_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Answer]:
        """The copies have ended: hold and lease end. RELEASED: the bytes were protected all along."""
        self._confined.check()
        open_slots = self._readings.get(holder, {})
        known = {key: slot for key in keys if (slot := open_slots.pop((owner, key), None)) is not None}
        if holder in self._readings and not open_slots:
            del self._readings[holder]
        self._l1.unhold(holder, list(known.values()))
        self._trace_read("read.end", holder, owner, list(known.values()))
        answers = dict(zip(known, self._prefetch.finish_read(owner, list(known)), strict=True))
        return [answers.pop(key, Answer.UNKNOWN) for key in keys]

    def _trace_read(self, label: str, holder: str, owner: Owner, slots: Sequence[Slot]) -> None:
        if slots:
            self._tracer.event(label, holder, owner.session, owner.generation, len(slots), _bytes_of(slots))

    def give_up_holder(self, holder: str) -> int:
        """`holder` is silent: nothing that it stages will be published, and the leases of what it reads end.

        Its copies may still run, so its holds stay; commit, abort and close end them, now with answers that say that it
        was too late. Returns the reservations and leases ended.
        """
        self._confined.check()
        ended = 0
        for (name, tag), staging in self._stagings.items():
            if name == holder:
                ended += self._l1.abort_write(tag, list(staging.slots)).count(Answer.ABORTED)
        for owner, key in list(self._readings.get(holder, {})):
            ended += self._prefetch.finish_read(owner, [key]).count(Answer.RELEASED)
        return ended

    def release_holder(self, holder: str) -> int:
        """`holder` is proven dead: its copies have ended and nothing of it is published. Returns the holds ended.

        Leases of the owners it read for are not touched; their own deadline or release ends them.
        """
        self._confined.check()
        for name, tag in [each for each in self._stagings if each[0] == holder]:
            self._l1.abort_write(tag, list(self._stagings[name, tag].slots))
            self._drop_staging(name, tag)
            self._tracer.event("store.end", name, tag)
        if self._readings.pop(holder, None) is not None:
            self._tracer.event("read.drop", holder)
        return self._l1.release_holder(holder)

    # L1's announcements

    def published(self, key: ObjectKey, slot: Slot, temporary: bool) -> None:
        if not temporary:
            self._prefetch.loads.unread.end(key)
        self._writeback.published(key, slot, temporary)

    def removed(self, key: ObjectKey) -> None:
        self._prefetch.loads.unread.end(key)
        self._prefetch.loads.origins.pop(key, None)
        self._writeback.removed(key)

    # Life

    def drop_l1(self) -> int:
        """Delete every object that no lease protects; how many. L2 keeps its copies."""
        self._confined.check()
        return self._l1.clear()

    def _expire(self) -> None:
        self._l1.expire(self._clock.now_ns())

    @property
    def idle(self) -> bool:
        """No load, lookup or write-back is queued or running. Lookups that wait for the budget may exist."""
        return (
            not self._prefetch.loads.in_flight
            and self._writeback.idle
            and not any(pump.outstanding for pump in self._pumps)
        )

    def _something_ended(self) -> None:
        if self._idle_waiters and self.idle:
            waiters, self._idle_waiters = self._idle_waiters, {}
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def drain(self, timeout_ns: int | None = None) -> bool:
        """Wait until idle; False when `timeout_ns` has passed before. The write-back goes on either way."""
        while not self.idle:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._idle_waiters[waiter] = None
            try:
                async with asyncio.timeout(None if timeout_ns is None else timeout_ns / NS_PER_S):
                    await waiter
            except TimeoutError:
                return self.idle
            finally:
                self._idle_waiters.pop(waiter, None)
        return True

    async def close(self) -> None:
        """End within `close_deadline_ns`, whatever is outstanding. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        self._prefetch.close()
        self._writeback.close()
        try:
            await self.drain(self.config.close_deadline_ns)
        finally:
            self._abandon()

    def _abandon(self) -> None:
        for pump in self._pumps:
            pump.close()
        for adapter in self._adapters:
            adapter.close()
        self._prefetch.loads.abandon()
        self._writeback.abandon()
        for staging in self._stagings.values():
            for timer in staging.timers:
                timer.cancel()
        for waiter in self._idle_waiters:
            waiter.cancel()

    def statistics(self) -> StorageStatistics:
        self._confined.check()
        return StorageStatistics(
            l1=self._l1.statistics(),
            prefetch=self._prefetch.statistics(),
            writeback=self._writeback.statistics(),
            adapters=tuple(pump.statistics() for pump in self._pumps),
            stagings=sum(len(staging.slots) for staging in self._stagings.values()),
            readings=sum(len(slots) for slots in self._readings.values()),
        )


def _writeback_config(config: StorageConfig) -> WritebackConfig:
    return WritebackConfig(
        bytes_inflight_max=config.writeback_bytes_inflight_max,
        skip_l1=config.skip_l1,
        store_deadline_ns=config.store_deadline_ns,
        attempts_max=config.store_attempts_max,
        backoff_ns=config.store_backoff_ns,
        batch_objects_max=config.store_batch_objects_max,
    )


def _bytes_of(slots: Sequence[Slot | None]) -> int:
    return sum(slot.size for slot in slots if slot is not None)


class _Both:
    """Two observers of one L1."""

    def __init__(self, first: L1Observer, second: L1Observer) -> None:
        self._observers = (first, second)

    def published(self, key: ObjectKey, slot: Slot, temporary: bool) -> None:
        for observer in self._observers:
            observer.published(key, slot, temporary)

    def removed(self, key: ObjectKey) -> None:
        for observer in self._observers:
            observer.removed(key)


def _observe(l1: L1Cache, observer: L1Observer) -> None:
    """Storage is given a finished L1, so it joins whoever observes it already (an oracle, say)."""
    before = l1._observer
    l1._observer = observer if before is None else _Both(before, observer)

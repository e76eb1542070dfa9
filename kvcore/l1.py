"""L1: the cache in host memory. Written in private, published whole, read under leases.

Theory of operation
-------------------
An object is a `Slot` in one of the states of `SlotState`. The table `TRANSITIONS` is the whole life of a slot:

    (allocated)  -> STAGING    reserve_write(tag, key): visible to nobody; one per (tag, key), any tags per key
    STAGING      -> RESIDENT   PUBLISH: the first finish_write of a key; refused (BUSY) while a hold is open
    STAGING      -> FREE       DISCARD: the key was resident by then; the resident copy stays as it is
    STAGING      -> FREE       GIVE_UP: abort_write, or the write lease ran out
    RESIDENT     -> FREE       REMOVE: deleted, evicted, or temporary and its last reader has gone
    both of these with an I/O hold open go to DRAINING instead, and
    DRAINING     -> FREE       QUIET: the last hold has ended

The rules that every method keeps:

1. `_resident` maps a key to its one published slot; `_staging` maps a tag to its slots by key. A slot is in one of
   them, or in `_draining`, or free. Readers look only into `_resident`.
2. A slot is freed only if no hold is on it (asserted in the arena). Ending a lease never ends a hold.
3. A slot with a reader is never removed. A slot with a reader or a hold is never evicted; it is not in the eviction
   order, so a full cache of pinned objects refuses in O(1).
4. A temporary object without a reader is not resident. So the last reader removes it, publishing it for nobody drops
   it at once (nobody is told), and making an unread object temporary removes it.
5. A durable writer (temporary=False) that meets a temporary object makes it durable, at reserve and at publish, and the
   observer is told of it as of a new one. An object of another size is refused with MISMATCH and stays as it is.
6. `reserve_write` takes room in this order: free memory, then victims by bytes; a tenant over its quota pays with its
   own objects only. What finds no room answers NO_SPACE; the keys before it keep their slots.
7. Batches answer per key, in order. The second occurrence of a key in one reserve_write is BUSY.
8. Expired reservations and leases answer EXPIRED once (`LateMarks`) and then UNKNOWN.

Cost: one slot object per key, no tuple or closure per key; every hook (policy, lease table, arena) takes the batch.

Who holds, announces, frees
---------------------------
* staging slot: held by the writer's tag; announced by finish_write; freed by L1 on discard, abort or expiry.
* resident slot: held by the cache; each reader announces its end by finish_read (or its deadline does); freed by L1.
* draining slot: held by the copies on it; each holder announces by unhold, or its proven death does; freed by L1.

Rejected: states as classes (three more objects per key), a lock per object (all calls run on one thread to completion),
publishing in two steps (finish, then lease): between them the object could be evicted.

Nothing here knows the time or touches bytes. Misuse raises `CallerError` before anything has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.eviction import PolicyFactory
from kvcore.keys import ObjectKey
from kvcore.l1_arguments import check_owner, check_write
from kvcore.l1_audit import check_memory, check_protection, check_states
from kvcore.l1_room import Room
from kvcore.l1_staging import Staging
from kvcore.l1_states import TRANSITIONS, Event
from kvcore.l1_statistics import L1Counters, L1Statistics
from kvcore.leases import HoldTable, LeaseTable, Owner
from kvcore.memory import Arena, Slot, SlotState
from kvcore.quota import Quota

# Reading an enum member through its class costs 0.1 us, so the hot loops use these.
_STAGING, _RESIDENT, _DRAINING = SlotState.STAGING, SlotState.RESIDENT, SlotState.DRAINING
_RESERVED, _PUBLISHED, _DISCARDED = Answer.RESERVED, Answer.PUBLISHED, Answer.DISCARDED
_UNKNOWN, _BUSY, _NO_SPACE = Answer.UNKNOWN, Answer.BUSY, Answer.NO_SPACE
_DELETED, _LOCKED, _MISMATCH, _ABORTED = Answer.DELETED, Answer.LOCKED, Answer.MISMATCH, Answer.ABORTED


class L1Observer(Protocol):
    """Told synchronously what becomes visible and what goes. Must not call back into L1."""

    def published(self, key: ObjectKey, slot: Slot, temporary: bool) -> None:
        """`key` is resident now; or it was temporary and a writer has made it durable."""
        ...

    def removed(self, key: ObjectKey) -> None: ...


class L1Cache:
    """See the module text. Confined to one thread; every call runs to completion."""

    def __init__(
        self,
        arena: Arena,
        policy_factory: PolicyFactory,
        quota: Quota | None = None,
        observer: L1Observer | None = None,
    ) -> None:
        self._arena = arena
        self._room = Room(arena, policy_factory, quota, self._evicted)
        self._order = self._room.order
        self._observer = observer
        self._resident: dict[ObjectKey, Slot] = {}
        self._staging = Staging()
        self._draining: dict[Slot, None] = {}
        self._leases = LeaseTable()
        self._holds = HoldTable()
        self._counters = L1Counters()

    # Writing

    def reserve_write(
        self,
        tag: str,
        keys: Sequence[ObjectKey],
        sizes: int | Sequence[int],
        *,
        deadline_ns: int | None = None,
        temporary: bool = False,
    ) -> tuple[list[Answer], list[Slot | None]]:
        """Stage a buffer per key: RESERVED with its slot, or RESIDENT, MISMATCH, BUSY, NO_SPACE.

        RESIDENT protects nothing: the object may be evicted later in the same batch.
        `temporary` says what the writer will publish; a durable one makes temporary residents durable.
        """
        check_write(tag, keys, sizes)
        find = self._resident.get
        staged = self._staging.of(tag)
        wanted: dict[ObjectKey, int] = {}
        met: dict[ObjectKey, int] = {}
        place = wanted.setdefault
        answers = [_RESERVED] * len(keys)
        for at, key in enumerate(keys):
            if find(key) is not None:
                if met.setdefault(key, at) != at:
                    answers[at] = _BUSY
            elif key in staged or place(key, at) != at:
                answers[at] = _BUSY
        for key, at in met.items():
            size = sizes if isinstance(sizes, int) else sizes[at]
            answers[at] = self._meet(self._resident[key], size, temporary, Answer.RESIDENT)
        slots = self._stage(tag, wanted, sizes, deadline_ns)
        if len(slots) == len(keys) and None not in slots:
            return answers, slots
        granted: list[Slot | None] = [None] * len(keys)
        for at, slot in zip(wanted.values(), slots):
            granted[at] = slot
            if slot is None:
                answers[at] = _NO_SPACE
        return answers, granted

    def finish_write(self, tag: str, keys: Sequence[ObjectKey], *, temporary: bool = False) -> list[Answer]:
        """Publish: PUBLISHED, DISCARDED (the key was resident), MISMATCH, BUSY (a hold is open), EXPIRED, UNKNOWN."""
        return self._publish(tag, keys, (), temporary, None)

    def finish_write_and_reserve_read(
        self,
        tag: str,
        keys: Sequence[ObjectKey],
        owners: Sequence[Owner],
        *,
        temporary: bool = False,
        deadline_ns: int | None = None,
    ) -> list[Answer]:
        """As `finish_write`; each owner also gets a lease per PUBLISHED or DISCARDED key, on what is resident."""
        for owner in owners:
            check_owner(owner)
        return self._publish(tag, keys, owners, temporary, deadline_ns)

    def abort_write(self, tag: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        """Give staging up: ABORTED, EXPIRED or UNKNOWN. Never visible; under a hold the slot drains."""
        staged = self._staging.of(tag)
        answers: list[Answer] = []
        given_up: list[Slot] = []
        for key in keys:
            slot = staged.pop(key, None)
            if slot is None:
                answers.append(self._staging.answer_missing(tag, key))
                continue
            given_up.append(slot)
            answers.append(_ABORTED)
        self._staging.end(tag, given_up)
        self._leave(given_up, Event.GIVE_UP)
        return answers

    # Reading

    def reserve_read(self, owner: Owner, keys: Sequence[ObjectKey], *, deadline_ns: int | None = None) -> list[Answer]:
        """One lease per resident key: RESERVED or UNKNOWN. Each must be given back, or runs out at the deadline."""
        check_owner(owner)
        resident = self._resident
        slots = [slot for slot in map(resident.get, keys) if slot is not None]
        if not slots:
            return [_UNKNOWN] * len(keys)
        self._lease(owner, slots, deadline_ns)
        if len(slots) == len(keys):
            return [_RESERVED] * len(keys)
        return [_RESERVED if key in resident else _UNKNOWN for key in keys]

    def finish_read(self, owner: Owner, keys: Sequence[ObjectKey]) -> list[Answer]:
        """Give one lease per key back: RELEASED, EXPIRED (once per expired lease) or UNKNOWN."""
        answers, idle = self._leases.release(owner, keys, self._resident.get)
        self._unread(idle)
        return answers

    def release_owner(self, owner: Owner) -> int:
        """Give back all leases of `owner`; how many there were."""
        count, idle = self._leases.release_owner(owner)
        self._unread(idle)
        return count

    # I/O holds

    def hold_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        """Begin to copy out, under a live lease of `owner` (else None). Holds last until `unhold`."""
        slots: list[Slot | None] = []
        for slot in map(self._resident.get, keys):
            slots.append(slot if slot is not None and self._leases.holds(owner, slot) else None)
        self._holds.take(holder, [slot for slot in slots if slot is not None])
        return slots

    def hold_write(self, holder: str, tag: str, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        """Begin to copy into staging of `tag` (None: there is none). Nothing is published until `unhold`."""
        slots = [*map(self._staging.of(tag).get, keys)]
        self._holds.take(holder, [slot for slot in slots if slot is not None])
        return slots

    def unhold(self, holder: str, slots: Sequence[Slot | None]) -> list[Answer]:
        """The copies on these slots have ended: RELEASED, or UNKNOWN for a hold that `holder` does not have."""
        answers: list[Answer] = []
        quiet: list[Slot] = []
        for slot in slots:
            if slot is None or not self._holds.end(holder, slot):
                answers.append(_UNKNOWN)
                continue
            answers.append(Answer.RELEASED)
            if not slot.holds:
                quiet.append(slot)
        self._quiet(quiet)
        return answers

    def release_holder(self, holder: str) -> int:
        """`holder` is proven dead: its copies have ended. How many holds that were."""
        count, quiet = self._holds.release_holder(holder)
        self._quiet(quiet)
        return count

    # Keeping and removing

    def set_temporary(self, keys: Sequence[ObjectKey], temporary: bool) -> list[Answer]:
        """RESIDENT (changed, still here), DELETED (made temporary with no reader left) or UNKNOWN."""
        answers: list[Answer] = []
        for key in keys:
            slot = self._resident.get(key)
            if slot is None:
                answers.append(_UNKNOWN)
                continue
            slot.temporary = temporary
            if temporary and not slot.readers:
                self._order.remove((slot,))
                self._remove([slot])
                answers.append(_DELETED)
            else:
                answers.append(Answer.RESIDENT)
        return answers

    def renew(self, keys: Sequence[ObjectKey]) -> None:
        """A request that used these objects has ended. Those that are resident and idle go, in this order, last."""
        slots = [slot for slot in map(self._resident.get, keys) if slot is not None]
        self._order.renew([slot for slot in slots if not slot.readers and not slot.holds])

    def delete(self, keys: Sequence[ObjectKey]) -> list[Answer]:
        """DELETED, LOCKED (a lease protects it) or UNKNOWN. Under a hold alone the object goes and its slot drains."""
        resident = self._resident
        find = resident.get
        answers: list[Answer] = []
        answer = answers.append
        gone: list[Slot] = []
        for key in keys:
            slot = find(key)
            if slot is None:
                answer(_UNKNOWN)
            elif slot.readers:
                answer(_LOCKED)
            else:
                del resident[key]  # here, so that a second occurrence of the key is UNKNOWN
                gone.append(slot)
                answer(_DELETED)
        self._order.remove(gone)
        self._gone(gone)
        return answers

    def clear(self) -> int:
        """Delete every resident object without a lease; how many."""
        keys = [key for key, slot in self._resident.items() if not slot.readers]
        self.delete(keys)
        return len(keys)

    def evict(self, bytes_wanted: int) -> int:
        """Evict unprotected objects in the order of the policy until `bytes_wanted` are freed; bytes freed."""
        if bytes_wanted < 0:
            raise CallerError(f"cannot evict {bytes_wanted} bytes")
        return self._room.evict(bytes_wanted)

    def expire(self, now_ns: int) -> int:
        """End leases and reservations whose deadline has come; how many."""
        count, idle = self._leases.expire(now_ns)
        self._unread(idle)
        for slots in self._staging.expire(now_ns):
            self._leave(slots, Event.GIVE_UP)
            self._counters.expired_writes += len(slots)
            count += len(slots)
        return count

    # Looking

    def slot_of(self, key: ObjectKey) -> Slot | None:
        return self._resident.get(key)

    def contains(self, key: ObjectKey) -> bool:
        return key in self._resident

    def resident_keys(self) -> Iterator[ObjectKey]:
        """In the order of publishing. Not to be used across a change."""
        return iter(self._resident)

    def staging_keys(self, tag: str) -> list[ObjectKey]:
        return list(self._staging.of(tag))

    def view(self, slot: Slot) -> memoryview:
        return self._arena.view(slot)

    def statistics(self) -> L1Statistics:
        return L1Statistics(
            bytes_capacity=self._arena.capacity_bytes,
            bytes_used=self._room.bytes_used,
            bytes_free=self._arena.bytes_free,
            bytes_staging=self._staging.bytes,
            quarantined_bytes=sum(s.extent for s in self._holds.slots_named() if s.state is _DRAINING),
            largest_free=self._arena.largest_free,
            objects_resident=len(self._resident),
            objects_staging=len(self._staging),
            objects_draining=len(self._draining),
            leases=self._leases.count,
            holds=self._holds.count,
            expired_leases=self._leases.expired,
            **self._counters.shown(),
        )

    def check(self) -> None:
        """Assert every invariant by a full walk. For tests and oracles."""
        slots = [*self._resident.values(), *self._staging.slots(), *self._draining]
        check_states(self._resident, self._staging, [*self._draining], self._room)
        check_memory(slots, self._room, self.statistics())
        check_protection(slots, self._leases, self._holds)

    def __repr__(self) -> str:
        return f"L1Cache({self.statistics()})"

    # Inside: writing

    def _stage(
        self, tag: str, wanted: dict[ObjectKey, int], sizes: int | Sequence[int], deadline_ns: int | None
    ) -> list[Slot | None]:
        """A slot (or None) for each wanted key, filed under the tag."""
        if not wanted:
            return []
        granted = self._room.obtain(wanted, sizes)
        assert len(granted) == len(wanted)
        if None in granted:
            filed = {key: slot for key, slot in zip(wanted, granted) if slot is not None}
            self._counters.no_space += len(granted) - len(filed)
        else:
            filed = dict(zip(wanted, granted))  # type: ignore[arg-type]
        if filed:
            self._staging.file(tag, filed, deadline_ns)
        return granted

    def _meet(self, slot: Slot, size: int, temporary: bool, answer: Answer) -> Answer:
        """A writer has met a resident object: `answer`, or MISMATCH if the object has another size."""
        assert slot.state is _RESIDENT
        if slot.size != size:
            self._counters.mismatches += 1
            return _MISMATCH
        if slot.temporary and not temporary:
            slot.temporary = False
            if self._observer is not None:
                self._observer.published(slot.key, slot, False)
        return answer

    def _publish(
        self, tag: str, keys: Sequence[ObjectKey], owners: Sequence[Owner], temporary: bool, deadline_ns: int | None
    ) -> list[Answer]:
        staged = self._staging.of(tag)
        find = staged.get
        settle = self._resident.setdefault
        after = TRANSITIONS[_STAGING, Event.PUBLISH, False]
        answers: list[Answer] = []
        published: list[Slot] = []
        lost: list[Slot] = []
        for key in keys:
            slot = find(key)
            if slot is None:
                answers.append(self._staging.answer_missing(tag, key))
            elif slot.holds:
                answers.append(_BUSY)
            else:
                assert slot.state is _STAGING
                del staged[key]
                if settle(key, slot) is slot:
                    slot.state = after
                    slot.temporary = temporary
                    published.append(slot)
                    answers.append(_PUBLISHED)
                else:
                    lost.append(slot)
                    answers.append(self._meet(self._resident[key], slot.size, temporary, _DISCARDED))
        self._staging.end(tag, published)
        self._counters.bytes_resident += sum([slot.extent for slot in published])
        self._counters.published += len(published)
        self._show(published, owners, temporary, deadline_ns)
        if lost:
            self._lose(tag, lost, owners, deadline_ns)
        return answers

    def _show(self, published: list[Slot], owners: Sequence[Owner], temporary: bool, deadline_ns: int | None) -> None:
        """Give what was just published its readers or its place in the eviction order, and tell the observer."""
        for owner in owners:
            self._leases.take(owner, published, deadline_ns)
        if not owners:
            if temporary:
                for slot in published:
                    del self._resident[slot.key]
                self._forget(published)  # nobody waits for it, so nobody is told of it
                return
            self._order.add(published[::-1])  # see `kvcore.eviction`: the beginning of a chain goes last
        if self._observer is not None:
            for slot in published:
                self._observer.published(slot.key, slot, temporary)

    def _lose(self, tag: str, lost: list[Slot], owners: Sequence[Owner], deadline_ns: int | None) -> None:
        """Drop the buffers of writers who came second; their owners read the resident objects of the same size."""
        winners = [winner for slot in lost if (winner := self._resident[slot.key]).size == slot.size]
        for owner in owners:
            self._lease(owner, winners, deadline_ns)
        self._staging.end(tag, lost)
        self._counters.discarded += len(lost)
        self._leave(lost, Event.DISCARD)

    # Inside: protection

    def _lease(self, owner: Owner, slots: list[Slot], deadline_ns: int | None) -> None:
        fresh = self._leases.take(owner, slots, deadline_ns)
        self._order.pin([slot for slot in fresh if not slot.holds])

    def _unread(self, idle: list[Slot]) -> None:
        """The last lease on each of these has ended."""
        temporary = [slot for slot in idle if slot.temporary]
        if temporary:
            self._order.remove(temporary)
            self._remove(temporary)
        self._order.add([slot for slot in reversed(idle) if not slot.temporary and not slot.holds])

    def _quiet(self, slots: list[Slot]) -> None:
        """The last hold on each of these has ended."""
        drained = [slot for slot in slots if slot.state is _DRAINING]
        for slot in drained:
            del self._draining[slot]
            self._counters.bytes_draining -= slot.extent
        self._leave(drained, Event.QUIET)
        self._order.add([slot for slot in reversed(slots) if slot.state is _RESIDENT and not slot.readers])

    # Inside: leaving

    def _evicted(self, slots: list[Slot]) -> None:
        """The eviction order has given these up."""
        self._counters.evictions += len(slots)
        self._remove(slots)

    def _remove(self, slots: list[Slot]) -> None:
        """Take resident objects, already out of the eviction order, away."""
        resident = self._resident
        for slot in slots:
            del resident[slot.key]
        self._gone(slots)

    def _gone(self, slots: list[Slot]) -> None:
        """These are not in `_resident` any more: free or drain their memory and tell the observer."""
        self._forget(slots)
        if self._observer is not None:
            for slot in slots:
                self._observer.removed(slot.key)

    def _forget(self, slots: list[Slot]) -> None:
        self._counters.bytes_resident -= sum([slot.extent for slot in slots])
        self._leave(slots, Event.REMOVE)

    def _leave(self, slots: list[Slot], event: Event) -> None:
        """Apply an event that ends the object in each slot: its memory is free, or drains under a hold."""
        if not slots:
            return
        state = slots[0].state
        assert TRANSITIONS[state, event, False] is SlotState.FREE
        free: list[Slot] = []
        for slot in slots:
            assert slot.state is state
            if slot.holds:
                slot.state = TRANSITIONS[state, event, True]
                self._draining[slot] = None
                self._counters.bytes_draining += slot.extent
            else:
                free.append(slot)
        self._room.give_back(free)

"""`WatchedL1`: the production L1 with a judge at every call.

It keeps its own, simpler book of staging and leases from the calls and their answers alone, and says so when an answer
cannot be right: something published that was aborted or had expired, a lease released that was never taken or a second
time, an object shown to readers that nobody published, a copy into or out of memory that its owner has no right to,
bytes that are not the key's. Memory is judged by `check()` and against the slots that were handed out, at rest, and by
the sums of its parts after every call that can change them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.answers import Answer
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l1_statistics import L1Statistics
from kvcore.leases import Owner
from kvcore.memory import Slot, SlotState
from kvcore.ports import Tracer
from kvcore.quota import Quota
from kvcore.sim.marks.l1 import L1Marks
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.quota import over_quota
from kvcore.sim.oracles.truth import Truth

_DONE_WRITING = (Answer.PUBLISHED, Answer.DISCARDED, Answer.MISMATCH)


class LoadBook(dict[ObjectKey, str]):
    """Which adapter is loading a key. `failed`: keys whose last load has failed, and where; none may be published."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: dict[ObjectKey, str] = {}


class WatchedL1(L1Cache):
    """Takes L1Cache's arguments after `name`, `truth`, `findings` and `tracer`."""

    def __init__(self, name: str, truth: Truth, findings: Findings, tracer: Tracer, *args: Any, **more: Any) -> None:
        self._quota: Quota | None = args[2] if len(args) > 2 else more.get("quota")
        super().__init__(*args, **more)
        self._marks = L1Marks(findings.sometimes)
        if self._observer is None:
            self._observer = self._marks
        self.loads = LoadBook()
        self._handed_out: dict[Slot, None] = {}  # every slot since the last rest
        self._published = self._evictions = self._expired = 0  # by our own count
        self._reserving: tuple[Sequence[ObjectKey], int | Sequence[int]] | None = None  # the call that makes room
        self.bytes_from_stores = 0  # published or discarded under tags of the prefetch
        self._name = name
        self._truth = truth
        self._findings = findings
        self._tracer = tracer
        self._staged: dict[tuple[str, ObjectKey], int | None] = {}  # -> deadline
        self._taken: dict[Owner, dict[ObjectKey, list[int | None]]] = {}  # -> deadline of each lease
        self._sessions: dict[str, dict[Owner, None]] = {}
        self._lapsed: dict[str, Owner] = {}  # session -> the last of its owners whose leases have run out
        self.ever_published: dict[ObjectKey, None] = {}

    # ---- writing

    def reserve_write(
        self, tag: str, keys: Sequence[ObjectKey], sizes: int | Sequence[int], **more: Any
    ) -> tuple[list[Answer], list[Slot | None]]:
        evictions = self._counters.evictions
        self._reserving = (keys, sizes)
        answers, slots = super().reserve_write(tag, keys, sizes, **more)
        self._reserving = None
        if not more.get("temporary"):
            self._check_durable(tag, keys, answers)
        for key, answer, slot in zip(keys, answers, slots):
            if answer is Answer.RESERVED:
                if (tag, key) in self._staged:
                    self._report("visibility", f"{tag} staged a key twice")
                self._staged[tag, key] = more.get("deadline_ns")
                assert slot is not None
                self._handed_out[slot] = None
        self._check_quota()
        self._mark_reserved(answers, slots, sizes, self._counters.evictions - evictions)
        self._check_sums("reserve_write")
        self._note("l1.reserve", tag, answers)
        return answers, slots

    def _check_durable(self, tag: str, keys: Sequence[ObjectKey], answers: Sequence[Answer]) -> None:
        """What a lasting writer has met stays as if it had written it."""
        for key, answer in zip(keys, answers):
            slot = self.slot_of(key) if answer is Answer.RESIDENT else None
            if slot is not None and slot.temporary:
                self._report("lost", f"{tag} was told that its object is there, and it goes with its readers")

    def _evicted(self, slots: list[Slot]) -> None:
        self._evictions += len(slots)
        self._check_unread("evicted", [slot.key for slot in slots])
        if self._reserving is not None:
            self._check_eviction(slots, *self._reserving)
        super()._evicted(slots)

    def _check_eviction(self, slots: list[Slot], keys: Sequence[ObjectKey], sizes: int | Sequence[int]) -> None:
        """No more than was asked for; and while there is room, only of the tenant that has reached its limit."""
        wanted = [sizes] * len(keys) if isinstance(sizes, int) else sizes
        extents = [self._arena.extent(size) for size in wanted]
        if sum(slot.extent for slot in slots[:-1]) >= sum(extents):
            self._report("lost", f"{len(slots)} objects were evicted for {len(keys)} of {sum(wanted)} bytes")
        tenants = {key.cache_salt for key in keys}
        if self._arena.largest_free >= max(extents) and len(tenants) == 1:
            others = [slot for slot in slots if slot.key.cache_salt not in tenants]
            if others:
                self._report("lost", f"{len(others)} objects of other tenants were evicted although there was room")

    def _check_unread(self, what: str, keys: Iterable[ObjectKey]) -> None:
        read = {key for taken in self._taken.values() for key in taken}
        for key in keys:
            if key in read:
                self._report("leases", f"an object was {what} that has a reader")

    def _mark_reserved(
        self, answers: Sequence[Answer], slots: Sequence[Slot | None], sizes: int | Sequence[int], evicted: int
    ) -> None:
        self._marks.reserved(answers, slots)
        if evicted:
            self._marks.evicted(next(iter(self._resident.values()), None))
        if Answer.NO_SPACE in answers:
            size = sizes if isinstance(sizes, int) else sizes[answers.index(Answer.NO_SPACE)]
            self._marks.refused(evicted, size, self._arena.largest_free, self._arena.bytes_free)

    def hold_write(self, holder: str, tag: str, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        slots = super().hold_write(holder, tag, keys)
        for key, slot in zip(keys, slots):
            if slot is not None and (slot.state is not SlotState.STAGING or (tag, key) not in self._staged):
                self._report("visibility", f"{holder} was given {slot} to write, which {tag} does not stage")
        return slots

    def finish_write(self, tag: str, keys: Sequence[ObjectKey], **more: Any) -> list[Answer]:
        answers = super().finish_write(tag, keys, **more)
        self._finished(tag, keys, answers)
        self._marks.finished(answers, leased=False)
        return answers

    def finish_write_and_reserve_read(
        self, tag: str, keys: Sequence[ObjectKey], owners: Sequence[Owner], **more: Any
    ) -> list[Answer]:
        answers = super().finish_write_and_reserve_read(tag, keys, owners, **more)
        self._finished(tag, keys, answers)
        for owner in owners:
            read = [key for key, answer in zip(keys, answers) if answer in (Answer.PUBLISHED, Answer.DISCARDED)]
            self._take(owner, read, more.get("deadline_ns"))
        self._marks.finished(answers, leased=bool(owners))
        return answers

    def _finished(self, tag: str, keys: Sequence[ObjectKey], answers: Sequence[Answer]) -> None:
        loaded = tag.startswith("prefetch")
        self._check_sums("finish_write")
        for key, answer in zip(keys, answers):
            if loaded and answer is Answer.PUBLISHED and key in self.loads.failed:
                self._report("visibility", f"{tag} published a key whose load from {self.loads.failed[key]} had failed")
            self._published += answer is Answer.PUBLISHED
            if answer in _DONE_WRITING and self._staged.pop((tag, key), self) is self:
                self._report("visibility", f"{tag}: {answer.value} although it was aborted, expired or never reserved")
            slot = self.slot_of(key)
            if loaded and slot is not None and answer in (Answer.PUBLISHED, Answer.DISCARDED):
                self.bytes_from_stores += slot.size
            if answer is not Answer.PUBLISHED or slot is None:
                continue
            right = self._truth.check(key, self.view(slot), f"published in {self._name} by {tag}")
            self.ever_published[key] = None
            if not loaded:
                self._findings.stores_verified += right
        self._note("l1.finish", tag, answers)

    def abort_write(self, tag: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        answers = super().abort_write(tag, keys)
        for key, answer in zip(keys, answers):
            if answer is Answer.ABORTED and self._staged.pop((tag, key), self) is self:
                self._report("visibility", f"{tag} aborted what it had not staged")
        self._marks.aborted(answers)
        self._check_sums("abort_write")
        self._note("l1.abort", tag, answers)
        return answers

    # ---- reading

    def reserve_read(self, owner: Owner, keys: Sequence[ObjectKey], **more: Any) -> list[Answer]:
        answers = super().reserve_read(owner, keys, **more)
        read = [key for key, answer in zip(keys, answers) if answer is Answer.RESERVED]
        self._take(owner, read, more.get("deadline_ns"))
        self._marks.read(answers, bool(read) and self._resident[read[0]].readers > 1)
        self._note("l1.read", owner.session, answers)
        return answers

    def hold_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        slots = super().hold_read(holder, owner, keys)
        taken = self._taken.get(owner, {})
        for key, slot in zip(keys, slots):
            if slot is not None and (slot.state is not SlotState.RESIDENT or key not in taken):
                self._report("visibility", f"{holder} was given {slot} to read, on which {owner} has no lease")
        return slots

    def unhold(self, holder: str, slots: Sequence[Slot | None]) -> list[Answer]:
        drained = [slot for slot in slots if slot is not None and slot.state is SlotState.DRAINING]
        answers = super().unhold(holder, slots)
        self._marks.unheld(drained)
        self._check_sums("unhold")
        return answers

    def _take(self, owner: Owner, keys: Iterable[ObjectKey], deadline_ns: int | None) -> None:
        if self._lapsed and self._lapsed.get(owner.session, owner) != owner:
            del self._lapsed[owner.session]
        taken = self._taken.get(owner)
        if taken is None:
            taken = self._taken[owner] = {}
            self._sessions.setdefault(owner.session, {})[owner] = None
        for key in keys:
            if key not in self.ever_published:
                self._report("visibility", f"{owner} reads a key that was never published")
            taken.setdefault(key, []).append(deadline_ns)
        self._forget_empty(owner)

    def _forget_empty(self, owner: Owner) -> None:
        if not self._taken.get(owner, True):
            del self._taken[owner]
            owners = self._sessions[owner.session]
            del owners[owner]
            if not owners:
                del self._sessions[owner.session]

    def finish_read(self, owner: Owner, keys: Sequence[ObjectKey]) -> list[Answer]:
        answers = super().finish_read(owner, keys)
        gone = 0
        for key, answer in zip(keys, answers):
            if answer is Answer.RELEASED:
                self._give_back(owner, key)
                gone += key not in self._resident
        self._marks.unread(answers, gone)
        self._check_sums("finish_read")
        self._note("l1.unread", owner.session, answers)
        return answers

    def _give_back(self, owner: Owner, key: ObjectKey) -> None:
        taken = self._taken.get(owner, {})
        if key not in taken:
            self._report("leases", f"{owner} released a lease it did not hold")
            return
        taken[key].pop()
        if not taken[key]:
            del taken[key]
        self._forget_empty(owner)

    def release_owner(self, owner: Owner) -> int:
        count = super().release_owner(owner)
        taken = self._taken.get(owner, {})
        recorded = sum(map(len, taken.values()))
        taken.clear()
        self._forget_empty(owner)
        if count != recorded:
            self._report("leases", f"{owner} gave back {count} leases at once, it had taken {recorded}")
        self._tracer.event("l1.release", self._name, owner.session, owner.generation, count)
        return count

    def expire(self, now_ns: int) -> int:
        if self._holds.count:
            self._mark_expiring(now_ns)
        count = super().expire(now_ns)
        self._check_sums("expire")
        self._staged = {held: end for held, end in self._staged.items() if end is None or end > now_ns}
        for owner, taken in list(self._taken.items()):
            for key, deadlines in list(taken.items()):
                taken[key] = [end for end in deadlines if end is None or end > now_ns]
                self._expired += len(deadlines) - len(taken[key])
                if len(taken[key]) < len(deadlines):
                    self._lapsed[owner.session] = owner
                if not taken[key]:
                    del taken[key]
            self._forget_empty(owner)
        return count

    def _mark_expiring(self, now_ns: int) -> None:
        for taken in self._taken.values():
            for key, deadlines in taken.items():
                if any(end is not None and end <= now_ns for end in deadlines):
                    self._marks.lease_expired(self.slot_of(key))

    def delete(self, keys: Sequence[ObjectKey]) -> list[Answer]:
        answers = super().delete(keys)
        self._check_unread("deleted", [key for key, answer in zip(keys, answers) if answer is Answer.DELETED])
        self._check_sums("delete")
        return answers

    # ---- at rest

    def protected(self, session: str) -> list[ObjectKey]:
        """Resident keys under a lease of this session, by our own book."""
        owners = self._sessions.get(session, ())
        return [key for owner in owners for key in self._taken[owner] if self.contains(key)]

    def lapsed(self, session: str) -> bool:
        """Leases have run out that this session's latest lookup had taken."""
        return session in self._lapsed

    def check_at_rest(self) -> None:
        """Nothing leased, held, staged or draining; memory adds up; every resident object holds its own bytes."""
        state = self.statistics()
        left = {name: getattr(state, name) for name in ("leases", "holds", "bytes_staging", "bytes_draining")}
        for name, value in left.items():
            if value:
                self._report("leases" if name in ("leases", "holds") else "memory", f"at rest, {name} is {value}")
        if self._taken or self._staged:
            self._report(
                "leases", f"at rest, {len(self._taken)} owners' leases and {len(self._staged)} staged keys are open"
            )
        self._check_memory(state)
        try:
            self.check()
        except AssertionError as error:
            self._report("memory", f"the arena's own check failed: {error}")
        for key in self.resident_keys():
            slot = self.slot_of(key)
            assert slot is not None
            self._truth.check(key, self.view(slot), f"resident in {self._name}")

    def _check_memory(self, state: L1Statistics) -> None:
        """What L1 says of its bytes, against the slots it has handed out and not freed since."""
        if state.bytes_used + state.bytes_free != state.bytes_capacity:
            self._report("memory", f"used {state.bytes_used} + free {state.bytes_free} != {state.bytes_capacity}")
        self._handed_out = {slot: None for slot in self._handed_out if slot.state is not SlotState.FREE}
        out = sum(slot.extent for slot in self._handed_out)
        if state.bytes_used != out:
            self._report("memory", f"used {state.bytes_used}, but the slots handed out and not freed have {out}")
        for name, seen in (
            ("published", self._published),
            ("evictions", self._evictions),
            ("expired_leases", self._expired),
        ):
            if getattr(state, name) != seen:
                self._report("counters", f"{name} is {getattr(state, name)}, seen were {seen}")
        self._check_quota()

    def _check_quota(self) -> None:
        """No tenant has more than its share."""
        slots = (slot for slot in self._handed_out if slot.state is not SlotState.FREE)
        for text in over_quota(self._quota, ((slot.key.cache_salt, slot.extent) for slot in slots)):
            self._report("quota", text)

    # ---- helpers

    def _check_sums(self, call: str) -> None:
        """used = resident + staging + draining, after every call."""
        parts = self._counters.bytes_resident + self._staging.bytes + self._counters.bytes_draining
        used = self._room.bytes_used
        if used != parts:
            self._report("memory", f"after {call}, used {used} is not resident + staging + draining, {parts}")

    def _report(self, oracle: str, text: str) -> None:
        self._findings.report(oracle, f"L1 {self._name}: {text}")

    def _note(self, label: str, who: str, answers: Sequence[Answer]) -> None:
        self._tracer.event(label, self._name, who, *[answer.value for answer in answers])

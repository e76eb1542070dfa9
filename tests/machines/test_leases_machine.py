"""Leases and holds against a model of two plain lists.

The model of leases: a list of (owner, object, deadline). A release takes the owner's entry that ends first, an expiry
takes all that are due and leaves a mark each, and nothing an owner does touches an entry of somebody else. The model of
holds: a list of (holder, object). An object may be born again under its key (a new slot) once nobody leases it; the
marks on the key stay, the leases do not move over.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore import leases
from kvcore.answers import Answer
from kvcore.leases import HEAP_SWEEP_MIN, Deadlines, HoldTable, LateMarks, LeaseBatch, LeaseTable, Owner
from kvcore.memory import Slot

NEVER = 1 << 60
KEYS = range(4)
OWNERS = st.sampled_from((Owner("s", 1, "r"), Owner("s", 2, "r"), Owner("s", 1, "w"), Owner("t", 1, "r")))
BATCH = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5)
DEADLINE = st.none() | st.integers(1, 5)
HOLDERS = st.sampled_from(("", "w1", "w2"))

Lease = tuple[Owner, Slot, int]


class LeasesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.table = LeaseTable()
        self.holding = HoldTable()
        self.slots = {key: Slot(0, 1, 64, key + 1, key) for key in KEYS}
        self.leased: list[Lease] = []
        self.marks: Counter[tuple[Owner, int]] = Counter()
        self.held: list[tuple[str, Slot]] = []
        self.live_most = 0

    def readers(self, slot: Slot) -> int:
        return sum(each is slot for _, each, _ in self.leased)

    def idle_after(self, ended: list[Lease]) -> set[Slot]:
        """Which slots lost their last reader when these leases ended."""
        self.leased = [lease for lease in self.leased if not any(lease is each for each in ended)]
        return {slot for _, slot, _ in ended if not self.readers(slot)}

    # Leases

    @rule(owner=OWNERS, keys=BATCH, deadline=DEADLINE)
    def take(self, owner: Owner, keys: list[int], deadline: int | None) -> None:
        slots = [self.slots[key] for key in keys]
        fresh = {slot for slot in slots if not self.readers(slot)}
        when = None if deadline is None else self.now + deadline
        got = self.table.take(owner, slots, when)
        assert len(got) == len(set(got))
        assert set(got) == fresh
        self.leased += [(owner, slot, NEVER if when is None else when) for slot in slots]

    @rule(owner=OWNERS, keys=BATCH)
    def release(self, owner: Owner, keys: list[int]) -> None:
        expected: list[Answer] = []
        idle: set[Slot] = set()
        for key in keys:
            own = [lease for lease in self.leased if lease[0] == owner and lease[1] is self.slots[key]]
            if own:
                idle |= self.idle_after([min(own, key=lambda lease: lease[2])])
                expected.append(Answer.RELEASED)
            else:
                expected.append(self.late(owner, key))
        answers, got = self.table.release(owner, keys, self.slots.get)
        assert answers == expected
        assert sorted(map(id, got)) == sorted(map(id, idle)), "each slot is idle once"

    def late(self, owner: Owner, key: int) -> Answer:
        if not self.marks[owner, key]:
            return Answer.UNKNOWN
        self.marks[owner, key] -= 1
        return Answer.EXPIRED

    @rule(owner=OWNERS)
    def release_owner(self, owner: Owner) -> None:
        ended = [lease for lease in self.leased if lease[0] == owner]
        idle = self.idle_after(ended)
        for key in KEYS:
            self.marks[owner, key] = 0
        count, got = self.table.release_owner(owner)
        assert (count, set(got)) == (len(ended), idle)

    @rule(step=st.integers(1, 5))
    def time_passes(self, step: int) -> None:
        self.now += step
        ended = [lease for lease in self.leased if lease[2] <= self.now]
        idle = self.idle_after(ended)
        self.marks.update((owner, slot.key) for owner, slot, _ in ended)
        count, got = self.table.expire(self.now)
        assert (count, set(got)) == (len(ended), idle)
        assert len(got) == len(idle)

    @rule(owner=OWNERS, key=st.sampled_from(KEYS), rounds=st.integers(1, 100))
    def a_busy_reader(self, owner: Owner, key: int, rounds: int) -> None:
        """Many short leases: the heap of deadlines must not grow with them."""
        for _ in range(rounds):
            self.take(owner, [key], 5)
            self.release(owner, [key])

    @precondition(lambda self: any(not self.readers(slot) for slot in self.slots.values()))
    @rule(data=st.data())
    def an_object_is_born_again(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key in KEYS if not self.readers(self.slots[key])]))
        self.slots[key] = Slot(0, 1, 64, self.slots[key].generation + 10, key)

    # Holds

    @rule(holder=HOLDERS, keys=BATCH)
    def hold(self, holder: str, keys: list[int]) -> None:
        slots = [self.slots[key] for key in keys]
        self.holding.take(holder, slots)
        self.held += [(holder, slot) for slot in slots]

    @rule(holder=HOLDERS, key=st.sampled_from(KEYS))
    def unhold(self, holder: str, key: int) -> None:
        slot = self.slots[key]
        there = (holder, slot) in self.held
        assert self.holding.end(holder, slot) is there
        if there:
            self.held.remove((holder, slot))

    @rule(holder=HOLDERS)
    def a_holder_dies(self, holder: str) -> None:
        ended = [slot for name, slot in self.held if name == holder]
        self.held = [each for each in self.held if each[0] != holder]
        quiet = {slot for slot in ended if not any(each is slot for _, each in self.held)}
        count, got = self.holding.release_holder(holder)
        assert (count, set(got), len(got)) == (len(ended), quiet, len(quiet))

    # What must hold

    @invariant()
    def model_and_tables_agree(self) -> None:
        assert self.table.count == len(self.leased)
        assert self.holding.count == len(self.held)
        assert self.table.check() == Counter(slot for _, slot, _ in self.leased)
        assert self.holding.check() == Counter(slot for _, slot in self.held)
        for slot in self.slots.values():
            assert slot.readers == self.readers(slot)
            assert slot.holds == sum(each is slot for _, each in self.held)
        assert set(self.holding.slots_named()) == {slot for name, slot in self.held if name}

    @invariant()
    def an_owner_holds_what_it_took(self) -> None:
        own = {(owner, slot) for owner, slot, _ in self.leased}
        for owner in (Owner("s", 1, "r"), Owner("s", 2, "r"), Owner("s", 1, "w"), Owner("t", 1, "r")):
            for slot in self.slots.values():
                assert self.table.holds(owner, slot) is ((owner, slot) in own)

    @invariant()
    def the_heap_is_bounded_by_the_live_leases(self) -> None:
        self.live_most = max(self.live_most, len(self.leased))
        assert len(self.table._deadlines) <= max(HEAP_SWEEP_MIN, 2 * (self.live_most + 1))

    def teardown(self) -> None:
        for owner in dict.fromkeys(owner for owner, _, _ in self.leased):
            self.table.release_owner(owner)
        for holder in ("", "w1", "w2"):
            self.holding.release_holder(holder)
        assert (self.table.count, self.holding.count) == (0, 0)
        assert not self.table.check()
        assert not self.holding.check()


TestLeases = LeasesMachine.TestCase
TestLeases.settings = settings(max_examples=settings.default.max_examples, stateful_step_count=50, deadline=None)


def test_the_marks_of_owners_that_never_come_back_are_bounded() -> None:
    """The owner that was marked longest ago is forgotten first; it is then answered UNKNOWN, which is as harmless."""
    marks = LateMarks(marks_max=4)
    for owner in range(10):
        marks.add(owner, "k")
        marks.add(owner, "k")
        assert len(marks) <= 4
    assert [owner for owner in range(10) if marks.take(owner, "k")] == [8, 9]


# --- planted bugs


def test_a_release_under_another_generation_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LeaseTable.release

    def release(self: LeaseTable, owner: Owner, keys, find):
        own = next((each for each in self._held if each.session == owner.session), owner)
        return original(self, own, keys, find)

    monkeypatch.setattr(LeaseTable, "release", release)
    assert finds(LeasesMachine)


def test_an_expiry_that_ends_a_released_lease_again_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R26 b's kind: the second release of one lease takes the next reader's."""

    def unfile(held, slot, batch: LeaseBatch) -> bool:
        grant = held.pop(slot, None)
        if isinstance(grant, list):
            grant.pop()
            if grant:
                held[slot] = grant
        batch.live = 0
        return grant is not None

    monkeypatch.setattr(leases, "_unfile", unfile)
    assert finds(LeasesMachine)


def test_a_release_that_takes_the_longest_lease_first_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_ends_last_first", lambda batch: batch.deadline_ns)
    assert finds(LeasesMachine)


def test_a_heap_that_is_never_swept_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Deadlines.add

    def add(self: Deadlines, batch: LeaseBatch) -> None:
        self._sweep_at = 1 << 60
        original(self, batch)

    monkeypatch.setattr(Deadlines, "add", add)
    assert finds(LeasesMachine)


def test_a_death_that_ends_the_holds_of_all_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    original = HoldTable.release_holder

    def release_holder(self: HoldTable, holder: str):
        results = [original(self, each) for each in [holder, *[name for name in self._held if name > holder]]]
        return sum(count for count, _ in results), [slot for _, slots in results for slot in slots]

    monkeypatch.setattr(HoldTable, "release_holder", release_holder)
    assert finds(LeasesMachine)

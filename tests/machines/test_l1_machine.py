"""L1 against a small model: writers, readers, holds, expiry, temporary objects, quotas and evictions in any order.

The model keeps plain lists and knows nothing of slots, batches or policies. It predicts every answer, except which of
two legal outcomes a full cache gives: there it checks that a refusal was justified and every victim was legal.
Every object's bytes are filled with a number of its own, so memory handed out twice shows at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore.answers import Answer
from kvcore.eviction import LruPolicy, S3FifoPolicy
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l1_states import TRANSITIONS
from kvcore.leases import LeaseTable, Owner
from kvcore.memory import PlainArena, Slot, SlotState
from kvcore.quota import Quota

CAPACITY = 640
SALTS = ("", "tenant")
TAGS = st.sampled_from(("w1", "w2"))
HOLDERS = st.sampled_from(("", "worker-1"))
OWNERS = st.sampled_from((Owner("s1", 1, "r"), Owner("s1", 2, "r")))
KEYS = [ObjectKey(bytes([n]) * 32, "m", 0, 0, SALTS[n % 2]) for n in range(5)]
BATCH = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
AIM = st.sampled_from((True, True, True, False))  # mostly at keys for which the call means something
DEADLINE = st.none() | st.integers(1, 4)
WALKS = 30
RARE = ("discarded", "mismatches", "evictions", "expired_leases", "expired_writes", "no_space")
LEGAL_MOVES = {(before, after) for (before, _, _), after in TRANSITIONS.items()}


def size_of(key: ObjectKey) -> int:
    return 50 + 64 * (KEYS.index(key) % 3)


def extent(size: int) -> int:
    return -(-size // 64) * 64


@dataclass(eq=False)
class Thing:
    """An object of the model, whatever its state."""

    key: ObjectKey
    size: int
    slot: Slot
    deadline: int | None = None
    temporary: bool = False
    holds: Counter[str] = field(default_factory=Counter)
    fill: int = 0

    @property
    def held(self) -> bool:
        return bool(self.holds.total())


class Observer:
    def __init__(self) -> None:
        self.removed_keys: list[ObjectKey] = []
        self.visible: dict[ObjectKey, bool] = {}

    def published(self, key: ObjectKey, slot: Slot, temporary: bool) -> None:
        assert slot.state is SlotState.RESIDENT
        assert key not in self.visible or (self.visible[key] and not temporary)
        self.visible[key] = temporary

    def removed(self, key: ObjectKey) -> None:
        del self.visible[key]
        self.removed_keys.append(key)


class L1Machine(RuleBasedStateMachine):
    @initialize(lru=st.booleans(), limit=st.none() | st.integers(128, 320))
    def start(self, lru: bool, limit: int | None) -> None:
        self.now = 0
        self.lru = lru
        self.limit = limit
        self.observer = Observer()
        quota = None if limit is None else Quota({"tenant": limit})
        self.l1 = L1Cache(PlainArena(CAPACITY), LruPolicy if lru else S3FifoPolicy, quota, self.observer)
        self.staging: dict[tuple[str, ObjectKey], Thing] = {}
        self.resident: dict[ObjectKey, Thing] = {}
        self.draining: list[Thing] = []
        self.leases: list[tuple[Owner, Thing, int | None]] = []
        self.late_reads: Counter[tuple[Owner, ObjectKey]] = Counter()
        self.late_writes: Counter[tuple[str, ObjectKey]] = Counter()
        self.order: list[list[Thing]] = []  # unprotected objects, oldest group first
        self.states: dict[Slot, SlotState] = {}
        self.fills = 0
        self.generation = 0
        self.quarantines = 0

    # The model

    def aim(self, aimed: bool, keys: list[ObjectKey], targets: list[ObjectKey]) -> list[ObjectKey]:
        """Bend drawn keys to those in `targets`."""
        return [targets[KEYS.index(key) % len(targets)] for key in keys] if aimed and targets else keys

    def staged_by(self, tag: str) -> list[ObjectKey]:
        return [key for by, key in self.staging if by == tag]

    def leased_by(self, owner: Owner) -> list[ObjectKey]:
        late = [key for (who, key), count in self.late_reads.items() if who == owner and count]
        return late + [thing.key for who, thing, _ in self.leases if who == owner]

    def readers(self, thing: Thing) -> int:
        return sum(leased is thing for _, leased, _ in self.leases)

    def unprotected(self, salt: str | None = None) -> list[Thing]:
        found = [t for t in self.resident.values() if not t.held and not self.readers(t)]
        return [t for t in found if salt is None or t.key.cache_salt == salt]

    def used_by(self, salt: str) -> int:
        things = [*self.staging.values(), *self.resident.values(), *self.draining]
        return sum(extent(t.size) for t in things if t.key.cache_salt == salt)

    def unlist(self, thing: Thing) -> None:
        self.order = [left for group in self.order if (left := [t for t in group if t is not thing])]

    def drop(self, thing: Thing) -> None:
        """The object is gone from its index; its memory drains while it is held."""
        self.unlist(thing)
        if thing.held:
            self.draining.append(thing)

    def drop_resident(self, thing: Thing) -> None:
        del self.resident[thing.key]
        self.drop(thing)

    def unread(self, things: list[Thing]) -> None:
        """Leases on these have ended."""
        group = []
        for thing in dict.fromkeys(things):
            if self.readers(thing):
                continue
            if thing.temporary:
                self.drop_resident(thing)
            elif not thing.held:
                group.append(thing)
        self.order.append(group)

    def lease(self, owner: Owner, thing: Thing, deadline: int | None) -> None:
        self.unlist(thing)
        self.leases.append((owner, thing, deadline))

    def late(self, marks: Counter, who: object, key: ObjectKey) -> Answer:
        if not marks[who, key]:
            return Answer.UNKNOWN
        marks[who, key] -= 1
        return Answer.EXPIRED

    def met(self, key: ObjectKey, size: int, temporary: bool, answer: Answer) -> Answer:
        thing = self.resident[key]
        if thing.size != size:
            return Answer.MISMATCH
        thing.temporary = thing.temporary and temporary
        return answer

    def adopt_victims(self) -> list[Thing]:
        """What L1 has evicted: each must have been unprotected, and the oldest under LRU."""
        victims = [self.resident[key] for key in self.observer.removed_keys]
        for victim in victims:
            assert victim in self.unprotected()
            if self.lru:
                self.order = [group for group in self.order if group]
                salt = victim.key.cache_salt
                own = next(group for group in self.order if any(t.key.cache_salt == salt for t in group))
                legal = self.order[0] if self.limit is None else [*self.order[0], *own]
                assert victim in legal, "not the oldest"
            self.drop_resident(victim)
        return victims

    # Writing

    @rule(tag=TAGS, keys=BATCH, odd=st.booleans(), deadline=DEADLINE, temporary=st.booleans())
    def reserve_write(self, tag, keys, odd, deadline, temporary) -> None:
        sizes = [size_of(key) + (64 if odd and i == 0 else 0) for i, key in enumerate(keys)]
        before_free = self.l1.statistics().largest_free
        expected: list[Answer | None] = []
        wanted = []
        for i, key in enumerate(keys):
            if key in keys[:i] or (key not in self.resident and (tag, key) in self.staging):
                expected.append(Answer.BUSY)
            elif key in self.resident:
                expected.append(self.met(key, sizes[i], temporary, Answer.RESIDENT))
            else:
                expected.append(None)
                wanted.append(i)
        when = None if deadline is None else self.now + deadline
        answers, slots = self.l1.reserve_write(tag, keys, sizes, deadline_ns=when, temporary=temporary)
        victims = self.adopt_victims()
        if self.limit is None and sum(extent(sizes[i]) for i in wanted) <= before_free:
            assert not victims, "evicted although there was room"
        for i, key in enumerate(keys):
            if i not in wanted:
                assert (answers[i], slots[i]) == (expected[i], None)
            elif answers[i] is Answer.RESERVED:
                self.stage(tag, key, sizes[i], slots[i], when)
        for i in wanted:
            if answers[i] is not Answer.RESERVED:
                assert (answers[i], slots[i]) == (Answer.NO_SPACE, None)
                self.check_refusal(keys[i].cache_salt, extent(sizes[i]))
        if self.limit is not None:
            assert self.used_by("tenant") <= self.limit

    def stage(self, tag: str, key: ObjectKey, size: int, slot: Slot | None, deadline: int | None) -> None:
        assert slot is not None
        self.fills = self.fills % 250 + 1
        self.l1.view(slot)[:] = bytes([self.fills]) * size
        self.staging[tag, key] = Thing(key, size, slot, deadline, fill=self.fills)
        self.late_writes[tag, key] = 0
        assert slot.generation > self.generation, "a generation was handed out twice"
        self.generation = slot.generation

    def check_refusal(self, salt: str, wanted: int) -> None:
        over = self.limit is not None and salt == "tenant" and self.used_by(salt) + wanted > self.limit
        if over and (not self.unprotected(salt) or wanted > self.limit):
            return
        assert self.l1.statistics().largest_free < wanted
        assert not self.unprotected()

    @rule(tag=TAGS, keys=BATCH, temporary=st.booleans(), aim=AIM)
    def finish_write(self, tag, keys, temporary, aim=False) -> None:
        keys = self.aim(aim, keys, self.staged_by(tag))
        expected = self.publish(tag, keys, [], temporary, None)
        assert self.l1.finish_write(tag, keys, temporary=temporary) == expected

    @rule(
        tag=TAGS,
        keys=BATCH,
        owners=st.lists(OWNERS, min_size=1, max_size=3),
        temporary=st.booleans(),
        deadline=DEADLINE,
        aim=AIM,
    )
    def finish_write_and_reserve_read(self, tag, keys, owners, temporary, deadline, aim=False) -> None:
        keys = self.aim(aim, keys, self.staged_by(tag))
        when = None if deadline is None else self.now + deadline
        expected = self.publish(tag, keys, owners, temporary, when)
        got = self.l1.finish_write_and_reserve_read(tag, keys, owners, temporary=temporary, deadline_ns=when)
        assert got == expected

    def publish(self, tag, keys, owners, temporary, when) -> list[Answer]:
        answers = []
        groups: list[list[Thing]] = []
        for key in keys:
            thing = self.staging.get((tag, key))
            if thing is None:
                answers.append(self.late(self.late_writes, tag, key))
                continue
            if thing.held:
                answers.append(Answer.BUSY)
                continue
            del self.staging[tag, key]
            if key in self.resident:
                answers.append(self.met(key, thing.size, temporary, Answer.DISCARDED))
            else:
                self.resident[key] = thing
                thing.temporary = temporary
                answers.append(Answer.PUBLISHED)
                if not owners and temporary:
                    self.drop_resident(thing)
                elif not owners:
                    groups.append([thing])
            if answers[-1] is not Answer.MISMATCH:
                for owner in owners:
                    self.lease(owner, self.resident[key], when)
        self.order += reversed(groups)  # the first of a batch, the beginning of a prefix, goes last
        return answers

    @rule(tag=TAGS, keys=BATCH, owner=st.none() | OWNERS, deadline=DEADLINE)
    def write(self, tag, keys, owner, deadline) -> None:
        """Reserve and publish without a pause: the common case, which fills the cache."""
        self.reserve_write(tag, keys, False, deadline, owner is not None)
        self.observer.removed_keys.clear()
        if owner is None:
            self.finish_write(tag, keys, False)
        else:
            self.finish_write_and_reserve_read(tag, keys, [owner, owner], True, deadline)

    @rule(keys=st.permutations(KEYS))
    def write_everything(self, keys) -> None:
        self.reserve_write("all", keys, False, None, False)
        self.observer.removed_keys.clear()
        self.finish_write("all", keys, False)

    @rule(tag=TAGS, holder=HOLDERS, keys=BATCH)
    def begin_a_copy(self, tag, holder, keys) -> None:
        self.reserve_write(tag, keys, False, 2, True)
        self.hold_write(holder, tag, keys)

    @rule(owner=OWNERS, holder=HOLDERS, keys=BATCH, deadline=DEADLINE)
    def read(self, owner, holder, keys, deadline) -> None:
        """A lease and a copy under it."""
        self.reserve_read(owner, keys, deadline)
        self.hold_read(holder, owner, keys)

    @rule(tag=TAGS, keys=BATCH, aim=AIM)
    def abort_write(self, tag, keys, aim) -> None:
        keys = self.aim(aim, keys, self.staged_by(tag))
        expected = []
        for key in keys:
            thing = self.staging.pop((tag, key), None)
            if thing is None:
                expected.append(self.late(self.late_writes, tag, key))
            else:
                self.drop(thing)
                expected.append(Answer.ABORTED)
        assert self.l1.abort_write(tag, keys) == expected

    # Reading

    @rule(owner=OWNERS, keys=BATCH, deadline=DEADLINE, aim=AIM)
    def reserve_read(self, owner, keys, deadline, aim=True) -> None:
        keys = self.aim(aim, keys, list(self.resident))
        when = None if deadline is None else self.now + deadline
        for key in keys:
            if key in self.resident:
                self.lease(owner, self.resident[key], when)
        expected = [Answer.RESERVED if key in self.resident else Answer.UNKNOWN for key in keys]
        assert self.l1.reserve_read(owner, keys, deadline_ns=when) == expected

    @rule(owner=OWNERS, keys=BATCH, aim=AIM)
    def finish_read(self, owner, keys, aim) -> None:
        keys = self.aim(aim, keys, self.leased_by(owner))
        expected = []
        ended: list[Thing] = []
        for key in keys:
            own = [lease for lease in self.leases if lease[0] == owner and lease[1].key == key]
            if not own:
                expected.append(self.late(self.late_reads, owner, key))
                continue
            first = min(own, key=lambda lease: 10**9 if lease[2] is None else lease[2])
            self.leases.remove(first)
            ended += [] if self.readers(first[1]) else [first[1]]
            expected.append(Answer.RELEASED)
        for thing in reversed(ended):
            self.unread([thing])
        assert self.l1.finish_read(owner, keys) == expected

    @rule(owner=OWNERS)
    def release_owner(self, owner) -> None:
        ended = [lease for lease in self.leases if lease[0] == owner]
        self.leases = [lease for lease in self.leases if lease[0] != owner]
        self.unread([thing for _, thing, _ in ended])
        for who, key in list(self.late_reads):
            if who == owner:
                self.late_reads[who, key] = 0
        assert self.l1.release_owner(owner) == len(ended)

    @rule(step=st.integers(1, 4))
    def expire(self, step) -> None:
        self.now += step
        ended = [lease for lease in self.leases if lease[2] is not None and lease[2] <= self.now]
        self.leases = [lease for lease in self.leases if lease not in ended]
        self.unread([thing for _, thing, _ in ended])
        self.late_reads.update((owner, thing.key) for owner, thing, _ in ended)
        due = [at for at, thing in self.staging.items() if thing.deadline is not None and thing.deadline <= self.now]
        for at in due:
            self.drop(self.staging.pop(at))
        self.late_writes.update(due)
        assert self.l1.expire(self.now) == len(ended) + len(due)

    # Holds

    @rule(holder=HOLDERS, owner=OWNERS, keys=BATCH, aim=AIM)
    def hold_read(self, holder, owner, keys, aim=True) -> None:
        keys = self.aim(aim, keys, self.leased_by(owner))
        slots = self.l1.hold_read(holder, owner, keys)
        for key, slot in zip(keys, slots, strict=True):
            thing = self.resident.get(key)
            leased = thing is not None and any(who == owner and of is thing for who, of, _ in self.leases)
            assert slot is (thing.slot if thing is not None and leased else None)
            if slot is not None:
                thing.holds[holder] += 1

    @rule(holder=HOLDERS, tag=TAGS, keys=BATCH, aim=AIM)
    def hold_write(self, holder, tag, keys, aim=False) -> None:
        keys = self.aim(aim, keys, self.staged_by(tag))
        slots = self.l1.hold_write(holder, tag, keys)
        for key, slot in zip(keys, slots, strict=True):
            thing = self.staging.get((tag, key))
            assert slot is (None if thing is None else thing.slot)
            if thing is not None:
                thing.holds[holder] += 1

    def held_by(self, holder: str) -> list[Thing]:
        things = [*self.staging.values(), *self.resident.values(), *self.draining]
        return [thing for thing in things if thing.holds[holder]]

    def quiet(self, things: list[Thing]) -> None:
        group = []
        for thing in things:
            if thing.held:
                continue
            if thing in self.draining:
                self.draining.remove(thing)
            elif self.resident.get(thing.key) is thing and not self.readers(thing):
                group.append(thing)
        self.order.append(group)

    @rule(holder=HOLDERS, picks=st.lists(st.integers(0, 30), min_size=1, max_size=3), aim=AIM)
    def unhold(self, holder, picks, aim) -> None:
        things = (self.held_by(holder) if aim else []) or self.all_things()
        chosen = [things[pick % len(things)] for pick in picks] if things else []
        expected = []
        ended = []
        for thing in chosen:
            expected.append(Answer.RELEASED if thing.holds[holder] else Answer.UNKNOWN)
            if thing.holds[holder]:
                thing.holds[holder] -= 1
                ended += [] if thing.held else [thing]
        for thing in reversed(ended):
            self.quiet([thing])
        assert self.l1.unhold(holder, [thing.slot for thing in chosen]) == expected

    @rule(holder=HOLDERS)
    def the_holder_dies(self, holder) -> None:
        held = self.held_by(holder)
        count = sum(thing.holds[holder] for thing in held)
        for thing in held:
            thing.holds[holder] = 0
        self.quiet(held)
        assert self.l1.release_holder(holder) == count

    # Keeping and removing

    @rule(keys=BATCH)
    def renew(self, keys) -> None:
        for thing in [self.resident[key] for key in keys if key in self.resident]:
            if not thing.held and not self.readers(thing):
                self.unlist(thing)
                self.order.append([thing])
        self.l1.renew(keys)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2), temporary=st.booleans())
    def set_temporary(self, keys, temporary) -> None:
        expected = []
        for key in keys:
            thing = self.resident.get(key)
            if thing is None:
                expected.append(Answer.UNKNOWN)
                continue
            thing.temporary = self.observer.visible[key] = temporary
            gone = temporary and not self.readers(thing)
            expected.append(Answer.DELETED if gone else Answer.RESIDENT)
            if gone:
                self.drop_resident(thing)
        assert self.l1.set_temporary(keys, temporary) == expected

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2))
    def delete(self, keys) -> None:
        expected = []
        for key in keys:
            thing = self.resident.get(key)
            if thing is None:
                expected.append(Answer.UNKNOWN)
            elif self.readers(thing):
                expected.append(Answer.LOCKED)
            else:
                self.drop_resident(thing)
                expected.append(Answer.DELETED)
        assert self.l1.delete(keys) == expected

    @rule(really=st.integers(0, 5))
    def clear(self, really) -> None:
        if really:
            return  # rare, so that states have time to grow
        unread = [thing for thing in self.resident.values() if not self.readers(thing)]
        for thing in unread:
            self.drop_resident(thing)
        assert self.l1.clear() == len(unread)

    @rule(wanted=st.integers(0, CAPACITY // 3))
    def evict(self, wanted) -> None:
        freed = self.l1.evict(wanted)
        victims = self.adopt_victims()
        assert freed == sum(extent(victim.size) for victim in victims)
        assert freed >= wanted or not self.unprotected()
        assert freed - wanted < (extent(victims[-1].size) if victims else 1), "evicted more than asked"

    # After every step

    @invariant()
    def model_and_cache_agree(self) -> None:
        self.l1.check()
        self.observer.removed_keys.clear()
        assert list(self.l1.resident_keys()) == list(self.resident)
        assert self.observer.visible.keys() == self.resident.keys()
        shown = self.l1.statistics()
        assert shown.leases == len(self.leases)
        assert shown.holds == sum(thing.holds.total() for thing in self.all_things())
        assert shown.bytes_draining == sum(extent(t.size) for t in self.draining)
        named = [t for t in self.draining if t.holds["worker-1"]]
        assert shown.quarantined_bytes == sum(extent(t.size) for t in named)
        self.quarantines += bool(named)

    def all_things(self) -> list[Thing]:
        return [*self.staging.values(), *self.resident.values(), *self.draining]

    @invariant()
    def every_object_keeps_its_bytes(self) -> None:
        for state, things in (
            (SlotState.STAGING, self.staging.values()),
            (SlotState.RESIDENT, self.resident.values()),
            (SlotState.DRAINING, self.draining),
        ):
            for thing in things:
                assert thing.slot.state is state
                assert self.l1.view(thing.slot) == bytes([thing.fill]) * thing.size
        for key, thing in self.resident.items():
            assert self.l1.slot_of(key) is thing.slot

    @invariant()
    def slots_move_as_the_table_says(self) -> None:
        for slot, before in self.states.items():
            assert slot.state is before or (before, slot.state) in LEGAL_MOVES, (before, slot.state)
        self.states.update((thing.slot, thing.slot.state) for thing in self.all_things())
        self.states = {slot: slot.state for slot in self.states}

    def teardown(self) -> None:
        """When everyone has given back what they have, nothing is left."""
        if not hasattr(self, "l1"):
            return
        for holder in ("", "worker-1"):
            self.l1.release_holder(holder)
        for owner in {lease[0]: None for lease in self.leases}:
            self.l1.release_owner(owner)
        for tag, key in list(self.staging):
            self.l1.abort_write(tag, [key])
        self.l1.clear()
        self.l1.check()
        shown = self.l1.statistics()
        assert shown.largest_free == shown.bytes_free == CAPACITY
        assert (shown.leases, shown.holds, shown.objects_resident) == (0, 0, 0)


TestL1Machine = L1Machine.TestCase
TestL1Machine.settings = settings(max_examples=settings.default.max_examples, stateful_step_count=40, deadline=None)


def walk(seed: int, steps: int) -> L1Machine:
    """Hypothesis explores short runs and shrinks them; a plain random walk keeps the cache full and goes deep."""
    draw = Random(seed)
    machine = L1Machine()
    machine.start(lru=draw.random() < 0.5, limit=draw.choice([None, None, 128, 320]))

    def keys() -> list[ObjectKey]:
        return draw.choices(KEYS, k=draw.randint(1, 3))

    def tag() -> str:
        return draw.choice(["w1", "w2"])

    def holder() -> str:
        return draw.choice(["", "worker-1"])

    def owner() -> Owner:
        return draw.choice([Owner("s1", 1, "r"), Owner("s1", 2, "r")])

    def deadline() -> int | None:
        return draw.choice([None, 1, 2, 4])

    def coin() -> bool:
        return draw.random() < 0.5

    moves = [
        (4, lambda: machine.reserve_write(tag(), keys(), draw.random() < 0.1, deadline(), coin())),
        (4, lambda: machine.finish_write(tag(), keys(), draw.random() < 0.1, aim=True)),
        (3, lambda: machine.finish_write_and_reserve_read(tag(), keys(), [owner()], coin(), deadline(), aim=True)),
        (2, lambda: machine.write_everything(draw.sample(KEYS, len(KEYS)))),
        (1, lambda: machine.abort_write(tag(), keys(), True)),
        (6, lambda: machine.reserve_read(owner(), keys(), deadline(), aim=True)),
        (6, lambda: machine.finish_read(owner(), keys(), True)),
        (1, lambda: machine.release_owner(owner())),
        (1, lambda: machine.renew(keys())),
        (2, lambda: machine.expire(draw.randint(1, 2))),
        (2, lambda: machine.hold_read(holder(), owner(), keys(), aim=True)),
        (1, lambda: machine.hold_write(holder(), tag(), keys(), aim=True)),
        (5, lambda: machine.unhold(holder(), [draw.randint(0, 30) for _ in range(2)], draw.random() < 0.8)),
        (1, lambda: machine.the_holder_dies(holder())),
        (1, lambda: machine.set_temporary(keys()[:1], coin())),
        (1, lambda: machine.delete(keys()[:1])),
        (1, lambda: machine.evict(draw.randint(0, 200))),
    ]
    weights = [weight for weight, _ in moves]
    for _ in range(steps):
        draw.choices(moves, weights)[0][1]()
        machine.model_and_cache_agree()
        machine.every_object_keeps_its_bytes()
        machine.slots_move_as_the_table_says()
    return machine


def test_long_random_walks_agree_with_the_model_and_reach_the_rare_states() -> None:
    seen: Counter[str] = Counter()
    for seed in range(WALKS):
        machine = walk(seed, 250)
        shown = machine.l1.statistics()
        for name in RARE:
            seen[name] += getattr(shown, name)
        seen["quarantines"] += machine.quarantines
        machine.teardown()
    assert all(seen[name] for name in (*RARE, "quarantines")), seen


# --- planted bugs


def test_a_second_writer_that_replaces_the_first_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R29: the loser of two writers overwrites what readers are reading."""
    original = L1Cache.finish_write

    def finish_write(self, tag, keys, **more):
        for key in keys:
            staged, resident = self._staging.of(tag).get(key), self.slot_of(key)
            if staged is not None and resident is not None and staged.size == resident.size:
                self.view(resident)[:] = self.view(staged)
        return original(self, tag, keys, **more)

    monkeypatch.setattr(L1Cache, "finish_write", finish_write)
    assert finds(L1Machine)


def test_an_expired_reservation_that_is_published_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: expiry looks like completion."""
    original = L1Cache.expire

    def expire(self, now_ns: int) -> int:
        due = [slot for slot in self._staging.slots() if slot.lease is not None and slot.lease.deadline_ns <= now_ns]
        for slot in due:
            self.finish_write(slot.lease.holder, [slot.key])
        return original(self, now_ns) + len(due)

    monkeypatch.setattr(L1Cache, "expire", expire)
    assert finds(L1Machine)


def test_memory_freed_under_a_copy_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R27: eviction and abort free what a reader or a writer still touches."""
    original = L1Cache._leave

    def leave(self, slots, event):
        holds = {slot: slot.holds for slot in slots}
        for slot in slots:
            slot.holds = 0
        original(self, slots, event)
        for slot, count in holds.items():
            slot.holds = count

    monkeypatch.setattr(L1Cache, "_leave", leave)
    assert finds(L1Machine)


def test_a_stale_release_that_takes_another_readers_lock_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R65, R26 b."""
    original = LeaseTable.release

    def release(self, owner, keys, find):
        other = next((each for each in self._held if each != owner), owner) if owner not in self._held else owner
        return original(self, other, keys, find)

    monkeypatch.setattr(LeaseTable, "release", release)
    assert finds(L1Machine)


def test_an_eviction_of_what_is_being_read_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R08: looked up, leased, and taken away for the next writer."""
    monkeypatch.setattr(L1Cache, "_lease", lambda self, owner, slots, when: self._leases.take(owner, slots, when))
    assert finds(L1Machine)

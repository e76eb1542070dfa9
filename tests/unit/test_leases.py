"""Leases belong to owners, holds belong to copies, and neither can be ended in somebody else's name."""

from __future__ import annotations

import pytest

from kvcore.answers import Answer
from kvcore.leases import HEAP_SWEEP_MIN, Deadlines, HoldTable, LateMarks, LeaseBatch, LeaseTable, Owner
from kvcore.memory import Slot, VirtualArena

ANN = Owner("ann", 1, "read")
BEN = Owner("ben", 1, "read")


@pytest.fixture
def slots() -> dict[str, Slot]:
    arena = VirtualArena(1 << 20)
    return dict(zip("abcdef", arena.allocate_batch(64, list("abcdef")), strict=True))


def test_a_lease_is_given_back_once_and_a_second_release_changes_nothing(slots: dict[str, Slot]) -> None:
    """R26 b: a double release is answered, and the count is unharmed."""
    table = LeaseTable()
    assert table.take(ANN, [slots["a"]], None) == [slots["a"]]
    assert table.release(ANN, ["a"], slots.get) == ([Answer.RELEASED], [slots["a"]])
    assert table.release(ANN, ["a"], slots.get) == ([Answer.UNKNOWN], [])
    assert (slots["a"].readers, table.count) == (0, 0)


@pytest.mark.parametrize("stranger", [BEN, Owner("ann", 2, "read"), Owner("ann", 1, "write-back")])
def test_a_stranger_cannot_take_another_readers_lease(slots: dict[str, Slot], stranger: Owner) -> None:
    """R65, R22: another session, generation or role under which nothing was taken releases nothing."""
    table = LeaseTable()
    table.take(ANN, [slots["a"]], None)
    table.take(stranger, [slots["b"]], None)
    assert table.release(stranger, ["a"], slots.get) == ([Answer.UNKNOWN], [])
    assert slots["a"].readers == 1
    assert table.holds(ANN, slots["a"])


def test_an_object_taken_twice_must_be_given_back_twice(slots: dict[str, Slot]) -> None:
    table = LeaseTable()
    table.take(ANN, [slots["a"], slots["a"]], None)
    assert table.release(ANN, ["a"], slots.get) == ([Answer.RELEASED], [])
    assert table.release(ANN, ["a"], slots.get) == ([Answer.RELEASED], [slots["a"]])


def test_releasing_an_owner_gives_back_all_and_only_what_it_holds(slots: dict[str, Slot]) -> None:
    table = LeaseTable()
    table.take(ANN, [slots["a"], slots["b"], slots["b"]], 10)
    table.take(BEN, [slots["b"]], None)
    assert table.release_owner(ANN) == (3, [slots["a"]])
    assert slots["b"].readers == 1
    assert table.expire(99) == (0, [])
    assert table.release_owner(ANN) == (0, [])
    assert table.check() == {slots["b"]: 1}


def test_an_expired_lease_answers_expired_once_and_then_unknown(slots: dict[str, Slot]) -> None:
    table = LeaseTable()
    table.take(ANN, [slots["a"]], 10)
    assert table.expire(9) == (0, [])
    assert table.expire(10) == (1, [slots["a"]])
    assert table.release(ANN, ["a"], slots.get)[0] == [Answer.EXPIRED]
    assert table.release(ANN, ["a"], slots.get)[0] == [Answer.UNKNOWN]
    assert table.expired == 1


def test_a_released_lease_does_not_expire_later_in_the_name_of_a_new_one(slots: dict[str, Slot]) -> None:
    table = LeaseTable()
    table.take(ANN, [slots["a"]], 10)
    table.release(ANN, ["a"], slots.get)
    table.take(ANN, [slots["a"]], 20)
    assert table.expire(15) == (0, [])
    assert slots["a"].readers == 1


def test_of_two_leases_on_one_object_the_one_that_ends_first_is_given_back_first(slots: dict[str, Slot]) -> None:
    table = LeaseTable()
    for deadline in (20, 10, None):
        table.take(ANN, [slots["a"]], deadline)
    assert table.release(ANN, ["a"], slots.get) == ([Answer.RELEASED], [])
    assert table.expire(15) == (0, []), "the lease until 10 was given back"
    assert table.expire(20) == (1, [])
    assert table.holds(ANN, slots["a"]), "the one without a deadline is left"


def test_ending_an_owner_forgets_that_its_leases_have_expired(slots: dict[str, Slot]) -> None:
    table = LeaseTable()
    table.take(ANN, [slots["a"]], 1)
    table.expire(1)
    table.release_owner(ANN)
    assert table.release(ANN, ["a"], slots.get)[0] == [Answer.UNKNOWN]


def test_late_marks_are_bounded_and_the_oldest_owner_is_forgotten_first() -> None:
    marks = LateMarks(marks_max=4)
    for who in ("ann", "ben", "cid"):
        marks.add(who, "a")
        marks.add(who, "b")
    assert len(marks) == 4
    assert not marks.take("ann", "a")
    assert marks.take("ben", "a")
    assert marks.take("cid", "b")
    assert len(marks) == 2


def test_the_deadline_heap_is_bounded_by_the_live_batches() -> None:
    deadlines = Deadlines()
    for serial in range(50 * HEAP_SWEEP_MIN):
        batch = LeaseBatch("w", 1000 + serial, ())
        batch.live = serial % 100 == 0
        deadlines.add(batch)
    assert len(deadlines) <= 2 * HEAP_SWEEP_MIN
    live = [batch.deadline_ns for batch in deadlines.due(10**9)]
    assert live == sorted(live)
    assert len(live) == HEAP_SWEEP_MIN // 2


def test_the_deadline_heap_is_bounded_after_a_crowd_has_gone_as_well() -> None:
    deadlines = Deadlines()
    crowd = [LeaseBatch("w", 1000, ()) for _ in range(20 * HEAP_SWEEP_MIN)]
    for batch in crowd:
        batch.live = 1
        deadlines.add(batch)
    for batch in crowd:
        batch.live = 0
    for _ in range(100 * HEAP_SWEEP_MIN):
        deadlines.add(LeaseBatch("w", 1000, ()))
    assert len(deadlines) <= HEAP_SWEEP_MIN


def test_keeping_the_deadline_heap_small_looks_at_each_batch_a_few_times() -> None:
    class Watched:
        """Alive for ever, and counts how often somebody asks."""

        deadline_ns = 1000
        looks = 0

        @property
        def live(self) -> int:
            Watched.looks += 1
            return 1

    deadlines = Deadlines()
    count = 20 * HEAP_SWEEP_MIN
    for _ in range(count):
        deadlines.add(Watched())  # type: ignore[arg-type]
    assert Watched.looks <= 2 * count
    assert len(deadlines) == count


def test_a_hold_ends_only_for_the_holder_that_has_it(slots: dict[str, Slot]) -> None:
    holds = HoldTable()
    holds.take("worker", [slots["a"], slots["a"]])
    assert not holds.end("", slots["a"])
    assert holds.end("worker", slots["a"])
    assert slots["a"].holds == 1
    assert holds.end("worker", slots["a"])
    assert not holds.end("worker", slots["a"])
    assert (slots["a"].holds, holds.count) == (0, 0)


def test_the_death_of_a_holder_ends_its_holds_and_no_others(slots: dict[str, Slot]) -> None:
    holds = HoldTable()
    holds.take("w1", [slots["a"], slots["b"], slots["b"]])
    holds.take("w2", [slots["b"]])
    assert holds.release_holder("w1") == (3, [slots["a"]])
    assert holds.check() == {slots["b"]: 1}
    assert holds.release_holder("w1") == (0, [])

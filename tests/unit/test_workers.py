"""`WorkerDesk`: which cells an answer speaks of, what stays open, and who may open more. Storage is a notebook here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.keys import ObjectKey
from kvcore.leases import Owner
from kvcore.memory import Slot
from kvcore.service.workers import WorkerDesk

SILENCE_NS = 100
OWNER = Owner("s", 1, "lookup")
OTHER = Owner("t", 2, "lookup")
KEYS = [ObjectKey(bytes([number]) * 4, "m", 0) for number in range(4)]
SIZES = [64] * len(KEYS)


class Notebook:
    """Grants every key but those in `refused`, and writes down what it is told, as positions in KEYS."""

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.told: list[tuple[str, list[int]]] = []
        self.slots = [Slot(number * 64, 64, 64, 5 + number, None) for number in range(len(KEYS))]

    def _note(self, what: str, keys: Sequence[ObjectKey]) -> list[int]:
        positions = [KEYS.index(key) for key in keys]
        if positions:
            self.told.append((what, positions))
        return positions

    def _grant(self, keys: Sequence[ObjectKey], what: str) -> list[Slot | None]:
        return [None if position in self.refused else self.slots[position] for position in self._note(what, keys)]

    def reserve_store(
        self, tag: str, holder: str, keys: Sequence[ObjectKey], sizes: Sequence[int], deadline_ns: int | None
    ) -> tuple[list[Answer], list[Slot | None]]:
        slots = self._grant(keys, "reserve")
        return [Answer.NO_SPACE if slot is None else Answer.RESERVED for slot in slots], slots

    def commit_store(self, tag: str, holder: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        return [Answer.PUBLISHED for _ in self._note("commit", keys)]

    def abort_store(self, tag: str, holder: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        return [Answer.ABORTED for _ in self._note("abort", keys)]

    def open_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        return self._grant(keys, "open")

    def close_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Answer]:
        return [Answer.RELEASED for _ in self._note("close", keys)]

    def give_up_holder(self, holder: str) -> int:
        self.told.append((f"give up {holder}", []))
        return 1

    def release_holder(self, holder: str) -> int:
        self.told.append((f"release {holder}", []))
        return 3


class Rig:
    def __init__(self, open_per_worker_max: int = 2, workers_max: int = 2) -> None:
        self.storage = Notebook()
        self.desk = WorkerDesk(
            self.storage,
            ranks=2,
            workers_max=workers_max,
            open_per_worker_max=open_per_worker_max,
            silence_ns=SILENCE_NS,
        )
        assert self.desk.register("w", 1, 0)

    def store(self, tag: str = "t") -> list[Answer]:
        reserved = self.desk.store("w", tag, KEYS, SIZES, 1000)
        assert reserved is not None
        return reserved[0]

    def read(self, ticket: int = 1, cells: Sequence[int] = (0, 1, 2, 3), owner: Owner = OWNER) -> list[int]:
        """The positions (in `cells`) that were granted."""
        slots = self.desk.retrieve("w", ticket, owner, [KEYS[cell] for cell in cells])
        assert slots is not None
        return [position for position, slot in enumerate(slots) if slot is not None]


@pytest.fixture
def rig() -> Rig:
    return Rig()


# --- stores


def test_a_grant_travels_as_offset_size_and_generation(rig: Rig) -> None:
    rig.storage.refused = {0}
    reserved = rig.desk.store("w", "t", KEYS, SIZES, 1000)
    assert reserved == (
        [Answer.NO_SPACE, Answer.RESERVED, Answer.RESERVED, Answer.RESERVED],
        [None, (64, 64, 6), (128, 64, 7), (192, 64, 8)],
    )


def test_commit_publishes_what_is_done_and_aborts_the_rest_of_what_was_granted(rig: Rig) -> None:
    rig.storage.refused = {1}
    rig.store()
    rig.storage.told.clear()
    assert rig.desk.commit("w", "t", 0b1011) == [
        Answer.PUBLISHED,
        Answer.UNKNOWN,
        Answer.ABORTED,
        Answer.PUBLISHED,
    ]
    assert rig.storage.told == [("commit", [0, 3]), ("abort", [2])]
    assert rig.desk.stores_open == 0
    assert rig.desk.commit("w", "t", 0b1011) is None


def test_abort_gives_up_what_was_granted_and_nothing_else(rig: Rig) -> None:
    rig.storage.refused = {0, 3}
    rig.store()
    rig.storage.told.clear()
    assert rig.desk.abort("w", "t") == [Answer.UNKNOWN, Answer.ABORTED, Answer.ABORTED, Answer.UNKNOWN]
    assert rig.storage.told == [("abort", [1, 2])]
    assert rig.desk.abort("w", "t") is None


def test_a_store_of_which_nothing_was_granted_is_not_open(rig: Rig) -> None:
    rig.storage.refused = {0, 1, 2, 3}
    assert rig.store() == [Answer.NO_SPACE] * 4
    assert rig.desk.stores_open == 0
    assert rig.desk.commit("w", "t", 0) is None


def test_a_tag_or_ticket_that_is_open_cannot_be_used_again(rig: Rig) -> None:
    rig.store()
    with pytest.raises(CallerError, match="tag 't' is open"):
        rig.store()
    rig.read(1)
    with pytest.raises(CallerError, match="ticket 1 is open"):
        rig.read(1)


def test_strangers_have_nothing_open(rig: Rig) -> None:
    assert rig.desk.commit("x", "t", 1) is None
    assert rig.desk.abort("x", "t") is None
    assert rig.desk.load_done("x", 1, 1) is None
    assert rig.desk.load_done("w", 1, 1) is None
    assert not rig.desk.knows("x")


def test_stores_and_reads_together_are_limited(rig: Rig) -> None:
    rig.store()
    rig.read(1)
    assert rig.desk.store("w", "u", KEYS, SIZES, 1000) is None
    assert rig.desk.retrieve("w", 2, OTHER, KEYS) is None
    rig.desk.abort("w", "t")
    assert rig.desk.retrieve("w", 2, OTHER, KEYS) is not None
    assert (rig.desk.stores_open, rig.desk.reads_open) == (0, 2)


# --- reads


def test_a_read_is_closed_cell_by_cell_and_ends_with_its_last(rig: Rig) -> None:
    assert rig.read() == [0, 1, 2, 3]
    rig.storage.told.clear()
    unknown, released = Answer.UNKNOWN, Answer.RELEASED
    assert rig.desk.load_done("w", 1, 0b0101) == [released, unknown, released, unknown]
    assert rig.storage.told == [("close", [0, 2])]
    assert rig.desk.load_done("w", 1, 0b0011) == [unknown, released, unknown, unknown], "0 was closed before"
    assert rig.desk.reads_open == 1
    assert rig.desk.load_done("w", 1, 0b11111111) == [unknown, unknown, unknown, released]
    assert rig.desk.reads_open == 0
    assert rig.desk.load_done("w", 1, 0b1000) is None


def test_bytes_whose_slot_was_given_away_during_the_copy_are_not_called_good(rig: Rig) -> None:
    rig.read()
    rig.storage.slots[2].generation += 1
    assert rig.desk.load_done("w", 1, 0b1111) == [Answer.RELEASED, Answer.RELEASED, Answer.EXPIRED, Answer.RELEASED]


def test_a_cell_named_twice_is_granted_once_where_it_was_named_first(rig: Rig) -> None:
    assert rig.read(cells=(2, 0, 2, 0, 1)) == [0, 1, 4]
    assert rig.storage.told == [("open", [2, 0, 1])]


def test_a_cell_is_free_for_another_ticket_when_its_copy_has_ended(rig: Rig) -> None:
    rig.read(1, (0, 1))
    rig.desk.load_done("w", 1, 0b01)
    assert rig.read(2, (0, 1)) == [0]
    rig.desk.load_done("w", 2, 0b01)
    rig.desk.load_done("w", 1, 0b10)
    assert rig.read(3, (0, 1)) == [0, 1]


def test_another_owner_reads_the_same_cell_by_itself(rig: Rig) -> None:
    rig.read(1)
    assert rig.read(2, owner=OTHER) == [0, 1, 2, 3]


def test_a_read_of_which_nothing_was_granted_is_not_open(rig: Rig) -> None:
    rig.storage.refused = {0, 1, 2, 3}
    assert rig.read() == []
    assert rig.desk.reads_open == 0
    rig.storage.refused = set()
    assert rig.read() == [0, 1, 2, 3]


# --- workers


def test_a_worker_has_one_of_the_layouts_ranks_and_keeps_it(rig: Rig) -> None:
    assert rig.desk.rank_of("w") == 1
    with pytest.raises(CallerError, match="rank 2 does not exist"):
        rig.desk.register("v", 2, 0)
    with pytest.raises(CallerError, match="is rank 1, not 0"):
        rig.desk.register("w", 0, 0)
    assert rig.desk.register("w", 1, 0)
    assert rig.desk.workers == ("w",)


def test_a_silent_worker_with_nothing_open_makes_room_for_another_and_a_busy_one_does_not() -> None:
    rig = Rig(workers_max=1)
    rig.desk.heard("w", 60)
    assert not rig.desk.register("v", 0, 60 + SILENCE_NS - 1)
    assert rig.desk.register("v", 0, 60 + SILENCE_NS)
    assert rig.desk.workers == ("v",)
    rig.desk.store("v", "t", KEYS, SIZES, 1000)
    assert not rig.desk.register("w", 0, 10 * SILENCE_NS)


def test_a_busy_worker_is_reaped_after_its_silence_and_not_one_moment_before(rig: Rig) -> None:
    assert rig.desk.next_reap_ns() is None
    rig.store()
    rig.desk.heard("w", 50)
    assert rig.desk.next_reap_ns() == 150
    assert rig.desk.reap(149) == 0
    assert rig.desk.reap(150) == 1
    assert rig.storage.told[-1] == ("give up worker:w", [])
    assert (rig.desk.reaped, rig.desk.reaped_open, rig.desk.workers) == (1, 1, ())
    assert not rig.desk.knows("w")
    rig.desk.commit("w", "t", 0)
    assert rig.desk.reaped_open == 0, "its copies have ended: nothing is left of it"
    assert rig.desk.register("w", 1, 200)


def test_two_silent_workers_are_reaped_together(rig: Rig) -> None:
    rig.desk.register("v", 0, 10)
    rig.store()
    rig.desk.store("v", "t", KEYS, SIZES, 1000)
    assert rig.desk.reap(500) == 2
    assert rig.desk.reaped == 2
    assert rig.desk.reap(500) == 0


def test_a_worker_that_leaves_gives_up_everything(rig: Rig) -> None:
    rig.store()
    rig.read()
    rig.desk.load_done("w", 1, 0b0001)
    rig.storage.told.clear()
    rig.desk.leave("w")
    assert rig.storage.told == [("abort", [0, 1, 2, 3]), ("close", [1, 2, 3])]
    assert (rig.desk.workers, rig.desk.stores_open, rig.desk.reads_open) == ((), 0, 0)
    rig.desk.leave("w")
    assert rig.desk.next_reap_ns() is None


def test_a_death_ends_the_holds_and_the_name_for_good(rig: Rig) -> None:
    rig.store()
    assert rig.desk.died("w") == 3
    assert rig.storage.told[-1] == ("release worker:w", [])
    assert rig.desk.died("w") == 0
    with pytest.raises(CallerError, match="dead"):
        rig.desk.register("w", 1, 0)


def test_the_last_deaths_are_remembered_and_no_more(rig: Rig) -> None:
    for name in "abc":
        rig.desk.died(name)
    assert rig.desk.register("a", 0, 0), "of two that can be remembered it is the third last"
    for name in "bc":
        with pytest.raises(CallerError, match="dead"):
            rig.desk.register(name, 0, 0)


def test_a_silence_is_longer_than_nothing() -> None:
    for silence_ns in (0, -1):
        with pytest.raises(CallerError, match="silence_ns"):
            WorkerDesk(Notebook(), ranks=1, workers_max=1, open_per_worker_max=1, silence_ns=silence_ns)
    WorkerDesk(Notebook(), ranks=1, workers_max=1, open_per_worker_max=1, silence_ns=1)

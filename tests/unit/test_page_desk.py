"""`PageDesk`: what is published when, what a cancel still reaches, what is left of a worker that is gone.

Storage is a notebook; pieces run when the test says so, so that anything can happen before, between and after them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError, PeerError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ObjectKey
from kvcore.leases import Owner
from kvcore.memory import PlainArena, Slot
from kvcore.ports import Outcome
from kvcore.service import page_desk
from kvcore.service.page_desk import PageAccess, PageDesk
from kvcore.service.page_map import BadPagesError
from kvcore.service.page_shares import PageRegistry
from kvcore.service.protocol import Copied, unpack_bits
from kvcore.service.shapes import PageGroup, PageSegment

BLOCK = 64
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, 8, BLOCK),), ranks=1, chunk_tokens=16)
BLOCKS = 16
PAGES = PageSegment("pages", BLOCK * BLOCKS, (PageGroup(0, BLOCKS, BLOCK, BLOCK),))
OWNER = Owner("s", 1, "lookup")
KEYS = [ObjectKey(bytes([number]) * 4, "m", 0) for number in range(4)]
CELLS = [[1, 3], [5, 7], [9, 11], [13, 15]]  # no neighbours: a part per block
RESERVED, PUBLISHED, ABORTED, RELEASED = Answer.RESERVED, Answer.PUBLISHED, Answer.ABORTED, Answer.RELEASED


class Notebook:
    """A storage that grants every key but those in `refused`, and writes down what it is told."""

    def __init__(self) -> None:
        self.arena = PlainArena(1 << 16)
        self.refused: set[int] = set()
        self.told: list[tuple[str, list[int]]] = []
        self.published: dict[int, bytes] = {}
        self.slots = [self._slot(key) for key in KEYS]
        self.read_answer = RELEASED

    def _slot(self, key: ObjectKey) -> Slot:
        (slot,) = self.arena.allocate_batch(2 * BLOCK, [key])
        return slot

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
        return [Answer.NO_SPACE if slot is None else RESERVED for slot in slots], slots

    def commit_store(self, tag: str, holder: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        for position in self._note("commit", keys):
            self.published[position] = bytes(self.arena.view(self.slots[position]))
        return [PUBLISHED] * len(keys)

    def abort_store(self, tag: str, holder: str, keys: Sequence[ObjectKey]) -> list[Answer]:
        return [ABORTED for _ in self._note("abort", keys)]

    def open_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Slot | None]:
        return self._grant(keys, "open")

    def close_read(self, holder: str, owner: Owner, keys: Sequence[ObjectKey]) -> list[Answer]:
        return [self.read_answer for _ in self._note("close", keys)]

    def give_up_holder(self, holder: str) -> int:
        raise AssertionError("a copy of ours is not given up by silence")

    def release_holder(self, holder: str) -> int:
        raise AssertionError("a hold of ours ends with our copy")


class ByHand:
    """An executor whose pieces run when the test says so."""

    def __init__(self) -> None:
        self.pieces: deque[tuple[Callable[[], Any], Callable[[Outcome[Any]], None]]] = deque()

    def submit(self, work: Callable[[], Any], deliver: Callable[[Outcome[Any]], None], cost_bytes: int = 0) -> None:
        assert cost_bytes > 0
        self.pieces.append((work, deliver))

    def run(self, count: int = 1, error: BaseException | None = None) -> None:
        for _ in range(count):
            work, deliver = self.pieces.popleft()
            deliver(Outcome(None, error) if error is not None else Outcome(work(), None))

    def run_all(self) -> None:
        while self.pieces:
            self.run()

    def close(self) -> None:
        self.pieces.clear()


class Rig:
    def __init__(self, *, piece_bytes: int = 1, pieces_inflight: int = 2, open_max: int = 2) -> None:
        self.storage = Notebook()
        self.memory = bytearray(bytes(number for number in range(BLOCKS) for _ in range(BLOCK)))
        self.registry = PageRegistry()
        self.registry.share("pages", self.memory)
        self.executor = ByHand()
        self.closed = 0
        access = PageAccess(self._open, self.storage.arena.view, self.executor, piece_bytes, pieces_inflight)
        self.desk = PageDesk(self.storage, access, LAYOUT, open_max)
        self.desk.register("w", PAGES)

    def _open(self, name: str, size: int) -> Any:
        pages = self.registry.open(name, size)
        pages.close = self._close  # type: ignore[method-assign]
        return pages

    def _close(self) -> None:
        self.closed += 1

    def store(self, tag: str = "t", cells: Sequence[int] = (0, 1, 2, 3)) -> Copied:
        told = self.desk.store("w", tag, [KEYS[cell] for cell in cells], [CELLS[cell] for cell in cells], 1000)
        assert told is not None
        return told

    def load(self, tag: str = "t", cells: Sequence[int] = (0, 1), blocks: Sequence[Sequence[int]] = CELLS) -> Copied:
        told = self.desk.retrieve("w", tag, OWNER, [KEYS[cell] for cell in cells], blocks[: len(cells)])
        assert told is not None
        return told

    def running(self, tag: str = "t", cancel: int = 0) -> tuple[int, list[Answer]]:
        told = self.desk.copies("w", tag, cancel)
        assert told is not None
        return unpack_bits(told.running), told.answers

    def expected(self, cell: int) -> bytes:
        return bytes(block for block in CELLS[cell] for _ in range(BLOCK))


@pytest.fixture
def rig() -> Rig:
    return Rig()


# --- stores


def test_a_cell_is_published_when_its_last_block_has_been_read_and_not_before(rig: Rig) -> None:
    assert unpack_bits(rig.store().running) == 0b1111
    rig.executor.run()
    assert rig.storage.published == {}
    assert rig.running() == (0b1111, [RESERVED] * 4)
    rig.executor.run()
    assert rig.storage.published == {0: rig.expected(0)}
    assert rig.running() == (0b1110, [PUBLISHED, RESERVED, RESERVED, RESERVED])
    rig.executor.run_all()
    assert rig.running() == (0, [PUBLISHED] * 4)
    assert rig.storage.published == {cell: rig.expected(cell) for cell in range(4)}
    assert rig.desk.idle
    assert rig.desk.statistics().cells_stored == 4


def test_what_was_not_granted_is_not_copied(rig: Rig) -> None:
    rig.storage.refused = {0, 2}
    told = rig.store()
    assert (unpack_bits(told.running), told.answers) == (
        0b1010,
        [Answer.NO_SPACE, RESERVED, Answer.NO_SPACE, RESERVED],
    )
    rig.executor.run_all()
    assert sorted(rig.storage.published) == [1, 3]


def test_only_so_many_pieces_are_with_threads_and_a_piece_has_about_so_many_bytes() -> None:
    rig = Rig(piece_bytes=3 * BLOCK, pieces_inflight=2)
    rig.store()
    assert len(rig.executor.pieces) == 2
    rig.executor.run()
    assert sorted(rig.storage.published) == [0], "three blocks: a cell and a half"
    assert len(rig.executor.pieces) == 2
    rig.executor.run(2)
    assert sorted(rig.storage.published) == [0, 1, 2, 3]
    assert rig.desk.idle


def test_a_piece_that_is_not_full_takes_one_more_block() -> None:
    rig = Rig(piece_bytes=BLOCK + 1, pieces_inflight=100)
    rig.store()
    assert len(rig.executor.pieces) == len(CELLS), "two blocks each, and there are two per cell"


def test_what_waits_can_be_cancelled_and_what_has_begun_runs_to_its_end(rig: Rig) -> None:
    rig.store()  # two pieces are with threads: both blocks of cell 0
    running, answers = rig.running(cancel=0b0101)
    assert running == 0b1011, "cell 0 has begun, cell 2 has not"
    assert answers == [RESERVED, RESERVED, ABORTED, RESERVED]
    rig.executor.run_all()
    assert rig.running() == (0, [PUBLISHED, PUBLISHED, ABORTED, PUBLISHED])
    assert sorted(rig.storage.published) == [0, 1, 3]
    assert ("abort", [2]) in rig.storage.told
    assert rig.desk.statistics().cells_cancelled == 1


def test_a_cell_that_has_begun_with_its_first_block_cannot_be_cancelled_any_more() -> None:
    rig = Rig(pieces_inflight=1)
    rig.store()
    assert rig.running(cancel=0b0001)[0] & 1
    rig.executor.run_all()
    assert 0 in rig.storage.published


def test_bytes_that_could_not_be_read_are_not_published(rig: Rig) -> None:
    """The segment is shorter now: block 7, of cell 1, and all behind it are gone."""
    rig.desk._pages["w"].memory.read = lambda offset, into: offset < BLOCK * 7  # type: ignore[method-assign]
    rig.store()
    rig.executor.run_all()
    assert rig.running() == (0, [PUBLISHED, ABORTED, ABORTED, ABORTED])
    assert sorted(rig.storage.published) == [0]
    assert rig.desk.statistics().cells_failed == 3


def test_work_that_raises_fails_its_cells(rig: Rig) -> None:
    rig.store()
    rig.executor.run(error=MemoryError())
    rig.executor.run_all()
    assert rig.running()[1] == [ABORTED, PUBLISHED, PUBLISHED, PUBLISHED]


# --- reads


def test_a_read_fills_the_blocks_and_gives_lease_and_hold_back_when_it_has(rig: Rig) -> None:
    rig.storage.arena.view(rig.storage.slots[0])[:] = b"x" * BLOCK + b"y" * BLOCK
    assert unpack_bits(rig.load().running) == 0b11
    rig.executor.run()
    assert ("close", [0]) not in rig.storage.told
    rig.executor.run_all()
    assert rig.running() == (0, [RELEASED, RELEASED])
    assert rig.memory[BLOCK : 2 * BLOCK] + rig.memory[3 * BLOCK : 4 * BLOCK] == b"x" * BLOCK + b"y" * BLOCK
    assert rig.memory[2 * BLOCK : 3 * BLOCK] == bytes([2]) * BLOCK


def test_null_blocks_are_left_alone_and_a_cell_of_nothing_else_ends_at_once(rig: Rig) -> None:
    before = bytes(rig.memory[:BLOCK])
    told = rig.load(blocks=[[0, 0], [0, 7]])
    assert (unpack_bits(told.running), told.answers) == (0b10, [RELEASED, RESERVED])
    rig.executor.run_all()
    assert rig.running() == (0, [RELEASED, RELEASED])
    assert rig.memory[:BLOCK] == before


def test_a_read_whose_lease_ran_out_says_so(rig: Rig) -> None:
    rig.storage.read_answer = Answer.EXPIRED
    rig.load()
    rig.executor.run_all()
    assert rig.running() == (0, [Answer.EXPIRED, Answer.EXPIRED])


def test_blocks_that_would_be_written_twice_are_refused_before_anything_is_held(rig: Rig) -> None:
    with pytest.raises(BadPagesError):
        rig.load(blocks=[[1, 3], [3, 5]])
    with pytest.raises(CallerError):
        rig.load(cells=(0, 0))
    assert rig.storage.told == []


# --- workers


def test_of_a_worker_that_is_gone_nothing_is_begun_or_published_and_what_runs_ends_first(rig: Rig) -> None:
    rig.store()
    rig.executor.run()  # one block of cell 0; its other block and one of cell 1 are with threads
    rig.desk.gone("w")
    assert rig.storage.told[-1] == ("abort", [2, 3])
    assert rig.running()[0] == 0b0011
    assert rig.closed == 0, "a thread still reads"
    rig.executor.run_all()
    assert rig.storage.published == {}
    assert rig.running() == (0, [ABORTED] * 4)
    assert rig.closed == 1
    assert rig.desk.idle


def test_a_read_of_a_worker_that_is_gone_gives_back_what_it_held(rig: Rig) -> None:
    rig.load(cells=(0, 1, 2))
    rig.desk.gone("w")
    rig.executor.run_all()
    closed = [cell for what, cells in rig.storage.told if what == "close" for cell in cells]
    assert sorted(closed) == [0, 1, 2]
    assert rig.running() == (0, [ABORTED] * 3)


def test_pages_are_taken_once_per_worker_life(rig: Rig) -> None:
    rig.desk.register("w", PAGES)
    with pytest.raises(BadPagesError, match="other pages"):
        rig.desk.register("w", PageSegment("pages", BLOCK * BLOCKS, (PageGroup(0, BLOCKS - 1, BLOCK, BLOCK),)))
    with pytest.raises(BadPagesError, match="no pages are called"):
        rig.desk.register("v", PageSegment("elsewhere", PAGES.size, PAGES.groups))
    with pytest.raises(BadPagesError, match="no pages"):
        rig.desk.store("v", "t", KEYS[:1], CELLS[:1], 1000)


def test_pages_of_workers_that_nobody_knows_are_closed(rig: Rig) -> None:
    rig.desk.register("v", PAGES)
    rig.desk.keep(lambda name: name == "v")
    assert rig.closed == 1
    with pytest.raises(BadPagesError):
        rig.store()


def test_a_tag_is_used_once_and_only_so_many_are_open(rig: Rig) -> None:
    rig.store("a", [0])
    with pytest.raises(CallerError, match="used already"):
        rig.store("a", [1])
    rig.store("b", [1])
    assert rig.desk.store("w", "c", KEYS[2:3], CELLS[2:3], 1000) is None
    rig.executor.run_all()
    with pytest.raises(CallerError, match="used already"):
        rig.store("a", [1])
    rig.store("c", [2])


def test_answers_are_remembered_for_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_desk, "_ANSWERS_MAX", 3)
    for number in range(4):
        rig.store(f"t{number}", [number])
        rig.executor.run_all()
    assert rig.desk.copies("w", "t0", 0) is None
    assert rig.running("t1") == (0, [PUBLISHED])
    assert rig.desk.copies("v", "t1", 0) is None


def test_closing_begins_nothing_any_more_and_what_runs_still_ends(rig: Rig) -> None:
    rig.store()
    rig.desk.close()
    assert not rig.desk.idle
    rig.executor.run_all()
    assert rig.desk.idle
    assert rig.storage.published == {}
    assert rig.closed == 1


def test_a_segment_that_cannot_be_opened_is_the_peers_mistake() -> None:
    rig = Rig()
    for error in (PeerError("not ours"), CallerError("no name"), OSError("gone")):

        def refuse(name: str, size: int, error: Exception = error) -> Any:
            raise error

        access = PageAccess(refuse, rig.storage.arena.view, rig.executor)
        with pytest.raises(BadPagesError):
            PageDesk(rig.storage, access, LAYOUT, 2).register("w", PAGES)

"""The server's desk for copies that it makes itself, between L1 and the pages of its workers. Synchronous.

Theory of operation
-------------------
    cell    (none) --STORE_PAGES | RETRIEVE_PAGES--> queued --first part with a thread--> begun --last part--> ended
            queued --cancel, worker gone, close--> ended

1. A store reserves staging, a read takes the lease holder's I/O holds, both in the name of the *transfer*: a holder of
   its own, because the copy is ours. No silence and no death of the worker ends such a hold, the end of the copy does.
2. Cells are cut into *pieces* of about `piece_bytes`, which wait in one queue, first in, first out. At most
   `pieces_inflight` are with the executor; each is a list of (bytes of the segment, bytes of L1) and touches nothing
   else, so nothing is shared with a thread but those bytes.
3. A piece that comes back ends the cells of which it was the last. Only then is a store published, cell by cell, or a
   lease given back. A part that could not be copied (the segment has shrunk) fails its cell: aborted, or not RELEASED.
4. What has not begun can be cancelled, what has begun runs to its end; COPIED names what is still running, and a cell
   that is not named will never be touched again. That is what a worker's fence waits for.
5. A worker that is gone (left, or proven dead): its cells in the queue end, those that have begun end when their copy
   does, and none of them is published any more. Its segment is closed when no piece of it is with a thread.
6. How a transfer has ended is remembered for those who ask again, the last `_ANSWERS_MAX` cells of it; who asks later
   hears that there is no such tag, which also means that nothing is running.

Who holds: L1, for the transfer. Who announces: the piece that comes back, then COPIED. Who frees: `_end`, on one path.

Rejected: copying from a mapping of the segment (who truncates it would kill the server with SIGBUS); a lock between
cancel and begin (a piece is begun when it is submitted; there is nothing to race for); one piece per cell (a queue of
small cells would cost a thread switch each, a large one could not be shared by two threads).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from kvcore.answers import Answer
from kvcore.errors import CallerError, PeerError
from kvcore.groups import CacheLayout
from kvcore.keys import ObjectKey
from kvcore.leases import Owner
from kvcore.memory import Slot
from kvcore.ports import Executor, Outcome
from kvcore.service.page_map import BadPagesError, PageMap, Part, check_apart
from kvcore.service.protocol import Copied, pack_bits
from kvcore.service.shapes import PageSegment
from kvcore.service.workers import WorkerStorage

_ANSWERS_MAX = 1 << 18


class WorkerPages(Protocol):
    """A worker's segment as the server reaches it. `read` and `write` are called from any thread and never raise for
    what its owner may have done to it: False means that not all bytes are there (any more)."""

    def read(self, offset: int, into: memoryview) -> bool: ...

    def write(self, offset: int, data: memoryview) -> bool: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PageAccess:
    """What a server needs to copy by itself. `open` raises `PeerError` for a segment that is not to be trusted."""

    open: Callable[[str, int], WorkerPages]  # segment name, size in bytes
    view: Callable[[Slot], memoryview]  # the bytes of a slot of L1
    executor: Executor
    piece_bytes: int = 4 << 20
    pieces_inflight: int = 4

    def __post_init__(self) -> None:
        if self.piece_bytes < 1 or self.pieces_inflight < 1:
            raise CallerError("piece_bytes and pieces_inflight must be at least 1")


@dataclass(frozen=True, slots=True)
class PageStatistics:
    """Counters grow; `transfers_open` and `pieces_inflight` are of now."""

    transfers_open: int
    pieces_inflight: int
    cells_stored: int
    cells_retrieved: int
    cells_cancelled: int
    cells_failed: int  # their bytes could not be copied
    bytes_stored: int
    bytes_retrieved: int


class _Registered:
    """The pages of one worker life."""

    __slots__ = ("described", "gone", "inflight", "map", "memory", "worker")

    def __init__(self, worker: str, described: PageSegment, map_: PageMap, memory: WorkerPages) -> None:
        self.worker = worker
        self.described = described
        self.map = map_
        self.memory = memory
        self.inflight = 0  # pieces with a thread
        self.gone = False

    def close_if_unused(self) -> None:
        if self.gone and not self.inflight:
            self.memory.close()


@dataclass(slots=True, eq=False)
class _Cell:
    index: int
    key: ObjectKey
    slot: Slot
    parts_left: int
    begun: bool = False
    failed: bool = False


@dataclass(slots=True, eq=False)
class _Transfer:
    """`owner` of a read; None: a store. `open`: the cells that run, by position."""

    pages: _Registered
    tag: str
    holder: str
    owner: Owner | None
    answers: list[Answer]
    open: dict[int, _Cell]

    def told(self) -> Copied:
        return Copied(pack_bits(sum(1 << index for index in self.open)), list(self.answers))


class _Move(NamedTuple):
    cell: _Cell
    part: Part


class _Piece(NamedTuple):
    transfer: _Transfer
    moves: list[_Move]


class PageDesk:
    """See the module text. Loop-confined, like the server it belongs to."""

    def __init__(self, storage: WorkerStorage, access: PageAccess, layout: CacheLayout, open_max: int) -> None:
        self._storage = storage
        self._access = access
        self._layout = layout
        self._open_max = open_max  # transfers of one worker
        self._pages: dict[str, _Registered] = {}
        self._transfers: dict[tuple[str, str], _Transfer] = {}  # by worker and tag
        self._ended: dict[tuple[str, str], _Transfer] = {}  # oldest first
        self._answers_kept = 0
        self._queue: deque[_Piece] = deque()
        self._inflight = 0
        self._closed = False
        self._counts: Counter[str] = Counter()

    # --- workers

    def register(self, worker: str, described: PageSegment) -> None:
        """Take the worker's pages. Raises `BadPagesError`; again with the same pages: nothing changes."""
        known = self._pages.get(worker)
        if known is not None:
            if known.described != described:
                raise BadPagesError(f"worker {worker!r} has registered other pages before: a new life needs a new name")
            return
        map_ = PageMap(described, self._layout)
        try:
            memory = self._access.open(described.segment, described.size)
        except (PeerError, CallerError, OSError) as error:
            raise BadPagesError(str(error)) from None
        self._pages[worker] = _Registered(worker, described, map_, memory)

    def gone(self, worker: str) -> None:
        """It has left, is proven dead or forgotten: nothing of it is begun or published any more."""
        pages = self._pages.pop(worker, None)
        if pages is None:
            return
        pages.gone = True
        for transfer in [each for each in self._transfers.values() if each.pages is pages]:
            self._drop_queued(transfer)
        pages.close_if_unused()

    def _drop_queued(self, transfer: _Transfer) -> None:
        """Of this transfer, only what is with a thread goes on."""
        dropped = [move for piece in self._queue if piece.transfer is transfer for move in piece.moves]
        self._queue = deque(piece for piece in self._queue if piece.transfer is not transfer)
        for cell, _ in dropped:
            cell.parts_left -= 1
        self._end(transfer, [cell for cell in transfer.open.values() if not cell.parts_left])

    def keep(self, known: Callable[[str], bool]) -> None:
        """Forget the pages of the workers that nobody knows any more."""
        for worker in [name for name in self._pages if not known(name)]:
            self.gone(worker)

    # --- requests

    def store(
        self, worker: str, tag: str, keys: Sequence[ObjectKey], blocks: Sequence[Sequence[int]], deadline_ns: int
    ) -> Copied | None:
        """Begin to copy cells out of the worker's blocks. None: too much is open already."""
        pages = self._registered(worker, tag)
        parts = [pages.map.parts(key.object_group_id, own, null=False) for key, own in zip(keys, blocks, strict=True)]
        if self._full(pages):
            return None
        holder = _holder(worker, tag)
        sizes = [self._layout.cell_bytes(key.object_group_id) for key in keys]
        answers, slots = self._storage.reserve_store(tag, holder, keys, sizes, deadline_ns)
        return self._begin(_Transfer(pages, tag, holder, None, answers, {}), keys, slots, parts)

    def retrieve(
        self, worker: str, tag: str, owner: Owner, keys: Sequence[ObjectKey], blocks: Sequence[Sequence[int]]
    ) -> Copied | None:
        """Begin to copy cells that `owner` has under lease into the worker's blocks. None: too much is open already."""
        pages = self._registered(worker, tag)
        parts = [pages.map.parts(key.object_group_id, own, null=True) for key, own in zip(keys, blocks, strict=True)]
        check_apart(part for own in parts for part in own)
        if len(set(keys)) != len(keys):
            raise CallerError("a cell is named twice in one read")
        if self._full(pages):
            return None
        holder = _holder(worker, tag)
        slots = self._storage.open_read(holder, owner, keys)
        answers = [Answer.UNKNOWN if slot is None else Answer.RESERVED for slot in slots]
        return self._begin(_Transfer(pages, tag, holder, owner, answers, {}), keys, slots, parts)

    def copies(self, worker: str, tag: str, cancel: int) -> Copied | None:
        """How far it is; what is in `cancel` and has not begun ends now. None: nothing runs under this tag."""
        transfer = self._transfers.get((worker, tag))
        if transfer is None:
            ended = self._ended.get((worker, tag))
            return ended.told() if ended is not None else None
        idle = [cell for cell in transfer.open.values() if cancel >> cell.index & 1 and not cell.begun]
        self._counts["cancelled"] += len(idle)
        self._end(transfer, idle, cancelled=True)
        return transfer.told()

    def _registered(self, worker: str, tag: str) -> _Registered:
        pages = self._pages.get(worker)
        if pages is None:
            raise BadPagesError(f"worker {worker!r} has registered no pages here")
        if (worker, tag) in self._transfers or (worker, tag) in self._ended:
            raise CallerError(f"tag {tag!r} has been used already")
        return pages

    def _full(self, pages: _Registered) -> bool:
        return self._closed or sum(each.pages is pages for each in self._transfers.values()) >= self._open_max

    # --- copies

    def _begin(
        self,
        transfer: _Transfer,
        keys: Sequence[ObjectKey],
        slots: Sequence[Slot | None],
        parts: Sequence[tuple[Part, ...]],
    ) -> Copied:
        assert len(keys) == len(slots) == len(parts)
        for index, (key, slot, own) in enumerate(zip(keys, slots, parts)):
            if slot is not None:
                transfer.open[index] = _Cell(index, key, slot, len(own))
        self._transfers[transfer.pages.worker, transfer.tag] = transfer
        moves = [_Move(cell, part) for cell in transfer.open.values() for part in parts[cell.index]]
        self._queue.extend(_Piece(transfer, piece) for piece in _cut(moves, self._access.piece_bytes))
        self._end(transfer, [cell for cell in transfer.open.values() if not cell.parts_left])  # nothing but null blocks
        self._pump()
        return transfer.told()

    def _pump(self) -> None:
        """Hand pieces to threads while there is room."""
        while self._queue and self._inflight < self._access.pieces_inflight:
            transfer, moves = self._queue.popleft()
            alive = [move for move in moves if move.cell.index in transfer.open]
            if alive:
                self._submit(transfer, alive)

    def _submit(self, transfer: _Transfer, moves: list[_Move]) -> None:
        assert not transfer.pages.gone, "of a worker that is gone nothing is queued"
        pairs = []
        for cell, part in moves:
            cell.begun = True
            assert part.at + part.size <= cell.slot.size, "a part lies inside its cell"
            pairs.append((part.offset, self._access.view(cell.slot)[part.at : part.at + part.size]))
        self._inflight += 1
        transfer.pages.inflight += 1
        carry = partial(_carry, transfer.pages.memory, pairs, transfer.owner is not None)
        cost_bytes = sum(part.size for _, part in moves)
        self._access.executor.submit(carry, partial(self._carried, transfer, moves), cost_bytes)

    def _carried(self, transfer: _Transfer, moves: list[_Move], outcome: Outcome[list[bool]]) -> None:
        """A piece has come back: no byte of it moves any more."""
        self._inflight -= 1
        transfer.pages.inflight -= 1
        assert self._inflight >= 0
        assert transfer.pages.inflight >= 0
        fine = outcome.value if outcome.value is not None else [False] * len(moves)
        for move, good in zip(moves, fine, strict=True):
            move.cell.parts_left -= 1
            move.cell.failed |= not good
        done = dict.fromkeys(move.cell for move in moves if not move.cell.parts_left)
        self._end(transfer, list(done))
        transfer.pages.close_if_unused()
        self._pump()

    def _end(self, transfer: _Transfer, cells: Sequence[_Cell], *, cancelled: bool = False) -> None:
        """These cells are copied, failed, or will never begin: publish or abort, end holds and leases."""
        if cells:
            lost = cancelled or transfer.pages.gone
            good = [cell for cell in cells if not (lost or cell.failed)]
            bad = [cell for cell in cells if lost or cell.failed]
            self._counts["failed"] += 0 if lost else len(bad)
            for cell in cells:
                del transfer.open[cell.index]
            if transfer.owner is None:
                self._end_store(transfer, good, bad)
            else:
                self._end_read(transfer, transfer.owner, good, bad)
        if not transfer.open:
            self._remember(transfer)

    def _end_store(self, transfer: _Transfer, good: Sequence[_Cell], bad: Sequence[_Cell]) -> None:
        storage, tag, holder = self._storage, transfer.tag, transfer.holder
        for cell, answer in zip(good, storage.commit_store(tag, holder, [cell.key for cell in good]), strict=True):
            transfer.answers[cell.index] = answer
            self._counts["stored"] += answer is Answer.PUBLISHED
            self._counts["bytes_stored"] += cell.slot.size
        for cell, answer in zip(bad, storage.abort_store(tag, holder, [cell.key for cell in bad]), strict=True):
            transfer.answers[cell.index] = answer if answer is not Answer.UNKNOWN else Answer.ABORTED

    def _end_read(self, transfer: _Transfer, owner: Owner, good: Sequence[_Cell], bad: Sequence[_Cell]) -> None:
        cells = [*good, *bad]
        answers = self._storage.close_read(transfer.holder, owner, [cell.key for cell in cells])
        for number, (cell, answer) in enumerate(zip(cells, answers, strict=True)):
            fine = number < len(good)
            transfer.answers[cell.index] = answer if fine else Answer.ABORTED
            self._counts["retrieved"] += fine and answer is Answer.RELEASED
            self._counts["bytes_retrieved"] += cell.slot.size if fine else 0

    def _remember(self, transfer: _Transfer) -> None:
        name = (transfer.pages.worker, transfer.tag)
        if self._transfers.pop(name, None) is None:
            return
        self._ended[name] = transfer
        self._answers_kept += len(transfer.answers)
        while self._answers_kept > _ANSWERS_MAX:
            self._answers_kept -= len(self._ended.pop(next(iter(self._ended))).answers)

    # --- the end, and looking at it

    def close(self) -> None:
        """Begin nothing any more. What is with a thread comes back as long as the executor delivers."""
        self._closed = True
        for worker in list(self._pages):
            self.gone(worker)

    @property
    def idle(self) -> bool:
        """No copy runs or waits."""
        return not self._transfers and not self._inflight

    def statistics(self) -> PageStatistics:
        count = self._counts
        return PageStatistics(
            transfers_open=len(self._transfers),
            pieces_inflight=self._inflight,
            cells_stored=count["stored"],
            cells_retrieved=count["retrieved"],
            cells_cancelled=count["cancelled"],
            cells_failed=count["failed"],
            bytes_stored=count["bytes_stored"],
            bytes_retrieved=count["bytes_retrieved"],
        )


def _holder(worker: str, tag: str) -> str:
    return f"copy:{worker}:{tag}"


def _cut(moves: Sequence[_Move], piece_bytes: int) -> list[list[_Move]]:
    """In order; each piece ends with the move that fills it."""
    pieces: list[list[_Move]] = []
    room = 0
    for move in moves:
        if room <= 0:
            pieces.append([])
            room = piece_bytes
        pieces[-1].append(move)
        room -= move.part.size
    return pieces


def _carry(pages: WorkerPages, pairs: Sequence[tuple[int, memoryview]], into_pages: bool) -> list[bool]:
    """In a thread: every part by itself; one that fails does not keep the others from being copied."""
    carry = pages.write if into_pages else pages.read
    return [carry(offset, view) for offset, view in pairs]

"""`WatchedDevice`: a device of real threads, with a book of its unfinished copies for the block oracle.

The engine's oracle asks at the moment before something writes a page: does a copy still read this block, does one
still write it? On threads the answer must hold whatever the others do in the meantime, so only two facts are used,
both of which turn once and never back: a ticket is done, an event is done. A read counts only when everything that its
copy waits for was done *before* the ticket was seen unfinished: then nothing orders the two, and the write races.

Compute work of all ranks takes turns under one lock: the oracle's hooks run inside it and share their book. Copies
run beside it, each stream in its own thread, as on a real device.

`ballast_bytes`: each batch of stores first moves this much scratch memory. Copies of a few kilobytes would be over
before the next step begins, and no step would ever meet one.

Who holds, announces, frees: as in `kvcore.runtime.copy`; the book forgets a ticket some time after it is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.ports import Copy, CopyTicket, DeviceEvent
from kvcore.runtime.copy import ThreadCopyEngine

STORE_STREAM = "store"


class _Entry(NamedTuple):
    ticket: CopyTicket
    after: Sequence[DeviceEvent]
    reads: frozenset[int]
    writes: frozenset[int]


class WatchedDevice:
    """`kvcore.sim.engine.device.ComputeDevice` and `kvcore.sim.oracles.engine.CopyWatch` on a `ThreadCopyEngine`."""

    def __init__(
        self, inner: ThreadCopyEngine, pages: npt.NDArray[np.uint64], turns: threading.Lock, ballast_bytes: int = 0
    ) -> None:
        self._inner = inner
        self._pages = pages
        self._turns = turns
        self._book = threading.Lock()
        self._open: list[_Entry] = []
        self._ballast: list[Copy] = []
        if ballast_bytes:
            scratch = np.zeros((2, ballast_bytes), dtype=np.uint8)
            self._ballast.append(Copy(scratch[0], scratch[1], "ballast"))

    # ---- the device

    def compute_event(self) -> DeviceEvent:
        return self._inner.compute_event()

    def run_compute(self, fn: Callable[[], None], duration_ns: int = 0) -> DeviceEvent:
        def in_turn() -> None:
            with self._turns:
                fn()

        return self._inner.run_compute(in_turn, duration_ns)

    def submit(self, copies: Sequence[Copy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> CopyTicket:
        batch = [*self._ballast, *copies] if stream == STORE_STREAM else copies
        reads, writes = self._blocks(copies)
        with self._book:  # a write in a compute thread sees the batch whole or not at all
            ticket = self._inner.submit(batch, stream=stream, after=after)
            self._open = [*filter(_unfinished, self._open), _Entry(ticket, tuple(after), reads, writes)]
        return ticket

    def close(self) -> None:
        self._inner.close()

    # ---- for the oracle; from compute threads

    def overwritten(self, blocks: Collection[int]) -> int | None:
        """A block among `blocks` that an unfinished copy reads, with nothing left to keep it from reading now."""
        with self._book:
            lost = [entry.reads & frozenset(blocks) for entry in self._open if _may_run(entry)]
        return min((block for found in lost for block in found), default=None)

    def torn(self, blocks: Collection[int]) -> int | None:
        """A block among `blocks` that an unfinished copy writes."""
        with self._book:
            lost = [entry.writes & frozenset(blocks) for entry in self._open if _unfinished(entry)]
        return min((block for found in lost for block in found), default=None)

    def given_away(self, block: int) -> None:
        """Nobody asks when a thread's copies meet that."""

    def _blocks(self, copies: Sequence[Copy]) -> tuple[frozenset[int], frozenset[int]]:
        """(blocks read, blocks written). Told from where the first copy's memory lies: a batch has one direction."""
        blocks = frozenset(copy.block_id for copy in copies if copy.block_id >= 0)
        reads = bool(blocks) and np.may_share_memory(np.asarray(copies[0].source), self._pages)
        return (blocks, frozenset()) if reads else (frozenset(), blocks)


def _unfinished(entry: _Entry) -> bool:
    return not entry.ticket.done


def _may_run(entry: _Entry) -> bool:
    return all(event.done for event in entry.after) and not entry.ticket.done  # in this order

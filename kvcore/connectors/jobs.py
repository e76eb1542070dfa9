"""`Job`: one store or load of a worker, and the question the fence asks of it: does it still touch engine blocks?

    ASKING --begin_copies--> COPYING --end_copies (all tickets done, or there was none)--> CLOSING --end--> ENDED

A job copies cell by cell, one ticket each. A fence makes it *give way* with the cells that touch a block which is about
to be written: those that were not submitted yet are dropped; those in the queue are dropped too if the job is
`expendable` (a load, or a store of an attempt that was given up and will be run again); the tickets of all others are
handed to the fence to wait for. Cells that touch no such block go on. A dropped cell of a store is never committed, one
of a load is reported bad.

`ended` is set when the server has been told as well. It is also set when the job's task dies, so that nobody waits for
a dead job; the worker then raises instead of going on. Tickets end by themselves, whatever becomes of the job.

Rejected: one ticket per job. Blocks that left a window come back within a few steps, and the cells of the other
groups would be lost with them, which leaves holes that no hit can cross; submitting what is left again puts it behind
all others, where it loses cells again; and a fence would wait for the whole batch instead of one cell.

Who holds: the worker, from `_spawn` until the task's end. Who announces: the tickets, then `ended`. Nothing is freed
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

from kvcore.connectors.plan import CellBlocks, LoadPlan, StorePlan
from kvcore.connectors.views import NULL_BLOCK
from kvcore.ports import CopyTicket, DeviceEvent


@unique
class Stage(Enum):
    ASKING = "asking"  # no engine block is touched yet
    COPYING = "copying"  # engine blocks are read (store) or written (load)
    CLOSING = "closing"  # no engine block is touched any more; the server is being told
    ENDED = "ended"


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """`after`: its copies wait for this device event. `cells`: position in the plan -> engine blocks, until dropped."""

    name: str
    after: DeviceEvent
    cells: dict[int, frozenset[int]]
    stage: Stage = Stage.ASKING
    expendable: bool = True
    tickets: dict[int, CopyTicket] = field(default_factory=dict)
    blocks: frozenset[int] = frozenset()
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.blocks = frozenset().union(*self.cells.values())

    @property
    def touching(self) -> list[int]:
        """Positions of the cells whose blocks it may read or write from now on."""
        if self.stage is Stage.ASKING:
            return list(self.cells)
        return [index for index, ticket in self.tickets.items() if not ticket.done]

    def touches(self, blocks: frozenset[int]) -> bool:
        return any(not self.cells[index].isdisjoint(blocks) for index in self.touching)

    def give_way(self, blocks: frozenset[int]) -> list[CopyTicket]:
        """End what touches `blocks`: cells without a copy yet are dropped. Returns the tickets to wait for.

        A copy that waits in the queue is cancelled only if the job is expendable: where the attempt it stores for runs
        on, nobody would store these cells again.
        """
        begun: list[CopyTicket] = []
        for index in self.touching:
            if self.cells[index].isdisjoint(blocks):
                continue
            ticket = self.tickets.get(index)
            if ticket is None or (self.expendable and ticket.cancel()):
                del self.cells[index]
            else:
                begun.append(ticket)
        assert bool(begun) == self.touches(blocks)
        return begun

    def begin_copies(self, tickets: Mapping[int, CopyTicket]) -> None:
        """From here on engine blocks are touched. A cell without a ticket was refused by the device."""
        assert self.stage is Stage.ASKING
        assert tickets.keys() <= self.cells.keys(), "a dropped cell is never copied"
        self.stage = Stage.COPYING
        self.cells = {index: own for index, own in self.cells.items() if index in tickets}
        self.tickets = dict(tickets)

    def end_copies(self) -> frozenset[int]:
        """Every ticket is done, or there was none. Returns the positions whose bytes have all arrived."""
        assert self.stage in (Stage.ASKING, Stage.COPYING)
        assert all(ticket.done for ticket in self.tickets.values()), "a running copy is not over"
        self.stage = Stage.CLOSING
        moved = [index for index in self.cells if index in self.tickets and self.tickets[index].error is None]
        assert not self.touching
        return frozenset(moved)

    def end(self) -> None:
        """The task has ended, well or not. Tickets of a task that died may still run."""
        self.stage = Stage.ENDED
        self.ended.set()


@dataclass(slots=True, eq=False, kw_only=True)
class StoreJob(Job):
    plan: StorePlan
    tag: str


@dataclass(slots=True, eq=False, kw_only=True)
class LoadJob(Job):
    """`alone`: no other load was under way at any time since `begin_ns`."""

    plan: LoadPlan
    begin_ns: int = 0
    alone: bool = True


def blocks_of_cells(cells: Sequence[CellBlocks]) -> dict[int, frozenset[int]]:
    """By position in the plan: the real blocks of each cell."""
    found = {index: frozenset(cell.blocks) - {NULL_BLOCK} for index, cell in enumerate(cells)}
    assert all(found.values()), "a cell without a block is not planned"
    return found

"""A worker's side of copies that the servers make: one ticket per cell, done when no server touches its blocks.

Theory of operation
-------------------
    ticket  waiting --gate done--> asked --COPIED does not name it any more--> done
            waiting --cancel, or the gate has failed--> done            asked --proof that its server has died--> done

1. The *gate* is a ticket of the device behind the work that wrote the blocks (or last read them). Until it is done
   nothing is sent, and a cell can be cancelled by saying so here.
2. Then the cells of each server go out under one tag, and COPIES asks how far it is: soon at first, then with growing
   pauses. A cell counts as copied only by its final answer: PUBLISHED or DISCARDED of a store, RELEASED of a load.
3. `cancel` of a cell that was asked for sends COPIES with its bit, at once, and answers False: only the server knows
   whether it has begun. The ticket is done when it is told, and has an error if nothing was copied.
4. No answer means nothing: the copy may run. It is asked again until the server answers, until another life of it
   answers (the old one let go of the address when its copies had ended), or until its process is proven dead. A request
   that was refused, or certainly not sent, has begun nothing.

Who holds: the engine its blocks, until the ticket is done. Who announces: the server's answer, or the proof. Who frees:
nobody here; a batch is forgotten with its last ticket.

Rejected: a reply that comes when the copy has ended (a lost one would leave a fence waiting for nothing, so one has to
be able to ask anyhow); taking a time-out for the end of a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvcore.answers import Answer
from kvcore.errors import CallerError, KvcoreError
from kvcore.ports import CopyTicket
from kvcore.runtime.streams import CopyCancelled
from kvcore.service import protocol as wire
from kvcore.service.connection import Connection, ConnectionState
from kvcore.service.introduction import ask_as_known
from kvcore.service.protocol import Error, ErrorCode, PageSegment, Reply
from kvcore.service.server_ports import Deaths
from kvcore.service.worker_cells import CellT, LoadCell, PageCell, StoreCell

_NS_PER_S = 1_000_000_000
_PAUSE_NS = 100_000
_PAUSE_NS_MAX = 5_000_000
_LOST_PAUSE_NS = 50_000_000
_LOST_PAUSE_NS_MAX = 1_000_000_000
_GOOD = frozenset((Answer.PUBLISHED, Answer.DISCARDED, Answer.RELEASED))
_UNCERTAIN = frozenset((ErrorCode.TIMEOUT, ErrorCode.DUPLICATE, ErrorCode.INTERNAL))
"""Of a first request: it may have been carried out. With any other error it was not."""
_OVER = frozenset((ErrorCode.UNKNOWN_TAG, ErrorCode.RESTARTED, ErrorCode.CLOSED, ErrorCode.MISMATCH))
"""Of COPIES: nothing is running under this tag."""


class NotCopied(KvcoreError):
    """The error of a cell that the server has not copied: an outcome, nobody's mistake. Arguments: why."""


class PageTicket:
    """`kvcore.ports.CopyTicket` for one cell."""

    __slots__ = ("_batch", "_bit", "_callbacks", "_done", "_error")

    def __init__(self) -> None:
        self._batch: _Batch | None = None
        self._bit = 0
        self._done = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        return self._done

    @property
    def error(self) -> BaseException | None:
        return self._error

    def cancel(self) -> bool:
        """True: it was not asked for and will not be. False: the server is told, and decides."""
        if self._done:
            return False
        if self._batch is None:
            self._end(CopyCancelled("cancelled before it was asked for"))
            return True
        self._batch.cancel(self._bit)
        return False

    def on_done(self, callback: Callable[[], None]) -> None:
        if self._done:
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._callbacks.append(callback)

    async def wait(self) -> None:
        if not self._done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_done(lambda: None if future.done() else future.set_result(None))
            await future

    def _end(self, error: BaseException | None) -> None:
        assert not self._done, "a ticket ends once"
        self._done, self._error = True, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback)


@dataclass(slots=True, eq=False)
class _Batch:
    """The cells of one message. `life`: of the server, when it was asked (0: none was known)."""

    owner: PageClient
    connection: Connection
    message: wire.StorePages | wire.RetrievePages
    tickets: list[PageTicket]
    life: int
    cancelled: int = 0
    asking: bool = False
    pause_ns: int = _PAUSE_NS
    timer: asyncio.TimerHandle | None = field(default=None)

    @property
    def tag(self) -> str:
        return self.message.tag

    def cancel(self, bit: int) -> None:
        self.cancelled |= 1 << bit
        if not self.asking:  # else with the next question, which follows at once
            self.later(0)

    def later(self, delay_ns: int) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = asyncio.get_running_loop().call_later(delay_ns / _NS_PER_S, self.owner.ask, self)

    def end(self, why: str) -> None:
        """Nothing of it runs any more; what was not told before has not been copied, for all we know."""
        for ticket in self.tickets:
            if not ticket.done:
                ticket._end(NotCopied(why))

    @property
    def running(self) -> bool:
        return not all(ticket.done for ticket in self.tickets)


class Split(Protocol):
    """(server, positions) batches of cells, each no larger than that server takes."""

    def __call__(self, cells: Sequence[CellT]) -> list[tuple[int, tuple[int, ...]]]: ...


class PageClient:
    """See the module text. `register` tells a server about this worker again; `shared`: where its pages lie."""

    def __init__(
        self,
        connections: Sequence[Connection],
        worker: str,
        rank: int,
        split: Split,
        register: Callable[[Connection], None],
        deaths: Deaths | None,
    ) -> None:
        self.shared: PageSegment | None = None
        self._connections = connections
        self._worker = worker
        self._rank = rank
        self._split = split
        self._loads = 0
        self._register = register
        self._deaths = deaths
        self._batches: dict[_Batch, None] = {}
        self._dead: dict[int, int] = {}  # by server: the life whose death is proven
        for connection in connections:
            connection.on_ready(self._met)

    @property
    def open(self) -> int:
        """Batches of which a server may still copy something."""
        return len(self._batches)

    def share(self, pages: PageSegment) -> None:
        """Where the worker's pages lie. Servers that know this worker already are told at once."""
        self.shared = pages
        for connection in self._connections:
            if connection.state is ConnectionState.READY:
                self._register(connection)

    def store(self, tag: str, cells: Sequence[PageCell[StoreCell]], salt: str, gate: CopyTicket) -> list[PageTicket]:
        """Have the cells copied out of the engine's blocks and published, when `gate` is done."""

        def message(name: str, some: Sequence[int]) -> wire.StorePages:
            wanted = [(cells[i].cell.group, cells[i].cell.chunk_hash, list(cells[i].blocks)) for i in some]
            return wire.StorePages(self._worker, name, self._rank, salt, wanted)

        return self._have_copied(tag, [each.cell for each in cells], gate, message)

    def load(
        self, session: str, generation: int, cells: Sequence[PageCell[LoadCell]], gate: CopyTicket
    ) -> list[PageTicket]:
        """Have cells that the session's lookup holds copied into the engine's blocks, when `gate` is done."""
        self._loads += 1

        def message(name: str, some: Sequence[int]) -> wire.RetrievePages:
            wanted = [(cells[i].cell.group, cells[i].cell.chunk_index, list(cells[i].blocks)) for i in some]
            return wire.RetrievePages(self._worker, name, session, generation, self._rank, wanted)

        return self._have_copied(f"{self._worker}:load{self._loads}", [each.cell for each in cells], gate, message)

    def _have_copied(
        self,
        tag: str,
        cells: Sequence[CellT],
        gate: CopyTicket,
        message: Callable[[str, Sequence[int]], wire.StorePages | wire.RetrievePages],
    ) -> list[PageTicket]:
        if self.shared is None:
            raise CallerError("share() comes first: no server knows where the pages of this worker lie")
        tickets = [PageTicket() for _ in cells]

        def begin() -> None:
            wanted = self._passed(gate, tickets)
            for number, (server, some) in enumerate(self._split([cells[i] for i in wanted])):
                positions = [wanted[i] for i in some]
                own = [tickets[i] for i in positions]
                self._request(self._connections[server], message(f"{tag}/{number}", positions), own)

        gate.on_done(begin)
        return tickets

    def _passed(self, gate: CopyTicket, tickets: Sequence[PageTicket]) -> list[int]:
        """The gate is done: the cells to be asked for. None if it has failed; all end with its error then."""
        wanted = [position for position, ticket in enumerate(tickets) if not ticket.done]
        if gate.error is None:
            return wanted
        for position in wanted:
            tickets[position]._end(gate.error)
        return []

    def _request(
        self, connection: Connection, message: wire.StorePages | wire.RetrievePages, tickets: list[PageTicket]
    ) -> None:
        """Have the cells of `message` copied, for which `tickets` are, in the same order."""
        assert len(tickets) == len(message.cells)
        batch = _Batch(self, connection, message, tickets, _life_of(connection))
        for bit, ticket in enumerate(tickets):
            ticket._batch, ticket._bit = batch, bit
        self._batches[batch] = None
        batch.asking = True
        ask_as_known(connection, message, partial(self._begun, batch), self._register, partial(self._wanted, batch))

    def _wanted(self, batch: _Batch) -> bool:
        return batch in self._batches and not batch.cancelled

    def ask(self, batch: _Batch) -> None:
        """How far is it? Called by the batch's timer."""
        batch.timer = None
        if batch.asking or batch not in self._batches:
            return
        batch.asking = True
        cancelled = batch.cancelled
        message = wire.Copies(self._worker, batch.tag, wire.pack_bits(cancelled))
        batch.connection.request(message, partial(self._told, batch, cancelled))

    def _begun(self, batch: _Batch, reply: Reply) -> None:
        """The answer to the first request."""
        batch.asking = False
        if batch not in self._batches:
            return
        if isinstance(reply, Error) and reply.code not in _UNCERTAIN:
            self._end(batch, f"the server did not begin: {reply.code.value}")
        elif isinstance(reply, Error) and batch.connection.incarnation == 0:
            self._end(batch, "there is no server")  # the request was waiting for one; it was never sent
        elif isinstance(reply, wire.Copied) and len(reply.answers) == len(batch.tickets):
            self._take(batch, reply, 0)
        else:  # nobody waits for its outcome any more, only for its end
            batch.cancelled = (1 << len(batch.tickets)) - 1
            self._lost(batch)

    def _told(self, batch: _Batch, cancelled: int, reply: Reply) -> None:
        batch.asking = False
        if batch not in self._batches:
            return
        if isinstance(reply, wire.Copied) and len(reply.answers) == len(batch.tickets):
            self._take(batch, reply, cancelled)
        elif isinstance(reply, Error) and reply.code in _OVER:
            self._end(batch, f"nothing is known of it: {reply.code.value}")
        else:
            self._lost(batch)

    def _take(self, batch: _Batch, reply: wire.Copied, cancelled: int) -> None:
        running = wire.unpack_bits(reply.running)
        for bit, (ticket, answer) in enumerate(zip(batch.tickets, reply.answers, strict=True)):
            if not ticket.done and not running >> bit & 1:
                ticket._end(_error_of(answer, batch.cancelled >> bit & 1))
        if not batch.running:
            del self._batches[batch]
        elif batch.cancelled != cancelled:
            batch.later(0)
        else:
            batch.later(batch.pause_ns)
            batch.pause_ns = min(2 * batch.pause_ns, _PAUSE_NS_MAX)

    def _lost(self, batch: _Batch) -> None:
        """No answer that tells: the copy may run. Ask again."""
        batch.life = batch.life or _life_of(batch.connection)
        if self._dead.get(batch.connection.index) == batch.life != 0:
            self._end(batch, "the server has died")
            return
        batch.pause_ns = min(max(2 * batch.pause_ns, _LOST_PAUSE_NS), _LOST_PAUSE_NS_MAX)
        batch.later(batch.pause_ns)

    def _end(self, batch: _Batch, why: str) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        del self._batches[batch]
        batch.end(why)

    # --- the servers' lives

    def _met(self, connection: Connection) -> None:
        """A life of a server that we had not met. It answers for what an earlier one copied too: nothing runs there."""
        for batch in self._batches:
            if batch.connection is connection:
                batch.life = batch.life or connection.incarnation
        if self._deaths is not None and connection.server_process:
            died = partial(self._died, connection.index, connection.incarnation)
            self._deaths.watch(f"server{connection.index}", connection.server_process, died)

    def _died(self, server: int, life: int) -> None:
        self._dead[server] = life
        for batch in [each for each in self._batches if each.connection.index == server and each.life == life]:
            self._end(batch, "the server has died")

    def close(self) -> None:
        """The worker ends: nobody asks any more."""
        for batch in list(self._batches):
            self._end(batch, "the client was closed")


def _error_of(answer: Answer, cancelled: int) -> BaseException | None:
    """None: the cell has been copied."""
    if answer in _GOOD:
        return None
    return CopyCancelled("cancelled at the server") if cancelled else NotCopied(answer.value)


def _life_of(connection: Connection) -> int:
    """The life of the server that hears what is said now; 0: whichever answers the handshake."""
    return connection.incarnation if connection.state is ConnectionState.READY else 0

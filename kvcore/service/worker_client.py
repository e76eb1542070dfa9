"""A worker's side of the cache: reserve, copy, commit; open, copy, close. Shell: confined to the loop's thread.

Theory of operation
-------------------
    store   reserve_store(tag) --> grants --> (the caller copies) --> commit_store(tag, ok) | abort_store(tag)
    read    open_read(cells)   --> grants --> (the caller copies) --> close_read(cells)

1. The cells of a batch are grouped by the server responsible for them, in batches no larger than the server takes, and
   asked for at the same time. Each message has a name that is known before it is sent: `<tag>/<n>` or a ticket number.
2. A reply in time gives views into the server's segment. No reply in time, or any error: those cells are None, and the
   server is owed an ABORT or LOAD_DONE for the name - so a grant that arrives late, or was made for a reply that was
   lost, does not leak. The debt is repeated until the server has answered (`connection.py`). A refusal of COMMIT or
   LOAD_DONE leaves what was granted before as it was, so then the debt is owed as well.
3. `commit_store` publishes the cells that were copied and aborts the others. Without an answer in time the outcome is
   unknown: the answers are UNKNOWN and an ABORT is owed, which changes nothing if the commit had arrived.
4. `close_read` says for each cell whether its bytes were protected for the whole copy. False - lease expired, holds
   ended for us, server restarted, no answer - means: throw the bytes away.
5. Where the servers copy (`transfer`), `pages` is asked instead: one call per store or load, and a ticket per cell that
   ends when no server touches its blocks any more (`page_client.py`).
6. The worker registers with every life of a server before anything else is sent to it, and again when it is told that
   it is not known. While it has something open at a server it pings it (`pings.py`), so that a long copy is no silence.

Who holds: the server holds memory for us between grant and commit, abort or close. Who announces: we do, when the
caller's copies have ended: no call of this object ends a hold while the caller may still be copying. Who frees: the
server.

Rejected: waiting for one server after the other; retrying STORE (the next attempt has a new tag); taking a missing
answer to COMMIT as published.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvcore.answers import Answer
from kvcore.errors import CallerError, PeerError
from kvcore.groups import CacheLayout
from kvcore.placement import Placement
from kvcore.runtime.confined import LoopConfined
from kvcore.service import protocol as wire
from kvcore.service.connection import Connection
from kvcore.service.introduction import ask_as_known, is_unknown_worker
from kvcore.service.page_client import PageClient
from kvcore.service.pings import Pings
from kvcore.service.protocol import Error, ErrorCode, Reply, Slots, Transfer
from kvcore.service.server_ports import Deaths
from kvcore.service.worker_cells import CellT, LoadCell, StoreCell

_log = logging.getLogger("kvcore.client")


class Segment(Protocol):
    """Memory of a server as this process sees it (`kvcore.service.region.Region`, or a mapped segment)."""

    def view_range(self, offset: int, size: int) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Grant:
    """`view` may be used until commit, abort or close. `generation` is the slot's."""

    view: memoryview
    generation: int
    server: int


@dataclass(frozen=True, slots=True)
class WorkerClientStatistics:
    stores_open: int
    reads_open: int
    cells_asked_store: int
    cells_granted_store: int
    cells_committed: int
    cells_asked_load: int
    cells_granted_load: int
    cells_closed_good: int
    batches_lost: int  # no reply in time, or an error
    registrations: int
    pings: int
    copies_open: int = 0  # batches that a server may still be copying


@dataclass(frozen=True, slots=True)
class _Part:
    """The cells (positions in the caller's batch) that one message is about. `name`: wire tag or ticket."""

    server: int
    name: str | int
    positions: tuple[int, ...]


@dataclass(slots=True)
class _OpenStore:
    """`aborted_in`: the servers' lives, by part, that were told of the abort."""

    parts: list[_Part]
    granted: list[bool]
    aborted_in: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _OpenCell:
    """Where a cell that is being read was granted: bit `bit` of ticket `ticket` at `server`."""

    server: int
    ticket: int
    bit: int


class WorkerClient:
    """See the module text. `worker_id` must be unique for this life of the worker.

    `process` names the process that the copies run in, where it is not the server's (`kvcore.runtime.deaths`). `deaths`
    proves that a server has died, where servers copy.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        placement: Placement,
        layout: CacheLayout,
        rank: int,
        worker_id: str,
        segments: Callable[[str], Segment],
        process: str = "",
        transfer: Transfer = "worker",
        deaths: Deaths | None = None,
    ) -> None:
        if len(connections) != placement.servers:
            raise CallerError(f"{len(connections)} connections for {placement.servers} servers")
        if not 0 <= rank < layout.ranks:
            raise CallerError(f"rank {rank} does not exist: the layout has {layout.ranks} ranks")
        if not worker_id:
            raise CallerError("a worker needs a name that is unique for its process life")
        self._connections = tuple(connections)
        self._placement = placement
        self._layout = layout
        self._rank = rank
        self._worker = worker_id
        self._segments = segments
        self._process = process
        self.transfer: Transfer = transfer
        self.pages = PageClient(self._connections, worker_id, rank, self._split, self._register, deaths)
        self._stores: dict[str, _OpenStore] = {}
        self._reads: dict[tuple[str, int, int, int], _OpenCell] = {}
        self._tickets = 0
        self._counts: Counter[str] = Counter()
        self._confined = LoopConfined()
        self._pings = Pings(self._connections, worker_id, self._open_at, self._register)
        for connection in self._connections:
            connection.on_ready(self._register)

    @property
    def worker_id(self) -> str:
        return self._worker

    def tag(self, number: int) -> str:
        """The name of this worker's store number `number`: no other worker life has it."""
        return f"{self._worker}:{number}"

    # --- stores ----------------------------------------------------------------------------------------------------

    async def reserve_store(self, tag: str, cells: Sequence[StoreCell], salt: str = "") -> list[Grant | None]:
        """Room to write each cell into. None: nothing to write (resident, busy, no space, server gone)."""
        self._confined.check()
        if tag in self._stores:
            raise CallerError(f"store {tag!r} is open already")
        parts = [_Part(server, f"{tag}/{n}", positions) for n, (server, positions) in enumerate(self._split(cells))]
        store = self._stores[tag] = _OpenStore(list(parts), [False] * len(cells))
        self._counts["asked_store"] += len(cells)
        for part in parts:
            self._pings.need(part.server)
        grants: list[Grant | None] = [None] * len(cells)
        try:
            asked = [(part, self._store_message(part, cells, salt)) for part in parts]
            replies = await self._ask(asked, lambda: self._stores.get(tag) is store)
        except BaseException:
            self.abort_store(tag)
            raise
        if self._stores.get(tag) is not store:  # aborted meanwhile: the servers are told already, in these lives
            for part, reply, life in zip(parts, replies, store.aborted_in):
                if self._connections[part.server].incarnation != life:
                    self._owe_abort(part, reply)
            return grants
        for part, reply in zip(parts, replies):
            self._take_store(store, part, reply, grants)
        return grants

    def _store_message(self, part: _Part, cells: Sequence[StoreCell], salt: str) -> wire.Store:
        wanted = [(cells[i].group, cells[i].chunk_hash) for i in part.positions]
        return wire.Store(self._worker, str(part.name), self._rank, salt, wanted)

    def _take_store(self, store: _OpenStore, part: _Part, reply: Reply, grants: list[Grant | None]) -> None:
        if not isinstance(reply, wire.Reserved) or not self._place(part, reply.segment, reply.slots, grants):
            self._lost(part, reply)
            self._owe_abort(part, reply)
            store.parts.remove(part)
            return
        for position in part.positions:
            store.granted[position] = grants[position] is not None
            self._counts["granted_store"] += grants[position] is not None
        if all(slot is None for slot in reply.slots):
            store.parts.remove(part)

    async def commit_store(self, tag: str, ok: Sequence[bool]) -> list[Answer]:
        """Publish the granted cells with `ok`, give up the other granted ones. The caller's copies have ended."""
        self._confined.check()
        store = self._stores.pop(tag, None)
        answers = [Answer.UNKNOWN] * len(ok)
        if store is None:
            return answers
        if len(ok) != len(store.granted):
            self._stores[tag] = store
            raise CallerError(f"{len(ok)} results for a store of {len(store.granted)} cells")
        asked = [(part, self._commit_message(part, ok)) for part in store.parts]
        try:
            replies = await self._ask(asked)
        except BaseException:
            for part in store.parts:  # ordered behind the COMMITs that were sent
                self._owe_abort(part, None)
            raise
        for part, reply in zip(store.parts, replies):
            self._take_commit(part, reply, answers)
        self._counts["committed"] += sum(answer is Answer.PUBLISHED for answer in answers)
        return answers

    def _commit_message(self, part: _Part, ok: Sequence[bool]) -> wire.Commit:
        done = sum(1 << bit for bit, position in enumerate(part.positions) if ok[position])
        return wire.Commit(self._worker, str(part.name), wire.pack_bits(done))

    def _take_commit(self, part: _Part, reply: Reply, answers: list[Answer]) -> None:
        if not isinstance(reply, wire.Finished) or len(reply.answers) != len(part.positions):
            self._lost(part, reply)
            if _is_still_held(reply):
                self._owe_abort(part, None)
            return
        for position, answer in zip(part.positions, reply.answers):
            answers[position] = answer

    def abort_store(self, tag: str) -> None:
        """Give up the whole store. The caller's copies have ended, or never began. A second call does nothing."""
        self._confined.check()
        store = self._stores.pop(tag, None)
        if store is None:
            return
        for part in store.parts:
            store.aborted_in.append(self._connections[part.server].incarnation)
            self._owe_abort(part, None)

    def _owe_abort(self, part: _Part, reply: Reply | None) -> None:
        if _may_have_been_granted(reply):
            self._connections[part.server].owe(f"store:{part.name}", wire.Abort(self._worker, str(part.name)))

    # --- reads -----------------------------------------------------------------------------------------------------

    async def open_read(self, session: str, generation: int, cells: Sequence[LoadCell]) -> list[Grant | None]:
        """Bytes of cells that the session's lookup holds under lease. None: not there (any more)."""
        self._confined.check()
        for cell in cells:
            if (session, generation, cell.group, cell.chunk_index) in self._reads:
                raise CallerError(f"cell {cell.group}/{cell.chunk_index} of session {session!r} is being read already")
        parts = [_Part(server, self._take_ticket(), positions) for server, positions in self._split(cells)]
        self._counts["asked_load"] += len(cells)
        grants: list[Grant | None] = [None] * len(cells)
        asked = [(part, self._retrieve_message(part, session, generation, cells)) for part in parts]
        try:
            replies = await self._ask(asked)
        except BaseException:
            for part in parts:
                self._owe_done(part, None)
            raise
        for part, reply in zip(parts, replies):
            self._take_read(part, reply, grants)
            self._remember(part, session, generation, cells, grants)
        return grants

    def _retrieve_message(self, part: _Part, session: str, generation: int, cells: Sequence[LoadCell]) -> wire.Retrieve:
        wanted = [(cells[i].group, cells[i].chunk_index) for i in part.positions]
        return wire.Retrieve(self._worker, int(part.name), session, generation, self._rank, wanted)

    def _take_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _take_read(self, part: _Part, reply: Reply, grants: list[Grant | None]) -> None:
        if not isinstance(reply, wire.Granted) or not self._place(part, reply.segment, reply.slots, grants):
            self._lost(part, reply)
            self._owe_done(part, reply)
            return
        self._counts["granted_load"] += sum(slot is not None for slot in reply.slots)

    def _remember(
        self,
        part: _Part,
        session: str,
        generation: int,
        cells: Sequence[LoadCell],
        grants: Sequence[Grant | None],
    ) -> None:
        for bit, position in enumerate(part.positions):
            if grants[position] is not None:
                cell = cells[position]
                key = (session, generation, cell.group, cell.chunk_index)
                assert key not in self._reads, "one open read per cell of a lookup"
                self._reads[key] = _OpenCell(part.server, int(part.name), bit)
                self._pings.need(part.server)

    async def close_read(self, session: str, generation: int, cells: Sequence[LoadCell]) -> list[bool]:
        """The copies out of these cells have ended. True: the bytes were protected all the time."""
        self._confined.check()
        batches: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for position, cell in enumerate(cells):
            entry = self._reads.pop((session, generation, cell.group, cell.chunk_index), None)
            if entry is not None:
                batches.setdefault((entry.server, entry.ticket), []).append((position, entry.bit))
        good = [False] * len(cells)
        asked = [self._done_message(server, ticket, pairs) for (server, ticket), pairs in batches.items()]
        try:
            replies = await self._ask(asked)
        except BaseException:
            for part, message in asked:
                self._owe_message(part, message, None)
            raise
        for (part, message), pairs, reply in zip(asked, batches.values(), replies):
            if not isinstance(reply, wire.Finished):
                self._lost(part, reply)
                if _is_still_held(reply):
                    self._owe_message(part, message, None)
                continue
            for position, bit in pairs:
                good[position] = bit < len(reply.answers) and reply.answers[bit] is Answer.RELEASED
        self._counts["closed_good"] += sum(good)
        return good

    def _done_message(self, server: int, ticket: int, pairs: list[tuple[int, int]]) -> tuple[_Part, wire.Request]:
        part = _Part(server, ticket, tuple(position for position, _ in pairs))
        done = sum(1 << bit for _, bit in pairs)
        return part, wire.LoadDone(self._worker, ticket, wire.pack_bits(done))

    def _owe_done(self, part: _Part, reply: Reply | None) -> None:
        everything = (1 << len(part.positions)) - 1
        self._owe_message(part, wire.LoadDone(self._worker, int(part.name), wire.pack_bits(everything)), reply)

    def _owe_message(self, part: _Part, message: wire.Request, reply: Reply | None) -> None:
        assert isinstance(message, wire.LoadDone)
        if _may_have_been_granted(reply):
            key = f"load:{message.ticket}:{message.done.hex()}"
            self._connections[part.server].owe(key, message)

    def _open_at(self, server: int) -> bool:
        stores = any(part.server == server for store in self._stores.values() for part in store.parts)
        return stores or any(cell.server == server for cell in self._reads.values())

    # --- shared ----------------------------------------------------------------------------------------------------

    def _split(self, cells: Sequence[CellT]) -> list[tuple[int, tuple[int, ...]]]:
        """(server, positions) batches, each no larger than that server takes."""
        by_server: dict[int, list[int]] = {}
        for position, cell in enumerate(cells):
            by_server.setdefault(self._placement.server_of(self._rank, cell.chunk_hash), []).append(position)
        batches = []
        for server, positions in by_server.items():
            size = self._connections[server].limits.batch_cells_max
            batches += [(server, tuple(positions[i : i + size])) for i in range(0, len(positions), size)]
        return batches

    async def _ask(
        self, asked: Sequence[tuple[_Part, wire.Request]], wanted: Callable[[], bool] | None = None
    ) -> list[Reply]:
        """Send all at once, return when all are answered or timed out.

        With `wanted`, a server that does not know this worker is told and asked once more.
        """
        futures: list[asyncio.Future[Reply]] = []
        for part, message in asked:
            future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            futures.append(future)
            connection, callback = self._connections[part.server], partial(_resolve, future)
            if wanted is None:
                connection.request(message, callback)
            else:
                ask_as_known(connection, message, callback, self._register, wanted)
        return [await future for future in futures]

    def _place(self, part: _Part, segment: str, slots: Slots, grants: list[Grant | None]) -> bool:
        """Turn the slots of a reply into views. False: the reply names memory that we cannot reach; none is used."""
        if len(slots) != len(part.positions):
            return False
        placed: list[Grant | None] = []
        try:
            for slot in slots:
                placed.append(self._grant(part, segment, slot) if slot is not None else None)
        except (PeerError, KeyError, OSError):
            return False
        for position, grant in zip(part.positions, placed):
            grants[position] = grant
        return True

    def _grant(self, part: _Part, segment: str, slot: tuple[int, int, int]) -> Grant:
        offset, size, generation = slot
        return Grant(self._segments(segment).view_range(offset, size), generation, part.server)

    def _lost(self, part: _Part, reply: Reply) -> None:
        self._counts["lost"] += 1
        if is_unknown_worker(reply):
            self._register(self._connections[part.server])

    def _register(self, connection: Connection) -> None:
        self._counts["registrations"] += 1
        message = wire.Register(self._worker, self._rank, self._process, self.pages.shared)
        connection.request(message, partial(self._registered, connection.index))

    def _registered(self, server: int, reply: Reply) -> None:
        if isinstance(reply, Error) and reply.code is ErrorCode.BAD_PAGES:
            _log.error("server %d does not take the pages of %s: %s", server, self._worker, reply.message)

    def close(self) -> None:
        """The worker ends in good order: none of its copies is running. The connections stay their owner's."""
        for tag in list(self._stores):
            self.abort_store(tag)
        self._reads.clear()
        self.pages.close()
        self._pings.close()
        for connection in self._connections:
            if connection.incarnation:
                connection.owe("worker", wire.Unregister(self._worker))

    def statistics(self) -> WorkerClientStatistics:
        count = self._counts
        return WorkerClientStatistics(
            stores_open=len(self._stores),
            reads_open=len(self._reads),
            cells_asked_store=count["asked_store"],
            cells_granted_store=count["granted_store"],
            cells_committed=count["committed"],
            cells_asked_load=count["asked_load"],
            cells_granted_load=count["granted_load"],
            cells_closed_good=count["closed_good"],
            batches_lost=count["lost"],
            registrations=count["registrations"],
            pings=self._pings.sent,
            copies_open=self.pages.open,
        )


def _resolve(future: asyncio.Future[Reply], reply: Reply) -> None:
    if not future.done():
        future.set_result(reply)


def _may_have_been_granted(reply: Reply | None) -> bool:
    """False only if the server has said that it did not carry the request out, or its life has ended."""
    if not isinstance(reply, Error):
        return True
    return reply.code in (ErrorCode.TIMEOUT, ErrorCode.DISCONNECTED, ErrorCode.DUPLICATE, ErrorCode.INTERNAL)


def _is_still_held(reply: Reply) -> bool:
    """What an earlier reply had granted: False only if the server's life has ended, or our connection."""
    return not (isinstance(reply, Error) and reply.code in (ErrorCode.RESTARTED, ErrorCode.CLOSED))

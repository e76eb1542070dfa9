"""Copies that the server makes, from and to the pages of a worker: a cell is done when nobody touches its blocks any
more, whatever dies, restarts, is cancelled or lost on the way; and what was given up is never published."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace, object_keys
from kvcore.l1 import L1Cache
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.ports import CopyTicket
from kvcore.runtime.streams import BehindFailure, CopyCancelled
from kvcore.service import protocol as wire
from kvcore.service.client import (
    Connection,
    ConnectionConfig,
    LoadCell,
    PageCell,
    SchedulerClient,
    StoreCell,
    WorkerClient,
    identity_of,
)
from kvcore.service.page_client import NotCopied, PageTicket
from kvcore.service.page_desk import PageAccess
from kvcore.service.page_shares import PageRegistry, describe
from kvcore.service.server import CacheServer, ServerConfig
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.world import SimWorld
from kvcore.storage import Storage, StorageConfig

MS = 1_000_000
CHUNK = 4
BLOCK_BYTES = 32
NAMESPACE = Namespace("m", chunk_tokens=CHUNK)
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, CHUNK // 2, BLOCK_BYTES),), 1, CHUNK)
PLACEMENT = Placement("chunk", 1)
IDENTITY = identity_of(NAMESPACE, LAYOUT, PLACEMENT)
HASHES = ChunkHasher(NAMESPACE).hash_tokens(range(4 * CHUNK))
KEYS = object_keys(HASHES, "m", 0)
BLOCKS = [(1, 3), (5, 7), (9, 11), (13, 15)]  # of the cells; no two are neighbours
TARGETS = [(2, 4), (6, 8), (10, 12), (14, 16)]
COPY_NS = 5 * MS  # of one block
POISON = 0xEE


class Rig:
    """A server that copies two blocks at a time, a scheduler's client, a worker with a device and pages."""

    def __init__(self, seed: int) -> None:
        self.loop = SimLoop(seed)
        self.world = SimWorld(self.loop, in_process=False)
        self.registry = PageRegistry()
        self.pages = np.zeros((32, BLOCK_BYTES), dtype=np.uint8)

    def build(self) -> None:
        self.build_server()
        identity, clock = IDENTITY, self.world.clock
        self.scheduler = self.world.inside(
            "scheduler",
            lambda: SchedulerClient([Connection(self._road("scheduler"), identity, clock)], PLACEMENT, LAYOUT, clock),
        )
        self.worker = self.world.inside("worker", self._build_worker)
        self.device = self.world.inside("worker", lambda: self.world.device(0))

    def build_server(self) -> None:
        self.world.inside("server0", self._build_server)

    def _build_server(self) -> None:
        self.l1 = L1Cache(PlainArena(1 << 14), LruPolicy)
        config = StorageConfig(prefetch_budget_bytes=1 << 20)
        self.storage = Storage(
            layout=LAYOUT, model_name="m", l1=self.l1, adapters=[], clock=self.world.clock, config=config
        )
        self.copier = self.world.executor("server0.copy")
        assert isinstance(self.copier, SimExecutor)
        self.copier.latency_ns = (COPY_NS, COPY_NS)
        self.server = CacheServer(
            self.storage,
            layout=LAYOUT,
            model_name="m",
            identity=IDENTITY,
            placement=PLACEMENT,
            clock=self.world.clock,
            config=ServerConfig(),
            on_bug=self.loop.fail,
            deaths=self.world.deaths(),
            process=self.world.process_name("server0"),
            pages=PageAccess(self.registry.open, self.l1.view, self.copier, piece_bytes=1, pieces_inflight=2),
        )
        self.server.attach(self.world.listen(0))

    def _road(self, name: str) -> Any:
        return self.world.connect(0, name)

    def _build_worker(self) -> WorkerClient:
        config = ConnectionConfig(request_timeout_ns=20 * MS, resend_ns=5 * MS, resends_max=100)
        connection = Connection(self._road("worker"), IDENTITY, self.world.clock, config, transfer="server")
        life = self.world.process_name("worker")
        client = WorkerClient(
            [connection], PLACEMENT, LAYOUT, 0, life, lambda segment: 1 / 0, life, "server", self.world.deaths()
        )
        self.registry.share("pages", self.pages)
        client.pages.share(describe("pages", self.pages, [self.pages]))
        return client

    def run(self, scenario: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            self.build()
            await scenario(self)
            await self.sleep(500 * MS)
            self.check_at_rest()

        with self.loop:
            self.loop.run_until_complete(main())

    def check_at_rest(self) -> None:
        state = self.l1.statistics()
        assert (state.holds, state.bytes_staging, state.bytes_draining, state.quarantined_bytes) == (0, 0, 0, 0)
        assert not self.server.copying
        self.l1.check()

    def gate(self) -> CopyTicket:
        return self.world.inside("worker", lambda: self.device.submit((), stream="store"))

    def store(self, cells: Sequence[int] = range(4), gate: CopyTicket | None = None) -> list[PageTicket]:
        """The worker's blocks hold (number of the block) in every byte."""
        for cell in cells:
            for block in BLOCKS[cell]:
                self.pages[block] = block
        return self.world.inside("worker", lambda: self._store(cells, gate or self.gate()))

    def _store(self, cells: Sequence[int], gate: CopyTicket) -> list[PageTicket]:
        asked = [PageCell(StoreCell(0, HASHES[cell]), BLOCKS[cell]) for cell in cells]
        self._stores = getattr(self, "_stores", 0) + 1
        return self.worker.pages.store(self.worker.tag(self._stores), asked, "", gate)

    def load(self, cells: Sequence[int] = range(4)) -> list[PageTicket]:
        asked = [PageCell(LoadCell(0, cell, HASHES[cell]), TARGETS[cell]) for cell in cells]
        return self.world.inside("worker", lambda: self.worker.pages.load("s", 1, asked, self.gate()))

    async def lookup(self) -> int:
        async def ask() -> int:
            self.scheduler.start("s", 1, HASHES, prompt_tokens=4 * CHUNK + 1)
            outcome = await self.scheduler.wait("s", 1)
            self.scheduler.settle("s", 1, outcome.best)
            return outcome.best

        return await self.world.process("scheduler").spawn(ask(), "ask")

    async def ended(self, tickets: Sequence[PageTicket], within_ns: int = 200 * MS) -> None:
        end_ns = self.world.clock.now_ns() + within_ns
        while not all(ticket.done for ticket in tickets):
            assert self.world.clock.now_ns() < end_ns, "a ticket does not end"
            await self.sleep(MS // 10)

    async def sleep(self, delay_ns: int) -> None:
        woken = self.loop.create_future()
        self.loop.call_later_ns(delay_ns, woken.set_result, None)
        await woken

    async def copying(self) -> None:
        """Until the server has begun, and for half a block."""
        while not self.server.copying:
            await self.sleep(MS // 10)
        await self.sleep(COPY_NS // 2)

    def stored(self) -> dict[int, list[int]]:
        """Cells in L1, with the first byte of each of their blocks, after all bytes of a block are seen to be equal."""
        found = {}
        for cell, key in enumerate(KEYS):
            slot = self.l1.slot_of(key)
            if slot is not None:
                parts = np.frombuffer(self.l1.view(slot), dtype=np.uint8).reshape(2, BLOCK_BYTES)
                assert (parts == parts[:, :1]).all()
                found[cell] = [int(part[0]) for part in parts]
        return found


def right(*cells: int) -> dict[int, list[int]]:
    return {cell: list(BLOCKS[cell]) for cell in cells}


def test_cells_go_from_the_workers_blocks_into_the_cache_and_into_other_blocks(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        tickets = rig.store()
        assert not any(ticket.done for ticket in tickets)
        await rig.ended(tickets)
        assert [ticket.error for ticket in tickets] == [None] * 4
        assert rig.stored() == right(0, 1, 2, 3)
        assert await rig.lookup() == 4
        tickets = rig.load()
        await rig.ended(tickets)
        assert [ticket.error for ticket in tickets] == [None] * 4
        for source, target in zip(BLOCKS, TARGETS, strict=True):
            assert (rig.pages[list(target)] == np.array(source, dtype=np.uint8)[:, None]).all()
        state = rig.server.statistics().pages
        assert state is not None
        assert (state.cells_stored, state.cells_retrieved) == (4, 4)
        assert rig.l1.statistics().leases == 0

    Rig(seed).run(scenario)


def test_a_ticket_is_done_when_its_blocks_may_be_written_and_not_before(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        tickets = rig.store()
        done: set[int] = set()
        while len(done) < 4:
            for cell, ticket in enumerate(tickets):
                if ticket.done and cell not in done:
                    done.add(cell)
                    rig.pages[list(BLOCKS[cell])] = POISON  # the fence has passed: somebody else's now
            await rig.sleep(MS // 20)
        assert rig.stored() == right(0, 1, 2, 3)

    Rig(seed).run(scenario)


def test_what_has_not_begun_is_cancelled_and_its_blocks_are_free_soon(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        tickets = rig.store()
        await rig.copying()
        assert [ticket.cancel() for ticket in tickets] == [False] * 4
        await rig.ended(tickets, within_ns=3 * COPY_NS)
        given_up = [cell for cell, ticket in enumerate(tickets) if isinstance(ticket.error, CopyCancelled)]
        assert 0 not in given_up, "its blocks were being read"
        assert {2, 3} <= set(given_up)
        for cell in range(4):
            rig.pages[list(BLOCKS[cell])] = POISON
        await rig.sleep(100 * MS)
        assert rig.stored() == right(*(cell for cell in range(4) if cell not in given_up))

    Rig(seed).run(scenario)


def test_what_still_waits_for_the_device_is_cancelled_here_and_never_asked_for(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        work = rig.world.inside("worker", lambda: rig.device.run_compute(lambda: None, 50 * MS))
        gate = rig.world.inside("worker", lambda: rig.device.submit((), stream="store", after=(work,)))
        tickets = rig.store(gate=gate)
        await rig.sleep(10 * MS)
        assert not rig.server.copying
        assert tickets[1].cancel()
        assert tickets[1].done
        assert isinstance(tickets[1].error, CopyCancelled)
        await rig.ended(tickets)
        assert rig.stored() == right(0, 2, 3)

    Rig(seed).run(scenario)


def test_behind_work_that_has_failed_nothing_is_copied(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        rig.loop.set_exception_handler(lambda loop, context: None)
        work = rig.world.inside("worker", lambda: rig.device.run_compute(lambda: 1 / 0, MS))  # type: ignore[arg-type]
        gate = rig.world.inside("worker", lambda: rig.device.submit((), stream="store", after=(work,)))
        tickets = rig.store(gate=gate)
        await rig.ended(tickets)
        assert all(isinstance(ticket.error, BehindFailure) for ticket in tickets)
        await rig.sleep(50 * MS)
        assert rig.stored() == {}

    Rig(seed).run(scenario)


def test_a_worker_that_dies_in_the_middle_publishes_nothing_more(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        rig.store()
        await rig.copying()
        rig.world.crash("worker")
        before = rig.stored()
        await rig.sleep(200 * MS)
        assert rig.server.worker_names == ()
        assert len(rig.stored()) <= len(before) + 1, "one block of the first cells may end before the proof comes"
        assert len(rig.stored()) < 4
        rig.check_at_rest()

    Rig(seed).run(scenario)


def test_the_tickets_of_a_dead_server_end_by_the_proof_of_its_death(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        tickets = rig.store()
        await rig.copying()
        rig.world.crash("server0")
        await rig.ended(tickets, within_ns=10 * MS)
        assert all(isinstance(ticket.error, NotCopied) for ticket in tickets if ticket.error is not None)
        assert any(ticket.error is not None for ticket in tickets)
        rig.world.process("server0").restart()
        rig.build_server()

    Rig(seed).run(scenario)


def test_a_restarted_server_is_told_of_the_pages_and_copies_again(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        tickets = rig.store()
        await rig.copying()
        rig.world.restart("server0")
        rig.build_server()
        await rig.ended(tickets, within_ns=2_000 * MS)
        assert any(ticket.error is not None for ticket in tickets)
        for _ in range(50):
            tickets = rig.store()
            await rig.ended(tickets, within_ns=2_000 * MS)
            if all(ticket.error is None for ticket in tickets):
                break
            await rig.sleep(20 * MS)
        assert rig.stored() == right(0, 1, 2, 3)

    Rig(seed).run(scenario)


def test_without_an_answer_a_cell_is_not_done(seed: int) -> None:
    """The server copies on while nothing that it says arrives."""

    async def scenario(rig: Rig) -> None:
        await rig.ended(rig.store([0]))
        tickets = rig.store([1, 2])
        await rig.copying()
        rig.world.network.partition("worker>server0", to_server=False)
        await rig.sleep(300 * MS)
        assert not any(ticket.done for ticket in tickets)
        assert rig.stored() == right(0, 1, 2), "it has long been copied, but nobody knows that here"
        rig.world.network.heal("worker>server0")
        await rig.ended(tickets, within_ns=3_000 * MS)
        assert [ticket.error for ticket in tickets] == [None, None], "and it is still known there"

    Rig(seed).run(scenario)


def test_a_request_that_got_lost_has_begun_nothing(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ended(rig.store([0]))
        rig.world.network.partition("worker>server0", to_client=False)
        tickets = rig.store([1, 2])
        await rig.sleep(100 * MS)
        assert not any(ticket.done for ticket in tickets)
        rig.world.network.heal("worker>server0")
        await rig.ended(tickets, within_ns=3_000 * MS)
        errors = [ticket.error for ticket in tickets]
        stored = rig.stored()
        for cell, error in zip((1, 2), errors, strict=True):
            assert (error is None) <= (cell in stored)

    Rig(seed).run(scenario)


def test_without_a_server_a_cell_is_done_soon(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        rig.world.network.partition("worker>server0")
        tickets = rig.store()
        await rig.ended(tickets, within_ns=50 * MS)
        assert all(isinstance(ticket.error, NotCopied) for ticket in tickets)
        rig.world.network.heal("worker>server0")

    Rig(seed).run(scenario)


def test_a_worker_that_was_forgotten_registers_again_and_its_copies_are_asked_for_all_the_same(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        tickets = rig.store()
        await rig.copying()
        name = rig.worker.worker_id
        rig.world.inside("server0", lambda: rig.server._desk.leave(name))
        await rig.ended(tickets)
        assert [ticket.error for ticket in tickets] == [None] * 4
        assert rig.server.worker_names == ()
        (again,) = rig.store([0])
        await rig.ended([again])
        assert isinstance(again.error, NotCopied), "it is resident"
        assert rig.server.worker_names == (name,)

    Rig(seed).run(scenario)


def test_the_first_store_of_a_worker_that_was_forgotten_is_copied(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.sleep(10 * MS)
        name = rig.worker.worker_id
        rig.world.inside("server0", lambda: rig.server._desk.leave(name))
        assert rig.server.worker_names == ()
        tickets = rig.store()
        await rig.ended(tickets)
        assert [ticket.error for ticket in tickets] == [None] * 4
        assert rig.server.worker_names == (name,)

    Rig(seed).run(scenario)


def test_a_client_that_ends_ends_its_tickets_and_what_the_server_had_queued(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        tickets = rig.store()
        await rig.copying()
        rig.world.inside("worker", rig.worker.close)
        assert all(ticket.done for ticket in tickets)
        await rig.sleep(100 * MS)
        assert len(rig.stored()) < 4

    Rig(seed).run(scenario)


def test_a_server_that_does_not_copy_refuses_the_handshake_with_both_values(seed: int) -> None:
    async def scenario(rig: Rig) -> None:
        rig.world.restart("server0")
        rig.registry.open = None  # type: ignore[assignment,method-assign]

        def build() -> None:
            server = CacheServer(
                rig.storage,
                layout=LAYOUT,
                model_name="m",
                identity=IDENTITY,
                placement=PLACEMENT,
                clock=rig.world.clock,
                on_bug=rig.loop.fail,
            )
            server.attach(rig.world.listen(0))
            rig.server = server

        rig.world.inside("server0", build)
        tickets = rig.store()
        await rig.ended(tickets, within_ns=500 * MS)
        (connection,) = rig.worker._connections
        assert connection.refusal == "transfer: the server offers worker, the client wants server"
        reply = await rig.scheduler._connections[0].call(wire.Status())
        assert isinstance(reply, wire.StatusReply)

    Rig(seed).run(scenario)


@pytest.fixture(params=range(5))
def seed(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number

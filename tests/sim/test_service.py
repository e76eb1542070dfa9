"""Clients and servers over the simulated network: lost messages, cut connections, restarts; nothing is left at rest."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.l1 import L1Cache
from kvcore.l2.memory import MemoryBackend, memory_adapter
from kvcore.lookup import LookupOutcome
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.service import protocol as wire
from kvcore.service.client import (
    Connection,
    ConnectionConfig,
    ConnectionState,
    LoadCell,
    Region,
    SchedulerClient,
    SchedulerConfig,
    StoreCell,
    WorkerClient,
    identity_of,
)
from kvcore.service.protocol import Identity
from kvcore.service.server import CacheServer, ServerConfig
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.clock import SimClock
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.network import SimNetwork
from kvcore.sim.ports.notice import SimNotice
from kvcore.storage import Storage, StorageConfig

MS = 1_000_000
S = 1_000_000_000
CHUNK = 4
CELL_BYTES = 64
RANKS = 2


def layout() -> CacheLayout:
    group = ObjectGroup(kind=GroupKind.FULL, block_tokens=CHUNK, bytes_per_block=CELL_BYTES)
    return CacheLayout(groups=(group,), ranks=RANKS, chunk_tokens=CHUNK)


def namespace(model: str = "m") -> Namespace:
    return Namespace(model_name=model, chunk_tokens=CHUNK)


def payload(chunk_hash: bytes, rank: int) -> bytes:
    """What the cell of this chunk and rank must hold."""
    return (chunk_hash + bytes([rank])).ljust(CELL_BYTES, b"\x5a")[:CELL_BYTES]


class Node:
    """One server process: crash and restart keep what L2 holds."""

    def __init__(self, world: World, index: int, capacity_bytes: int, idle_ns: int) -> None:
        self.world = world
        self.index = index
        self.capacity_bytes = capacity_bytes
        self.idle_ns = idle_ns
        self.backend = MemoryBackend()
        self.process = world.loop.process(f"server{index}")
        self.process.run(self.build)

    def build(self) -> None:
        world, loop = self.world, self.world.loop
        self.executor = executor = SimExecutor(loop, name=f"io{self.index}.{self.process.incarnation}")
        adapter = memory_adapter("l2", executor=executor, notice_factory=lambda: SimNotice(loop), backend=self.backend)
        self.arena = PlainArena(self.capacity_bytes)
        self.l1 = L1Cache(self.arena, LruPolicy)
        self.storage = Storage(
            layout=world.layout,
            model_name="m",
            l1=self.l1,
            adapters=[adapter],
            clock=world.clock,
            config=StorageConfig(prefetch_budget_bytes=self.capacity_bytes),
        )
        segment = f"segment{self.index}.{self.process.incarnation}"
        world.regions[segment] = Region(self.arena)
        self.server = CacheServer(
            self.storage,
            layout=world.layout,
            model_name="m",
            identity=world.identity,
            placement=world.placement,
            clock=world.clock,
            index=self.index,
            config=ServerConfig(segment=segment, session_idle_ns=self.idle_ns),
            on_bug=loop.fail,
        )
        self.server.attach(world.network.listen(f"server{self.index}"))

    def restart(self) -> None:
        self.process.crash()
        self.process.restart()
        self.process.run(self.build)


class World:
    """Servers, one scheduler, one worker per rank."""

    def __init__(
        self,
        seed: int,
        *,
        servers: int = 2,
        mode: Any = "rank",
        capacity_bytes: int = 1 << 16,
        idle_ns: int = 100 * S,
        schedule: str = "random",
    ) -> None:
        self.loop = SimLoop(seed, schedule=schedule)
        self.clock = SimClock(self.loop)
        self.network = SimNetwork(self.loop, reconnect_ns=2 * MS)
        self.layout = layout()
        self.placement = Placement(mode, servers)
        self.identity = identity_of(namespace(), self.layout, self.placement)
        self.hasher = ChunkHasher(namespace())
        self.regions: dict[str, Region] = {}
        self.nodes: list[Node] = []
        self.connections: list[Connection] = []
        self._servers, self._capacity, self._idle_ns = servers, capacity_bytes, idle_ns

    def build(self) -> None:
        """Inside the running loop."""
        self.nodes = [Node(self, i, self._capacity, self._idle_ns) for i in range(self._servers)]
        self.scheduler = SchedulerClient(self.connect("scheduler"), self.placement, self.layout, self.clock)
        self.workers = [self.worker(rank, f"worker{rank}") for rank in range(RANKS)]

    def connect(self, name: str, identity: Identity | None = None) -> list[Connection]:
        made = []
        for index in range(self._servers):
            transport = self.network.connect(f"server{index}", f"{name}.{index}")
            made.append(Connection(transport, identity or self.identity, self.clock, ConnectionConfig(), index=index))
        self.connections += made
        return made

    def worker(self, rank: int, name: str) -> WorkerClient:
        return WorkerClient(
            self.connect(name), self.placement, self.layout, rank, name, lambda segment: self.regions[segment]
        )

    def hashes(self, family: int, chunks: int) -> list[bytes]:
        return self.hasher.hash_tokens([family * 1000 + i for i in range(chunks * CHUNK)])

    def run(self, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            self.build()
            await scenario(self)

        with self.loop:
            self.loop.run_until_complete(main())

    # --- what an engine does ---------------------------------------------------------------------------------------

    async def store(self, rank: int, number: int, hashes: Sequence[bytes]) -> list[Answer]:
        worker = self.workers[rank]
        tag = worker.tag(number)
        grants = await worker.reserve_store(tag, [StoreCell(0, chunk_hash) for chunk_hash in hashes])
        for chunk_hash, grant in zip(hashes, grants):
            if grant is not None:
                grant.view[:] = payload(chunk_hash, rank)
        return await worker.commit_store(tag, [grant is not None for grant in grants])

    async def load(self, rank: int, session: str, generation: int, hashes: Sequence[bytes], length: int) -> int:
        """Copy `length` chunks out; how many are certain. Every certain one has the right bytes."""
        worker = self.workers[rank]
        cells = [LoadCell(0, i, hashes[i]) for i in range(length)]
        grants = await worker.open_read(session, generation, cells)
        await self.pause(0, 300_000)
        copies = [bytes(grant.view) if grant is not None else b"" for grant in grants]
        held = await worker.close_read(session, generation, cells)
        good = 0
        for cell, copy, grant, fine in zip(cells, copies, grants, held):
            if grant is not None and fine:
                assert copy == payload(cell.chunk_hash, rank), "certain bytes are the right bytes"
                good += 1
        return good

    async def ask(self, session: str, generation: int, hashes: Sequence[bytes], **options: Any) -> LookupOutcome:
        self.scheduler.start(session, generation, hashes, prompt_tokens=len(hashes) * CHUNK + 1, **options)
        return await self.scheduler.wait(session, generation)

    async def pause(self, low_ns: int, high_ns: int) -> None:
        await self.sleep(self.loop.streams["workload"].randint(low_ns, high_ns))

    async def sleep(self, delay_ns: int) -> None:
        woken = self.loop.create_future()
        self.loop.call_later_ns(delay_ns, woken.set_result, None)
        await woken

    # --- at rest ---------------------------------------------------------------------------------------------------

    def assert_at_rest(self) -> None:
        for node in self.nodes:
            node.l1.check()
            statistics, counts = node.l1.statistics(), node.server.statistics()
            assert statistics.leases == 0, "a lease is left"
            assert statistics.holds == 0, "an I/O hold is left"
            assert statistics.bytes_staging == 0, "staging is left"
            assert statistics.bytes_draining == 0, "draining memory is left"
            assert (counts.sessions, counts.stores_open, counts.reads_open) == (0, 0, 0)
            assert "internal" not in counts.errors
            assert node.storage.idle
        for connection in self.connections:
            state = connection.statistics()
            assert (state.outstanding, state.waiting, state.debts) == (0, 0, 0)
        assert self.scheduler.statistics().sessions == 0
        for worker in self.workers:
            assert (worker.statistics().stores_open, worker.statistics().reads_open) == (0, 0)


async def one_request(world: World, name: str, family: int, chunks: int, marks: dict[str, int]) -> None:
    """Look up, load, store what is missing, end; whatever the network does."""
    hashes = world.hashes(family, chunks)
    generation = marks["generation"] = marks.get("generation", 0) + 1
    outcome = await world.ask(name, generation, hashes)
    assert world.scheduler.poll(name, generation) == outcome
    marks["failed"] = marks.get("failed", 0) + bool(outcome.reason)
    world.scheduler.settle(name, generation, outcome.best)
    for rank in range(RANKS):
        loaded = await world.load(rank, name, generation, hashes, outcome.best)
        marks["loaded"] = marks.get("loaded", 0) + loaded
    marks["promised"] = marks.get("promised", 0) + RANKS * outcome.best
    for rank in range(RANKS):
        marks["stores"] = marks.get("stores", 0) + 1
        await world.store(rank, marks["stores"], hashes)
    world.scheduler.end(name)


async def workload(world: World, marks: dict[str, int], requests: int = 12) -> None:
    random = world.loop.streams["workload"]
    tasks = []
    for number in range(requests):
        coroutine = one_request(world, f"request{number}", random.randint(0, 3), random.randint(1, 6), marks)
        tasks.append(world.loop.create_task(coroutine, name=f"request{number}"))
        await world.pause(0, 2 * MS)
    for task in tasks:
        await task


@pytest.mark.parametrize("mode", ["rank", "chunk"])
@pytest.mark.parametrize("seed", range(4))
def test_without_faults_every_promise_is_loaded_and_nothing_is_left(seed: int, mode: str) -> None:
    marks: dict[str, int] = {}

    async def scenario(world: World) -> None:
        await workload(world, marks)
        await world.sleep(1 * S)
        world.assert_at_rest()

    World(seed, mode=mode).run(scenario)
    assert marks["failed"] == 0
    assert marks["loaded"] == marks["promised"] > 0


def duplicate(world: World, low: int) -> Callable[[str, bool, bytes], list[bytes]]:
    random = world.loop.streams["faults"]

    def meddle(client: str, to_server: bool, message: bytes) -> list[bytes]:
        return [message, message] if random.chance(1, low) else [message]

    return meddle


async def trouble(world: World, rounds: int) -> None:
    """Cut, block and slow connections at random, then heal everything."""
    random = world.loop.streams["faults"]
    for _ in range(rounds):
        await world.sleep(random.randint(0, 3 * MS))
        client = random.pick(world.network.clients)
        kind = random.randint(0, 3)
        if kind == 0:
            world.network.cut(client)
        elif kind == 1:
            to_server = random.chance(1, 2)
            world.network.partition(client, to_server=to_server, to_client=not to_server)
        elif kind == 2:
            world.network.clog(client, random.randint(0, 3 * S))
        else:
            world.network.heal(client)
            world.network.clog(client, 0)
    for client in world.network.clients:
        world.network.heal(client)
        world.network.clog(client, 0)


@pytest.mark.parametrize("seed", range(24))
def test_lost_messages_and_cut_connections_leave_nothing_at_rest(seed: int) -> None:
    """R24, R35, R37, R39: whatever is lost, delayed or delivered twice, each lease and hold ends exactly once."""
    marks: dict[str, int] = {}

    async def scenario(world: World) -> None:
        world.network.meddle = duplicate(world, 10)
        troubles = world.loop.create_task(trouble(world, 25), name="trouble")
        await workload(world, marks)
        await troubles
        await world.sleep(150 * S)  # beyond the idle time of sessions and the lease of stagings
        await one_request(world, "last", 0, 2, marks)  # the servers are heard from: sleeping debts are paid
        for worker in world.workers:
            for family in range(4):
                await world.store(worker._rank, marks["stores"] * 100 + family, world.hashes(family, 6))
        await world.sleep(150 * S)
        world.assert_at_rest()

    World(seed, mode="chunk" if seed % 2 else "rank").run(scenario)
    assert marks["promised"] >= marks["loaded"]


def test_the_faults_of_the_swarm_were_felt() -> None:
    """Over the seeds above: some lookups fail, some loads fail, some replies are late. Otherwise they prove nothing."""
    failed = late = duplicates = 0
    for seed in range(6):
        marks: dict[str, int] = {}
        world = World(seed)

        async def scenario(world: World, marks: dict[str, int] = marks) -> None:
            world.network.meddle = duplicate(world, 10)
            troubles = world.loop.create_task(trouble(world, 25), name="trouble")
            await workload(world, marks)
            await troubles

        world.run(scenario)
        failed += marks["failed"]
        late += sum(connection.statistics().replies_late for connection in world.connections)
        duplicates += sum(node.server.statistics().errors.get("duplicate", 0) for node in world.nodes)
    assert failed > 0
    assert late > 0
    assert duplicates > 0


@pytest.mark.parametrize("seed", range(12))
def test_a_server_that_crashes_and_restarts_is_used_again_and_nothing_is_left(seed: int) -> None:
    marks: dict[str, int] = {}

    async def scenario(world: World) -> None:
        running = world.loop.create_task(workload(world, marks), name="workload")
        for _ in range(3):
            await world.pause(1 * MS, 8 * MS)
            world.nodes[world.loop.streams["faults"].randint(0, 1)].restart()
        await running
        await world.sleep(150 * S)
        for number in range(2):  # the first one may only notice that its connection is gone
            await one_request(world, f"again{number}", 0, 3, marks)
            await world.sleep(5 * S)
        before = marks["promised"]
        await one_request(world, "hit", 0, 3, marks)
        assert marks["promised"] - before == 3 * RANKS, "after the restart the cache serves again"
        await world.sleep(150 * S)
        world.assert_at_rest()

    World(seed).run(scenario)


def test_a_silent_server_makes_the_result_nothing_at_the_deadline_and_frees_the_other_ones_leases() -> None:
    """R35, R37: the wait has a deadline; the late acknowledgement is answered with a release and changes nothing."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 3)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        assert (await world.ask("warm", 1, hashes)).best == 3
        world.scheduler.end("warm")
        await world.sleep(10 * MS)
        world.network.clog("scheduler.1", 5 * S)
        began_ns = world.loop.now_ns()
        outcome = await world.ask("q", 2, hashes)
        assert (outcome.best, world.loop.now_ns() - began_ns) == (0, SchedulerConfig().lookup_timeout_ns)
        assert "server 1" in outcome.reason
        await world.sleep(100 * MS)
        assert world.nodes[0].l1.statistics().leases == 0, "the fast server's leases went back at the deadline"
        world.network.clog("scheduler.1", 0)
        await world.sleep(15 * S)
        assert world.nodes[1].l1.statistics().leases == 0, "the late acknowledgement was answered with a release"
        assert world.scheduler.poll("q", 2) == outcome
        world.scheduler.end("q")
        assert (await world.ask("q", 3, hashes)).best == 3, "a fresh lookup after the timeout works"
        world.scheduler.end("q")
        await world.sleep(5 * S)
        world.assert_at_rest()

    World(1).run(scenario)


def test_ranks_agree_on_the_shortest_prefix_and_the_longer_ranks_extra_leases_go_back() -> None:
    """R42: rank 0 has four chunks, rank 1 has two; both serve two, and nothing stays pinned beyond."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 4)
        await world.store(0, 1, hashes)
        await world.store(1, 1, hashes[:2])
        outcome = await world.ask("q", 1, hashes)
        assert outcome == LookupOutcome(0b111)
        assert world.nodes[0].l1.statistics().leases == 4
        world.scheduler.settle("q", 1, outcome.best)
        await world.sleep(10 * MS)
        assert [node.l1.statistics().leases for node in world.nodes] == [2, 2]
        assert [await world.load(rank, "q", 1, hashes, 2) for rank in range(RANKS)] == [2, 2]
        assert [node.l1.statistics().leases for node in world.nodes] == [0, 0]
        world.scheduler.end("q")
        await world.sleep(1 * S)
        world.assert_at_rest()

    World(2).run(scenario)


def test_an_engine_that_decides_not_to_load_leaves_no_lease() -> None:
    """R22: leases of chunks that the engine has itself are not taken, and a settle at 0 gives back all others."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 4)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        outcome = await world.ask("q", 1, hashes, skip_chunks=1)
        assert outcome.best == 4
        assert world.nodes[0].l1.statistics().leases == 3
        world.scheduler.settle("q", 1, 0)
        await world.sleep(10 * MS)
        assert [node.l1.statistics().leases for node in world.nodes] == [0, 0]
        world.scheduler.end("q")
        await world.sleep(1 * S)
        world.assert_at_rest()

    World(3).run(scenario)


def test_an_abort_while_the_answer_is_pending_frees_everything_without_further_traffic() -> None:
    """R24: in each order of abort and completion."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 4)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        await world.sleep(1 * S)
        for node in world.nodes:
            node.storage.drop_l1()  # the next lookups load from L2
        for number in range(12):
            world.scheduler.start(f"q{number}", 1, hashes, prompt_tokens=17)
            await world.sleep(number * 50_000)
            world.scheduler.end(f"q{number}")
            world.scheduler.end(f"q{number}")
        await world.sleep(5 * S)
        world.assert_at_rest()

    World(4).run(scenario)


@pytest.mark.parametrize("after_ns", [0, 100_000, 300_000, 1 * MS, 5 * MS])
def test_a_client_that_hurries_gets_what_every_server_holds(after_ns: int) -> None:
    """Before the acknowledgements, around the first QUERY, and between two of them. Its bytes are there to be read."""
    sent: dict[str, list[tuple[str, bool]]] = {}

    def watch(client: str, to_server: bool, message: bytes) -> list[bytes]:
        if client.startswith("scheduler"):
            said: Any = (wire.read_request if to_server else wire.read_reply)(message)
            sent.setdefault(client, []).append((type(said).__name__, getattr(said, "hurry", False)))
        return [message]

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 3)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        await world.sleep(1 * S)
        for node in world.nodes:
            node.storage.drop_l1()
        for rank in range(RANKS):
            await world.store(rank, 2, hashes[: 2 - rank])
        for node in world.nodes:
            node.executor.latency_ns = (900 * MS, 900 * MS)
        world.network.meddle = watch
        world.scheduler.start("q", 1, hashes, prompt_tokens=13)
        await world.sleep(after_ns)
        world.scheduler.hurry("q", 1)
        world.scheduler.hurry("q", 1)
        begin_ns = world.loop.now_ns()
        assert await world.scheduler.wait("q", 1) == LookupOutcome(0b11)
        assert world.loop.now_ns() - begin_ns < 20 * MS, "nobody waits for a store"
        world.scheduler.hurry("q", 1)
        world.scheduler.settle("q", 1, 1)
        assert [await world.load(rank, "q", 1, hashes, 1) for rank in range(RANKS)] == [1, 1]
        world.scheduler.end("q")
        await world.sleep(5 * S)
        world.assert_at_rest()

    World(5).run(scenario)
    for said in sent.values():
        queries = [flag for kind, flag in said if kind == "Query"]
        assert [kind for kind, _ in said].index("Ack") < [kind for kind, _ in said].index("Query")
        assert queries.count(True) == 1, "asked once, as the answer is final"
        assert queries == sorted(queries)


def test_a_hurry_after_the_release_asks_nobody_and_an_old_generation_is_the_callers_mistake() -> None:
    async def scenario(world: World) -> None:
        world.scheduler.start("q", 1, world.hashes(1, 2), prompt_tokens=9)
        world.scheduler.release("q", 1)
        queries = world.scheduler.statistics().queries
        world.scheduler.hurry("q", 1)
        assert world.scheduler.statistics().queries == queries
        world.scheduler.start("q", 2, [], prompt_tokens=0)
        world.scheduler.hurry("q", 2)
        assert world.scheduler.poll("q", 2) == LookupOutcome(1)
        with pytest.raises(CallerError, match="not the current lookup"):
            world.scheduler.hurry("q", 1)
        world.scheduler.end("q")
        await world.sleep(15 * S)
        world.assert_at_rest()

    World(6).run(scenario)


def test_a_grant_of_a_servers_previous_life_is_refused_and_the_next_one_works() -> None:
    """S44; R32, R33: after a restart, commits and reads of the old life fail once and for all; new ones work."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        outcome = await world.ask("q", 1, hashes)
        world.scheduler.settle("q", 1, outcome.best)
        cells = [LoadCell(0, i, chunk_hash) for i, chunk_hash in enumerate(hashes)]
        opened = await world.workers[0].open_read("q", 1, cells)
        reserved = await world.workers[0].reserve_store("worker0:9", [StoreCell(0, b"x" * 32)])
        assert all(opened)
        assert all(reserved)
        world.nodes[0].restart()
        assert await world.workers[0].close_read("q", 1, cells) == [False, False]  # its connection is gone
        await world.sleep(5 * MS)  # connected again
        assert await world.workers[0].commit_store("worker0:9", [True]) == [Answer.UNKNOWN]
        assert await world.workers[0].open_read("q", 1, cells) == [None, None]
        assert world.nodes[0].l1.statistics().objects_resident == 0
        assert Answer.PUBLISHED in await world.store(0, 10, hashes)
        world.scheduler.end("q")
        await world.sleep(5 * S)
        world.assert_at_rest()

    World(5).run(scenario)


def test_a_lookup_that_the_server_forgot_fails_with_a_reason_and_never_waits() -> None:
    """R33: UNKNOWN is an answer of its own, not a silent 0 and not a wait."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        await world.sleep(1 * S)
        for node in world.nodes:
            node.storage.drop_l1()
        world.scheduler.start("q", 1, hashes, prompt_tokens=9)
        await world.sleep(200_000)
        for node in world.nodes:
            node.server._sessions.clear()
        began_ns = world.loop.now_ns()
        outcome = await world.scheduler.wait("q", 1)
        assert outcome.best == 0
        assert "does not know this lookup" in outcome.reason
        assert world.loop.now_ns() - began_ns < 100 * MS
        world.scheduler.end("q")
        await world.sleep(5 * S)
        world.assert_at_rest()

    World(6).run(scenario)


def test_a_request_id_used_again_gets_nothing_of_its_old_life() -> None:
    """R40: same session name, same generation number, other prompt, while replies of the old life are still due."""

    async def scenario(world: World) -> None:
        old, new = world.hashes(1, 4), world.hashes(2, 2)
        for rank in range(RANKS):
            await world.store(rank, 1, old)
            await world.store(rank, 2, new[:1])
        for client in ("scheduler.0", "scheduler.1"):
            world.network.clog(client, 30 * MS)
        world.scheduler.start("x", 1, old, prompt_tokens=17)
        await world.sleep(50 * MS)
        world.scheduler.end("x")
        assert await world.ask("x", 1, new) == LookupOutcome(0b11)
        assert [node.l1.statistics().leases for node in world.nodes] == [1, 1]
        world.scheduler.end("x")
        await world.sleep(5 * S)
        world.assert_at_rest()

    World(7).run(scenario)


def test_a_new_generation_releases_the_old_ones_leases_and_the_old_one_answers_no_more() -> None:
    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 4)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        assert (await world.ask("q", 1, hashes)).best == 4
        assert (await world.ask("q", 2, hashes[:2])).best == 2
        assert [node.l1.statistics().leases for node in world.nodes] == [2, 2]
        with pytest.raises(CallerError, match="not the current lookup"):
            world.scheduler.poll("q", 1)
        with pytest.raises(CallerError, match="started already"):
            world.scheduler.start("q", 2, hashes, prompt_tokens=17)
        world.scheduler.end("q")
        await world.sleep(1 * S)
        world.assert_at_rest()

    World(8).run(scenario)


def test_hashes_travel_once_and_are_sent_again_when_the_server_lost_them() -> None:
    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 6)
        await world.ask("q", 1, hashes[:4])
        await world.ask("q", 2, hashes)
        counts = world.scheduler.statistics()
        assert (counts.hashes_sent, counts.hashes_saved) == (2 * 6, 2 * 4)
        for node in world.nodes:
            node.server._sessions.clear()
        outcome = await world.ask("q", 3, hashes)
        assert outcome == LookupOutcome(1)
        assert sum(node.server.statistics().errors["base_mismatch"] for node in world.nodes) == 2
        world.scheduler.end("q")
        await world.sleep(1 * S)
        world.assert_at_rest()

    World(9).run(scenario)


def test_two_sides_that_differ_are_refused_with_both_values() -> None:
    """R44, R75: a difference in hashing or layout is an error at start, not a silent hit rate of zero."""

    async def scenario(world: World) -> None:
        other = identity_of(namespace("another"), world.layout, world.placement)
        connections = world.connect("stranger", other)
        client = SchedulerClient(connections, world.placement, world.layout, world.clock)
        client.start("q", 1, world.hashes(1, 2), prompt_tokens=9)
        outcome = await client.wait("q", 1)
        assert outcome.best == 0
        assert "model_name: the server has 'm', the client has 'another'" in outcome.reason
        await world.sleep(10 * MS)
        assert [connection.state for connection in connections] == [ConnectionState.REFUSED] * 2
        client.end("q")

    World(10).run(scenario)


def test_a_lost_reply_to_a_store_is_followed_by_an_abort_and_the_staging_goes_back() -> None:
    """S16; R35, I11: the worker gives up the wait, the server is told, nothing leaks and nothing becomes visible."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 2)
        await world.store(0, 1, world.hashes(2, 1))  # shaken hands and registered
        world.network.partition("worker0.0", to_server=False, to_client=True)
        grants = await world.workers[0].reserve_store("worker0:2", [StoreCell(0, each) for each in hashes])
        assert grants == [None, None]
        assert world.nodes[0].l1.statistics().objects_staging == 2, "the server did grant them"
        world.network.heal("worker0.0")
        await world.sleep(5 * S)
        assert world.nodes[0].l1.statistics().objects_staging == 0
        assert await world.workers[0].commit_store("worker0:2", [True, True]) == [Answer.UNKNOWN, Answer.UNKNOWN]
        assert world.nodes[0].l1.statistics().objects_resident == 1
        world.assert_at_rest()

    World(11).run(scenario)


def test_a_proven_death_ends_the_workers_stores_and_reads_and_silence_does_not() -> None:
    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 2)
        await world.store(0, 1, hashes)
        await world.store(1, 1, hashes)
        await world.ask("q", 1, hashes)
        await world.workers[0].open_read("q", 1, [LoadCell(0, 0, hashes[0])])
        await world.workers[0].reserve_store("worker0:2", [StoreCell(0, b"y" * 32)])
        await world.sleep(60 * S)
        assert world.nodes[0].l1.statistics().holds == 2, "silence ends no hold"
        world.nodes[0].server.worker_died("worker0")
        assert world.nodes[0].l1.statistics().holds == 0
        assert not any(key.chunk_hash == b"y" * 32 for key in world.nodes[0].l1.resident_keys())
        world.scheduler.end("q")

    World(12).run(scenario)


def test_sessions_die_by_idleness_and_not_by_age() -> None:
    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        await world.ask("q", 1, hashes)
        await world.ask("idle", 1, hashes)
        for _ in range(10):
            await world.sleep(60 * S)
            await world.workers[0].open_read("q", 1, [])
            await (
                world.workers[0]
                ._connections[0]
                .call(
                    wire.Retrieve("worker0", 10_000, "q", 1, 0, [])  # names the session
                )
            )
        assert world.nodes[0].server.statistics().sessions == 1, "the used one lives, the idle one is gone"
        assert world.nodes[0].server.statistics().sessions_expired == 1
        world.scheduler.end("q")
        world.scheduler.end("idle")

    World(13).run(scenario)


def test_the_same_seed_gives_the_same_trace() -> None:
    digests = []
    for _ in range(2):
        world = World(5)
        marks: dict[str, int] = {}

        async def scenario(world: World, marks: dict[str, int] = marks) -> None:
            world.network.meddle = duplicate(world, 10)
            troubles = world.loop.create_task(trouble(world, 20), name="trouble")
            await workload(world, marks, 6)
            await troubles

        world.run(scenario)
        digests.append(world.loop.trace.hash)
    assert digests[0] == digests[1]


def test_a_debt_to_a_silent_server_sleeps_without_a_timer_and_is_paid_when_the_server_is_heard_again() -> None:
    """R24: the leases of an ended request go back, however long the server was out of reach."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        await world.ask("q", 1, hashes)
        world.network.partition("scheduler.0")
        world.scheduler.end("q")
        link = world.connections[0]
        assert (link.statistics().debts, link.statistics().debts_asleep) == (1, 0)
        await world.sleep(60 * S)
        assert (link.statistics().debts, link.statistics().debts_asleep, link.statistics().outstanding) == (1, 1, 0)
        resends = link.statistics().resends
        assert resends == ConnectionConfig().resends_max - 1
        await world.sleep(600 * S)
        assert link.statistics().resends == resends, "a dead server costs nothing any more"
        world.network.heal("scheduler.0")
        assert world.nodes[0].server.statistics().sessions == 1
        await world.ask("other", 2, hashes)
        world.scheduler.end("other")
        await world.sleep(1 * S)
        assert world.nodes[0].server.statistics().sessions_expired == 0
        world.assert_at_rest()

    World(14, idle_ns=100_000 * S).run(scenario)


def test_a_reply_for_another_connection_is_not_taken_for_ours() -> None:
    """R40: a transport identity that is used again must not deliver an old user's replies."""

    async def scenario(world: World) -> None:
        await world.store(0, 1, world.hashes(1, 1))
        link = world.workers[0]._connections[0]

        def meddle(client: str, to_server: bool, message: bytes) -> list[bytes]:
            header = wire.read_header(message)
            assert header is not None
            if to_server or client != "worker0.0":
                return [message]
            return [wire.pack(header._replace(connection=header.connection ^ 1), wire.read_reply(message))]

        world.network.meddle = meddle
        reply = await link.call(wire.Status())
        assert isinstance(reply, wire.Error)
        assert reply.code is wire.ErrorCode.TIMEOUT
        assert link.statistics().replies_foreign == 1

    World(15).run(scenario)


def test_a_server_that_has_its_cells_already_costs_the_other_servers_nothing() -> None:
    """A part with nothing to write is over while the replies are taken; each reply still belongs to its own part."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 12)
        one_each = [
            next(each for each in hashes if world.placement.server_of(0, each) == server) for server in range(3)
        ]
        assert await world.store(0, 1, one_each[:1]) == [Answer.PUBLISHED]
        answers = await world.store(0, 2, one_each)
        assert answers[1:] == [Answer.PUBLISHED, Answer.PUBLISHED]
        assert world.workers[0].statistics().cells_committed == 3, "what was there already is not counted again"
        for server, chunk_hash in enumerate(one_each):
            l1 = world.nodes[server].l1
            (key,) = l1.resident_keys()
            slot = l1.slot_of(key)
            assert slot is not None
            assert bytes(l1.view(slot)) == payload(chunk_hash, 0)

    World(0, servers=3, mode="chunk").run(scenario)


def test_a_worker_that_the_server_does_not_know_registers_again_and_its_store_is_kept() -> None:
    """R33: a terminal answer at once, other ranks untouched, and the store is asked for once more."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes[:1])
        await world.workers[0]._connections[0].call(wire.Unregister("worker0"))
        registrations = world.workers[0].statistics().registrations
        assert await world.store(0, 2, hashes[1:]) == [Answer.PUBLISHED]
        assert world.nodes[1].server.statistics().workers == 1
        assert world.workers[0].statistics().batches_lost == 0
        assert world.workers[0].statistics().registrations == registrations + 1
        await world.sleep(1 * S)
        world.assert_at_rest()

    World(16).run(scenario)


def test_bytes_whose_lease_ended_during_the_copy_are_thrown_away() -> None:
    """I10: the session ends while a worker copies; the memory stays, the answer says that the bytes are not certain."""

    async def scenario(world: World) -> None:
        hashes = world.hashes(1, 2)
        for rank in range(RANKS):
            await world.store(rank, 1, hashes)
        await world.ask("q", 1, hashes)
        cells = [LoadCell(0, i, chunk_hash) for i, chunk_hash in enumerate(hashes)]
        grants = await world.workers[0].open_read("q", 1, cells)
        world.scheduler.end("q")
        await world.sleep(10 * MS)
        world.nodes[0].storage.drop_l1()
        assert [bytes(grant.view) for grant in grants if grant] == [payload(each, 0) for each in hashes]
        assert await world.workers[0].close_read("q", 1, cells) == [False, False]
        await world.sleep(1 * S)
        world.assert_at_rest()

    World(17).run(scenario)

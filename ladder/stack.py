"""`CacheStack`: kvcore itself, put together for a climb, in any world.

Everything built here is the production code: L1, adapters, `Storage`, `CacheServer`, connections, clients, connector.
The world gives the ports (transports, executors, notices, files); the oracles come in as subclass of L1 and wrapper of
the adapters.

Who holds: the stack holds servers and connector for the length of a climb; `close` ends them in the order client,
server, ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvcore.connectors.scheduler import SchedulerConnector, SchedulerConnectorConfig
from kvcore.connectors.worker import WorkerConnector
from kvcore.errors import ConfigError
from kvcore.eviction import LruPolicy, S3FifoPolicy
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher, Namespace, ObjectKey
from kvcore.l2.adapter import L2Adapter
from kvcore.l2.file import file_adapter
from kvcore.l2.memory import memory_adapter
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.ports import ClientTransport, Clock, Executor, Files, Notice, ServerTransport, Tracer
from kvcore.quota import Quota
from kvcore.service.client import Connection, Region, SchedulerClient, WorkerClient, identity_of
from kvcore.service.server import CacheServer, ServerConfig
from kvcore.sim.engine.device import ComputeDevice
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.hits import Cell
from kvcore.sim.oracles.l1 import WatchedL1
from kvcore.sim.oracles.l2 import WatchedAdapter
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.weak import WeakLocks
from kvcore.storage import Storage, StorageConfig

T = TypeVar("T")


class World(Protocol):
    """Where a climb happens: the ports, and a way to build a component inside the process it belongs to."""

    clock: Clock
    tracer: Tracer

    def inside(self, process: str, build: Callable[[], T]) -> T: ...

    def notice(self) -> Notice: ...

    def executor(self, name: str) -> Executor: ...

    def files(self, name: str) -> Files: ...

    def listen(self, server: int) -> ServerTransport: ...

    def connect(self, server: int, client: str) -> ClientTransport: ...

    def device(self, rank: int) -> ComputeDevice: ...


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What varies between the cells of the matrix. `l2`: which adapters, in order of preference."""

    layout: CacheLayout
    namespace: Namespace
    placement: Placement
    load_async: bool
    l1_bytes: int
    l2: tuple[str, ...] = ("memory",)
    policy: str = "lru"
    retain: bool = False
    skip_l1: bool = False
    weak_locks: bool = False
    prefetch_budget_bytes: int = 1 << 20
    quota: Quota | None = None

    def __post_init__(self) -> None:
        chunk = max(self.layout.cell_bytes(group) for group in range(len(self.layout.groups)))
        if self.l1_bytes < chunk:
            raise ConfigError(
                f"an L1 of {self.l1_bytes} bytes cannot hold one chunk of {chunk} bytes; give it at least that, "
                "better a few thousand chunks"
            )


class ServerStack:
    """One cache server with its storage, in its own process of the world."""

    def __init__(self, world: World, index: int, config: StackConfig, truth: Truth, findings: Findings) -> None:
        self.name = f"server{index}"
        self._truth = truth
        self._findings = findings
        self._world = world
        arena = PlainArena(config.l1_bytes)
        self.region = Region(arena)
        policy = S3FifoPolicy if config.policy == "s3fifo" else LruPolicy
        self.l1 = WatchedL1(self.name, truth, findings, world.tracer, arena, policy, config.quota)
        self.executors = [world.executor(f"{self.name}.{kind}") for kind in config.l2]
        self._loading: dict[ObjectKey, str] = {}
        self.adapters = [
            self._adapter(kind, executor, config) for kind, executor in zip(config.l2, self.executors, strict=True)
        ]
        self.storage = Storage(
            layout=config.layout,
            model_name=config.namespace.model_name,
            l1=self.l1,
            adapters=self.adapters,
            clock=world.clock,
            tracer=world.tracer,
            config=StorageConfig(
                prefetch_budget_bytes=config.prefetch_budget_bytes, retain=config.retain, skip_l1=config.skip_l1
            ),
        )
        self.server = CacheServer(
            self.storage,
            layout=config.layout,
            model_name=config.namespace.model_name,
            identity=identity_of(config.namespace, config.layout, config.placement),
            placement=config.placement,
            clock=world.clock,
            index=index,
            config=ServerConfig(segment=self.name),
            on_bug=self._bug,
        )
        self.server.attach(world.listen(index))

    def _adapter(self, kind: str, executor: Executor, config: StackConfig) -> WatchedAdapter:
        world, name = self._world, f"{self.name}.{kind}"
        adapter: L2Adapter
        if kind == "file":
            adapter = file_adapter(
                name, world.files(name), executor=executor, notice_factory=world.notice, clock=world.clock
            )
        else:
            adapter = memory_adapter(name, executor=executor, notice_factory=world.notice)
        if config.weak_locks:
            adapter = WeakLocks(adapter)
        return WatchedAdapter(adapter, self._truth, self._findings, world.tracer, self._loading)

    def _bug(self, error: BaseException) -> None:
        self._findings.report("server", f"{self.name} raised {error!r}")

    @property
    def idle(self) -> bool:
        return self.storage.idle and all(executor_idle(adapter) for adapter in self.adapters)

    def check_at_rest(self) -> None:
        """All of this server's books are closed."""
        self.l1.check_at_rest()
        for adapter in self.adapters:
            adapter.check_at_rest()
        state = self.server.statistics()
        for name in ("sessions", "lookups_open", "stores_open", "reads_open"):
            if getattr(state, name):
                self._findings.report("leases", f"{self.name}: at rest, {name} is {getattr(state, name)}")

    async def close(self) -> None:
        self.server.close()
        await self.storage.close()
        for executor in self.executors:
            executor.close()


def cell_of(key: ObjectKey) -> Cell:
    """(group, rank, hash) of a key."""
    return key.object_group_id, key.kv_rank, key.chunk_hash


def executor_idle(adapter: WatchedAdapter) -> bool:
    """No blocking work of this adapter is under way (deletes have no task of their own)."""
    return not getattr(adapter.inner, "work_inflight", 0)


class CacheStack:
    """A `ladder.Connector` made of kvcore, and the servers behind it."""

    def __init__(self, world: World, config: StackConfig, truth: Truth, findings: Findings) -> None:
        self.config = config
        self._findings = findings
        self._world = world
        self.servers = [
            world.inside(f"server{index}", lambda index=index: ServerStack(world, index, config, truth, findings))  # type: ignore[misc]
            for index in range(config.placement.servers)
        ]
        self._connections: list[Connection] = []
        self._clients: list[SchedulerClient | WorkerClient] = []
        self._scheduler = world.inside("scheduler", self._build_scheduler)
        self._workers = [
            world.inside(f"worker{rank}", lambda rank=rank: self._build_worker(rank))  # type: ignore[misc]
            for rank in range(config.layout.ranks)
        ]

    def _connect(self, client: str) -> list[Connection]:
        identity = identity_of(self.config.namespace, self.config.layout, self.config.placement)
        made = [
            Connection(self._world.connect(index, client), identity, self._world.clock, index=index)
            for index in range(self.config.placement.servers)
        ]
        self._connections += made
        return made

    def _build_scheduler(self) -> SchedulerConnector:
        config = self.config
        client = SchedulerClient(self._connect("scheduler"), config.placement, config.layout, self._world.clock)
        self._clients.append(client)
        return SchedulerConnector(
            config.layout, ChunkHasher(config.namespace), client, SchedulerConnectorConfig(load_async=config.load_async)
        )

    def _build_worker(self, rank: int) -> WorkerConnector:
        name = f"worker{rank}"
        regions = {server.name: server.region for server in self.servers}
        client = WorkerClient(
            self._connect(name), self.config.placement, self.config.layout, rank, name, regions.__getitem__
        )
        self._clients.append(client)
        return WorkerConnector(self.config.layout, rank, client)

    # ---- ladder.Connector

    @property
    def scheduler(self) -> SchedulerConnector:
        return self._scheduler

    def worker(self, rank: int) -> WorkerConnector:
        return self._workers[rank]

    # ---- for the rungs

    async def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing runs in the background any more, then check that nothing is left behind."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._quiet():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            self._findings.report("liveness", f"the cache did not come to rest in {timeout_s} s: {self.describe()}")
            return
        for server in self.servers:
            server.check_at_rest()
        for client in self._clients:
            if isinstance(client, WorkerClient):
                state = client.statistics()
                if state.stores_open or state.reads_open:
                    self._findings.report("leases", f"{client.worker_id}: at rest, {state}")

    def _quiet(self) -> bool:
        if not all(worker.idle for worker in self._workers) or not all(server.idle for server in self.servers):
            return False
        states = [connection.statistics() for connection in self._connections]
        return not any(state.outstanding or state.waiting or state.debts for state in states)

    def describe(self) -> str:
        """One line per part that is not at rest."""
        parts = [f"worker{rank} {worker.statistics()}" for rank, worker in enumerate(self._workers) if not worker.idle]
        parts += [f"{server.name} {server.storage.statistics()}" for server in self.servers if not server.idle]
        parts += [str(state) for state in (each.statistics() for each in self._connections) if state.debts]
        return "; ".join(parts) or "everything is idle"

    def drop_l1(self) -> int:
        """Forget L1 everywhere; L2 keeps what it has."""
        return sum(server.storage.drop_l1() for server in self.servers)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Delete chunks from every tier, as an eviction would."""
        gone = frozenset(hashes)
        for server in self.servers:
            server.l1.delete([key for key in server.l1.resident_keys() if key.chunk_hash in gone])
            for adapter in server.adapters:
                adapter.delete(list(filter(lambda key: key.chunk_hash in gone, adapter.keys())))

    def ever_published(self, cell: Cell) -> bool:
        group, rank, chunk_hash = cell
        server = self.servers[self.config.placement.server_of(rank, chunk_hash)]
        return ObjectKey(chunk_hash, self.config.namespace.model_name, rank, group) in server.l1.ever_published

    def held(self, request_id: str) -> tuple[set[Cell], int] | None:
        tracker = self._scheduler.tracker(request_id)
        if tracker is None or not tracker.looked_up_tokens:
            return None
        cells = {cell_of(key) for server in self.servers for key in server.l1.protected(tracker.session)}
        return cells, tracker.skip_chunks

    def lookup_of(self, request_id: str) -> int:
        tracker = self._scheduler.tracker(request_id)
        return -1 if tracker is None else tracker.generation

    def stores_inflight(self, request_id: str) -> int:
        return sum(worker.inflight_stores(request_id) for worker in self._workers)

    def counters(self) -> dict[str, int]:
        """The worker counters that the rung table shows, summed over ranks."""
        states = [worker.statistics() for worker in self._workers]
        return {
            "fences_waited": sum(state.fences_waited for state in states),
            "stores_cancelled": sum(state.stores_cancelled for state in states),
            "resumes_with_load": self._scheduler.statistics().resumes_with_load,
        }

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        for connection in self._connections:
            connection.close()
        for server in self.servers:
            await server.close()

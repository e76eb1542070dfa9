"""`ServerStack`: one cache server of a climb, and `StackConfig`, which says how everything is built.

Everything built here is the production code: L1, adapters, `Storage`, `CacheServer`. The world gives the ports; the
oracles come in as subclass of L1 and wrapper of the adapters.

Who holds: the server's process holds all of it until `close`; after a crash nothing of it is touched again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from kvcore.errors import ConfigError
from kvcore.eviction import LruPolicy, S3FifoPolicy
from kvcore.groups import CacheLayout
from kvcore.keys import Namespace
from kvcore.l2.adapter import L2Adapter
from kvcore.l2.file import file_adapter
from kvcore.l2.memory import MemoryBackend, memory_adapter
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.ports import ClientTransport, Clock, Executor, Files, Notice, ServerTransport, Tracer
from kvcore.quota import Quota
from kvcore.runtime.shared_memory import SharedArena, SharedSegment
from kvcore.service.client import ConnectionConfig, Region, SchedulerConfig, identity_of
from kvcore.service.page_desk import PageAccess
from kvcore.service.page_shares import PageRegistry
from kvcore.service.protocol import Transfer
from kvcore.service.server import CacheServer, Deaths, ServerConfig
from kvcore.sim.engine.device import ComputeDevice
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.l1 import WatchedL1
from kvcore.sim.oracles.l2 import WatchedAdapter
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.process import CURRENT
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

    def deaths(self) -> Deaths | None: ...

    def process_name(self, process: str) -> str:
        """The present life of a process, as `deaths` understands it; "" if it is the servers' own."""
        ...


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What varies between the cells of the matrix, and between climbs under pressure.

    `l2`: which adapters, in order of preference; `l2_bytes` bounds each of them, `l2_quota` its tenants. `quota` is
    L1's. `storage`, `connection` and `lookup` hold the deadlines. `shared_memory`: L1 lies in POSIX shared memory,
    which the workers map. `engine_namespace`: the clients', where it is not the servers'. `transfer`: who copies KV.
    `admission`: what is promised of what was found (`admissions.py`), with its seed and its floor.
    """

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
    l2_bytes: int | None = None
    l2_quota: Quota | None = None
    storage: StorageConfig = field(default_factory=StorageConfig)
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    lookup: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    shared_memory: bool = False
    transfer: Transfer = "worker"
    engine_namespace: Namespace | None = None
    admission: str = "always"
    admission_seed: int = 0
    admission_floor_tokens: int = 0

    def __post_init__(self) -> None:
        chunk = max(self.layout.cell_bytes(group) for group in range(len(self.layout.groups)))
        if self.l1_bytes < chunk:
            raise ConfigError(
                f"an L1 of {self.l1_bytes} bytes cannot hold one chunk of {chunk} bytes; give it at least that, "
                "better a few thousand chunks"
            )


class AttachedRegion:
    """A server's shared memory as a worker maps it."""

    def __init__(self, segment: SharedSegment) -> None:
        self._segment = segment

    def view_range(self, offset: int, size: int) -> memoryview:
        return self._segment.view_range(offset, size)

    def close(self) -> None:
        self._segment.close()


class ServerStack:
    """One cache server with its storage, in its own process of the world.

    `life` counts its restarts; `memories` holds the records of memory stores, which outlive it. With `pages` it copies
    by itself, block by block, so that every copy meets whatever can happen between two blocks of a cell.
    """

    def __init__(
        self,
        world: World,
        index: int,
        config: StackConfig,
        truth: Truth,
        findings: Findings,
        memories: dict[str, MemoryBackend],
        life: int = 0,
        pages: PageRegistry | None = None,
    ) -> None:
        self.name = f"server{index}"
        self.index = index
        self._incarnation = CURRENT.get()
        self._truth = truth
        self._findings = findings
        self._world = world
        self._memories = memories
        self._arena = SharedArena(config.l1_bytes) if config.shared_memory else PlainArena(config.l1_bytes)
        self.segment = self._arena.segment or (f"{self.name}.{life}" if life else self.name)
        policy = S3FifoPolicy if config.policy == "s3fifo" else LruPolicy
        self.l1 = WatchedL1(self.name, truth, findings, world.tracer, self._arena, policy, config.quota)
        self.copier: Executor | None = None
        self.executors = [world.executor(f"{self.name}.{kind}") for kind in config.l2]
        self._loading = self.l1.loads
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
            config=replace(
                config.storage,
                prefetch_budget_bytes=config.prefetch_budget_bytes,
                retain=config.retain,
                skip_l1=config.skip_l1,
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
            config=replace(config.server, segment=self.segment),
            on_bug=self._bug,
            deaths=world.deaths(),
            process=world.process_name(self.name),
            pages=self._page_access(pages) if pages is not None else None,
        )
        self.server.attach(world.listen(index))

    def _page_access(self, pages: PageRegistry) -> PageAccess:
        self.copier = self._world.executor(f"{self.name}.copy")
        return PageAccess(pages.open, self._arena.view, self.copier, piece_bytes=1)

    def region(self) -> Region | AttachedRegion:
        """This server's memory for a worker."""
        if isinstance(self._arena, SharedArena):
            return AttachedRegion(SharedArena.attach(self._arena.segment, self._arena.capacity_bytes))
        return Region(self._arena)

    def _adapter(self, kind: str, executor: Executor, config: StackConfig) -> WatchedAdapter:
        world, name = self._world, f"{self.name}.{kind}"
        adapter: L2Adapter
        if kind == "file":
            adapter = file_adapter(
                name,
                world.files(name),
                executor=executor,
                notice_factory=world.notice,
                clock=world.clock,
                capacity_bytes=config.l2_bytes,
                quota=config.l2_quota,
            )
        else:
            adapter = memory_adapter(
                name,
                executor=executor,
                notice_factory=world.notice,
                capacity_bytes=config.l2_bytes,
                quota=config.l2_quota,
                backend=self._memories.setdefault(name, MemoryBackend()),
            )
        if config.weak_locks:
            adapter = WeakLocks(adapter)
        return WatchedAdapter(adapter, self._truth, self._findings, world.tracer, self._loading, config.l2_quota)

    def _bug(self, error: BaseException) -> None:
        self._findings.report("server", f"{self.name} raised {error!r}")

    @property
    def alive(self) -> bool:
        """The life of the process in which this was built has not ended."""
        return self._incarnation is None or self._incarnation.alive

    @property
    def idle(self) -> bool:
        return (
            self.storage.idle and not self.server.copying and all(executor_idle(adapter) for adapter in self.adapters)
        )

    def check_at_rest(self) -> None:
        """All of this server's books are closed."""
        self.l1.check_at_rest()
        for adapter in self.adapters:
            adapter.check_at_rest()
        self._check_storage()
        state = self.server.statistics()
        for name in ("sessions", "lookups_open", "stores_open", "reads_open"):
            if getattr(state, name):
                self._findings.report("leases", f"{self.name}: at rest, {name} is {getattr(state, name)}")

    def _check_storage(self) -> None:
        """No lookup, load, staging or read is remembered, and every byte of the budget is back."""
        state = self.storage.statistics()
        left = {
            "lookups": state.prefetch.jobs,
            "loads in flight": state.prefetch.loads.in_flight,
            "cells nobody has read": state.prefetch.loads.unread,
            "bytes of the budget": state.prefetch.budget.bytes_used,
            "stagings": state.stagings,
            "readings": state.readings,
        }
        for name, value in left.items():
            if value:
                self._findings.report("plan", f"{self.name}: at rest, {value} {name} are left")

    async def close(self) -> None:
        self.server.close()
        await self.storage.close()
        for executor in filter(None, (*self.executors, self.copier)):
            executor.close()
        self._arena.close()


def executor_idle(adapter: WatchedAdapter) -> bool:
    """No blocking work of this adapter is under way (deletes have no task of their own)."""
    return not getattr(adapter.inner, "work_inflight", 0)

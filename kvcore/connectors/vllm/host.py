"""The cache inside an engine's process: storage, server and connector core on one loop. Nothing here knows vLLM.

Theory of operation
-------------------
vLLM makes two connector objects, one per role, in the process of the engine, and calls them from its own thread. The
cache is ordinary asyncio code, so it has a loop of its own, and the two meet at one point, `Runner.call`: hand a
coroutine to the loop, and wait for what comes of it.

    CacheHost      what outlives an engine: L1, adapters, `Storage`, `CacheServer`, the in-memory transport
    EngineSide     what belongs to one engine: connection, both clients, scheduler and worker connector, copy engine

A host is given its ports, so the same object runs on a thread (`ThreadPorts`) and on a simulated loop, where one seed
decides every order.

Who holds: a host holds memory and server until `close`; a side holds its connection until `leave`, which ends its
sessions at the server. Who announces: the caller. Who frees: `leave` and `close`, in this order.

Rejected: a loop that is stepped from vLLM's calls (between two steps nothing would move, and a load would last as many
steps as it has messages); calling the connector core from vLLM's thread under a lock (its timers and callbacks run on
the loop, which then would need the lock as well).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from kvcore.admission import Limits
from kvcore.connectors.pages import TensorPages
from kvcore.connectors.registration import layout_name
from kvcore.connectors.scheduler import SchedulerConnector
from kvcore.connectors.vllm.halves import PageMover, scheduler_half, worker_half
from kvcore.connectors.vllm.hashes import BlockHasher
from kvcore.connectors.vllm.moving import Moving, choose
from kvcore.connectors.vllm.store_notes import NotedStores
from kvcore.connectors.worker import WorkerConnector
from kvcore.device.cuda_runtime import TorchCudaRuntime
from kvcore.errors import ConfigError
from kvcore.eviction import EvictionPolicy, LruPolicy, S3FifoPolicy
from kvcore.groups import CacheLayout
from kvcore.keys import Namespace
from kvcore.l1 import L1Cache
from kvcore.l2.adapter import L2Adapter
from kvcore.l2.open import open_adapter
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.ports import Clock, Executor, Notice
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.loop_thread import LoopThread
from kvcore.runtime.notice import EventfdNotice
from kvcore.service.client import Connection, Region, SchedulerClient, WorkerClient, identity_of
from kvcore.service.local import LocalServerTransport
from kvcore.service.server import CacheServer, ServerStatistics
from kvcore.storage import Storage, StorageConfig, StorageStatistics

T = TypeVar("T")

_IO_THREADS = 4
_STOP_TIMEOUT_S = 10.0
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "s3fifo": S3FifoPolicy}


class Runner(Protocol):
    """Runs coroutines on the cache's loop for callers outside of it."""

    def call(self, work: Coroutine[Any, Any, T]) -> T: ...

    def call_now(self, work: Coroutine[Any, Any, T]) -> T:
        """As `call`, for work that never waits."""
        ...


class HostPorts(Protocol):
    """The outside of a host. What `moving` gives belongs to one engine, all else to the host; used on the loop only."""

    clock: Clock

    def executor(self) -> Executor: ...

    def notice(self) -> Notice: ...

    def moving(self, pages: TensorPages, cell_bytes: int, runtime: TorchCudaRuntime | None) -> Moving:
        """See `moving.choose`."""
        ...


class ThreadPorts:
    """Real threads, the real clock. Made on the loop."""

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self._loop = asyncio.get_running_loop()

    def executor(self) -> Executor:
        return ThreadExecutor(self._loop, _IO_THREADS)

    def notice(self) -> Notice:
        return EventfdNotice(self._loop)

    def moving(self, pages: TensorPages, cell_bytes: int, runtime: TorchCudaRuntime | None) -> Moving:
        return choose(self._loop, pages, cell_bytes, runtime)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """`l2`: URLs of stores that outlive the process, in order of preference. `policy`: one of `POLICIES`."""

    layout: CacheLayout
    namespace: Namespace
    l1_bytes: int
    l2: tuple[str, ...] = field(default=(), repr=False)  # may hold passwords
    policy: str = "lru"

    def __post_init__(self) -> None:
        chunk = max(self.layout.cell_bytes(group) for group in range(len(self.layout.groups)))
        if self.l1_bytes < chunk:
            raise ConfigError(f"l1_bytes = {self.l1_bytes} does not hold one chunk of {chunk} bytes")
        if self.l2:
            self.namespace.check_persistent()


@dataclass(frozen=True, slots=True)
class HostStatistics:
    storage: StorageStatistics
    server: ServerStatistics


class CacheHost:
    """See the module text. Built, used and closed on its loop."""

    def __init__(self, config: HostConfig, ports: HostPorts) -> None:
        self.config = config
        self._ports = ports
        self._placement = Placement()
        self._identity = identity_of(config.namespace, config.layout, self._placement)
        self._executor = ports.executor()
        self._arena = PlainArena(config.l1_bytes)
        self.l1 = L1Cache(self._arena, POLICIES[config.policy])
        self.storage = Storage(
            layout=config.layout,
            model_name=config.namespace.model_name,
            l1=self.l1,
            adapters=self._open_adapters(),
            clock=ports.clock,
            config=StorageConfig(prefetch_budget_bytes=config.l1_bytes, retain=True),
        )
        self.server = CacheServer(
            self.storage,
            layout=config.layout,
            model_name=config.namespace.model_name,
            identity=self._identity,
            placement=self._placement,
            clock=ports.clock,
        )
        self._transport = LocalServerTransport(asyncio.get_running_loop())
        self.server.attach(self._transport)
        self._sides = 0
        self._pinned: TorchCudaRuntime | None = None  # whoever has locked the arena's memory, until `close`

    def _open_adapters(self) -> Sequence[L2Adapter]:
        ports = self._ports
        return [
            open_adapter(
                url,
                executor=self._executor,
                notice_factory=ports.notice,
                clock=ports.clock,
                region=self._arena.buffer,
            )
            for url in self.config.l2
        ]

    def join(
        self,
        hasher: BlockHasher,
        *,
        load_async: bool,
        load_failures_max: int = 2,
        limits: Limits | None = None,
        noted: bool = False,
    ) -> EngineSide:
        """Both halves for one engine, whose keys `hasher` makes.

        `limits`: of an admission that loads what pays. `noted`: somebody wants to hear of its stores.
        """
        assert hasher.namespace == self.config.namespace, "an engine of another cache"
        self._sides += 1
        name = f"engine{self._sides}"
        config, clock = self.config, self._ports.clock
        connection = Connection(self._transport.connect(), self._identity, clock)
        scheduler_client = SchedulerClient([connection], self._placement, config.layout, clock)
        region = Region(self._arena)
        worker_client = WorkerClient([connection], self._placement, config.layout, 0, name, lambda _: region)
        scheduler = scheduler_half(
            config.layout,
            hasher,
            scheduler_client,
            clock,
            limits,
            load_async=load_async,
            load_failures_max=load_failures_max,
            session_prefix=f"{name}/",
        )
        worker, notes = worker_half(config.layout, 0, worker_client, clock, limits, noted=noted)
        return EngineSide(
            connection, scheduler_client, worker_client, scheduler, worker, hasher, clock, self._moving, notes
        )

    def _moving(self, pages: TensorPages, runtime: TorchCudaRuntime | None) -> Moving:
        if runtime is not None and self._pinned is None:
            runtime.pin(self._arena.buffer)
            self._pinned = runtime
        return self._ports.moving(pages, smallest_cell_bytes(self.config.layout), runtime)

    def statistics(self) -> HostStatistics:
        return HostStatistics(self.storage.statistics(), self.server.statistics())

    async def close(self) -> None:
        self.server.close()
        self._transport.close()
        try:
            await self.storage.close()
        finally:
            self._executor.close()
            if self._pinned is not None:
                self._pinned.unpin(self._arena.buffer)
            self._arena.close()


@dataclass(slots=True)
class EngineSide:
    """What one engine holds of a host. `leave` once, on the loop, when no step runs any more."""

    connection: Connection
    scheduler_client: SchedulerClient
    worker_client: WorkerClient
    scheduler: SchedulerConnector
    worker: WorkerConnector
    hasher: BlockHasher
    clock: Clock
    choose: Callable[[TensorPages, TorchCudaRuntime | None], Moving]
    noted: NotedStores | None = None
    mover: PageMover = field(default_factory=PageMover)

    def moving(self, pages: TensorPages, runtime: TorchCudaRuntime | None) -> Moving:
        """Who moves the pages of its worker."""
        return self.mover.take(self.choose(pages, runtime))

    @property
    def quiet(self) -> bool:
        """No job and no message of this engine is under way."""
        state = self.connection.statistics()
        return self.worker.idle and not (state.outstanding or state.waiting or state.debts)

    async def leave(self) -> None:
        self.scheduler_client.close()
        self.worker_client.close()
        self.connection.close()
        self.mover.close()


class LocalHost:
    """A host on a thread of its own, for as long as at least one engine uses it."""

    def __init__(self, config: HostConfig) -> None:
        self._thread = LoopThread("kvcore-host")
        self.runner: Runner = self._thread
        try:
            self.host = self._thread.call(_open(config, ThreadPorts))
        except BaseException:
            self._thread.stop(_STOP_TIMEOUT_S)
            raise

    def close(self) -> None:
        try:
            self._thread.call(self.host.close())
        finally:
            self._thread.stop(_STOP_TIMEOUT_S)


async def _open(config: HostConfig, ports: Callable[[], HostPorts]) -> CacheHost:
    return CacheHost(config, ports())


def smallest_cell_bytes(layout: CacheLayout) -> int:
    return min(layout.cell_bytes(group) for group in range(len(layout.groups)))


def engine_namespace(
    layout: CacheLayout,
    *,
    model_name: str,
    revision: str,
    quantisation: str,
    kv_dtype: str,
    algorithm: str,
    seed: str,
    kv_fingerprints: Sequence[str],
) -> Namespace:
    """The namespace of keys that are made from an engine's own block hashes.

    `kv_fingerprints`: per group what the bytes of a chunk are (`kvcore.device.fingerprint`).
    """
    named = Namespace(
        model_name=model_name,
        model_revision=revision,
        quantisation=quantisation,
        kv_dtype=kv_dtype,
        chunk_tokens=layout.chunk_tokens,
        hash_mode="engine",
        engine_algorithm=algorithm,
        engine_seed=seed,
    )
    return replace(named, layout=layout_name(layout, kv_fingerprints))

"""Which cache an engine's connector talks to: one inside the process, or running servers.

Theory of operation
-------------------
vLLM constructs one object per role and gives them nothing in common but the configuration.

    in the process   both roles share one host and one `EngineSide`. They find each other through `SharedHost`: the
                     caller's own, or one in `_HOSTS` under the configuration's engine id. That table is the one piece
                     of module state of kvcore; an entry lives as long as a connector that uses it.
    servers          each role has a loop, a link and one half of its own: roles may live in different processes.

A role in another process than its partner would have a cache of its own that nobody fills; `check_process` refuses
that, because the first plan that arrives carries the process that made it.

Each role shakes hands with its servers when it attaches. A server that refuses - other chunks, another model - would
answer no question ever, and all that anybody saw would be misses: the engine is stopped with the server's words. One
that does not answer may come later, as one that has gone may come back.

Who holds: `Attached`, from `attach` until `leave`. Who frees: `leave`, once; the last role ends a host of the table.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvcore.admission import Limits
from kvcore.connectors.pages import TensorPages
from kvcore.connectors.scheduler import SchedulerConnector
from kvcore.connectors.vllm.halves import PageMover, scheduler_half, worker_half
from kvcore.connectors.vllm.hashes import BlockHasher
from kvcore.connectors.vllm.host import (
    CacheHost,
    EngineSide,
    HostConfig,
    LocalHost,
    Runner,
    smallest_cell_bytes,
)
from kvcore.connectors.vllm.moving import Moving, choose
from kvcore.connectors.vllm.settings import Settings
from kvcore.connectors.vllm.store_notes import NotedStores
from kvcore.connectors.worker import WorkerConnector
from kvcore.device.cuda_runtime import TorchCudaRuntime
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout
from kvcore.keys import Namespace
from kvcore.ports import Clock
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.loop_thread import LoopThread
from kvcore.service import protocol as wire
from kvcore.service.client import ConnectionState
from kvcore.service.remote import RemoteConfig, ServerLink

LOAD_FAILURES_MAX = 1
"""A request whose load failed is computed. In vLLM 0.32.0 a failed asynchronous load keeps its reservation of blocks:
a second attempt may wait for room that it holds itself, for ever (docs/findings)."""
_STOP_TIMEOUT_S = 10.0
_NAME_BYTES = 8
_log = logging.getLogger("kvcore.vllm")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What of the engine decides how its halves are built."""

    engine_id: str
    layout: CacheLayout
    namespace: Namespace
    hasher: BlockHasher
    load_async: bool
    limits: Limits | None = None
    noted: bool = False  # somebody wants to hear of its stores


class Side(Protocol):
    """The halves of one engine, or one of them. Used on the loop of its runner."""

    @property
    def scheduler(self) -> SchedulerConnector | None: ...

    @property
    def worker(self) -> WorkerConnector | None: ...

    @property
    def hasher(self) -> BlockHasher: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def noted(self) -> NotedStores | None: ...

    def moving(self, pages: TensorPages, runtime: TorchCudaRuntime | None) -> Moving:
        """Of a worker, at registration: who moves its pages, until `leave` or another registration."""
        ...


@dataclass(frozen=True, slots=True)
class Attached:
    """What one role holds. `host`: of a cache in the process."""

    runner: Runner
    side: Side
    leave: Callable[[], None]
    host: CacheHost | None = None


class SharedHost:
    """A host and the way onto its loop, for the connectors of one or several engines in this process.

    `enter` makes the halves of an engine when its first role asks, and `leave` ends them when the last one leaves.
    """

    def __init__(self, runner: Runner, host: CacheHost, on_empty: Callable[[], None] | None = None) -> None:
        self.runner = runner
        self.host = host
        self._on_empty = on_empty
        self._sides: dict[str, tuple[EngineSide, int]] = {}

    def enter(self, engine: EngineConfig) -> EngineSide:
        side, users = self._sides.get(engine.engine_id, (None, 0))
        if side is None:
            side = self.runner.call(_join(self.host, engine))
        self._sides[engine.engine_id] = (side, users + 1)
        return side

    def side(self, engine_id: str) -> EngineSide:
        """The halves of an engine that has not left, to look at."""
        return self._sides[engine_id][0]

    def leave(self, engine_id: str) -> None:
        side, users = self._sides[engine_id]
        if users > 1:
            self._sides[engine_id] = (side, users - 1)
            return
        del self._sides[engine_id]
        self.runner.call(side.leave())
        if not self._sides and self._on_empty is not None:
            self._on_empty()


async def _join(host: CacheHost, engine: EngineConfig) -> EngineSide:
    return host.join(
        engine.hasher,
        load_async=engine.load_async,
        load_failures_max=LOAD_FAILURES_MAX,
        limits=engine.limits,
        noted=engine.noted,
    )


_HOSTS: dict[str, SharedHost] = {}


def _host_for(engine_id: str, config: HostConfig) -> SharedHost:
    if engine_id not in _HOSTS:
        local = LocalHost(config)

        def end() -> None:
            del _HOSTS[engine_id]
            local.close()

        _HOSTS[engine_id] = SharedHost(local.runner, local.host, end)
    return _HOSTS[engine_id]


@dataclass(slots=True)
class RemoteSide:
    """One half, in front of running servers."""

    link: ServerLink
    layout: CacheLayout
    hasher: BlockHasher
    scheduler: SchedulerConnector | None = None
    worker: WorkerConnector | None = None
    mover: PageMover = field(default_factory=PageMover)
    clock: Clock = field(default_factory=SystemClock)
    noted: NotedStores | None = None

    def moving(self, pages: TensorPages, runtime: TorchCudaRuntime | None) -> Moving:
        return self.mover.take(choose(asyncio.get_running_loop(), pages, smallest_cell_bytes(self.layout), runtime))

    async def leave(self) -> None:
        self.link.close()
        self.mover.close()


async def _link(engine: EngineConfig, settings: Settings, rank: int | None) -> RemoteSide:
    """The scheduler's half for rank None, else a worker's."""
    loop = asyncio.get_running_loop()
    config = RemoteConfig(settings.servers, settings.placement if len(settings.servers) > 1 else "rank")
    side = RemoteSide(ServerLink(loop, config, engine.namespace, engine.layout), engine.layout, engine.hasher)
    if rank is None:
        side.scheduler = scheduler_half(
            engine.layout,
            engine.hasher,
            side.link.scheduler(),
            side.clock,
            engine.limits,
            load_async=engine.load_async,
            load_failures_max=LOAD_FAILURES_MAX,
            session_prefix=f"{side.clock.token(_NAME_BYTES)}/",  # the servers may have other engines, with equal ids
        )
    else:
        side.worker, side.noted = worker_half(
            engine.layout, rank, side.link.worker(rank), side.clock, engine.limits, noted=engine.noted
        )
    try:
        await _greet(side.link, settings.servers)
    except BaseException:
        await side.leave()
        raise
    return side


async def _greet(link: ServerLink, addresses: tuple[str, ...]) -> None:
    """Shake hands with every server. Raises `ConfigError` for one that refuses this engine."""
    await asyncio.gather(*(connection.call(wire.Status()) for connection in link.connections))
    for connection, address in zip(link.connections, addresses, strict=True):
        if connection.state is ConnectionState.REFUSED:
            raise ConfigError(f"the server at {address} refuses this engine: {connection.refusal}")
        if connection.state is not ConnectionState.READY:
            _log.warning("no kvcore server answers at %s; everything is computed until one does", address)


def attach(engine: EngineConfig, settings: Settings, rank: int | None) -> Attached:
    """The halves for the role of a worker of this rank, or of the scheduler (None)."""
    if settings.servers:
        return _attach_remote(engine, settings, rank)
    config = HostConfig(engine.layout, engine.namespace, settings.l1_bytes, settings.l2, settings.policy)
    shared: SharedHost = settings.host or _host_for(engine.engine_id, config)
    side = shared.enter(engine)
    return Attached(shared.runner, side, lambda: shared.leave(engine.engine_id), shared.host)


def _attach_remote(engine: EngineConfig, settings: Settings, rank: int | None) -> Attached:
    thread = LoopThread("kvcore-link")
    try:
        side = thread.call(_link(engine, settings, rank))
    except BaseException:
        thread.stop(_STOP_TIMEOUT_S)
        raise

    def leave() -> None:
        try:
            thread.call(side.leave())
        finally:
            thread.stop(_STOP_TIMEOUT_S)

    return Attached(thread, side, leave)


def check_process(planned_by: int) -> None:
    """Raises ConfigError when scheduler and worker, which share a cache in their process, have not the same one."""
    if planned_by != os.getpid():
        raise ConfigError(
            "scheduler and worker are in different processes, so a cache inside one of them is never filled. Start "
            "`kvcore serve` and name it in kv_connector_extra_config (servers), or run both in one process "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=0, one worker)"
        )

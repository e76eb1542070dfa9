"""`ServerHost`: a whole cache server, put together from its configuration on the running loop, and taken down again.

Theory of operation
-------------------
`start` builds in an order in which every step can still be refused without leaving anything behind:

    spans -> keys -> address (two servers on one address end here) -> stale segments of dead servers removed
    -> shared memory -> L2 stores -> front

and on a failure takes down what it has made, last first. L2 URLs are checked for what can be known at once; a store
that does not answer is used when it comes (`kvcore.l2.late`). Opening happens in threads, and `start` waits for it for
a few seconds at most. The front answers from then on; the first engine's HELLO makes `Storage` and `CacheServer` for
its model.

`close` is bounded by `shutdown_ns`: no new requests, then the write-back gets the time that is left, then everything is
dropped. Workers that still map the shared memory keep their mapping; the name is gone.

Who holds: the host everything it made. Who announces: `address` is valid when `start` has returned. Who frees: `close`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvcore.errors import CallerError, ConfigError
from kvcore.eviction import LruPolicy, S3FifoPolicy
from kvcore.l1 import L1Cache
from kvcore.l2.guards import GuardStatistics
from kvcore.l2.late import LateAdapter
from kvcore.l2.open import StoreSpec, parse_store
from kvcore.l2.statistics import L2Statistics
from kvcore.l2.wrapped import CountingAdapter
from kvcore.l2.wrapped_backend import AnyBackend
from kvcore.operations.spans import open_spans
from kvcore.ports import Notice, NullTracer, Tracer
from kvcore.quota import Quota
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.deaths import DeathWatch, this_process
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice
from kvcore.runtime.populate import Populating
from kvcore.runtime.shared_memory import SharedArena, remove_stale
from kvcore.runtime.worker_pages import OpenedPages
from kvcore.service.curve import CurveServer
from kvcore.service.front import ServerFront
from kvcore.service.identity import layout_of, placement_of
from kvcore.service.page_desk import PageAccess
from kvcore.service.protocol import Identity
from kvcore.service.serve_config import ServeConfig, default_directory
from kvcore.service.server import CacheServer, ServerStatistics
from kvcore.service.zmq_transport import ZmqServerTransport
from kvcore.storage import Storage, StorageStatistics

_IO_THREADS_PER_STORE = 4
_COPY_THREADS = 2
_LOOKS_EVERY_S = 0.001
_STORES_S = 3.0  # for all stores together, before the server answers without those that have not come
_NS_PER_S = 1_000_000_000
_log = logging.getLogger("kvcore.server")


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """`storage` and `server` are None until an engine has come. `stores_away`: configured, and never there yet.

    `adapters` and `guards`: what each store that is there, and what stands around it, has counted.
    """

    address: str
    l1_bytes: int
    stores: tuple[str, ...]
    stores_away: tuple[str, ...]
    adapters: dict[str, L2Statistics]
    guards: dict[str, GuardStatistics]
    waiting: dict[str, int]
    server: ServerStatistics | None
    storage: StorageStatistics | None


class ServerHost:
    """See the module text. One per process is usual; two do not get in each other's way."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.address = ""
        self._exit = AsyncExitStack()
        self._clock = SystemClock()
        self._adapters: list[LateAdapter] = []
        self._front: ServerFront | None = None
        self._storage: Storage | None = None
        self._tracer: Tracer = NullTracer()
        self._closed = False

    async def start(self) -> None:
        """Raises `ConfigError` when it cannot work; nothing is left behind then."""
        if self._front is not None:
            raise CallerError("this host has been started already")
        try:
            self._start()
            await self._first_attempts()
        except BaseException:
            await self._exit.aclose()
            raise

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        specs = [parse_store(url) for url in self.config.l2]
        if self.config.log.otlp_endpoint:
            export = open_spans(loop, self.config.log.otlp_endpoint)
            self._exit.push_async_callback(export.close)
            self._tracer = export.tracer
        transport = self._listen(loop)
        for segment in remove_stale():
            _log.info("removed shared memory %s of a server that died", segment)
        self._deaths = DeathWatch(loop)
        self._exit.callback(self._deaths.close)
        self._arena = SharedArena(self.config.l1.capacity_bytes)
        self._exit.callback(self._arena.close)
        self._exit.callback(Populating(self._arena.buffer).stop)
        # Threads of its own: an L2 that stands still must not hold up a worker's fence.
        self._copier = ThreadExecutor(loop, _COPY_THREADS, "kvcore-copy")
        self._exit.callback(self._copier.close)
        self._adapters = [self._open(loop, position, spec) for position, spec in enumerate(specs)]
        self._front = ServerFront(
            self._build,
            chunk_tokens=self.config.chunk_tokens,
            l1_bytes=self.config.l1.capacity_bytes,
            incarnation=1 + (int(self._clock.token(8), 16) >> 1),
            offered=("worker", "server") if self.config.transfer == "both" else ("worker",),
        )
        self._front.attach(transport)
        self._exit.push_async_callback(self._close_service)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> ZmqServerTransport:
        config = self.config
        curve = None
        if config.curve.secret_file:
            curve = CurveServer.load(Path(config.curve.secret_file), Path(config.curve.clients_directory))
        if config.address.startswith("ipc://"):
            _private_directory(Path(config.address.removeprefix("ipc://")).parent)
        transport = ZmqServerTransport(loop, config.address, curve=curve)
        self._exit.callback(transport.close)
        self.address = transport.address
        return transport

    def _open(self, loop: asyncio.AbstractEventLoop, position: int, spec: StoreSpec) -> LateAdapter:
        executor = ThreadExecutor(loop, _IO_THREADS_PER_STORE, f"kvcore-l2-{position}")
        self._exit.callback(executor.close)
        name = spec.common.name or f"{position}.{spec.scheme}"

        def notice() -> Notice:
            return EventfdNotice(loop)

        def build(backend: AnyBackend) -> CountingAdapter:
            return spec.build(backend, executor=executor, notice_factory=notice, clock=self._clock, name=name)

        def prepare() -> AnyBackend:
            return spec.open_backend(self._arena.buffer)  # asked for late: a view kept here would keep it mapped

        return LateAdapter(name, spec.shown, executor, prepare, build, notice)

    async def _first_attempts(self) -> None:
        """Usually the stores are there when the server is. One that takes longer is used when it comes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STORES_S):
                for adapter in self._adapters:
                    await adapter.first_attempt()

    # -- the first engine

    def _build(self, identity: Identity, index: int) -> CacheServer:
        config = self.config
        layout = layout_of(identity)
        placement = placement_of(identity)
        quota = Quota(default_bytes=config.l1.tenant_bytes) if config.l1.tenant_bytes is not None else None
        policy = S3FifoPolicy if config.l1.policy == "s3fifo" else LruPolicy
        storage = Storage(
            layout=layout,
            model_name=identity.model_name,
            l1=L1Cache(self._arena, policy, quota),
            adapters=self._adapters,
            clock=self._clock,
            config=replace(config.storage, prefetch_budget_bytes=self._prefetch_budget()),
            tracer=self._tracer,
        )
        server = CacheServer(
            storage,
            layout=layout,
            model_name=identity.model_name,
            identity=identity,
            placement=placement,
            clock=self._clock,
            index=index,
            config=replace(config.server, segment=self._arena.segment),
            limits=config.limits,
            deaths=self._deaths,
            process=this_process(),
            pages=PageAccess(OpenedPages, self._arena.view, self._copier) if config.transfer == "both" else None,
        )
        self._storage = storage
        _log.info("serving %s in chunks of %d tokens, %d ranks", identity.model_name, layout.chunk_tokens, layout.ranks)
        return server

    def _prefetch_budget(self) -> int:
        """Never more than half of L1: the rest is for what engines store meanwhile."""
        return min(self.config.storage.prefetch_budget_bytes, self.config.l1.capacity_bytes // 2)

    # -- the end

    async def close(self) -> None:
        """End within `shutdown_ns`, whatever is outstanding. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        await self._exit.aclose()

    async def _close_service(self) -> None:
        assert self._front is not None
        self._front.close()
        await self._copies_ended()
        if self._storage is None:
            for adapter in self._adapters:
                adapter.close()
            return
        try:
            async with asyncio.timeout(self.config.shutdown_ns / _NS_PER_S):
                await self._storage.close()
        except TimeoutError:
            _log.warning("shutdown took longer than %d ns; what was not written to L2 is lost", self.config.shutdown_ns)

    async def _copies_ended(self) -> None:
        """Pieces of copies that threads have begun: a millisecond, as long as memory answers.

        The address stays ours until then, so that another life of the server means that nothing of this one copies.
        """
        deadline_ns = self._clock.now_ns() + self.config.shutdown_ns
        while self.server is not None and self.server.copying and self._clock.now_ns() < deadline_ns:
            await asyncio.sleep(_LOOKS_EVERY_S)

    # -- looking at it

    @property
    def server(self) -> CacheServer | None:
        """The server of the adopted model; None while the first engine is awaited."""
        return self._front.server if self._front is not None else None

    def statistics(self) -> HostStatistics:
        known = {adapter.name: adapter.statistics() for adapter in self._adapters}
        return HostStatistics(
            address=self.address,
            l1_bytes=self.config.l1.capacity_bytes,
            stores=tuple(adapter.name for adapter in self._adapters),
            stores_away=tuple(name for name, found in known.items() if found is None),
            adapters={name: found for name, found in known.items() if found is not None},
            guards={adapter.name: found for adapter in self._adapters if (found := adapter.guards()) is not None},
            waiting=self._front.counters() if self._front is not None else {},
            server=self.server.statistics() if self.server is not None else None,
            storage=self._storage.statistics() if self._storage is not None else None,
        )


def _private_directory(path: Path) -> None:
    """Make the socket's directory private; refuse one in which others could put a socket of theirs."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    sticky = bool(status.st_mode & stat.S_ISVTX)
    if status.st_mode & 0o022 and not sticky:
        raise ConfigError(f"{path} can be written by others; choose a private directory, such as {default_directory()}")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{path} belongs to another user; choose a directory of your own")

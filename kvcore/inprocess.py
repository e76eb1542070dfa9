"""`Cache`: a KV cache inside one process, with synchronous calls. The shortest way to use kvcore.

    from kvcore import Cache

    with Cache.open(namespace="my-model", chunk_tokens=256, chunk_bytes=1 << 20, l1_bytes=1 << 30,
                    l2="file:///var/cache/kv") as cache:
        cache.store(tokens, chunks)          # chunks[i]: the bytes of tokens [256 i, 256 (i + 1))
        matched = cache.lookup(tokens)       # how many tokens, from the first one on, the cache has
        chunks = cache.retrieve(tokens)      # their bytes

Theory of operation
-------------------
There is no second implementation here. A private loop in its own thread runs the same `Storage` and `CacheServer` as a
separate server, with the same two clients, over the in-memory transport; the methods of `Cache` hand a coroutine to
that loop and wait for it.

1. One object group (full attention), one rank: one chunk is one object of `chunk_bytes`.
2. `store` reserves staging, copies, commits; the write-back to L2 follows by itself. `flush` waits for it.
3. `lookup` and `retrieve` open a session, let the server plan where each chunk comes from (L1, else L2), and end the
   session on every path. `retrieve` copies under I/O holds and checks after the copy that they held; the answer ends at
   the first chunk whose bytes are not certain. What is loaded from L2 stays in L1 as an ordinary, evictable object.
4. A lookup that L2 does not answer within `timeout_s` is answered with what L1 has.
5. `close` is bounded in time: it waits for the write-back at most `timeout_s`, then ends everything. What was not
   written by then is lost from L2, never half visible.

Any thread may call; calls of several threads run at the same time.

Who holds: the loop thread owns every object; between a call's start and end its session or tag holds memory, in L1's
books. Who announces: the coroutine's end. Who frees: the coroutine's `finally`, on every path; `close` the rest.

Rejected: calling `Storage` directly from here (a second data path would need a second proof); one loop per call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from kvcore.answers import Answer
from kvcore.errors import CallerError, ConfigError
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.l1 import L1Cache
from kvcore.l2.adapter import L2Adapter
from kvcore.l2.open import open_adapter
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.loop_thread import LoopThread
from kvcore.runtime.notice import EventfdNotice
from kvcore.service.client import (
    Connection,
    Grant,
    LoadCell,
    Region,
    SchedulerClient,
    SchedulerConfig,
    StoreCell,
    WorkerClient,
    identity_of,
)
from kvcore.service.local import LocalServerTransport
from kvcore.service.server import CacheServer, ServerStatistics
from kvcore.storage import Storage, StorageConfig, StorageStatistics

Buffer = Any  # anything `memoryview` takes: bytes, bytearray, a contiguous numpy array

_NS_PER_S = 1_000_000_000
_IO_THREADS = 4
_BATCH_BYTES = 64 << 20  # what one call holds in L1 at a time, beside the leases of a lookup


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    storage: StorageStatistics
    server: ServerStatistics


@dataclass(frozen=True, slots=True)
class _Options:
    namespace: Namespace
    layout: CacheLayout
    chunk_bytes: int
    l1_bytes: int
    l2: str | None = field(repr=False)  # may hold a password
    timeout_s: float

    @property
    def batch_chunks(self) -> int:
        return max(1, min(_BATCH_BYTES, self.l1_bytes // 2) // self.chunk_bytes)


class Cache:
    """See the module text. Made by `Cache.open`, usable as a context manager."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._thread = LoopThread("kvcore-cache")
        self._closed = False
        try:
            self._inner = self._thread.call(_open(options))
        except BaseException:
            self._closed = True
            self._thread.stop(options.timeout_s)
            raise

    @classmethod
    def open(
        cls,
        *,
        namespace: Namespace | str,
        chunk_bytes: int,
        l1_bytes: int,
        chunk_tokens: int | None = None,
        l2: str | None = None,
        timeout_s: float = 10.0,
    ) -> Cache:
        """Open a cache of chunks of `chunk_bytes` each.

        `namespace`: a model name, or everything that changes the stored bytes (`kvcore.Namespace`). `chunk_tokens`:
        default is the namespace's (256). `l1_bytes`: host memory. `l2`: the URL of a store that outlives this object.
        Raises ConfigError when it cannot work, before anything is written.
        """
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, not {timeout_s}")
        chosen = namespace if isinstance(namespace, Namespace) else Namespace(model_name=namespace)
        tokens = chosen.chunk_tokens if chunk_tokens is None else chunk_tokens
        group = ObjectGroup(kind=GroupKind.FULL, block_tokens=tokens, bytes_per_block=chunk_bytes)
        layout = CacheLayout(groups=(group,), ranks=1, chunk_tokens=tokens)
        chosen = replace(chosen, chunk_tokens=tokens, layout=chosen.layout or layout.fingerprint)
        if l2 is not None:
            chosen.check_persistent()
        if l1_bytes < 2 * chunk_bytes:
            raise ConfigError(f"l1_bytes = {l1_bytes} does not hold two chunks of {chunk_bytes} bytes")
        return cls(_Options(chosen, layout, chunk_bytes, l1_bytes, l2, timeout_s))

    def store(self, tokens: Sequence[int], chunks: Sequence[Buffer]) -> int:
        """Store the full chunks of `tokens`: chunks[i] holds the bytes of chunk i. How many were not there before.

        A trailing partial chunk of tokens has no bytes. Chunks that find no room are left out.
        """
        self._check_open()
        return self._thread.call(self._inner.store(tokens, [memoryview(chunk).cast("B") for chunk in chunks]))

    def lookup(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens the cache can supply; a multiple of the chunk size."""
        self._check_open()
        return self._thread.call(self._inner.lookup(tokens))

    def retrieve(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes of the longest cached prefix, one object per chunk."""
        self._check_open()
        return self._thread.call(self._inner.retrieve(tokens))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until L2 has what was stored. False: not within the time (default: the cache's own)."""
        self._check_open()
        return self._thread.call(self._inner.flush(self._options.timeout_s if timeout_s is None else timeout_s))

    def drop_l1(self) -> int:
        """Forget what is in host memory and not in use; how many chunks. L2 keeps its copies."""
        self._check_open()
        return self._thread.call(self._inner.drop_l1())

    def statistics(self) -> CacheStatistics:
        self._check_open()
        return self._thread.call(self._inner.statistics())

    def close(self) -> None:
        """Write back what can be written within the time-out, then end everything. A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._thread.call(self._inner.close())
        finally:
            self._thread.stop(self._options.timeout_s)

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CallerError("this cache was closed")


async def _open(options: _Options) -> _Inner:
    return _Inner(options)


class _Inner:
    """The cache on its loop: storage, server, transport and both clients."""

    def __init__(self, options: _Options) -> None:
        loop = asyncio.get_running_loop()
        self._options = options
        self._clock = SystemClock()
        self._hasher = ChunkHasher(options.namespace)
        self._arena = PlainArena(options.l1_bytes)
        self._executor = ThreadExecutor(loop, _IO_THREADS)
        try:
            adapters = self._open_adapters(loop)
            self._build(loop, adapters)
        except BaseException:
            self._executor.close()
            raise
        self._sessions = 0
        self._stores = 0

    def _open_adapters(self, loop: asyncio.AbstractEventLoop) -> list[L2Adapter]:
        if self._options.l2 is None:
            return []
        adapter = open_adapter(
            self._options.l2,
            executor=self._executor,
            notice_factory=lambda: EventfdNotice(loop),
            clock=self._clock,
            region=self._arena.buffer,
        )
        return [adapter]

    def _build(self, loop: asyncio.AbstractEventLoop, adapters: Sequence[L2Adapter]) -> None:
        options, clock, layout = self._options, self._clock, self._options.layout
        placement = Placement()
        identity = identity_of(options.namespace, layout, placement)
        timeout_ns = int(options.timeout_s * _NS_PER_S)
        self._storage = Storage(
            layout=layout,
            model_name=options.namespace.model_name,
            l1=L1Cache(self._arena, LruPolicy),
            adapters=adapters,
            clock=clock,
            config=StorageConfig(prefetch_budget_bytes=options.l1_bytes, retain=True, close_deadline_ns=timeout_ns),
        )
        self._server = CacheServer(
            self._storage,
            layout=layout,
            model_name=options.namespace.model_name,
            identity=identity,
            placement=placement,
            clock=clock,
        )
        self._transport = LocalServerTransport(loop)
        self._server.attach(self._transport)
        self._connection = Connection(self._transport.connect(), identity, clock)
        config = SchedulerConfig(lookup_timeout_ns=timeout_ns + timeout_ns // 4, server_timeout_ns=timeout_ns)
        self._scheduler = SchedulerClient([self._connection], placement, layout, clock, config)
        region = Region(self._arena)
        self._worker = WorkerClient([self._connection], placement, layout, 0, "inprocess", lambda _: region)

    # --- operations ------------------------------------------------------------------------------------------------

    async def store(self, tokens: Sequence[int], chunks: Sequence[memoryview]) -> int:
        hashes = self._hasher.hash_tokens(tokens)
        if len(chunks) != len(hashes):
            raise CallerError(f"{len(tokens)} tokens have {len(hashes)} full chunks, but {len(chunks)} buffers came")
        for number, chunk in enumerate(chunks):
            if chunk.nbytes != self._options.chunk_bytes:
                raise CallerError(f"chunk {number} has {chunk.nbytes} bytes, not {self._options.chunk_bytes}")
        size = self._options.batch_chunks
        stored = 0
        for first in range(0, len(chunks), size):
            stored += await self._store_batch(hashes[first : first + size], chunks[first : first + size])
        return stored

    async def _store_batch(self, hashes: Sequence[bytes], chunks: Sequence[memoryview]) -> int:
        self._stores += 1
        tag = self._worker.tag(self._stores)
        try:
            grants = await self._worker.reserve_store(tag, [StoreCell(0, chunk_hash) for chunk_hash in hashes])
            for grant, chunk in zip(grants, chunks):
                if grant is not None:
                    grant.view[:] = chunk
            answers = await self._worker.commit_store(tag, [grant is not None for grant in grants])
        finally:
            self._worker.abort_store(tag)  # nothing, unless we were interrupted before the commit
        return sum(answer is Answer.PUBLISHED for answer in answers)

    async def lookup(self, tokens: Sequence[int]) -> int:
        async with self._looked_up(tokens) as found:
            return found.length * self._options.layout.chunk_tokens

    async def retrieve(self, tokens: Sequence[int]) -> list[bytes]:
        async with self._looked_up(tokens) as found:
            size = self._options.batch_chunks
            result: list[bytes] = []
            for first in range(0, found.length, size):
                part = await self._read(found, first, min(first + size, found.length))
                result += part
                if len(part) < min(size, found.length - first):
                    break
            return result

    async def _read(self, found: _Found, first: int, end: int) -> list[bytes]:
        """The chunks [first, end), up to the first one that is not certain."""
        cells = [LoadCell(0, index, found.hashes[index]) for index in range(first, end)]
        grants = await self._worker.open_read(found.session, found.generation, cells)
        held: list[bool] = []
        try:
            copies = [bytes(grant.view) if grant is not None else b"" for grant in grants]
        finally:
            held = await self._worker.close_read(found.session, found.generation, cells)
        return copies[: _certain(grants, held)]

    @asynccontextmanager
    async def _looked_up(self, tokens: Sequence[int]) -> AsyncIterator[_Found]:
        """A session with its answer, settled at the longest length; ended on every path."""
        hashes = self._hasher.hash_tokens(tokens)
        self._sessions += 1
        found = _Found(f"call{self._sessions}", self._sessions, hashes, 0)
        self._scheduler.start(found.session, found.generation, hashes, prompt_tokens=len(tokens))
        try:
            outcome = await self._scheduler.wait(found.session, found.generation)
            self._scheduler.settle(found.session, found.generation, outcome.best)
            yield replace(found, length=outcome.best)
        finally:
            self._scheduler.end(found.session)

    async def flush(self, timeout_s: float) -> bool:
        return await self._storage.drain(int(timeout_s * _NS_PER_S))

    async def drop_l1(self) -> int:
        return self._storage.drop_l1()

    async def statistics(self) -> CacheStatistics:
        return CacheStatistics(self._storage.statistics(), self._server.statistics())

    async def close(self) -> None:
        self._connection.close()
        self._server.close()
        self._transport.close()
        try:
            await self._storage.close()
        finally:
            self._executor.close()
            self._arena.close()


@dataclass(frozen=True, slots=True)
class _Found:
    session: str
    generation: int
    hashes: Sequence[bytes]
    length: int


def _certain(grants: Sequence[Grant | None], held: Sequence[bool]) -> int:
    """How many cells from the first on were granted, and protected until their copy had ended."""
    for index, (grant, fine) in enumerate(zip(grants, held)):
        if grant is None or not fine:
            return index
    return len(grants)

"""The worker side of a connector, engine-neutral: moves KV between the engine's pages and the cache.

Each plan becomes a *job*, one asyncio task. Jobs outlive the step that began them.

    store:  RESERVING --grants--> COPYING --copied--> COMMITTING --answers--> ended
                |  cancelled by a fence      |  cancelled before it began, or failed
                +------- abort --------------+
    load:   OPENING --grants--> COPYING --copied--> CLOSING --answers--> ended (good, or bad with its blocks)

A store reads engine blocks only while COPYING. Before any block allocated in a step may be written, `fence` finds the
store jobs that name such a block, by block id and not by request: a preempted request's blocks, a finished one's, and
blocks that left a window all come back the same way. A job that is still RESERVING is cancelled: it will never read,
never commit. A copy that has not begun is cancelled; one that has begun is waited for. There is no time-out after
which the step goes on: at the deadline the worker raises.

Order on the device: a store's copy waits for an event behind the forward pass that wrote the KV; a load's copy waits
for an event behind everything submitted before it (the last readers of the block, and its zeroing). A load counts only
when the copy has ended *and* the server still knew the lease and the slot; otherwise its blocks are reported.

Who holds: staging and leases are the server's under our worker id; engine blocks the engine's. Who announces done: the
copy ticket, then `finished` and `load_errors`. Who frees: `commit_store`/`abort_store` end staging, `close_read` ends
lease and hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

from kvcore.connectors.plan import CellBlocks, LoadPlan, StepMeta, StorePlan
from kvcore.connectors.views import NULL_BLOCK, Finished
from kvcore.errors import InternalError
from kvcore.groups import CacheLayout
from kvcore.ports import Copy, CopyEngine, CopyTicket, DeviceEvent
from kvcore.service.client import Grant, LoadCell, StoreCell, WorkerClient


@dataclass(frozen=True, slots=True)
class WorkerConnectorConfig:
    """`fence_timeout_s`: a copy that does not end in this time means a broken device; the worker stops."""

    fence_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class WorkerConnectorStatistics:
    stores: int
    stores_cancelled: int
    fences_waited: int
    loads: int
    loads_failed: int
    cells_stored: int
    cells_loaded: int
    bytes_stored: int
    bytes_loaded: int
    jobs_inflight: int


@unique
class _Stage(Enum):
    ASKING = "asking"  # the server has not answered; no engine block is touched
    COPYING = "copying"  # engine blocks are read (store) or written (load)
    CLOSING = "closing"  # the copy has ended; the server is being told
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class _StoreJob:
    plan: StorePlan
    tag: str
    after: DeviceEvent
    stage: _Stage = _Stage.ASKING
    cancelled: bool = False
    ticket: CopyTicket | None = None
    blocks: frozenset[int] = frozenset()
    unread: asyncio.Event = field(default_factory=asyncio.Event)

    def stop_reading(self, stage: _Stage) -> None:
        """From here on the job reads no engine block."""
        self.stage = stage
        self.unread.set()


@dataclass(slots=True, eq=False)
class _LoadJob:
    plan: LoadPlan
    after: DeviceEvent
    bad_blocks: frozenset[int] = frozenset()
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerConnector:
    """See the module text. Loop-confined; one per rank."""

    def __init__(
        self, layout: CacheLayout, rank: int, client: WorkerClient, config: WorkerConnectorConfig | None = None
    ) -> None:
        assert 0 <= rank < layout.ranks
        self._layout = layout
        self._rank = rank
        self._client = client
        self._config = config or WorkerConnectorConfig()
        self._pages: Sequence[Any] = ()
        self._device: CopyEngine | None = None
        self._parts: dict[tuple[int, int], memoryview] = {}
        self._meta: StepMeta | None = None
        self._stores: dict[str, _StoreJob] = {}
        self._sync_loads: list[_LoadJob] = []
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._awaiting_sent: dict[str, None] = {}
        self._received: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self._errors: dict[int, None] = {}
        self._jobs = 0
        self._crash: BaseException | None = None
        self._counts: dict[str, int] = dict.fromkeys(WorkerConnectorStatistics.__dataclass_fields__, 0)

    def register(self, pages: Sequence[Any], device: CopyEngine) -> None:
        """Take the engine's pages: `pages[g]` is [blocks, layers, block_tokens, width], each block contiguous."""
        for group, spec in enumerate(self._layout.groups):
            if pages[group][0].nbytes != spec.bytes_per_block:
                raise InternalError(
                    f"group {group}: the engine's block has {pages[group][0].nbytes} bytes, the layout says "
                    f"{spec.bytes_per_block}; build the layout from the engine's own pages"
                )
        self._pages, self._device, self._parts = pages, device, {}

    # ------------------------------------------------------------------ before the forward pass

    def fence(self, meta: StepMeta) -> Awaitable[None] | None:
        """End or cancel every store that reads a block allocated in this step."""
        self._raise_crash()
        self._meta = meta
        allocated = frozenset(meta.allocated)
        reading = [job for job in self._stores.values() if job.blocks & allocated and not job.unread.is_set()]
        for job in reading:
            self._cancel(job)
        waiting = [job for job in reading if not job.unread.is_set()]
        if not waiting:
            return None
        self._counts["fences_waited"] += len(waiting)
        return self._wait_unread(waiting)

    def _cancel(self, job: _StoreJob) -> None:
        assert not job.unread.is_set()
        if job.stage is _Stage.ASKING or (job.ticket is not None and job.ticket.cancel()):
            job.cancelled = True
            job.stop_reading(job.stage)
            self._counts["stores_cancelled"] += 1

    async def _wait_unread(self, jobs: Iterable[_StoreJob]) -> None:
        try:
            async with asyncio.timeout(self._config.fence_timeout_s):
                for job in jobs:
                    await job.unread.wait()
        except TimeoutError:
            raise InternalError(
                f"a store still reads engine blocks after {self._config.fence_timeout_s} s; "
                "the step must not overwrite them. The device or its driver has stopped; restart the worker"
            ) from None

    def start_load(self, meta: StepMeta) -> None:
        """Begin every load of this step."""
        assert self._meta is meta, "fence comes first"
        for plan in meta.loads:
            assert self._device is not None
            job = _LoadJob(plan, self._device.compute_event())
            if not plan.load_async:
                self._sync_loads.append(job)
            self._spawn(self._load(job), f"load:{plan.request_id}")

    def wait_load(self, layer: int) -> Awaitable[None] | None:
        """All layers of a cell arrive together, so every layer waits for the whole load."""
        assert layer >= 0
        pending = [job for job in self._sync_loads if not job.ended.is_set()]
        return self._wait_ended(pending) if pending else None

    async def _wait_ended(self, jobs: Iterable[_LoadJob]) -> None:
        for job in jobs:
            await job.ended.wait()
        self._raise_crash()

    # ------------------------------------------------------------------ after the forward pass

    def save(self, layer: int) -> None:
        """Stores begin when all layers are submitted (`wait_save`): a cell holds all layers of its group."""
        assert layer >= 0

    def wait_save(self) -> None:
        """Begin this step's stores, behind everything the step has submitted to the compute stream."""
        meta, self._meta = self._meta, None
        self._sync_loads = []
        assert meta is not None, "fence comes first"
        assert self._device is not None
        for request_id in meta.ended:
            self._awaiting_sent[request_id] = None
        for plan in meta.stores:
            self._jobs += 1
            job = _StoreJob(plan, self._client.tag(self._jobs), self._device.compute_event())
            job.blocks = frozenset(block for cell in plan.cells for block in cell.blocks)
            assert NULL_BLOCK not in job.blocks
            self._stores[job.tag] = job
            self._spawn(self._store(job), f"store:{plan.request_id}")

    def finished(self, request_ids: Sequence[str]) -> Finished:
        """What has completed since the last call. `request_ids` is not needed: the plan names who waits."""
        self._raise_crash()
        reading = {job.plan.request_id for job in self._stores.values() if not job.unread.is_set()}
        sent = frozenset(request for request in self._awaiting_sent if request not in reading)
        for request in sent:
            del self._awaiting_sent[request]
        result = Finished(sent, frozenset(self._received), frozenset(self._failed))
        self._received, self._failed = {}, {}
        return result

    def load_errors(self) -> frozenset[int]:
        """Blocks of failed loads, each reported once."""
        errors, self._errors = frozenset(self._errors), {}
        return errors

    # ------------------------------------------------------------------ jobs

    async def _store(self, job: _StoreJob) -> None:
        plan = job.plan
        cells = [StoreCell(cell.group, cell.chunk_hash) for cell in plan.cells]
        grants = await self._client.reserve_store(job.tag, cells, plan.cache_salt)
        if job.cancelled or not any(grants):
            self._client.abort_store(job.tag)
            self._end_store(job)
            return
        moves = [move for cell, grant in zip(plan.cells, grants) if grant for move in self._store_moves(cell, grant)]
        job.stage = _Stage.COPYING
        job.ticket = self._submit(moves, "store", job.after)
        await job.ticket.wait()
        copied = job.ticket.error is None and not job.cancelled
        job.stop_reading(_Stage.CLOSING)
        await self._client.commit_store(job.tag, [copied and grant is not None for grant in grants])
        if copied:
            self._counts["stores"] += 1
            self._counts["cells_stored"] += sum(grant is not None for grant in grants)
            self._counts["bytes_stored"] += sum(move.source.nbytes for move in moves)
        self._end_store(job)

    def _end_store(self, job: _StoreJob) -> None:
        job.stop_reading(_Stage.ENDED)
        del self._stores[job.tag]

    async def _load(self, job: _LoadJob) -> None:
        plan = job.plan
        cells = [LoadCell(cell.group, cell.chunk, cell.chunk_hash) for cell in plan.cells]
        grants = await self._client.open_read(plan.session, plan.generation, cells)
        granted = [(cell, grant) for cell, grant in zip(plan.cells, grants) if grant]
        moves = [move for cell, grant in granted for move in self._load_moves(cell, grant)]
        ticket = self._submit(moves, "load", job.after)
        await ticket.wait()
        closed = await self._client.close_read(plan.session, plan.generation, cells)
        good = [ticket.error is None and grant is not None and held for grant, held in zip(grants, closed)]
        self._end_load(job, good, sum(move.source.nbytes for move in moves))

    def _end_load(self, job: _LoadJob, good: Sequence[bool], bytes_moved: int) -> None:
        bad = [cell for cell, fine in zip(job.plan.cells, good, strict=True) if not fine]
        self._errors.update((block, None) for cell in bad for block in cell.blocks if block != NULL_BLOCK)
        self._counts["loads"] += 1
        self._counts["loads_failed"] += bool(bad)
        self._counts["cells_loaded"] += sum(good)
        self._counts["bytes_loaded"] += bytes_moved
        if job.plan.load_async:
            self._received[job.plan.request_id] = None
            if bad and len(self._layout.groups) > 1:
                self._failed[job.plan.request_id] = None
        job.ended.set()

    # ------------------------------------------------------------------ copies

    def _submit(self, moves: Sequence[Copy], stream: str, after: DeviceEvent) -> CopyTicket:
        assert self._device is not None
        return self._device.submit(moves, stream=stream, after=(after,))

    def _store_moves(self, cell: CellBlocks, grant: Grant) -> list[Copy]:
        size = self._layout.groups[cell.group].bytes_per_block
        assert len(grant.view) == size * len(cell.blocks)
        return [
            Copy(self._part(cell.group, block), grant.view[index * size : (index + 1) * size], "store", block)
            for index, block in enumerate(cell.blocks)
        ]

    def _load_moves(self, cell: CellBlocks, grant: Grant) -> list[Copy]:
        size = self._layout.groups[cell.group].bytes_per_block
        return [
            Copy(grant.view[index * size : (index + 1) * size], self._part(cell.group, block), "load", block)
            for index, block in enumerate(cell.blocks)
            if block != NULL_BLOCK
        ]

    def _part(self, group: int, block: int) -> memoryview:
        part = self._parts.get((group, block))
        if part is None:
            part = self._parts[group, block] = memoryview(self._pages[group][block]).cast("B")
        return part

    # ------------------------------------------------------------------ tasks

    def _spawn(self, coroutine: Any, name: str) -> None:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = name
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            self._crash = self._crash or task.exception()

    def _raise_crash(self) -> None:
        """A job that died of a bug must stop the worker: its blocks and staging are in an unknown state."""
        if self._crash is not None:
            raise InternalError(f"a copy job died: {self._crash!r}") from self._crash

    def inflight_stores(self, request_id: str) -> int:
        """Store jobs of this request that may still read engine blocks."""
        return sum(job.plan.request_id == request_id and not job.unread.is_set() for job in self._stores.values())

    @property
    def idle(self) -> bool:
        return not self._tasks

    def statistics(self) -> WorkerConnectorStatistics:
        return WorkerConnectorStatistics(**{**self._counts, "jobs_inflight": len(self._tasks)})

"""The worker side of a connector, engine-neutral: moves KV between the engine's pages and the cache.

Theory of operation
-------------------
Each plan becomes a *job* (`jobs.py`), one asyncio task. Jobs outlive the step that began them.

    store:  reserve_store --grants--> copy out --> commit_store (what was copied), or abort_store if there is nothing
    load:   open_read --grants--> copy in --> close_read --> good, or bad with its blocks

1. Fence. Before any block allocated in a step may be written, `fence` finds the jobs that still touch such a block, by
   block id and not by request: a preempted request's blocks, a finished one's, and blocks that left a window all come
   back the same way. Cells that are not submitted yet are dropped: they never touch those blocks and are never
   committed. So are queued ones of attempts that were given up (`StepMeta.given_up`); where the attempt runs on nobody
   would store them again, so they are waited for, as are copies that have begun. Loads are fenced like stores; an
   engine that keeps its rules gives none of their blocks away.
2. There is no time-out after which the step goes on: at the deadline the worker raises.
3. Order on the device: a store's copy waits for an event behind the forward pass that wrote the KV; a load's copy waits
   for an event behind everything submitted before it (the last readers of the block, and its zeroing).
4. A load counts only when its copy has ended without an error *and* the server still knew the lease and the slot;
   otherwise its blocks are reported. Completion and bad blocks are reported by the same pair of calls
   (`finished`, `load_errors`), never one without the other.
5. What a device or a server does wrong (a copy refused or failed, a slot of another size) is a failed cell. A job
   that *dies* - our bug, or a copy that never ends - leaves blocks in an unknown state: whoever waits for it is woken,
   and every call from then on raises. Nothing hangs, nothing goes on.
6. Who moves the bytes: this worker, on its device's streams, or the servers (the client's `transfer`), which read and
   write the shared memory that the pages lie in. Either way a cell has a ticket, and everything above holds for it. No
   server is asked before the device has passed the point behind which the copy belongs (the *gate*: an empty batch).
7. With a clock, loads that are alone on their way are timed, from the plan to the report, for the admission.
8. Ended requests are reported `sent` when no store of their last generation reads blocks any more. Generations are
   never used twice, so a reused request id waits for its own stores only.

Rejected: fencing by request id (blocks that left a window, and reused ids, slip through); one task per stream instead
of one per plan (a slow server would hold up the copies behind it).

Who holds: staging and leases are the server's under our worker id; engine blocks the engine's. Who announces done: the
copy ticket, then `finished` and `load_errors`. Who frees: `commit_store`/`abort_store` end staging, `close_read` ends
lease and hold.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.connectors.jobs import Job, LoadJob, StoreJob, blocks_of_cells
from kvcore.connectors.pages import ArrayPages, Pages, TensorPages
from kvcore.connectors.plan import CellBlocks, EndedRequest, LoadPlan, StepMeta, StorePlan
from kvcore.connectors.views import NO_LOADS, NULL_BLOCK, Finished, LoadTimes
from kvcore.errors import CallerError, ConfigError, InternalError
from kvcore.groups import CacheLayout
from kvcore.ports import Clock, CopyEngine, CopyTicket
from kvcore.runtime.confined import LoopConfined
from kvcore.runtime.streams import CopyCancelled
from kvcore.service.client import Grant, LoadCell, PageCell, StoreCell, WorkerClient
from kvcore.service.shapes import PageSegment


@dataclass(frozen=True, slots=True)
class WorkerConnectorConfig:
    """A copy that does not end in this time means a broken device; the worker stops.

    `fence_timeout_s` counts from a fence that waits, `copy_timeout_s` from the submission of any copy.
    """

    fence_timeout_s: float = 60.0
    copy_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class WorkerConnectorStatistics:
    """Counters grow; `jobs_inflight` is of now."""

    stores: int  # something was copied and offered for publication
    stores_cancelled: int  # jobs that lost cells to a fence
    fences_waited: int  # copies that a fence had to wait for
    loads: int
    loads_failed: int
    loads_cancelled: int
    copies_refused: int  # cells that the device did not take
    cells_stored: int
    cells_loaded: int
    bytes_stored: int
    bytes_loaded: int
    jobs_inflight: int


class WorkerConnector:
    """See the module text. Loop-confined; one per rank.

    `share` says where the engine's pages lie, if servers copy. `clock` None: loads are not timed.
    """

    def __init__(
        self,
        layout: CacheLayout,
        rank: int,
        client: WorkerClient,
        config: WorkerConnectorConfig | None = None,
        share: Callable[[Any], PageSegment] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not 0 <= rank < layout.ranks:
            raise CallerError(f"rank {rank} does not exist: the layout has {layout.ranks} ranks")
        if client.transfer == "server" and share is None:
            raise ConfigError(
                "transfer = server: a server can copy only from and to pages in shared memory, and this engine's are "
                "not; configure transfer = worker"
            )
        self._layout = layout
        self._rank = rank
        self._client = client
        self._share = share
        self._clock = clock
        self._config = config or WorkerConnectorConfig()
        self._pages: Pages = ArrayPages(())
        self._device: CopyEngine | None = None
        self._meta: StepMeta | None = None
        self._jobs: dict[asyncio.Task[None], Job] = {}
        self._sync_loads: list[LoadJob] = []
        self._stores_begun = 0
        self._ended: dict[EndedRequest, None] = {}  # not yet reported as sent
        # since they were last asked for
        self._received: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self._errors: dict[int, None] = {}
        self._timed = NO_LOADS
        self._crash: BaseException | None = None
        self._counts: Counter[str] = Counter()
        self._confined = LoopConfined()

    def register(self, pages: TensorPages | Sequence[Any], device: CopyEngine) -> None:
        """Take the engine's pages: arrays [blocks, layers, block_tokens, width] by group, or discovered tensors.

        An engine with tensors of its own registers them by `kvcore.connectors.registration`.
        """
        taken: Pages = pages if isinstance(pages, TensorPages) else ArrayPages(pages)
        if len(taken) != len(self._layout.groups):
            raise ConfigError(f"the engine has {len(taken)} groups of pages, the layout {len(self._layout.groups)}")
        for group, spec in enumerate(self._layout.groups):
            if taken.block_bytes(group) != spec.bytes_per_block:
                raise ConfigError(
                    f"group {group}: the engine's block has {taken.block_bytes(group)} bytes, the layout says "
                    f"{spec.bytes_per_block}; build the layout from the engine's own pages"
                )
        self._pages, self._device = taken, device
        if self._by_server:
            assert self._share is not None
            if isinstance(taken, TensorPages) and taken.device_type != "cpu":
                raise ConfigError(f"transfer = server: no server can copy pages on {taken.device_type}; use worker")
            self._client.pages.share(self._share(pages))

    @property
    def _by_server(self) -> bool:
        """The servers copy, and not this worker."""
        return self._client.transfer == "server"

    # ------------------------------------------------------------------ before the forward pass

    def fence(self, meta: StepMeta) -> Awaitable[None] | None:
        """End or cancel every copy that touches a block allocated in this step."""
        self._raise_crash()
        self._meta = meta
        allocated = frozenset(meta.allocated)
        for job in self._jobs.values():
            if isinstance(job, StoreJob) and job.plan.generation in meta.given_up:
                job.expendable = True
        near = [job for job in self._jobs.values() if not job.blocks.isdisjoint(allocated)]
        begun = [ticket for job in near for ticket in self._give_way(job, allocated)]
        if not begun:
            return None
        self._counts["fences_waited"] += len(begun)
        return self._wait_done(begun)

    def _give_way(self, job: Job, blocks: frozenset[int]) -> list[CopyTicket]:
        cells = len(job.cells)
        begun = job.give_way(blocks)
        if len(job.cells) < cells:
            self._counts["stores_cancelled" if isinstance(job, StoreJob) else "loads_cancelled"] += 1
        return begun

    async def _wait_done(self, tickets: Iterable[CopyTicket]) -> None:
        try:
            async with asyncio.timeout(self._config.fence_timeout_s):
                for ticket in tickets:
                    await ticket.wait()
        except TimeoutError:
            self._crash = self._crash or InternalError(
                f"a copy still touches engine blocks after {self._config.fence_timeout_s} s; "
                "the step must not overwrite them. The device or its driver has stopped; restart the worker"
            )
        self._raise_crash()

    def start_load(self, meta: StepMeta) -> None:
        """Begin every load of this step."""
        assert self._meta is meta, "fence comes first"
        for plan in meta.loads:
            self._begin_load(plan)

    def _begin_load(self, plan: LoadPlan) -> None:
        cells = blocks_of_cells(plan.cells)
        job = LoadJob(name=f"load:{plan.request_id}", after=self._engine.compute_event(), cells=cells, plan=plan)
        if not plan.load_async:
            self._sync_loads.append(job)
        self._note_begin(job)
        self._spawn(job, self._load_by_server(job) if self._by_server else self._load(job))

    def wait_load(self, layer: int) -> Awaitable[None] | None:
        """All layers of a cell arrive together, so every layer waits for the whole load."""
        assert layer >= 0
        self._raise_crash()
        pending = [job for job in self._sync_loads if not job.ended.is_set()]
        return self._wait_ended(pending) if pending else None

    async def _wait_ended(self, jobs: Iterable[LoadJob]) -> None:
        """Bounded: the client answers in time, well or not, and a copy that does not end kills its job."""
        for job in jobs:
            await job.ended.wait()
        self._raise_crash()

    # ------------------------------------------------------------------ after the forward pass

    def save(self, layer: int) -> None:
        """Stores begin when all layers are submitted (`wait_save`): a cell holds all layers of its group."""
        assert layer >= 0

    def wait_save(self) -> None:
        """Begin this step's stores, behind everything the step has submitted to the compute stream."""
        self._raise_crash()
        meta, self._meta = self._meta, None
        assert meta is not None, "fence comes first"
        assert all(job.ended.is_set() for job in self._sync_loads), "wait_load comes before the forward pass"
        self._sync_loads = []
        self._ended.update(dict.fromkeys(meta.ended))
        for plan in meta.stores:
            self._begin_store(plan)

    def _begin_store(self, plan: StorePlan) -> None:
        self._stores_begun += 1
        job = StoreJob(
            name=f"store:{plan.request_id}",
            after=self._engine.compute_event(),
            cells=blocks_of_cells(plan.cells),
            plan=plan,
            tag=self._client.tag(self._stores_begun),
            expendable=False,
        )
        self._spawn(job, self._store_by_server(job) if self._by_server else self._store(job))

    def finished(self, request_ids: Sequence[str]) -> Finished:
        """What has completed since the last call. `request_ids` is not needed: the plan names who waits."""
        self._raise_crash()
        reading = {job.plan.generation for job in self._reading()} if self._ended else set()
        sent = [ended for ended in self._ended if ended.generation not in reading]
        for ended in sent:
            del self._ended[ended]
        result = Finished(
            frozenset(ended.request_id for ended in sent),
            frozenset(self._received),
            frozenset(self._failed),
            self._timed,
        )
        assert result.failed <= result.received
        self._received, self._failed, self._timed = {}, {}, NO_LOADS
        return result

    def load_errors(self) -> frozenset[int]:
        """Blocks of failed loads, each reported once, in the same step as the end of their load."""
        self._confined.check()
        errors, self._errors = frozenset(self._errors), {}
        assert NULL_BLOCK not in errors
        return errors

    # ------------------------------------------------------------------ stores

    async def _store(self, job: StoreJob) -> None:
        plan = job.plan
        cells = [StoreCell(cell.group, cell.chunk_hash) for cell in plan.cells]
        grants = await self._client.reserve_store(job.tag, cells, plan.cache_salt)
        self._keep_usable(job, grants)
        if not job.cells:
            self._client.abort_store(job.tag)
            return
        moved = await self._copy(job, "store", lambda index: self._store_moves(plan.cells[index], _view(grants, index)))
        await self._client.commit_store(job.tag, [index in moved for index in range(len(cells))])
        self._counts["stores"] += bool(moved)
        self._counts["cells_stored"] += len(moved)
        self._counts["bytes_stored"] += sum(self._layout.cell_bytes(plan.cells[index].group) for index in moved)

    def _store_moves(self, cell: CellBlocks, view: memoryview) -> list[Any]:
        return self._pages.out_of(cell.group, cell.blocks, view)

    # ------------------------------------------------------------------ loads

    async def _load(self, job: LoadJob) -> None:
        plan = job.plan
        cells = [LoadCell(cell.group, cell.chunk, cell.chunk_hash) for cell in plan.cells]
        grants = await self._client.open_read(plan.session, plan.generation, cells)
        self._keep_usable(job, grants)
        moved = await self._copy(job, "load", lambda index: self._load_moves(plan.cells[index], _view(grants, index)))
        held = await self._client.close_read(plan.session, plan.generation, cells)
        self._report_load(job, [index in moved and held[index] for index in range(len(cells))])

    def _load_moves(self, cell: CellBlocks, view: memoryview) -> list[Any]:
        return self._pages.into(cell.group, cell.blocks, view)

    def _report_load(self, job: LoadJob, good: Sequence[bool]) -> None:
        plan = job.plan
        bad = [cell for cell, fine in zip(plan.cells, good, strict=True) if not fine]
        self._errors.update((block, None) for cell in bad for block in cell.blocks if block != NULL_BLOCK)
        self._counts["loads"] += 1
        self._counts["loads_failed"] += bool(bad)
        self._counts["cells_loaded"] += sum(good)
        size = sum(
            self._layout.groups[cell.group].bytes_per_block * sum(block != NULL_BLOCK for block in cell.blocks)
            for cell, fine in zip(plan.cells, good, strict=True)
            if fine
        )
        self._counts["bytes_loaded"] += size
        if not bad:
            self._note_end(job, size)
        if plan.load_async:
            self._received[plan.request_id] = None
            if bad and len(self._layout.groups) > 1:
                self._failed[plan.request_id] = None

    def _note_begin(self, job: LoadJob) -> None:
        if self._clock is None:
            return
        job.begin_ns = self._clock.now_ns()
        for other in self._jobs.values():
            if isinstance(other, LoadJob):
                other.alone = job.alone = False

    def _note_end(self, job: LoadJob, size: int) -> None:
        """A good load has ended. What came in the company of others says nothing about the way."""
        if self._clock is not None and job.alone and size:
            self._timed += LoadTimes(1, size, max(self._clock.now_ns() - job.begin_ns, 0))

    # ------------------------------------------------------------------ copies by the servers

    async def _store_by_server(self, job: StoreJob) -> None:
        plan, gate = job.plan, self._submit((), "store", job)
        if gate is None:
            return
        cells = {i: PageCell(StoreCell(each.group, each.chunk_hash), each.blocks) for i, each in _of_job(job)}
        tickets = self._client.pages.store(job.tag, list(cells.values()), plan.cache_salt, gate)
        job.begin_copies(dict(zip(cells, tickets, strict=True)))
        self._count_stored(job, await self._copied(job))
        self._counts["stores_cancelled"] += any(isinstance(ticket.error, CopyCancelled) for ticket in tickets)

    async def _load_by_server(self, job: LoadJob) -> None:
        plan, gate = job.plan, self._submit((), "load", job)
        if gate is not None:
            cells = {
                i: PageCell(LoadCell(each.group, each.chunk, each.chunk_hash), each.blocks) for i, each in _of_job(job)
            }
            tickets = self._client.pages.load(plan.session, plan.generation, list(cells.values()), gate)
            job.begin_copies(dict(zip(cells, tickets, strict=True)))
        moved = await self._copied(job)
        self._report_load(job, [index in moved for index in range(len(plan.cells))])

    def _count_stored(self, job: StoreJob, moved: frozenset[int]) -> None:
        self._counts["stores"] += bool(moved)
        self._counts["cells_stored"] += len(moved)
        self._counts["bytes_stored"] += sum(self._layout.cell_bytes(job.plan.cells[index].group) for index in moved)

    # ------------------------------------------------------------------ copies

    def _keep_usable(self, job: StoreJob | LoadJob, grants: Sequence[Grant | None]) -> None:
        """Drop the cells that were not granted, or with another size: no place for this cell, or not its bytes."""
        for index in list(job.cells):
            grant, cell = grants[index], job.plan.cells[index]
            if grant is None or len(grant.view) != self._layout.cell_bytes(cell.group):
                del job.cells[index]

    async def _copy(self, job: Job, stream: str, moves_of: Callable[[int], list[Any]]) -> frozenset[int]:
        """Move the bytes of the job's cells. Returns the positions of those that have arrived."""
        job.begin_copies(
            {index: ticket for index in job.cells if (ticket := self._submit(moves_of(index), stream, job))}
        )
        return await self._copied(job)

    async def _copied(self, job: Job) -> frozenset[int]:
        """Wait for the job's copies. Returns the positions of the cells that have arrived."""
        try:
            async with asyncio.timeout(self._config.copy_timeout_s):
                for ticket in job.tickets.values():
                    await ticket.wait()
        except TimeoutError:
            raise InternalError(
                f"{job.name}: a copy has not ended after {self._config.copy_timeout_s} s. "
                "The device or its driver has stopped; restart the worker"
            ) from None
        return job.end_copies()

    def _submit(self, moves: Sequence[Any], stream: str, job: Job) -> CopyTicket | None:
        """None: the device does not take it. That is a failed cell; a wrong call is our mistake and ends the job."""
        try:
            return self._engine.submit(moves, stream=stream, after=(job.after,))
        except CallerError:
            raise
        except Exception:
            self._counts["copies_refused"] += 1
            return None

    @property
    def _engine(self) -> CopyEngine:
        if self._device is None:
            raise CallerError("register() comes first: there are no pages and no device")
        return self._device

    # ------------------------------------------------------------------ tasks

    def _spawn(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        self._confined.check()
        task = asyncio.get_running_loop().create_task(work, name=job.name)
        self._jobs[task] = job
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        job = self._jobs.pop(task)
        error = InternalError(f"{job.name} was cancelled") if task.cancelled() else task.exception()
        self._crash = self._crash or error
        assert error is not None or not job.tickets or not job.touching
        job.end()  # only now: whoever it wakes must see the crash

    def _raise_crash(self) -> None:
        """A job that died of a bug must stop the worker: its blocks and staging are in an unknown state."""
        self._confined.check()
        if self._crash is not None:
            raise InternalError(f"this worker has stopped: {self._crash!r}") from self._crash

    def _reading(self) -> list[StoreJob]:
        return [job for job in self._jobs.values() if isinstance(job, StoreJob) and job.touching]

    def stores_inflight(self, request_id: str) -> int:
        """Store jobs of this request, of any generation, that may still read engine blocks."""
        return sum(job.plan.request_id == request_id for job in self._reading())

    @property
    def loads_landed(self) -> tuple[str, ...]:
        """Requests whose asynchronous load has ended here and has not been reported yet."""
        return tuple(self._received)

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def reported(self) -> bool:
        """Nothing is under way, and there is nothing that `finished` or `load_errors` would still tell."""
        untold = self._ended or self._received or self._failed or self._errors or self._timed.count or self._crash
        return not (self._jobs or untold)

    def statistics(self) -> WorkerConnectorStatistics:
        now = {"jobs_inflight": len(self._jobs)}
        names = WorkerConnectorStatistics.__dataclass_fields__
        return WorkerConnectorStatistics(**{name: now.get(name, self._counts[name]) for name in names})


def _of_job(job: StoreJob | LoadJob) -> list[tuple[int, CellBlocks]]:
    """The cells of the plan that the job has not dropped, by position."""
    return [(index, job.plan.cells[index]) for index in job.cells]


def _view(grants: Sequence[Grant | None], index: int) -> memoryview:
    grant = grants[index]
    assert grant is not None, "only granted cells are copied"
    return grant.view

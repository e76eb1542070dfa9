"""`Engine`: the loop around scheduler and workers. Ordinary asyncio code, for the simulated loop and for a real one.

One step at a time: requests that have arrived, aborts and cache resets are taken, a step is scheduled, carried out by
all workers, and its results are taken. Without work the engine sleeps until the next arrival or a call; while it waits
for its connector (loads, held blocks, lookups) it runs empty steps, `idle_step_ns` apart, because the connector's
reports travel in steps.

Without a connector the forward pass of a step is one piece of device work; with one it goes layer by layer, since the
connector takes part in every layer.

Scheduler and workers may be processes of their own: `contexts(rank)` is then the context in which worker `rank` runs. A
worker that has died answers nothing, so the step never ends; whoever watches the processes ends it
(`kvcore.sim.engine.host`).

Who holds what: the engine holds the pages for its lifetime and hands views to the connector's workers; block ownership
is the scheduler's, per run. After a run no block is held, or `run` raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Protocol

from kvcore.errors import CallerError, InternalError
from kvcore.groups import CacheLayout
from kvcore.sim.engine.block_pool import BlockNames
from kvcore.sim.engine.config import EngineConfig, EngineStats
from kvcore.sim.engine.device import ComputeDevice, PagedMemory
from kvcore.sim.engine.probe import EngineProbe, NullProbe
from kvcore.sim.engine.request import RequestSpec
from kvcore.sim.engine.scheduler import Scheduler
from kvcore.sim.engine.step import ForwardBatch, ForwardPass, StepOutput, StepPlan
from kvcore.sim.engine.worker import (
    ComputeStream,
    Rendezvous,
    ReportCombiner,
    StepWork,
    Worker,
    WorkerReport,
    copy_blocks,
    poison_blocks,
)
from kvcore.sim.model import FingerprintModel

if TYPE_CHECKING:
    from kvcore.connectors.interface import Connector

StepTime = Callable[[int, int], int]
"""(tokens, requests) of a step -> its duration on the device in nanoseconds."""


class StepWatch(Protocol):
    """Somebody who looks in between two steps, and may call `abort`, `reset_prefix_cache` and the like there."""

    def boundary(self) -> None: ...


def default_step_time(tokens: int, requests: int) -> int:
    """200 us per step, 2 us per token, 5 us per request: a small model on a fast device."""
    return 200_000 + 2_000 * tokens + 5_000 * requests


class Engine:
    """One engine start. `run` may be called again for the next pass; each begins with an empty prefix cache."""

    def __init__(
        self,
        config: EngineConfig,
        model: FingerprintModel,
        layout: CacheLayout,
        pages: PagedMemory,
        devices: Sequence[ComputeDevice],
        connector: Connector | None = None,
        probe: EngineProbe | None = None,
        step_time: StepTime = default_step_time,
        contexts: Callable[[int], Context] | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        if len(devices) != layout.ranks:
            raise CallerError(f"{len(devices)} devices for {layout.ranks} ranks")
        self._model = model
        self._layout = layout
        self._pages = pages
        self._probe: EngineProbe = probe if probe is not None else NullProbe()
        self._step_time = step_time
        self._connector = connector
        self._contexts = contexts
        self._watch = watch
        self._stream = ComputeStream(devices[0])
        self._rendezvous = Rendezvous(layout.ranks)
        self._combiner = ReportCombiner(layout.ranks)
        self._names = BlockNames()
        self._workers: list[Worker] = []
        if connector is not None:
            for rank, device in enumerate(devices):
                self._workers.append(Worker(rank, pages, device, connector.worker(rank), self._probe))
        self._aborts: dict[str, None] = {}
        self._resets: list[bool] = []
        self._again: dict[str, RequestSpec] = {}
        self._wake: asyncio.Event | None = None
        self._running = False
        self.configure(config)

    def configure(self, config: EngineConfig) -> None:
        """Settings of the next run; `num_blocks` may be less than the pages hold."""
        if self._running:
            raise CallerError("an engine cannot be configured while it runs")
        if config.num_blocks > self._pages.num_blocks:
            raise CallerError(f"{config.num_blocks} blocks are wanted, the pages hold {self._pages.num_blocks}")
        self.config = config
        self._scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        side = self._connector.scheduler if self._connector is not None else None
        return Scheduler(self.config, self._layout, side, self._probe, self._names)

    @property
    def scheduler(self) -> Scheduler:
        """The current run's scheduler, for oracles to look at."""
        return self._scheduler

    def statistics(self) -> EngineStats:
        """Of the current or the last run."""
        return self._scheduler.statistics()

    def abort(self, request_id: str) -> None:
        """End a request at the next step boundary, wherever it is by then. Unknown ids are ignored."""
        self._aborts[request_id] = None
        self._wake_up()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> None:
        """Forget the engine's own prefix cache at the next step boundary; optionally preempt all running requests."""
        self._resets.append(reset_running_requests)
        self._wake_up()

    def add_again(self, spec: RequestSpec) -> None:
        """Serve a request under an id that was used before, as soon as the scheduler takes that id again."""
        self._again[spec.request_id] = spec
        self._wake_up()

    @property
    def to_be_added(self) -> frozenset[str]:
        """Ids for which `add_again` has been called and that the scheduler has not taken yet."""
        return frozenset(self._again)

    def force_preemptions(self, count: int = 1) -> None:
        """The next step preempts `count` victims by the policy's own choice, as if blocks had run out."""
        self._scheduler.force_preemptions(count)

    def _wake_up(self) -> None:
        if self._wake is not None:
            self._wake.set()

    async def run(self, requests: Sequence[RequestSpec]) -> dict[str, list[int]]:
        """Serve all requests; the generated tokens of those that were not aborted."""
        if self._running:
            raise CallerError("the engine is running already")
        self._running = True
        self._wake = asyncio.Event()
        self._scheduler = self._new_scheduler()
        try:
            await self._serve(sorted(requests, key=lambda spec: spec.time_ns))
            self._scheduler.check_idle()
        finally:
            self._running = False
        return self._scheduler.results()

    async def _serve(self, arrivals: list[RequestSpec]) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        arrived = 0
        while True:
            now_ns = round((loop.time() - begin) * 1e9)
            while arrived < len(arrivals) and arrivals[arrived].time_ns <= now_ns:
                self._scheduler.add(arrivals[arrived])
                arrived += 1
            if self._watch is not None:
                self._watch.boundary()
            self._take_calls()
            if self._scheduler.has_work:
                await self._one_step(more_to_come=arrived < len(arrivals))
            elif arrived < len(arrivals):
                await self._sleep(arrivals[arrived].time_ns - now_ns)
            else:
                return

    def _take_calls(self) -> None:
        aborts, self._aborts = list(self._aborts), {}
        resets, self._resets = self._resets, []
        for request_id in aborts:
            self._scheduler.abort(request_id)
        for reset_running_requests in resets:
            self._scheduler.reset_prefix_cache(reset_running_requests)
        for request_id in list(self._again):
            if not self._scheduler.in_use(request_id):
                self._scheduler.add(self._again.pop(request_id))

    async def _one_step(self, more_to_come: bool) -> None:
        plan = self._scheduler.schedule()
        output = await (self._run_workers(plan) if self._workers else self._run_fused(plan))
        waiting = self._scheduler.waits_for_connector  # before the reports of this step are taken
        self._scheduler.update(plan, output)
        if plan.entries or not self._scheduler.has_work:
            return
        if not (waiting or plan.preempted or more_to_come):
            raise InternalError(f"the scheduler is stuck: {self._scheduler.describe()}")
        await self._sleep(self.config.idle_step_ns)

    async def _sleep(self, duration_ns: int) -> None:
        """Until the time has passed or a call wants to be taken."""
        assert self._wake is not None
        self._wake.clear()
        try:
            async with asyncio.timeout(max(1, duration_ns) / 1e9):
                await self._wake.wait()
        except TimeoutError:
            return

    def _forward(self, plan: StepPlan) -> ForwardPass | None:
        if not plan.entries:
            return None
        batch = ForwardBatch(plan.entries, self._layout, self._model)
        return ForwardPass(batch, self._model, self._pages, self._probe)

    async def _run_fused(self, plan: StepPlan) -> StepOutput:
        forward = self._forward(plan)
        if forward is None:
            return StepOutput({})

        def compute() -> None:
            for rank in range(self._layout.ranks):
                if self.config.poison:
                    poison_blocks(self._pages, rank, plan.fresh, self._probe)
                copy_blocks(self._pages, rank, plan, self._probe)
            forward.run_all()

        await self._stream.finish(self._stream.submit(compute, self._step_time(plan.tokens, len(plan.entries))))
        return StepOutput(forward.sample())

    async def _run_workers(self, plan: StepPlan) -> StepOutput:
        forward = self._forward(plan)
        layers = len(self._model.layers)
        layer_ns = self._step_time(plan.tokens, len(plan.entries)) // layers if plan.entries else 0
        work = StepWork(plan, forward, layers, layer_ns, self.config.poison, self.config.host_ahead)
        finished, error_blocks = self._combiner.combine(await self._reports(work))
        sampled = forward.sample() if forward is not None else {}
        return StepOutput(sampled, finished, error_blocks)

    async def _reports(self, work: StepWork) -> list[WorkerReport]:
        if len(self._workers) == 1 and self._contexts is None:
            return [await self._workers[0].run(work, self._rendezvous)]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    worker.run(work, self._rendezvous), name=f"engine worker {rank}", context=self._context(rank)
                )
                for rank, worker in enumerate(self._workers)
            ]
        return [task.result() for task in tasks]

    def _context(self, rank: int) -> Context | None:
        return None if self._contexts is None else self._contexts(rank)

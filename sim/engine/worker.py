"""One worker per rank: carries out its part of a step and collects what its connector side reports.

Order within a step, per rank:

    fence -> (poison what a load will write, and wait for it) -> start_load -> (poison the other fresh blocks)
    -> per layer: wait_load, forward on the compute stream, save, meet the other ranks -> wait_save
    -> compute event -> finished, load_errors

Poisoning comes before the load that overwrites it and after the fence that protects stores of the old content: the
load's blocks are done before `start_load`, all others go to the compute stream in front of the first layer.

With `host_ahead`, `save` is called when the layer has been submitted; the connector must then wait for the device
event itself before it reads pages.

`Rendezvous` is the all-reduce of the ranks: the last one to arrive adds up the partial outputs of the layer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore.connectors.views import NO_LOADS, Finished
from kvcore.ports import DeviceEvent
from kvcore.sim.engine.device import ComputeDevice, PagedMemory
from kvcore.sim.engine.probe import EngineProbe
from kvcore.sim.engine.step import ForwardPass, StepPlan

if TYPE_CHECKING:
    from kvcore.connectors.interface import WorkerSide


@dataclass(frozen=True, slots=True)
class StepWork:
    """What all workers get for one step. `layer_ns` is the duration of one layer on the device."""

    plan: StepPlan
    forward: ForwardPass | None
    layers: int
    layer_ns: int
    poison: bool
    host_ahead: bool


@dataclass(frozen=True, slots=True)
class WorkerReport:
    finished: Finished
    error_blocks: frozenset[int]


class Rendezvous:
    """All ranks meet once per layer; `on_last` runs when the last one has come."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._arrived = 0
        self._open: asyncio.Future[None] | None = None

    async def join(self, on_last: Callable[[], None]) -> None:
        self._arrived += 1
        if self._arrived == self._ranks:
            self._arrived = 0
            on_last()
            if self._open is not None:
                self._open.set_result(None)
                self._open = None
            return
        if self._open is None:
            self._open = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._open)


class ComputeStream:
    """Submits work to a device and brings the work's own exceptions back to whoever waits."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._error: BaseException | None = None

    def submit(self, fn: Callable[[], None], duration_ns: int) -> DeviceEvent:
        def guarded() -> None:
            if self._error is not None:
                return  # a failed stream computes nothing more
            try:
                fn()
            except BaseException as error:
                self._error = error

        return self._device.run_compute(guarded, duration_ns)

    async def finish(self, event: DeviceEvent) -> None:
        if not event.done:
            await event.wait()
        if self._error is not None:
            raise self._error


class Worker:
    """Holds nothing between steps but its device stream and its connector side."""

    def __init__(
        self, rank: int, memory: PagedMemory, device: ComputeDevice, side: WorkerSide, probe: EngineProbe
    ) -> None:
        self._rank = rank
        self._memory = memory
        self._stream = ComputeStream(device)
        self._side = side
        self._probe = probe
        side.register(memory.groups[rank], device)

    async def run(self, work: StepWork, rendezvous: Rendezvous) -> WorkerReport:
        side, plan = self._side, work.plan
        await _maybe(side.fence(plan.meta))
        if work.poison and plan.loading:
            await self._stream.finish(self._stream.submit(lambda: self._poison(plan.loading), 0))
        await _maybe(side.start_load(plan.meta))
        event = self._prepare_blocks(work)
        if work.forward is not None:
            event = await self._layers(work, work.forward, rendezvous)
        await _maybe(side.wait_save())
        if event is not None:
            await self._stream.finish(event)
        return WorkerReport(side.finished(plan.finished), side.load_errors())

    def _prepare_blocks(self, work: StepWork) -> DeviceEvent | None:
        plan = work.plan
        if not ((work.poison and plan.fresh) or plan.copies):
            return None

        def prepare() -> None:
            if work.poison:
                self._poison(plan.fresh)
            copy_blocks(self._memory, self._rank, plan, self._probe)

        return self._stream.submit(prepare, 0)

    async def _layers(self, work: StepWork, forward: ForwardPass, rendezvous: Rendezvous) -> DeviceEvent:
        event: DeviceEvent | None = None
        alone = self._memory_ranks == 1
        for layer in range(work.layers):
            await _maybe(self._side.wait_load(layer))
            event = self._stream.submit(self._layer(forward, layer, alone), work.layer_ns)
            if not work.host_ahead:
                await self._stream.finish(event)
            self._side.save(layer)
            if not alone:
                await self._stream.finish(event)
                await rendezvous.join(lambda layer=layer: forward.combine(layer))  # type: ignore[misc]
        assert event is not None
        return event

    @property
    def _memory_ranks(self) -> int:
        return len(self._memory.buffers)

    def _layer(self, forward: ForwardPass, layer: int, alone: bool) -> Callable[[], None]:
        def compute() -> None:
            forward.layer(layer, self._rank)
            if alone:
                forward.combine(layer)

        return compute

    def _poison(self, blocks: Sequence[int]) -> None:
        poison_blocks(self._memory, self._rank, blocks, self._probe)


def poison_blocks(memory: PagedMemory, rank: int, blocks: Sequence[int], probe: EngineProbe) -> None:
    if blocks:
        probe.poisoned(rank, blocks)
        memory.poison(rank, blocks)


def copy_blocks(memory: PagedMemory, rank: int, plan: StepPlan, probe: EngineProbe) -> None:
    """Private copies of the last blocks of partial local hits."""
    if not plan.copies:
        return
    probe.forward_reads(rank, [source for source, _ in plan.copies])
    probe.forward_writes(rank, [target for _, target in plan.copies])
    for source, target in plan.copies:
        memory.copy_block(rank, source, target)


async def _maybe(result: Awaitable[None] | None) -> Any:
    if result is not None:
        await result


class ReportCombiner:
    """An id counts when the last rank has reported it; `failed` by one rank fails the load of all."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._failed: dict[str, None] = {}

    def combine(self, reports: Sequence[WorkerReport]) -> tuple[Finished, frozenset[int]]:
        for report in reports:
            self._failed.update(dict.fromkeys(sorted(report.finished.failed)))
        sent = self._complete(self._sent, [report.finished.sent for report in reports])
        received = self._complete(self._received, [report.finished.received for report in reports])
        failed = frozenset(request_id for request_id in received if self._failed.pop(request_id, 0) is None)
        errors = frozenset(block for report in reports for block in report.error_blocks)
        loads = sum((report.finished.loads for report in reports), NO_LOADS)
        return Finished(sent, received, failed, loads), errors

    def _complete(self, counts: dict[str, int], reported: Sequence[frozenset[str]]) -> frozenset[str]:
        complete = []
        for ids in reported:
            for request_id in sorted(ids):
                counts[request_id] = counts.get(request_id, 0) + 1
                if counts[request_id] == self._ranks:
                    del counts[request_id]
                    complete.append(request_id)
        return frozenset(complete)

"""The engine's scheduler process: the rules of the simulated scheduler, a real connector, workers in other processes.

    python -m kvcore.ladder.targets.torch.engine SETUP-AS-JSON

It takes one `Serve` at a time from the driver and answers each request when it is complete, so that what was answered
before a crash need not be run again. A step is sent to every worker at once; it has ended when the last has reported.
An engine that cannot go on says `Failed`, with the reason; so does one whose worker does not answer.

Who holds: the process the scheduler's state and the scheduler side of the connector, until SIGTERM or death.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvcore.connectors.scheduler import SchedulerConnector, SchedulerConnectorConfig
from kvcore.connectors.views import Finished
from kvcore.errors import PeerError
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher
from kvcore.ladder.admissions import FLOOR_CHUNKS, admission_for, refusals
from kvcore.ladder.targets.torch.messages import (
    Admission,
    Answered,
    EngineSetup,
    Failed,
    Report,
    Serve,
    Served,
    Step,
    pack,
    read_report,
    read_serve,
)
from kvcore.ladder.targets.torch.model import TorchModel, build_torch_model
from kvcore.ladder.targets.torch.pages import Entry
from kvcore.ladder.targets.torch.serving import Tell, serve_until_told
from kvcore.ladder.targets.torch.wiring import namespace_of, remote_config
from kvcore.runtime.clock import SystemClock
from kvcore.service.remote import ServerLink
from kvcore.service.zmq_transport import ZmqClientTransport
from kvcore.sim.engine.block_pool import BlockNames
from kvcore.sim.engine.probe import NullProbe
from kvcore.sim.engine.request import RequestSpec
from kvcore.sim.engine.scheduler import Scheduler
from kvcore.sim.engine.step import StepEntry, StepOutput, StepPlan
from kvcore.sim.engine.worker import ReportCombiner, WorkerReport

_WORKER_ANSWERS_IN_S = 90.0
_CUMULATIVE = ("loads_verified", "cells_byte_checked", "fences_waited", "stores_cancelled", "stores_verified")


class WorkerPort:
    """One worker as the engine sees it: a step out, a report back."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str) -> None:
        self._loop = loop
        self._transport = ZmqClientTransport(loop, address)
        self._transport.receive(self._received)
        self._awaited: asyncio.Future[Report] | None = None
        self.counts: Counter[str] = Counter()

    async def run(self, step: Step) -> Report:
        self._awaited = self._loop.create_future()
        self._transport.send(pack(step))
        try:
            async with asyncio.timeout(_WORKER_ANSWERS_IN_S):
                report = await self._awaited
        except TimeoutError:
            raise PeerError(f"a worker has not answered for {_WORKER_ANSWERS_IN_S:g} s") from None
        if report.error:
            raise PeerError(f"a worker cannot go on:\n{report.error}")
        assert report.number == step.number
        self.counts = Counter(report.counts)
        return report

    def _received(self, payload: bytes) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(read_report(payload))

    def close(self) -> None:
        self._transport.close()


class AdmissionProbe(NullProbe):
    """Notes what is admitted and preempted."""

    def __init__(self) -> None:
        self.unchecked: dict[str, int] = {}  # admitted, and not scheduled since: how much is loaded for them
        self.admissions: list[Admission] = []
        self.scheduler: Scheduler | None = None
        self.stores_inflight = 0
        self.preemptions_store_inflight = 0

    def request_admitted(self, request_id: str, local_tokens: int, external_tokens: int) -> None:
        assert self.scheduler is not None
        self.unchecked[request_id] = external_tokens
        tokens = self.scheduler.tokens_of(request_id)
        self.admissions.append(Admission(request_id, tokens, local_tokens, external_tokens))

    def preempted(self, request_id: str) -> None:
        self.preemptions_store_inflight += self.stores_inflight > 0


class EngineProcess:
    """See the module text."""

    def __init__(self, setup: EngineSetup, layout: CacheLayout, model: TorchModel) -> None:
        loop = asyncio.get_running_loop()
        self._layout = layout
        namespace = namespace_of(setup, layout, model)
        self._link = ServerLink(loop, remote_config(setup), namespace, layout)
        config = SchedulerConnectorConfig(load_async=setup.load_async)
        admission = admission_for(
            setup.admission,
            layout,
            SystemClock(),
            seed=setup.seed,
            floor_tokens=FLOOR_CHUNKS * setup.chunk_tokens,
        )
        self._side = SchedulerConnector(layout, ChunkHasher(namespace), self._link.scheduler(), config, admission)
        self._workers = [WorkerPort(loop, setup.socket(f"worker{rank}")) for rank in range(setup.ranks)]
        self._combiner = ReportCombiner(setup.ranks)
        self._names = BlockNames()
        self._answer: Any = None
        self._steps = 0

    async def serve(self, serve: Serve, answer: Any) -> Served:
        """Run all requests; `answer` takes each `Answered` as it comes."""
        self._answer = answer
        probe = AdmissionProbe()
        scheduler = Scheduler(serve.config, self._layout, self._side if serve.cache else None, probe, self._names)
        probe.scheduler = scheduler
        before = self._counters()
        findings = await self._loop(scheduler, probe, serve)
        scheduler.check_idle()
        state = scheduler.statistics()
        counts = {name: value - before[name] for name, value in self._counters().items()}
        counts |= {"preemptions": state.preemptions, "steps": state.steps}
        counts |= {"preemptions_store_inflight": probe.preemptions_store_inflight}
        return Served(counts, tuple(probe.admissions), tuple(findings))

    def _counters(self) -> dict[str, int]:
        counts = {name: sum(worker.counts[name] for worker in self._workers) for name in _CUMULATIVE}
        counts["resumes_with_load"] = self._side.statistics().resumes_with_load
        counts["refusals"] = refusals(self._side.admission)
        return counts

    async def _loop(self, scheduler: Scheduler, probe: AdmissionProbe, serve: Serve) -> list[str]:
        arrivals = sorted(serve.requests, key=lambda ask: ask.time_ns)
        findings: list[str] = []
        answered: set[str] = set()
        loop = asyncio.get_running_loop()
        begin, arrived = loop.time(), 0
        while True:
            while arrived < len(arrivals) and arrivals[arrived].time_ns <= (loop.time() - begin) * 1e9:
                ask = arrivals[arrived]
                scheduler.add(RequestSpec(ask.request_id, ask.prompt, ask.output_tokens))
                arrived += 1
            if scheduler.has_work:
                findings += await self._one_step(scheduler, probe, serve)
                self._tell(scheduler, answered)
            elif arrived == len(arrivals):
                return findings
            else:
                await asyncio.sleep(serve.config.idle_step_ns / 1e9)

    def _tell(self, scheduler: Scheduler, answered: set[str]) -> None:
        for request_id, tokens in scheduler.results().items():
            if request_id not in answered:
                answered.add(request_id)
                self._answer(Answered(request_id, tuple(tokens)))

    async def _one_step(self, scheduler: Scheduler, probe: AdmissionProbe, serve: Serve) -> list[str]:
        plan = scheduler.schedule()
        step = self._message(plan, probe, serve.cache)
        reports = await asyncio.gather(*(worker.run(step) for worker in self._workers))
        probe.stores_inflight = sum(report.counts["stores_inflight"] for report in reports)
        scheduler.update(plan, self._combined(reports))
        if not plan.entries and scheduler.has_work:
            await asyncio.sleep(serve.config.idle_step_ns / 1e9)
        return [finding for report in reports for finding in report.findings]

    def _message(self, plan: StepPlan, probe: AdmissionProbe, cache: bool) -> Step:
        self._steps += 1
        return Step(
            self._steps,
            tuple(self._entry(entry, probe) for entry in plan.entries),
            tuple(plan.fresh),
            tuple(plan.loading),
            tuple(plan.copies),
            plan.finished,
            plan.meta if cache else None,
        )

    @staticmethod
    def _entry(entry: StepEntry, probe: AdmissionProbe) -> Entry:
        request, end = entry.request, entry.computed + entry.scheduled
        loaded = probe.unchecked.pop(request.request_id, None)
        return Entry(
            request.request_id,
            entry.computed,
            tuple(request.tokens[entry.computed : end]),
            tuple(tuple(table) for table in request.block_table()),
            entry.samples,
            () if loaded is None else tuple(request.tokens[: entry.computed]),
            min(loaded or 0, entry.computed),
        )

    def _combined(self, reports: Sequence[Report]) -> StepOutput:
        combined = [
            WorkerReport(
                Finished(frozenset(each.sent), frozenset(each.received), frozenset(each.failed), each.loads),
                frozenset(each.error_blocks),
            )
            for each in reports
        ]
        finished, errors = self._combiner.combine(combined)
        return StepOutput(dict(reports[0].sampled), finished, errors)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._link.close()


async def _serve(setup: EngineSetup) -> None:
    layout, model = build_torch_model(setup.model, setup.ranks, chunk_tokens=setup.chunk_tokens, seed=setup.seed)
    engine = EngineProcess(setup, layout, model)

    async def work(tell: Tell, payload: bytes) -> None:
        try:
            served: Served | Failed = await engine.serve(read_serve(payload), lambda answered: tell(pack(answered)))
        except Exception:
            served = Failed(traceback.format_exc())
        tell(pack(served))

    await serve_until_told(setup.socket("engine"), work, engine.close)


def main() -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(EngineSetup.from_text(sys.argv[1])))


if __name__ == "__main__":
    main()

"""Running a `Case`: two passes on one cache, every slot checked, nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvcore.connectors.vllm.host import CacheHost, HostConfig
from kvcore.connectors.vllm.layout import layout_of, namespace_of
from kvcore.connectors.vllm.sides import SharedHost
from kvcore.ladder.targets.vllm_scheduler.case import Case, CaseRequest
from kvcore.ladder.targets.vllm_scheduler.engine import (
    ABORTED,
    make_config,
    make_kv_config,
    make_request,
    make_scheduler,
)
from kvcore.ladder.targets.vllm_scheduler.fake_runner import FakeRunner, Finding
from kvcore.ladder.targets.vllm_scheduler.tokens import reference
from kvcore.ladder.targets.vllm_scheduler.world import FlakyDevice, SteppedRunner, StepPorts
from kvcore.sim.endings import garbage_collected_at_the_ends
from kvcore.sim.loop import SimLoop

CONNECTOR = "KvcoreConnector"
CONNECTOR_MODULE = "kvcore.connectors.vllm"
_SETTLE_S = 30.0
_DEADLOCK_STEPS = 50


@dataclass(frozen=True, slots=True)
class Subject:
    """What is driven: a connector class by name, and a change to the halves of an engine (a mutant)."""

    connector: str = CONNECTOR
    module: str = CONNECTOR_MODULE
    spoil: Callable[[Any, Any], None] | None = None  # (scheduler role, worker role)


@dataclass(slots=True)
class Outcome:
    """What came of a case. Counters are summed over passes."""

    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(finding.kind for finding in self.findings)


def run_case(case: Case, subject: Subject | None = None) -> Outcome:
    """Run all passes; the first finding ends a pass, an exception of any part is a finding."""
    outcome = Outcome()
    with garbage_collected_at_the_ends(), SimLoop(case.seed, fenced=False) as loop:
        try:
            _CaseRun(case, subject or Subject(), loop, outcome).run()
        except Exception as error:
            outcome.findings.append(Finding(f"raised {type(error).__name__}", str(error)[:500]))
    return outcome


class _CaseRun:
    def __init__(self, case: Case, subject: Subject, loop: SimLoop, outcome: Outcome) -> None:
        self._case, self._subject, self._outcome = case, subject, outcome
        self._runner = SteppedRunner(loop)
        self._ports = StepPorts(loop, case.seed, case.load_error_rate)
        self._kv_config = make_kv_config(case)

    def run(self) -> None:
        layout = layout_of(self._kv_config, self._case.chunk_tokens)
        namespace = namespace_of(make_config(self._case, {}), self._kv_config, layout)
        l1_bytes = self._case.l1_chunks * max(layout.cell_bytes(group) for group in range(len(layout.groups)))
        host = self._runner.call(_build(HostConfig(layout, namespace, l1_bytes), self._ports))
        shared = SharedHost(self._runner, host)
        for number in range(self._case.passes):
            _PassRun(self._case, self._subject, self._runner, shared, self._kv_config, number, self._outcome).run()
            if self._outcome.findings:
                return
        self._check_cache(host)
        self._runner.call(host.close())

    def _check_cache(self, host: CacheHost) -> None:
        l1, server = host.l1.statistics(), host.server.statistics()
        left = {
            "leases": l1.leases, "holds": l1.holds, "staging": l1.objects_staging, "sessions": server.sessions,
            "lookups": server.lookups_open, "stores": server.stores_open, "reads": server.reads_open,
        }  # fmt: skip
        kept = {name: count for name, count in left.items() if count}
        if kept:
            self._outcome.findings.append(Finding("lease leak", f"at rest the cache still has {kept}"))
        self._outcome.counts["chunks in L1"] += l1.objects_resident


async def _build(config: HostConfig, ports: StepPorts) -> CacheHost:
    return CacheHost(config, ports)


class _PassRun:
    """One engine, from its start to the end of all requests."""

    def __init__(
        self,
        case: Case,
        subject: Subject,
        runner: SteppedRunner,
        shared: SharedHost,
        kv_config: Any,
        number: int,
        outcome: Outcome,
    ) -> None:
        self._case, self._runner, self._outcome = case, runner, outcome
        self._findings = outcome.findings
        self._rng = random.Random(f"steps/{case.seed}/{number}")
        extra = {"host": shared, "chunk_tokens": case.chunk_tokens, "load_async": case.load_async}
        config = make_config(
            case,
            {
                "kv_connector": subject.connector,
                "kv_connector_module_path": subject.module,
                "kv_connector_extra_config": extra,
            },
        )
        self._scheduler = make_scheduler(case, config, kv_config)
        self._worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
        if subject.spoil is not None:
            subject.spoil(self._scheduler.connector, self._worker)
        self._side = shared.side(str(config.kv_transfer_config.engine_id))
        self._fake = FakeRunner(case, self._worker, self._findings)
        device = self._side.mover.device
        assert isinstance(device, FlakyDevice)
        device.register_pages([self._fake.pages])
        self._ended: dict[str, list[int]] = {}
        self._inflight: list[tuple[Any, Any]] = []
        self._preemptions = 0
        self._deadlocked = 0

    # ------------------------------------------------------------------ the loop of the engine

    def run(self) -> None:
        arrivals = sorted(self._case.requests, key=lambda request: request.step)
        step = arrived = 0
        while arrived < len(arrivals) or self._scheduler.has_requests() or self._inflight:
            if step >= self._case.steps_max:
                self._findings.append(Finding("stuck", f"not done after {step} steps: {self._describe()}"))
                break
            if self._engine_deadlock():
                self._outcome.counts["engine deadlocks"] += 1
                self._give_up()
                break
            while arrived < len(arrivals) and arrivals[arrived].step <= step:
                self._scheduler.add_request(make_request(arrivals[arrived], float(arrived)))
                arrived += 1
            self._disturb(step)
            self._step()
            step += 1
            if self._findings:
                break
        else:
            self._check_end()
        self._count()
        self._leave()

    def _step(self) -> None:
        low, high = self._case.step_us
        output = self._scheduler.schedule()
        self._preemptions += len(output.preempted_req_ids or ())
        result = self._fake.execute(output)
        self._runner.call(asyncio.sleep(self._rng.randint(low, high) / 1e6))
        self._inflight.append((output, result))
        depth = 2 if self._case.async_scheduling and output.total_num_scheduled_tokens else 1
        while len(self._inflight) >= depth:
            self._take(*self._inflight.pop(0))

    def _take(self, output: Any, result: Any) -> None:
        for outputs in self._scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self._ended.setdefault(each.request_id, []).extend(each.new_token_ids)

    def _disturb(self, step: int) -> None:
        for request in self._case.requests:
            if request.abort_step == step:
                self._scheduler.finish_requests(request.request_id, ABORTED)
        if step in self._case.reset_steps and self._may_reset():
            self._preemptions += len(self._scheduler.running)
            self._scheduler.reset_prefix_cache(reset_running_requests=True)

    def _engine_deadlock(self) -> bool:
        """vLLM's own: loads are done, and the loaded requests hold what the first of them lacks (docs/findings). Only
        with window groups, whose null entries vLLM counts as blocks that a request has already."""
        scheduler = self._scheduler
        holders = list(scheduler.kv_holding_waiting)
        if scheduler.running or len(holders) < 2 or len(self._case.windows) == 1 or self._inflight:
            return False
        arrived = scheduler.finished_recving_kv_req_ids
        if any(each.status.name == "WAITING_FOR_REMOTE_KVS" and each.request_id not in arrived for each in holders):
            return False
        if not holders[0].num_computed_tokens or len(scheduler.requests) > len(holders) + len(scheduler.waiting):
            return False
        self._deadlocked += 1
        return self._deadlocked > _DEADLOCK_STEPS

    def _give_up(self) -> None:
        """End what the engine will never end, as an operator would."""
        self._scheduler.finish_requests(None, ABORTED)
        while self._scheduler.has_requests():
            self._step()
        self._settle()

    def _may_reset(self) -> bool:
        """vLLM refuses to forget blocks that are held by a load, or by a request that has ended."""
        scheduler = self._scheduler
        return not scheduler.kv_holding_waiting and not scheduler.has_finished_requests()

    # ------------------------------------------------------------------ judgement

    def _check_end(self) -> None:
        pool = self._scheduler.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if held:
            self._findings.append(Finding("block leak", f"{held} blocks are held after the last request ended"))
        for request in self._case.requests:
            self._check_tokens(request)
        self._settle()

    def _check_tokens(self, request: CaseRequest) -> None:
        expected = reference(request.prompt, request.output_tokens)
        tokens = self._ended.get(request.request_id, [])
        whole = request.abort_step is None
        if tokens != (expected if whole else expected[: len(tokens)]):
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(tokens))
            self._findings.append(
                Finding("tokens", f"{request.request_id}: {len(tokens)} of {len(expected)} tokens, wrong from {at}")
            )

    def _settle(self) -> None:
        """Let stores and messages end."""
        self._runner.call(self._until_quiet())

    async def _until_quiet(self) -> None:
        try:
            async with asyncio.timeout(_SETTLE_S):
                while not self._side.quiet:
                    await asyncio.sleep(0.0005)
        except TimeoutError:
            self._findings.append(Finding("stuck", "the cache did not come to rest"))
            return
        state = self._side.scheduler.statistics()
        if state.requests_open or state.loads_open:
            self._findings.append(Finding("lease leak", f"the scheduler half still knows requests: {state}"))

    def _leave(self) -> None:
        self._scheduler.connector.shutdown()
        self._worker.shutdown()

    def _describe(self) -> str:
        scheduler = self._scheduler
        waiting = [request.request_id for request in scheduler.waiting]
        holding = [f"{request.request_id} ({request.status.name})" for request in scheduler.kv_holding_waiting]
        return f"{len(scheduler.running)} running, waiting {waiting}, waiting with blocks {holding}"

    def _count(self) -> None:
        scheduler, worker = self._side.scheduler.statistics(), self._side.worker.statistics()
        fake = self._fake.counts
        self._outcome.counts.update(
            {
                "steps": fake.steps,
                "slots checked": fake.slots_checked,
                "preemptions": self._preemptions,
                "resumed as V1": fake.resumed_v1,
                "resumed as V2": fake.resumed_v2,
                "steps on bad ground": fake.tainted,
                "null blocks": fake.null_blocks,
                "tokens hit": scheduler.tokens_hit,
                "loads": worker.loads,
                "loads failed": worker.loads_failed,
                "resumed with a load": scheduler.resumes_with_load,
                "cells stored": worker.cells_stored,
                "stores cancelled": worker.stores_cancelled,
                "fences waited": worker.fences_waited,
                "aborts": sum(request.abort_step is not None for request in self._case.requests),
            }
        )

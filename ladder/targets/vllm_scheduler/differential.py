"""Our simulated scheduler beside vLLM's real one: the same requests, blocks, budget and answers, compared step by step.

Compared in every step: who runs, in which order and from which token to which; who was preempted; every question to the
connector with the engine's own prefix and the answer; the block table of every request that runs or loads. Block *ids*
may differ (the two pools reuse blocks in a different order), but one renaming must fit all tables of a step: the same
blocks shared, the same entries null.

Differences that are known and have a reason are listed in docs/engine.md, and `differential_case` stays out of their
way: no prefix cache, no failed asynchronous loads, asynchronous loads with one group only. What is left is none.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import gc
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvcore.connectors.views import BlockTable, Finished
from kvcore.connectors.vllm.layout import layout_of
from kvcore.ladder.targets.vllm_scheduler.case import Case, CaseRequest, make_requests, tight_blocks
from kvcore.ladder.targets.vllm_scheduler.engine import (
    ABORTED,
    make_config,
    make_kv_config,
    make_request,
    make_scheduler,
)
from kvcore.ladder.targets.vllm_scheduler.script import Question, Script, ScriptConnector, ScriptSide
from kvcore.ladder.targets.vllm_scheduler.tokens import reference
from kvcore.sim.engine import EngineConfig, NullProbe, Policy, RequestSpec
from kvcore.sim.engine.block_pool import BlockNames
from kvcore.sim.engine.request import Status
from kvcore.sim.engine.scheduler import Scheduler as SimScheduler
from kvcore.sim.engine.step import StepOutput

STEPS_MAX = 3000
Run = tuple[str, int, int]
"""(request, first token, tokens) of one entry of a step."""


@dataclass(frozen=True, slots=True)
class Record:
    """One step of one scheduler."""

    runs: tuple[Run, ...]
    preempted: tuple[str, ...]
    questions: tuple[Question, ...]
    tables: dict[str, BlockTable]


@dataclass(frozen=True, slots=True)
class Difference:
    step: int
    what: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}: ours {self.ours}, vLLM {self.theirs}"


class SimSide:
    """Our scheduler."""

    def __init__(self, case: Case, script: Script) -> None:
        self._script = script
        layout = layout_of(make_kv_config(case), case.chunk_tokens)
        config = EngineConfig(
            num_blocks=case.num_blocks,
            max_num_seqs=case.max_num_seqs,
            max_batched_tokens=case.max_batched_tokens,
            policy=Policy.PRIORITY if case.priority_policy else Policy.FCFS,
            prefix_cache=case.prefix_cache,
            partial_hits=False,
            reserve_whole=case.reserve_whole,
        )
        self.scheduler = SimScheduler(config, layout, ScriptSide(script), NullProbe(), BlockNames())
        self._tokens: dict[str, list[int]] = {}
        self._prompts: dict[str, int] = {}
        self._plan: Any = None

    def add(self, request: CaseRequest) -> None:
        self._tokens[request.request_id] = reference(request.prompt, request.output_tokens)
        self._prompts[request.request_id] = len(request.prompt)
        self.scheduler.add(
            RequestSpec(request.request_id, request.prompt, request.output_tokens, 0, request.priority, request.salt)
        )

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    @property
    def busy(self) -> bool:
        return self.scheduler.has_work

    def schedule(self) -> Record:
        self._plan = plan = self.scheduler.schedule()
        questions, self._script.questions = tuple(self._script.questions), []
        runs = tuple((entry.request.request_id, entry.computed, entry.scheduled) for entry in plan.entries)
        requests = [entry.request for entry in plan.entries]
        requests += [each for each in self.scheduler._requests.values() if each.status is Status.LOADING]
        tables = {each.request_id: each.block_table() for each in requests}
        return Record(runs, tuple(plan.preempted), questions, tables)

    def update(self, finished: Finished, errors: frozenset[int]) -> None:
        sampled = {}
        for entry in self._plan.entries:
            name = entry.request.request_id
            if entry.samples:
                sampled[name] = self._tokens[name][entry.request.length - self._prompts[name]]
        self.scheduler.update(self._plan, StepOutput(sampled, finished, errors))


class RealSide:
    """vLLM's scheduler, with one batch in flight."""

    def __init__(self, case: Case, script: Script) -> None:
        self._script = script
        transfer = {
            "kv_connector": ScriptConnector.__name__,
            "kv_connector_module_path": ScriptConnector.__module__,
            "kv_connector_extra_config": {"script": script},
        }
        config = make_config(case, transfer)
        self.scheduler = make_scheduler(case, config, make_kv_config(case))
        self._tokens: dict[str, list[int]] = {}
        self._output: Any = None
        self._arrivals = 0

    def add(self, request: CaseRequest) -> None:
        self._tokens[request.request_id] = reference(request.prompt, request.output_tokens)
        self.scheduler.add_request(make_request(request, float(self._arrivals)))
        self._arrivals += 1

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, ABORTED)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests())

    def schedule(self) -> Record:
        requests = self.scheduler.requests
        output = self._output = self.scheduler.schedule()
        questions, self._script.questions = tuple(self._script.questions), []
        counts = output.num_scheduled_tokens
        runs = tuple((name, requests[name].num_computed_tokens - count, count) for name, count in counts.items())
        loading = [each.request_id for each in self.scheduler.kv_holding_waiting if each.num_computed_tokens]
        loading = [name for name in loading if name in self._script.loading]
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in (*counts, *loading)}
        return Record(runs, tuple(sorted(output.preempted_req_ids or ())), questions, tables)

    def update(self, finished: Finished, errors: frozenset[int]) -> None:
        names = list(self._output.num_scheduled_tokens)
        sampled = [self._sample(name) for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(
                finished_sending=set(finished.sent),
                finished_recving=set(finished.received),
                failed_recving=set(finished.failed),
                invalid_block_ids=set(errors),
            ),
        )
        self.scheduler.update_from_output(self._output, result)

    def _sample(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        return [self._tokens[name][request.num_output_tokens]]


def differential_case(seed: int) -> Case:
    """Cases for the comparison: tight pools, both policies, sync and async loads, one or several groups."""
    rng = random.Random(f"differential/{seed}")
    windows = rng.choice([(None,), (None,), (None, rng.choice([9, 16, 33])), (None, 20, 12)])
    requests = make_requests(rng, abort_rate=rng.choice([0.0, 0.2]))
    load_async = len(windows) == 1 and rng.random() < 0.5
    return Case(
        seed=seed,
        requests=requests,
        windows=windows,
        num_blocks=tight_blocks(rng, requests, len(windows)),
        max_num_seqs=rng.choice([3, 8, 16]),
        max_batched_tokens=rng.choice([24, 64, 256]),
        priority_policy=rng.random() < 0.4,
        prefix_cache=False,
        reserve_whole=rng.random() < 0.6,
        load_async=load_async,
        load_error_rate=0.0 if load_async or len(windows) > 1 else rng.choice([0.0, 0.3]),
    )


def compare_seed(seed: int) -> tuple[int, Difference | None, dict[str, int]]:
    counts: Counter[str] = Counter()
    case = differential_case(seed)
    gc.disable()
    try:
        difference = compare(case, counts)
    finally:
        gc.enable()
    return seed, difference, dict(counts)


def compare(case: Case, counts: Counter[str]) -> Difference | None:
    """The first step that differs."""
    scripts = [
        Script(case.seed, case.load_async, len(case.windows), case.load_error_rate, 0.3) for _ in ("ours", "theirs")
    ]
    ours, theirs = SimSide(case, scripts[0]), RealSide(case, scripts[1])
    arrivals = sorted(case.requests, key=lambda request: request.step)
    for step in range(STEPS_MAX):
        due = [request for request in arrivals if request.step == step]
        stopped = [request.request_id for request in arrivals if request.abort_step == step]
        for request in due:
            ours.add(request)
            theirs.add(request)
        for name in stopped:
            ours.abort(name)
            theirs.abort(name)
        if not (ours.busy or theirs.busy) and all(request.step <= step for request in arrivals):
            return None
        a, b = ours.schedule(), theirs.schedule()
        difference = differs(step, a, b)
        if difference is not None:
            return difference
        counts.update(steps=1, questions=len(a.questions), preemptions=len(a.preempted), runs=len(a.runs))
        ours.update(*scripts[0].reports())
        theirs.update(*scripts[1].reports())
    return Difference(STEPS_MAX, "not done", ours.scheduler.describe(), theirs.busy)


def differs(step: int, ours: Record, theirs: Record) -> Difference | None:
    for what in ("questions", "preempted", "runs"):
        a, b = getattr(ours, what), getattr(theirs, what)
        if what == "preempted":
            a, b = tuple(sorted(a)), tuple(sorted(b))
        if a != b:
            return Difference(step, what, a, b)
    return _tables_differ(step, ours.tables, theirs.tables)


def _tables_differ(step: int, ours: dict[str, BlockTable], theirs: dict[str, BlockTable]) -> Difference | None:
    if ours.keys() != theirs.keys():
        return Difference(step, "requests with blocks", sorted(ours), sorted(theirs))
    there, back = {0: 0}, {0: 0}
    for name in ours:
        for group, (a, b) in enumerate(zip(ours[name], theirs[name], strict=True)):
            if len(a) != len(b) or not all(_same(there, back, x, y) for x, y in zip(a, b, strict=True)):
                return Difference(step, f"table of {name}, group {group}", a, b)
    return None


def _same(there: dict[int, int], back: dict[int, int], ours: int, theirs: int) -> bool:
    return there.setdefault(ours, theirs) == theirs and back.setdefault(theirs, ours) == ours

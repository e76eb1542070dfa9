"""`KvcoreConnector` under vLLM's scheduler on real threads: in the process and in front of servers; what it refuses."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm
from vllm.plugins import load_general_plugins

from kvcore.answers import Answer
from kvcore.connectors.vllm import sides
from kvcore.connectors.vllm.connector import KvcoreConnector
from kvcore.connectors.vllm.scheduler import SchedulerHalf
from kvcore.connectors.vllm.stats import SCHEDULER_COUNTERS, WORKER_COUNTERS, KvcoreStats
from kvcore.connectors.vllm.store_notes import NotedStores
from kvcore.errors import ConfigError
from kvcore.ladder.targets.vllm_scheduler.case import BLOCK_TOKENS, Case, CaseRequest
from kvcore.ladder.targets.vllm_scheduler.engine import (
    ABORTED,
    make_config,
    make_kv_config,
    make_request,
    make_scheduler,
)
from kvcore.ladder.targets.vllm_scheduler.fake_runner import FakeRunner, Finding
from kvcore.ladder.targets.vllm_scheduler.tokens import reference
from kvcore.runtime.child import ENDS_IN_S, ServerChild

CASE = Case(
    seed=0,
    requests=tuple(CaseRequest(f"r{i}", tuple(range(i + 1, i + 70)), 12) for i in range(6)),
    num_blocks=40,
)
STEPS_MAX = 200_000
IN_PROCESS: dict[str, Any] = {"l1_bytes": 1 << 20}


def transfer(**extra: Any) -> dict[str, Any]:
    if "connectors" in extra:
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    return {
        "kv_connector": "KvcoreConnector",
        "kv_connector_module_path": "kvcore.connectors.vllm",
        "kv_connector_extra_config": {"chunk_tokens": 16, **extra},
    }


class Runner(FakeRunner):
    """Takes the connector's statistics as vLLM's runners do: after the reports of each step."""

    taken: KvcoreStats

    def _reports(self, output: Any) -> Any:
        reports = super()._reports(output)
        grown = self._connector.get_kv_connector_stats()
        if isinstance(grown, KvcoreStats):
            self.taken.aggregate(KvcoreConnector.build_kv_connector_stats(grown.data))
            reports.kv_connector_stats = grown
        return reports


class Engine:
    """A scheduler and a worker; both ends of one connector. `serve` may be called again."""

    def __init__(self, case: Case, events: bool = False, **extra: Any) -> None:
        config, kv_config = make_config(case, transfer(**extra)), make_kv_config(case)
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=events, publisher="null")
        self.case = case
        self.scheduler = make_scheduler(case, config, kv_config)
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
        self.findings: list[Finding] = []
        self.runner = Runner(case, self.worker, self.findings)
        self.runner.taken = KvcoreStats()
        self._passes = 0

    def serve(self) -> None:
        """All requests at once, from an empty prefix cache; every token and every slot must be right."""
        tokens = self.add_all()
        self._run(tokens)
        for request in self.case.requests:
            assert tokens[f"{request.request_id}.{self._passes}"] == reference(request.prompt, request.output_tokens)
        assert not self.findings
        assert self.scheduler.reset_prefix_cache()

    def add_all(self) -> dict[str, list[int]]:
        """The requests of the next pass, and where their tokens go."""
        self._passes += 1
        tokens: dict[str, list[int]] = {}
        for request in self.case.requests:
            name = f"{request.request_id}.{self._passes}"
            tokens[name] = []
            self.scheduler.add_request(make_request(replace(request, request_id=name), 0.0))
        return tokens

    def _run(self, tokens: dict[str, list[int]]) -> None:
        for _ in range(STEPS_MAX):
            if not self.scheduler.has_requests():
                return
            self._step(tokens)
        raise AssertionError("not done")

    def _step(self, tokens: dict[str, list[int]]) -> None:
        output = self.scheduler.schedule()
        for outputs in self.scheduler.update_from_output(output, self.runner.execute(output)).values():
            for each in outputs.outputs:
                tokens[each.request_id].extend(each.new_token_ids)

    def hear_of_all_stores(self) -> None:
        """Empty steps, until the last store that outlived its pass has been told of."""
        for _ in range(STEPS_MAX):
            if not self.scheduler.connector._book._planned:
                return
            self._step({})
        raise AssertionError("not done")

    @property
    def known(self) -> Any:
        return self.scheduler.connector._scheduler._known

    @property
    def moved(self) -> Any:
        return self.worker._side.worker.statistics()

    def close(self) -> None:
        self.scheduler.connector.shutdown()
        self.worker.shutdown()


@contextmanager
def engine_of(case: Case = CASE, **extra: Any) -> Iterator[Engine]:
    engine = Engine(case, **extra)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def server(directory: Path, name: str = "server") -> Iterator[str]:
    """The address of a `kvcore serve` with chunks of 16 tokens."""
    address = f"ipc://{directory}/{name}.sock"
    arguments = ("--listen", address, "--l1", "1MiB", "--chunk-tokens", "16", "--http", "")
    child = ServerChild(directory / f"{name}.log", *arguments).started()
    try:
        yield address
    finally:
        assert child.stop(ENDS_IN_S) == 0


@pytest.mark.parametrize("load_async", [True, False])
def test_on_real_threads_a_second_pass_hits_and_every_slot_is_right(load_async: bool) -> None:
    with engine_of(replace(CASE, prefix_cache=True), load_async=load_async, **IN_PROCESS) as engine:
        engine.serve()
        engine.serve()
        assert engine.moved.loads >= len(CASE.requests)
        assert engine.moved.loads_failed == 0
    assert not sides._HOSTS, "the host ends with its last user"


@pytest.mark.parametrize("servers", [1, 2])
def test_an_engine_that_starts_anew_hits_what_the_last_one_left_in_its_servers(servers: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(server(tmp_path, f"server{index}")) for index in range(servers)]
        for life in range(2):
            with engine_of(servers=addresses if servers > 1 else addresses[0]) as engine:
                engine.serve()
                assert (engine.moved.loads >= len(CASE.requests)) == bool(life)


def test_two_engines_of_one_server_with_equal_request_ids_are_kept_apart(tmp_path: Path) -> None:
    """S06: both number their requests alike, step by step; neither's question ends the other's."""
    with server(tmp_path) as address, engine_of(servers=address) as one, engine_of(servers=address) as two:
        for engine in (one, two):
            engine.serve()
        loaded = [engine.moved.loads for engine in (one, two)]
        begin = [(engine, engine.add_all()) for engine in (one, two)]
        for _ in range(STEPS_MAX):
            busy = [(engine, tokens) for engine, tokens in begin if engine.scheduler.has_requests()]
            for engine, tokens in busy:
                engine._step(tokens)
            if not busy:
                break
        for engine, before in zip((one, two), loaded, strict=True):
            assert not engine.findings
            assert (engine.moved.loads - before, engine.moved.loads_failed) == (len(CASE.requests), 0)


def test_a_server_that_would_refuse_every_question_stops_the_engine_at_its_start(tmp_path: Path) -> None:
    with server(tmp_path) as address:
        refuse(CASE, "chunk_tokens: the server has 16, the client has 32", servers=address, chunk_tokens=32)
        with engine_of(servers=address) as engine:
            engine.serve()
        refuse(replace(CASE, layers=2), "refuses this engine", servers=address)


def test_a_server_that_is_not_there_is_told_of_and_the_engine_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, alone = f"ipc://{tmp_path}/nobody.sock", replace(CASE, requests=CASE.requests[:1])
    make_config(CASE, {})  # the first one in a process turns warnings off, ours as well
    with caplog.at_level("WARNING", "kvcore.vllm"), engine_of(alone, servers=address) as engine:
        engine.serve()
        assert engine.moved.cells_stored == 0
    assert f"no kvcore server answers at {address}" in caplog.text


def test_after_a_reset_of_the_cache_nothing_that_was_stored_is_found() -> None:
    """vLLM asks for it when weights have changed."""
    with engine_of(**IN_PROCESS) as engine:
        engine.serve()
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        before = engine.moved
        engine.serve()
        assert engine.moved.loads == before.loads, "keys of another life"
        assert engine.moved.cells_stored > before.cells_stored
        engine.serve()
        assert engine.moved.loads >= before.loads + len(CASE.requests), "and the new life's are found"


def test_a_reset_with_requests_under_way_leaves_them_nothing_old_to_load() -> None:
    """S02: as vLLM does it when it pauses: the running ones are preempted, the waiting ones wait."""
    with engine_of(replace(CASE, max_num_seqs=3), **IN_PROCESS) as engine:
        engine.serve()
        before = engine.moved.loads
        tokens = engine.add_all()
        for _ in range(STEPS_MAX):
            engine._step(tokens)
            if any(tokens.values()) and not any(known.loading for known in engine.known.values()):
                break
        loaded = engine.moved.loads
        assert loaded > before, "the cache is used"
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine._run(tokens)
        assert engine.moved.loads == loaded, "keys of another life"
        assert not engine.findings


def one_request(engine: Engine, name: str, **fields: Any) -> None:
    """Serve one request, of which vLLM says something more."""
    request = make_request(replace(engine.case.requests[0], request_id=name), 0.0)
    for field, value in fields.items():
        setattr(request, field, value)
    engine.scheduler.add_request(request)
    engine._run({name: []})
    engine._step({})
    assert not engine.findings
    assert engine.scheduler.reset_prefix_cache()


def test_a_request_that_reads_no_cache_is_stored_and_not_looked_up() -> None:
    """S01: `prompt_logprobs` and token-wise pooling."""
    with engine_of(**IN_PROCESS) as engine:
        core = engine.scheduler.connector._side.scheduler
        for name in ("cold", "warm"):
            one_request(engine, name, skip_reading_prefix_cache=True)
        assert (core.statistics().lookups, core.statistics().tokens_queried) == (0, 0)
        assert engine.moved.cells_stored > 0
        one_request(engine, "ordinary")
        assert engine.moved.loads == 1


def test_a_prompt_of_tokens_and_embeddings_is_not_for_the_cache() -> None:
    """S03: vLLM's hashes do not know which positions the embeddings stand for."""
    with engine_of(**IN_PROCESS) as engine:
        one_request(engine, "mixed", prompt_is_token_ids=[True, False] * 34 + [True])
        one_request(engine, "same tokens")
        assert (engine.moved.loads, engine.moved.cells_stored > 0) == (0, True)
        one_request(engine, "mixed again", prompt_is_token_ids=[True, False] * 34 + [True])
        assert engine.moved.loads == 0


@dataclass
class Promised(KVConnectorMetadata):
    blocks: frozenset[int]


class Unlucky(KVConnectorBase_V1, SupportsHMA):
    """Promises the first two chunks of every request of the first pass, at once, and brings none of them."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tried: set[str] = set()
        self._promised: frozenset[int] = frozenset()
        self._missing: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tried = request.request_id in self._tried or not request.request_id.endswith(".1")
        return 0 if tried else max(0, 32 - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._tried.add(request.request_id)
            self._promised |= frozenset(blocks.get_block_ids()[0][: 32 // BLOCK_TOKENS])

    def build_connector_meta(self, scheduler_output: Any) -> Promised:
        promised, self._promised = self._promised, frozenset()
        return Promised(promised)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._missing |= self._get_connector_metadata().blocks

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing


def test_what_another_connector_did_not_bring_is_not_stored() -> None:
    """S38: it fails in the very step that computes on; the next pass hears of these prompts from us alone."""
    children = [
        {"kv_connector": Unlucky.__name__, "kv_connector_module_path": __name__, "kv_role": "kv_both"},
        {**transfer(**IN_PROCESS), "kv_role": "kv_both"},
    ]
    with closing(Engine(CASE, connectors=children)) as engine:
        engine.serve()
        assert engine.runner.counts.tainted, "steps ran over what had not come"
        engine.serve()
        ours = engine.worker.sub_connectors[1]
        assert ours._side.worker.statistics().loads == len(CASE.requests)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_load_if_it_pays_measures_steps_and_loads_and_decides(async_scheduling: bool) -> None:
    """Whatever it decides on this machine, every token is right; and it is no guess."""
    case = replace(CASE, async_scheduling=async_scheduling)
    with engine_of(case, admission="if-it-pays", **IN_PROCESS) as engine:
        for requests in (CASE.requests, CASE.requests[:1], CASE.requests):  # in between one load is alone on its way
            engine.case = replace(case, requests=requests)
            engine.serve()
        rates = engine.scheduler.connector._side.scheduler.admission.statistics()
        assert rates.steps_measured > 0
        assert rates.loads_measured > 0
        assert rates.prefill_token_s > 0
        assert rates.decided_load + rates.decided_compute + rates.lookups_unwanted > len(CASE.requests)


@pytest.mark.parametrize(
    ("limit", "loads"), [({"admission_floor_tokens": 500}, 0), ({"admission_ceiling_tokens": 0}, 6)]
)
def test_the_limits_of_the_admission_have_the_last_word(limit: dict[str, int], loads: int, tmp_path: Path) -> None:
    with server(tmp_path) as address, engine_of(servers=address, admission="if-it-pays", **limit) as engine:
        engine.serve()
        engine.serve()
        assert engine.moved.loads == loads


def counted(half: Any, names: Iterable[str]) -> dict[str, int]:
    now = half.statistics()
    return {name: value for name in names if (value := getattr(now, name))}


def test_the_statistics_that_vllm_has_taken_add_up_to_the_workers_own() -> None:
    with engine_of(**IN_PROCESS) as engine:
        engine.serve()
        engine.serve()
        now = counted(engine.worker._side.worker, WORKER_COUNTERS)
        assert engine.runner.taken.reduce() == now
        assert now["cells_loaded"]
        assert now["bytes_stored"]


@pytest.mark.parametrize("beside", [False, True])
def test_both_halves_count_in_vllms_metrics(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through vLLM's own front end. Of a connector in a `MultiConnector` it insists on metrics."""
    registry = CollectorRegistry()
    monkeypatch.setattr(KVConnectorProm, "_counter_cls", partial(prometheus_client.Counter, registry=registry))
    ours = transfer() | {"kv_role": "kv_both"}
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [ours]}}
    front = KVConnectorProm(make_config(CASE, multi if beside else transfer()), ["engine"], {0: ["0"]})
    with engine_of(admission="if-it-pays", admission_floor_tokens=500, **IN_PROCESS) as engine:

        def tell(_speculation: Any, stats: KvcoreStats | None, *_others: Any, **_more: Any) -> None:
            told = stats.to_dict() if stats else {}
            front.observe({"KvcoreConnector": told} if beside else told)

        monkeypatch.setattr(engine.scheduler, "make_stats", tell)
        engine.serve()
        engine.serve()
        now = counted(engine.scheduler.connector._side.scheduler, SCHEDULER_COUNTERS)
        now |= counted(engine.worker._side.worker, WORKER_COUNTERS)
    names = SCHEDULER_COUNTERS | WORKER_COUNTERS
    found = {name: registry.get_sample_value(f"vllm:kvcore_{name}_total", {"engine": "0"}) for name in names}
    assert {name: value for name, value in found.items() if value} == now
    assert now["lookups_unwanted"]
    assert now["cells_stored"]


class Published:
    """What vLLM would publish: of its own prefix cache, and of the cache behind it."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.behind: list[Any] = []

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                (self.behind if event.medium == MEDIUM_CPU else self.own).append(event)


def names_of(events: list[Any], group: int) -> set[Any]:
    return {name for event in events if event.group_idx == group for name in event.block_hashes}


@pytest.mark.parametrize("where", ["in the process", "in a server"])
def test_kv_events_name_each_published_cell_once_in_the_engines_own_words(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8 tokens, chunks of 16: two names per event, and the name before them is the parent.

    Two requests that store one cell at the same time copy it twice, and one copy is discarded; a copy that a preemption
    overtakes is never published. So the answers are counted, not the copies.
    """
    ends, end = Counter[bool](), NotedStores._end

    def counted(self: Any, tag: str, answers: Any) -> None:
        ends.update(answer is Answer.PUBLISHED for answer in answers or self._open.get(tag, ()))
        end(self, tag, answers)

    monkeypatch.setattr(NotedStores, "_end", counted)
    case = replace(CASE, windows=(None, 20), requests=(*CASE.requests, replace(CASE.requests[0], request_id="same")))
    with ExitStack() as stack:
        place = {"servers": stack.enter_context(server(tmp_path))} if where == "in a server" else IN_PROCESS
        engine = stack.enter_context(engine_of(case, events=True, **place))
        published = engine.scheduler.kv_event_publisher = Published()
        engine.serve()
        engine.hear_of_all_stores()
        assert len(published.behind) == ends[True] > 0
        for event in published.behind:
            assert (event.block_size, len(event.token_ids), len(event.block_hashes)) == (8, 16, 2)
        for group in (0, 1):
            assert names_of(published.behind, group), "both groups have stored something"
            assert names_of(published.behind, group) <= names_of(published.own, group)
        full = [event for event in published.behind if event.group_idx == 0]
        parents = {event.parent_block_hash for event in full} - {None}
        assert parents <= names_of(published.own, 0)
        assert len(parents - {event.block_hashes[-1] for event in full}) <= ends[False]
        engine.serve()
        engine.hear_of_all_stores()
        told = {(event.group_idx, *event.block_hashes) for event in published.behind}
        assert len(told) == len(published.behind) == ends[True], "what was there already is no news"
        assert engine.scheduler.connector._book._planned == {}, "nothing is kept for stores that have ended"


def test_nothing_that_was_stored_before_a_reset_is_told_of_after_it() -> None:
    """S07: a router that has heard that everything is gone would send requests to blocks that nobody can find."""
    with engine_of(events=True, **IN_PROCESS) as engine:
        published = engine.scheduler.kv_event_publisher = Published()
        tokens = engine.add_all()
        while not engine.scheduler.connector._book._planned:
            engine._step(tokens)
        told = len(published.behind)
        engine.scheduler.finish_requests(list(tokens), ABORTED)
        assert engine.scheduler.reset_connector_cache()
        engine.hear_of_all_stores()
        assert len(published.behind) == told
        engine.serve()
        engine.hear_of_all_stores()
        assert len(published.behind) > told


def test_without_anybody_who_wants_events_nothing_is_noted() -> None:
    with engine_of(**IN_PROCESS) as engine:
        engine.serve()
        assert engine.worker._side.noted is None
        assert list(engine.scheduler.connector.take_events()) == []


def test_a_plan_from_another_process_is_refused_by_a_cache_in_the_process() -> None:
    with engine_of(**IN_PROCESS) as engine:
        engine.scheduler.add_request(make_request(CASE.requests[0], 0.0))
        output = engine.scheduler.schedule()
        elsewhere = replace(output.kv_connector_metadata, process=output.kv_connector_metadata.process + 1)
        with pytest.raises(ConfigError, match="different processes"):
            engine.worker.handle_preemptions(elsewhere)


def test_the_entry_point_makes_the_name_known_without_a_module_path() -> None:
    load_general_plugins()
    assert KVConnectorFactory.get_connector_class_by_name("KvcoreConnector") is KvcoreConnector


def refuse(case: Case, text: str, **extra: Any) -> None:
    with pytest.raises(ConfigError, match=text):
        make_scheduler(case, make_config(case, transfer(**extra)), make_kv_config(case))


def test_an_unknown_setting_is_refused() -> None:
    refuse(CASE, "unknown settings", chunk_token=16)


def test_engines_of_several_workers_are_refused() -> None:
    """S29: their ranks would have other layers, or the same ones."""
    config = make_config(CASE, transfer())
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.world_size = 2
    with pytest.raises(ConfigError, match="no tensor or pipeline parallelism"):
        KvcoreConnector(config, KVConnectorRole.SCHEDULER, make_kv_config(CASE))


def test_servers_that_would_copy_by_themselves_are_refused() -> None:
    refuse(CASE, "vLLM allocates its pages itself", servers="ipc:///nobody", transfer="server")
    refuse(CASE, "known are", servers="ipc:///nobody", transfer="anybody")


def test_limits_without_an_admission_that_has_them_are_refused() -> None:
    refuse(CASE, 'is for admission = "if-it-pays"', admission_floor_tokens=8)
    refuse(CASE, "must be a whole number", admission="if-it-pays", admission_ceiling_tokens=True)
    refuse(CASE, "below the floor", admission="if-it-pays", admission_floor_tokens=9, admission_ceiling_tokens=8)
    refuse(CASE, "known are always, if-it-pays", admission="sometimes")
    refuse(CASE, 'is for admission = "if-it-pays"', admission_objective="tpot:50")
    refuse(CASE, "needs a tpot", admission="if-it-pays", admission_objective="ttft:2000")
    refuse(CASE, "must be a text", admission="if-it-pays", admission_objective=50)


def test_synchronous_loads_are_refused_where_their_failure_cannot_be_told() -> None:
    """S53: or what failed would be computed over."""
    refuse(replace(CASE, windows=(None, 16)), "several cache groups", load_async=False)
    refuse(replace(CASE, async_scheduling=True), "overlapping batches", load_async=False)


@pytest.mark.parametrize("extra", [{}, {"load_async": False}, {"admission": "if-it-pays"}], ids=str)
def test_a_quiet_step_is_one_for_which_the_core_plans_nothing(monkeypatch: pytest.MonkeyPatch, extra: Any) -> None:
    """What the engine's thread plans without asking the cache's loop is what the loop would have answered."""
    quiet_step, build_meta = SchedulerHalf.quiet_step, SchedulerHalf.build_meta
    guesses: list[Any] = []

    def guess(self: Any, output: Any) -> None:
        guesses.append(quiet_step(self, output))
        self._steps -= guesses[-1] is not None

    async def compare(self: Any, output: Any) -> Any:
        step = await build_meta(self, output)
        assert guesses[-1] in (None, step)
        return step

    monkeypatch.setattr(SchedulerHalf, "quiet_step", guess)
    monkeypatch.setattr(SchedulerHalf, "build_meta", compare)
    with engine_of(**IN_PROCESS, **extra) as engine:
        for _ in range(3):
            engine.serve()
        assert engine.moved.loads > 0
    quiet = sum(step is not None for step in guesses)
    assert quiet > 10
    assert len(guesses) - quiet > 10

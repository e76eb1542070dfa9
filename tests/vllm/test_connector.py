"""`KvcoreConnector` on real threads, and the configurations that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvcore.connectors.vllm import sides
from kvcore.errors import ConfigError
from kvcore.ladder.targets.vllm_scheduler.case import Case, CaseRequest
from kvcore.ladder.targets.vllm_scheduler.engine import make_config, make_kv_config, make_request, make_scheduler
from kvcore.ladder.targets.vllm_scheduler.fake_runner import FakeRunner, Finding
from kvcore.ladder.targets.vllm_scheduler.tokens import reference

CASE = Case(
    seed=0,
    requests=tuple(CaseRequest(f"r{i}", tuple(range(i + 1, i + 70)), 12) for i in range(6)),
    num_blocks=40,
)
STEPS_MAX = 200_000


def transfer(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvcoreConnector",
        "kv_connector_module_path": "kvcore.connectors.vllm",
        "kv_connector_extra_config": {"l1_bytes": 1 << 20, "chunk_tokens": 16, **extra},
    }


def serve(scheduler: Any, runner: FakeRunner, names: list[str]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for _ in range(STEPS_MAX):
        if not scheduler.has_requests():
            return tokens
        output = scheduler.schedule()
        for outputs in scheduler.update_from_output(output, runner.execute(output)).values():
            for each in outputs.outputs:
                tokens[each.request_id].extend(each.new_token_ids)
    raise AssertionError("not done")


@pytest.mark.parametrize("load_async", [True, False])
def test_on_real_threads_a_second_pass_hits_and_every_slot_is_right(load_async: bool) -> None:
    config, kv_config = make_config(CASE, transfer(load_async=load_async)), make_kv_config(CASE)
    scheduler = make_scheduler(replace(CASE, prefix_cache=True), config, kv_config)
    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_config)
    findings: list[Finding] = []
    runner = FakeRunner(CASE, worker, findings)
    for number in range(2):
        for request in CASE.requests:
            scheduler.add_request(make_request(replace(request, request_id=f"{request.request_id}.{number}"), 0.0))
        got = serve(scheduler, runner, [f"{request.request_id}.{number}" for request in CASE.requests])
        for request in CASE.requests:
            assert got[f"{request.request_id}.{number}"] == reference(request.prompt, request.output_tokens)
        scheduler.reset_prefix_cache()
    assert not findings
    assert worker._side.worker.statistics().loads >= len(CASE.requests)
    assert worker._side.worker.statistics().loads_failed == 0
    scheduler.connector.shutdown()
    worker.shutdown()
    assert not sides._HOSTS, "the host ends with its last user"


def refuse(case: Case, text: str, **extra: Any) -> None:
    with pytest.raises(ConfigError, match=text):
        make_scheduler(case, make_config(case, transfer(**extra)), make_kv_config(case))


def test_an_unknown_setting_is_refused() -> None:
    refuse(CASE, "unknown settings", chunk_token=16)


def test_synchronous_loads_are_refused_where_their_failure_cannot_be_told() -> None:
    refuse(replace(CASE, windows=(None, 16)), "several cache groups", load_async=False)
    refuse(replace(CASE, async_scheduling=True), "overlapping batches", load_async=False)

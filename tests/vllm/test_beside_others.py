"""`KvcoreConnector` under vLLM's MultiConnector, beside another connector that stores and loads the same requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.targets.vllm.climb import VllmStage
from kvcore.ladder.targets.vllm.engine import prepare_process
from kvcore.sim.workload import load_workload

pytestmark = [pytest.mark.ladder, pytest.mark.vllm]

REQUESTS = 8
MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
KVCORE: dict[str, Any] = {
    "kv_connector": "KvcoreConnector",
    "kv_role": "kv_both",
    # No room for everything: what it has forgotten the other one may still have.
    "kv_connector_extra_config": {"l1_bytes": 1 << 20, "chunk_tokens": 64},
}
OFFLOADING: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostMemorySpec",
        "spec_module_path": "kvcore.ladder.targets.vllm.host_memory_offload",
        "cpu_bytes_to_use": 1 << 28,
        "offload_prompt_only": False,
    },
}


def climb(model: str, *connectors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Cold, hot and preempted; returns who loaded how often."""
    prepare_process()
    from kvcore.ladder.targets.vllm.host_memory_offload import HostMemoryWorker

    loads: Counter[str] = Counter()
    halves: list[Any] = []
    submit = HostMemoryWorker.submit_load

    def counted(self: Any, *arguments: Any) -> bool:
        loads["offloading"] += 1
        return submit(self, *arguments)

    monkeypatch.setattr(HostMemoryWorker, "submit_load", counted)
    options = LadderOptions(
        target="vllm",
        requests=REQUESTS,
        families=REQUESTS // 2,
        chunk_tokens=64,
        model=model,
        connector=MULTI,
        connector_config={"connectors": list(connectors)},
    )
    workload = load_workload(None, 0, requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)
    stage = VllmStage(
        MatrixCell.parse("full+window/r1/inproc/async" if model == "gemma3" else "full/r1/inproc/async"),
        options,
        workload,
        prefix_caches=(False,),
        spoil=lambda scheduler, worker: halves.extend(worker.sub_connectors),
    )
    results = stage.climb(("0", "2", "3", "4"))
    assert [problem for result in results for problem in result.problems] == []
    (ours,) = [half for half in halves if type(half).__name__ == "KvcoreConnector"]
    loads["kvcore"] = ours._side.worker.statistics().loads
    state = ours._attached.host.l1.statistics()
    assert (state.leases, state.holds, state.objects_staging) == (0, 0, 0), "what the other one loads is given back"
    return loads


def test_two_connectors_load_for_the_same_requests_and_every_block_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = climb("gemma3", KVCORE, OFFLOADING, monkeypatch=monkeypatch)
    assert loads["kvcore"]
    assert loads["offloading"]


def test_behind_another_connector_it_gives_back_what_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = climb("llama", OFFLOADING, KVCORE, monkeypatch=monkeypatch)
    assert loads["offloading"]

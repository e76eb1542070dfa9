"""`KvcoreConnector` on vLLM's real engine, short: the rungs are green in the process and in front of a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcore.errors import ConfigError
from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import expand_rungs, failures
from kvcore.ladder.targets.vllm.climb import VllmStage
from kvcore.sim.workload import load_workload

pytestmark = [pytest.mark.ladder, pytest.mark.vllm]

REQUESTS = 12
OPTIONS = LadderOptions(target="vllm", requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)


@pytest.mark.parametrize("cell", ["full/r1/inproc/async", "full+window/r1/s1/async"])
def test_the_rungs_are_green(cell: str) -> None:
    result = climb_all(replace(OPTIONS, cells=(MatrixCell.parse(cell),), passes=expand_rungs(range(5))))
    assert not failures(result.cells), failures(result.cells)


def test_loading_only_what_pays_changes_no_output() -> None:
    """On one engine: the one without a prefix cache of its own must have both from the connector."""
    workload = load_workload(None, 0, requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)
    options = replace(OPTIONS, admission="if-it-pays")
    stage = VllmStage(MatrixCell.parse("full/r1/s1/async"), options, workload, prefix_caches=(False,))
    results = {result.rung: result for result in stage.climb(("0", "2", "3", "4"))}
    assert [result.problems for result in results.values()] == [[], [], [], []]
    assert results["3"].counts.loads_verified > 0
    assert results["3"].counts.refusals > 0
    assert results["4"].counts.preemptions > 0


def test_settings_of_a_connector_that_nobody_named_are_refused() -> None:
    with pytest.raises(ConfigError, match="--connector-config is for --connector"):
        climb_all(replace(OPTIONS, connector_config={"l1_bytes": 1 << 20}))

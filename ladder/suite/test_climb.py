"""Each configuration of the matrix climbs the rungs; one test per configuration."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvcore.ladder.climb import cells_for, climb_all
from kvcore.ladder.matrix import FULL_MATRIX
from kvcore.ladder.plugin import PROPERTY
from kvcore.ladder.result import cell_to_json, failures


@pytest.mark.ladder
@pytest.mark.parametrize("cell", FULL_MATRIX, ids=str)
def test_cache_changes_no_output(cell: Any, ladder_options: Any, record_property: Any) -> None:
    """Reference, no cache, cold, hot, hot with preemption, replay: every token and every byte."""
    if cell not in cells_for(ladder_options):
        pytest.skip("this target climbs in fewer configurations")
    result = climb_all(dataclasses.replace(ladder_options, cells=(cell,)))
    report = {
        "target": result.target,
        "workload": result.workload,
        "seed": result.seed,
        "trace_hash": result.trace_hash,
        "cell": cell_to_json(result.cells[0]),
    }
    record_property(PROPERTY, json.dumps(report))
    assert not failures(result.cells), "\n".join([*failures(result.cells), f"reproduce: {result.cells[0].reproduce}"])
    assert result.verdict == "pass"

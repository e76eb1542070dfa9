"""Each configuration of the matrix climbs the rungs; one test per configuration."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvcore.ladder.matrix import FULL_MATRIX
from kvcore.ladder.plugin import PROPERTY
from kvcore.ladder.result import cell_to_json, failures

_PROPERTIES = ("verdict", "requests", "mismatches", "loads_verified", "preemptions", "hit_share")


@pytest.mark.ladder
@pytest.mark.parametrize("cell", FULL_MATRIX, ids=str)
def test_cache_changes_no_output(cell: Any, ladder_options: Any, ladder_cells: Any, record_property: Any) -> None:
    """Reference, no cache, cold, hot, hot with preemption, replay: every token and every byte."""
    from kvcore.ladder.climb import climb_all

    if not ladder_options.passes:
        pytest.skip("storm rungs alone are climbed")
    if cell not in ladder_cells:
        pytest.skip("the target does not climb in this configuration")
    result = climb_all(dataclasses.replace(ladder_options, cells=(cell,), storms=()))
    climb = cell_to_json(result.cells[0])
    report = {
        "target": result.target,
        "workload": result.workload,
        "seed": result.seed,
        "cell": climb,
    }
    record_property(PROPERTY, json.dumps(report))
    for rung in climb["rungs"]:
        for name in _PROPERTIES:
            record_property(f"ladder_rung_{rung['rung']}_{name}", rung[name])
    assert not failures(result.cells), "\n".join([*failures(result.cells), f"reproduce: {result.cells[0].reproduce}"])
    assert result.verdict == "pass"

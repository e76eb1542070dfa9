"""The storm rungs: drawn cases with a hostile part of the world; one test per rung that `--ladder-rung` names.

pytest --pyargs kvcore.ladder.suite -m storm --ladder-rung 5-8
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvcore.ladder.plugin import PROPERTY


@pytest.mark.storm
@pytest.mark.parametrize("rung", ["5", "6", "7", "8"])
def test_no_storm_changes_an_output(rung: str, ladder_options: Any, record_property: Any) -> None:
    """Lying stores, a hostile network, crashes, everything: every token, byte, lease and deadline of every case."""
    if rung not in ladder_options.storms:
        pytest.skip("--ladder-rung does not name this rung")
    from kvcore.ladder.climb import climb_all

    result = climb_all(dataclasses.replace(ladder_options, passes=(), storms=(rung,)), jobs=1)
    (storm,) = result.storms
    row = storm.to_json()
    report = {"target": result.target, "workload": result.workload, "seed": result.seed, "storm": row}
    record_property(PROPERTY, json.dumps(report))
    for name in ("verdict", "cases", "effects", "deaths"):
        record_property(f"ladder_rung_{rung}_{name}", row[name])
    from kvcore.ladder.swarm_rungs.table import reproduce_lines, storm_failures

    assert result.verdict == "pass", "\n".join([*storm_failures(result.storms), *reproduce_lines(result.storms)])

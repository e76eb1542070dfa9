"""Rungs 0 to 4 with an admission that loads only what pays: no output changes, and a climb shows both decisions."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.admission import Limits
from kvcore.connectors.admission import LoadAll
from kvcore.connectors.tracker import RequestTracker
from kvcore.connectors.vllm.settings import Settings
from kvcore.ladder import stack
from kvcore.ladder.admissions import settings_for
from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import CellResult, failures
from kvcore.objective import Objective

pytestmark = pytest.mark.ladder


def climb(target: str, cell: str, **more: Any) -> CellResult:
    cells = (MatrixCell.parse(cell),)
    return climb_all(LadderOptions(target, cells=cells, requests=40, admission="if-it-pays", **more)).cells[0]


@pytest.mark.parametrize(("target", "cell"), [("sim", "full+window/r1/s1/async"), ("local", "full+window/r2/s1/async")])
def test_loading_only_what_pays_changes_no_output(target: str, cell: str) -> None:
    result = climb(target, cell)
    assert failures([result]) == []
    rungs = {rung.rung: rung.counts for rung in result.rungs}
    assert list(rungs) == ["0", "1", "2", "3", "3b", "4", "replay"]
    assert rungs["3"].loads_verified > 0
    assert rungs["3"].refusals > 0
    assert rungs["4"].preemptions > 0
    assert "--admission if-it-pays" in result.reproduce


@pytest.mark.parametrize("seed", [0, 1])
def test_a_connector_that_reads_settings_is_told_the_same_limits(seed: int) -> None:
    told = Settings.read(settings_for("if-it-pays", seed=seed, floor_tokens=64))
    assert told.limits == Limits(64, objective=Objective(tpot_s=0.002, ttft_s=1.0) if seed else None)
    assert Settings.read(settings_for("always", seed=seed, floor_tokens=64)).limits is None


class RefuseAll(LoadAll):
    def length(self, tracker: RequestTracker, local_tokens: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("admission", "problem"), [(LoadAll, "refusals is 0"), (RefuseAll, "loads_verified is 0")], ids=["all", "nothing"]
)
def test_a_climb_that_has_not_shown_both_decisions_fails(
    monkeypatch: pytest.MonkeyPatch, admission: type[LoadAll], problem: str
) -> None:
    monkeypatch.setattr(stack, "admission_for", lambda *_, **__: admission())
    result = climb("sim", "full/r1/inproc/sync", passes=("0", "2", "3"))
    assert any(problem in line for line in failures([result]))

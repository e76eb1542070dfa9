"""Ladder and swarm with an admission that refuses: no output changes, nothing is left behind, a seed repeats itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvcore.errors import ConfigError
from kvcore.ladder.admissions import admission_for
from kvcore.ladder.climb import climb_all
from kvcore.ladder.configure import configure
from kvcore.ladder.matrix import FULL_MATRIX, MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import Floors
from kvcore.ladder.rungs import FLOORS
from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.draw import draw_case
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.targets import sim
from kvcore.sim.loop import SimLoop
from kvcore.sim.world import SimWorld

ADMISSIONS = ["drawn", "if-it-pays"]


def case_of(seed: int, admission: str) -> Case:
    case = draw_case(seed)
    return msgspec.structs.replace(case, config=msgspec.structs.replace(case.config, admission=admission))


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_in_the_swarm_no_output_depends_on_what_is_refused(admission: str) -> None:
    """Chance decides worse than any rates can; and the product's own decisions vary."""
    seen: Counter[str] = Counter()
    refusing = []
    for seed in range(2, 7):
        outcome = run_case(case_of(seed, admission))
        assert not outcome.findings, (seed, outcome.findings)
        seen["compared"] += outcome.tokens_compared
        seen["loaded"] += outcome.loads_verified
        seen.update({mark: count for mark, count in outcome.marks.items() if mark.startswith("connector.")})
        if outcome.marks.get("connector.refused") or outcome.marks.get("connector.lookup_unwanted"):
            refusing.append(outcome)
    assert seen["compared"]
    assert seen["loaded"]
    assert seen["connector.lookup_hurried"] or admission != "drawn"
    first = refusing[0]
    assert run_case(first.case).trace_hash == first.trace_hash
    assert run_case(case_of(first.case.seed, "always")).trace_hash != first.trace_hash


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_on_the_rungs_nothing_depends_on_what_is_refused(admission: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rungs 0 to 4, without the floors of a cache that loads whatever it has."""
    scheduler = []

    def refusing(*arguments: Any) -> Any:
        config, model = configure(*arguments)
        return replace(config, admission=admission, admission_seed=1), model

    def watched(*arguments: Any, **more: Any) -> Any:
        scheduler.append(admission_for(*arguments, **more))
        return scheduler[-1]

    monkeypatch.setattr(sim, "configure", refusing)
    monkeypatch.setattr(sim, "floors_for", lambda requests: dict.fromkeys(FLOORS, Floors()))
    monkeypatch.setattr("kvcore.ladder.stack.admission_for", watched)
    cell = MatrixCell.parse("full+window/r1/s1/async")
    result = climb_all(LadderOptions(requests=16, families=4, cells=(cell,)))
    assert result.cells[0].verdict == "pass", [rung.problems for rung in result.cells[0].rungs]
    assert sum(rung.counts.loads_verified for rung in result.cells[0].rungs)
    if admission == "if-it-pays":
        decided = scheduler[0].statistics()
        assert decided.decided_load
        assert decided.decided_compute + decided.lookups_unwanted


def test_an_unknown_admission_is_refused() -> None:
    config, _ = configure(FULL_MATRIX[0], LadderOptions())
    with SimLoop(0) as loop:
        clock = SimWorld(loop, in_process=True).clock
        with pytest.raises(ConfigError, match="no admission 'sometimes'"):
            admission_for("sometimes", config.layout, clock, seed=0, life=0, over=lambda: False)

"""The simulated scheduler and vLLM's make the same decisions, step by step; a changed rule is seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvcore.ladder.targets.vllm_scheduler import differential
from kvcore.ladder.targets.vllm_scheduler.differential import SimSide, compare, compare_seed, differential_case

SEEDS = 200


def test_questions_victims_runs_and_block_tables_agree() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        _, difference, seen = compare_seed(seed)
        counts.update(seen)
        assert difference is None, f"seed {seed}: {difference}"
    assert counts["preemptions"] > 100
    assert counts["questions"] > 5_000


class WithoutReservation(SimSide):
    """Admits requests whose whole sequence does not fit."""

    def __init__(self, case, script) -> None:  # type: ignore[no-untyped-def]
        super().__init__(replace(case, reserve_whole=not case.reserve_whole), script)


def test_a_changed_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differential, "SimSide", WithoutReservation)
    assert any(compare(differential_case(seed), Counter()) for seed in range(40))

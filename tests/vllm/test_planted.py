"""Bugs planted into `KvcoreConnector` on vLLM's real engine: tokens or KV bytes give each of them away."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.targets.vllm.climb import VllmStage
from kvcore.ladder.targets.vllm.mutants import MUTANTS, slow_stores
from kvcore.ladder.targets.vllm.watch import Reference
from kvcore.sim.workload import Workload, load_workload

pytestmark = [pytest.mark.ladder, pytest.mark.vllm]

REQUESTS = 12
OPTIONS = LadderOptions(target="vllm", requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)
CELL = MatrixCell.parse("full/r1/inproc/async")
PRESSED = ("0", "2", "4", "replay")


@lru_cache(maxsize=1)
def workload() -> Workload:
    return load_workload(None, 0, requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Of the llama-like model, for everybody here."""
    stage = VllmStage(CELL, OPTIONS, workload())
    results = stage.climb(("0", "1"))
    assert [result.verdict for result in results] == ["pass", "pass"]
    return stage.reference


def climb(reference: Reference, spoil: Any) -> list[str]:
    stage = VllmStage(CELL, OPTIONS, workload(), prefix_caches=(False,), spoil=spoil, reference=reference)
    return [problem for result in stage.climb(PRESSED) for problem in result.problems]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_found(mutant: str, reference: Reference) -> None:
    problems = climb(reference, MUTANTS[mutant])
    assert any(text.startswith(("[bytes]", "[output]")) for text in problems), problems


def test_slow_stores_alone_are_no_bug(reference: Reference) -> None:
    assert not climb(reference, slow_stores)

"""The ladder with the fingerprint model on vLLM's real engine: green, and planted bugs are named.

A part of `make ladder-vllm`; two bugs, the smallest and the best hidden one, are in its short form too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest

from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import expand_rungs, failures
from kvcore.ladder.targets.vllm.climb import VllmStage
from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS
from kvcore.ladder.targets.vllm.fingerprint_mutants import MUTANTS, failed_load
from kvcore.ladder.targets.vllm.models import tiny_model
from kvcore.ladder.targets.vllm.mutants import MUTANTS as BLUNT
from kvcore.ladder.targets.vllm.watch import Reference
from kvcore.ladder.targets.vllm_scheduler.mutants import Spoil
from kvcore.sim.workload import Workload, load_workload

pytestmark = pytest.mark.vllm

REQUESTS = 12
OPTIONS = LadderOptions(target="vllm", requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)
SHORT = defaultdict(tuple, dict.fromkeys(("one-float-flipped", "one-block-shifted"), (pytest.mark.ladder,)))


@lru_cache(maxsize=1)
def workload() -> Workload:
    return load_workload(None, 0, requests=REQUESTS, families=REQUESTS // 2, chunk_tokens=64)


@lru_cache(maxsize=2)
def reference(model: str) -> Reference:
    """Rungs 0 and 1, for everybody here."""
    cell = MatrixCell.parse(f"{tiny_model(model).groups}/r1/inproc/async")
    stage = VllmStage(cell, replace(OPTIONS, model=model), workload())
    results = stage.climb(("0", "1"))
    assert [result.verdict for result in results] == ["pass", "pass"]
    return stage.reference


def climb(model: str, cell: str, passes: Sequence[str], spoil: Spoil) -> list[tuple[str, str]]:
    """(rung, problem)"""
    stage = VllmStage(
        MatrixCell.parse(cell),
        replace(OPTIONS, model=model),
        workload(),
        prefix_caches=(False,),
        spoil=spoil,
        reference=reference(model),
    )
    return [(result.rung, problem) for result in stage.climb(passes) for problem in result.problems]


@pytest.mark.parametrize(
    ("model", "cell"), [("fingerprint", "full/r1/inproc/async"), ("fingerprint-window", "full+window/r1/inproc/async")]
)
def test_the_rungs_are_green(model: str, cell: str) -> None:
    cells = (MatrixCell.parse(cell),)
    result = climb_all(replace(OPTIONS, model=model, cells=cells, passes=expand_rungs(range(5))))
    assert not failures(result.cells), failures(result.cells)
    (climbed,) = result.cells
    verified = re.search(r"(\d+) slots verified", climbed.workload)
    assert verified is not None
    assert int(verified[1]) > 1_000_000
    assert "KV 0.0e+00" in climbed.workload, "whole numbers do not differ by rounding"


@pytest.mark.parametrize("mutant", [pytest.param(name, marks=SHORT[name]) for name in MUTANTS])
def test_a_planted_bug_is_named_where_it_is_first_read(mutant: str) -> None:
    problems = climb("fingerprint-window", "full+window/r1/inproc/async", ("0", "2", "3"), MUTANTS[mutant])
    named = [text for _, text in problems if text.startswith("[slot]")]
    assert named, problems
    assert {rung for rung, _ in problems} == {"3"}
    if mutant == "one-block-shifted":
        place = re.search(r"layer (\d+), group \d+: position (\d+) ", named[0])
        assert place is not None
        last = int(place[2]) + BLOCK_TOKENS - 1
        assert f"which belongs to layer {place[1]}, position {last} of " in named[0]
        assert f"{BLOCK_TOKENS} wrong slots" in named[0]
    if mutant == "one-float-flipped":
        assert "1 of 64 floats are other ones; 1 wrong slots" in named[0]


def test_what_was_stored_from_stale_block_ids_is_named_where_it_is_read_back() -> None:
    spoil = BLUNT["stale-blocks"]
    problems = climb("fingerprint", "full/r1/inproc/async", ("0", "2", "4", "replay"), spoil)
    assert any(text.startswith("[slot]") for _, text in problems), problems


@pytest.mark.parametrize("told", [True, False])
def test_a_failed_load_is_a_finding_only_when_nobody_says_so(told: bool) -> None:
    problems = climb("fingerprint", "full/r1/inproc/sync", ("0", "2", "3"), failed_load(told=told))
    wrong = [text for _, text in problems if text.startswith(("[slot]", "[bytes]", "[output]"))]
    assert bool(wrong) is not told, problems

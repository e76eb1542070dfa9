"""The target `vllm-scheduler`: clean seeds are clean, planted bugs are found, failures shrink and reproduce."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kvcore.connectors.vllm import scheduler
from kvcore.ladder.targets.vllm_scheduler.case import make_case
from kvcore.ladder.targets.vllm_scheduler.command import Hunt, main
from kvcore.ladder.targets.vllm_scheduler.mutants import MUTANTS
from kvcore.ladder.targets.vllm_scheduler.shrink import apply_edits, shrink

SEEDS_TO_CATCH = 60
SLOW: dict[str, Any] = {
    "windows": (None,),
    "load_async": False,
    "async_scheduling": False,
    "load_error_rate": 0.0,
    "prefix_cache": False,
    "reset_steps": (),
    "step_us": (2_000_000, 4_000_000),
    "l1_chunks": 400,
}


def test_a_hundred_seeds_leave_no_bad_slot_and_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """`main` also fails when the seeds did not reach preemption, both shapes of resumption, failed loads, aborts and
    null blocks."""
    code = main(["--seeds", "100", "--no-shrink", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["failures"]
    assert report["counts"]["slots checked"] > 1_000_000
    assert report["counts"]["fences waited"] > 0


@pytest.mark.parametrize("mutant", [name for name in MUTANTS if name != "no-stranding"])
def test_a_planted_bug_is_found(mutant: str) -> None:
    hunt = Hunt(mutant, ())
    assert any(hunt(seed)[1].findings for seed in range(SEEDS_TO_CATCH))


@pytest.mark.parametrize(("mutant", "kinds"), [("skipped-load", {"slot"}), ("shifted-load", {"slot"})])
def test_wrong_loads_are_seen_as_wrong_slots(mutant: str, kinds: set[str]) -> None:
    assert Hunt(mutant, ())(0)[1].kinds == kinds


def test_without_the_fence_a_store_publishes_the_bytes_of_another_request() -> None:
    hunt = Hunt("no-fence", ())
    assert hunt(0)[1].kinds == {"slot"}
    assert not Hunt(None, ())(0)[1].findings


def test_a_promise_outlives_its_leases_by_being_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of seconds: whoever waits for room waits longer than a lease lasts, and no load may find it gone."""
    slow = replace(make_case(0), **SLOW)
    outcome = Hunt(None, ()).run(slow)
    assert not outcome.findings
    assert outcome.counts["loads"] > 10
    assert outcome.counts["loads failed"] == 0
    monkeypatch.setattr(scheduler, "ANSWER_NS_MAX", 10**18)
    assert Hunt(None, ()).run(slow).counts["loads failed"] > 0, "without it, this case does find leases gone"


def test_a_seed_runs_alike_twice() -> None:
    assert Hunt(None, ())(3)[1].counts == Hunt(None, ())(3)[1].counts


def test_a_failing_seed_shrinks_to_fewer_requests_that_fail_alike() -> None:
    hunt = Hunt("skipped-load", ())
    case = make_case(0)
    edits, smaller = shrink(case, lambda each: hunt.run(each).kinds)
    assert len(smaller.requests) < len(case.requests)
    assert apply_edits(case, edits) == smaller
    assert Hunt("skipped-load", edits)(0)[1].kinds & hunt(0)[1].kinds


def test_the_command_names_one_line_that_reproduces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "0", "--mutant", "skipped-load", "--no-shrink"]) == 1
    assert "--seed 0 --mutant skipped-load" in capsys.readouterr().out

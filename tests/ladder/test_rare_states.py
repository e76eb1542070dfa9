"""States that a swarm meets once in many hundred seeds, each brought about on purpose: nothing is wrong in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.ladder.sweeps.scenario import MS, SCENARIOS
from kvcore.sim.faults.kind import FaultEvent

pytestmark = pytest.mark.ladder


def run(scenario: str, *faults: FaultEvent, **changes: Any) -> Outcome:
    case = SCENARIOS[scenario].case
    config = msgspec.structs.replace(case.config, **changes)
    outcome = run_case(msgspec.structs.replace(case, config=config, faults=faults))
    assert outcome.findings == []
    return outcome


def test_a_worker_that_commits_after_its_write_lease_is_told_so_and_nothing_is_published() -> None:
    outcome = run("store_and_load", store_lease_ns=MS, page_ns=(MS, 2 * MS))
    assert outcome.marks["l1.write_expired"] > 0
    assert outcome.marks["l1.late_finish_expired"] > 0
    assert outcome.marks["l1.drained"] > 0
    assert outcome.stores_verified == 0


def test_a_lease_that_runs_out_under_a_copy_leaves_the_bytes_alone_and_the_reader_throws_them_away() -> None:
    outcome = run("shared_prefix", lease_ns=MS, server_timeout_ns=MS, load_page_ns=(3 * MS, 5 * MS))
    assert outcome.marks["l1.lease_expired_under_hold"] > 0
    assert outcome.marks["l1.late_read_expired"] > 0
    assert outcome.marks["worker.load_failed"] > 0


def test_a_store_to_l2_that_ends_after_its_deadline_frees_its_bytes_then() -> None:
    outcome = run("store_and_load", store_deadline_ns=MS, l2_latency_ns=(3 * MS, 4 * MS))
    assert outcome.marks["writeback.deadline"] > 0
    assert outcome.marks["writeback.late"] > 0


def test_an_abort_while_the_load_runs_and_one_while_the_answer_is_outstanding() -> None:
    slow = {"load_page_ns": (3 * MS, 5 * MS), "prefix_cache": False}
    seen: set[str] = set()
    for at_us in range(2_000, 20_000, 400):
        fault = FaultEvent("engine.abort", at_ns=at_us * 1000, target="a")
        seen.update(run("shared_prefix", fault, **slow).marks)
    assert {"engine.aborted_loading", "engine.aborted_pending"} <= seen

"""Sweeps: one fault at every point of the short scenarios. Here some of the points; `kvcore sim sweep` tries all."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvcore.connectors.worker import WorkerConnector
from kvcore.errors import ConfigError
from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Finding, Outcome
from kvcore.ladder.sweeps.command import line_of, to_json, verdict_of
from kvcore.ladder.sweeps.scenario import SCENARIOS, Scenario
from kvcore.ladder.sweeps.sweep import KINDS, SweepKind, sweep, sweeps, targets_of
from kvcore.sim.faults.catalogue import CATALOGUE
from kvcore.sim.sometimes import registered

pytestmark = pytest.mark.ladder

EVERY = {"crash": 24, "send": 9, "message": 9, "copy": 3, "submit": 3}
"""Every how many points are tried here; all points of the other kinds."""

PAIRS = [
    pytest.param(scenario, kind, id=f"{scenario.name}-{kind.name}")
    for scenario in SCENARIOS.values()
    for kind in KINDS.values()
    if targets_of(scenario, kind)
]


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_scenario_shows_what_it_is_about(scenario: Scenario) -> None:
    outcome = run_case(scenario.case)
    assert outcome.findings == []
    assert outcome.loads_verified > 0
    assert outcome.tokens_compared > 0
    assert scenario.mark in registered()
    assert outcome.marks.get(scenario.mark, 0) > 0


def test_there_are_enough_scenarios_and_every_kind_has_points() -> None:
    assert len(SCENARIOS) >= 10
    for kind in KINDS.values():
        assert kind.fault in CATALOGUE
        assert sum(bool(targets_of(scenario, kind)) for scenario in SCENARIOS.values()) >= 10


@pytest.mark.parametrize(("scenario", "kind"), PAIRS)
def test_no_point_of_a_scenario_leads_to_a_finding(scenario: Scenario, kind: SweepKind) -> None:
    result = sweep(scenario, kind, every=EVERY.get(kind.name, 1))
    assert result.verdict == "pass", line_of(result)
    assert sum(result.took_effect.values()) > 0


# ---- the sweep itself


class Recorded:
    """Stands for `run_case`: `points` operations exist, those in `bad` lead to a finding."""

    def __init__(self, points: int, bad: tuple[int, ...] = ()) -> None:
        self.points = points
        self.bad = bad
        self.tried: list[int] = []

    def __call__(self, case: Case) -> Outcome:
        (event,) = case.faults
        self.tried.append(event.nth)
        findings = [Finding("bytes", 1, "wrong")] if event.nth in self.bad else []
        return Outcome(case, findings, fired={event.kind: 1} if event.nth <= self.points else {})


def test_points_are_tried_until_there_are_no_more() -> None:
    run = Recorded(3)
    result = sweep(SCENARIOS["store_and_load"], KINDS["allocation"], run=run)
    assert run.tried == [1, 2, 3, 4]
    assert (result.points, result.took_effect) == ({"server0": 4}, {"server0": 3})
    assert result.verdict == "pass"


def test_every_target_has_a_sweep_of_its_own_and_may_be_thinned() -> None:
    run = Recorded(5)
    result = sweep(SCENARIOS["two_servers"], KINDS["copy"], every=2, run=run)
    assert run.tried == [1, 3, 5, 7] * 2
    assert result.took_effect == {"device0": 3, "device1": 3}
    with pytest.raises(ConfigError, match="give 1 or more"):
        sweep(SCENARIOS["two_servers"], KINDS["copy"], every=0)


def test_a_sweep_in_which_nothing_happens_fails() -> None:
    result = sweep(SCENARIOS["store_and_load"], KINDS["l2"], run=Recorded(0))
    assert result.is_empty
    assert result.verdict == "fail"
    assert "nothing took effect" in line_of(result)
    assert verdict_of([]) == "fail"


def test_a_finding_is_reported_with_its_point_and_its_case() -> None:
    result = sweep(SCENARIOS["store_and_load"], KINDS["allocation"], run=Recorded(3, bad=(2,)))
    assert result.verdict == "fail"
    assert "l1.no_space_nth server0 at 0 ms nth 2: [bytes] at 1 ns: wrong" in line_of(result)
    document = json.loads(json.dumps(to_json([result])))
    assert document["verdict"] == "fail"
    assert document["sweeps"][0] | {"cpu_s": 0} == {
        "scenario": "store_and_load",
        "kind": "allocation",
        "targets": ["server0"],
        "points": 4,
        "took_effect": 3,
        "findings": [{"fault": "l1.no_space_nth server0 at 0 ms nth 2", "finding": "[bytes] at 1 ns: wrong"}],
        "cpu_s": 0,
        "verdict": "fail",
    }
    case = Case.from_json(json.dumps(document["cases"][0]))
    assert case == msgspec.structs.replace(SCENARIOS["store_and_load"].case, faults=case.faults)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no scenario 'nothing'"):
        list(sweeps(["nothing"]))
    with pytest.raises(ConfigError, match="there is no kind 'nothing'"):
        list(sweeps(None, ["nothing"]))


def test_a_bug_at_one_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative: a worker that commits also what was not copied."""
    commit = WorkerConnector._store

    async def store(self: Any, job: Any) -> None:
        client = self._client
        original = client.commit_store
        client.commit_store = lambda tag, ok: original(tag, [True] * len(ok))
        try:
            await commit(self, job)
        finally:
            del client.commit_store

    monkeypatch.setattr(WorkerConnector, "_store", store)
    result = sweep(SCENARIOS["store_and_load"], KINDS["copy"])
    assert any("[bytes]" in found.finding for found in result.findings)
    assert any(found.event.nth > 1 for found in result.findings)

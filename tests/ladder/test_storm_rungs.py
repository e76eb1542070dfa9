"""The storm rungs: they pass on the code as it is, each fails when the safeguard that it is for is taken away, and a
rung in which nothing happened fails too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.cli import main
from kvcore.connectors.worker import WorkerConnector
from kvcore.errors import ConfigError
from kvcore.ladder.options import LadderOptions, check_storms
from kvcore.ladder.result import STORM_RUNG_FIRST, LadderResult, parse_rungs, split_rungs
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Finding, Outcome
from kvcore.ladder.swarm.worker import Record
from kvcore.ladder.swarm_rungs.climb import StormOptions, climb_storms
from kvcore.ladder.swarm_rungs.result import StormResult, storm_from_json
from kvcore.ladder.swarm_rungs.rungs import STORM_RUNGS
from kvcore.ladder.swarm_rungs.table import render_storms, reproduce_lines, storm_failures
from kvcore.ladder.sweeps.scenario import SCENARIOS
from kvcore.ladder.table import render
from kvcore.sim.faults.catalogue import CATALOGUE
from kvcore.sim.faults.injector import Injector
from kvcore.sim.faults.kind import FaultEvent

CASES = 40
WHOLE = 250  # as many as the command runs: the first failure ends them
MS = 1_000_000


def climb(rung: str, cases: int = CASES, **more: Any) -> StormResult:
    """One rung, in this process: what a test has changed holds in its cases. The first failure ends it."""
    options = {"jobs": 0, "failures_max": 1, "own_cases": (), **more}
    (result,) = climb_storms(StormOptions((rung,), cases=cases, **options))
    return result


# ---- as it is


@pytest.mark.storm
@pytest.mark.ladder
def test_all_storm_rungs_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvcore ladder --rungs 5-8`, small: every kind of fault takes effect, what dies comes back, all comes to rest."""
    status = main(["ladder", "--rungs", "5-8", "--cases", str(CASES), "--jobs", "2", "--json"])
    output = capsys.readouterr()
    data = json.loads(output.out)
    assert status == 0, output.err
    assert data["verdict"] == "pass"
    assert [row["rung"] for row in data["rungs"]] == ["5", "6", "7", "8"]
    assert data["cells"] == []
    assert len(data["trace_hash"]) == 32
    for row in data["rungs"]:
        check_row(row)
    assert data["rungs"][2]["deaths_in_recovery"] > 0
    assert data["rungs"][3]["kinds"]["total"] == len(CATALOGUE)
    assert "faults fired" in output.err


def check_row(row: dict[str, Any]) -> None:
    """Schema 1 of a storm rung."""
    assert row["name"] == STORM_RUNGS[row["rung"]].name
    assert row["cases"] >= CASES
    assert row["cases"] == CASES + row["cases_of_one_kind"]
    assert row["kinds"]["fired"] == row["kinds"]["total"]
    for kind, counts in row["faults"].items():
        assert kind.partition(".")[0] in row["planes"]
        assert counts["effects"] >= counts["fired"] > 0
        assert counts["enabled"] >= counts["fired"]
    assert 0 < row["sometimes"]["hit"] <= row["sometimes"]["total"]
    assert row["bytes_checked"] > CASES * 1000
    assert row["converged"] == row["cases"]
    assert 0 <= row["converge_ms_max"] <= 60_000
    assert 0 < row["shares_judged"] <= row["cases"]
    assert 0 <= row["hit_share_loss_max"] <= 0.05
    assert row["failures"] == row["problems"] == []


@pytest.mark.storm
@pytest.mark.ladder
def test_the_same_seed_leaves_the_same_traces_in_this_process_and_in_others() -> None:
    options = StormOptions(("6",), cases=6, seed=3, own_cases=(1,))
    here, there = (climb_storms(replace(options, jobs=jobs))[0] for jobs in (0, 2))
    assert here.trace_hash == there.trace_hash
    assert here.hashes == there.hashes
    assert not {*here.hashes.values()} & {*climb("6", 2, seed=4).hashes.values()}, "another seed, other traces"


# ---- each rung fails without what it is for


@pytest.mark.zoo
@pytest.mark.storm
@pytest.mark.ladder
@pytest.mark.parametrize(
    ("rung", "mutant", "oracle"),
    [
        ("5", "payload_is_not_checked", "bytes"),
        ("6", "lost_release_is_not_sent_again", "leases"),
        ("7", "preemption_without_the_fence", "blocks"),
        ("7", "proven_death_is_not_heard", "leases"),
        ("8", "publish_before_the_copy_has_ended", "bytes"),
    ],
)
def test_a_rung_fails_without_the_safeguard_that_it_is_for(
    rung: str, mutant: str, oracle: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The envelope's check, debts, the fence, the proof of death, and the order of copy and commit. The failure leaves
    a directory, and the line that is printed shows it again."""
    result = climb(rung, WHOLE, mutant=mutant, artifacts=tmp_path)
    assert result.verdict == "fail"
    failure = result.failures[0]
    assert failure.oracle == oracle
    assert max(result.hashes) == failure.seed, "no case is run after it"
    planes = STORM_RUNGS[rung].planes
    restricted = f" --planes {','.join(planes)}" if planes else ""
    assert failure.reproduce == f"kvcore sim run --seed {failure.seed}{restricted} --mutant {mutant}"
    assert Path(failure.directory, "case.json").is_file()
    assert next(reproduce_lines([result])).split("    # ") == [failure.reproduce, failure.directory]
    assert main(failure.reproduce.split()[1:]) == 1
    assert failure.finding.splitlines()[0] in capsys.readouterr().out


@pytest.mark.storm
@pytest.mark.ladder
def test_faults_that_do_nothing_fail_the_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output is right, and that proves nothing."""
    monkeypatch.setattr(Injector, "arm", lambda self: None)
    result = climb("5", 10, failures_max=20)
    assert result.failures == []
    assert result.verdict == "fail"
    assert "effects is 0, at least 10 is needed to prove anything" in result.problems
    assert "l2.bit_flip_payload never took effect" in result.problems
    assert list(reproduce_lines([result])) == ["kvcore ladder --rungs 5 --seed 0 --cases 10"]


@pytest.mark.storm
@pytest.mark.ladder
def test_a_kind_that_was_not_seen_gets_cases_of_its_own() -> None:
    few = climb("6", 3)
    assert few.silent
    more = climb("6", 3, own_cases=(6, 12, 24))
    assert more.silent == []
    assert more.counts.cases_of_one_kind >= 6
    assert more.counts.cases == 3 + more.counts.cases_of_one_kind


# ---- waits without an end


@pytest.mark.storm
@pytest.mark.ladder
def test_a_wait_without_a_deadline_in_the_connector_names_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_ever(self: WorkerConnector, layer: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(WorkerConnector, "wait_load", wait_for_ever)
    result = climb("7", 4)
    failure = result.failures[0]
    assert failure.oracle == "liveness"
    (waiter,) = [line for line in failure.finding.splitlines() if "wait_for_ever" in line]
    assert "engine worker 0 [worker0" in waiter or "engine worker 0 [engine" in waiter
    assert "waits for Event.wait" in waiter
    assert any("<- engine worker" in line for line in failure.finding.splitlines()), "who waits for the waiter"
    assert waiter in "\n".join(storm_failures([result])), "the table shows it"


@pytest.mark.zoo
@pytest.mark.storm
@pytest.mark.ladder
def test_a_wait_without_a_deadline_in_the_server_names_who_waits() -> None:
    result = climb("5", 20, mutant="close_waits_for_a_hung_store")
    failure = result.failures[0]
    assert failure.oracle == "liveness"
    assert "closing [no process]" in failure.finding
    assert "<- closing" in failure.finding
    assert "Storage.drain" in failure.finding


# ---- what they found


@pytest.mark.sim
@pytest.mark.parametrize("scenario", ["store_and_load", "from_store", "two_servers"])
def test_a_promise_whose_session_died_of_idleness_is_not_blamed(scenario: str) -> None:
    """A server's clock jumps behind a right answer: its session and all leases are gone when the engine asks. The load
    finds nothing, and the request is computed. (Rung 6, seed 600019.)"""
    for at_ns in range(2 * MS, 6 * MS, MS // 4):
        jump = FaultEvent("clock.step", at_ns, target="server0", amount=900 * MS)
        outcome = run_case(msgspec.structs.replace(SCENARIOS[scenario].case, faults=(jump,)))
        assert outcome.findings == []


@pytest.mark.sim
def test_the_second_workload_waits_for_messages_that_faults_have_left_behind() -> None:
    """A reply that was held outlives the faults, and holds up all behind it. (Rung 6, seed 600119.)"""
    case = SCENARIOS["store_and_load"].case
    late = FaultEvent("transport.late_reply", target="scheduler>server0", nth=1, amount=150 * MS)
    config = msgspec.structs.replace(case.config, fault_ns=MS, resends_max=2)
    outcome = run_case(msgspec.structs.replace(case, config=config, faults=(late,)))
    assert outcome.findings == []
    assert outcome.hit_share == 1.0
    assert outcome.converge_ns > 100 * MS


# ---- the judge


def record(seed: int, **changes: Any) -> Record:
    """A case in which everything was shown."""
    fired = dict.fromkeys(CATALOGUE, 20)
    marks = {
        "process.server_died": 1,
        "process.scheduler_died": 1,
        "process.worker_died": 1,
        "process.all_died": 1,
        "process.died_recovering": 1,
        "process.died_twice": 1,
    }
    whole: dict[str, Any] = {
        "trace_hash": f"{seed}",
        "enabled": dict.fromkeys(fired, 1),
        "fired": fired,
        "marks": marks,
        "bytes_checked": 100_000,
        "loads_verified": 100,
        "tokens_compared": 100,
        "converge_ns": 5 * MS,
        "share_loss": 0.01,
        "cpu_s": 0.1,
    }
    return Record(seed, **(whole | changes))


def judged(rung: str, without: Collection[str] = (), **changes: Any) -> StormResult:
    """Ten cases, all with `changes`; `without`: kinds that never took effect."""
    kinds = tuple(name for name in CATALOGUE if name.partition(".")[0] in (STORM_RUNGS[rung].planes or name))
    result = StormResult(rung, STORM_RUNGS[rung].name, (), "again", kinds, STORM_RUNGS[rung].floors)
    for seed in range(10):
        one = record(seed, **changes)
        one.fired = {kind: count for kind, count in one.fired.items() if kind not in without}
        result.add(one, of_one_kind=False)
    result.close()
    return result


@pytest.mark.parametrize("rung", STORM_RUNGS)
def test_a_rung_that_has_shown_everything_passes(rung: str) -> None:
    assert judged(rung).problems == []
    assert judged(rung).verdict == "pass"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"without": ["process.pause"]}, "process.pause never took effect"),
        ({"loads_verified": 4}, "loads_verified is 40, at least 50"),
        ({"bytes_checked": 9_999}, "bytes_checked is 99990, at least 100000"),
        ({"tokens_compared": 0}, "tokens_compared is 0"),
        ({"fired": {}}, "cases_hit is 0"),
        ({"marks": {}}, "deaths_in_recovery is 0"),
        ({"converge_ns": -1}, "converged is 0, at least 10"),
        ({"converge_ns": 60_001 * MS}, "came to rest 60.0 s after the faults, 60 s are allowed"),
        ({"share_loss": -1.0}, "shares_judged is 0, at least 4"),
        ({"share_loss": 0.06}, "lost 6.0 points of its hit share, 5 are allowed"),
    ],
)
def test_a_rung_fails_for_what_it_has_not_shown(changes: dict[str, Any], problem: str) -> None:
    result = judged("7", **changes)
    assert result.verdict == "fail"
    assert any(problem in line for line in result.problems), result.problems
    assert any(problem in line for line in storm_failures([result]))


def test_a_rung_without_cases_and_a_rung_that_did_not_end_fail() -> None:
    result = StormResult("5", "lying, slow L2", ("l2",), "again")
    assert result.verdict == "fail"
    result.close()
    assert "no case was run" in result.problems


def test_a_case_that_found_something_has_survived_nothing() -> None:
    case = SCENARIOS["store_and_load"].case
    failed = Outcome(case, [Finding("bytes", 5, "wrong")])
    assert judged("7", failed=failed).counts.deaths == 0


def test_a_row_comes_back_from_json() -> None:
    row = judged("7", without=["process.pause"]).to_json()
    again = storm_from_json(json.loads(json.dumps(row)))
    assert again.to_json() == row
    assert render_storms([again])[-1].endswith("fail")


def test_the_table_has_both_kinds_of_rungs_only_where_they_were_climbed() -> None:
    storms = [judged("5")]
    text = render(LadderResult("sim", "10 drawn cases per rung", [], "", 0, storms))
    assert "rare states" in text
    assert "loads ok" in text
    assert "preempt" not in text
    assert "verdict: pass" in text
    assert LadderResult("sim", "", [], "", 0).verdict == "fail", "nothing was climbed"


# ---- options


def test_rungs_are_split_and_default_to_the_climb() -> None:
    assert LadderOptions().storms == ()
    assert split_rungs(parse_rungs("0-4"))[1] == ()
    assert split_rungs(parse_rungs("0-8")) == (LadderOptions().passes, ("5", "6", "7", "8"))
    assert split_rungs(parse_rungs("7")) == ((), ("7",))
    assert split_rungs(parse_rungs("3,6")) == (("0", "2", "3", "3b"), ("6",))
    assert min(map(int, STORM_RUNGS)) == STORM_RUNG_FIRST


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"connector": "mine:Connector"}, "with --connector the ladder has 0 to 4"),
        ({"target": "local"}, "target local has the rungs 0 to 4"),
    ],
)
def test_who_has_no_storm_rungs_says_so(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_storms(LadderOptions(storms=("5",), **changes))
    check_storms(LadderOptions(**changes))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rungs", "5", "--connector", "dict_connector:DictConnector"],
        ["--rungs", "0-8", "--target", "local"],
        ["--rungs", "5", "--cell", "full/r1/inproc/sync"],
        ["--rungs", "5", "--requests", "40"],
        ["--rungs", "5", "--cases", "0"],
        ["--rungs", "5", "--cases", "30001"],
        ["--rungs", "5", "--cases", "some"],
        ["--rungs", "0-4", "--cases", "10"],
        ["--cases", "10"],
        ["--rungs", "5-9"],
    ],
)
def test_unusable_combinations_are_one_line_and_exit_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["ladder", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("kvcore ladder: error: ")

"""The swarm itself: it passes on the code as it is, runs the same twice, and can fail in every way it should."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.cli import main
from kvcore.connectors.scheduler import SchedulerConnector
from kvcore.errors import ConfigError
from kvcore.ladder.repro.line import command_for
from kvcore.ladder.swarm.case import Case, EpisodeConfig, Schedule
from kvcore.ladder.swarm.config_kinds import CONFIG_KINDS
from kvcore.ladder.swarm.draw import chosen_kinds, draw_case
from kvcore.ladder.swarm.episode import STORE_LEASE_NS, run_case
from kvcore.ladder.swarm.outcome import Finding, Outcome
from kvcore.ladder.swarm.swarm import SIZE_FOR_RATES, SwarmOptions, SwarmResult, run_swarm
from kvcore.ladder.swarm.worker import Record, Task, run_parallel, run_seed
from kvcore.service.page_shares import PageRegistry
from kvcore.sim.faults.injector import Injector
from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.marks import all_marks

SEEDS = 500
MS = 1_000_000


@pytest.mark.swarm
def test_five_hundred_seeds_find_nothing_and_every_kind_of_fault_fires() -> None:
    """The default swarm: 137 or more marks, every fault kind, every seed in a hundred twice."""
    result = run_swarm(SwarmOptions(seeds=SEEDS, jobs=2))
    assert result.verdict == "pass", "\n".join(result.lines())
    assert result.seeds == SEEDS
    assert result.twice == SEEDS // 100
    assert result.bytes_checked > 1_000_000
    assert result.loads_verified > 5 * SEEDS


# ---- determinism


@pytest.mark.sim
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_a_case_leaves_the_same_trace_in_this_and_in_fresh_interpreters(seed: int) -> None:
    here = run_case(draw_case(seed)).trace_hash
    assert run_case(draw_case(seed)).trace_hash == here
    for hash_seed in ("1", "4711"):
        command = [sys.executable, "-m", "kvcore.cli", "sim", "run", "--seed", str(seed), "--json"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
        assert json.loads(result.stdout)["trace_hash"] == here, result.stderr


@pytest.mark.sim
def test_recorded_ties_replay_the_run_without_the_schedule_that_made_them() -> None:
    case = draw_case(21, planes=())
    assert case.schedule.kind == "random"
    recorded = run_case(case, record_ties=True)
    again = run_case(msgspec.structs.replace(case, schedule=Schedule("replay", exceptions=recorded.ties)))
    assert recorded.ties
    assert again.trace_hash == recorded.trace_hash


def test_two_runs_of_a_seed_that_differ_are_a_finding() -> None:
    hashes = iter(["one", "two"])

    def run(case: Case) -> Outcome:
        return Outcome(case, trace_hash=next(hashes))

    record = run_seed(0, Task(planes=()), run)
    assert record.failed is not None
    assert record.failed.oracle == "determinism"
    assert run_seed(7, Task(planes=()), lambda case: Outcome(case)).failed is None, "only one in a hundred runs twice"


# ---- the draw


def test_a_seed_draws_the_same_case_and_its_configuration_whatever_faults_are_allowed() -> None:
    for seed in range(30):
        case = draw_case(seed)
        assert draw_case(seed) == case
        calm = draw_case(seed, planes=())
        assert calm.faults == ()
        assert (calm.config, calm.requests, calm.second) == (case.config, case.requests, case.second)
        assert {event.kind.partition(".")[0] for event in draw_case(seed, planes=("l2",)).faults} <= {"l2"}


def test_the_swarm_draws_every_shape() -> None:
    cases = [draw_case(seed, planes=()) for seed in range(300)]
    configs = [case.config for case in cases]
    assert {config.servers for config in configs} == {0, 1, 2}
    assert {config.groups for config in configs} == {"full", "full+window", "full+window+recurrent"}
    assert {config.load_slice_chunks for config in configs} == {0, 1, 2}
    assert {case.schedule.kind for case in cases} == {"random", "priority", "fifo"}
    assert {len({request.salt for request in case.requests}) for case in cases} >= {1, 2}
    for kind in CONFIG_KINDS:
        assert any(map(kind.has, configs)), f"no seed has {kind.name}"


def test_who_copies_is_drawn_and_asking_for_it_changes_nothing_else() -> None:
    copies = ("transfer", "copy_ns", "pages_fail")
    drawn = [draw_case(seed).config for seed in range(200)]
    assert 20 < sum(config.transfer == "server" for config in drawn) < 60
    assert any(config.pages_fail for config in drawn)
    for seed in range(20):
        by_worker, by_server = (draw_case(seed, transfer=who) for who in ("worker", "server"))
        assert by_server.config.transfer == "server"
        assert "transfer server" in by_server.banner()
        assert "transfer" not in by_worker.banner()
        plain = {name: getattr(EpisodeConfig(), name) for name in copies}
        assert msgspec.structs.replace(by_server.config, **plain) == by_worker.config
        assert (by_server.requests, by_server.second) == (by_worker.requests, by_worker.second)
        assert [event.kind for event in by_server.faults] == [event.kind for event in by_worker.faults]
        assert draw_case(seed) in (by_worker, by_server)
        assert command_for(by_server).startswith(f"kvcore sim run --seed {seed}")


@pytest.mark.sim
def test_bytes_that_nobody_moved_are_found_by_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_case(transfer="server")
    outcome = run_case(case)
    assert outcome.findings == []
    assert outcome.marks["server.copied_out"]
    assert outcome.marks["server.copied_in"]
    monkeypatch.setattr("kvcore.ladder.watched_pages.WatchedPages.open", PageRegistry.open)  # past the watcher
    assert run_case(case).oracle == "counters"


def test_a_case_survives_json_and_another_schema_is_refused() -> None:
    for seed in range(10):
        case = draw_case(seed)
        assert Case.from_json(case.to_json()) == case
        assert str(seed) in case.banner()
        for event in case.faults:
            assert str(event) in case.banner()
    newer = case.to_json().replace('"schema": 1', '"schema": 2')
    with pytest.raises(ConfigError, match="schema 2"):
        Case.from_json(newer)
    with pytest.raises(ConfigError, match="not a case"):
        Case.from_json("[]")


# ---- it can fail


def small_case(**changes: Any) -> Case:
    """One server, no faults, room for everything."""
    drawn = draw_case(0, planes=())
    config = EpisodeConfig(servers=1, chunk_tokens=8, num_blocks=400)
    return msgspec.structs.replace(drawn, config=msgspec.structs.replace(config, **changes), schedule=Schedule())


@pytest.mark.sim
def test_an_engine_that_is_never_answered_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_case(small_case()).findings == []
    monkeypatch.setattr(SchedulerConnector, "matched_tokens", lambda self, request, local: (None, False))
    outcome = run_case(small_case(idle_step_ns=20 * MS))
    assert outcome.oracle == "liveness"
    assert "engine [scheduler#0]" in outcome.findings[0].text, "the finding says who waits"


@pytest.mark.sim
@pytest.mark.parametrize(("store_lease_ns", "oracle"), [(STORE_LEASE_NS, "lost"), (STORE_LEASE_NS - 1, "liveness")])
def test_a_cache_that_does_not_recover_serves_the_second_workload_worse(
    monkeypatch: pytest.MonkeyPatch, store_lease_ns: int, oracle: str
) -> None:
    """With time for every store it has lost what it was given; with less it is compared with twins without faults."""

    def stop(self: Injector, leave: Any = ()) -> None:
        """Nothing is repaired."""

    case = msgspec.structs.replace(
        small_case(store_lease_ns=store_lease_ns),
        faults=(FaultEvent("transport.partition", at_ns=MS, target="worker0>server0"),),
    )
    assert run_case(case).findings == []
    monkeypatch.setattr(Injector, "stop", stop)
    outcome = run_case(case)
    assert outcome.verdict == "fail"
    assert outcome.oracle == oracle


@pytest.mark.sim
def test_an_exception_inside_the_world_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_meta(self: Any, step: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(SchedulerConnector, "build_meta", build_meta)
    outcome = run_case(small_case())
    assert outcome.oracle == "crash"
    assert "ZeroDivisionError: planted" in outcome.findings[0].text


def records(seeds: int, **changes: Any) -> Iterator[Record]:
    """Of a swarm in which everything fired and was met."""
    fired = {kind.name: 1 for kind in (*chosen_kinds(), *CONFIG_KINDS)}
    whole = {
        "enabled": fired,
        "fired": fired,
        "marks": dict.fromkeys(all_marks(), 1),
        "bytes_checked": 1,
        "loads_verified": 1,
        "tokens_compared": 1,
    }
    for seed in range(seeds):
        yield Record(seed, **(whole | changes))


def verdict_of(seeds: int, **changes: Any) -> tuple[str, list[str]]:
    result = SwarmResult(SwarmOptions())
    for record in records(seeds, **changes):
        result.add(record)
    return result.verdict, result.problems


def test_a_swarm_that_shows_nothing_fails() -> None:
    assert verdict_of(SIZE_FOR_RATES) == ("pass", [])
    assert verdict_of(0) == ("fail", ["no seed was run"])
    assert verdict_of(5, bytes_checked=0) == ("fail", ["bytes_checked is 0"])
    assert verdict_of(SIZE_FOR_RATES, loads_verified=0) == ("fail", ["loads_verified is 0"])


def test_a_kind_that_never_fires_and_a_common_mark_that_is_never_met_fail_a_swarm_that_is_large_enough() -> None:
    silent = next(kind.name for kind in chosen_kinds() if kind.common)
    missing = next(mark.name for mark in all_marks().values() if mark.common)
    for changes, problem in (
        ({"fired": {kind.name: 1 for kind in (*chosen_kinds(), *CONFIG_KINDS) if kind.name != silent}}, silent),
        ({"marks": {name: 1 for name in all_marks() if name != missing}}, missing),
    ):
        assert verdict_of(SIZE_FOR_RATES - 1, **changes) == ("pass", [])
        verdict, problems = verdict_of(SIZE_FOR_RATES, **changes)
        assert verdict == "fail"
        assert [problem in text for text in problems] == [True]


def test_a_worker_that_dies_fails_its_seed_and_somebody_goes_on_behind_it() -> None:
    before = set(multiprocessing.active_children())
    found: list[Record] = []
    for record in run_parallel(iter([(0, 6)]), Task(planes=()), 1):
        found.append(record)
        if len(found) == 2:
            (worker,) = set(multiprocessing.active_children()) - before
            worker.kill()
            worker.join()
    dead = [record for record in found if record.failed is not None]
    assert sorted(record.seed for record in found) == list(range(6))
    assert [record.failed.oracle for record in dead if record.failed] == ["worker"]
    assert "exit status -9" in str(dead[0].failed and dead[0].failed.findings[0])


def test_a_failure_is_written_where_artifacts_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = draw_case(0, planes=())
    failed = Record(0, failed=Outcome(case, [Finding("bytes", 5, "wrong")]), bytes_checked=1, tokens_compared=1)
    monkeypatch.setattr("kvcore.ladder.swarm.swarm.run_parallel", lambda *given: iter([failed]))
    said: list[str] = []
    options = SwarmOptions(seeds=1, artifacts=tmp_path, task=Task(planes=()))
    result = run_swarm(options, progress=said.append)
    assert result.verdict == "fail"
    assert (tmp_path / "seed-0" / "case.json").is_file()
    assert result.lines()[-1] == "reproduce: kvcore sim run --seed 0 --planes none"
    assert replace(options, task=Task(kinds=("l2.hang",))).command(3) == "kvcore sim run --seed 3 --kinds l2.hang"
    by_server = replace(options, task=Task(transfer="server"))
    assert by_server.command(3) == "kvcore sim run --seed 3 --transfer server"


# ---- the command


def test_json_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "swarm", "--seeds", "12", "--json"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert result["schema"] == 1
    assert (result["seeds"], result["failures"], result["verdict"]) == (12, 0, "pass")
    assert result["seeds_per_s"] > 0
    assert {name.partition(".")[0] for name in result["faults"]} >= {"l2", "transport", "process", "config", "clock"}
    assert all(set(counts) == {"enabled", "fired"} for counts in result["faults"].values())
    assert set(result["sometimes"]) == {"hit", "total", "unseen", "counts"}
    assert result["bytes_checked"] > 0
    assert result["loads_verified"] > 0
    assert "verdict: pass" in output.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--seed", "-1"], "--seed takes a whole number"),
        (["run", "--planes", "l3"], "there is no plane 'l3'; known: clock, device"),
        (["run", "--kinds", "l2.hangs"], "there is no fault kind 'l2.hangs'; did you mean l2.hang"),
        (["run", "--mutant", "nobody"], "nobody"),
        (["run", "--trace", "/proc/none/trace"], "cannot write /proc/none/trace"),
        (["swarm", "--jobs", "0"], "--jobs takes a whole number from 1 on"),
        (["swarm", "--seeds", "0"], "--seeds takes a whole number from 1 on"),
        (["swarm", "--seconds", "soon"], "--seconds takes a positive number"),
        (["swarm", "--first", "-3"], "--first takes a whole number"),
        (["swarm", "--seeds", "1", "--artifacts", "/proc/none"], "cannot write into /proc/none"),
    ],
)
def test_unusable_input_is_one_clear_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *arguments]) == 2
    output = capsys.readouterr()
    (line,) = [line for line in output.err.splitlines() if line.startswith("kvcore sim: error: ")]
    assert expected in line
    assert output.out == ""

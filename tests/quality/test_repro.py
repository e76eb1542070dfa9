"""From a failing case to an explanation: minimised, compared, drawn, and repeated by one command.

The failure is made by hand, so that no change of the draw can take it away: a record whose payload has a flipped bit,
read by a server that does not check payloads (a mutant of the zoo), among faults that do not matter.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.cli import main
from kvcore.errors import ConfigError
from kvcore.ladder.repro.difference import first_difference, nearest_passing
from kvcore.ladder.repro.directory import ORACLES, write_failure
from kvcore.ladder.repro.line import CannotJudge, command_for, find_case, from_line, to_line
from kvcore.ladder.repro.observe import Observed, judge, observe, planting
from kvcore.ladder.repro.show import terminal_chart
from kvcore.ladder.repro.shrink import CaseShrinker, first_failure, shrink_case, with_faults
from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig, Schedule
from kvcore.ladder.swarm.draw import draw_case
from kvcore.ladder.swarm.episode import run_case
from kvcore.sim.faults.catalogue import CATALOGUE
from kvcore.sim.faults.kind import FaultEvent

MS = 1_000_000
MUTANT = "payload_is_not_checked"
FLIP = FaultEvent("l2.bit_flip_payload", 0, 0, "server0.file", 2)
NOISE = [FaultEvent("transport.delay_tail", at * MS, (at + 1) * MS, amount=100_000) for at in range(8)]
FAILING = Case(
    7,
    EpisodeConfig(servers=1, l2=("file",), between_passes="drop_l1", num_blocks=64, retain=True, load_async=True),
    tuple(CaseRequest(f"r{index}", (1, 2, 10 + index), 3, 3, index * 100_000) for index in range(5)),
    (CaseRequest("s0", (1, 50), 1, 1),),
    (*NOISE[:4], FLIP, *NOISE[4:]),
    dead=("nobody",),
    mutant=MUTANT,
)
FILES = (
    "README.txt", "case.json", "chart.txt", "difference.txt", "minimised-trace.txt", "minimised.json", "perfetto.json",
    "sequence.mmd", "states.txt", "trace.txt",
)  # fmt: skip


def changed(case: Case, **values: Any) -> Case:
    return msgspec.structs.replace(case, **values)


def planted_run(case: Case) -> Observed:
    with planting(case.mutant):
        return observe(case)


@pytest.fixture(scope="module")
def failure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the failure."""
    return write_failure(FAILING, planted_run(FAILING).outcome, tmp_path_factory.mktemp("failures") / "one", runs=120)


@pytest.fixture(scope="module")
def minimised(failure: Path) -> Case:
    return find_case(str(failure), prefer_minimised=True)


# --- minimising


def test_the_fault_that_matters_is_what_is_left(minimised: Case) -> None:
    assert [event.kind for event in minimised.faults] == ["l2.bit_flip_payload"]
    assert minimised.dead == ()
    assert len(minimised.requests) + len(minimised.second) <= 2
    assert minimised.config == EpisodeConfig(
        l2=("file",), between_passes="drop_l1", chunk_tokens=FAILING.config.chunk_tokens
    )
    assert minimised.schedule.kind == "fifo"


def test_the_minimised_case_fails_at_the_same_oracle_and_only_with_the_bug(minimised: Case) -> None:
    with planting(MUTANT):
        assert first_failure(minimised) == first_failure(FAILING) == "bytes"
        assert first_failure(with_faults(minimised, ())) == ""
    assert first_failure(minimised) == ""


def test_with_a_bound_on_runs_the_same_case_gives_the_same_result() -> None:
    first, second = CaseShrinker(FAILING, runs=25), CaseShrinker(FAILING, runs=25)
    assert first.run() == second.run()
    assert first.log == second.log
    assert first.budget.runs == second.budget.runs <= 25


def test_a_spent_budget_leaves_a_case_that_fails() -> None:
    smaller = shrink_case(FAILING, runs=3)
    with planting(MUTANT):
        assert first_failure(smaller) == "bytes"


def test_a_case_that_passes_stays_as_it_is() -> None:
    passing = changed(FAILING, mutant="")
    assert shrink_case(passing, runs=10) == passing


def test_a_recorded_schedule_repeats_a_random_one_tie_by_tie() -> None:
    """What the last stage of minimising stands on: the exceptions to first in, first out are all that ties decide.

    Faults of the schedule itself stay out: over a replay they do nothing, and say so in the trace.
    """
    planes = {kind.plane for kind in CATALOGUE.values()} - {"schedule"}
    for seed in range(3):
        case = changed(draw_case(seed, planes=planes), schedule=Schedule("random"))
        outcome = run_case(case, record_ties=True)
        assert outcome.ties
        again = run_case(changed(case, schedule=Schedule("replay", exceptions=outcome.ties)))
        assert again.trace_hash == outcome.trace_hash
        assert run_case(changed(case, schedule=Schedule("fifo"))).trace_hash != outcome.trace_hash


def test_of_a_schedule_the_ties_that_matter_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """No planted bug needs an order that first in, first out does not give, so here a failure is made of two ties."""
    case = changed(draw_case(3, planes=("transport",)), schedule=Schedule("random"))
    ties = sorted(run_case(case, record_ties=True).ties.items())
    needed = {ties[len(ties) // 3], ties[-1]}

    def fails(case: Case) -> str:
        return "liveness" if case.schedule.kind == "random" or needed <= set(case.schedule.exceptions.items()) else ""

    monkeypatch.setattr("kvcore.ladder.repro.shrink.first_failure", fails)
    shrinker = CaseShrinker(case, runs=2000)
    shrinker.failure = "liveness"
    shrinker._schedule()  # the last stage alone: with other requests the ties would be other ones
    assert shrinker.best.schedule == Schedule("replay", exceptions=dict(sorted(needed)))
    assert len(ties) > 20
    assert shrinker.budget.runs < len(ties)


# --- the directory


def test_a_failure_is_one_directory_with_everything(failure: Path) -> None:
    assert sorted(path.name for path in failure.iterdir()) == sorted(FILES)
    assert all(path.stat().st_size > 100 for path in failure.iterdir() if path.name != "states.txt")
    assert find_case(str(failure)) == FAILING


def test_the_readme_says_which_oracle_which_step_and_what_is_left(failure: Path, minimised: Case) -> None:
    text = (failure / "README.txt").read_text()
    assert text.startswith("FAILED, oracle bytes: ")
    assert "It is step " in text
    assert "9 faults" in text
    assert f"fault: {minimised.faults[0]}" in text
    assert "The nearest run that passes is the same case without the fault l2.bit_flip_payload" in text
    assert "Without the mutant the same case passes." in text


def test_every_oracle_of_a_case_is_explained() -> None:
    """By the names with which findings are reported, in the simulation and in the swarm."""
    root = Path(__file__).resolve().parents[2]
    sources = [*(root / "sim").rglob("*.py"), *(root / "ladder").rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"report\(\s*\"([a-z]+)\"", path.read_text())}
    assert {"lost", "bytes", "liveness"} <= named
    assert named - {"loop"} <= set(ORACLES), "`loop` is of the target local, which has no cases"


def test_the_last_line_repeats_the_failure_in_a_fresh_interpreter_anywhere(failure: Path, tmp_path: Path) -> None:
    command = shlex.split((failure / "README.txt").read_text().splitlines()[-1])
    assert command[0] == "kvcore"
    code = "import sys; from kvcore.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code, *command[1:]],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "[bytes]" in done.stdout
    assert done.stdout.splitlines()[-1] == " ".join(command)


def test_the_violated_step_is_marked_in_every_picture(failure: Path) -> None:
    marked = [line for line in (failure / "minimised-trace.txt").read_text().splitlines() if line.startswith("> ")]
    assert marked
    assert all(" finding " in line for line in marked)
    assert "VIOLATED" in (failure / "chart.txt").read_text()
    assert "VIOLATED" in (failure / "sequence.mmd").read_text()
    events = json.loads((failure / "perfetto.json").read_text())["traceEvents"]
    assert any(event["ph"] == "i" and event["name"].startswith("[bytes]") for event in events)
    assert {event["cat"] for event in events if event["ph"] in "bX"} >= {"request", "copy", "l2"}


def test_every_component_has_one_line_of_state(failure: Path) -> None:
    names = [line.partition(": ")[0] for line in (failure / "states.txt").read_text().splitlines()]
    assert len(names) == len(set(names))
    assert {"engine", "device0", "scheduler", "worker0", "server0", "server0.file"} <= set(names)


def test_a_world_that_ended_by_an_exception_has_its_last_step_marked_and_its_states_taken() -> None:
    case = Case(1, EpisodeConfig(), (CaseRequest("r0", (1,), 0, 1),), mutant="full_hit_promises_every_token")
    observed = planted_run(case)
    assert observed.outcome.oracle == "crash"
    assert observed.steps[-1].label == "finding"
    assert observed.steps[-1].fields[0] == "crash"
    assert any(line.startswith("scheduler: ") for line in observed.states)
    assert "VIOLATED" in terminal_chart(observed, 80)


# --- comparing


def test_the_nearest_passing_run_parts_where_the_fault_strikes(minimised: Case) -> None:
    with planting(MUTANT):
        failing = observe(minimised)
        neighbour = nearest_passing(failing)
    assert neighbour is not None
    assert neighbour.how.startswith("without the fault")
    assert not neighbour.observed.outcome.findings


def test_equal_runs_have_no_difference_and_unequal_ones_the_same_from_both_sides() -> None:
    case = changed(FAILING, mutant="", faults=(), dead=())
    other = changed(case, requests=case.requests[:-1])
    first, again, second = observe(case).steps, observe(case).steps, observe(other).steps
    assert first_difference(first, again) is None
    forth, back = first_difference(first, second), first_difference(second, first)
    assert forth is not None
    assert back is not None
    assert forth.first is not None
    assert back.second == forth.first
    assert "r4" in first[forth.first].line()
    assert not any("r4" in step.line() for step in second)


def test_a_shift_in_time_alone_is_no_difference() -> None:
    steps = observe(changed(FAILING, mutant="", faults=(), dead=())).steps
    late = [step._replace(time_ns=step.time_ns * 2 + 5) for step in steps]
    assert first_difference(steps, late) is None


def test_a_changed_answer_is_found_in_its_lane() -> None:
    steps = observe(changed(FAILING, mutant="", faults=(), dead=())).steps
    at = next(index for index, step in enumerate(steps) if step.label == "l1.finish")
    fields = (*steps[at].fields[:-1], "aborted")
    found = first_difference(steps, [*steps[:at], steps[at]._replace(fields=fields), *steps[at + 1 :]])
    assert found is not None
    assert (found.first, found.second) == (at, at)


# --- naming a case


@pytest.mark.parametrize("seed", range(20))
def test_a_case_survives_a_line_of_text_and_a_file(seed: int, tmp_path: Path) -> None:
    case = draw_case(seed)
    line = to_line(case)
    assert len(line) < 6000
    assert shlex.quote(line) == line
    assert from_line(line) == case == find_case(line)
    (tmp_path / "case.json").write_text(case.to_json())
    assert find_case(str(tmp_path)) == find_case(str(tmp_path / "case.json")) == case


def test_a_seed_says_it_all_unless_something_was_cut() -> None:
    case = draw_case(4)
    assert command_for(case) == "kvcore sim run --seed 4"
    assert command_for(draw_case(4, mutant=MUTANT)) == f"kvcore sim run --seed 4 --mutant {MUTANT}"
    assert command_for(changed(case, requests=case.requests[1:])).startswith("kvcore sim replay kvcase1.")


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_that_was_not_copied_as_a_whole_says_so(cut: int) -> None:
    with pytest.raises(ConfigError, match="copied as a whole"):
        from_line(to_line(FAILING)[:-cut])


# --- the command line


def kvcore(*words: str) -> int:
    return main(["sim", *words])


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "some.json"
    path.write_text(text)
    return str(path)


def test_a_replay_says_by_its_exit_status_what_came_of_it(failure: Path, tmp_path: Path) -> None:
    assert kvcore("replay", str(failure)) == 1
    assert kvcore("replay", str(failure), "--minimised") == 1
    assert kvcore("replay", written(tmp_path, changed(FAILING, mutant="").to_json())) == 0


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("{", 2),
        ('"no case"', 2),
        ('{"seed": 3}', 2),
        ('{"schema": 99}', 125),
        (FAILING.to_json().replace('"ranks"', '"rank_count"'), 125),
        (changed(FAILING, mutant="gone").to_json(), 125),
        (with_faults(FAILING, [FaultEvent("l2.gone")]).to_json(), 125),
        (changed(FAILING, mutant="", config=EpisodeConfig(chunk_tokens=7)).to_json(), 125),
    ],
)
def test_what_cannot_be_read_is_bad_input_and_what_cannot_be_judged_is_skipped(
    text: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("replay", "shrink", "show"):
        assert kvcore(action, written(tmp_path, text)) == status
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("given", ["kvcase1.abc", "kvcase1.", "/nowhere/case.json", ""])
def test_what_names_no_case_is_bad_input(given: str) -> None:
    assert kvcore("replay", given) == 2


def test_a_line_of_another_version_is_skipped() -> None:
    assert kvcore("replay", "kvcase9.abc") == 125


def test_shrinking_from_the_command_line_ends_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = written(tmp_path, FAILING.to_json())
    assert kvcore("shrink", given, "--runs", "12") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    smaller = from_line(last.split()[-1])
    assert len(smaller.faults) < len(FAILING.faults)
    assert kvcore("shrink", given, "--runs", "5", "--out", str(tmp_path / "out")) == 1
    assert (tmp_path / "out" / "README.txt").is_file()
    assert kvcore("shrink", written(tmp_path, changed(FAILING, mutant="").to_json())) == 0
    assert kvcore("shrink", given, "--runs", "0") == 2


def test_diff_finds_the_same_place_in_cases_and_in_their_traces(
    failure: Path, minimised: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = written(tmp_path, changed(minimised, mutant="").to_json())
    assert kvcore("diff", str(failure / "minimised.json"), sound) == 1
    of_cases = capsys.readouterr().out.splitlines()
    assert "states there:" in of_cases
    traces = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    kvcore("replay", str(failure), "--minimised", "--trace", traces[0])
    kvcore("replay", sound, "--trace", traces[1])
    capsys.readouterr()
    assert kvcore("diff", *traces) == 1
    of_traces = capsys.readouterr().out.splitlines()
    found = of_traces[0]
    assert found.startswith("first difference, in ")
    assert found in of_cases
    assert kvcore("diff", traces[0], str(failure / "minimised-trace.txt")) == 0
    assert kvcore("diff", str(failure), str(failure)) == 0
    assert kvcore("diff", traces[0], sound) == 2


def test_diff_reads_traces_without_processes_as_well(
    failure: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare.txt"
    lines = [line.split(" ") for line in (failure / "trace.txt").read_text().splitlines()]
    bare.write_text("".join(" ".join([words[0], *words[2:]]) + "\n" for words in lines))
    assert kvcore("diff", str(failure / "trace.txt"), str(bare)) == 0
    bare.write_text("this is no trace\n")
    assert kvcore("diff", str(failure / "trace.txt"), str(bare)) == 2


@pytest.mark.parametrize("width", [60, 100, 160])
def test_show_draws_within_the_width(failure: Path, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvcore("show", str(failure), "--width", str(width)) == 1
    lines: Sequence[str] = capsys.readouterr().out.splitlines()
    chart = [line for line in lines if not line.startswith("[")]
    assert max(map(len, chart)) <= width
    assert any("VIOLATED" in line for line in chart)
    assert kvcore("show", str(failure), "--mermaid") == 1
    assert capsys.readouterr().out.startswith("---\ntitle: bytes at")


def test_a_mutant_that_was_planted_already_stays_planted_after_a_judgement() -> None:
    """The zoo minimises inside its own measurement."""
    with planting(MUTANT):
        with planting(MUTANT):
            assert judge(FAILING).oracle == "bytes"
        assert judge(FAILING).oracle == "bytes"
    assert judge(FAILING).oracle == ""


def test_another_encoding_is_not_guessed_at() -> None:
    with pytest.raises(CannotJudge, match="revision"):
        from_line("kvcase2." + to_line(FAILING)[8:])

"""What each kind of report says: verdicts that follow from their figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.errors import ConfigError
from kvcore.reports import parameters, traces
from kvcore.reports.kinds import breakeven, compare, goodput, ladder, replay, trace
from kvcore.reports.page import Column, Report, Table, Work, provenance, write
from kvcore.reports.serving import Policy, ServingResult, Setting
from kvcore.reports.slo import parse_slo
from kvcore.reports.traces import Request, Trace

RESULTS = Path(__file__).with_name("pages") / "results"
MADE = {"command": "kvcore report", "seed": None, "commit": "c", "changed": False, "versions": {"kvcore": "0"}}


def quiet() -> Work:
    return Work(lambda line: None)


def asked(**changes: Any) -> Report:
    return breakeven.build(parameters.read(None), breakeven.Question(**changes), quiet())


def ladder_files(**changed: Any) -> ladder.Files:
    files = ladder.read_files(RESULTS / "ladder.json", RESULTS / "swarm.json", RESULTS / "zoo.json")
    for name, fields in changed.items():
        part = msgspec.structs.replace(getattr(files, name), **fields)
        files = ladder.Files(**{**{each: getattr(files, each) for each in ("ladder", "swarm", "zoo")}, name: part})
    return files


# ---- breakeven


def test_the_verdict_names_the_threshold_and_where_not_to_load() -> None:
    report = asked()
    assert report.verdict[0].startswith("On H100-SXM with Llama-3.1-8B: over host memory (DMA) load from ")
    assert "over 100G RDMA load from 624 tokens on" in report.verdict[0]  # as docs/cost-model.md
    assert report.verdict[0].endswith("over S3 do not load.")


def test_a_model_gets_the_gpus_that_its_weights_need() -> None:
    known = parameters.read(None)
    h100 = known.host("H100")
    assert breakeven.gpus_needed(known.model("Llama-3.1-8B"), h100) == 1
    assert breakeven.gpus_needed(known.model("Llama-3.1-70B"), h100) == 2
    rows = asked(models=("Llama-3.1-70B",)).tables[0].rows
    assert {row["gpus"] for row in rows} == {2}
    with pytest.raises(ConfigError, match="fits on no"):
        breakeven.gpus_needed(
            known.model("Llama-3.1-405B"),
            known.host("A10").replica(1).__class__(gpu="tiny", flops=1e12, hbm_Bps=1e11, hbm_bytes=1e9, link_Bps=1e9),
        )


def test_host_memory_has_the_link_of_its_gpu() -> None:
    rows = asked(hosts=("H100", "A100"), tiers=("host memory (DMA)",)).tables[0].rows
    assert [row["bandwidth_Bps"] for row in rows] == [51e9, 26e9]


def test_one_thing_under_two_names_is_computed_once() -> None:
    tiers = ("host memory (DMA)", "HOST MEMORY (dma)", "host memory", "host memory (KERNEL)")
    report = asked(models=("Llama-3.1-8B", "llama-3.1-8b"), hosts=("H100", "H100-SXM"), tiers=tiers)
    assert [row["tier"] for row in report.tables[0].rows] == ["host memory (DMA)", "host memory (kernel)"]
    assert report.verdict[0].count("load from") == 2


# ---- ladder


def test_what_passed_is_said_with_its_numbers() -> None:
    files = ladder_files()
    report = ladder.build(files)
    assert files.swarm is not None
    assert report.verdict[0].startswith("The ladder holds: no token of 3,395 differs on 6 rungs")
    assert "The swarm found nothing: 60 seeds" in report.verdict[1]
    assert "3 of 6 planted bugs are caught" in report.verdict[2]
    fired = {row["kind"]: row["fired"] for row in report.tables[2].rows}
    assert fired == {kind: row["fired"] for kind, row in files.swarm.faults.items()}


@pytest.mark.parametrize(
    ("part", "fields", "told"),
    [
        ("ladder", {"verdict": "fail"}, "The ladder does not hold"),
        ("swarm", {"verdict": "fail", "failures": 2}, "found something in 2 seeds"),
        ("swarm", {"verdict": "fail", "problems": ["x never fired"]}, "But: x never fired"),
    ],
)
def test_what_failed_makes_the_report_bad(part: str, fields: dict[str, Any], told: str) -> None:
    files = ladder_files(zoo={"verdict": "pass", "problems": []})
    assert ladder.build(files).good is True
    bad = ladder.Files(files.ladder, files.swarm, files.zoo)
    bad = ladder_files(zoo={"verdict": "pass", "problems": []}, **{part: fields})
    report = ladder.build(bad)
    assert report.good is False
    assert any(told in sentence for sentence in report.verdict)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("ladder", {"rungs": [ladder.Rung("3", "hot", "fail")]}),
        ("ladder", {"rungs": [ladder.Rung("3", "hot", "pass", mismatches=1)]}),
        ("swarm", {"failures": 1}),
    ],
)
def test_a_verdict_is_not_better_than_its_figures(part: str, fields: dict[str, Any]) -> None:
    """A file that says "pass" beside a failure is one of another version, or was edited."""
    report = ladder.build(ladder_files(**{"zoo": {"verdict": "pass"}, part: {"verdict": "pass", **fields}}))
    assert report.good is False
    assert any(
        told in " ".join(report.verdict) for told in ("does not hold: rung 3 failed", "found something in 1 seed")
    )


def test_a_zoo_that_caught_nothing_has_no_median_and_one_without_bugs_no_matrix() -> None:
    files = ladder_files()
    assert files.zoo is not None
    free = [mutant for mutant in files.zoo.mutants if not mutant.caught and mutant.kind != "safe"]
    report = ladder.build(ladder_files(zoo={"mutants": free, "first_catch_median": 0.0, "problems": []}))
    assert report.verdict[2] == "0 of 3 planted bugs are caught."
    safe = [mutant for mutant in files.zoo.mutants if mutant.kind == "safe"]
    assert [chart.kind for chart in ladder.build(ladder_files(zoo={"mutants": safe})).charts] == ["bars"]


def test_what_was_not_given_is_said() -> None:
    report = ladder.build(ladder.read_files(None, RESULTS / "swarm.json", None))
    assert report.verdict[-1] == "Not shown here: ladder and zoo."


def test_the_kill_matrix_counts_catches_and_frames_what_was_expected() -> None:
    files = ladder_files()
    assert files.zoo is not None
    (matrix,) = [chart for chart in ladder.build(files).charts if chart.kind == "matrix"]
    bugs = [mutant for mutant in files.zoo.mutants if mutant.kind != "safe"]
    assert matrix.rows == tuple(mutant.name for mutant in bugs)
    for row, mutant in enumerate(bugs):
        for column, oracle in enumerate(matrix.columns):
            assert matrix.values[row][column] == mutant.oracles.get(oracle)
            assert ((row, column) in matrix.marked) == (oracle in mutant.expected)


def test_rare_states_are_counted_where_the_file_counts_them() -> None:
    files = ladder_files()
    assert files.swarm is not None
    marks = msgspec.structs.replace(files.swarm.sometimes, counts={"l1.loser_discarded": 7})
    report = ladder.build(ladder_files(swarm={"sometimes": marks}))
    (table,) = [table for table in report.tables if table.name == "rare_states"]
    times = {row["mark"]: row["times"] for row in table.rows}
    assert times["l1.loser_discarded"] == 7
    assert sum(count or 0 for count in times.values()) == 7  # type: ignore[misc]


# ---- compare


def test_two_gpus_are_compared_tier_by_tier(tmp_path: Path) -> None:
    write(asked(), tmp_path / "a", {**MADE, "cpu": "x", "cores": 1, "platform": "p", "created": "1"})
    write(asked(hosts=("A100",)), tmp_path / "b", {**MADE, "cpu": "x", "cores": 1, "platform": "p", "created": "2"})
    report = compare.build(tmp_path / "a", tmp_path / "b")
    rows = {(row["row"], row["column"]): row for row in report.tables[0].rows}
    change = rows["Llama-3.1-8B, host memory (DMA)", "Tier has (B/s)"]
    assert (change["before"], change["after"]) == (51e9, 26e9)
    fields = {row["field"] for row in report.tables[1].rows}
    assert "inputs.question.hosts.0" in fields
    assert "provenance.created" not in fields


def test_a_report_is_the_same_as_itself(tmp_path: Path) -> None:
    write(asked(), tmp_path / "a", {**MADE, "cpu": "x", "cores": 1, "platform": "p", "created": "1"})
    report = compare.build(tmp_path / "a", tmp_path / "a")
    assert report.tables[0].rows == []
    assert "are the same" in report.verdict[1]


def test_a_break_even_where_there_was_none_is_a_change_and_so_is_a_verdict(tmp_path: Path) -> None:
    columns = (Column("tier", "Tier"), Column("from", "Load from", "count"), Column("ok", "Verdict", "verdict"))
    for name, tokens, verdict in (("a", None, "missed"), ("b", 320, "met")):
        rows = [{"tier": "S3", "from": tokens, "ok": verdict}]
        table = Table("t", "T", columns, rows, ("tier",))
        write(Report("breakeven", "t", ("v",), tables=(table,)), tmp_path / name, provenance(None))
    report = compare.build(tmp_path / "a", tmp_path / "b")
    figures = {row["column"]: (row["before"], row["after"], row["ratio"]) for row in report.tables[0].rows}
    assert figures == {"Load from": (None, 320, None), "Verdict": ("missed", "met", None)}
    assert report.verdict[1] == "2 of 2 figures changed."


def test_figures_without_a_ratio_that_means_anything_have_none(tmp_path: Path) -> None:
    columns = (Column("at", "At"), Column("x", "X", "number"))
    for name, value in (("a", 5e-324), ("b", 1e308)):
        rows = [{"at": "tiny", "x": value}, {"at": "zero", "x": 0 if name == "a" else 1}]
        table = Table("t", "T", columns, rows, ("at",))
        write(Report("breakeven", "t", ("v",), tables=(table,)), tmp_path / name, provenance(None))
    report = compare.build(tmp_path / "a", tmp_path / "b")
    assert [row["ratio"] for row in report.tables[0].rows] == [None, None]
    assert report.charts == ()


@pytest.mark.parametrize("text", ['{"schema": 1, "tables": [NaN]}', '{"schema": 1, "tables": [1e999]}', "[" * 100_000])
def test_a_report_with_what_is_no_number_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match="is no report"):
        compare.build(tmp_path, tmp_path)


def test_reports_of_two_kinds_are_not_compared(tmp_path: Path) -> None:
    for name, kind in (("a", "trace"), ("b", "ladder")):
        (tmp_path / name).mkdir()
        tree = {"schema": 1, "kind": kind, "tables": [], "files": []}
        (tmp_path / name / "report.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="compare two of one kind"):
        compare.build(tmp_path / "a", tmp_path / "b")


def test_a_damaged_report_is_refused(tmp_path: Path) -> None:
    tree = {"schema": 1, "kind": "trace", "tables": [{"name": "cells"}], "files": []}
    (tmp_path / "report.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="no whole report"):
        compare.build(tmp_path, tmp_path)


# ---- trace, goodput


def prepared(**changes: Any) -> replay.Replay:
    tiers = (("host memory (DMA)", 8 << 30, False),)
    return replay.prepare(replay.Ask("generated", 40, False, 3, **{"tiers": tiers, **changes}), None)


def test_a_trace_is_judged_against_no_cache_at_each_load() -> None:
    report = trace.build(prepared(loads=(0.1, 1.0)), quiet())
    rows = report.tables[0].rows
    assert [row["policy"] for row in rows] == ["no cache", "always load", "load if it pays"] * 2
    assert len([sentence for sentence in report.verdict if "no cache" in sentence]) == 2
    for row in rows:
        assert row["requests"] == 40
        assert row["goodput_share"] is None  # no objective, no goodput
        assert row["ttft_p99_s"] is None  # 40 requests have no p99


def test_a_cache_that_loses_to_none_is_called_so() -> None:
    report = trace.build(
        prepared(
            tiers=(("host memory (DMA)", 8 << 30, False), ("S3", 1 << 40, True)),
            loads=(0.2,),
            policies=(Policy.NEVER, Policy.ALWAYS),
        ),
        quiet(),
    )
    times = [row["ttft_mean_s"] for row in report.tables[0].rows]
    worse = times[1] > times[0] * 1.01  # type: ignore[operator]
    assert ("MORE: do not cache" in report.verdict[-1]) == worse


def test_requests_that_nobody_could_serve_are_said_and_no_mean_hides_them() -> None:
    long = Trace("long", 512, (Request(0, 512, 1, (0,)), Request(1, 10**8, 1, tuple(range(1, 195_314)))))
    served = replace(prepared(policies=(Policy.NEVER,)), trace=long)
    _, mean, failed = trace.build(served, quiet()).verdict
    assert mean.startswith("Mean TTFT at 1 times the trace's rate: no cache ")
    assert failed == "Not served, of 2 requests: no cache 1."


def test_loads_that_are_nearly_the_same_have_two_names() -> None:
    cells = prepared(loads=(1.0000001, 1.0000002), policies=(Policy.NEVER,)).cells
    assert list(cells) == ["no cache, load 1.0000001", "no cache, load 1.0000002"]


def test_the_seed_that_a_trace_names_is_the_seed_of_the_report() -> None:
    assert traces.named_seed("generated:7", 3) == 7
    assert traces.named_seed("generated", 3) == traces.named_seed("mine:7", 3) == 3


def test_evictions_make_cells_of_their_own_but_not_without_a_cache() -> None:
    from kvcore.reports.serving import Eviction

    cells = prepared(evictions=(Eviction.LRU, Eviction.FIFO)).cells
    assert list(cells) == [
        "no cache",
        "always load, lru",
        "always load, fifo",
        "load if it pays, lru",
        "load if it pays, fifo",
    ]


def test_the_load_that_is_held_is_the_one_below_which_all_are() -> None:
    ask = {"loads": (0.05, 0.1, 20.0), "slo": parse_slo("ttft:3000")}
    served = replay.serve(prepared(**ask), quiet())
    shares = {}
    for load in (0.05, 0.1, 20.0):
        good = goodput._good(served, Policy.NEVER, load)
        assert good is not None
        assert good.share is not None
        shares[load] = good.share
    assert shares[0.05] >= goodput.SHARE_HELD > shares[20.0]
    held = goodput.held(served, Policy.NEVER)
    assert held == (0.1 if shares[0.1] >= goodput.SHARE_HELD else 0.05)
    report = goodput.build(prepared(**ask), quiet())
    assert f"no cache up to {held:g} times the trace's rate" in report.verdict[1]
    impossible = goodput.build(prepared(loads=(1.0,), slo=parse_slo("ttft:0.001")), quiet())
    assert "no cache at none of the loads tried" in impossible.verdict[1]
    assert impossible.verdict[2] == "At these loads a cache holds no more than none."


def test_an_interrupted_goodput_does_not_judge_what_was_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of six cells: both policies at the lower load."""
    asked = prepared(loads=(0.05, 0.1, 0.2), policies=(Policy.NEVER, Policy.ALWAYS), slo=parse_slo("ttft:3000"))
    served: list[str] = []
    simulate = replay.simulate

    def interrupted(trace: Trace, setting: Setting) -> ServingResult:
        if len(served) == stop:
            raise KeyboardInterrupt
        served.append(setting.name)
        return simulate(trace, setting)

    monkeypatch.setattr(replay, "simulate", interrupted)
    stop = 2
    verdict = goodput.build(asked, quiet()).verdict
    assert "no cache at least up to 0.05 times" in verdict[1]
    assert "always load at least up to 0.05 times" in verdict[1]
    assert verdict[2:] == ("Not all cells were served: which policy holds more is not said.",)
    stop = 0
    served.clear()
    assert "no cache (not served); always load (not served)" in goodput.build(asked, quiet()).verdict[1]

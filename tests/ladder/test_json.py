"""`kvcore ladder --json`: what it writes to standard output, and the exit status. Schema 1."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcore.cli import main
from kvcore.connectors.scheduler import SchedulerConnector

CELL = "full/r1/inproc/sync"
RUNG_FIELDS = {
    "rung": str,
    "name": str,
    "requests": int,
    "tokens_compared": int,
    "mismatches": int,
    "loads_verified": int,
    "stores_verified": int,
    "cells_byte_checked": int,
    "preemptions": int,
    "preemptions_store_inflight": int,
    "fences_waited": int,
    "stores_cancelled": int,
    "resumes_with_load": int,
    "tokens_loaded": int,
    "tokens_loadable": int,
    "steps": int,
    "hit_share": (float, type(None)),
    "verdict": str,
    "problems": list,
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = main(["ladder", "--json", "--cell", CELL, *arguments])
    output = capsys.readouterr()
    return status, json.loads(output.out), output.err


def check_rung(rung: dict[str, Any]) -> None:
    for name, kind in RUNG_FIELDS.items():
        assert isinstance(rung[name], kind), name
    assert rung["verdict"] in ("pass", "fail")
    assert (rung["verdict"] == "pass") == (not rung["problems"] and rung["mismatches"] == 0)


def test_a_whole_climb_has_every_rung_and_the_replay(capsys: pytest.CaptureFixture[str]) -> None:
    status, data, progress = run(capsys, "--requests", "40")
    assert data["schema"] == 1
    assert data["target"] == "sim"
    assert data["seed"] == 0
    assert "40 requests" in data["workload"]
    assert [rung["rung"] for rung in data["rungs"]] == ["0", "1", "2", "3", "3b", "4"]
    for rung in [*data["rungs"], data["replay"]]:
        check_rung(rung)
    assert data["replay"]["rung"] == "replay"
    assert len(data["trace_hash"]) == 32
    assert data["verdict"] == "pass"
    assert status == 0
    (cell,) = data["cells"]
    assert cell["cell"] == CELL
    assert cell["reproduce"].startswith("kvcore ladder --target sim --seed 0")
    assert f"[1/1] {CELL}: pass" in progress, "progress and the table go to standard error"
    assert "rung   name" in progress


def test_a_part_of_the_rungs_has_no_replay(capsys: pytest.CaptureFixture[str]) -> None:
    status, data, _ = run(capsys, "--requests", "40", "--rungs", "0-1")
    assert [rung["rung"] for rung in data["rungs"]] == ["0", "1"]
    assert data["replay"] == {}
    assert data["rungs"][1]["tokens_compared"] == data["rungs"][0]["tokens_compared"] > 0
    assert status == 0


def test_rung_3_comes_with_the_rung_that_fills_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    status, data, _ = run(capsys, "--requests", "40", "--rungs", "3")
    assert [rung["rung"] for rung in data["rungs"]] == ["0", "2", "3", "3b"]
    assert status == 0


def test_a_climb_that_proved_nothing_fails_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connector that never takes part changes no output, and that is no proof of anything."""
    monkeypatch.setattr(SchedulerConnector, "matched_tokens", lambda *asked: (0, False))
    status, data, _ = run(capsys, "--requests", "40", "--rungs", "0-3")
    assert status == 1
    assert data["verdict"] == "fail"
    assert [rung["verdict"] for rung in data["rungs"]] == ["pass", "pass", "fail"]
    assert data["rungs"][-1]["mismatches"] == 0
    assert data["rungs"][-1]["stores_verified"] == 0
    assert "nowhere in the cache" in data["rungs"][-1]["problems"][0]


def test_the_reproducing_line_reproduces(capsys: pytest.CaptureFixture[str]) -> None:
    _, data, _ = run(capsys, "--requests", "40", "--rungs", "0-2", "--seed", "3")
    command = data["cells"][0]["reproduce"].split()
    assert command[:2] == ["kvcore", "ladder"]
    assert main([*command[1:], "--rungs", "0-2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_hash"] == data["trace_hash"]

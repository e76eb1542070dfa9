"""Storms on real processes: a minute of it in every test run, some minutes more with `pytest -m storm`.

A storm prints its seed and its forecast, and a line that starts it again. It is not deterministic: the timing of the
processes is real.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.storm.forecast import DECK, SHORT_DECK
from kvcore.service.protocol import Transfer

pytest.importorskip("torch")

from kvcore.ladder.storm.storm import StormConfig, StormResult, run_storm

pytestmark = pytest.mark.storm

SEED = 11
CELL = "full+window/r1/s2/async"
MORE_CELLS = ("full+window+recurrent/r2/s2/async", "full+window/r1/s2/sync")
MORE_SECONDS = 40
"""Each, at least; with starts, calms and ends all of it takes about five minutes, ten on a busy machine."""
PLANTED = """
import kvcore.l2.envelope
kvcore.l2.envelope._checksum = lambda fields, key, payload: bytes(16)
"""
"""A cache without checksums. Python imports a module of this name at every start."""


def storm(seed: int, cell: str, seconds: float, deck: tuple[str, ...], transfer: Transfer = "worker") -> StormResult:
    config = StormConfig(seed, MatrixCell.parse(cell), seconds, deck, transfer=transfer)
    result = run_storm(config, lambda line: print(line, file=sys.stderr))
    print(result.text())
    return result


@pytest.fixture
def minutes(pytestconfig: pytest.Config) -> None:
    if "storm" not in pytestconfig.getoption("markexpr"):
        pytest.skip("minutes long; asked for with `pytest -m storm`")


def test_a_minute_of_storm_changes_no_output_and_leaves_nothing() -> None:
    result = storm(SEED, CELL, 20, SHORT_DECK)
    assert result.verdict == "pass", result.text()


@pytest.mark.usefixtures("minutes")
def test_a_storm_over_servers_that_copy_changes_no_output_and_leaves_nothing() -> None:
    result = storm(SEED, CELL, MORE_SECONDS, DECK, "server")
    assert result.verdict == "pass", result.text()


@pytest.mark.usefixtures("minutes")
@pytest.mark.parametrize("cell", MORE_CELLS)
def test_minutes_of_storm_change_no_output_and_leave_nothing(cell: str) -> None:
    result = storm(SEED + 1, cell, MORE_SECONDS, DECK)
    assert result.verdict == "pass", result.text()


@pytest.mark.usefixtures("minutes")
def test_a_storm_finds_that_torn_records_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = storm(SEED, CELL, MORE_SECONDS, (*SHORT_DECK, "server.power", "server.power"))
    assert any("[bytes]" in problem for problem in result.record.problems), result.text()

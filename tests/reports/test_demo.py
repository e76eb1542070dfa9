"""`kvcore demo`: all three parts from the installed package, and what it says where something is missing.

The whole demo is run as printed by `tests/quality/test_documentation.py`; here are its edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcore.cli import main
from kvcore.ladder.result import LadderResult
from kvcore.reports import demo


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if these packages were not installed."""
    find = demo.find_spec
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in names else find(name))


@pytest.fixture
def one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CELLS", demo.CELLS[:1])


def test_without_the_simulation_it_says_so_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent(monkeypatch, "simpy")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    missing = "the demo needs simpy, which is not installed: pip install 'kvcore[sim,reports]'"
    assert said.err == f"kvcore demo: error: {missing}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_configuration")
def test_without_matplotlib_everything_but_the_pictures_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent(monkeypatch, "matplotlib")
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "Left out for lack of matplotlib: pictures and page. pip install 'kvcore[reports]'" in said
    assert "+ near: list[Job] = []" in said
    assert "rung 4 (hot, preempted): [blocks]" in said
    assert "VIOLATED" in said
    assert "local NVMe gen4" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["failure"]
    assert {"README.txt", "chart.txt", "case.json"} <= {path.name for path in (tmp_path / "out" / "failure").iterdir()}


@pytest.mark.slow
@pytest.mark.usefixtures("one_configuration")
def test_a_bug_that_nobody_sees_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A climb that leaves out the rung that preempts."""
    from kvcore.ladder.climb import climb_all
    from kvcore.ladder.matrix import MatrixCell
    from kvcore.ladder.options import LadderOptions

    def short(cells: Sequence[str]) -> LadderResult:
        chosen = tuple(map(MatrixCell.parse, cells))
        return climb_all(LadderOptions(cells=chosen, requests=demo.REQUESTS, passes=("0", "2")))

    absent(monkeypatch, "matplotlib")
    monkeypatch.setattr(demo, "_climb", short)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1


def test_a_folder_that_exists_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "cannot: File exists" in capsys.readouterr().err

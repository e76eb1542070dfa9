"""How the comparison of peers measures: turns, medians, bars; and kvcore's half of it, run for real."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("peers.figures")


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("peers.environment")


def test_sides_take_turns_and_each_is_first_in_every_second_round(figures):
    asked = []

    def one(side, turn):
        asked.append((side, turn))
        return {"figure": turn}

    samples = figures.in_turns({"kvcore": "k", "lmcache": "l"}, 2, warm=1, one=one)
    assert asked == [("l", 0), ("k", 0), ("k", 1), ("l", 1), ("l", 2), ("k", 2)]
    assert samples == {"figure": {"kvcore": [1, 2], "lmcache": [1, 2]}}, "the warm round counts"


def test_the_advantage_is_the_ratio_of_the_medians_whichever_way_is_better(figures):
    found = figures.compared(
        {
            "cycle_1": {"kvcore": [1.0, 2.0, 90.0], "lmcache": [8.0, 1.0, 9.0]},
            "cycle_1_cpu": {"kvcore": [1.0], "lmcache": [5.0]},
            "store_gb_per_s": {"kvcore": [6.0], "lmcache": [2.0]},
        }
    )
    assert found["cycle_1"]["advantage"] == 4.0
    assert found["cycle_1"]["cpu_advantage"] == 5.0
    assert (found["cycle_1"]["kvcore"]["min"], found["cycle_1"]["kvcore"]["max"]) == (1.0, 90.0)
    assert found["store_gb_per_s"]["advantage"] == 3.0


def test_a_missed_bar_is_marked_in_the_table(figures):
    samples = {"cycle_1": {"kvcore": [4.0], "lmcache": [8.0]}, "cycle_16": {"kvcore": [2.0], "lmcache": [8.0]}}
    tree = {
        "versions": {"kvcore": {"kvcore": "1"}},
        "machine": {"cpus": 1, "load_before": 0.0, "load_after": 0.0},
        "figures": figures.compared(samples),
        "not_comparable": [],
    }
    marks = [line.split()[-1] for line in figures.lines(tree) if "per key" in line]
    assert marks == ["<3!", "3"]


def test_every_figure_with_a_bar_names_its_processor_time(figures):
    for name, figure in figures.FIGURES.items():
        assert not figure.bar or figure.cpu in figures.FIGURES, name


def test_kvcores_half_answers_every_command(environment, tmp_path):
    command = [sys.executable, str(SCRIPTS / "peers" / "library_kvcore.py"), str(tmp_path)]
    with environment.talker(command, tmp_path / "kvcore.log") as side:
        assert side.versions["kvcore"]
        assert side.ask("hashes", times=1)["us"] > 0
        assert side.ask("fold", name="full", times=1)["length"] == 4096
        assert 2048 <= side.ask("fold", name="holes", times=1)["length"] < 4096
        assert side.ask("cycle", batch=16, times=2)["cpu_us"] > 0
        for kind in ("file", "slab"):
            assert side.ask(kind, way="store")["us"] > 0
            assert side.ask(kind, way="load")["us"] > 0


def test_a_side_that_ends_says_why(environment, tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no way to go on')"]
    with pytest.raises(SystemExit, match="no way to go on"), environment.talker(command, tmp_path / "side.log"):
        pass


def test_what_cannot_be_installed_is_said_in_pips_first_error(environment):
    with pytest.raises(environment.CannotInstall, match=r"^pip install \./nowhere said: ERROR: .*nowhere"):
        environment._pip(Path(sys.executable), "./nowhere")


def test_an_environment_that_was_not_finished_has_no_stamp(environment, monkeypatch, tmp_path):
    """What asks for the stamp skips then, as the comparison does."""
    unfinished = tmp_path / ".venv-peers"
    (unfinished / "bin").mkdir(parents=True)
    (unfinished / "bin" / "python").symlink_to(sys.executable)
    (unfinished / ".kvcore-peers").write_text("of other versions")
    monkeypatch.setattr(environment, "ENVIRONMENT", unfinished)
    monkeypatch.setattr(environment, "STAMP", unfinished / ".kvcore-peers")
    monkeypatch.setenv("TORCH_PIP", "./nowhere")
    with pytest.raises(environment.CannotInstall):
        environment.peer_python()
    assert not (unfinished / ".kvcore-peers").exists()

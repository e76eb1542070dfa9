"""The pytest plugin as its users meet it: other projects, other directories, with xdist, and without simpy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CONNECTOR = ROOT / "tests" / "ladder" / "dict_connector.py"
CELL = "full/r1/inproc/sync"
SUITE = ("--pyargs", "kvcore.ladder.suite", "-m", "ladder")

BLOCK_SIMPY = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "simpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's project: a directory of its own, with a connector in it."""
    place = tmp_path / "project"
    place.mkdir()
    shutil.copy(CONNECTOR, place)
    return place


def run_pytest(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return subprocess.run(
        command, cwd=place, env=clean | environment, capture_output=True, text=True, check=False, timeout=600
    )


def without_simpy(tmp_path: Path) -> str:
    """A PYTHONPATH that blocks simpy in every interpreter."""
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(BLOCK_SIMPY)
    return str(blocker)


def test_the_plugin_imports_nothing_but_pytest_and_works_without_simpy(project: Path, tmp_path: Path) -> None:
    (project / "test_theirs.py").write_text(
        "import importlib.util, sys\n"
        "import pytest\n"
        "def test_modules():\n"
        "    with pytest.raises(ModuleNotFoundError):\n"
        "        import simpy\n"
        "    ours = {name for name in sys.modules if name.partition('.')[0] == 'kvcore'}\n"
        "    assert ours == {'kvcore', 'kvcore.ladder', 'kvcore.ladder.plugin'}\n"
        "    assert not {'numpy', 'zmq', 'msgspec', 'blake3'} & set(sys.modules)\n"
    )
    strict = (
        "--strict-markers",
        "-W",
        "error",
        "-W",
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
    )
    result = run_pytest(project, "-q", *strict, PYTHONPATH=without_simpy(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "preemption ladder" not in result.stdout, "no climb, no table"


def test_a_climb_without_simpy_says_what_to_install(project: Path, tmp_path: Path) -> None:
    result = run_pytest(project, *SUITE, "-k", CELL, PYTHONPATH=without_simpy(tmp_path))
    assert result.returncode == 1
    assert "target sim needs simpy, which is not installed: pip install 'kvcore[sim]'" in result.stdout


def test_somebody_elses_connector_climbs_from_their_own_directory(project: Path) -> None:
    junit = project / "junit.xml"
    chosen = ("--ladder-rung", "0-2", "--ladder-connector", "dict_connector:DictConnector")
    result = run_pytest(project, *SUITE, *chosen, f"--junitxml={junit}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed, 34 skipped" in result.stdout
    assert "= preemption ladder =" in result.stdout
    assert "ladder: target dict_connector:DictConnector, 2 configuration(s), seed 0" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith(" pass")]
    assert [row[0] for row in rows if row[0].isdigit()] == ["0", "1", "2"]
    check_properties(junit)


def check_properties(junit: Path) -> None:
    """Each climb's own numbers, and the whole climb as JSON."""
    climbs = 0
    for case in ElementTree.parse(junit).iter("testcase"):
        values = {item.get("name"): item.get("value") for item in case.iter("property")}
        if not values:
            continue
        climbs += 1
        assert values["ladder_rung_2_verdict"] == "pass"
        assert values["ladder_rung_2_requests"] == "120"
        assert values["ladder_rung_1_mismatches"] == "0"
        climb = json.loads(values["kvcore_ladder"] or "")
        assert climb["cell"]["cell"] in case.get("name", "")
        assert climb["target"] == "dict_connector:DictConnector"
    assert climbs == 2


def test_a_broken_connector_fails_with_a_line_that_reproduces_it(project: Path) -> None:
    chosen = ("--ladder-rung", "3", "--ladder-connector", "dict_connector:ForgetfulLoad", "-k", CELL)
    result = run_pytest(project, *SUITE, *chosen)
    assert result.returncode == 1
    table = result.stdout.partition("= preemption ladder =")[2]
    assert f"{CELL}, rung 3 (hot from L1): [bytes]" in table
    assert "attends to wrong KV" in table
    (line,) = [line for line in table.splitlines() if line.strip().startswith("kvcore ladder --target sim")]
    assert "--connector dict_connector:ForgetfulLoad" in line


def test_under_xdist_the_table_has_every_climb() -> None:
    chosen = ("-k", f"{CELL} or full/r2/inproc/sync", "--ladder-rung", "0-1", "-n", "2")
    result = run_pytest(ROOT, "tests/ladder/test_climb.py", "-m", "ladder", *chosen)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ladder: target sim, 2 configuration(s), seed 0" in result.stdout
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("1      no cache")]
    assert row[3] == "240", "requests of both climbs"


def test_the_seed_reaches_the_climb_and_the_marker_selects_it(project: Path) -> None:
    traces = []
    for seed in ("5", "5", "6"):
        result = run_pytest(
            ROOT, "tests/ladder/test_climb.py", "-m", "ladder", "-k", CELL, "--ladder-rung", "0", "--sim-seed", seed
        )
        assert "1 passed" in result.stdout
        assert f"seed {seed}" in result.stdout
        traces += [line for line in result.stdout.splitlines() if line.startswith("trace hash ")]
    assert traces[0] == traces[1] != traces[2]


def test_the_admission_reaches_the_climb_and_the_line_that_reproduces_it(project: Path) -> None:
    junit = project / "junit.xml"
    chosen = ("-k", CELL, "--ladder-rung", "3", "--ladder-admission", "if-it-pays")
    result = run_pytest(project, *SUITE, *chosen, f"--junitxml={junit}")
    assert result.returncode == 0, result.stdout + result.stderr
    values = {item.get("name"): item.get("value") for item in ElementTree.parse(junit).iter("property")}
    climb = json.loads(values["kvcore_ladder"] or "")["cell"]
    rungs = {rung["rung"]: rung for rung in climb["rungs"]}
    assert rungs["3"]["loads_verified"] > 0
    assert rungs["3"]["refusals"] > 0
    assert "--admission if-it-pays" in climb["reproduce"]


def test_a_storm_rung_is_climbed_by_its_number_and_its_row_is_in_the_table(project: Path) -> None:
    chosen = ("--pyargs", "kvcore.ladder.suite", "-m", "storm", "--ladder-rung", "6", "--ladder-cases", "12")
    junit = project / "junit.xml"
    result = run_pytest(project, *chosen, f"--junitxml={junit}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed, 3 skipped" in result.stdout
    table = result.stdout.partition("= preemption ladder =")[2]
    (row,) = [line.split() for line in table.splitlines() if line.startswith("6 ")]
    assert row[-1] == "pass"
    assert "in flight" not in table, "no pass was climbed"
    assert 'name="ladder_rung_6_verdict" value="pass"' in junit.read_text()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--ladder-rung=9", "rung '9' does not exist"),
        ("--ladder-cases=few", "--ladder-cases takes a whole number from 1"),
        ("--ladder-target=locl", "did you mean local?"),
        ("--ladder-admission=sometimes", "--ladder-admission takes always or if-it-pays, not 'sometimes'"),
        ("--ladder-admission=if-it-pays --ladder-rung=5-8", "--ladder-admission is for kvcore's own connector"),
        ("--sim-seed=tomorrow", "--sim-seed takes a whole number"),
        ("--sim-seeds=0", "--sim-seeds takes a whole number from 1 on"),
        ("--sim-seconds=never", "--sim-seconds takes a positive number"),
        ("--sim-replay=nowhere.json", "cannot read a case from nowhere.json"),
        ("--sim-artifacts=/proc/none", "cannot write into /proc/none"),
        ("--ladder-connector=nowhere:Class", "cannot import nowhere"),
    ],
)
def test_unusable_options_end_the_session_with_one_line(project: Path, option: str, expected: str) -> None:
    result = run_pytest(project, *option.split())
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1
    assert expected in lines[0]

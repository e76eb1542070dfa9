"""`kvcore doctor`: real looks at this machine, at stores that are there and at some that are not."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import sys
import tomllib
from pathlib import Path

import pytest

from kvcore.cli import main
from kvcore.doctor import machine, packages, stores
from kvcore.doctor.command import report
from kvcore.doctor.finding import USES, Finding, Use, lacking
from kvcore.errors import KvcoreError, OutOfRoomError

ROOT = Path(__file__).resolve().parents[2]
NOT_FOR_USERS = {"dev", "servers", "redis"}  # the last one is empty: the core speaks to Redis itself


def found(name: str, findings: list[Finding]) -> Finding:
    (finding,) = [each for each in findings if each.name == name]
    return finding


def test_on_this_machine_nothing_is_broken_and_the_ladder_can_be_climbed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {finding["state"] for finding in data["findings"]} <= {"ok", "absent"}
    works = {use["name"]: use["works"] for use in data["uses"]}
    assert works["kvcore ladder, sim, zoo"]
    assert works["kvcore report"]


def test_a_use_is_a_matter_of_findings_that_some_look_makes() -> None:
    names = {finding.name for finding in (*packages.look(), *machine.look())}
    assert {need for use in USES for need in use.needs} <= names


def test_what_nobody_has_looked_at_counts_as_absent() -> None:
    use = Use("flying", ("wings", "wind"))
    assert lacking(use, [Finding("wings", "ok", "")]) == ["wind"]
    assert lacking(use, [Finding("wings", "ok", ""), Finding("wind", "absent", "")]) == ["wind"]
    assert lacking(use, [Finding("wings", "ok", ""), Finding("wind", "ok", "")]) == []


def test_every_extra_that_a_user_may_choose_is_looked_at() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(packages.EXTRAS) == set(extras) - NOT_FOR_USERS


def test_an_extra_that_is_missing_says_what_it_gives_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "requires", lambda _: ['no-such-thing>=2; extra == "sim"', "numpy>=999"])
    findings = list(packages.look())
    assert found("extra sim", findings).state == "absent"
    assert "no-such-thing is missing" in found("extra sim", findings).text
    assert found("extra sim", findings).advice == "pip install 'kvcore[sim]'"
    dependencies = found("dependencies", findings)
    assert dependencies.state == "broken"
    assert dependencies.text == f"numpy {importlib.metadata.version('numpy')} (>=999)"


@pytest.mark.parametrize(
    ("have", "bounds", "fit"),
    [
        ("3.11.4", "<3.14,>=3.11", True),
        ("3.14.0", "<3.14,>=3.11", False),
        ("3.9", ">=3.11", False),
        ("1.10", ">=1.9", True),
        ("2.13.0+cpu", ">=2.6", True),
        ("2.13", "==2.12", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_number_by_number(have: str, bounds: str, fit: bool) -> None:
    assert packages.fits(have, bounds) is fit


def test_what_another_platform_needs_is_not_missing_here() -> None:
    assert packages._is_for_here(f'sys_platform == "{sys.platform}"')
    assert not packages._is_for_here(f'sys_platform != "{sys.platform}" and extra == "serve"')
    assert not packages._is_for_here('sys_platform == "plan9"')


def test_a_small_shared_memory_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SERVER_L1_BYTES", 1 << 60)
    finding = machine.shared_memory()
    if not Path(machine.SHARED).is_dir():
        pytest.skip("shared memory is no directory here")
    assert (finding.state, finding.advice[:28]) == ("absent", "serve with a smaller --l1, o")


def test_no_shared_memory_at_all_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_size: int) -> object:
        raise OutOfRoomError("no room")

    monkeypatch.setattr(machine, "SharedArena", full)
    assert machine.shared_memory().state == "broken"


def test_a_command_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("theirs", "no_such_module:register", "kvcore.commands")
    monkeypatch.setattr(machine, "entry_points", lambda group: [entry])
    finding = machine.commands()
    assert finding.state == "broken"
    assert "theirs (no_such_module:register): ModuleNotFoundError" in finding.text


def test_a_tool_that_is_not_there_is_absent_and_one_that_is_there_has_its_version() -> None:
    assert machine.tool("nothing", ("no-such-program",), "nothing").state == "absent"
    python = machine.tool("Python", (sys.executable,), "everything")
    assert (python.state, python.text) == ("ok", f"{sys.executable}: Python {sys.version.split()[0]}")


# ---- stores


def test_a_store_that_opens_is_ok_and_its_secret_stays_hidden(tmp_path: Path) -> None:
    (finding,) = stores.look([f"file://{tmp_path}/kv"])
    assert (finding.state, finding.name) == ("ok", f"store file://{tmp_path}/kv")


def test_a_store_where_nobody_listens_is_broken_and_so_is_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # bound and never listening: a connection is refused, and nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        assert main(["doctor", f"redis://:secret@127.0.0.1:{taken.getsockname()[1]}/0"]) == 1
    said = capsys.readouterr().out
    assert "BROKEN store redis://" in said
    assert "secret" not in said
    assert said.splitlines()[-1].startswith("broken: store redis://")


def test_a_store_that_hangs_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts in the backlog, and never says a word
        (finding,) = stores.look([f"redis://127.0.0.1:{silent.getsockname()[1]}/0"], patience_s=0.01)
    assert (finding.state, finding.text) == ("broken", "no answer within 0.01 s")


def test_a_url_that_cannot_be_understood_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(KvcoreError, match="unknown L2 scheme"):
        stores.look([f"file://{tmp_path}/kv", "nonsense://x"])
    assert not (tmp_path / "kv").exists()
    assert main(["doctor", "nonsense://x"]) == 2


def test_long_texts_are_folded_under_their_head() -> None:
    lines = list(report([Finding("thing", "absent", "word " * 60, "do it")]))
    assert all(len(line) <= 120 for line in lines)
    assert "-      thing  word word" in lines[2]
    assert any(line.strip() == "-> do it" for line in lines)

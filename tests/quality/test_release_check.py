"""The release check can fail: what must not be in an archive is seen there. `make release-check` runs it whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("release_check")


@pytest.mark.parametrize(
    "name",
    [
        "kvcore/tests/test_a.py",
        "kvcore/test/a.py",
        "kvcore/__pycache__/a.pyc",
        "kvcore/reports/samples/index.html",
        ".venv/bin/python",
        "kvcore/.env",
        "kvcore/server.key",
        "kvcore/a.log",
        "conftest.py",
    ],
)
def test_what_is_private_is_seen(script: ModuleType, name: str) -> None:
    assert script.private([name, "kvcore/l1.py"]) == [name]


def test_the_names_of_this_tree_are_not_private(script: ModuleType) -> None:
    names = {name for name in script.expected_in_wheel(ROOT) if "__pycache__" not in name}
    assert len(names) > 300
    assert script.private(names) == []
    assert script.private(["README.md", "PKG-INFO", ".gitignore", "kernels/CMakeLists.txt"]) == []


def test_a_place_on_a_machine_is_seen(script: ModuleType) -> None:
    files = {f"{name}.py": f"path = '/{name}/someone/x'".encode() for name in ("home", "Users", "root", "opt")}
    assert script.places_named(files) == ["home.py", "Users.py", "root.py"]


def test_a_step_that_fails_is_told_and_ends_the_check(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def fails(place: Any) -> str:
        script.expect(False, "a private file")
        return ""

    steps: list[tuple[str, Callable[[Any], str]]] = [
        ("first", lambda place: "good"),
        ("second", fails),
        ("third", lambda place: "never"),
    ]
    monkeypatch.setattr(script, "STEPS", steps)
    assert not script.check(script.Place(tmp_path))
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["first", "ok"]
    assert second.split()[:2] == ["second", "FAILED"]
    assert second.endswith("a private file")
    monkeypatch.setattr(script, "STEPS", steps[:1])
    assert script.check(script.Place(tmp_path))


def test_a_command_that_fails_says_what_it_said(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(script.Failed, match=r"exits with 3\nlast words"):
        script.run([sys.executable, "-c", "print('last words'); raise SystemExit(3)"], tmp_path)


def test_two_wheels_where_one_was_expected_are_refused(script: ModuleType, tmp_path: Path) -> None:
    place = script.Place(tmp_path)
    place.dist.mkdir()
    for name in ("a.whl", "b.whl"):
        (place.dist / name).touch()
    with pytest.raises(script.Failed, match=r"\['a.whl', 'b.whl'\]"):
        _ = place.wheel

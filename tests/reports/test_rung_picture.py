"""The rung table as a picture, from the JSON of a real climb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.cli import main
from kvcore.errors import ConfigError
from kvcore.reports import rung_picture

PNG = b"\x89PNG\r\n\x1a\n"
KIB = 1024


@pytest.fixture
def climbed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    words = ["ladder", "--rungs", "0-2", "--cell", "full/r1/inproc/sync", "--requests", "40", "--json"]
    assert main(words) == 0
    file = tmp_path / "ladder.json"
    file.write_text(capsys.readouterr().out)
    return file


def test_a_climb_becomes_a_small_png(climbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rungs.png"
    assert rung_picture.main([str(climbed), str(picture)]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(PNG)
    assert 5 * KIB < picture.stat().st_size < 100 * KIB


def test_a_rung_that_failed_looks_different(climbed: Path, tmp_path: Path) -> None:
    tree = json.loads(climbed.read_text())
    good = rung_picture.draw(tree["rungs"], "the same title", tmp_path / "good.png").read_bytes()
    tree["rungs"][-1]["verdict"] = "fail"
    assert rung_picture.draw(tree["rungs"], "the same title", tmp_path / "bad.png").read_bytes() != good


def test_what_there_is_none_of_is_a_dash() -> None:
    assert [rung_picture.shown(value) for value in (None, 1234, 0.5)] == ["–", "1,234", "0.50"]


def test_what_is_no_climb_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"LADDER\.json"):
        rung_picture.main([str(tmp_path / "other.json"), str(tmp_path / "picture.png")])
    with pytest.raises(SystemExit, match="usage"):
        rung_picture.main([])
    assert not (tmp_path / "picture.png").exists()

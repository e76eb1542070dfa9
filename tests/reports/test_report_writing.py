"""The end of `kvcore report`: a disk that fills up, a place that vanishes, and nobody who reads the verdict."""

from __future__ import annotations

import errno
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcore.cli import BAD, main
from kvcore.reports.kinds import compare
from kvcore.reports.page import Bars, Lines, Mark, Matrix, Report, Series, folder, provenance, read_report, write
from kvcore.reports.page.png import draw
from kvcore.reports.page.work import say_on_stderr

FILE_BYTES = 20_000  # less than any page has


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, beside the one for temporary files."""
    (tmp_path / "here").mkdir()
    (tmp_path / "spare").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spare"))
    return tmp_path / "here"


@pytest.fixture
def words(here: Path) -> list[str]:
    """A command that is done at once, and draws nothing: the comparison of a report with itself."""
    write(Report("breakeven", "old", ("v",)), here / "a", provenance(None))
    return ["report", "compare", "a", "a", "--out", "r"]


@pytest.fixture
def small_files(words: list[str]) -> Iterator[None]:
    """From now on this process can write no file above FILE_BYTES: the system really refuses, wherever the file is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    """As if no page fitted on the disk that begins at this folder."""
    fill = folder._fill

    def filled(report: Report, new: Path, provenance: Mapping[str, Any]) -> list[str]:
        files = fill(report, new, provenance)
        if new.is_relative_to(disk):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return files

    monkeypatch.setattr(folder, "_fill", filled)


def test_a_report_whose_disk_is_full_is_kept_elsewhere(
    here: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full(monkeypatch, here)
    assert main(words) == BAD
    said = capsys.readouterr()
    (kept,) = (here.parent / "spare").glob("kvcore-report-*/compare")
    last = f"cannot write r: No space left on device; the report is in {kept}: move it from there"
    assert said.err.splitlines()[-1] == f"kvcore report: {last}"
    assert said.out.splitlines()[-1] == f"{kept / 'index.html'} (4 files)"
    assert read_report(kept)["verdict"][0] in said.out
    assert [path.name for path in here.iterdir()] == ["a"]


@pytest.mark.usefixtures("small_files")
def test_where_nothing_can_be_written_the_verdict_is_left_and_no_rubbish(
    here: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == BAD
    said = capsys.readouterr()
    assert said.out.startswith("A is a, B is a.\n")
    assert said.err.splitlines()[-1].startswith("kvcore report: cannot write r: File too large, nor into ")
    assert said.err.endswith("only the verdict is left: make room, then run it again\n")
    assert [path.name for path in here.iterdir()] == ["a"]
    assert list((here.parent / "spare").iterdir()) == []


def test_a_failed_write_leaves_the_old_report(here: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(words) == 0
    before = {path.name: path.read_bytes() for path in (here / "r").iterdir()}
    full(monkeypatch, here)
    assert main([*words, "--force"]) == BAD
    assert {path.name: path.read_bytes() for path in (here / "r").iterdir()} == before
    assert sorted(path.name for path in here.iterdir()) == ["a", "r"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()], ids=repr)
def test_what_comes_while_the_new_report_takes_its_place_leaves_the_old_one(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The old one was out of the way already, and went with the rest of the failed write."""
    write(Report("compare", "old", ("v",)), here / "r", provenance(None))
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(type(error)):
        write(Report("compare", "new", ("v",)), here / "r", provenance(None), force=True)
    assert read_report(here / "r")["title"] == "old"
    assert [path.name for path in here.iterdir()] == ["r"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_what_somebody_put_there_meanwhile_stays(
    here: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    force: list[str],
) -> None:
    """It was taken out of the way and removed, asked for or not."""
    build = compare.build

    def meanwhile(before: Path, after: Path) -> Report:
        (here / "r").mkdir()
        (here / "r" / "thesis.txt").write_text("ten years")
        return build(before, after)

    monkeypatch.setattr(compare, "build", meanwhile)
    assert main([*words, *force]) == BAD
    assert (here / "r" / "thesis.txt").read_text() == "ten years"
    (kept,) = (here.parent / "spare").glob("kvcore-report-*/compare")
    assert capsys.readouterr().err.endswith(f"the report is in {kept}: move it from there\n")


def test_a_folder_whose_parent_has_become_something_else_is_no_traceback(
    here: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "parent").mkdir()
    build = compare.build

    def vanished(before: Path, after: Path) -> Report:
        (here / "parent").rmdir()
        (here / "parent").write_text("")
        return build(before, after)

    monkeypatch.setattr(compare, "build", vanished)
    assert main([*words[:-1], "parent/r"]) == BAD
    assert "cannot write parent/r: " in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_verdict_that_cannot_be_printed_is_in_the_report(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as nowhere:
        monkeypatch.setattr("sys.stdout", nowhere)
        assert main(words) == BAD
        monkeypatch.setattr("sys.stdout", sys.__stdout__)
    told = "cannot print the verdict (No space left on device); the report is in r"
    assert capsys.readouterr().err.splitlines()[-1] == f"kvcore report: OutOfRoomError: {told}"


def test_names_are_nobodys_formulas(tmp_path: Path) -> None:
    """matplotlib reads one between two dollar signs, and the work was done when it could not."""
    name = r"$x_{$\frac 日本"  # nor is a letter that its font lacks a reason to warn
    lines = Lines("lines", name, name, name, (Series(name, (1, 2), (1, 2)),), x_log=True, marks=(Mark(1, name),))
    bars = Bars("bars", name, name, (name,), (1.0,))
    matrix = Matrix("matrix", name, (name,), (name,), ((1.0,),))
    for chart in (lines, bars, matrix):
        assert (tmp_path / draw(chart, tmp_path / f"{chart.name}.png")).stat().st_size > 0


def test_progress_that_nobody_can_hear_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a terminal that was closed while the work went on in the background."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        say_on_stderr("1/24 no cache")
        monkeypatch.undo()
        with pytest.raises(BrokenPipeError):  # it was really lost
            terminal.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)

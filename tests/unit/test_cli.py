"""The command line as a whole: its help, its exit status, what a closed pipe and an interrupt do."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from kvcore import __main__ as entry
from kvcore import cli
from kvcore.errors import ConfigError, StoreError

WIDTH = 80


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def commands() -> list[str]:
    return [name for name, _ in cli._abouts(cli.command_line())]


def test_every_command_stands_in_the_help_once_on_one_line_of_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys)
    for name in commands():
        assert text.count(f"\n  {name} ") == 1, name
    assert [line for line in text.partition("\nExamples")[0].splitlines() if len(line) > WIDTH] == []


def test_our_own_commands_are_in_named_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\nMore\n" not in helped(capsys)


def test_a_strangers_command_stands_under_more() -> None:
    groups = cli._grouped({"ladder": "climb", "theirs": "something"})
    assert list(groups.values()) == [["ladder"], ["theirs"]]
    assert list(groups)[-1] == "More"


def test_the_help_names_every_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, text = helped(capsys).partition("Exit status\n")
    named = [int(line.split()[0]) for line in text.splitlines() if line[2:3].isdigit()]
    assert named == [cli.DONE, cli.BAD, cli.USAGE_ERROR, 125, cli.INTERRUPTED]


def test_every_command_has_a_help_that_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (*([name] for name in commands()), ["sim", "replay"], ["report", "compare"], ["store", "ls"]):
        usage, about, *_ = helped(capsys, *words).split("\n\n")
        assert usage.startswith(f"usage: kvcore {' '.join(words)}")
        assert re.match(r"[A-Z](?s:.*)\w", about), words
        assert not about.startswith("options"), words
        assert "?." not in about, words


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvcore {version('kvcore')}\n"


@pytest.mark.parametrize("words", [[], ["ladders"], ["ladder", "--nonsense"], ["zoo", "--only", "no_such_mutant"]])
def test_unusable_input_is_one_line_and_exit_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = cli.main(words)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert (status, said.out, said.err.count("\n")) == (cli.USAGE_ERROR, "", 1)


def ending(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit status of a command that ends so."""

    def run(_arguments: argparse.Namespace) -> int:
        raise error

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=run, command="tried")
    monkeypatch.setattr(cli, "command_line", lambda: parser)
    return cli.main([])


def test_errors_end_with_the_status_that_the_help_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending(monkeypatch, ConfigError("no")) == cli.USAGE_ERROR
    assert ending(monkeypatch, StoreError("away")) == cli.BAD
    assert ending(monkeypatch, KeyboardInterrupt()) == cli.INTERRUPTED
    said = capsys.readouterr().err.splitlines()
    assert said == ["kvcore tried: error: no", "kvcore tried: StoreError: away", "kvcore tried: interrupted"]


def test_an_interrupt_before_the_command_is_known_ends_with_its_status_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> argparse.ArgumentParser:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "command_line", interrupted)
    assert cli.main([]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "kvcore: interrupted\n"


def test_an_interrupt_while_the_command_line_itself_is_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(MetaPathFinder):
        def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec:
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvcore.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupted()])
    assert entry.main() == cli.INTERRUPTED
    assert capsys.readouterr().err == "kvcore: interrupted\n"


def test_the_package_is_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m kvcore` and the installed `kvcore` both run `kvcore.__main__`."""
    monkeypatch.setattr(sys, "argv", ["kvcore", "zoo", "--list", "--only", "fence_by_request"])
    assert entry.main() == cli.DONE
    assert capsys.readouterr().out.startswith("fence_by_request")


def test_a_broken_pipe_of_something_else_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BrokenPipeError):
        ending(monkeypatch, BrokenPipeError())


MUCH, LITTLE = ["completion", "fish"], ["zoo", "--list", "--only", "fence_by_request"]
"""More than Python keeps for a stream before it writes, and less."""
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def printed_to(words: list[str], where: str) -> tuple[int, str]:
    """Exit status and standard error of a real command whose streams the shell has redirected so."""
    line = f'exec "$0" -m kvcore.cli "$@" {where}'
    command = ["sh", "-c", line, sys.executable, *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=BUFFERED, timeout=60, check=False)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize("words", [MUCH, LITTLE, ["--version"]], ids=" ".join)
def test_a_reader_that_has_seen_enough_gets_no_traceback(words: list[str]) -> None:
    """The reading end is closed before anything is printed."""
    command = [sys.executable, "-m", "kvcore.cli", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=BUFFERED) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.close()
        assert writer.stderr.read() == ""
        assert writer.wait(60) == cli.BAD


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize(("words", "name"), [(MUCH, "kvcore completion"), (["--version"], "kvcore")])
def test_a_full_disk_under_standard_output_is_one_line(words: list[str], name: str) -> None:
    said = f"{name}: cannot write: No space left on device; make room, then run it again"
    assert printed_to(words, ">/dev/full") == (cli.BAD, said)


def test_a_standard_output_that_was_closed_before_takes_everything() -> None:
    assert printed_to(MUCH, ">&-") == (cli.DONE, "")


def test_a_letter_that_the_terminal_does_not_have_is_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    parser = argparse.ArgumentParser()
    parser.set_defaults(run=lambda arguments: print("für") or cli.DONE, command="tried")
    monkeypatch.setattr(cli, "command_line", lambda: parser)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main([]) == cli.DONE
    assert written.getvalue() == b"f\\xfcr\n"


def test_a_full_disk_elsewhere_is_named_and_what_was_printed_arrives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/trace.json")
    assert ending(monkeypatch, error) == cli.BAD
    said = "kvcore tried: cannot write /full/trace.json: No space left on device; make room, then run it again\n"
    assert capsys.readouterr().err == said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_the_status_does_not_depend_on_who_hears_the_line() -> None:
    assert printed_to(["report", "compare", "no", "such"], "2>/dev/full") == (cli.USAGE_ERROR, "")


def test_an_error_of_the_system_that_may_be_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        ending(monkeypatch, FileNotFoundError(errno.ENOENT, "gone", "x"))

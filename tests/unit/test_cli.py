"""The command line as a whole: its help, its exit status, what a closed pipe and an interrupt do."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

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
    for words in (*([name] for name in commands()), ["sim", "replay"], ["report", "breakeven"], ["store", "ls"]):
        usage, about, *_ = helped(capsys, *words).split("\n\n")
        assert usage.startswith(f"usage: kvcore {' '.join(words)}")
        assert re.match(r"[A-Z](?s:.*)\w", about), words
        assert not about.startswith("options"), words


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


def test_a_broken_pipe_of_something_else_is_not_swallowed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BrokenPipeError):
        ending(monkeypatch, BrokenPipeError())


@pytest.mark.parametrize("words", [["zoo", "--list"], ["zoo", "--list", "--only", "fence_by_request"]])
def test_a_reader_that_has_seen_enough_gets_no_traceback(words: list[str]) -> None:
    """The reading end is closed before anything is printed: more than Python keeps for a pipe, and less."""
    command = [sys.executable, "-m", "kvcore.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.close()
        assert writer.stderr.read() == ""
        assert writer.wait(60) == cli.BAD

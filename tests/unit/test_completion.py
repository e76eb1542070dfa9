"""Completion scripts, each asked in its own shell; a shell that is not installed is skipped."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore import cli, completion

ASK = {
    "bash": """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMPREPLY=()
_kvcore
printf '%s\\n' "${COMPREPLY[@]}"
""",
    # zsh completes only where somebody types; here its own three ways to answer print what they were given.
    "zsh": """
compdef() { true }
source "$1"; shift
_describe() { print -rl -- "${(@P)2%%:*}" }
_files() { [[ "$1" == -/ ]] && print -rl -- ${(M)~:-*(/)} || print -rl -- * }
compadd() { shift; print -rl -- "$@" }
words=("$@"); CURRENT=$#
_kvcore
true
""",
    "fish": "source $argv[1]; complete -C (string join ' ' -- $argv[2..]) | string replace -r '\\t.*' ''; true",
}
Offered = Callable[..., set[str]]
QUIET = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["-N"]}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As the command prints them."""
    folder = tmp_path_factory.mktemp("completion")
    places = list(completion.places(cli.command_line()))
    for shell, write in completion.SHELLS.items():
        (folder / shell).write_text(write(places))
    return {shell: folder / shell for shell in completion.SHELLS}


@pytest.fixture(params=sorted(ASK))
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


@pytest.fixture
def offered(shell: str, scripts: dict[str, Path], tmp_path: Path) -> Offered:
    """What the shell offers after these words, in a folder with a folder and a file."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "a_file").touch()
    run = tmp_path / "a_file"
    run.write_text(ASK[shell])

    def ask(*words: str) -> set[str]:
        ask_command = [shell, *QUIET[shell], str(run), str(scripts[shell]), "kvcore", *words]
        done = subprocess.run(ask_command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
        assert (done.returncode, done.stderr) == (0, "")
        return {line.rstrip("/") for line in done.stdout.splitlines()} - {""}

    return ask


def test_the_first_word_is_a_command(offered: Offered) -> None:
    assert {"ladder", "doctor", "completion", "sim"} <= offered("")
    assert "replay" not in offered("")


def test_after_a_command_come_those_below_it(offered: Offered) -> None:
    assert {"run", "swarm", "replay", "shrink"} <= offered("sim", "")
    assert "ladder" not in offered("sim", "")


def test_options_are_those_of_the_command_that_was_typed(offered: Offered) -> None:
    assert {"--trace", "--jobs"} <= offered("ladder", "--json", "--")
    assert "--minimised" in offered("sim", "replay", "--")
    assert "--minimised" not in offered("sim", "run", "--")


def test_an_option_is_followed_by_what_it_takes(offered: Offered) -> None:
    assert offered("completion", "") >= {"bash", "fish", "zsh"}
    assert offered("ladder", "--trace", "") == {"folder", "a_file"}
    assert offered("report", "breakeven", "--out", "") == {"folder"}


def test_a_quote_in_a_help_text_breaks_no_script(tmp_path: Path, shell: str) -> None:
    parser = argparse.ArgumentParser(prog="kvcore")
    below = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    below.add_parser("odd", help='isn\'t "this" a $(touch spoiled) `touch spoiled` text: \\ with 100 %% of it?')
    script = tmp_path / "script"
    script.write_text(completion.SHELLS[shell](list(completion.places(parser))))
    (tmp_path / "ask").write_text(ASK[shell])
    asked = [shell, *QUIET[shell], "./ask", "./script", "kvcore", ""]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert "odd" in done.stdout.splitlines()
    assert not (tmp_path / "spoiled").exists()


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str], scripts: dict[str, Path]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == scripts["bash"].read_text()

"""The README's example is run as it stands."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_in_process_example_prints_what_its_comments_say(tmp_path: Path) -> None:
    """Ten lines store and retrieve real bytes through L1 and a file L2, also after the cache was reopened."""
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    source = code.group(1).replace("file:///tmp/kv", f"file://{tmp_path}/kv")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), {})
    assert printed.getvalue().splitlines() == ["8", "[b'KV of 1-', b'KV of 5-']"]
    assert len([line for line in source.splitlines() if line.strip()]) <= 10


def test_every_flag_in_the_readme_exists() -> None:
    from kvcore.cli import command_line

    flags = set(re.findall(r"(?<!\S)\[?(--[a-z][a-z0-9-]+)", README.read_text())) - {
        "--pyargs",
        "--ladder-connector",
        "--strict",
    }
    known = set(re.findall(r"--[a-z][a-z0-9-]+", "".join(_helps(command_line()))))
    assert flags
    assert flags <= known


def _helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The help of a command line and of all its subcommands."""
    yield parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _helps(inner)

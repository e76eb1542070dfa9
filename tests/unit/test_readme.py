"""The README's example is run as it stands."""

from __future__ import annotations

import contextlib
import io
import re
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
    from kvcore.cli import _parser

    flags = set(re.findall(r"(?<!\S)\[?(--[a-z][a-z0-9-]+)", README.read_text())) - {
        "--pyargs",
        "--ladder-connector",
        "--strict",
    }
    help_text = _parser()._subparsers._group_actions[0].choices["ladder"].format_help()  # type: ignore[union-attr,index]
    assert flags
    assert [flag for flag in sorted(flags) if flag not in help_text] == []

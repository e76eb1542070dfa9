"""Where the public traces are, if they are here at all.

They are not part of this repository (their sizes and licences are their owners'). A test that needs one is skipped
where it is absent, with one line that cannot be overlooked; the stand-in of `make_standin.py` is tested everywhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = (ROOT / "shared/data/traces", ROOT.parent / "shared/data/traces")


def _folders() -> list[Path]:
    named = os.environ.get("KVCORE_TRACES")
    return [Path(named)] if named else list(PLACES)


@pytest.fixture
def trace_file(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """The path of a public trace by its file name; skips the test loudly where it is not."""

    def find(name: str) -> Path:
        for folder in _folders():
            if (folder / name).is_file():
                return folder / name
        line = f"NOT CHECKED: {name} is not here (set KVCORE_TRACES to the folder of the public traces)"
        capture = pytestconfig.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", file=sys.__stderr__, flush=True)
        pytest.skip(line)

    return find

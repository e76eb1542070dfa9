"""Real `kvcore serve` processes for tests: on a private socket, always stopped, by their own process id."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcore.runtime.child import ServerChild

STARTS_IN_S = 90.0
PATIENT = """
from kvcore.operations import spans
from kvcore.service import host
host._STORES_S = spans._EXPORT_S = spans._CLOSE_S = 60.0
"""
"""A server with more time for its stores at the start, and for its collector. Python imports a module of this name at
every start."""


Serve = Callable[..., ServerChild]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: an ipc path has about 100 bytes at most
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def serve(directory: Path) -> Iterator[Serve]:
    """Start a server on `directory`/NAME.sock with more arguments; stopped at the end of the test."""
    started: list[ServerChild] = []

    def start(
        *arguments: str, name: str = "s", l1: str = "16MiB", environ: dict[str, str] | None = None
    ) -> ServerChild:
        listen = () if "--listen" in arguments else ("--listen", f"ipc://{directory}/{name}.sock")
        log = directory / f"serve-{len(started)}.log"
        server = ServerChild(log, *listen, "--l1", l1, *arguments, environ=environ)
        started.append(server)
        return server.started()

    yield start
    for server in started:
        server.kill()


@pytest.fixture
def patient(directory: Path) -> dict[str, str]:
    """The environment of a server whose stores and collector are as slow as a busy machine makes them, and not late."""
    place = directory / "patient"
    place.mkdir()
    (place / "sitecustomize.py").write_text(PATIENT)
    return {"PYTHONPATH": str(place)}


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a `kvcore` command line to its end."""
    return run_command


def run_command(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A `kvcore` command line, to its end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
    return subprocess.run(
        [sys.executable, "-m", "kvcore.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=STARTS_IN_S,
        check=False,
        env={**clean, **(environ or {})},
    )

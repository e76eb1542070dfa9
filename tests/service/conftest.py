"""Real `kvcore serve` processes for tests: on a private socket, always stopped, by their own process id."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STARTS_IN_S = 30.0
STOPS_IN_S = 15.0


class ServerProcess:
    """One server. `address` is valid once `start` has returned. Output goes to `log`."""

    def __init__(self, directory: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.log = directory / f"serve-{time.monotonic_ns()}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVCORE_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvcore.cli", "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**clean, **(environ or {})},
            )
        self.address = ""
        self.http = ""

    def start(self) -> ServerProcess:
        """Wait until it listens."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], STARTS_IN_S)
        line = self.process.stdout.readline().decode() if ready else ""
        if "health and metrics on " in line:
            self.http = line.split("metrics on ")[1].split()[0]
            line = self.process.stdout.readline().decode()
        assert "listening on " in line, f"no server: {line!r} {self.text()}"
        self.address = line.split("listening on ")[1].split()[0]
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and wait for the end; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOPS_IN_S)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def text(self) -> str:
        """What it has logged so far."""
        return self.log.read_text()


Serve = Callable[..., ServerProcess]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: an ipc path has about 100 bytes at most
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def serve(directory: Path) -> Iterator[Serve]:
    """Start a server on `directory`/NAME.sock with more arguments; stopped at the end of the test."""
    started: list[ServerProcess] = []

    def start(
        *arguments: str, name: str = "s", l1: str = "16MiB", environ: dict[str, str] | None = None
    ) -> ServerProcess:
        listen = () if "--listen" in arguments else ("--listen", f"ipc://{directory}/{name}.sock")
        server = ServerProcess(directory, *listen, "--l1", l1, *arguments, environ=environ)
        started.append(server)
        return server.start()

    yield start
    for server in started:
        server.kill()


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

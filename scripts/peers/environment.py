"""The environment of the peer: `.venv-peers`, with torch and LMCache of fixed versions.

Each side runs in an interpreter of its own, because neither must see the other's dependencies. `process` is how every
process of the comparison is started: what it writes to stderr is kept in a file, and it ends with the block.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-peers"
STAMP = ENVIRONMENT / ".kvcore-peers"
LMCACHE = "lmcache==0.5.6"
TORCH = "torch==2.13.0"
PATIENCE_S = 120.0
VARIABLES = {"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "ERROR"}


class CannotInstall(Exception):
    """One line: what was tried and what came of it."""


def peer_python() -> Path:
    """Its interpreter, after torch and LMCache were installed beside it."""
    torch = os.environ.get("TORCH_PIP") or TORCH
    wanted = hashlib.sha256("\n".join((torch, LMCACHE, sys.version)).encode()).hexdigest()
    python = ENVIRONMENT / "bin" / "python"
    if not STAMP.is_file() or STAMP.read_text() != wanted:
        STAMP.unlink(missing_ok=True)
        if not python.exists():
            venv.create(ENVIRONMENT, with_pip=True)
        for package in (torch, LMCACHE):
            print(f"installing {package} into {ENVIRONMENT.name} (minutes)", file=sys.stderr, flush=True)
            _pip(python, package)
        STAMP.write_text(wanted)
    return python


def _pip(python: Path, package: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *shlex.split(package)]
    result = subprocess.run(command, check=False, text=True, capture_output=True)
    if result.returncode:
        raise CannotInstall(f"pip install {package} said: {_complaint(result.stderr)}")


def _complaint(text: str) -> str:
    """pip's first error says what was wrong; the ones after it send to its manual."""
    return next((line for line in text.splitlines() if line.startswith("ERROR: ")), last_line(text))


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing"


@contextmanager
def process(command: Sequence[str], log: Path, **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """Ended with the block. What it writes to stderr is in `log`."""
    with log.open("w") as errors:
        started = subprocess.Popen(
            command, stderr=errors, text=True, env={**os.environ, **VARIABLES}, cwd=log.parent, **pipes
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        for pipe in (started.stdin, started.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def talker(command: Sequence[str], log: Path) -> Iterator[Talker]:
    """A process that takes one JSON command a line and replies with one a line; its first line is its versions."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process(command, log, **pipes) as started:
        yield Talker(started, log)


class Talker:
    """The near end."""

    def __init__(self, started: subprocess.Popen[str], log: Path) -> None:
        self._process = started
        self._log = log
        self.versions: dict[str, str] = self.reply()

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        return self.reply()

    def reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._log.stem} has ended: {last_line(self._log.read_text())}")
        return json.loads(line)

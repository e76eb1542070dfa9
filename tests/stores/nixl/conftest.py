"""A real memory pool for tests: `kvcore store pool` in a process of its own, ended by its own pid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


class Pool:
    """`url` is for its users. Up when it says so."""

    def __init__(self, directory: Path, memory: str = "64MiB") -> None:
        self.path = str(directory / "pool.sock")  # short: a unix socket's path has about 100 bytes at most
        self.url = f"nixl+ucx://{self.path}"
        self._memory = memory
        self.start()

    def start(self) -> None:
        words = [sys.executable, "-m", "kvcore.cli", "store", "pool", self.path, "--memory", self._memory]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = []
        while "ready" not in (line := self.process.stderr.readline()):
            said.append(line)
            assert line, f"the pool has ended: {''.join(said)}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait()


@pytest.fixture(scope="session")
def shared_pool(needs, tmp_path_factory):
    """One for the tests that do it no harm."""
    needs("nixl_cu12")
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.kill()


@pytest.fixture
def pool_of(needs, tmp_path):
    """Pools to do harm to."""
    needs("nixl_cu12")
    made = []

    def make(memory="64MiB"):
        made.append(Pool(tmp_path, memory))
        return made[-1]

    yield make
    for pool in made:
        pool.kill()

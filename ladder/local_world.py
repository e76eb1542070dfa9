"""`LocalWorld`: the real outside of one run - the asyncio loop, threads, eventfd, files, sockets and the clock.

In-process cells use the in-memory transport; cells with servers talk over ZeroMQ through ipc sockets, all in this
process but through the kernel. Files and sockets lie in private directories (0700) that `close` removes. Files go to
/dev/shm where there is one: a climb makes and deletes thousands of small ones, and a busy disk would take most of its
time. `--l2 DIR` puts them on a disk.

Who holds: the world holds the directories, transports and devices. `close` ends them, after the stack has been closed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from kvcore.errors import ConfigError
from kvcore.ladder.watched_device import WatchedDevice
from kvcore.ports import ClientTransport, Clock, Executor, Files, Notice, NullTracer, ServerTransport, Tracer
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.files import OsFiles
from kvcore.runtime.notice import EventfdNotice
from kvcore.service.local import LocalServerTransport
from kvcore.service.zmq_transport import ZmqClientTransport, ZmqServerTransport
from kvcore.sim.engine.device import PagedMemory

T = TypeVar("T")


class _Closing(Protocol):
    def close(self) -> None: ...


_Port = TypeVar("_Port", bound=_Closing)

PREFIX = "kvcore-ladder-"
_EXECUTOR_THREADS = 2


def check_directory(path: Path) -> None:
    """`path` may become the place of file L2s: an empty or a missing directory in which we can write.

    Raises `ConfigError` otherwise and leaves everything as it was.
    """
    try:
        foreign = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(PREFIX))
    except FileNotFoundError:
        foreign = []
    except OSError as error:
        raise ConfigError(f"--l2: {path} cannot be used: {error.strerror}") from None
    if foreign:
        raise ConfigError(f"--l2: {path} holds files that are not ours, such as {foreign[0]!r}; use an empty directory")
    _try_to_write(path)


def _try_to_write(path: Path) -> None:
    """Make a directory as a climb will, and take it away again, with those that had to be made for it."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    try:
        _private_directory(path).rmdir()
    finally:
        for place in missing:
            if place.is_dir():
                place.rmdir()


def _private_directory(parent: Path | None) -> Path:
    try:
        if parent is not None:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        where = tempfile.gettempdir() if parent is None else f"--l2: {parent}"
        raise ConfigError(f"{where} cannot be written: {error.strerror}") from None


def _memory_directory() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir="/dev/shm"))
    except OSError:
        return _private_directory(None)


class LocalWorld:
    """Built and used on the running loop. `memory` is the engine's; its pages are what the devices watch."""

    def __init__(self, memory: PagedMemory, *, in_process: bool, l2: Path | None, ballast_bytes: int = 0) -> None:
        self.clock: Clock = SystemClock()
        self.tracer: Tracer = NullTracer()
        self._loop = asyncio.get_running_loop()
        self._memory = memory
        self._in_process = in_process
        self._ballast_bytes = ballast_bytes
        self._l2 = _private_directory(l2) if l2 is not None else _memory_directory()
        self._sockets = _private_directory(None)  # short: the path of an ipc socket has about 100 bytes at most
        self._turns = threading.Lock()
        self._local: dict[int, LocalServerTransport] = {}
        self._ports: list[_Closing] = []

    def inside(self, process: str, build: Callable[[], T]) -> T:
        return build()

    def notice(self) -> Notice:
        return EventfdNotice(self._loop)

    def executor(self, name: str) -> Executor:
        return ThreadExecutor(self._loop, _EXECUTOR_THREADS, name)

    def files(self, name: str) -> Files:
        return OsFiles(self._l2 / name)

    def deaths(self) -> None:
        """Everything is one process."""
        return

    def process_name(self, process: str) -> str:
        return ""

    def listen(self, server: int) -> ServerTransport:
        if self._in_process:
            self._local[server] = self._keep(LocalServerTransport(self._loop))
            return self._local[server]
        return self._keep(ZmqServerTransport(self._loop, self._address(server)))

    def connect(self, server: int, client: str) -> ClientTransport:
        if self._in_process:
            return self._local[server].connect()
        return self._keep(ZmqClientTransport(self._loop, self._address(server)))

    def device(self, rank: int) -> WatchedDevice:
        inner = ThreadCopyEngine(self._loop, f"device{rank}")
        return self._keep(WatchedDevice(inner, self._memory.buffers[rank], self._turns, self._ballast_bytes))

    def close(self) -> None:
        for port in reversed(self._ports):
            port.close()
        for directory in (self._l2, self._sockets):
            shutil.rmtree(directory, ignore_errors=True)

    def _keep(self, port: _Port) -> _Port:
        self._ports.append(port)
        return port

    def _address(self, server: int) -> str:
        return f"ipc://{self._sockets}/server{server}"

"""NIXL: the shared directory of `kvcore.l2.fs`, with the bytes moved by a NIXL agent's POSIX plugin.

    nixl+posix:///mnt/shared/kv?engine=uring

Same layout and format as `fs`: processes of both kinds share a directory. All rules of `fs` hold (names, rename,
discard, scan, crashes, lock strength NONE, capacity by the adapter's ledger). What differs is who moves the payload:
NIXL's asynchronous file engines (Linux AIO, io_uring, POSIX AIO), with memory that is registered with the agent. It is
meant for machines that run NIXL anyway; on a page cache plain `preadv` is as fast.

Agents are not shared between threads: a call takes one from a pool and gives it back. A transfer that ends short or
with an error says no more than that (NIXL has no errno), so it counts as EIO, and after a failed write the room on the
disk is looked at: FULL when there is too little. A transfer is waited for until it ends, as `fs` waits for its calls:
giving it up would leave NIXL writing into memory that the caller uses for something else.

Copies between the caller's buffer and the file: none where the buffer lies in a region given to `register_region`, one
through a registered frame elsewhere; the kernel's own copy to the page cache comes on top in both cases.

Limits: POSIX alone (UCX is `kvcore.l2.nixl_ucx`; the OBJ plugin is not offered). No bound on the time of a call (put a
deadline and a breaker around the adapter). The package logs to stdout from INFO on; it is set to WARNING here unless
NIXL_LOG_LEVEL says otherwise.

Who holds: agents and frames belong to this backend; buffers stay the caller's. Records belong to the directory. A
region is held, and so stays mapped, until `close` and the end of each agent's last transfer; the agent forgets it then.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from kvcore.errors import ConfigError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.envelope import Defect
from kvcore.l2.fs import FsBackend, FsOptions, _identity
from kvcore.l2.nixl_agent import NixlAgent, Span
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.files import flush_directory

ENGINES = {"": {}, "aio": {"use_aio": "true"}, "uring": {"use_uring": "true"}, "posix_aio": {"use_posix_aio": "true"}}

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """`engine`: "" for NIXL's own choice, "aio", "uring" or "posix_aio". `directory` and `fsync` as for `fs`."""

    directory: str
    engine: str = ""
    fsync: bool = False


class _Agent(NixlAgent):
    """An agent that moves bytes to and from files."""

    def __init__(self, name: str, engine: str) -> None:
        super().__init__(name, "POSIX", ENGINES[engine])

    def move(self, operation: str, fd: int, parts: Sequence[memoryview]) -> None:
        """READ or WRITE the parts from or to the start of the file. OSError: it did not work."""
        spans = [Span.of(part) for part in parts if len(part)]
        total = sum(span.length for span in spans)
        file = self._native.register_memory([(0, total, fd, "")], "FILE")
        try:
            self._transfer(operation, fd, spans)
        except Exception as error:  # the package's own types
            raise OSError(errno.EIO, f"NIXL did not {operation.lower()} {total} bytes: {error}") from error
        finally:
            self._native.deregister_memory(file)

    def _transfer(self, operation: str, fd: int, spans: Sequence[Span]) -> None:
        starts = [sum(span.length for span in spans[:at]) for at in range(len(spans))]
        memory = self._native.get_xfer_descs([(span.first, span.length, 0) for span in spans], "DRAM")
        place = self._native.get_xfer_descs([(at, span.length, fd) for at, span in zip(starts, spans)], "FILE")
        self.transfer(operation, memory, place, self._native.name)


class NixlBackend(FsBackend):
    """`kvcore.l2.shared_backend.SharedBackend`. See the module text, and that of `kvcore.l2.fs`."""

    def __init__(self, options: NixlOptions, token: str) -> None:
        _check_options(options)
        super().__init__(FsOptions(options.directory, options.fsync), token)
        self._options = options
        self._agent_numbers = count(1)
        self._idle: deque[_Agent] = deque()
        self._regions: list[memoryview] = []
        self._closed = False

    def open(self) -> None:
        """As `fs`; and NIXL is there with its POSIX plugin, or ConfigError."""
        with self._agent():
            super().open()

    def register_region(self, region: memoryview) -> None:
        """Buffers inside `region` (the arena) are used as they lie."""
        self._regions.append(region)

    def close(self) -> None:
        """Agents that are in use forget their regions when they come back."""
        super().close()
        self._closed = True
        self._regions.clear()
        self._forget_regions()

    def _put(self, temporary: str, path: str, parts: list[memoryview]) -> None:
        try:
            self._write_file(temporary, parts)
            os.rename(temporary, path)
            if self._options.fsync:
                flush_directory(os.path.dirname(path))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _write_file(self, temporary: str, parts: list[memoryview]) -> None:
        total = sum(map(len, parts))
        fd = os.open(temporary, _CREATE, 0o600)
        try:
            with self._agent() as agent:
                staged = self._staged(agent, parts)
                for target, part in zip(staged, parts):
                    if target is not part:
                        target[:] = part
                agent.move("WRITE", fd, staged)
            if self._options.fsync:
                os.fdatasync(fd)
        except OSError as error:
            free = os.fstatvfs(fd)
            if error.errno == errno.EIO and free.f_bavail * free.f_frsize < total:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
        finally:
            os.close(fd)

    def _read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        head = memoryview(bytearray(envelope.header_bytes(key)))
        try:
            fd = os.open(self._path(key), _READ)
        except FileNotFoundError:
            return Defect.MISSING
        try:
            status = os.fstat(fd)
            self._fill(fd, [head, into], status.st_size)
            defect = envelope.check_record(key, head, into, status.st_size)
            if defect is not None:
                self._suspect(key, _identity(status))
        finally:
            os.close(fd)
        return defect

    def _fill(self, fd: int, parts: Sequence[memoryview], size: int) -> None:
        """The file's first bytes. Of one that has not the wanted length only the header is worth reading."""
        if size != sum(map(len, parts)):
            parts[0][: min(size, len(parts[0]))] = os.pread(fd, len(parts[0]), 0)
            return
        with self._agent() as agent:
            staged = self._staged(agent, parts)
            agent.move("READ", fd, staged)
            for source, part in zip(staged, parts):
                if source is not part:
                    part[:] = source

    def _staged(self, agent: _Agent, parts: Sequence[memoryview]) -> list[memoryview]:
        """The parts themselves where they are registered, else pieces of the agent's frame."""
        regions = self._regions
        direct = [agent.registered(part, regions) for part in parts]
        rest = agent.frame(sum(len(part) for part, as_is in zip(parts, direct) if not as_is))
        staged: list[memoryview] = []
        for part, as_is in zip(parts, direct):
            staged.append(part if as_is else rest[: len(part)])
            rest = rest if as_is else rest[len(part) :]
        return staged

    @contextmanager
    def _agent(self) -> Iterator[_Agent]:
        try:
            agent = self._idle.pop()
        except IndexError:
            agent = self._new_agent()
        try:
            yield agent
        finally:
            self._idle.append(agent)
            if self._closed:  # by now: `close` may have looked before it came
                self._forget_regions()

    def _forget_regions(self) -> None:
        """Each agent is taken by one thread alone."""
        with suppress(IndexError):
            while True:
                self._idle.pop().forget_regions()

    def _new_agent(self) -> _Agent:
        try:
            name = f"kvcore-{self._token}-{next(self._agent_numbers)}"
            return _Agent(name, self._options.engine)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"NIXL has no POSIX plugin that works here: {error}") from error


def _check_options(options: NixlOptions) -> None:
    if options.engine not in ENGINES:
        raise ConfigError(f"NIXL's engine is one of {', '.join(filter(None, ENGINES))}, not {options.engine[:40]!r}")
    if not options.directory.startswith("/") or options.directory.strip("/") == "":
        raise ConfigError("a NIXL store needs an absolute path of its own: nixl+posix:///mnt/shared/kv")


def open_backend(options: NixlOptions) -> NixlBackend:
    """The backend of these options. ConfigError: they can never work. No I/O before `open`."""
    return NixlBackend(options, SystemClock().token(8))

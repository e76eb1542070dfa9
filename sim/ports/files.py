"""`SimFiles`: a directory in memory that loses power, runs full, rots and lies, exactly when told to.

It stands for the *disk*: it survives the process that used it. Usable without any simulation (unit tests call the
file backend on it directly) and under a `SimLoop`, where draws come from a seeded stream and events go to the trace.

Crash. `crash_after(n)` lets n more operations happen. The next one raises `SimCrash` instead, and so does everything
after it, until `restart()`. `SimCrash` is no `Exception`, so that no handler of the code under test "cleans up" after
its own death. A `write` that is hit leaves the file with a part of its bytes. With `torn`, also every other file that
was written since the last restart and not flushed loses its end, whatever its name by then: that is what a power
failure does to a rename that reached the disk before the data. `kill()` is the death of the process alone: nothing
is lost, the lock goes.

Errors. `fail_op(n, errno, kind)` makes the n-th operation from now on (of that kind, if given) raise an OSError; a
failing `write` leaves part of a file, a failing `rename` has not happened. `capacity_bytes` makes writes beyond it fail
with ENOSPC, with the part that fitted left behind, as on a real disk.

Hooks. Each of `hooks` is told of every operation (kind, names) before it happens and may answer the number of an error
that it ends with. A restart ends them, as it ends what `fail_op` has planned: a new process finds a disk that works.

Damage. `wipe` empties the disk, directories included. `flip_bit`, `truncate`, `append`, `vanish`, `swap` (a misdirected
record) and `put` (a stale one) change the bytes behind the back of whoever wrote them.

Who holds: this object holds every byte, as a copy; the files' names are the only handles.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.errors import CallerError

if TYPE_CHECKING:
    from kvcore.sim.loop import SimLoop


FileHook = Callable[[str, tuple[str, ...]], int | None]
"""(kind, names) of an operation -> None, or the number of the error it ends with."""


class SimCrash(BaseException):
    """The process died inside a file operation. Nothing of it may run on."""


@dataclass(slots=True)
class _File:
    data: bytearray
    flushed: bool


@dataclass(slots=True)
class _PlannedError:
    operations_left: int
    number: int
    kind: str | None

    def is_due(self, kind: str) -> bool:
        """Count one operation of `kind`; True when it is the one that fails."""
        if self.kind in (None, kind):
            self.operations_left -= 1
            return self.operations_left == 0
        return False


class SimFiles:
    """`kvcore.ports.Files` in memory. `operations` counts what was asked for since the beginning."""

    def __init__(
        self,
        loop: SimLoop | None = None,
        *,
        fsync: bool = False,
        capacity_bytes: int | None = None,
        stream: str = "storage",
    ) -> None:
        self.fsync = fsync
        self.capacity_bytes = capacity_bytes
        self.writable = True
        self.on_crash: Callable[[], None] | None = None
        self.hooks: list[FileHook] = []
        self.operations = 0
        self.errors_raised = 0
        self._loop = loop
        self._stream = stream
        self._files: dict[str, _File] = {}
        self._directories: set[str] = set()
        self._locked = False
        self._dead = False
        self._crash_left: int | None = None
        self._crash_torn = False
        self._errors: list[_PlannedError] = []

    # --- the port ----------------------------------------------------------------------------------------------

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        was_dead = self._dead
        try:
            self._begin("write", name)
        except (SimCrash, OSError) as error:
            refused = isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES)
            if not was_dead and not refused and self._may_create(name):
                self._files[name] = _File(bytearray(data[: self._keep(len(data))]), flushed=False)
            raise
        self._check_create(name)
        room = len(data) if self.capacity_bytes is None else max(0, self.capacity_bytes - self.bytes_stored)
        self._files[name] = _File(bytearray(data[:room]), flushed=self.fsync and room >= len(data))
        if room < len(data):
            raise _os_error(errno.ENOSPC, name)

    def rename(self, source: str, target: str) -> None:
        self._begin("rename", source, target)
        self._check_writable(target)
        self._check_directory(target)
        self._files[target] = self._take(source)

    def read(self, name: str, into: Sequence[memoryview]) -> int:
        self._begin("read", name)
        data = memoryview(self._file(name).data)
        position = 0
        for buffer in into:
            part = data[position : position + len(buffer)]
            buffer[: len(part)] = part
            position += len(part)
        return position + (position < len(data))

    def unlink(self, name: str) -> None:
        self._begin("unlink", name)
        self._check_writable(name)
        self._take(name)

    def scan(self) -> list[tuple[str, int]]:
        self._begin("scan", "")
        return sorted((name, len(file.data)) for name, file in self._files.items())

    def lock(self) -> bool:
        self._begin("lock", "")
        taken, self._locked = self._locked, True
        return not taken

    def unlock(self) -> None:
        if not self._dead:
            self._locked = False

    def mkdir(self, name: str) -> None:
        self._begin("mkdir", name)
        self._check_writable(name)
        if name in self._directories:
            raise _os_error(errno.EEXIST, name)
        self._directories.add(name)

    # --- crash and restart -------------------------------------------------------------------------------------

    def crash_after(self, operations: int, *, torn: bool = False) -> None:
        """Let `operations` more happen, and die in the one after them."""
        assert operations >= 0
        self._crash_left, self._crash_torn = operations, torn

    def kill(self, *, torn: bool = False) -> None:
        """The process dies now, between two operations. With `torn` the power fails too."""
        self._die(torn)

    def restart(self) -> None:
        """A new process may use the disk; what is on it now has reached the platters."""
        self._dead = self._locked = False
        self._crash_left = None
        self._errors.clear()
        self.hooks.clear()
        for file in self._files.values():
            file.flushed = True

    @property
    def dead(self) -> bool:
        return self._dead

    # --- errors and damage -------------------------------------------------------------------------------------

    def fail_op(self, n: int, number: int = errno.EIO, kind: str | None = None) -> None:
        """The n-th operation from now on (1: the next), of `kind` if given, raises OSError(number)."""
        assert n >= 1
        self._errors.append(_PlannedError(n, number, kind))

    def flip_bit(self, name: str, bit: int) -> None:
        self._file(name).data[bit // 8] ^= 1 << (bit % 8)

    def truncate(self, name: str, size: int) -> None:
        del self._file(name).data[size:]

    def append(self, name: str, data: bytes) -> None:
        self._file(name).data.extend(data)

    def vanish(self, name: str) -> None:
        self._take(name)

    def swap(self, one: str, other: str) -> None:
        self._files[one], self._files[other] = self._file(other), self._file(one)

    def put(self, name: str, data: bytes) -> None:
        """Place a file, as somebody else would; its directory comes into being."""
        directory, slash, _ = name.rpartition("/")
        if slash:
            self._directories.add(directory)
        self._files[name] = _File(bytearray(data), flushed=True)

    def wipe(self) -> None:
        """Somebody has emptied the directory."""
        self._files.clear()
        self._directories.clear()

    def data(self, name: str) -> bytes:
        return bytes(self._file(name).data)

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    @property
    def bytes_stored(self) -> int:
        return sum(len(file.data) for file in self._files.values())

    # --- inside ------------------------------------------------------------------------------------------------

    def _begin(self, kind: str, *names: str) -> None:
        """Count the operation; raise what is planned for it."""
        for name in names:
            if name.count("/") > 1 or ".." in name.split("/"):
                raise CallerError(f"{name!r} is not a name below the root")
        self._check_alive()
        self.operations += 1
        self._trace("files." + kind, *names)
        due = [planned.number for planned in self._errors if planned.is_due(kind)]
        self._errors = [planned for planned in self._errors if planned.operations_left]
        due += [number for hook in tuple(self.hooks) if (number := hook(kind, names)) is not None]
        for number in due:
            self.errors_raised += 1
            self._trace("files.error", kind, number)
            raise _os_error(number, names[0])

    def _check_alive(self) -> None:
        if self._dead:
            raise SimCrash("the process that used these files is dead")
        if self._crash_left is None:
            return
        if self._crash_left == 0:
            self._die(self._crash_torn)
            raise SimCrash("the process died in a file operation")
        self._crash_left -= 1

    def _die(self, torn: bool) -> None:
        self._dead = True
        self._crash_left = None
        self._trace("files.crash", int(torn))
        if torn:
            for _, file in sorted(self._files.items()):
                if not file.flushed:
                    del file.data[self._keep(len(file.data)) :]
        if self.on_crash is not None:
            self.on_crash()

    def _keep(self, size: int) -> int:
        """How much of an unflushed or half-written file is there afterwards."""
        return size // 2 if self._loop is None else self._loop.streams[self._stream].randint(0, size)

    def _may_create(self, name: str) -> bool:
        directory, slash, _ = name.rpartition("/")
        return name not in self._files and self.writable and (not slash or directory in self._directories)

    def _check_create(self, name: str) -> None:
        self._check_writable(name)
        self._check_directory(name)
        if name in self._files:
            raise _os_error(errno.EEXIST, name)

    def _check_writable(self, name: str) -> None:
        if not self.writable:
            raise _os_error(errno.EACCES, name)

    def _check_directory(self, name: str) -> None:
        directory, slash, _ = name.rpartition("/")
        if slash and directory not in self._directories:
            raise _os_error(errno.ENOENT, name)

    def _file(self, name: str) -> _File:
        if name not in self._files:
            raise _os_error(errno.ENOENT, name)
        return self._files[name]

    def _take(self, name: str) -> _File:
        file = self._file(name)
        del self._files[name]
        return file

    def _trace(self, label: str, *fields: str | int) -> None:
        if self._loop is not None:
            self._loop.trace.event(label, *fields)


def _os_error(number: int, name: str) -> OSError:
    return OSError(number, os.strerror(number), name)

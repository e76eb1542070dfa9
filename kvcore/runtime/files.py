"""`OsFiles`: the Files port on a real directory.

Files are created 0600 and exclusively, directories 0700; symbolic links are not followed. A write goes out in one
`pwritev` of all parts, a read in one `preadv` into all buffers plus one spare byte that shows a longer file.
With `fsync` the file is flushed before the rename and the directory after it; without, a crash of the machine (not
of the process) may leave short or empty files, which the envelope finds.

The directory itself is locked (`flock` on its descriptor), so no lock file is left behind and the lock ends with the
process. Rejected: fcntl locks (any close of any descriptor of the file in this process would drop them).

All methods block and may be called from any thread. Who holds: the descriptor of the lock belongs to this object from
`lock` to `unlock`; all others live inside one call.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvcore.errors import CallerError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_PARTS_MAX = 1024  # what Linux takes in one call


class OsFiles:
    """`kvcore.ports.Files` below `root`, which `lock` creates if it is missing."""

    def __init__(self, root: str | Path, fsync: bool = False) -> None:
        self._root = os.path.abspath(root)
        self._fsync = fsync
        self._lock_fd: int | None = None

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        write_new(self._path(name), [memoryview(part).cast("B") for part in parts], self._fsync)

    def rename(self, source: str, target: str) -> None:
        os.rename(self._path(source), self._path(target))
        if self._fsync:
            for directory in sorted({os.path.dirname(self._path(source)), os.path.dirname(self._path(target))}):
                flush_directory(directory)

    def read(self, name: str, into: Sequence[memoryview]) -> int:
        with _opened(self._path(name), _READ) as fd:
            return read_at(fd, _rest([*into, memoryview(bytearray(1))], 0), 0)

    def unlink(self, name: str) -> None:
        os.unlink(self._path(name))

    def scan(self) -> list[tuple[str, int]]:
        """Whatever is no directory counts as a file, also deeper down: it is there, and the caller judges names."""
        return sorted(self._walk(""))

    def lock(self) -> bool:
        if self._lock_fd is not None:
            return False
        os.makedirs(self._root, mode=0o700, exist_ok=True)
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        self._lock_fd = fd
        return True

    def unlock(self) -> None:
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)  # ends the flock

    def mkdir(self, name: str) -> None:
        os.mkdir(self._path(name), mode=0o700)
        if self._fsync:
            flush_directory(self._root)

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if len(parts) > 2 or any(part in ("", ".", "..") for part in parts):
            raise CallerError(f"{name!r} is not a name below the root")
        return os.path.join(self._root, name)

    def _walk(self, directory: str) -> Iterator[tuple[str, int]]:
        with os.scandir(os.path.join(self._root, directory)) as entries:
            for entry in entries:
                name = os.path.join(directory, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(name)
                else:
                    yield name, entry.stat(follow_symlinks=False).st_size


@contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def flush_directory(path: str) -> None:
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)


def write_new(path: str, parts: list[memoryview], fsync: bool) -> None:
    """Create the file (0600), which must not be there, and write all parts into it."""
    with _opened(path, _CREATE) as fd:
        write_at(fd, _rest(parts, 0), 0)
        if fsync:
            os.fsync(fd)


def write_at(fd: int, parts: list[memoryview], offset: int) -> None:
    """Write all parts one behind the other from `offset` on, in one call where the system takes them in one."""
    wanted = sum(map(len, parts))
    while wanted > 0:
        done = os.pwritev(fd, parts[:_PARTS_MAX], offset)
        wanted -= done
        offset += done
        if wanted:
            parts = _rest(parts, done)


def read_at(fd: int, into: list[memoryview], offset: int) -> int:
    """Fill the buffers from `offset` on; the total. Ends early only at the end of the file."""
    total, wanted = 0, sum(map(len, into))
    while total < wanted and (done := os.preadv(fd, into[:_PARTS_MAX], offset + total)) > 0:
        total += done
        if total < wanted:
            into = _rest(into, done)
    return total


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `parts` after their first `done` bytes."""
    rest: list[memoryview] = []
    for part in parts:
        skipped = min(done, len(part))
        done -= skipped
        if skipped < len(part):
            rest.append(part[skipped:])
    assert done == 0
    return rest

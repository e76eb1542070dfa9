"""Arenas in POSIX shared memory: created by the cache server, mapped by its workers.

Who holds, announces, frees
---------------------------
The *creator* (`SharedArena`) owns the segment's name and removes it in `close`, once, and only in the process that made
it. Everyone else (`SharedSegment`, from `SharedArena.attach`) has a mapping of their own; the kernel frees the memory
when the name is gone and the last mapping has ended. Views that are still out keep a mapping alive; `close` then leaves
the unmapping to them.

Safety: segments are created exclusively (O_EXCL) with mode 0600 under a name that carries a random token. One that
exists already is never opened, truncated or removed. Attaching refuses what belongs to another user, is open to others,
is no regular file or has another size: a stale or foreign name must not become somebody's KV.

On Linux a segment is a file in /dev/shm, and its pages are reserved at creation; without that, a full /dev/shm would
kill the process (SIGBUS) in the middle of a copy. On macOS `_posixshmem` opens it, and memory is reserved lazily.

A creator that is killed leaves its segment behind. While it lives it holds an exclusive `flock` on it, which the kernel
ends with the process, so `remove_stale` can tell: what is ours by name, owner and mode and is locked by nobody has no
creator any more. A segment is locked before it has a size; one without a size is left alone while it is young.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import sys
import time

from kvcore.errors import CallerError, ConfigError, PeerError
from kvcore.memory import ALIGNMENT_BYTES, BufferArena, Slot

_PREFIX = "kvcore-"
_NAME_CHARS_MAX = 30  # what macOS allows, less the leading slash
# Where Linux keeps segments; names are random and opened with O_EXCL.
_DIRECTORY = "/dev/shm"  # nosec B108
_MODE = 0o600
_UNSIZED_SECONDS_MAX = 60  # a creator locks its segment within microseconds of making it


class SharedSegment:
    """Somebody else's segment, mapped here. Never removes the name. `capacity_bytes` None: whatever size it has."""

    def __init__(self, segment: str, capacity_bytes: int | None = None) -> None:
        check_name(segment)
        self.segment = segment
        try:
            fd = open_segment(segment, os.O_RDWR)
        except OSError as error:
            raise PeerError(
                f"cannot attach shared memory {segment}: {error.strerror}; has the cache server that created it gone?"
            ) from error
        try:
            self.capacity_bytes = os.fstat(fd).st_size if capacity_bytes is None else capacity_bytes
            check_ours(fd, segment, self.capacity_bytes)
            self._map = mmap.mmap(fd, self.capacity_bytes)
        finally:
            os.close(fd)
        self._buffer = memoryview(self._map)

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    def view_range(self, offset: int, size: int) -> memoryview:
        """The bytes [offset, offset + size), writable."""
        if offset < 0 or size < 0 or offset + size > self.capacity_bytes:
            raise PeerError(f"bytes {offset}+{size} lie outside shared memory {self.segment} ({self.capacity_bytes})")
        return self._buffer[offset : offset + size]

    def view(self, slot: Slot) -> memoryview:
        return self.view_range(slot.offset, slot.size)

    def close(self) -> None:
        self._buffer = memoryview(b"")
        unmap(self._map)


class SharedArena(BufferArena):
    """An arena that other processes can map under `segment`.

    `name` is a token that nobody else uses; None: one is drawn here.
    """

    def __init__(self, capacity_bytes: int, name: str | None = None, *, alignment: int = ALIGNMENT_BYTES) -> None:
        if capacity_bytes < alignment:
            raise ConfigError(f"shared memory of {capacity_bytes} bytes cannot hold a single object")
        segment = new_name() if name is None else _PREFIX + name
        check_name(segment)
        capacity_bytes = -(-capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._segment = segment
        self._creator_pid = os.getpid()
        self._map, self._lock_fd = create_segment(segment, capacity_bytes)
        super().__init__(capacity_bytes, memoryview(self._map), alignment)

    @property
    def segment(self) -> str:
        return self._segment

    @property
    def buffer(self) -> memoryview:
        """All of it."""
        return memoryview(self._map)

    @staticmethod
    def attach(segment: str, capacity_bytes: int) -> SharedSegment:
        """Map another process's segment of exactly this size."""
        return SharedSegment(segment, capacity_bytes)

    def close(self) -> None:
        """Remove the name (only the creating process does) and unmap. Calling it again does nothing."""
        if self._segment and os.getpid() == self._creator_pid:
            try:
                unlink_segment(self._segment)
            except FileNotFoundError:
                pass  # somebody cleaned /dev/shm; the memory itself is still ours
        if self._segment:
            os.close(self._lock_fd)
        self._segment = ""
        super().close()
        unmap(self._map)


def remove_stale() -> list[str]:
    """Remove the segments whose creators have died; their names. Never one that is not ours or that somebody holds."""
    if sys.platform != "linux":
        return []  # segments have no directory there
    removed = []
    for name in sorted(os.listdir(_DIRECTORY)):
        if name.startswith(_PREFIX) and remove_if_stale(name):
            removed.append(name)
    return removed


def remove_if_stale(segment: str) -> bool:
    """Remove this segment if it is ours and its creator has died. False: it is still there, or was gone already."""
    if sys.platform != "linux" or not _is_stale(segment):
        return False
    try:
        unlink_segment(segment)
    except FileNotFoundError:
        return False
    return True


def _is_stale(segment: str) -> bool:
    try:
        fd = open_segment(segment, os.O_RDWR)
    except OSError:
        return False  # gone, a link, or not ours to open
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != _MODE:
            return False
        if status.st_size == 0 and time.time() - status.st_mtime < _UNSIZED_SECONDS_MAX:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def new_name() -> str:
    """A segment name that nobody else has."""
    return _PREFIX + secrets.token_hex(8)


def create_segment(segment: str, capacity_bytes: int) -> tuple[mmap.mmap, int]:
    """The mapping, and the descriptor that holds the lock."""
    try:
        fd = open_segment(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError as error:
        raise ConfigError(
            f"shared memory {segment} exists already and was not created here, so it is left alone; "
            "use another name, or remove it if its server is dead"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot create shared memory {segment}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, capacity_bytes)
        if sys.platform == "linux":
            os.posix_fallocate(fd, 0, capacity_bytes)
        return mmap.mmap(fd, capacity_bytes), fd
    except (OSError, ValueError, OverflowError) as error:
        unlink_segment(segment)
        os.close(fd)
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        hint = "; enlarge /dev/shm or configure a smaller cache" if _is_full(error) else ""
        raise ConfigError(f"cannot reserve {capacity_bytes} bytes of shared memory: {reason}{hint}") from error


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


def check_name(segment: str) -> None:
    token = segment.removeprefix(_PREFIX)
    plain = token.replace("-", "").replace("_", "")
    if token == segment or not (plain.isalnum() and plain.isascii()):
        raise CallerError(f"a segment is named {_PREFIX} and letters, digits, - or _, not {segment!r}")
    if len(segment) > _NAME_CHARS_MAX:
        raise CallerError(f"the segment name {segment!r} is longer than {_NAME_CHARS_MAX} characters")


def check_ours(fd: int, segment: str, capacity_bytes: int) -> None:
    """Refuse to use what a process of ours cannot have made."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise PeerError(f"shared memory {segment} is no regular segment; it is not used")
    if status.st_uid != os.geteuid():
        raise PeerError(f"shared memory {segment} belongs to another user ({status.st_uid}); it is not used")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise PeerError(f"shared memory {segment} is open to other users; it is not used")
    if capacity_bytes <= 0 or status.st_size != capacity_bytes:
        raise PeerError(f"shared memory {segment} has {status.st_size} bytes, not {capacity_bytes}; it is another one")


def unmap(mapping: mmap.mmap) -> None:
    try:
        mapping.close()
    except BufferError:
        pass  # views are still out; the mapping ends with the last of them


if sys.platform == "linux":

    def open_segment(segment: str, flags: int) -> int:
        return os.open(f"{_DIRECTORY}/{segment}", flags | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)

    def unlink_segment(segment: str) -> None:
        os.unlink(f"{_DIRECTORY}/{segment}")

else:
    import _posixshmem

    def open_segment(segment: str, flags: int) -> int:
        fd: int = _posixshmem.shm_open("/" + segment, flags, mode=_MODE)
        return fd

    def unlink_segment(segment: str) -> None:
        _posixshmem.shm_unlink("/" + segment)

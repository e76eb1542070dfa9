"""The fs backend: one file per record, in a directory that processes share, perhaps over a network file system.

Layout of the directory
-----------------------
    kvcore-fs.json                        the marker: {"format": "kvcore-fs", "version": 1}
    <2 hex digits>/<key text>.kv          a record: envelope and payload (`kvcore.l2.envelope`)
    <2 hex digits>/.tmp-<token>-<n>       a record that is being written; the token is its process's own

Nobody owns the directory, nothing is locked, and nothing is remembered: what is there is what the file
system says now. Lock strength NONE: a record that was found may be gone at the load, which is a miss.

Writing: a file under a temporary name, then a rename. Two processes that write one key put one whole record over the
other; both are intact, the last one stays. A record that is there already, with the right key and length by its
header, is PRESENT and costs no write. A failure removes the temporary file and touches nothing else.

Reading: open, one `preadv` of header and payload, the payload straight into the caller's buffer. The descriptor keeps
the file that was opened, so a rename in the middle changes nothing; bytes that somebody changes in place fail the
checksum.

Discarding a bad record: the read has noted which file it was (inode, size, time of writing). The file is renamed to a
temporary name, and removed if it still is that one. If a newer one had come in its place, it is linked back, unless an
even newer one is there. So a newer record is never lost; for a moment it may be invisible, which is a miss.

Scanning goes through the sub-directories one by one. It removes temporary files older than an hour by the file
system's own clock (their process is dead; one that is not gets an error from its rename and tries again later), and
records whose header is torn or flipped. Records of other formats are left to whoever wrote them, and what cannot be
looked at (another user's, on a bad block) to whoever can.

Over a network file system (NFS) a file that another machine has replaced while it was open cannot be read to its end:
ESTALE. It is opened once more, by its name.

Crashes: of a process, a temporary file; of a machine without `fsync`, records that are short or hold wrong bytes, which
the envelope finds. `fsync` flushes each file before its rename and the directory behind it.

Limits: no bound on the time of a call (a network file system that hangs holds its thread: put a deadline and a breaker
around the adapter); files 0600 and directories 0700, so the processes run as one user; the parent directory must
exist, since creating it would hide that a file system is not mounted. A full disk answers FULL, a read-only one FAILED.

Who holds: records belong to the directory. A descriptor lives inside one call. Nothing here announces anything.

Rejected: `flock` per record (not everywhere on network file systems, and a lock is a round trip); hard links for
exclusive creation (a second writer's record is as good as the first's).
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple, TypeVar

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey, encode_key, key_text
from kvcore.l2 import envelope
from kvcore.l2.adapter import L2Usage, LockKind, LockStrength, StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.shared_backend import Stored
from kvcore.l2.work import SLICE_BYTES, answer_of, is_ours
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.files import flush_directory, read_at, write_new

MARKER_NAME = "kvcore-fs.json"
# The version of the layout of names; records say their own.
MARKER = json.dumps({"format": "kvcore-fs", "version": 1}).encode() + b"\n"
TEMPORARY_AGE_S_MAX = 3600.0

_RECORD = re.compile(r"([0-9a-f]{2})[A-Za-z0-9._-]*\.kv", re.ASCII)
_DIRECTORY = re.compile(r"[0-9a-f]{2}", re.ASCII)
_HEAD_BYTES = 1024  # longer headers are read a second time
_TOKEN_BYTES = 8
_SUSPECTS_MAX = 4096
_PLACES_MAX = 16 * 1024
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_OTHERS = ("kvcore-l2.json", "kvcore-slab.json")
_DAMAGED = frozenset({Defect.SHORT, Defect.TORN, Defect.LONG, Defect.FLIPPED})

T = TypeVar("T")

Order = tuple[ObjectKey, memoryview]


@dataclass(frozen=True, slots=True)
class FsOptions:
    directory: str
    fsync: bool = False


_Identity = tuple[int, int, int, int]
"""Which file it is, whatever its name is by now: device, inode, length in bytes, time of writing in nanoseconds."""


class _Place(NamedTuple):
    """Where a record is, and what its header is made of. Costly: kept from the lookup to the load."""

    path: str
    directory: str
    template: envelope.Template


class FsBackend:
    """`kvcore.l2.shared_backend.SharedBackend`. See the module text."""

    lock_strength = LockStrength(LockKind.NONE)
    batch_keys = 64
    batch_bytes = SLICE_BYTES

    def __init__(self, options: FsOptions, token: str) -> None:
        self._root = os.path.abspath(options.directory)
        self._where = f"the shared directory {options.directory}"
        self._fsync = options.fsync
        self._token = token
        self._numbers = count(1)
        self._directories: set[str] = set()  # known to exist
        self._suspects: OrderedDict[ObjectKey, _Identity] = OrderedDict()  # what reads have found bad
        self._scanned = L2Usage(0, None, 0, 0)
        self._place = lru_cache(_PLACES_MAX)(partial(_place, self._root))
        self._open = False

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return self._place(key).template.header_bytes + payload_bytes

    # --- start and end -----------------------------------------------------------------------------------------

    def open(self) -> None:
        with suppress(FileExistsError):
            os.mkdir(self._root, 0o700)
        try:
            names = os.listdir(self._root)
        except NotADirectoryError as error:
            raise ConfigError(f"{self._where} is not a directory") from error
        if MARKER_NAME not in names:
            self._check_names(names)
        self._check_marker()
        self._open = True

    def close(self) -> None:
        self._open = False

    def _check_names(self, names: list[str]) -> None:
        for name in names:
            if name in _OTHERS:
                raise ConfigError(f"{self._where} belongs to a store of one process ({name}); use an empty one")
            if not _DIRECTORY.fullmatch(name) and not name.startswith(".tmp-"):
                raise ConfigError(f"{self._where} holds what is not ours, such as {name[:100]!r}; use an empty one")

    def _check_marker(self) -> None:
        path = f"{self._root}/{MARKER_NAME}"
        try:
            with open(path, "rb") as file:
                text = file.read(len(MARKER) + 1)
        except FileNotFoundError:
            self._put(f"{self._root}/{self._temporary_name()}", path, [memoryview(MARKER)])
            return
        if text != MARKER:
            raise ConfigError(f"{self._where} has another format: {text!r}, not {MARKER.decode().strip()}")

    # --- lookup and write --------------------------------------------------------------------------------------

    def find(self, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
        self._check_open()
        return [_answer(self._is_there, key) for key in keys]

    def write(self, orders: Sequence[Order]) -> list[StoreAnswer | Exception]:
        self._check_open()
        answers: list[StoreAnswer | Exception] = []
        for key, payload in orders:
            try:
                answers.append(self._write(key, payload))
            except OSError as error:
                answer = answer_of(error)
                answers.append(error if answer is StoreAnswer.RETRY else answer)
        return answers

    def _is_there(self, key: ObjectKey) -> bool:
        try:
            return os.stat(self._path(key), follow_symlinks=False).st_size > envelope.FIXED_BYTES
        except FileNotFoundError:
            return False

    def _write(self, key: ObjectKey, payload: memoryview) -> StoreAnswer:
        path, directory, template = self._place(key)
        if _looks_good(path, key, len(payload)):
            return StoreAnswer.PRESENT
        parts = [memoryview(envelope.header_by(template, payload)), payload]
        temporary = f"{directory}/{self._temporary_name()}"
        if directory not in self._directories:
            self._make_directory(directory)
        try:
            self._put(temporary, path, parts)
        except FileNotFoundError:  # somebody has emptied the place: make the directory again, once
            self._make_directory(directory)
            self._put(temporary, path, parts)
        return StoreAnswer.STORED

    def _put(self, temporary: str, path: str, parts: list[memoryview]) -> None:
        try:
            write_new(temporary, parts, self._fsync)
            os.rename(temporary, path)
            if self._fsync:
                flush_directory(os.path.dirname(path))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _make_directory(self, directory: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        self._directories.add(directory)

    # --- read --------------------------------------------------------------------------------------------------

    def read(self, orders: Sequence[Order]) -> list[Defect | Exception | None]:
        self._check_open()
        return [_answer(self._read, key, into) for key, into in orders]

    def _read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        try:
            return self._read_once(key, into)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        return self._read_once(key, into)

    def _read_once(self, key: ObjectKey, into: memoryview) -> Defect | None:
        path, _, template = self._place(key)
        head = memoryview(bytearray(template.header_bytes))
        spare = memoryview(bytearray(1))  # shows a longer file
        try:
            fd = os.open(path, _READ)
        except FileNotFoundError:
            return Defect.MISSING
        try:
            bytes_read = read_at(fd, [part for part in (head, into, spare) if len(part)], 0)
            defect = envelope.check_record_by(template, key, head, into, bytes_read)
            if defect is not None:
                self._suspect(key, _identity(os.fstat(fd)))
        finally:
            os.close(fd)
        return defect

    def _suspect(self, key: ObjectKey, identity: _Identity) -> None:
        """Each call on the dict is one step, whichever threads run; the oldest one is forgotten, and met again."""
        self._suspects[key] = identity
        if len(self._suspects) > _SUSPECTS_MAX:
            with suppress(KeyError):
                self._suspects.popitem(last=False)

    # --- remove ------------------------------------------------------------------------------------------------

    def discard(self, key: ObjectKey, defect: Defect) -> None:
        """Touches a newer record only by hiding it for a moment; see the module text."""
        self._check_open()
        identity = self._suspects.pop(key, None)
        if identity is not None:
            self._remove(self._path(key), identity)

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        self._check_open()
        return [_answer(self._delete, key) for key in keys]

    def _delete(self, key: ObjectKey) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def _remove(self, path: str, identity: _Identity) -> bool:
        """Remove that very file. False: it is gone, or another one has its name."""
        aside = f"{os.path.dirname(path)}/{self._temporary_name()}"
        try:
            if _identity(os.stat(path, follow_symlinks=False)) != identity:
                return False
            os.rename(path, aside)
        except FileNotFoundError:
            return False
        removed = _identity(os.stat(aside, follow_symlinks=False)) == identity
        if not removed:
            with suppress(FileExistsError):
                os.link(aside, path)
        os.unlink(aside)
        return removed

    # --- scan --------------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[Stored]:
        self._check_open()
        now_s = self._now_s()
        total_bytes = objects = 0
        for directory in [".", *filter(_DIRECTORY.fullmatch, sorted(os.listdir(self._root)))]:
            for stored in self._scan_directory(directory, now_s):
                total_bytes += 0 if stored.removed else stored.record_bytes
                objects += stored.removed is None
                yield stored
        self._scanned = L2Usage(total_bytes, None, objects, 0)

    def _scan_directory(self, directory: str, now_s: float | None) -> Iterator[Stored]:
        names: list[str] = []
        with suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(f"{self._root}/{directory}")
        for name in names:
            if directory == "." and not name.startswith(".tmp-"):
                continue
            stored = self._examined(directory, name, now_s)
            if stored is not None:
                yield stored

    def _examined(self, directory: str, name: str, now_s: float | None) -> Stored | None:
        """One file that cannot be looked at, or is gone since, does not end the scan of all."""
        try:
            return self._examine(directory, name, now_s)
        except OSError as error:
            if is_ours(error):
                raise
        return None

    def _examine(self, directory: str, name: str, now_s: float | None) -> Stored | None:
        path = f"{self._root}/{directory}/{name}"
        status = os.stat(path, follow_symlinks=False)
        age_s = None if now_s is None else max(0.0, now_s - status.st_mtime)
        if name.startswith(".tmp-"):
            if age_s is not None and age_s > TEMPORARY_AGE_S_MAX:
                os.unlink(path)
            return None
        key = self._readable(path, name, directory) if _RECORD.fullmatch(name) else None
        removed = None
        if isinstance(key, Defect):
            if key in _DAMAGED and _answer(self._remove, path, _identity(status)) is True:
                removed = key
            key = None
        return Stored(key, f"{directory}/{name}", status.st_size, age_s, removed)

    def _readable(self, path: str, name: str, directory: str) -> ObjectKey | Defect:
        try:
            return self._judge(path, name, directory)
        except FileNotFoundError:
            raise
        except OSError as error:
            if is_ours(error):
                raise
            return Defect.UNREADABLE

    def _judge(self, path: str, name: str, directory: str) -> ObjectKey | Defect:
        """Everything but the payload's checksum."""
        fd = os.open(path, _READ)
        try:
            size = os.fstat(fd).st_size
            head = os.pread(fd, _HEAD_BYTES, 0)
            header = envelope.parse_header(head)
            if isinstance(header, Defect):
                return header
            if header.header_bytes > len(head):
                head = os.pread(fd, header.header_bytes, 0)
        finally:
            os.close(fd)
        if header.record_bytes != size:
            return Defect.TORN if size < header.record_bytes else Defect.LONG
        key = envelope.object_key_of(header, head)
        if isinstance(key, Defect):
            return key
        return key if record_name(key) == f"{directory}/{name}" else Defect.FOREIGN

    def _now_s(self) -> float | None:
        """The time by the clock that dates the files; ours may differ. None: nothing can be written."""
        path = f"{self._root}/{self._temporary_name()}"
        try:
            write_new(path, [memoryview(b"now")], False)
            now_s = os.stat(path).st_mtime
            os.unlink(path)
        except OSError:
            return None
        return now_s

    # --- the rest ----------------------------------------------------------------------------------------------

    def usage(self) -> L2Usage:
        """What the last complete scan of this process has found."""
        return self._scanned

    def _path(self, key: ObjectKey) -> str:
        return self._place(key).path

    def _temporary_name(self) -> str:
        return f".tmp-{self._token}-{next(self._numbers)}"

    def _check_open(self) -> None:
        if not self._open:
            raise StoreError(f"{self._where} is closed")


def record_name(key: ObjectKey) -> str:
    """Where the record of `key` lies, relative to the directory."""
    text = key_text(key)
    return f"{text[:2]}/{text}.kv"


def _place(root: str, key: ObjectKey) -> _Place:
    path = f"{root}/{record_name(key)}"
    return _Place(path, os.path.dirname(path), envelope.template_of(key))


def _looks_good(path: str, key: ObjectKey, payload_bytes: int) -> bool:
    """Whether a record of this key and length is there, by its header."""
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(fd).st_size
        head = os.pread(fd, envelope.header_bytes(key), 0)
    finally:
        os.close(fd)
    header = envelope.parse_header(head)
    if isinstance(header, Defect) or size != header.record_bytes or header.payload_bytes != payload_bytes:
        return False
    return envelope.key_of(header, head) == encode_key(key)


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _answer(work: Callable[..., T], *arguments: object) -> T | Exception:
    """One key's error is its result."""
    try:
        return work(*arguments)
    except OSError as error:
        return error


def open_backend(options: FsOptions) -> FsBackend:
    """No I/O yet: that happens in `FsBackend.open`."""
    return FsBackend(options, SystemClock().token(_TOKEN_BYTES))

"""The file backend: one file per record, in a directory that one process owns.

Layout of the directory
-----------------------
    kvcore-l2.json                        the marker: {"format": "kvcore-l2", "version": 1}
    <2 hex digits>/<key text>.kv          a record: envelope and payload (`kvcore.l2.envelope`)
    <2 hex digits>/.tmp-<token>-<n>       a record that is being written

The sub-directory is the first two digits of the key text (a digest), so there are at most 256.

Opening, in this order; nothing is written before step 4 has passed, and ConfigError leaves no lock behind:
 1. lock the directory for this process (it dies with the process). Somebody else holds it: refuse;
 2. list it. Any file that does not look like ours (name, place): refuse, it may be somebody's data;
 3. read the marker. Another format or version: refuse. A missing or half-written one belongs to a
    directory whose first start was interrupted: it is written in step 4, and since every record carries its
    own version nothing is guessed;
 4. write the marker, or if it is there a probe file, to see that writing works;
 5. remove temporary files: whoever wrote them is dead, since we hold the lock;
 6. read every header. A record that is torn, foreign, of another version, lost with its part of the disk, ... is
    removed and counted. What remains, with its full key and size, is the index: the accounting equals the directory.
The order of age is lost in a restart: records count as equally old, in name order.

Writing: a temporary file with a fresh name, then a rename. A crash before the rename leaves a temporary file
(step 5), a crash of the machine may leave a shorter file under the final name, or one of the right length with
wrong content (steps 6, and the checksum at each load). Neither is ever served. If a write or rename fails, both names
are removed; if that fails too, `LeftoverError` tells the adapter to count what may be there until `delete` succeeds.

Reading: one `preadv` of header and payload, the payload straight into the caller's buffer.

Two processes never share a directory, so the lock of the adapter above is STRONG: nobody else deletes.

Who holds: the directory belongs to this backend from `open` to the end of the last piece of work after `close`;
records belong to the directory. Nothing here announces anything; `delete` frees.

Rejected: one slab file (faster, but it needs its own allocator and recovery; a later adapter); hard links for exclusive
creation (the index already allows one writer per name); a lock file (it is left behind, and then lies);
trusting names and sizes at start without reading headers (`keys()` needs the full key).
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey, key_text
from kvcore.l2 import envelope
from kvcore.l2.backend import Found, LeftoverError, Scan
from kvcore.l2.envelope import Defect, Header
from kvcore.l2.indexed import IndexedAdapter
from kvcore.ports import Clock, Executor, Files, Notice
from kvcore.quota import Quota
from kvcore.runtime.calls import CallGate

MARKER_NAME = "kvcore-l2.json"
# The version of the layout of names; records say their own.
MARKER = json.dumps({"format": "kvcore-l2", "version": 1}).encode() + b"\n"

_MARKER_BYTES_MAX = 4096
_HEAD_BYTES = 1024  # read at scan; longer headers are read a second time
_TOKEN_BYTES = 8
_LOST = frozenset(
    {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
)  # what the disk cannot give any more
_RECORD = re.compile(r"([0-9a-f]{2})/\1[A-Za-z0-9._-]*\.kv", re.ASCII)
_TEMPORARY = re.compile(r"(?:[0-9a-f]{2}/)?\.tmp-[0-9a-f]+-[0-9]+", re.ASCII)


def record_name(key: ObjectKey) -> str:
    """Where the record of `key` lies, relative to the directory."""
    text = key_text(key)
    return f"{text[:2]}/{text}.kv"


class FileBackend:
    """`kvcore.l2.backend.Backend` on a `Files` port. `token` makes temporary names unique over restarts.

    `files` brings the root directory, its permissions (files 0600, directories 0700) and the flushing policy.
    """

    def __init__(self, files: Files, token: str, where: str = "the L2 directory") -> None:
        self._files = files
        self._where = where
        self._token = token
        self._numbers = count(1)
        self._directories: set[str] = set()  # known to exist
        self._leftovers: dict[ObjectKey, str] = {}  # temporary files that could not be removed
        self._gate: CallGate | None = None  # None: never opened

    def record_bytes(self, key: ObjectKey, payload_bytes: int) -> int:
        return envelope.record_bytes(key, payload_bytes)

    # --- start and end -----------------------------------------------------------------------------------------

    def open(self) -> Scan:
        with _refusing(self._where, "cannot be locked"):
            if not self._files.lock():
                raise ConfigError(f"{self._where} is held by another process; give each its own directory")
        try:
            scan = self._take_over()
        except Exception:
            self._files.unlock()
            raise
        self._gate = CallGate(self._where, self._files.unlock)
        return scan

    def close(self) -> None:
        """The last piece of work that still runs gives the directory back."""
        if self._gate is not None:
            self._gate.close()

    def _take_over(self) -> Scan:
        with _refusing(self._where, "cannot be read"):
            sizes = dict(self._files.scan())
            self._check_names(sizes)
            marked = self._check_marker(sizes)
        with _refusing(self._where, "is not writable"):
            self._write_marker(marked)
            temporary = [name for name in sizes if _TEMPORARY.fullmatch(name)]
            for name in temporary:
                self._files.unlink(name)
        records = {name: size for name, size in sizes.items() if _RECORD.fullmatch(name)}
        self._directories.update(name.partition("/")[0] for name in records)
        with _refusing(self._where, "cannot be read"):
            return self._read_headers(records, len(temporary))

    def _check_names(self, sizes: dict[str, int]) -> None:
        for name in sizes:
            if name != MARKER_NAME and not _RECORD.fullmatch(name) and not _TEMPORARY.fullmatch(name):
                raise ConfigError(
                    f"{self._where} holds files that are not ours, such as {name[:100]!r}; use an empty one"
                )

    def _check_marker(self, sizes: dict[str, int]) -> bool:
        """Whether a whole marker is there. ConfigError: it is the marker of something else."""
        if MARKER_NAME not in sizes:
            return False
        text = bytearray(min(sizes[MARKER_NAME], _MARKER_BYTES_MAX))
        length = self._files.read(MARKER_NAME, [memoryview(text)])
        if length == len(text) and bytes(text) == MARKER:
            return True
        if MARKER.startswith(bytes(text[:length])):
            return False  # torn in the very first start
        raise ConfigError(
            f"{self._where} has another format: {bytes(text[:80])!r}, not {MARKER.decode().strip()}; use an empty one"
        )

    def _write_marker(self, marked: bool) -> None:
        temporary = self._temporary_name("")
        self._files.write(temporary, [MARKER])
        if marked:
            self._files.unlink(temporary)
        else:
            self._files.rename(temporary, MARKER_NAME)

    def _read_headers(self, records: dict[str, int], temporary: int) -> Scan:
        found: list[Found] = []
        defects: dict[Defect, int] = {}
        for name, size in records.items():
            record = self._judge(name, size)
            if isinstance(record, Found):
                found.append(record)
            else:
                defects[record] = defects.get(record, 0) + 1
                self._files.unlink(name)
        return Scan(tuple(found), defects, temporary)

    def _judge(self, name: str, size: int) -> Found | Defect:
        """Of one bad block the others know nothing."""
        try:
            return self._read_header(name, size)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            return Defect.UNREADABLE

    def _read_header(self, name: str, size: int) -> Found | Defect:
        head = self._read_start(name, min(size, _HEAD_BYTES))
        header = envelope.parse_header(head)
        if isinstance(header, Defect):
            return header
        if header.record_bytes != size:
            return Defect.TORN if size < header.record_bytes else Defect.LONG
        if header.header_bytes > len(head):
            head = self._read_start(name, header.header_bytes)
        return _found(name, header, head)

    def _read_start(self, name: str, length: int) -> bytes:
        head = bytearray(length)
        return bytes(head[: self._files.read(name, [memoryview(head)])])

    # --- work ----------------------------------------------------------------------------------------------------

    def write(self, key: ObjectKey, payload: memoryview) -> None:
        with self._work():
            name = record_name(key)
            directory = name.partition("/")[0]
            self._make_directory(directory)
            temporary = self._temporary_name(directory + "/")
            try:
                self._write_temporary(directory, temporary, [envelope.encode_header(key, payload), payload])
                self._files.rename(temporary, name)
            except Exception as error:
                self._directories.discard(directory)  # perhaps it is gone
                self._clean_up(key, temporary, name, error)
                raise

    def read(self, key: ObjectKey, into: memoryview) -> Defect | None:
        with self._work():
            head = bytearray(envelope.header_bytes(key))
            try:
                bytes_read = self._files.read(record_name(key), [memoryview(head), into])
            except FileNotFoundError:
                return Defect.MISSING
            return envelope.check_record(key, memoryview(head), into, bytes_read)

    def delete(self, key: ObjectKey) -> None:
        with self._work():
            temporary = self._leftovers.get(key)
            if temporary is not None:
                self._unlink(temporary)
                self._leftovers.pop(key)
            self._unlink(record_name(key))

    def _write_temporary(self, directory: str, temporary: str, parts: list[bytes | memoryview]) -> None:
        try:
            self._files.write(temporary, parts)
        except FileNotFoundError:  # somebody has emptied the place while we use it: make the directory again, once
            self._directories.discard(directory)
            self._make_directory(directory)
            self._files.write(temporary, parts)

    def _make_directory(self, directory: str) -> None:
        if directory in self._directories:
            return
        with suppress(FileExistsError):
            self._files.mkdir(directory)
        self._directories.add(directory)

    def _temporary_name(self, prefix: str) -> str:
        return f"{prefix}.tmp-{self._token}-{next(self._numbers)}"

    def _clean_up(self, key: ObjectKey, temporary: str, name: str, error: Exception) -> None:
        """After a failure: neither name may stay. (The rename can have happened and its flush have failed.)"""
        try:
            self._unlink(temporary)
            self._unlink(name)
        except OSError:
            self._leftovers[key] = temporary
            raise LeftoverError(f"{self._where}: a failed write could not be removed", name) from error

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.unlink(name)

    def _work(self) -> AbstractContextManager[None]:
        if self._gate is None:
            raise StoreError(f"{self._where} has not been opened")
        return self._gate.call()


def _found(name: str, header: Header, head: bytes) -> Found | Defect:
    key = envelope.object_key_of(header, head)
    if isinstance(key, Defect):
        return key
    if record_name(key) != name:
        return Defect.FOREIGN
    return Found(key, header.payload_bytes, header.record_bytes)


@contextmanager
def _refusing(where: str, what: str) -> Iterator[None]:
    """Operating system errors at start become one clear line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{where} {what}: {error.strerror or error}") from error


def file_adapter(
    name: str,
    files: Files,
    *,
    executor: Executor,
    notice_factory: Callable[[], Notice],
    clock: Clock,
    capacity_bytes: int | None = None,
    quota: Quota | None = None,
) -> IndexedAdapter:
    """Open the directory behind `files` and return its adapter. Blocking (scan of all headers); for start-up.

    `capacity_bytes` bounds the sum of the file sizes. ConfigError: the directory cannot be used; nothing was written.
    """
    backend = FileBackend(files, clock.token(_TOKEN_BYTES), f"the L2 directory of {name}")
    return IndexedAdapter(name, backend, executor, notice_factory, capacity_bytes, quota=quota)

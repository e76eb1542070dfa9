"""The files of a slab store: the lock, the marker, the preallocated slabs, the index. Blocking; any thread.

    kvcore-slab.json    the marker: format, version, bytes per slab, the seed of the entries' checks
    index.kvs           entries (`kvcore.l2.slab_entry`), in slots
    slab-00000.kvs ...  payloads, in pages; every slab has `slab_bytes`, but for the last one

Pages and slots are numbered through; a run of pages never crosses the end of a slab. All slabs, and an index for
objects of 64 KiB and more, are allocated at the start, so a store that has started does not run out of disk (with
smaller objects the index grows; a file system that copies on write has no such promise: it is an error of the write
then). Where the file system cannot allocate, the C library writes a byte into each block, which takes its time.

Errors are `OSError`s. Who holds: descriptors and the lock belong to this object, from `open` to `close`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

from kvcore.errors import ConfigError
from kvcore.l2.slab_entry import PAGE_BYTES, SLOT_BYTES
from kvcore.runtime.files import OsFiles, read_at, write_at

MARKER_NAME = "kvcore-slab.json"
INDEX_NAME = "index.kvs"
FORMAT_VERSION = 1

_MARKER_BYTES_MAX = 4096
_SLAB = r"slab-[0-9]{5}\.kvs"
_OURS = re.compile(_SLAB + r"|\.tmp-[0-9a-f]+-marker", re.ASCII)
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_WINDOW_SLOTS = 4096
_PAGES_PER_SLOT = 16  # the index is allocated for objects of 64 KiB; for smaller ones it grows


def allocated_bytes(path: str) -> int:
    """What the slabs in this directory hold room for now; 0: there are none. It may be another store's, or in use."""
    if not os.path.isdir(path):
        return 0
    with os.scandir(path) as entries:
        return sum(entry.stat().st_size for entry in entries if re.fullmatch(_SLAB, entry.name))


class SlabFiles:
    """`open` first. `where` names the directory in messages; `token` is a fresh random hexadecimal number."""

    def __init__(self, path: str, pages: int, slab_pages: int, fsync: bool, token: str, where: str) -> None:
        self.slab_pages = slab_pages
        self.seed = 0
        self._path = path
        self._pages = pages
        self._fsync = fsync
        self._token = token
        self._where = where
        self._files = OsFiles(path, fsync)
        self._slabs: list[int] = []
        self._pages_found: list[int] = []
        self._index = -1
        self._index_bytes_found = 0

    # --- start and end -----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the directory and allocate the slabs. ConfigError: it is not ours, or held by another process."""
        if not self._files.lock():
            raise ConfigError(f"{self._where} is held by another process; give each its own directory")
        try:
            sizes = dict(self._files.scan())
            self._check_names(sizes)
            fresh = self._read_marker(sizes)
            for name in sizes:
                if name.startswith(".tmp-") or (fresh and name != MARKER_NAME):
                    self._files.unlink(name)
            if fresh:
                self._write_marker()
            self._open_files()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Nothing may run any more."""
        slabs, self._slabs = self._slabs, []
        for fd in [*slabs, self._index]:
            if fd >= 0:
                os.close(fd)
        self._index = -1
        self._files.unlock()

    def _check_names(self, sizes: dict[str, int]) -> None:
        for name in sizes:
            if name not in (MARKER_NAME, INDEX_NAME) and not _OURS.fullmatch(name):
                raise ConfigError(
                    f"{self._where} holds files that are not ours, such as {name[:100]!r}; use an empty one"
                )

    def _read_marker(self, sizes: dict[str, int]) -> bool:
        """Whether the store is new. ConfigError: it is one of another make."""
        if MARKER_NAME not in sizes:
            return True
        text = bytearray(min(sizes[MARKER_NAME], _MARKER_BYTES_MAX))
        self._files.read(MARKER_NAME, [memoryview(text)])
        try:
            marker = json.loads(bytes(text))
            self.seed = int(marker["seed"], 16)
            found = (marker["format"], marker["version"])
            slab_bytes = marker["slab_bytes"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._where} has a damaged {MARKER_NAME}; empty the directory") from error
        if found != ("kvcore-slab", FORMAT_VERSION):
            raise ConfigError(f"{self._where} has another format: {found!r}; use an empty one")
        if slab_bytes != self.slab_pages * PAGE_BYTES:
            raise ConfigError(f"{self._where} was made with slabs of {slab_bytes} bytes; keep that, or empty it")
        return False

    def _write_marker(self) -> None:
        self.seed = int(self._token[:16], 16)
        marker = {
            "format": "kvcore-slab",
            "version": FORMAT_VERSION,
            "slab_bytes": self.slab_pages * PAGE_BYTES,
            "seed": f"{self.seed:016x}",
        }
        temporary = f".tmp-{self._token}-marker"
        self._files.write(temporary, [json.dumps(marker).encode() + b"\n"])
        self._files.rename(temporary, MARKER_NAME)

    def _open_files(self) -> None:
        self._index = os.open(os.path.join(self._path, INDEX_NAME), _OPEN, 0o600)
        self._index_bytes_found = os.fstat(self._index).st_size
        self._allocate(self._index, -(-self._pages // _PAGES_PER_SLOT) * SLOT_BYTES)
        for number, pages in enumerate(self._slab_sizes()):
            name = os.path.join(self._path, f"slab-{number:05}.kvs")
            fd = os.open(name, _OPEN, 0o600)
            self._slabs.append(fd)
            self._pages_found.append(os.fstat(fd).st_size // PAGE_BYTES)
            self._allocate(fd, pages * PAGE_BYTES)

    def _allocate(self, fd: int, length_bytes: int) -> None:
        try:
            os.posix_fallocate(fd, 0, length_bytes)
        except OSError as error:
            self._shrink_back()
            raise ConfigError(
                f"{self._where} has no room for {self._pages * PAGE_BYTES} bytes ({error.strerror}); "
                "set a smaller capacity"
            ) from error

    def _shrink_back(self) -> None:
        """What an unfinished start has taken is given back."""
        os.ftruncate(self._index, self._index_bytes_found)
        for fd, pages in zip(self._slabs, self._pages_found):
            os.ftruncate(fd, pages * PAGE_BYTES)

    def _slab_sizes(self) -> Iterator[int]:
        for start in range(0, self._pages, self.slab_pages):
            yield min(self.slab_pages, self._pages - start)

    def trim(self) -> None:
        """Give back what lies beyond a capacity that was greater before. No entry may point there any more."""
        for name, _ in self._files.scan():
            if _OURS.fullmatch(name) and int(name[5:10]) >= len(self._slabs):
                self._files.unlink(name)
        for fd, pages in zip(self._slabs, self._slab_sizes()):
            os.ftruncate(fd, pages * PAGE_BYTES)

    # --- pages ---------------------------------------------------------------------------------------------------

    def pages_found(self, slab: int) -> int:
        """How many pages of the slab were there before this start; what lies beyond them is no record's."""
        return self._pages_found[slab]

    def write_pages(self, page: int, parts: list[memoryview]) -> None:
        slab, offset = divmod(page, self.slab_pages)
        assert offset * PAGE_BYTES + sum(map(len, parts)) <= self.slab_pages * PAGE_BYTES, "one call, one slab"
        write_at(self._slabs[slab], parts, offset * PAGE_BYTES)
        if self._fsync:
            os.fdatasync(self._slabs[slab])

    def read_pages(self, page: int, into: list[memoryview]) -> int:
        slab, offset = divmod(page, self.slab_pages)
        assert offset * PAGE_BYTES + sum(map(len, into)) <= self.slab_pages * PAGE_BYTES, "one call, one slab"
        return read_at(self._slabs[slab], into, offset * PAGE_BYTES)

    # --- slots ---------------------------------------------------------------------------------------------------

    def write_slots(self, slot: int, data: bytes) -> None:
        write_at(self._index, [memoryview(data)], slot * SLOT_BYTES)
        if self._fsync:
            os.fdatasync(self._index)

    def slots(self) -> int:
        """How many there are, a last torn one included."""
        return -(-os.fstat(self._index).st_size // SLOT_BYTES)


class Window:
    """Reads the index from front to back in large pieces. Holds one piece; its views live until the next `at`."""

    def __init__(self, files: SlabFiles) -> None:
        self._fd = files._index
        self._start = 0
        self._data = memoryview(b"")

    def at(self, slot: int, count: int) -> memoryview:
        """`count` slots, of zeros behind the end of the file."""
        offset = (slot - self._start) * SLOT_BYTES
        if offset + count * SLOT_BYTES > len(self._data):
            buffer = bytearray(max(count, _WINDOW_SLOTS) * SLOT_BYTES)
            read_at(self._fd, [memoryview(buffer)], slot * SLOT_BYTES)
            self._start, self._data, offset = slot, memoryview(buffer), 0
        return self._data[offset : offset + count * SLOT_BYTES]

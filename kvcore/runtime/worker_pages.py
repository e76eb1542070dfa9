"""Paged KV in POSIX shared memory: made by a worker, reached by a cache server that copies by itself.

    worker   shared = SharedPages(size); its tensors are views of shared.buffer; shared.close()
    server   pages = OpenedPages(segment, size); pages.read(offset, into), pages.write(offset, data); pages.close()

The segment is made like L1's (`shared_memory.py`): random name, O_EXCL, 0600, reserved at once, locked while its
creator lives. The server maps nothing. It reads and writes through a descriptor (preadv, pwritev), because a worker may
do to its segment what it likes, also truncate it: a mapping would turn that into SIGBUS and the death of the server;
here it is a short read, and the cell has failed. A write never goes beyond the size that was checked at the opening.

Who holds: the worker the memory, for as long as its engine runs; the server a descriptor, which keeps the memory too.
Who announces: the worker, by registering name and layout. Who frees: each side its own; the name is removed by the
worker, or by the server that closes the pages of a worker that has died.

Rejected: `memfd` and passing the descriptor (ZeroMQ cannot carry one); mapping and catching SIGBUS (a handler cannot
tell which thread's copy it must end).
"""

from __future__ import annotations

import os
from contextlib import suppress

from kvcore.errors import ConfigError, PeerError
from kvcore.runtime.shared_memory import (
    check_name,
    check_ours,
    create_segment,
    new_name,
    open_segment,
    remove_if_stale,
    unlink_segment,
    unmap,
)


class SharedPages:
    """A worker's memory for paged KV, zero-filled. `buffer` is all of it; views of it keep the mapping alive."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise ConfigError(f"paged KV of {size_bytes} bytes has no block")
        self.segment = new_name()
        self._creator_pid = os.getpid()
        self._map, self._lock_fd = create_segment(self.segment, size_bytes)
        self.buffer = memoryview(self._map)

    def close(self) -> None:
        """Remove the name (only the creating process does) and unmap. Calling it again does nothing."""
        if not self.segment:
            return
        if os.getpid() == self._creator_pid:
            with suppress(FileNotFoundError):
                unlink_segment(self.segment)
        self.segment = ""
        os.close(self._lock_fd)
        self.buffer = memoryview(b"")
        unmap(self._map)


class OpenedPages:
    """A worker's segment on the server's side: `kvcore.service.page_desk.WorkerPages`.

    Raises `PeerError` for a segment that does not exist, is not ours, is open to others or has another size.
    """

    def __init__(self, segment: str, size_bytes: int) -> None:
        check_name(segment)
        try:
            fd = open_segment(segment, os.O_RDWR)
        except OSError as error:
            raise PeerError(f"cannot open the pages in shared memory {segment}: {error.strerror}") from error
        try:
            check_ours(fd, segment, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        self._segment = segment
        self._size = size_bytes
        self._fd = fd

    def read(self, offset: int, into: memoryview) -> bool:
        """Fill `into`. False: the segment ends before, or cannot be read."""
        assert 0 <= offset <= self._size - len(into), "checked against the size when it was registered"
        try:
            while into:
                count = os.preadv(self._fd, [into], offset)
                if count == 0:
                    return False
                into, offset = into[count:], offset + count
        except OSError:
            return False
        return True

    def write(self, offset: int, data: memoryview) -> bool:
        """Write all of `data`. False: that was not possible.

        One that has been cut short is left alone; cut in this very moment, it grows again, up to the size that was
        checked. What its owner makes of that is its own loss.
        """
        assert 0 <= offset <= self._size - len(data), "checked against the size when it was registered"
        try:
            if os.fstat(self._fd).st_size != self._size:
                return False
            while data:
                count = os.pwritev(self._fd, [data], offset)
                data, offset = data[count:], offset + count
        except OSError:
            return False
        return True

    def close(self) -> None:
        """No read or write of it is running. The name goes too if its creator has died. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            remove_if_stale(self._segment)

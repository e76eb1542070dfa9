"""`Populating`: touches a mapping ahead of its users, in a thread, so that no copy pays for page faults.

Shared memory is reserved when it is made, but every process enters its pages into its own page table when it first
touches them, one fault per page: about as long as copying that page. `madvise(MADV_POPULATE_WRITE)` (Linux 5.14) does
that without a fault each and changes no byte. It is done in pieces of 4 MiB, without the interpreter's lock, so that
the end of the mapping is never far away and nobody else waits. An older kernel refuses: then pages are touched by
whoever comes first, as before.

Who holds: the thread holds the mapping until it has come to its end or was stopped; an unmapping in the meantime is
left to it. Who announces: `ended`. Who frees: `stop`, which does not wait.

Rejected: MAP_POPULATE (mapping a hundred gigabytes would stop the loop for a minute); writing to each page (a worker's
zeros would race with another's KV).
"""

from __future__ import annotations

import ctypes
import sys
import threading

import numpy as np

PIECE_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23


class Populating:
    """See the module text. `mapping` begins at a page."""

    def __init__(self, mapping: memoryview, name: str = "kvcore-populate") -> None:
        self.bytes_done = 0
        self._stopped = sys.platform != "linux" or not len(mapping)
        self._thread = threading.Thread(target=self._work, args=(mapping,), name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """It has done what it could."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Until it has ended; False when that takes longer. For benchmarks and tests: users need not wait."""
        self._thread.join(timeout_s)
        return self.ended

    def stop(self) -> None:
        """No further piece is begun."""
        self._stopped = True

    def _work(self, mapping: memoryview) -> None:
        whole = np.frombuffer(mapping, dtype=np.uint8)
        address = whole.__array_interface__["data"][0]
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while self.bytes_done < whole.nbytes and not self._stopped:
            size = min(PIECE_BYTES, whole.nbytes - self.bytes_done)
            if advise(address + self.bytes_done, size, _MADV_POPULATE_WRITE) != 0:
                break  # an older kernel, or the memory has gone: nobody depends on this
            self.bytes_done += size

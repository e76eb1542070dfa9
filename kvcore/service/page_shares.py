"""A worker's pages as it describes them to a server, and pages that lie in the server's own process. Pure.

`describe` turns an engine's arrays, views of one buffer, into the `PageSegment` that travels. `PageRegistry` is what a
server opens names in when its workers are in its own process, as in the simulation: same desk, same client, no segment.

Who holds: the engine its memory; a registry only refers to it. Nothing to announce, nothing to free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError, PeerError
from kvcore.service.shapes import PageGroup, PageSegment


def describe(segment: str, buffer: Any, pages: Sequence[Any]) -> PageSegment:
    """Where the blocks of `pages[g]` ([blocks, ...], each block contiguous) lie in `buffer`, which is all of `segment`.

    Raises `ConfigError` for pages that do not lie in it.
    """
    whole = _bytes_of(buffer)
    base = _address(whole)
    groups = []
    for index, array in enumerate(map(np.asarray, pages)):
        offset = _address(array) - base
        stride = array.strides[0] if len(array) > 1 else array[0].nbytes
        end = offset + (len(array) - 1) * stride + array[0].nbytes
        if offset < 0 or end > whole.nbytes or not array[0].flags.c_contiguous:
            raise ConfigError(
                f"the pages of group {index} do not lie in shared memory, block by block; "
                "a server that copies by itself needs that (transfer = server)"
            )
        groups.append(PageGroup(offset, len(array), stride, array[0].nbytes))
    return PageSegment(segment, whole.nbytes, tuple(groups))


def _bytes_of(buffer: Any) -> npt.NDArray[np.uint8]:
    return np.frombuffer(buffer, dtype=np.uint8)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class LocalPages:
    """`kvcore.service.page_desk.WorkerPages` over memory of this process."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self._bytes = _bytes_of(buffer).data

    @property
    def size(self) -> int:
        return len(self._bytes)

    def read(self, offset: int, into: memoryview) -> bool:
        into[:] = self._bytes[offset : offset + len(into)]
        return True

    def write(self, offset: int, data: memoryview) -> bool:
        self._bytes[offset : offset + len(data)] = data
        return True

    def close(self) -> None:
        """The memory stays its owner's."""


class PageRegistry:
    """Names for buffers of this process. One per world: no singleton."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def share(self, name: str, buffer: Any) -> None:
        """`buffer` can be opened under `name` from now on."""
        self._buffers[name] = buffer

    def open(self, name: str, size: int) -> LocalPages:
        """Raises `PeerError` when there is no such name, or it has another size."""
        if name not in self._buffers:
            raise PeerError(f"no pages are called {name!r} in this process")
        pages = LocalPages(self._buffers[name])
        if pages.size != size:
            raise PeerError(f"the pages {name!r} have {pages.size} bytes, not {size}")
        return pages

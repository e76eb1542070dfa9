"""`PagedCopy`: one move between an engine's paged KV and dense chunks, checked before anything is queued.

A gather reads blocks and writes chunks, a scatter reads chunks and writes blocks. One `PagedCopy` carries many chunks;
a slice of layers is a `PagedCopy` over `layers_of(kv, ...)` and over the slice's bytes of each chunk, with an event of
its own, so that a layer is usable when its part is done.

Who holds: whoever submits it holds pages and chunks until the ticket is done; the copy keeps them referenced. Who
announces: the copy engine. Nothing is freed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.device.discover import PagedKV
from kvcore.device.planes import BlockIds
from kvcore.errors import CallerError

Bytes = npt.NDArray[np.uint8]


@unique
class Direction(Enum):
    GATHER = "gather"  # blocks -> chunks
    SCATTER = "scatter"  # chunks -> blocks


@dataclass(frozen=True, slots=True, eq=False)
class PagedCopy:
    """`block_ids`: [chunks, blocks per chunk]. `chunks`: one dense buffer of bytes each, on the host.

    `skip_tokens`: per chunk, leading tokens whose place in the blocks is left alone; scatter only.
    """

    direction: Direction
    kv: PagedKV
    block_ids: Any
    chunks: Sequence[Any]
    skip_tokens: Sequence[int] | None = None
    label: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedCopy:
    """A `PagedCopy` that can be carried out: ids in range, chunks of the right size, writable where written."""

    direction: Direction
    kv: PagedKV
    block_ids: BlockIds
    chunks: tuple[Bytes, ...]
    skip_tokens: npt.NDArray[np.int64] | None

    @property
    def chunk_bytes(self) -> int:
        return self.kv.planes.chunk_bytes(self.block_ids.shape[1])

    @property
    def addresses(self) -> list[int]:
        """Of each chunk's first byte."""
        return [chunk.ctypes.data for chunk in self.chunks]


def checked(copy: PagedCopy) -> CheckedCopy:
    """Raises CallerError for whatever would touch a byte that the caller did not name."""
    scatter = copy.direction is Direction.SCATTER
    if copy.skip_tokens is not None and not scatter:
        raise CallerError(f"copy {copy.label!r}: a gather fills whole chunks, it cannot skip tokens")
    planes = copy.kv.planes
    ids = planes.check_blocks(copy.block_ids, distinct=scatter)
    skip = planes.check_skip(copy.skip_tokens, ids) if copy.skip_tokens is not None else None
    if len(copy.chunks) != len(ids):
        raise CallerError(f"copy {copy.label!r}: {len(copy.chunks)} chunks for {len(ids)} rows of block ids")
    chunks = tuple(_bytes_of(chunk, copy.label, writable=not scatter) for chunk in copy.chunks)
    size = planes.chunk_bytes(ids.shape[1])
    for chunk in chunks:
        if chunk.nbytes != size:
            raise CallerError(f"copy {copy.label!r}: a chunk of {chunk.nbytes} bytes, the blocks have {size}")
    if not scatter:
        _refuse_overlap(chunks, size, copy.label)
    return CheckedCopy(copy.direction, copy.kv, ids, chunks, skip)


def _bytes_of(buffer: Any, label: str, *, writable: bool) -> Bytes:
    try:
        flat = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, dtype=np.uint8)
    except (ValueError, TypeError, BufferError) as error:
        raise CallerError(f"copy {label!r}: a chunk is a contiguous buffer of bytes: {error}") from error
    if not flat.flags.c_contiguous:
        raise CallerError(f"copy {label!r}: a chunk must be contiguous")
    if writable and not flat.flags.writeable:
        raise CallerError(f"copy {label!r}: a gather writes its chunks, and one is read-only")
    return flat.reshape(-1).view(np.uint8)


def _refuse_overlap(chunks: Sequence[Bytes], size: int, label: str) -> None:
    starts = sorted(chunk.ctypes.data for chunk in chunks)
    for first, second in pairwise(starts):
        if second < first + size:
            raise CallerError(f"copy {label!r}: two chunks of one gather overlap")


def layers_of(kv: PagedKV, first: int, last: int, blocks_per_chunk: int) -> tuple[PagedKV, slice]:
    """Layers [first, last) of `kv`, and where their bytes lie in a chunk of so many blocks."""
    if not 0 <= first < last <= len(kv.layers):
        raise CallerError(f"layers [{first}, {last}) of {len(kv.layers)}")
    before = sum(len(layer) for layer in kv.layers[:first])
    count = sum(len(layer) for layer in kv.layers[first:last])
    planes, offset = kv.planes.part(before, before + count, blocks_per_chunk)
    part = replace(kv, layers=kv.layers[first:last], planes=planes)
    return part, slice(offset, offset + planes.chunk_bytes(blocks_per_chunk))

"""Gather and scatter by plain torch indexing: the truth that every other engine is compared with, and the fallback.

Theory of operation
-------------------
`PagedKV.layers` are views [blocks, inner axes in chunk order], so a chunk's piece of a plane is that view indexed by
the chunk's blocks. Nothing here computes an address: strides are torch's affair, which makes this independent of
`planes.py`.

    gather    piece[i] = part[block_ids[i]]                 index_select(..., out=piece) where torch takes it
    scatter   part[block_ids[i]] = piece[i]                 index_copy_, on the host block by block; a block in which
                                                            tokens are skipped is written from the first wanted one on

Bytes are moved as whole numbers of the element's size, so no NaN is ever looked at.

A chunk is any writable buffer of uint8 in one dimension (a torch tensor on the KV's device or on the host). The calls
return when torch has taken the work: on a GPU the current stream orders it, and who needs the bytes waits for an event.

Who holds: the caller, KV and chunks, until that event. Nobody frees here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvcore.device.discover import PagedKV
from kvcore.errors import CallerError, ConfigError

if TYPE_CHECKING:
    import torch


def import_torch() -> Any:
    """torch, which is an optional dependency."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError("this needs torch; install it with: pip install 'kvcore[torch]'") from error


def gather(kv: PagedKV, block_ids: Any, chunks: Sequence[torch.Tensor]) -> None:
    """Chunk c receives blocks `block_ids[c]`. Raises CallerError before any byte moves."""
    torch = import_torch()
    ids = kv.planes.check_blocks(block_ids)
    _check_chunks(kv, ids.shape, chunks)
    rows = torch.from_numpy(ids).to(kv.device)
    for row, chunk in zip(rows, chunks, strict=True):
        for part, piece in _pieces(kv, chunk, len(row)):
            if piece.device == part.device:
                torch.index_select(part, 0, row, out=piece)
            else:
                piece.copy_(part.index_select(0, row))


def scatter(
    kv: PagedKV, block_ids: Any, chunks: Sequence[torch.Tensor], skip_tokens: Sequence[int] | None = None
) -> None:
    """Blocks `block_ids[c]` receive chunk c but for its first `skip_tokens[c]` tokens. Raises CallerError first."""
    torch = import_torch()
    ids = kv.planes.check_blocks(block_ids, distinct=True)
    skip = kv.planes.check_skip(skip_tokens, ids)
    _check_chunks(kv, ids.shape, chunks)
    rows = torch.from_numpy(ids).to(kv.device)
    for row, chunk, skipped in zip(rows, chunks, skip.tolist(), strict=True):
        blocks, tokens = divmod(skipped, kv.planes.block_tokens)
        for part, piece in _pieces(kv, chunk, len(row)):
            _scatter_piece(kv, part, piece.to(part.device), row, blocks, tokens)


def _scatter_piece(kv: PagedKV, part: Any, piece: Any, row: Any, blocks: int, tokens: int) -> None:
    """Leave out `blocks` blocks and `tokens` tokens of the next one."""
    if tokens:
        assert kv.token_axis is not None, "check_skip let an opaque block through"
        wanted = part.shape[kv.token_axis] - tokens
        target = part[row[blocks]].narrow(kv.token_axis - 1, tokens, wanted)
        target.copy_(piece[blocks].narrow(kv.token_axis - 1, tokens, wanted))
        blocks += 1
    if part.device.type == "cpu":  # block by block: index_copy_ takes twice as long there
        for block, value in zip(row[blocks:].tolist(), piece[blocks:], strict=True):
            part[block].copy_(value)
    elif blocks < len(row):
        part.index_copy_(0, row[blocks:], piece[blocks:])


def _pieces(kv: PagedKV, chunk: Any, blocks: int) -> Iterator[tuple[Any, Any]]:
    """(part, the chunk's piece of its plane), both of one shape but for the blocks, and of one whole-number type."""
    offsets = kv.planes.offsets(blocks)
    for part, plane, offset in zip(kv.parts, kv.planes.planes, offsets, strict=True):
        piece = chunk[offset : offset + blocks * plane.share_bytes]
        whole = _whole_type(part, piece)
        if whole is None:  # a piece that does not begin at a multiple of the element: byte by byte
            source = part.unsqueeze(-1).view(import_torch().uint8)
            yield source, piece.view(blocks, *source.shape[1:])
        else:
            yield part.view(whole), piece.view(whole).view(blocks, *part.shape[1:])


def _whole_type(part: Any, piece: Any) -> Any:
    torch = import_torch()
    size = part.element_size()
    if piece.data_ptr() % size or piece.storage_offset() % size:
        return None
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)


def _check_chunks(kv: PagedKV, shape: tuple[int, ...], chunks: Sequence[Any]) -> None:
    count, blocks = shape
    size = kv.planes.chunk_bytes(blocks)
    if len(chunks) != count:
        raise CallerError(f"{len(chunks)} chunks for {count} rows of block ids")
    for chunk in chunks:
        torch = import_torch()
        if chunk.dtype != torch.uint8 or tuple(chunk.shape) != (size,) or not chunk.is_contiguous():
            raise CallerError(f"a chunk is {size} dense bytes, not {chunk.dtype} of shape {tuple(chunk.shape)}")

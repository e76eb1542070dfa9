"""A byte round trip at registration: is the engine's memory what the discovered layout says, and does the mover obey?

Theory of operation
-------------------
Up to three blocks are written and read through the mover that will be used, with a pattern in which no two bytes near
each other are alike:

1. scatter the pattern; every part of every layer must then hold its piece of it (read by plain indexing), and the
   blocks beside the written ones must be as before
2. scatter another pattern that skips leading tokens (where tokens can be told apart): those keep the first pattern
3. gather into poisoned chunks: the bytes must be those of the blocks

The engine's bytes are kept before and put back after, whatever happens; at registration nobody computes. A difference
raises InternalError with its place: two layouts that were mixed up, or a broken mover. Serving must not begin.

The steps are only named here: the connector carries them out, by its copy engine (`connectors/page_check.py`).

Who holds: the engine its blocks. The call returns when all is back in place.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvcore.device.discover import PagedKV
from kvcore.device.paged import Direction
from kvcore.device.planes import sample_blocks
from kvcore.device.reference import import_torch
from kvcore.errors import InternalError

_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Step:
    """One move of the test: `rows` of one block each, a chunk of `kv.device` per row."""

    direction: Direction
    rows: list[list[int]]
    chunks: list[Any]
    skip_tokens: list[int] | None = None


def steps(kv: PagedKV) -> Generator[Step]:
    """The moves of the round trip, each to be carried out before the next is asked for. Close it, whatever happens.

    Raises InternalError where a move has not done what it was asked for.
    """
    blocks = sample_blocks(kv.layout.num_blocks)
    beside = sorted({block + step for block in blocks for step in (-1, 1)} - set(blocks))
    beside = [block for block in beside if 0 <= block < kv.layout.num_blocks]
    with _kept(kv, [*blocks, *beside]) as before:
        yield from _round_trip(kv, [[block] for block in blocks])
        for index, block in enumerate(beside, len(blocks)):
            _compare(kv, block, before[index], "the block beside one that was written")


def _round_trip(kv: PagedKV, rows: list[list[int]]) -> Iterator[Step]:
    size = kv.planes.block_bytes
    patterns = [_pattern(kv, size, salt) for salt in range(len(rows))]
    yield Step(Direction.SCATTER, rows, patterns)
    _compare_all(kv, rows, patterns, "a block that was written")
    if kv.planes.token_separable and kv.layout.block_tokens > 1:
        skip = kv.layout.block_tokens // 2
        over = [_pattern(kv, size, salt + len(rows)) for salt in range(len(rows))]
        yield Step(Direction.SCATTER, rows, over, [skip] * len(rows))
        patterns = [_joined(kv, pattern, new, skip) for pattern, new in zip(patterns, over, strict=True)]
        _compare_all(kv, rows, patterns, f"a block that was written behind {skip} tokens")
    chunks = [pattern.new_full((size,), _POISON) for pattern in patterns]
    yield Step(Direction.GATHER, rows, chunks)
    for (block,), pattern, chunk in zip(rows, patterns, chunks, strict=True):
        if not pattern.equal(chunk):
            raise InternalError(_text(kv, block, "a chunk that was gathered", _first_difference(pattern, chunk)))


def _compare_all(kv: PagedKV, rows: list[list[int]], patterns: Sequence[Any], what: str) -> None:
    for (block,), pattern in zip(rows, patterns, strict=True):
        _compare(kv, block, pattern, what)


def _pattern(kv: PagedKV, size: int, salt: int) -> Any:
    """Bytes of a multiplicative sequence; different for every salt at every place."""
    torch = import_torch()
    count = torch.arange(size, dtype=torch.int64)
    return (((count * 2654435761 >> 11) + salt * 41) % 251).to(torch.uint8).to(kv.device)


def _joined(kv: PagedKV, first: Any, second: Any, skip: int) -> Any:
    """`first` in the leading tokens of each plane, `second` behind: by the counts of the planes alone."""
    result = second.clone()
    for plane, offset in zip(kv.planes.planes, kv.planes.offsets(1), strict=True):
        shape = (plane.outer_count, plane.tokens, plane.run_bytes)
        old, new = (chunk[offset : offset + plane.share_bytes].view(shape) for chunk in (first, result))
        new[:, :skip] = old[:, :skip]
    return result


def _block_bytes(kv: PagedKV, block: int) -> Any:
    """One block of all parts as a chunk, by plain indexing."""
    torch = import_torch()
    parts = (part[block].contiguous().view(-1).view(torch.uint8) for part in kv.parts)
    return torch.cat(list(parts))


def _compare(kv: PagedKV, block: int, expected: Any, what: str) -> None:
    found = _block_bytes(kv, block)
    if not expected.equal(found):
        raise InternalError(_text(kv, block, what, _first_difference(expected, found)))


def _first_difference(expected: Any, found: Any) -> int:
    return int((expected != found).nonzero()[0])


def _text(kv: PagedKV, block: int, what: str, at: int) -> str:
    offsets = kv.planes.offsets(1)
    plane = max(index for index, offset in enumerate(offsets) if offset <= at)
    layer, part = divmod(plane, len(kv.layout.parts))
    return (
        f"self test: {what} differs in block {block}, layer {layer}, part {kv.layout.parts[part]}, "
        f"byte {at - offsets[plane]}. The layout is not {kv.layout}, or what moves the bytes is broken; "
        "the KV of this engine must not be cached"
    )


@contextmanager
def _kept(kv: PagedKV, blocks: Sequence[int]) -> Iterator[list[Any]]:
    """The bytes of `blocks` now; put back at the end."""
    before = [_block_bytes(kv, block) for block in blocks]
    parts = list(kv.parts)
    saved = [[part[block].clone() for part in parts] for block in blocks]
    try:
        yield before
    finally:
        for block, values in zip(blocks, saved, strict=True):
            for part, value in zip(parts, values, strict=True):
                part[block].copy_(value)

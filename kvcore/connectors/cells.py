"""Which engine blocks a cell of the cache is made of: block tables in, cells out. Pure.

A chunk is a whole number of every group's blocks. An attention cell is the blocks of the chunk's tokens, in order; a
recurrent cell is the one state page at the chunk's end boundary. Three kinds of blocks never enter a plan:

    NULL_BLOCK          tokens outside a window: there is no memory behind it
    the engine's own    blocks of the local prefix: other requests may be reading them, so a load leaves them alone
    beyond the table    a chunk that is not complete yet has no cell

Nothing here is held or freed; block tables are looked at and never kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcore.bitmap import bits
from kvcore.connectors.plan import CellBlocks
from kvcore.connectors.views import NULL_BLOCK, BlockTable
from kvcore.groups import CacheLayout, GroupKind


def cell_blocks(layout: CacheLayout, group: int, chunk: int, blocks: BlockTable) -> tuple[int, ...]:
    """The engine blocks of (group, chunk); fewer than a whole cell's where the table ends earlier."""
    assert chunk >= 0
    spec = layout.groups[group]
    end = (chunk + 1) * layout.chunk_tokens // spec.block_tokens
    parts = tuple(blocks[group][end - layout.blocks_per_chunk(group) : end])
    assert len(parts) <= layout.blocks_per_chunk(group)
    return parts


def load_cells(
    layout: CacheLayout, hashes: Sequence[bytes], needed: Sequence[int], blocks: BlockTable, local_tokens: int
) -> list[CellBlocks]:
    """Cells to load. `needed[g]`: mask of chunks of group g; parts the engine already has are left alone."""
    assert len(needed) == len(layout.groups)
    cells: list[CellBlocks] = []
    for group, mask in enumerate(needed):
        assert mask.bit_length() <= len(hashes), "a chunk without a hash is not in the cache"
        for chunk in bits(mask):
            parts = _beyond(layout, group, chunk, cell_blocks(layout, group, chunk, blocks), local_tokens)
            if any(part != NULL_BLOCK for part in parts):
                cells.append(CellBlocks(group, chunk, hashes[chunk], parts))
    return cells


def _beyond(layout: CacheLayout, group: int, chunk: int, parts: tuple[int, ...], local_tokens: int) -> tuple[int, ...]:
    """Replace the parts that begin inside the engine's own prefix by NULL_BLOCK."""
    spec = layout.groups[group]
    if spec.kind is GroupKind.RECURRENT:
        return parts if (chunk + 1) * layout.chunk_tokens > local_tokens else (NULL_BLOCK,) * len(parts)
    first = chunk * layout.chunk_tokens
    return tuple(
        NULL_BLOCK if first + index * spec.block_tokens < local_tokens else part for index, part in enumerate(parts)
    )


def store_cells(
    layout: CacheLayout,
    hashes: Sequence[bytes],
    chunks: Iterable[int],
    blocks: BlockTable,
    state_tokens: Sequence[int],
) -> list[CellBlocks]:
    """Cells of `chunks` that exist in full. `state_tokens`: token counts at which recurrent state is at rest now.

    A cell with a null block (outside the window) does not exist and is left out; so is a recurrent boundary that the
    step ran over.
    """
    cells: list[CellBlocks] = []
    for chunk in chunks:
        for group, spec in enumerate(layout.groups):
            if spec.kind is GroupKind.RECURRENT and (chunk + 1) * layout.chunk_tokens not in state_tokens:
                continue
            parts = cell_blocks(layout, group, chunk, blocks)
            if len(parts) == layout.blocks_per_chunk(group) and NULL_BLOCK not in parts:
                cells.append(CellBlocks(group, chunk, hashes[chunk], parts))
    return cells


def blocks_of_tokens(layout: CacheLayout, blocks: BlockTable, tokens: range) -> set[int]:
    """The blocks that hold any of these tokens."""
    found: set[int] = set()
    for ids, spec in zip(blocks, layout.groups, strict=True) if tokens else ():
        found.update(ids[tokens.start // spec.block_tokens : -(-tokens.stop // spec.block_tokens)])
    return found - {NULL_BLOCK}


def chunks_of_blocks(layout: CacheLayout, blocks: BlockTable, wanted: frozenset[int]) -> dict[int, int]:
    """Which chunk each of the `wanted` blocks belongs to, for those that are in the table."""
    assert NULL_BLOCK not in wanted
    found: dict[int, int] = {}
    for group, ids in enumerate(blocks):
        block_tokens = layout.groups[group].block_tokens
        for index, block in enumerate(ids):
            if block in wanted:
                found[block] = index * block_tokens // layout.chunk_tokens
    return found

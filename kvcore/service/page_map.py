"""`PageMap`: where the blocks of one worker lie in the segment it has registered, checked. Pure.

Everything in a `PageSegment`, and every block number later, is the word of another process. A map is made only of what
fits its segment and the layout; from then on `ranges` turns blocks into byte ranges and refuses what lies outside. The
sums are Python integers: nothing overflows.

    register   as many groups as the layout; blocks of exactly its size, at least that far apart; the last block of each
               group ends inside the segment
    a cell     the group exists; one block number for each part of the cell; each below the group's number of blocks;
               a store names no null block (there is nothing in it)
    a load     no two of its parts write the same bytes, within a group or across groups: what such a read would leave
               behind depends on the order of the copies

Who holds, announces, frees: a value; nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcore.errors import PeerError
from kvcore.groups import CacheLayout, GroupKind
from kvcore.service.shapes import PageSegment

_NULL_BLOCK = 0


class BadPagesError(PeerError):
    """A segment or a block that is not what it has to be; arguments: a text."""


class Part(NamedTuple):
    """Bytes [offset, offset + size) of the segment belong to bytes [at, at + size) of the cell."""

    offset: int
    at: int
    size: int


class PageMap:
    """See the module text. Raises `BadPagesError` for a description that fits neither itself nor the layout."""

    __slots__ = ("_groups", "_layout")

    def __init__(self, described: PageSegment, layout: CacheLayout) -> None:
        if len(described.groups) != len(layout.groups):
            raise BadPagesError(f"pages of {len(described.groups)} groups; the layout has {len(layout.groups)}")
        for index, (group, spec) in enumerate(zip(described.groups, layout.groups, strict=True)):
            if group.block_bytes != spec.bytes_per_block:
                raise BadPagesError(
                    f"group {index}: blocks of {group.block_bytes} bytes; the layout says {spec.bytes_per_block}"
                )
            if group.blocks < 1 or group.stride_bytes < group.block_bytes:
                raise BadPagesError(f"group {index}: {group.blocks} blocks, {group.stride_bytes} bytes apart")
            end = group.offset + (group.blocks - 1) * group.stride_bytes + group.block_bytes
            if end > described.size:
                raise BadPagesError(f"group {index} ends at byte {end} of a segment of {described.size}")
        self._groups = described.groups
        self._layout = layout

    def parts(self, group: int, blocks: Sequence[int], *, null: bool) -> tuple[Part, ...]:
        """The ranges of one cell, in order; neighbours are one. `null`: parts of block 0 are left out, else refused."""
        if group >= len(self._groups):
            raise BadPagesError(f"group {group} does not exist: there are {len(self._groups)} groups of pages")
        expected = self._blocks_per_cell(group)
        if len(blocks) != expected:
            raise BadPagesError(f"a cell of group {group} has {expected} blocks, not {len(blocks)}")
        described = self._groups[group]
        size = described.block_bytes
        found: list[Part] = []
        for index, block in enumerate(blocks):
            if block >= described.blocks:
                raise BadPagesError(f"block {block} of group {group} does not exist: there are {described.blocks}")
            if block == _NULL_BLOCK:
                if not null:
                    raise BadPagesError("the null block holds nothing that could be stored")
                continue
            _append(found, Part(described.offset + block * described.stride_bytes, index * size, size))
        return tuple(found)

    def _blocks_per_cell(self, group: int) -> int:
        spec = self._layout.groups[group]
        return 1 if spec.kind is GroupKind.RECURRENT else self._layout.chunk_tokens // spec.block_tokens


def _append(found: list[Part], part: Part) -> None:
    """Behind the last one, or as one with it."""
    if found:
        last = found[-1]
        if (last.offset + last.size, last.at + last.size) == (part.offset, part.at):
            found[-1] = Part(last.offset, last.at, last.size + part.size)
            return
    found.append(part)


def check_apart(parts: Iterable[Part]) -> None:
    """Raises `BadPagesError` when two of them share a byte."""
    end = 0
    for part in sorted(parts):
        if part.offset < end:
            raise BadPagesError(f"byte {part.offset} of the pages would be written twice")
        end = part.offset + part.size

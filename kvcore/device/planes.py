"""Planes: where the bytes of an engine's blocks lie, and in which order a chunk holds them.

Theory of operation
-------------------
A *plane* is one tensor part (K, V, a latent, a state) of one layer. Its bytes follow one formula, the only address
arithmetic there is; the kernels, the reference and the checks all stand on it:

    byte r of token t of outer o of block b lies at
        base + b * block_stride + o * outer_stride + t * token_stride + r        0 <= r < run_bytes

    token-major (NHD)   outer = 1, tokens = block tokens, run = heads * head size
    head-major (HND)    outer = heads, tokens = block tokens, run = head size
    opaque, recurrent   outer = 1, tokens = 1, run = the block; `token_separable` is False: the bytes of one token are
                        not one (outer, run) slice, so leading tokens cannot be skipped inside a block

A *chunk* is dense. In it lies, for each plane in order (by layer, K before V), for each block of the chunk in order,
for each outer, for each token: the run. So a block's *share* of a plane is contiguous in the chunk, and the engine's
own order inside a block is kept; the layout fingerprint (`fingerprint.py`) says which order that is.

`simplify` describes the same bytes in the same chunk order with the fewest, longest runs. What it joined cannot be
taken apart again: tokens that are skipped need the plane as it was.

Everything is checked here, on the host, before anything is launched: block ids against the number of blocks, skipped
tokens against what the planes can leave out, planes against overlap within themselves. Block ids of a scatter are
distinct, else two writers would race for one block.

Rejected: one plane per (layer, head), which would make strides trivial and the tables long; a chunk in block order, in
which a layer is no contiguous piece and cannot be moved when its layer is done.

Nothing is held or freed here: a plane is numbers. Who made it from a tensor keeps that tensor alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcore.errors import CallerError, ConfigError

BlockIds: TypeAlias = npt.NDArray[np.int64]
"""[chunks, blocks per chunk], C-contiguous, on the host."""


@dataclass(frozen=True, slots=True)
class Plane:
    """See the module text. All sizes in bytes but the counts."""

    base: int
    block_stride_bytes: int
    outer_count: int
    outer_stride_bytes: int
    tokens: int
    token_stride_bytes: int
    run_bytes: int
    token_separable: bool = True

    def __post_init__(self) -> None:
        counts = (self.outer_count, self.tokens, self.run_bytes)
        strides = (self.base, self.block_stride_bytes, self.outer_stride_bytes, self.token_stride_bytes)
        if min(counts) < 1 or min(strides) < 0:
            raise ConfigError(f"a plane needs counts of at least 1 and strides of at least 0: {self}")
        self._refuse_overlap(((self.outer_stride_bytes, self.outer_count), (self.token_stride_bytes, self.tokens)))

    def _refuse_overlap(self, levels: Sequence[tuple[int, int]]) -> None:
        """Sorted by stride, each level must step over all that the levels below it cover."""
        covered = self.run_bytes
        for stride, count in sorted(level for level in levels if level[1] > 1):
            if stride < covered:
                raise ConfigError(
                    f"bytes of one plane overlap: a stride of {stride} steps over {covered} bytes: {self}"
                )
            covered += (count - 1) * stride

    @property
    def share_bytes(self) -> int:
        """Bytes of one block in this plane."""
        return self.outer_count * self.tokens * self.run_bytes

    def address(self, block: int, outer: int = 0, token: int = 0) -> int:
        """Of the run's first byte."""
        assert 0 <= outer < self.outer_count
        assert 0 <= token < self.tokens
        inside = outer * self.outer_stride_bytes + token * self.token_stride_bytes
        return self.base + block * self.block_stride_bytes + inside

    def check_blocks_disjoint(self, num_blocks: int) -> None:
        """Raise ConfigError if two of `num_blocks` blocks share a byte."""
        outer, token = (self.outer_stride_bytes, self.outer_count), (self.token_stride_bytes, self.tokens)
        self._refuse_overlap((outer, token, (self.block_stride_bytes, num_blocks)))


def simplify(plane: Plane) -> Plane:
    """The same bytes in the same chunk order with the fewest, longest runs."""
    if plane.tokens > 1 and plane.token_stride_bytes == plane.run_bytes:
        run = plane.tokens * plane.run_bytes
        plane = replace(plane, tokens=1, token_stride_bytes=run, run_bytes=run, token_separable=False)
    if plane.tokens == 1 and plane.outer_count > 1:
        if plane.outer_stride_bytes == plane.run_bytes:
            run = plane.outer_count * plane.run_bytes
            plane = replace(plane, outer_count=1, outer_stride_bytes=run, run_bytes=run, token_separable=False)
    elif plane.outer_count > 1 and plane.outer_stride_bytes == plane.tokens * plane.token_stride_bytes:
        joined = plane.outer_count * plane.tokens  # one step leads through both levels
        plane = replace(plane, outer_count=1, outer_stride_bytes=0, tokens=joined, token_separable=False)
    return plane


@dataclass(frozen=True, slots=True)
class KVPlanes:
    """All planes of one group of layers on one device, and the checks of every call on them.

    `block_tokens`: tokens that a block stands for, also where its planes are opaque.
    """

    planes: tuple[Plane, ...]
    num_blocks: int
    block_tokens: int

    def __post_init__(self) -> None:
        if not self.planes or self.num_blocks < 1 or self.block_tokens < 1:
            raise ConfigError(f"{len(self.planes)} planes, {self.num_blocks} blocks of {self.block_tokens} tokens")
        for plane in self.planes:
            plane.check_blocks_disjoint(self.num_blocks)
            if plane.token_separable and plane.tokens != self.block_tokens:
                raise ConfigError(f"a plane of {plane.tokens} tokens per block among blocks of {self.block_tokens}")

    @property
    def block_bytes(self) -> int:
        """Of one block in all planes."""
        return sum(plane.share_bytes for plane in self.planes)

    @property
    def token_separable(self) -> bool:
        return all(plane.token_separable for plane in self.planes)

    def chunk_bytes(self, blocks_per_chunk: int) -> int:
        return blocks_per_chunk * self.block_bytes

    def offsets(self, blocks_per_chunk: int) -> tuple[int, ...]:
        """Where each plane begins in a chunk."""
        sizes = [blocks_per_chunk * plane.share_bytes for plane in self.planes]
        return tuple(accumulate(sizes[:-1], initial=0))

    def simplified(self) -> KVPlanes:
        """For moves of whole blocks."""
        return replace(self, planes=tuple(simplify(plane) for plane in self.planes))

    def part(self, first: int, last: int, blocks_per_chunk: int) -> tuple[KVPlanes, int]:
        """Planes [first, last), e.g. those of one layer, and the offset of their bytes in a chunk."""
        if not 0 <= first < last <= len(self.planes):
            raise CallerError(f"planes [{first}, {last}) of {len(self.planes)}")
        return replace(self, planes=self.planes[first:last]), self.offsets(blocks_per_chunk)[first]

    def check_blocks(self, block_ids: Any, *, distinct: bool = False) -> BlockIds:
        """`block_ids` as [chunks, blocks per chunk]; raises CallerError before anything is launched.

        `distinct`: for a scatter; two writers of one block would race.
        """
        ids = np.asarray(block_ids)
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or not ids.size:
            raise CallerError(f"block ids must be whole numbers [chunks, blocks], not {ids.dtype} of shape {ids.shape}")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.num_blocks:
            bad = low if low < 0 else high
            raise CallerError(f"block id {bad} does not exist: there are {self.num_blocks} blocks")
        if distinct and len(np.unique(ids)) < ids.size:
            raise CallerError("a block id stands twice among the targets of one scatter: two writers would race for it")
        return np.ascontiguousarray(ids, dtype=np.int64)

    def check_skip(self, skip_tokens: Sequence[int] | None, ids: BlockIds) -> npt.NDArray[np.int64]:
        """Leading tokens of each chunk that must not be written; raises CallerError where that cannot be done."""
        chunks, blocks_per_chunk = ids.shape
        skip = np.zeros(chunks, np.int64) if skip_tokens is None else np.asarray(skip_tokens)
        if skip.shape != (chunks,) or skip.dtype.kind not in "iu":
            raise CallerError(f"one whole number of skipped tokens for each of {chunks} chunks, not {skip_tokens!r}")
        chunk_tokens = blocks_per_chunk * self.block_tokens
        if int(skip.min()) < 0 or int(skip.max()) > chunk_tokens:
            raise CallerError(f"skipped tokens must lie in [0, {chunk_tokens}], not {skip_tokens!r}")
        if not self.token_separable and (skip % self.block_tokens).any():
            raise CallerError(
                f"tokens cannot be skipped inside these blocks, whose inner order is the engine's own: "
                f"skip a multiple of {self.block_tokens}, not {skip_tokens!r}"
            )
        return skip.astype(np.int64)


def sample_blocks(num_blocks: int) -> list[int]:
    """The last, the first and a middle block, in no order that memory has: what self tests write."""
    return list(dict.fromkeys((num_blocks - 1, 0, num_blocks // 2)))


def plane_of(
    base: int, block_stride_bytes: int, axes: Sequence[tuple[int, int]], itemsize: int, token_axis: int | None
) -> Plane:
    """The plane of a tensor part: `axes` are those inside a block, (size, stride in bytes) in chunk order.

    Dense neighbours are joined, but none with the token axis. Raises ConfigError if three levels do not describe it.
    """
    levels = [_Level(1, itemsize)]  # from the run outwards
    for axis in reversed(range(len(axes))):
        level = _Level(*axes[axis], tokens=axis == token_axis)
        below = levels[-1]
        if level.tokens:
            levels.append(level)
        elif level.size > 1 and not below.tokens and level.stride == below.size * below.stride:
            levels[-1] = _Level(level.size * below.size, below.stride)
        elif level.size > 1:
            levels.append(level)
    outer, token = _steps(levels, token_axis is not None)
    run = levels[0].size * itemsize
    return Plane(
        base, block_stride_bytes, outer.size, outer.stride, token.size, token.stride, run, token_axis is not None
    )


@dataclass(frozen=True, slots=True)
class _Level:
    """`size` steps of `stride` bytes."""

    size: int
    stride: int
    tokens: bool = False


def _steps(levels: Sequence[_Level], separable: bool) -> tuple[_Level, _Level]:
    """(outer, token): the two levels of steps over a run. Tokens stand next to the run."""
    run, steps = levels[0], list(levels[1:])
    if separable and (not steps or not steps[0].tokens):
        raise ConfigError("the bytes of one token inside one outer step are not one run")
    if not separable and len(steps) == 1:
        steps.insert(0, _Level(1, run.size * run.stride))
    if len(steps) > 2:
        raise ConfigError(f"{len(steps)} levels of strides inside a block, at most two can be described: {steps}")
    none = _Level(1, 0)
    outer = steps[1] if len(steps) > 1 else none
    return outer, steps[0] if steps else none

"""Slots of the fingerprint model in vLLM's pages: where they lie, which a step may see, and their weighted sums.

1. `PageOrder` asks the attention backend itself how it lays out a block: the kernel that fills the cache writes numbers
   into a page of our own, and where they are found is the order. (On CPU K lies across its half of a block, with the
   tokens of one dimension side by side, and V along its half.)
2. `Visible` turns a step's metadata (`query_start_loc`, `seq_lens`, `block_table`) into one flat list of blocks: for
   each request those that its new tokens may see under the layer's window.
3. A layer's output for each new token is the sum over its visible positions of words times weights: one running sum
   over everything, and the difference of two of its entries. What lies between requests cancels out exactly. It is the
   rule of `kvcore.sim.model`, on vLLM's metadata.

Everything visible is read again at every step. The pages are the engine's; nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.ladder.targets.vllm.fingerprint import HEAD, WIDTH, Bits
from kvcore.sim.model import U64

Index = npt.NDArray[np.int64]
ROW = 2 * HEAD
"""Floats of one slot: its row of K, and its row of V."""


class PageOrder:
    """Where the floats of each slot are inside a block of one head."""

    def __init__(self, block_tokens: int, write: Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]) -> None:
        """`write`: [tokens, ROW] into an empty block by the engine's own kernel; gives that block, flat."""
        count = block_tokens * ROW
        numbers = np.arange(1, count + 1, dtype=np.float32).reshape(block_tokens, ROW)
        page = write(numbers)
        assert page.size == count
        assert np.array_equal(np.sort(page), numbers.reshape(-1)), "the kernel changes what it is given"
        self.places: Index = np.argsort(page).reshape(block_tokens, ROW)

    def read(self, pages: Bits, blocks: Index) -> Bits:
        """[blocks, tokens, ROW] of `pages`, [blocks, floats]."""
        return np.take(pages[blocks], self.places, axis=1)


@dataclass(frozen=True, slots=True)
class Visible:
    """What the new tokens of a step see in one group.

    Per request: `starts` tokens were computed before, `ends` will be after the step. The blocks of the positions from
    `lows` on stand in `blocks`, from `bases` on.
    """

    block_tokens: int
    window: int | None
    starts: Index
    ends: Index
    lows: Index
    bases: Index
    blocks: Index

    @classmethod
    def of(cls, metadata: Any, window: int | None, block_tokens: int) -> Visible:
        ends = metadata.seq_lens.numpy().astype(np.int64)
        starts = ends - np.diff(metadata.query_start_loc.numpy())
        lows = np.zeros_like(ends) if window is None else np.maximum(starts - window + 1, 0)
        firsts, lasts = lows // block_tokens, -(-ends // block_tokens)
        counts = lasts - firsts
        bases = np.cumsum(counts) - counts
        table = metadata.block_table.numpy()
        pieces = [table[row, first:last] for row, (first, last) in enumerate(zip(firsts, lasts, strict=True))]
        return cls(block_tokens, window, starts, ends, lows, bases, np.concatenate(pieces).astype(np.int64))

    def rows(self, request: int) -> slice:
        """Of the request's visible positions, in the flat list of all slots that were read."""
        skipped = int(self.lows[request]) // self.block_tokens * self.block_tokens
        begin = int(self.bases[request]) * self.block_tokens - skipped
        return slice(begin + int(self.lows[request]), begin + int(self.ends[request]))

    def block(self, row: int) -> int:
        """That holds the slot at `row` of the flat list."""
        return int(self.blocks[row // self.block_tokens])

    def held(self, request: int) -> Index:
        """The blocks in which the request reads."""
        return self.blocks[int(self.bases[request]) :][: self._counts()[request]]

    def _counts(self) -> Index:
        """Blocks of each request."""
        return np.diff(np.append(self.bases, len(self.blocks)))

    def sums(self, words: U64, weights: U64) -> U64:
        """The output for each new token. `words`: [blocks, tokens, WIDTH]; used up."""
        counts = self.ends - self.starts
        blocks = self._counts()
        firsts = self.lows // self.block_tokens
        places = np.arange(len(self.blocks)) - np.repeat(self.bases - firsts, blocks)
        words *= weights.reshape(-1, self.block_tokens, WIDTH)[places]
        running = np.zeros(words.size // WIDTH + 1, dtype=np.uint64)
        np.cumsum(words.reshape(-1, WIDTH).sum(axis=1), out=running[1:])
        begins = np.cumsum(counts) - counts
        positions = np.arange(counts.sum()) + np.repeat(self.starts - begins, counts)
        offsets = np.repeat((self.bases - firsts) * self.block_tokens, counts)
        lows = np.zeros_like(positions) if self.window is None else np.maximum(positions - self.window + 1, 0)
        found: U64 = running[offsets + positions + 1] - running[offsets + lows]
        return found

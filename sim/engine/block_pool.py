"""`BlockPool`: the engine's blocks, their references, and its own prefix cache.

Theory of operation
-------------------
All object groups share one space of block ids. A block is

    free, nameless          content means nothing: taken first, the one that was released last before all others
    free, named             in the prefix cache and evictable: taken last (LRU of releases)
    held by n >= 1 requests, named or not

`take` pops from the front of the free list and drops the block's name: from then on nobody finds it. `share` adds a
reference to a named block, pulling it out of the free list if nobody held it. `release` drops one reference; at zero
a named block goes to the end of the list and keeps its name, a nameless one to the front: what nobody can find is
reused before anything that somebody might. Block 0 is the null block: never taken, never freed.

A block gets a name (`publish`) only when its KV is known to be valid, after the step that computed it or the load that
filled it. Naming at allocation, as some engines do, lets a request that is admitted after a failed load find bytes
that never arrived.

Names are exact, not hashes: `BlockNames` gives the n-th distinct (parent name, tokens of the block) the name n, so two
different prefixes never share one. They survive from one pool to the next and hold no blocks.

Who holds a block: the requests that took or shared it. Who announces it is done: each holder by `release`. Who frees:
the pool, at the last release.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvcore.connectors.views import NULL_BLOCK
from kvcore.sim.engine.probe import EngineProbe


class BlockNames:
    """Interns block prefixes: (parent name, token bytes) -> a small integer."""

    def __init__(self) -> None:
        self._names: dict[tuple[int | str, bytes], int] = {}

    def extend(self, chain: list[int], root: str, token_bytes: bytes, block_bytes: int) -> None:
        """Append to `chain` the names of the full blocks of `token_bytes` that it lacks."""
        names = self._names
        for index in range(len(chain), len(token_bytes) // block_bytes):
            parent = chain[-1] if index else f"{block_bytes}/{root}"
            key = (parent, token_bytes[index * block_bytes : (index + 1) * block_bytes])
            chain.append(names.setdefault(key, len(names)))


class BlockPool:
    """See above. `num_blocks` includes the null block."""

    def __init__(self, num_blocks: int, probe: EngineProbe) -> None:
        assert num_blocks >= 2
        self.num_blocks = num_blocks
        self._probe = probe
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._name_of: list[tuple[int, int] | None] = [None] * num_blocks
        self._block_of: dict[tuple[int, int], int] = {}

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def held_count(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def take(self, count: int, request_id: str) -> list[int]:
        """`count` blocks for one holder; the caller has checked `free_count`."""
        assert 0 <= count <= len(self._free)
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            assert self._references[block] == 0
            self.forget(block)
            self._references[block] = 1
            self._probe.block_allocated(block, request_id)
        return blocks

    def share(self, block: int, request_id: str) -> None:
        assert self._name_of[block] is not None, "only valid, named blocks are shared"
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1
        self._probe.block_shared(block, request_id)

    def release(self, blocks: Iterable[int], request_id: str) -> None:
        """Give back one reference to each; null blocks are skipped. The first one given is reused first."""
        nameless: list[int] = []
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            assert self._references[block] > 0, "released more often than taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._name_of[block] is None:
                    nameless.append(block)
            self._probe.block_freed(block, request_id)
        for block in reversed(nameless):
            self._free.move_to_end(block, last=False)

    def publish(self, block: int, group: int, name: int) -> None:
        """Name a block whose KV is valid. The first block of a name keeps it; a block has at most one name."""
        assert block != NULL_BLOCK
        assert self._references[block] > 0, "only a holder can vouch for the content"
        key = (group, name)
        if self._name_of[block] is not None:
            assert self._name_of[block] == key, "a held block changed its meaning"
            return
        if key not in self._block_of:
            self._block_of[key] = block
            self._name_of[block] = key

    def forget(self, block: int) -> None:
        key = self._name_of[block]
        if key is not None:
            assert self._block_of[key] == block
            del self._block_of[key]
            self._name_of[block] = None

    def find(self, group: int, name: int) -> int | None:
        return self._block_of.get((group, name))

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` sharing would pull out of the free list."""
        return sum(block != NULL_BLOCK and self._references[block] == 0 for block in blocks)

    def reset_prefix_cache(self) -> None:
        for block in list(self._block_of.values()):
            self.forget(block)

    def check(self) -> None:
        """All invariants, by a full walk."""
        assert self._references[NULL_BLOCK] == 0
        assert NULL_BLOCK not in self._free
        for block in range(1, self.num_blocks):
            assert (self._references[block] == 0) == (block in self._free)
        for key, block in self._block_of.items():
            assert self._name_of[block] == key
        assert len(self._block_of) == sum(key is not None for key in self._name_of)

"""Which server is responsible for which cell.

Theory of operation
-------------------
A cache may be spread over several servers. Responsibility is a function of the cell alone, so the scheduler, every
worker and every server find it without asking each other:

* mode "rank": rank r belongs to server r mod servers. A server holds whole rows; it stands beside its workers.
* mode "chunk": a chunk belongs to the server that the first eight bytes of its hash name. Load spreads evenly over any
  number of servers, and all rows of a chunk lie together.

A lookup asks every server. Each folds its own cells with those of the others *counted as present*, which gives the
lengths that do not fail because of this server. Serving is a conjunction over cells, so the intersection of these sets
is what one server with all cells would have answered. A minimum of best lengths would not be.

Rejected: consistent hashing (moves few keys when the number of servers changes, but L1 is gone with its server anyhow
and L2 is shared); asking a directory (one more process that can be wrong).

Nothing is held here. Changing `servers` or `mode` moves cells: that is a restart of the cache, not an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvcore.bitmap import ones
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout

PlacementMode = Literal["rank", "chunk"]

_HASH_BYTES_USED = 8


@dataclass(frozen=True, slots=True)
class Placement:
    """How cells are spread over `servers` servers, numbered from 0."""

    mode: PlacementMode = "rank"
    servers: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("rank", "chunk"):
            raise ConfigError(f"placement must be 'rank' or 'chunk', not {self.mode!r}")
        if type(self.servers) is not int or self.servers < 1:
            raise ConfigError(f"the number of servers must be a whole number of at least 1, not {self.servers!r}")

    def server_of(self, rank: int, chunk_hash: bytes) -> int:
        assert rank >= 0
        if self.mode == "rank":
            return rank % self.servers
        return _spread(chunk_hash, self.servers)

    def masks(self, layout: CacheLayout, hashes: Sequence[bytes], server: int) -> list[int]:
        """Per row the cells that `server` is responsible for; bit i stands for hashes[i]."""
        assert 0 <= server < self.servers
        everything = ones(len(hashes))
        if self.servers == 1:
            return [everything] * len(layout.rows)
        if self.mode == "rank":
            return [everything if row.rank % self.servers == server else 0 for row in layout.rows]
        return [_chunks_of(hashes, self.servers, server)] * len(layout.rows)


def _spread(chunk_hash: bytes, servers: int) -> int:
    assert chunk_hash
    return int.from_bytes(chunk_hash[:_HASH_BYTES_USED], "little") % servers


def _chunks_of(hashes: Sequence[bytes], servers: int, server: int) -> int:
    # the digits of a binary number, highest first: linear, where setting bit by bit would copy the number each time
    digits = ["1" if _spread(chunk_hash, servers) == server else "0" for chunk_hash in reversed(hashes)]
    return int("".join(digits) or "0", 2)

"""Chunk hashes by way of an engine's block hashes, for climbs in namespaces of mode "engine".

`EngineHasher` stands where a connector expects a hasher of tokens: it chains block hashes as an engine with a prefix
cache of its own does, and derives the chunk hashes from those. Oracles and cache use the same one.

Pure; nothing is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from kvcore.errors import CallerError
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher, Extra, Namespace


class EngineHasher(ChunkHasher):
    """`block_tokens`: of the engine's hash blocks; the chunk size is a multiple of it."""

    def __init__(self, namespace: Namespace, block_tokens: int) -> None:
        super().__init__(namespace)
        self._block_tokens = block_tokens

    def hash_tokens(self, tokens: Any, *, known: Sequence[bytes] = (), extras: Sequence[Extra] = ()) -> list[bytes]:
        """Hashes of all full chunks. An engine has extras in its own hashes; this one knows none."""
        if extras:
            raise CallerError("extras belong into the engine's own block hashes")
        return self.hash_blocks(self._block_hashes(tokens), self._block_tokens, known=known)

    def _block_hashes(self, tokens: Any) -> list[bytes]:
        data = np.asarray(tokens, dtype="<u4").tobytes()
        size = 4 * self._block_tokens
        previous = b""
        hashes: list[bytes] = []
        for start in range(0, len(data) - size + 1, size):
            previous = blake3(previous + data[start : start + size]).digest()
            hashes.append(previous)
        return hashes


def hasher_for(namespace: Namespace, layout: CacheLayout) -> ChunkHasher:
    """The hasher that cache and oracles of one climb share."""
    if namespace.hash_mode == "tokens":
        return ChunkHasher(namespace)
    return EngineHasher(namespace, min(group.block_tokens for group in layout.groups))

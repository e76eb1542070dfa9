"""`Truth`: which bytes a key stands for, from the model's dense reference and the tokens of the workload.

The oracle registers every token sequence that may occur (prompt and reference output). A key that belongs to none of
them, or two different prefixes under one key, is already a finding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher, Extra, ObjectKey
from kvcore.sim.engine.request import shown
from kvcore.sim.marks.events import ITEMS_APART
from kvcore.sim.model import U64, Layer
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.identity import confused
from kvcore.sim.reference import Reference

Tokens = npt.NDArray[np.uint32]


class Truth:
    """Expected bytes per key, computed when first asked for."""

    def __init__(self, layout: CacheLayout, reference: Reference, hasher: ChunkHasher, findings: Findings) -> None:
        self.layout = layout
        self._reference = reference
        self._hasher = hasher
        self._findings = findings
        self._sequences: dict[bytes, tuple[Tokens, int]] = {}
        self._cells: dict[ObjectKey, bytes | None] = {}
        self._named: dict[str, Tokens] = {}
        self._bare: dict[bytes, bytes] = {}  # hash of what connectors see, the items left out -> one with them
        for text in confused(hasher.namespace, layout):
            findings.report("identity", text)

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that must follow `prompt`."""
        return self._reference.tokens(prompt, count)

    def register(self, name: str, tokens: Sequence[int], items: Sequence[Extra] = ()) -> list[bytes]:
        """Make the chunks of a request's whole sequence known. Returns their hashes, which are made of what a connector
        sees: of two requests that differ in an item alone, the tokens there are the same placeholders."""
        array = self._named[name] = np.asarray(tokens, dtype=np.uint32)
        hashes = self._hash_with_items(shown(tokens, items), items) if items else self._hasher.hash_tokens(array)
        size = self.layout.chunk_tokens
        for chunk, digest in enumerate(hashes):
            known = self._sequences.setdefault(digest, (array, chunk))
            if known[1] != chunk or not np.array_equal(known[0][: (chunk + 1) * size], array[: (chunk + 1) * size]):
                self._findings.report("bytes", f"two different prefixes share the chunk hash {digest.hex()[:16]}")
        return hashes

    def _hash_with_items(self, tokens: Sequence[int], items: Sequence[Extra]) -> list[bytes]:
        hashes = self._hasher.hash_tokens(tokens, extras=items)
        for bare, digest in zip(self._hasher.hash_tokens(tokens), hashes):
            if self._bare.setdefault(bare, digest) != digest:
                self._findings.sometimes.hit(ITEMS_APART)
        return hashes

    def expected(self, key: ObjectKey) -> bytes | None:
        """The bytes of a cell; None for a key that no known sequence produces."""
        if key not in self._cells:
            known = self._sequences.get(key.chunk_hash)
            self._cells[key] = known and self._reference.cell_bytes(
                known[0], key.object_group_id, key.kv_rank, known[1]
            )
        return self._cells[key]

    def layer_words(self, name: str, layer: Layer, rank: int) -> U64:
        """[positions, width]: what `layer` writes for a registered request (recurrent: the state after each token)."""
        return self._reference.layer_words(self._named[name], layer, rank)

    def check(self, key: ObjectKey, found: memoryview | bytes, where: str) -> bool:
        """Compare; a difference is a finding."""
        expected = self.expected(key)
        self._findings.cells_byte_checked += 1
        name = f"group {key.object_group_id}, rank {key.kv_rank}, chunk {key.chunk_hash.hex()[:16]}"
        if expected is None:
            self._findings.report("bytes", f"{where}: {name} belongs to no sequence of the workload")
            return False
        if expected != found:
            self._findings.report("bytes", f"{where}: the bytes of {name} are not what the model computes")
            return False
        return True

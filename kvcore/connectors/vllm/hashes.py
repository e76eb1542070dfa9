"""Keys from the engine's own block hashes: nothing is hashed twice; salt, adapter and images are in them.

vLLM appends to `Request.block_hashes` whenever a block of known tokens is complete. `EngineTokens` is a value on top of
that growing list: as many tokens as were known when it was made, and the hashes of their full blocks. `BlockHasher`
stands where the connector core expects a hasher of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from blake3 import blake3

from kvcore.errors import CallerError
from kvcore.keys import ChunkHasher, Extra


class EngineTokens(Sequence[int]):
    """The first `count` tokens of a request. Tokens and hashes are the engine's lists, which are only appended to."""

    __slots__ = ("_count", "_hashes", "_tokens")

    def __init__(self, tokens: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        self._tokens = tokens
        self._count = len(tokens)
        self._hashes = block_hashes

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return list(self._tokens[: self._count])[index]

    def block_hashes(self, block_tokens: int) -> Sequence[bytes]:
        """Of the full blocks of these tokens. Raises `CallerError` when the engine does not hash."""
        wanted = self._count // block_tokens
        if len(self._hashes) < wanted:
            raise CallerError(
                f"the engine has hashed {len(self._hashes)} of {wanted} blocks; it needs a block hasher of "
                f"{block_tokens} tokens (prefix caching, or a KV connector in its configuration)"
            )
        return self._hashes[:wanted]


class BlockHasher(ChunkHasher):
    """A hasher of `EngineTokens`, by the engine's hashes of blocks of `block_tokens` tokens.

    `renew` begins another life of the model: no key made before is made again.
    """

    def __init__(self, hasher: ChunkHasher, block_tokens: int) -> None:
        super().__init__(hasher.namespace)
        self._block_tokens = block_tokens

    def renew(self, token: bytes) -> None:
        """From here on other keys. `token`: never used before, by anybody."""
        self._digest = blake3(token, key=self._digest).digest()

    def hash_tokens(self, tokens: Any, *, known: Sequence[bytes] = (), extras: Sequence[Extra] = ()) -> list[bytes]:
        """See `ChunkHasher.hash_blocks`. Extras are in the engine's hashes already."""
        assert isinstance(tokens, EngineTokens)
        assert not extras
        return self.hash_blocks(tokens.block_hashes(self._block_tokens), self._block_tokens, known=known)

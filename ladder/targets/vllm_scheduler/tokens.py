"""What the fake model computes: slots hold the rolling hash of their token prefix, the next token follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcore.ladder.targets.vllm_scheduler.case import TOKEN_KINDS

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_FACTOR = 6364136223846793005
_ADDEND = 1442695040888963407
GARBAGE = 0xBAD0_BAD0_BAD0_BAD0


class Prefixes:
    """The tokens of one request and the hash after each of them; grows and can be cut."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._hashes = np.zeros(256, dtype=np.uint64)
        self._last: list[int] = [_ADDEND]
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        start = len(self.tokens)
        if start + len(tokens) > len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.zeros(start + len(tokens), dtype=np.uint64)])
        for position, token in enumerate(tokens, start):
            value = (self._last[-1] * _FACTOR + token + 1) & _MASK
            self._last.append(value)
            self._hashes[position] = value
        self.tokens.extend(tokens)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        del self._last[length + 1 :]

    def hashes(self, start: int, end: int) -> Words:
        assert end <= len(self.tokens)
        return self._hashes[start:end]

    def next_token(self) -> int:
        return next_token(self._last[-1])


def next_token(value: int) -> int:
    return (value >> 17) % (TOKEN_KINDS - 1) + 1


def place_key(group: int, layer: int) -> np.uint64:
    """Makes a slot's content depend on where it belongs."""
    return np.uint64((group * 0x9E3779B97F4A7C15 ^ layer * 0xC2B2AE3D27D4EB4F) & _MASK)


def reference(prompt: Sequence[int], output_tokens: int) -> list[int]:
    """The tokens of a request, computed alone."""
    prefixes = Prefixes(prompt)
    for _ in range(output_tokens):
        prefixes.extend([prefixes.next_token()])
    return prefixes.tokens[len(prompt) :]

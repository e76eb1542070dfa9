"""The fingerprint model on vLLM: its arithmetic, and its numbers as float32.

Theory of operation
-------------------
The arithmetic is the simulation's (`kvcore.sim.model.FingerprintModel`, which tells why every visible word reaches
every later token); nothing of it is defined again here. What vLLM adds is a page of floats, and a vocabulary:

* A word of 64 bits is written as four floats of 16 bits each. A float from 2**23 on is a whole number whose low bits
  are those of its mantissa, so `2**23 + piece` holds a piece exactly, and in memory it is `0x4B000000 + piece`. Reading
  takes the bits and computes nothing: no other float - zero, a number in between, not a number - reads as that piece.
* A token's slot is one row of K and one of V, 32 floats each: `WIDTH` words of kv fill both, so that no float of a page
  can change unseen.
* The next token is the simulation's, reduced to the vocabulary. One changed word is missed by one token with
  probability 1/4094, and by the next ones likewise, as long as the word stays visible.

Rejected: pieces of 24 bits (a word would leave a third float with 16), bits stored as they are (many words are not a
number, and a kernel may write another one), pieces of 8 bits for narrower floats (the CPU's kernels are exact in
float32, which is what the ladder runs).

Nothing here needs vLLM or torch. Nothing is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.sim.model import U64, WORD_BYTES, FingerprintModel, Layer, finalise
from kvcore.sim.reference import Reference

Bits = npt.NDArray[np.uint32]
"""Floats by their bits."""

ARCHITECTURE = "KvcoreFingerprintForCausalLM"
HEAD = 32
WORD_FLOATS = 4
WIDTH = 2 * HEAD // WORD_FLOATS
VOCABULARY = 4096
_SPECIAL_TOKENS = 2
_PIECE_BITS = np.uint32(16)
_HIGH = np.uint32(0x4B00)
_HIGH_WORD = np.uint64(0x4B004B004B004B00)


class TokenFingerprints(FingerprintModel):
    """The simulation's model with tokens of a small vocabulary."""

    def next_tokens(self, x_last: U64) -> list[int]:
        return [_SPECIAL_TOKENS + token % (VOCABULARY - _SPECIAL_TOKENS) for token in super().next_tokens(x_last)]


def fingerprints(windows: Sequence[int | None], seed: int, positions_max: int) -> TokenFingerprints:
    """A model with one layer for each of `windows`; None is full attention."""
    kinds = [GroupKind.FULL if window is None else GroupKind.WINDOW for window in windows]
    order = list(dict.fromkeys(zip(kinds, windows, strict=True)))
    layers = [
        Layer(index, order.index((kind, window)), windows[:index].count(window), kind, window or 0)
        for index, (kind, window) in enumerate(zip(kinds, windows, strict=True))
    ]
    return TokenFingerprints(layers, 1, WIDTH, seed, positions_max)


def dense_reference(model: FingerprintModel, block_tokens: int, sequences_max: int = 64) -> Reference:
    """The simulation's oracle for this model: tokens and words without pages."""
    groups = [
        ObjectGroup(layer.kind, block_tokens, block_tokens * model.width * WORD_BYTES, layer.window_tokens or None)
        for layer in model.layers
        if layer.slot == 0
    ]
    return Reference(model, CacheLayout(tuple(groups), model.ranks, block_tokens), sequences_max)


def to_bits(words: U64) -> Bits:
    """[..., n] words as [..., 4 n] floats."""
    pieces = np.ascontiguousarray(words).view(np.uint16).astype(np.uint32)
    pieces |= _HIGH << _PIECE_BITS
    return pieces


def from_bits(bits: Bits) -> U64:
    """The inverse; other floats give other words, too: what is no piece is mixed into the word."""
    words = bits.astype(np.uint16).view(np.uint64)
    high = (bits >> _PIECE_BITS).astype(np.uint16)
    if (high != _HIGH).any():
        words ^= finalise(high.view(np.uint64) ^ _HIGH_WORD)
    return words


def config_of(windows: Sequence[int | None], seed: int = 1) -> dict[str, Any]:
    """What makes a config.json this model's. vLLM reads it as a small llama's: heads, head size, no window."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HEAD,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "num_hidden_layers": len(windows),
        "fingerprint": {"windows": list(windows), "seed": seed},
    }


def model_of(config: Any) -> TokenFingerprints:
    """The model that a config of `config_of` asks for."""
    asked = config.fingerprint
    return fingerprints(asked["windows"], asked["seed"], config.max_position_embeddings)

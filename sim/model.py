"""`FingerprintModel`: a model whose every output depends on every word of KV it may see.

Theory of operation
-------------------
All arithmetic is in the ring of integers modulo 2**64, so it is exact, and neither batching nor chunking can change a
result. With `x_0[p] = mix(token[p], p)`, each layer `l` of object group `g` does, for every rank `r`:

1. write  `kv_l,r[p] = (x_l[p] ^ K_l,r) * M_l,r`          (`width` words, M odd: a bijection of x_l[p])
2. read back from the paged cache all that position p may see and add it up with odd weights:
   full       o_l[p] = sum over ranks and j in [0, p]      of kv_l,r[j] . weights[j]
   window W   o_l[p] = sum over ranks and j in (p - W, p]  of kv_l,r[j] . weights[j]
   recurrent  s_l,r[p] = a_l * s_l,r[p-1] + kv_l,r[p],  o_l[p] = sum over ranks of s_l,r[p] . weights of the state
3. `x_l+1[p] = mix(x_l[p], o_l[p])`

and the next token is `mix(x_last[n-1]) mod 2**30`. Weights are odd, so they are units of the ring: one changed word j
changes the sum for certain, `mix` is a bijection of it, and the last `mix` lets the change miss the 30 bits of the
token with probability 2**-30. A wrong, stale, torn or foreign word in any visible position therefore changes every
later token. Weights differ from position to position, so words in the wrong place are wrong words.

Why sums: a running sum over the concatenated context of a whole batch answers all its queries with two look-ups each,
so one layer of one step costs a fixed handful of numpy calls. The recurrence is made a sum in the same way:
`s[c+k] = a**k * (a * s[c-1] + sum over j <= k of a**-j * kv[c+j])`, a being odd and so invertible.

Rejected: floating point (not exact), a hash chain over positions (no vectorisation, and a window could not forget),
keeping sums between steps (a stale page would then go unseen: everything is read from the pages at every step).

Who holds what: the model is immutable and shared by all; it holds no KV. Pages belong to the engine
(`kvcore.sim.engine.device.PagedMemory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup

U64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.int64]

TOKEN_BITS = 30
WORD_BYTES = 8

_MULTIPLIER_1 = np.uint64(0xFF51AFD7ED558CCD)
_MULTIPLIER_2 = np.uint64(0xC4CEB9FE1A85EC53)
_TOKEN_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_TOKEN_MASK = np.uint64((1 << TOKEN_BITS) - 1)
_SHIFT_29 = np.uint64(29)
_SHIFT_32 = np.uint64(32)
_ONE = np.uint64(1)


def finalise(words: U64) -> U64:
    """Mix every word in place: a bijection in which each input bit reaches every output bit."""
    words ^= words >> _SHIFT_32
    words *= _MULTIPLIER_1
    words ^= words >> _SHIFT_29
    words *= _MULTIPLIER_2
    words ^= words >> _SHIFT_32
    return words


def _constants(seed: int, label: int, shape: tuple[int, ...]) -> U64:
    """Fixed pseudo-random words: a function of (seed, label, position) only."""
    count = int(np.prod(shape))
    words = np.arange(1, count + 1, dtype=np.uint64) * _TOKEN_MULTIPLIER
    words ^= np.uint64(((seed & 0xFFFFFFFF) << 32) | label)
    return finalise(finalise(words)).reshape(shape)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: `group` is its object group's position in the layout, `slot` its place inside a page of the group."""

    index: int
    group: int
    slot: int
    kind: GroupKind
    window_tokens: int


class FingerprintModel:
    """The arithmetic above; immutable. All arrays are uint64, x has shape [positions], kv [positions, width]."""

    def __init__(
        self, layers: Sequence[Layer], ranks: int, width: int = 2, seed: int = 1, positions_max: int = 2048
    ) -> None:
        if not layers or ranks < 1 or width < 1:
            raise ConfigError("a model needs at least one layer, one rank and one word per position")
        self.layers = tuple(layers)
        self.ranks = ranks
        self.width = width
        self.seed = seed
        self.positions_max = positions_max
        count = len(self.layers)
        self._position_words = _constants(seed, 1, (positions_max,))
        self.weights = _constants(seed, 2, (positions_max, width)) | _ONE
        self._kv_masks = _constants(seed, 3, (count, ranks, width))
        self._kv_factors = _constants(seed, 4, (count, ranks, width)) | _ONE
        self._output_factors = _constants(seed, 5, (count, 1)) | _ONE
        self.state_weights = _constants(seed, 6, (width,)) | _ONE
        self._token_mask = _constants(seed, 7, (1,))
        self.state_factor = int(_constants(seed, 8, (1,))[0] | _ONE)
        self.powers = _powers(self.state_factor, positions_max)
        self.inverse_powers = _powers(pow(self.state_factor, -1, 1 << 64), positions_max)

    def embed(self, tokens: npt.NDArray[np.uint32], positions: Index) -> U64:
        words = tokens.astype(np.uint64)
        words *= _TOKEN_MULTIPLIER
        words += self._position_words[positions]
        return finalise(words)

    def kv(self, layer: int, rank: int, x: U64) -> U64:
        """What `layer` writes for each position on `rank`: [positions, width]."""
        words: U64 = x[:, None] ^ self._kv_masks[layer, rank]
        words *= self._kv_factors[layer, rank]
        return words

    def combine(self, layer: int, x: U64, output: U64) -> U64:
        """The next layer's input from this one's input and its attention output summed over all ranks."""
        words = output * self._output_factors[layer]
        words += x
        return finalise(words)

    def next_tokens(self, x_last: U64) -> list[int]:
        words = finalise(x_last ^ self._token_mask)
        words &= _TOKEN_MASK
        return [int(word) for word in words]


def _powers(base: int, count: int) -> U64:
    """base**0 .. base**(count-1) modulo 2**64, by doubling."""
    powers = np.ones(count, dtype=np.uint64)
    filled = 1
    while filled < count:
        step = min(filled, count - filled)
        factor = np.full(1, pow(base, filled, 1 << 64), dtype=np.uint64)
        powers[filled : filled + step] = powers[:step] * factor
        filled += step
    return powers


FULL_BLOCK_TOKENS = 8
WINDOW_BLOCK_TOKENS = 8
RECURRENT_BLOCK_TOKENS = 16
WINDOW_TOKENS = 40

MODEL_KINDS: dict[str, tuple[GroupKind, ...]] = {
    "full": (GroupKind.FULL, GroupKind.FULL),
    "full+window": (GroupKind.FULL, GroupKind.WINDOW, GroupKind.FULL),
    "full+window+recurrent": (GroupKind.FULL, GroupKind.WINDOW, GroupKind.RECURRENT, GroupKind.FULL),
}
"""The layers of each named model, in order. A group's layers share one page."""


def build_model(
    kind: str,
    ranks: int = 1,
    *,
    chunk_tokens: int = 16,
    width: int = 2,
    seed: int = 1,
    full_block_tokens: int = FULL_BLOCK_TOKENS,
    window_block_tokens: int = WINDOW_BLOCK_TOKENS,
    recurrent_block_tokens: int = RECURRENT_BLOCK_TOKENS,
    window_tokens: int = WINDOW_TOKENS,
    positions_max: int = 2048,
) -> tuple[CacheLayout, FingerprintModel]:
    """One of `MODEL_KINDS` with its cache layout: groups in the order in which their kinds first occur."""
    kinds = MODEL_KINDS.get(kind)
    if kinds is None:
        raise ConfigError(f"unknown model {kind!r}; known: {', '.join(MODEL_KINDS)}")
    order = list(dict.fromkeys(kinds))
    block_tokens = {
        GroupKind.FULL: full_block_tokens,
        GroupKind.WINDOW: window_block_tokens,
        GroupKind.RECURRENT: recurrent_block_tokens,
    }
    layers: list[Layer] = []
    for index, layer_kind in enumerate(kinds):
        window = window_tokens if layer_kind is GroupKind.WINDOW else 0
        layers.append(Layer(index, order.index(layer_kind), kinds[:index].count(layer_kind), layer_kind, window))
    groups = tuple(
        ObjectGroup(
            group_kind,
            block_tokens[group_kind],
            kinds.count(group_kind)
            * (1 if group_kind is GroupKind.RECURRENT else block_tokens[group_kind])
            * width
            * WORD_BYTES,
            window_tokens if group_kind is GroupKind.WINDOW else None,
        )
        for group_kind in order
    )
    layout = CacheLayout(groups, ranks, chunk_tokens)
    return layout, FingerprintModel(layers, ranks, width, seed, positions_max)

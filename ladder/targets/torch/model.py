"""A small transformer in torch whose every float is an exact integer or an exact quotient of two.

Theory of operation
-------------------
A real engine's KV depends in its last bits on how tokens were batched: a matrix product picks another order of
summation for another shape. Then bytes could only be compared with a tolerance, and a wrong byte could hide in it. Here
all arithmetic in float32 is exact, so a token's KV is one value, whatever the batch, the chunking, prefill or decode:

1. Activations and weights are small whole numbers, so every product and every sum of a linear layer is below 2**24 and
   exact in any order. `wrap` brings a sum back into [-15, 15] by a remainder: unlike rounding or clamping it forgets
   nothing that a change in one addend has done.
2. Attention: scores are exact; weights are powers of two, 2**floor((s - max) / 64) down to 2**-10, read from a table
   (a library's exp2 may differ between its vector and its scalar code); numerator and denominator are exact sums for
   up to 512 positions; one IEEE division per element, then rounding to whole numbers.
3. The recurrent layer is a loop over tokens with exact steps.
4. Ranks hold whole heads (grouped-query attention: two query heads share a KV head); their partial outputs are
   exact, so an all-reduce may add them in any order.

The structure is a transformer's: token and position embedding, per layer attention (full, sliding window) or a
recurrence, residual, MLP, and tied output embedding with greedy choice (ties broken by the smaller token).

Who holds: the model is immutable; it holds no KV. The pages are the worker's (`pages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.sim.model import MODEL_KINDS, Layer

DIM = 32
QUERY_HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
STATE = 16
HIDDEN = 64
VOCABULARY = 512
POSITIONS_MAX = 512
FLOAT_BYTES = 4

_LIMIT = 15
_STATE_LIMIT = 127
_SCORE_STEP = 64
_WEIGHT_BITS = 10
_OUTPUT_SCALE = 4

BLOCK_TOKENS = {GroupKind.FULL: 8, GroupKind.WINDOW: 8, GroupKind.RECURRENT: 16}
WINDOW_TOKENS = 40


def wrap(x: torch.Tensor, limit: int = _LIMIT) -> torch.Tensor:
    """Whole numbers back into [-limit, limit], by a remainder."""
    return torch.remainder(x + limit, 2 * limit + 1) - limit


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer; lists are by rank."""

    qkv: list[torch.Tensor]  # [DIM, (query + 2 kv) heads * HEAD_DIM]; recurrent: [DIM, STATE]
    out: list[torch.Tensor]  # [query heads * HEAD_DIM, DIM]; recurrent: [STATE, DIM]
    decay: list[torch.Tensor]  # recurrent: [STATE]
    up: torch.Tensor  # [DIM, HIDDEN]
    down: torch.Tensor  # [HIDDEN, DIM]


class TorchModel:
    """See the module text. Built from a seed alone, the same in every process."""

    def __init__(self, kind: str, ranks: int, seed: int) -> None:
        if kind not in MODEL_KINDS:
            raise ConfigError(f"unknown model {kind!r}; known: {', '.join(MODEL_KINDS)}")
        if KV_HEADS % ranks:
            raise ConfigError(f"{KV_HEADS} KV heads cannot be shared by {ranks} ranks")
        self.ranks = ranks
        self.layers = _layers(kind)
        self.kv_heads = KV_HEADS // ranks
        self.query_heads = QUERY_HEADS // ranks
        generator = torch.Generator().manual_seed(seed)
        self.embedding = _integers(generator, (VOCABULARY, DIM), _LIMIT)
        self.positions = _integers(generator, (POSITIONS_MAX, DIM), _LIMIT)
        self.weights = [self._layer(generator, layer) for layer in self.layers]
        self._powers = torch.tensor([2.0**-exponent for exponent in range(_WEIGHT_BITS + 1)])

    def _layer(self, generator: torch.Generator, layer: Layer) -> LayerWeights:
        """Weights of all ranks are drawn together, so that the model is the same for any number of ranks."""
        ranks = self.ranks
        up, down = _integers(generator, (DIM, HIDDEN), 2), _integers(generator, (HIDDEN, DIM), 2)
        if layer.kind is GroupKind.RECURRENT:
            enter = _integers(generator, (DIM, STATE), 2).chunk(ranks, 1)
            leave = _integers(generator, (STATE, DIM), 2).chunk(ranks, 0)
            decay = (1 + torch.randint(0, 3, (STATE,), generator=generator).float()).chunk(ranks, 0)
            return LayerWeights(list(enter), list(leave), list(decay), up, down)
        query = _integers(generator, (DIM, QUERY_HEADS * HEAD_DIM), 2).chunk(ranks, 1)
        key = _integers(generator, (DIM, KV_HEADS * HEAD_DIM), 2).chunk(ranks, 1)
        value = _integers(generator, (DIM, KV_HEADS * HEAD_DIM), 2).chunk(ranks, 1)
        leave = _integers(generator, (QUERY_HEADS * HEAD_DIM, DIM), 2).chunk(ranks, 0)
        qkv = [torch.cat(parts, 1) for parts in zip(query, key, value, strict=True)]
        return LayerWeights(qkv, list(leave), [], up, down)

    def width(self, kind: GroupKind) -> int:
        """Floats per token of one layer on one rank; recurrent: per state."""
        return STATE // self.ranks if kind is GroupKind.RECURRENT else 2 * self.kv_heads * HEAD_DIM

    # -- one layer, of one rank

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[tokens, DIM]"""
        return wrap(self.embedding[tokens] + self.positions[positions])

    def project(self, layer: Layer, rank: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries [tokens, heads, HEAD_DIM], what goes into the pages [tokens, width]); recurrent: (-, inputs)."""
        y = wrap(x @ self.weights[layer.index].qkv[rank])
        if layer.kind is GroupKind.RECURRENT:
            return y, y
        queries, kv = y[:, : self.query_heads * HEAD_DIM], y[:, self.query_heads * HEAD_DIM :]
        return queries.reshape(len(x), self.query_heads, HEAD_DIM), kv

    def attend(
        self, queries: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, first: int, window: int
    ) -> torch.Tensor:
        """[tokens, heads * HEAD_DIM]. `kv` holds positions [first, first + len(kv)); `window` 0: everything before."""
        keys, values = kv.reshape(len(kv), 2, self.kv_heads, HEAD_DIM).unbind(1)
        share = self.query_heads // self.kv_heads
        keys, values = (part.repeat_interleave(share, 1).transpose(0, 1) for part in (keys, values))
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2)  # [heads, tokens, context]
        there = torch.arange(first, first + len(kv))
        visible = there[None, :] <= positions[:, None]
        if window:
            visible &= there[None, :] > positions[:, None] - window
        scores = scores.masked_fill(~visible, -torch.inf)
        distance = torch.floor((scores.amax(-1, keepdim=True) - scores) / -_SCORE_STEP)
        exponent = torch.nan_to_num(-distance).clamp(0, _WEIGHT_BITS).long()  # NaN comes back in with the values
        weights = self._powers[exponent] * visible
        mixed = (weights @ values) / weights.sum(-1, keepdim=True)
        return torch.round(mixed * _OUTPUT_SCALE).transpose(0, 1).reshape(len(positions), -1)

    def recur(self, layer: Layer, rank: int, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The state after each input, [tokens, STATE / ranks], from `state` before the first."""
        decay = self.weights[layer.index].decay[rank]
        states = []
        for value in inputs:
            state = wrap(decay * state + value, _STATE_LIMIT)
            states.append(state)
        return torch.stack(states)

    def leave(self, layer: Layer, rank: int, mixed: torch.Tensor) -> torch.Tensor:
        """The rank's partial output, [tokens, DIM]; the ranks' are added."""
        return mixed @ self.weights[layer.index].out[rank]

    def combine(self, layer: Layer, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Residual and MLP: the next layer's input."""
        weights = self.weights[layer.index]
        x = wrap(x + wrap(output))
        hidden = torch.relu(wrap(x @ weights.up))
        return wrap(x + wrap(hidden @ weights.down))

    def next_tokens(self, x_last: torch.Tensor) -> list[int]:
        logits = x_last @ self.embedding.T
        preferred = logits * VOCABULARY - torch.arange(VOCABULARY, dtype=torch.float32)
        return [int(token) for token in preferred.argmax(-1)]


def build_torch_model(kind: str, ranks: int, *, chunk_tokens: int, seed: int) -> tuple[CacheLayout, TorchModel]:
    """The model and the layout of its cache; groups in the order in which their kinds first occur."""
    model = TorchModel(kind, ranks, seed)
    kinds = [layer.kind for layer in model.layers]
    groups = []
    for group_kind in dict.fromkeys(kinds):
        tokens = 1 if group_kind is GroupKind.RECURRENT else BLOCK_TOKENS[group_kind]
        size = kinds.count(group_kind) * tokens * model.width(group_kind) * FLOAT_BYTES
        window = WINDOW_TOKENS if group_kind is GroupKind.WINDOW else None
        groups.append(ObjectGroup(group_kind, BLOCK_TOKENS[group_kind], size, window))
    return CacheLayout(tuple(groups), ranks, chunk_tokens), model


def _layers(kind: str) -> list[Layer]:
    kinds = MODEL_KINDS[kind]
    order = list(dict.fromkeys(kinds))
    return [
        Layer(
            index,
            order.index(layer_kind),
            kinds[:index].count(layer_kind),
            layer_kind,
            WINDOW_TOKENS if layer_kind is GroupKind.WINDOW else 0,
        )
        for index, layer_kind in enumerate(kinds)
    ]


def _integers(generator: torch.Generator, shape: tuple[int, ...], limit: int) -> torch.Tensor:
    """Whole numbers in [-limit, limit] as float32."""
    return torch.randint(-limit, limit + 1, shape, generator=generator).float()

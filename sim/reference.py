"""The dense reference: what the model says, with no pages, no batches and no scheduler.

It answers two questions for the oracles: which tokens a prompt must produce, and which bytes any cell must hold.
It shares the model's constants with the engine's paged forward pass but none of its code: sequences are dense arrays,
the recurrence is a plain loop, and windows are sliced from a sum over all positions.

Who holds what: each sequence's dense KV belongs to the `Reference`, which forgets the least recently used ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcore.errors import CallerError
from kvcore.groups import CacheLayout, GroupKind
from kvcore.sim.model import U64, FingerprintModel, Layer

_MASK = (1 << 64) - 1


class _Dense:
    """One token sequence and everything each layer computed for it."""

    def __init__(self, model: FingerprintModel, capacity: int) -> None:
        shape = (len(model.layers), model.ranks, capacity, model.width)
        self._model = model
        self.length = 0
        self.kv: U64 = np.zeros(shape, dtype=np.uint64)
        self.states: U64 = np.zeros(shape, dtype=np.uint64)
        # sums[l, p] = sum of layer l's weighted KV, over ranks and words, of positions before p
        self._sums: U64 = np.zeros((len(model.layers), capacity + 1), dtype=np.uint64)
        self.x_last: U64 = np.zeros(1, dtype=np.uint64)

    def extend(self, tokens: npt.NDArray[np.uint32]) -> None:
        start, end = self.length, self.length + len(tokens)
        assert end <= self.kv.shape[2]
        x = self._model.embed(tokens, np.arange(start, end))
        for layer in self._model.layers:
            for rank in range(self._model.ranks):
                self.kv[layer.index, rank, start:end] = self._model.kv(layer.index, rank, x)
            x = self._model.combine(layer.index, x, self._output(layer, start, end))
        self.length = end
        self.x_last = x[-1:]

    def _output(self, layer: Layer, start: int, end: int) -> U64:
        if layer.kind is GroupKind.RECURRENT:
            self._recur(layer.index, start, end)
            states = self.states[layer.index, :, start:end] * self._model.state_weights
            return np.asarray(states.sum(axis=(0, 2)), dtype=np.uint64)
        sums = self._sums[layer.index]
        weighted = self.kv[layer.index, :, start:end] * self._model.weights[start:end]
        sums[start + 1 : end + 1] = sums[start : start + 1] + np.cumsum(weighted.sum(axis=(0, 2)), dtype=np.uint64)
        if layer.kind is GroupKind.FULL:
            return np.asarray(sums[start + 1 : end + 1], dtype=np.uint64)
        first_visible = np.maximum(np.arange(start, end) - layer.window_tokens + 1, 0)
        return np.asarray(sums[start + 1 : end + 1] - sums[first_visible], dtype=np.uint64)

    def _recur(self, layer: int, start: int, end: int) -> None:
        factor = self._model.state_factor
        for rank in range(self._model.ranks):
            for word in range(self._model.width):
                state = int(self.states[layer, rank, start - 1, word]) if start else 0
                column: list[int] = []
                for value in self.kv[layer, rank, start:end, word].tolist():
                    state = (factor * state + value) & _MASK
                    column.append(state)
                self.states[layer, rank, start:end, word] = column


class Reference:
    """Tokens and cell bytes as the model defines them."""

    def __init__(self, model: FingerprintModel, layout: CacheLayout, sequences_max: int = 512) -> None:
        self._model = model
        self._layout = layout
        self._sequences_max = sequences_max
        self._dense: OrderedDict[bytes, _Dense] = OrderedDict()
        self._group_layers = [
            [layer.index for layer in model.layers if layer.group == group] for group in range(len(layout.groups))
        ]

    def tokens(self, prompt: Sequence[int] | npt.NDArray[np.uint32], count: int) -> list[int]:
        """The `count` tokens that must follow `prompt`."""
        if len(prompt) == 0:
            raise CallerError("a prompt needs at least one token")
        dense = _Dense(self._model, len(prompt) + count)
        dense.extend(np.asarray(prompt, dtype=np.uint32))
        generated = self._model.next_tokens(dense.x_last)
        while len(generated) < count:
            dense.extend(np.asarray(generated[-1:], dtype=np.uint32))
            generated += self._model.next_tokens(dense.x_last)
        return generated[:count]

    def cell_bytes(
        self, tokens: Sequence[int] | npt.NDArray[np.uint32], group: int, rank: int, chunk_index: int
    ) -> bytes:
        """The bytes of cell (group, rank, chunk_index) of any sequence that begins with `tokens`.

        Attention: the chunk's blocks in order, each page [layers, block_tokens, width]. Recurrent: the one state page
        at the chunk's end. `tokens` must cover the chunk; passing a request's whole sequence each time is cheapest.
        """
        chunk_tokens = self._layout.chunk_tokens
        start, end = chunk_index * chunk_tokens, (chunk_index + 1) * chunk_tokens
        if len(tokens) < end:
            raise CallerError(f"chunk {chunk_index} ends at token {end}, the sequence has {len(tokens)}")
        dense = self._sequence(np.asarray(tokens, dtype=np.uint32))
        layers = self._group_layers[group]
        spec = self._layout.groups[group]
        if spec.kind is GroupKind.RECURRENT:
            return dense.states[layers, rank, end - 1].tobytes()
        words = dense.kv[layers, rank, start:end]  # [layers, chunk_tokens, width]
        blocks = words.reshape(len(layers), chunk_tokens // spec.block_tokens, spec.block_tokens, self._model.width)
        return blocks.transpose(1, 0, 2, 3).tobytes()

    def layer_words(self, tokens: npt.NDArray[np.uint32], layer: Layer, rank: int) -> U64:
        """[positions, width]: what `layer` writes for each token; recurrent: its state after each token."""
        dense = self._sequence(tokens)
        source = dense.states if layer.kind is GroupKind.RECURRENT else dense.kv
        return source[layer.index, rank, : len(tokens)]

    def _sequence(self, tokens: npt.NDArray[np.uint32]) -> _Dense:
        name = tokens.tobytes()
        dense = self._dense.get(name)
        if dense is not None:
            self._dense.move_to_end(name)
            return dense
        dense = _Dense(self._model, len(tokens))
        dense.extend(tokens)
        self._dense[name] = dense
        if len(self._dense) > self._sequences_max:
            self._dense.popitem(last=False)
        return dense

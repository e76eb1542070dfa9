"""The dense reference of the torch model: whole sequences, all ranks, no pages and no batches.

It says which tokens must follow a prompt and what every layer must have written for a position. It shares the model's
weights and formulas per layer with the paged pass, and none of its indexing. Sequences are remembered, the least
recently used are forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvcore.groups import GroupKind
from kvcore.ladder.targets.torch.model import TorchModel
from kvcore.sim.model import Layer

SEQUENCES_MAX = 256


@contextmanager
def one_thread() -> Iterator[None]:
    """For matrices as small as these: torch's threads would spin for each other, on a busy machine for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Sequence:
    """One token sequence and everything each layer has written for it, [layer][rank]: [positions, width]."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self.written: list[list[torch.Tensor]] = [
            [torch.zeros(0, model.width(layer.kind)) for _ in range(model.ranks)] for layer in model.layers
        ]

    def extend(self, tokens: Sequence[int]) -> torch.Tensor:
        """Run these tokens behind those so far; the last one's output."""
        model = self._model
        start = len(self.written[0][0])
        positions = torch.arange(start, start + len(tokens))
        x = model.embed(torch.tensor(list(tokens)), positions)
        for layer in model.layers:
            output = torch.zeros_like(x)
            for rank in range(model.ranks):
                output += model.leave(layer, rank, self._mixed(layer, rank, x, positions))
            x = model.combine(layer, x, output)
        return x[-1:]

    def _mixed(self, layer: Layer, rank: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        model, before = self._model, self.written[layer.index][rank]
        queries, kv = model.project(layer, rank, x)
        if layer.kind is GroupKind.RECURRENT:
            state = before[-1] if len(before) else torch.zeros(kv.shape[1])
            states = model.recur(layer, rank, kv, state)
            self.written[layer.index][rank] = torch.cat([before, states])
            return states
        everything = self.written[layer.index][rank] = torch.cat([before, kv])
        return model.attend(queries, everything, positions, 0, layer.window_tokens)


class DenseReference:
    """Held by whoever compares; one per process."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self._known: OrderedDict[tuple[int, ...], list[list[torch.Tensor]]] = OrderedDict()

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that must follow `prompt`."""
        sequence = _Sequence(self._model)
        generated = self._model.next_tokens(sequence.extend(prompt))
        while len(generated) < count:
            generated += self._model.next_tokens(sequence.extend(generated[-1:]))
        return generated

    def written(self, tokens: Sequence[int], layer: int, rank: int) -> torch.Tensor:
        """[positions, width]: what `layer` writes for each token; recurrent: its state after each token."""
        name = tuple(tokens)
        if name not in self._known:
            sequence = _Sequence(self._model)
            sequence.extend(tokens)
            self._known[name] = sequence.written
            if len(self._known) > SEQUENCES_MAX:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return self._known[name][layer][rank]

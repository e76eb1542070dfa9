"""A worker's paged KV in torch, and its forward pass over it.

`TorchPages` is one buffer per rank, [blocks, floats]; the pages of every group are views into it, so a block that goes
from one group to another loses the first one's bytes. Connectors see the same memory as numpy arrays. A block that
nobody has written is full of NaN, which no later result survives.

`TorchForward` runs one step's entries layer by layer, always reading the context back from the pages.

Who holds: the worker process its pages, for its life. A forward pass belongs to its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from kvcore.connectors.pages import TensorPages
from kvcore.connectors.registration import discover, fingerprints
from kvcore.device.formats import LayoutHints
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.ladder.targets.torch.model import TorchModel
from kvcore.runtime.shared_memory import remove_stale
from kvcore.runtime.worker_pages import SharedPages
from kvcore.service.page_shares import describe
from kvcore.service.shapes import PageSegment
from kvcore.sim.model import Layer


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One request's share of a step, as it travels to the workers: tokens [computed, computed + len(tokens))."""

    request_id: str
    computed: int
    tokens: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]  # per group, the block ids from the first token on
    samples: bool
    # In its first step since it was admitted: the tokens before `computed`, and how many of these were loaded.
    context: tuple[int, ...] = ()
    loaded_tokens: int = 0


class TorchPages:
    """See the module text. One rank's pages. `shared`: they lie in shared memory, which servers can open."""

    def __init__(self, layout: CacheLayout, model: TorchModel, num_blocks: int, *, shared: bool = False) -> None:
        self.num_blocks = num_blocks
        self._layout = layout
        shapes = [_page_shape(layout, model, group) for group in range(len(layout.groups))]
        floats = max(layers * tokens * width for layers, tokens, width in shapes)
        if shared:
            remove_stale()  # of workers that were killed before any server knew them
        self.shared = SharedPages(num_blocks * floats * torch.float32.itemsize) if shared else None
        self.buffer = self._memory(num_blocks, floats).fill_(torch.nan)
        self.groups = [
            self.buffer[:, : layers * tokens * width].view(num_blocks, layers, tokens, width)
            for layers, tokens, width in shapes
        ]
        self.arrays: list[Any] = [pages.numpy() for pages in self.groups]

    def _memory(self, num_blocks: int, floats: int) -> torch.Tensor:
        if self.shared is None:
            return torch.empty((num_blocks, floats))
        return torch.frombuffer(self.shared.buffer, dtype=torch.float32).view(num_blocks, floats)

    def describe(self, _: Any = None) -> PageSegment:
        """Where the pages lie in the shared memory."""
        assert self.shared is not None
        return describe(self.shared.segment, self.shared.buffer, self.arrays)

    def paged(self) -> TensorPages:
        """The layers' tensors as a connector discovers them."""
        return discover([self._tensors(group, spec) for group, spec in enumerate(self._layout.groups)])

    def _tensors(self, group: int, spec: ObjectGroup) -> tuple[Any, LayoutHints]:
        layers = list(self.groups[group].unbind(1))
        if spec.kind is GroupKind.RECURRENT:
            return [[state] for state in layers], LayoutHints(num_blocks=self.num_blocks, recurrent=True)
        return layers, LayoutHints(num_blocks=self.num_blocks, block_tokens=spec.block_tokens)

    def close(self) -> None:
        """The memory itself stays as long as tensors lie in it; its name goes."""
        if self.shared is not None:
            self.shared.close()

    def poison(self, blocks: Sequence[int]) -> None:
        self.buffer[list(blocks)] = torch.nan

    def copy_block(self, source: int, target: int) -> None:
        self.buffer[target] = self.buffer[source]

    def layer(self, layer: Layer) -> torch.Tensor:
        """[blocks, block_tokens, width] of one layer."""
        return self.groups[layer.group][:, layer.slot]


def promised_fingerprints(layout: CacheLayout, model: TorchModel) -> tuple[str, ...]:
    """What the chunks of such pages are, for those who name keys and have no pages."""
    return fingerprints(TorchPages(layout, model, 2).paged())


def _page_shape(layout: CacheLayout, model: TorchModel, group: int) -> tuple[int, int, int]:
    kind = layout.groups[group].kind
    layers = sum(layer.group == group for layer in model.layers)
    tokens = 1 if kind is GroupKind.RECURRENT else layout.groups[group].block_tokens
    return layers, tokens, model.width(kind)


Reduce = Callable[[torch.Tensor], None]
"""Add up a tensor over all ranks, in place."""


class TorchForward:
    """One step of one rank. `layer` in order; `combine` after each."""

    def __init__(
        self,
        entries: Sequence[Entry],
        layout: CacheLayout,
        model: TorchModel,
        pages: TorchPages,
        rank: int,
        reduce: Reduce,
    ) -> None:
        assert entries
        self._entries = entries
        self._layout = layout
        self._model = model
        self._pages = pages
        self._rank = rank
        self._reduce = reduce
        self._positions = [torch.arange(each.computed, each.computed + len(each.tokens)) for each in entries]
        tokens = torch.tensor([token for entry in entries for token in entry.tokens])
        self._x = model.embed(tokens, torch.cat(self._positions))
        self._counts = [len(entry.tokens) for entry in entries]

    def layer(self, index: int) -> None:
        """Write this layer's KV into the pages, read the context back, go on to the next layer's input."""
        layer = self._model.layers[index]
        queries, kv = self._model.project(layer, self._rank, self._x)
        run = self._recurrent if layer.kind is GroupKind.RECURRENT else self._attention
        each = (torch.split(queries, self._counts), torch.split(kv, self._counts))
        parts = zip(self._entries, self._positions, *each, strict=True)
        mixed = torch.cat([run(layer, *part) for part in parts])
        output = self._model.leave(layer, self._rank, mixed)
        self._reduce(output)
        self._x = self._model.combine(layer, self._x, output)

    def sample(self) -> dict[str, int]:
        """The next token of every entry that has computed its last known one."""
        lasts = torch.tensor(self._counts).cumsum(0) - 1
        ending = [position for position, entry in enumerate(self._entries) if entry.samples]
        if not ending:
            return {}
        tokens = self._model.next_tokens(self._x[lasts[ending]])
        return {self._entries[position].request_id: token for position, token in zip(ending, tokens, strict=True)}

    def _attention(
        self, layer: Layer, entry: Entry, positions: torch.Tensor, queries: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        table = torch.tensor(entry.tables[layer.group])
        block_tokens = self._layout.groups[layer.group].block_tokens
        view = self._pages.layer(layer)
        view[table[positions // block_tokens], positions % block_tokens] = kv
        end = entry.computed + len(entry.tokens)
        first = max(0, entry.computed - layer.window_tokens + 1) if layer.window_tokens else 0
        blocks = table[first // block_tokens : -(-end // block_tokens)]
        assert bool((blocks != 0).all()), "a visible position lies in the null block"
        start = first // block_tokens * block_tokens
        context = view[blocks].reshape(-1, view.shape[-1])[first - start : end - start]
        return self._model.attend(queries, context, positions, first, layer.window_tokens)

    def _recurrent(
        self, layer: Layer, entry: Entry, positions: torch.Tensor, queries: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        table = entry.tables[layer.group]
        block_tokens = self._layout.groups[layer.group].block_tokens
        view = self._pages.layer(layer)[:, 0]
        state = view[table[(entry.computed - 1) // block_tokens]] if entry.computed else torch.zeros(view.shape[-1])
        states = self._model.recur(layer, self._rank, inputs, state)
        view[table[int(positions[-1]) // block_tokens]] = states[-1]
        return states

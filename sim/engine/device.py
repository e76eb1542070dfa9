"""The engine's memory and what it asks of a device.

`PagedMemory` holds one buffer per rank, [blocks, page_words]; the pages of every object group are views into it, so a
block that changes from one group to another really loses the first group's bytes. The engine owns it and hands views
to the connector's workers; it lives as long as the views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout, GroupKind
from kvcore.ports import CopyEngine, DeviceEvent
from kvcore.sim.model import U64, WORD_BYTES, FingerprintModel

POISON = np.uint64(0xDEADBEEFDEADBEEF)


class ComputeDevice(CopyEngine, Protocol):
    """A copy engine whose compute stream the engine feeds: FIFO, like every stream."""

    def run_compute(self, fn: Callable[[], None], duration_ns: int = 0) -> DeviceEvent:
        """Queue `fn` behind all compute work so far; the event is done when it has run and `duration_ns` has passed."""
        ...


class PagedMemory:
    """All KV pages of one engine. `groups[rank][g]`: [blocks, layers, block_tokens, width]; recurrent: axis 2 is 1."""

    def __init__(self, layout: CacheLayout, model: FingerprintModel, num_blocks: int) -> None:
        if model.ranks != layout.ranks:
            raise ConfigError(f"the model has {model.ranks} ranks, the layout {layout.ranks}")
        self.num_blocks = num_blocks
        self._layers = model.layers
        self._shapes = [_page_shape(layout, model, group) for group in range(len(layout.groups))]
        self._allocate(layout.ranks)

    def _allocate(self, ranks: int) -> None:
        page_words = max(int(np.prod(shape)) for shape in self._shapes)
        self.buffers: list[U64] = [
            np.full((self.num_blocks, page_words), POISON, dtype=np.uint64) for _ in range(ranks)
        ]
        self.groups: list[list[U64]] = [
            [self._view(buffer, shape) for shape in self._shapes] for buffer in self.buffers
        ]
        # layer_views[rank][layer]: [blocks, block_tokens, width] of one layer
        self.layer_views: list[list[U64]] = [
            [groups[layer.group][:, layer.slot] for layer in self._layers] for groups in self.groups
        ]

    def renew(self) -> None:
        """The engine's processes live again, in other memory: a server may still copy from and to the old one."""
        self._allocate(len(self.buffers))

    def _view(self, buffer: U64, shape: tuple[int, int, int]) -> U64:
        words = int(np.prod(shape))
        view = buffer[:, :words].reshape(self.num_blocks, *shape)
        assert np.shares_memory(view, buffer), "group pages must alias the block buffer"
        return view

    def poison(self, rank: int, blocks: Sequence[int]) -> None:
        self.buffers[rank][list(blocks)] = POISON

    def copy_block(self, rank: int, source: int, target: int) -> None:
        self.buffers[rank][target] = self.buffers[rank][source]


def _page_shape(layout: CacheLayout, model: FingerprintModel, group: int) -> tuple[int, int, int]:
    spec = layout.groups[group]
    layers = sum(layer.group == group for layer in model.layers)
    tokens = 1 if spec.kind is GroupKind.RECURRENT else spec.block_tokens
    if layers * tokens * model.width * WORD_BYTES != spec.bytes_per_block:
        raise ConfigError(f"group {group}: bytes_per_block {spec.bytes_per_block} does not match the model's pages")
    return layers, tokens, model.width

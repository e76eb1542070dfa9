"""A small KV of every layout, made to order: for tests, checks on a device, and readers who want to see the shapes.

`build(name, shape)` gives an engine's tensors filled with bytes that are different everywhere, and the hints that the
engine would give. Every `EngineKVFormat` has at least one example; further ones have strides that no dense tensor has
(padding, views into a fused tensor, all layers inside a block).

Who holds: the caller, the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from kvcore.device.formats import EngineKVFormat, LayoutHints
from kvcore.device.reference import import_torch


@dataclass(frozen=True, slots=True)
class Shape:
    """`dtype`: a torch dtype's name."""

    layers: int = 3
    blocks: int = 7
    tokens: int = 16
    heads: int = 4
    size: int = 8
    dtype: str = "bfloat16"
    device: str = "cpu"

    def hints(self, **more: Any) -> LayoutHints:
        return replace(LayoutHints(None, self.layers, self.blocks, self.tokens, self.heads, self.size), **more)


@dataclass(frozen=True, slots=True)
class Example:
    """`format` as it must be discovered; `kv` as an engine would hand it over."""

    kv: Any
    hints: LayoutHints
    format: EngineKVFormat


def build(name: str, shape: Shape) -> Example:
    """One of EXAMPLES."""
    return EXAMPLES[name](shape)


def _filled(shape: Shape, *sizes: int, dtype: str = "", salt: int = 0) -> Any:
    """A dense tensor whose bytes count up in a scrambled way."""
    torch = import_torch()
    kind = getattr(torch, dtype or shape.dtype)
    itemsize = torch.empty(0, dtype=kind).element_size()
    count = torch.arange(prod(sizes) * itemsize, dtype=torch.int64) * 2654435761 + salt * 97
    return ((count >> 13) % 251).to(torch.uint8).view(kind).view(*sizes).to(shape.device)


def _sizes(format: EngineKVFormat, shape: Shape) -> list[int]:
    known = {
        "L": shape.layers,
        "2": 2,
        "NB": shape.blocks,
        "BS": shape.tokens,
        "NH": shape.heads,
        "HS": shape.size,
        "2HS": 2 * shape.size,
        "NB*BS": shape.blocks * shape.tokens,
    }
    return [known[axis] for axis in format.axes]


def _dense(format: EngineKVFormat) -> Callable[[Shape], Example]:
    """Dense tensors, nested as the format says."""

    def make(shape: Shape) -> Example:
        sizes = _sizes(format, shape)
        count = {"cross": 1, "layers": shape.layers}.get(format.container, 2 * shape.layers)
        tensors = [_filled(shape, *sizes, salt=salt) for salt in range(count)]
        nested: dict[str, Any] = {
            "cross": tensors[0],
            "layers": tensors,
            "pairs": list(zip(tensors[::2], tensors[1::2], strict=False)),
            "lists": [tensors[::2], tensors[1::2]],
        }
        return Example(nested[format.container], shape.hints(format=format), format)

    return make


def _opaque(shape: Shape) -> Example:
    """As vLLM on CPU has it: the shape reads K|V in the last dimension, the block's two halves are K and V."""
    tensors = [
        _filled(shape, shape.blocks, shape.heads, shape.tokens, 2 * shape.size, salt=i) for i in range(shape.layers)
    ]
    return Example(tensors, shape.hints(opaque="halves"), EngineKVFormat.LAYERS_OPAQUE)


def _states(shape: Shape) -> Example:
    """A convolution and a recurrence state per layer, padded to one page each, side by side in one buffer."""
    torch = import_torch()
    kind = getattr(torch, shape.dtype)
    itemsize = torch.empty(0, dtype=kind).element_size()
    conv, ssm = shape.size * 3, shape.heads * shape.size
    page = -(-(conv * itemsize + ssm * 4) // 8) * 8 + 64
    rows = []
    for layer in range(shape.layers):
        raw = _filled(shape, shape.blocks * page, dtype="uint8", salt=layer)
        first = raw.view(kind).as_strided((shape.blocks, 3, shape.size), (page // itemsize, shape.size, 1))
        at = -(-conv * itemsize // 4)
        second = raw.view(torch.float32).as_strided(
            (shape.blocks, shape.heads, shape.size), (page // 4, shape.size, 1), at
        )
        rows.append([first, second])
    hints = LayoutHints(num_layers=shape.layers, num_blocks=shape.blocks, block_tokens=shape.tokens, recurrent=True)
    return Example(rows, hints, EngineKVFormat.STATES)


def _heads_first_shape(shape: Shape) -> Example:
    """As vLLM has it: the shape reads [NB, NH, BS, 2HS], memory is token-major."""
    memory = [
        _filled(shape, shape.blocks, shape.tokens, shape.heads, 2 * shape.size, salt=i) for i in range(shape.layers)
    ]
    kv = [tensor.transpose(1, 2) for tensor in memory]
    return Example(kv, shape.hints(format=EngineKVFormat.LAYERS_FUSED_HND), EngineKVFormat.LAYERS_FUSED_NHD)


def _layers_inside_a_block(shape: Shape) -> Example:
    """vLLM's block-outermost order: all layers of a block lie side by side."""
    memory = _filled(shape, shape.blocks, shape.layers, shape.heads, shape.tokens, 2 * shape.size)
    kv = {f"layer{index}": memory[:, index] for index in range(shape.layers)}
    return Example(kv, shape.hints(format=EngineKVFormat.LAYERS_FUSED_HND), EngineKVFormat.LAYERS_FUSED_HND)


def _heads_outside_blocks(shape: Shape) -> Example:
    """vLLM's LHBNC: one head spans all blocks before the next begins."""
    memory = [
        _filled(shape, shape.heads, shape.blocks, shape.tokens, 2 * shape.size, salt=i) for i in range(shape.layers)
    ]
    kv = [tensor.transpose(0, 1) for tensor in memory]
    return Example(kv, shape.hints(format=EngineKVFormat.LAYERS_FUSED_HND), EngineKVFormat.LAYERS_FUSED_HND)


def _sliced_from_fused(shape: Shape) -> Example:
    """K and V as views into one fused tensor: the heads of a token are not dense."""
    fused = [
        _filled(shape, shape.blocks, shape.tokens, shape.heads, 2 * shape.size, salt=i) for i in range(shape.layers)
    ]
    kv = [(tensor[..., : shape.size], tensor[..., shape.size :]) for tensor in fused]
    return Example(kv, shape.hints(format=EngineKVFormat.PAIRS_NHD), EngineKVFormat.PAIRS_NHD)


def _padded_blocks(shape: Shape) -> Example:
    """Blocks with a gap behind each."""
    wide = [_filled(shape, shape.blocks, shape.tokens + 1, shape.size, salt=i) for i in range(shape.layers)]
    kv = [tensor[:, : shape.tokens] for tensor in wide]
    return Example(kv, shape.hints(format=EngineKVFormat.LAYERS_LATENT), EngineKVFormat.LAYERS_LATENT)


EXAMPLES: Mapping[str, Callable[[Shape], Example]] = {
    **{each.name: _dense(each) for each in EngineKVFormat if not each.is_opaque},
    EngineKVFormat.LAYERS_OPAQUE.name: _opaque,
    EngineKVFormat.STATES.name: _states,
    "heads first in shape, tokens first in memory": _heads_first_shape,
    "all layers inside a block": _layers_inside_a_block,
    "heads outside blocks": _heads_outside_blocks,
    "K and V sliced from a fused tensor": _sliced_from_fused,
    "padded blocks": _padded_blocks,
}

"""`normalize_kv_and_discover_format`: from an engine's tensors to their layout, normalised parts and planes.

Theory of operation
-------------------
1. *Nesting*. One tensor is cross-layer; a list of tensors is one per layer; a list of lists may be (K, V) per layer,
   all K then all V, or states per layer. Two layers of two tensors can be read both ways.
2. *Readings*. Every format whose container fits is laid over the shapes; what contradicts itself (a K/V axis that is
   not 2, an odd fused dimension) or a hint is struck out. Opaque blocks and recurrent states are never guessed: only
   their hints bring them in, and then nothing else is read.
3. Exactly one reading must be left. None: the error says what spoke against each. Several: the error lists them and
   names the hint that decides. A wrong guess here is silent corruption later, so there is no preference order.
4. *Normalising*. A shape says what the axes mean, strides say where they lie. Every part becomes a view
   [blocks, inner axes in chunk order]: token-major where the heads of a token are dense, else head-major. The format
   that is reported is the one in memory (tensors that read heads first and lie tokens first are NHD).
5. Each part's strides give its plane. What three levels of strides do not describe is refused.

Rejected: guessing by engine name and version (it says nothing about the backend that was chosen); forcing tensors
contiguous (a copy, and the engine's memory would no longer be the one we write).

Who holds: `PagedKV` keeps the engine's tensors referenced as long as anybody uses its planes. Nobody frees here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kvcore.device.formats import COUNTS, Container, EngineKVFormat, KVLayout, LayoutHints
from kvcore.device.planes import KVPlanes, Plane, plane_of
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    import torch

    Tensor: TypeAlias = torch.Tensor
    Layers: TypeAlias = tuple[tuple[torch.Tensor, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """One group of layers as discovered.

    `layers[l][p]`: part p of layer l, a view [blocks, inner axes in chunk order] of the engine's own memory.
    `token_axis` is the axis of tokens in these views; None where blocks are opaque.
    """

    layout: KVLayout
    layers: Layers
    token_axis: int | None
    planes: KVPlanes

    @property
    def format(self) -> EngineKVFormat:
        return self.layout.format

    @property
    def parts(self) -> Iterator[Tensor]:
        """In the order of the planes: by layer, K before V."""
        return (part for layer in self.layers for part in layer)

    @property
    def device(self) -> torch.device:
        return self.layers[0][0].device

    def planes_of_layer(self, layer: int, blocks_per_chunk: int) -> tuple[KVPlanes, int]:
        """The planes of one layer and where their bytes begin in a chunk."""
        parts = len(self.layout.parts)
        return self.planes.part(layer * parts, (layer + 1) * parts, blocks_per_chunk)


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """One format laid over the shapes."""

    format: EngineKVFormat
    tensors: Layers
    num_layers: int
    num_blocks: int
    block_tokens: int
    num_heads: int
    head_size: int

    def __str__(self) -> str:
        counts = ", ".join(f"{name}={getattr(self, name)}" for name in COUNTS)
        return f"{self.format} ({counts})"


def normalize_kv_and_discover_format(kv_caches: Any, hints: LayoutHints | None = None) -> PagedKV:
    """`kv_caches`: tensors nested as the engine has them (a mapping counts as the list of its values).

    Raises ConfigError if they fit no known format, or more than one.
    """
    reading = _only_reading(kv_caches, hints or LayoutHints())
    return _normalised(reading, hints.opaque if hints else "")


# --- nesting -------------------------------------------------------------------------------------------------------


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr") and hasattr(value, "stride")


def _nestings(kv_caches: Any) -> list[tuple[Container, Layers]]:
    """Every container that the nesting may be, with one tuple of tensors per layer (cross-layer: one in all)."""
    if _is_tensor(kv_caches):
        return [("cross", ((kv_caches,),))]
    values = list(kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches)
    if values and all(map(_is_tensor, values)):
        return [("layers", tuple((tensor,) for tensor in values))]
    if not values or not all(_is_row(value) for value in values):
        raise ConfigError("KV caches are a tensor, a list of tensors or a list of lists of tensors, none empty")
    return _nestings_of_rows([tuple(row) for row in values])


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(map(_is_tensor, value))


def _nestings_of_rows(rows: list[tuple[Tensor, ...]]) -> list[tuple[Container, Layers]]:
    found: list[tuple[Container, Layers]] = [("states", tuple(rows))]
    if all(len(row) == 2 for row in rows):
        found.append(("pairs", tuple(rows)))
    if len(rows) == 2 and len(rows[0]) == len(rows[1]):
        found.append(("lists", tuple(zip(*rows, strict=True))))
    return found


# --- readings ------------------------------------------------------------------------------------------------------


class _Against(Exception):
    """What speaks against a reading."""


def _only_reading(kv_caches: Any, hints: LayoutHints) -> _Reading:
    nestings = _nestings(kv_caches)
    readings, against = [], []
    for container, layers in nestings:
        for format in _formats(container, hints):
            try:
                readings.append(_read(format, layers, hints))
            except _Against as reason:
                against.append(f"{format}: {reason}")
    if len(readings) != 1:
        shapes = sorted({str(tuple(tensor.shape)) for row in nestings[0][1] for tensor in row})
        raise ConfigError(_refusal(readings, against, f"KV tensors of shape {' and '.join(shapes)}"))
    return readings[0]


def _formats(container: Container, hints: LayoutHints) -> list[EngineKVFormat]:
    if hints.format is not None:
        wanted = [hints.format]
    elif hints.opaque:
        wanted = [EngineKVFormat.LAYERS_OPAQUE]
    elif hints.recurrent:
        wanted = [EngineKVFormat.STATES]
    else:
        wanted = [each for each in EngineKVFormat if not each.is_opaque]
    return [each for each in wanted if each.container == container]


def _refusal(readings: Sequence[_Reading], against: Sequence[str], what: str) -> str:
    if not readings:
        reasons = "; ".join(against) or "no format is nested like this"
        return (
            f"{what} fit no known layout: {reasons}. Recurrent states need the hint recurrent=True, blocks with an "
            "inner order of the engine's own the hint opaque='<name of that order>'"
        )
    deciding = [name for name in COUNTS if len({getattr(each, name) for each in readings}) == len(readings)]
    names = " or ".join([*deciding, "format"])
    ways = "; ".join(map(str, readings))
    return f"{what} can be read in {len(readings)} ways: {ways}. The hint {names} decides"


def _read(format: EngineKVFormat, layers: Layers, hints: LayoutHints) -> _Reading:
    """Lay `format` over the shapes; raises _Against."""
    _check_alike(layers, states=format is EngineKVFormat.STATES)
    sizes = _sizes(format, layers, hints)
    for name, found in sizes.items():
        hinted = getattr(hints, name)
        if hinted not in (None, found) and not (format.is_mla and name == "num_heads"):
            raise _Against(f"{name} would be {found}, not {hinted}")
    return _Reading(format, layers, *(sizes[name] for name in COUNTS))


def _check_alike(layers: Layers, states: bool) -> None:
    """States differ inside a layer (convolution, recurrence), but not from layer to layer."""
    kinds = [tuple((tuple(tensor.shape), tensor.dtype) for tensor in row) for row in layers]
    devices = {str(tensor.device) for row in layers for tensor in row}
    if len(set(kinds)) > 1 or (not states and len(set(kinds[0])) > 1):
        raise _Against("the tensors differ in shape or dtype; layers of another kind are a group of their own")
    if len(devices) > 1:
        raise _Against(f"the tensors lie on several devices, {sorted(devices)}")


def _sizes(format: EngineKVFormat, layers: Layers, hints: LayoutHints) -> dict[str, int]:
    shape = tuple(layers[0][0].shape)
    if format.is_opaque:
        return _opaque_sizes(layers, hints)
    if len(shape) != len(format.axes):
        raise _Against(f"{len(shape)} axes instead of {len(format.axes)}")
    size = dict(zip(format.axes, shape, strict=True))
    if size.get("2", 2) != 2:
        raise _Against(f"the K/V axis would be of size {size['2']}")
    if size.get("2HS", 0) % 2:
        raise _Against(f"K and V cannot share a last dimension of {size['2HS']}")
    if "NB*BS" in size:
        size["NB"], size["BS"] = _split_pool(size["NB*BS"], hints.block_tokens)
    if not all(shape):
        raise _Against("an axis is empty")
    return {
        "num_layers": size.get("L", len(layers)),
        "num_blocks": size["NB"],
        "block_tokens": size["BS"],
        "num_heads": size.get("NH", 1),
        "head_size": size["HS"] if "HS" in size else size["2HS"] // 2,
    }


def _split_pool(slots: int, block_tokens: int | None) -> tuple[int, int]:
    if block_tokens is None:
        raise _Against("a pool of token slots needs the hint block_tokens")
    if slots % block_tokens:
        raise _Against(f"a pool of {slots} token slots is no whole number of blocks of {block_tokens}")
    return slots // block_tokens, block_tokens


def _opaque_sizes(layers: Layers, hints: LayoutHints) -> dict[str, int]:
    blocks = {tensor.shape[0] if tensor.dim() else 0 for row in layers for tensor in row}
    if len(blocks) > 1 or min(tensor.numel() for row in layers for tensor in row) == 0:
        raise _Against(f"the tensors hold {sorted(blocks)} blocks")
    if hints.block_tokens is None and not hints.recurrent:
        raise _Against("opaque blocks need the hint block_tokens")
    return {
        "num_layers": len(layers),
        "num_blocks": blocks.pop(),
        "block_tokens": hints.block_tokens or 1,
        "num_heads": hints.num_heads or 1,
        "head_size": hints.head_size or 0,
    }


# --- normalising ---------------------------------------------------------------------------------------------------


def _normalised(reading: _Reading, opaque: str) -> PagedKV:
    rows = [tuple(_parts(reading, row, index)) for index, row in _each_layer(reading)]
    axes, token_axis = _chunk_axes(reading, rows)
    views = tuple(tuple(part.permute(0, *axes) for part, axes in zip(row, axes, strict=True)) for row in rows)
    parts = tuple(_plane(view, token_axis) for row in views for view in row)
    planes = KVPlanes(parts, reading.num_blocks, reading.block_tokens)
    return PagedKV(_layout(reading, rows[0], views[0], axes, planes.block_bytes, opaque), views, token_axis, planes)


def _each_layer(reading: _Reading) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    if reading.format.is_cross_layer:
        return ((index, reading.tensors[0]) for index in range(reading.num_layers))
    return enumerate(reading.tensors)


def _parts(reading: _Reading, row: tuple[Tensor, ...], layer: int) -> Iterator[Tensor]:
    """The parts of one layer with the axes that are left: blocks, tokens, heads, size in the order of the shape."""
    axes = list(reading.format.axes)
    for tensor in row:
        view, left = tensor, list(axes)
        if "L" in left:
            view = view.select(left.index("L"), layer)
            left.remove("L")
        if "NB*BS" in left:
            view = view.view(reading.num_blocks, reading.block_tokens, *view.shape[1:])
        yield from (view.select(left.index("2"), part) for part in range(2)) if "2" in left else (view,)


def _inner_axes(format: EngineKVFormat) -> list[str]:
    """Axes of a part, behind the blocks."""
    if format is EngineKVFormat.LISTS_POOL:
        return ["BS", "NH", "HS"]
    return [axis for axis in format.axes if axis not in ("L", "2", "NB")]


def _chunk_axes(
    reading: _Reading, rows: Sequence[tuple[Tensor, ...]]
) -> tuple[tuple[tuple[int, ...], ...], int | None]:
    """For each part of a layer the axes of its tensor in chunk order, and where the tokens then are."""
    inner = _inner_axes(reading.format)
    order = _axes_by_stride if reading.format.is_opaque else lambda part: _axes_by_meaning(part, inner)
    orders = {tuple(map(order, row)) for row in rows}
    if len(orders) > 1 or (not reading.format.is_opaque and len(set(next(iter(orders)))) > 1):
        raise ConfigError(f"{reading.format}: layers, or K and V, lie in different orders")
    (axes,) = orders
    return axes, None if reading.format.is_opaque else 1 + axes[0].index(1 + inner.index("BS"))


def _axes_by_meaning(part: Tensor, inner: list[str]) -> tuple[int, ...]:
    """Tokens, heads, size where the heads of a token are dense; else heads, tokens, size."""
    if "NH" not in inner:
        return tuple(range(1, part.dim()))
    heads, tokens, size = (1 + inner.index(axis) for axis in ("NH", "BS", inner[-1]))
    dense = part.shape[heads] == 1 or part.stride(heads) == part.shape[size] * part.stride(size)
    return (tokens, heads, size) if dense else (heads, tokens, size)


def _axes_by_stride(part: Tensor) -> tuple[int, ...]:
    """The order of memory: an opaque block has no other."""
    return tuple(sorted(range(1, part.dim()), key=lambda axis: -part.stride()[axis] if part.shape[axis] > 1 else 0))


def _layout(
    reading: _Reading,
    row: Sequence[Tensor],
    views: Sequence[Tensor],
    axes: Sequence[Sequence[int]],
    block_bytes: int,
    opaque: str,
) -> KVLayout:
    names = tuple(f"state{index}" for index in range(len(row)))
    return KVLayout(
        _format_in_memory(reading, row[0]),
        reading.num_layers,
        reading.num_blocks,
        reading.block_tokens,
        reading.num_heads,
        reading.head_size,
        tuple(str(view.dtype).removeprefix("torch.") for view in views),
        names if reading.format is EngineKVFormat.STATES else reading.format.kv_parts,
        tuple(_inner_text(reading.format, part, order) for part, order in zip(row, axes, strict=True)),
        block_bytes // reading.num_layers,
        opaque,
    )


def _inner_text(format: EngineKVFormat, part: Tensor, order: Sequence[int]) -> str:
    inner = _inner_axes(format)
    names = [f"axis{axis}" for axis in range(part.dim())] if format.is_opaque else ["NB", *inner]
    return " ".join(
        f"{names[axis]}={part.shape[axis]}" for axis in order if part.shape[axis] > 1 or names[axis] == "BS"
    )


def _format_in_memory(reading: _Reading, part: Tensor) -> EngineKVFormat:
    inner, format = _inner_axes(reading.format), reading.format
    if "NH" not in inner or reading.num_heads == 1 or reading.block_tokens == 1:
        return format
    heads, tokens = (part.stride(1 + inner.index(axis)) for axis in ("NH", "BS"))
    return format if format.is_hnd == (heads > tokens) else format.other_order()


def _plane(view: Tensor, token_axis: int | None) -> Plane:
    itemsize = view.element_size()
    sizes, strides = view.shape[1:], view.stride()[1:]
    axes = [(size, stride * itemsize) for size, stride in zip(sizes, strides, strict=True)]
    inner_token = None if token_axis is None else token_axis - 1
    try:
        plane = plane_of(view.data_ptr(), view.stride(0) * itemsize, axes, itemsize, inner_token)
    except ConfigError as error:
        raise ConfigError(f"a KV tensor of shape {tuple(view.shape)}, strides {view.stride()}: {error}") from error
    assert plane.share_bytes * view.shape[0] == view.numel() * itemsize, "a plane that forgets bytes"
    return plane

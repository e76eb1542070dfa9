"""Layouts of paged KV by name, and the questions that everyone else may ask about one.

Theory of operation
-------------------
`EngineKVFormat` names how an engine's tensors are nested and what their axes mean:

    NB blocks   BS tokens of a block   NH heads   HS head size   L layers   2 the K/V axis   2HS K and V side by side

A format is its container (how tensors are nested) and the axes of one tensor. Containers:

    layers   one tensor per layer                     pairs    per layer a tuple (K, V)
    cross    one tensor for all layers                lists    all K, then all V
    states   per layer a list of state tensors

Two formats have no token axis. OPAQUE blocks are copied whole because their inside is the engine's own affair (vLLM on
CPU shapes a block like K|V side by side, while its kernel fills one half with K and the other with V). STATES are
pages of recurrent state.

The names say the order in *memory*: a tensor whose shape reads heads first and whose strides run tokens first is NHD.

`LayoutHints` is what the engine's configuration knows besides the tensors. `KVLayout` is what was found: plain numbers,
no tensors, safe to keep, compare and send.

Nothing is held or freed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import Literal, TypeAlias

from kvcore.errors import ConfigError

Container: TypeAlias = Literal["layers", "cross", "pairs", "lists", "states"]


@unique
class EngineKVFormat(Enum):
    """(container, axes of one tensor)."""

    LAYERS_KV_BLOCKS_NHD = ("layers", "2 NB BS NH HS")
    LAYERS_KV_BLOCKS_HND = ("layers", "2 NB NH BS HS")
    LAYERS_BLOCKS_KV_NHD = ("layers", "NB 2 BS NH HS")
    LAYERS_BLOCKS_KV_HND = ("layers", "NB 2 NH BS HS")
    LAYERS_FUSED_NHD = ("layers", "NB BS NH 2HS")
    LAYERS_FUSED_HND = ("layers", "NB NH BS 2HS")
    LAYERS_LATENT = ("layers", "NB BS HS")
    LAYERS_OPAQUE = ("layers", "NB *")
    PAIRS_NHD = ("pairs", "NB BS NH HS")
    PAIRS_HND = ("pairs", "NB NH BS HS")
    LISTS_NHD = ("lists", "NB BS NH HS")
    LISTS_HND = ("lists", "NB NH BS HS")
    LISTS_POOL = ("lists", "NB*BS NH HS")
    CROSS_KV_BLOCKS_NHD = ("cross", "L 2 NB BS NH HS")
    CROSS_KV_BLOCKS_HND = ("cross", "L 2 NB NH BS HS")
    CROSS_BLOCKS_KV_NHD = ("cross", "L NB 2 BS NH HS")
    CROSS_BLOCKS_KV_HND = ("cross", "L NB 2 NH BS HS")
    CROSS_BLOCKS_FIRST_KV_NHD = ("cross", "NB L 2 BS NH HS")
    CROSS_BLOCKS_FIRST_KV_HND = ("cross", "NB L 2 NH BS HS")
    CROSS_FUSED_NHD = ("cross", "L NB BS NH 2HS")
    CROSS_FUSED_HND = ("cross", "L NB NH BS 2HS")
    CROSS_BLOCKS_FIRST_FUSED_NHD = ("cross", "NB L BS NH 2HS")
    CROSS_BLOCKS_FIRST_FUSED_HND = ("cross", "NB L NH BS 2HS")
    CROSS_LATENT = ("cross", "L NB BS HS")
    CROSS_BLOCKS_FIRST_LATENT = ("cross", "NB L BS HS")
    STATES = ("states", "NB *")

    @property
    def container(self) -> Container:
        container: Container = self.value[0]
        return container

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.value[1].split())

    @property
    def is_opaque(self) -> bool:
        """Blocks have no token axis: they are copied whole."""
        return "*" in self.axes

    @property
    def is_mla(self) -> bool:
        """One latent per token, no heads and no separate K and V."""
        return "NH" not in self.axes and not self.is_opaque

    @property
    def is_fused(self) -> bool:
        """K and V side by side in the last dimension."""
        return "2HS" in self.axes

    @property
    def is_hnd(self) -> bool:
        """Heads before tokens in memory."""
        axes = self.axes
        return "NH" in axes and "BS" in axes and axes.index("NH") < axes.index("BS")

    @property
    def is_cross_layer(self) -> bool:
        return self.container == "cross"

    @property
    def kv_parts(self) -> tuple[str, ...]:
        """Names of the parts of one layer, in chunk order; states are counted by their layout."""
        if "2" in self.axes or self.container in ("pairs", "lists"):
            return ("k", "v")
        return ("kv",) if self.is_fused else ("latent",) if self.is_mla else ("block",)

    def other_order(self) -> EngineKVFormat:
        """The same container with heads and tokens exchanged; itself where there are none to exchange."""
        exchanged = {"NH": "BS", "BS": "NH"}
        axes = " ".join(exchanged.get(axis, axis) for axis in self.axes)
        known = {each.value: each for each in EngineKVFormat}
        return known.get((self.container, axes), self)

    def __str__(self) -> str:
        shape = ", ".join(self.axes)
        nested = {"layers": "L x [{}]", "cross": "[{}]", "pairs": "L x (K, V) x [{}]", "lists": "(K, V) x L x [{}]"}
        return f"{self.name} {nested.get(self.container, 'L x states x [{}]').format(shape)}"


@dataclass(frozen=True, slots=True)
class LayoutHints:
    """What the engine's configuration knows. None: not known, the shapes must say.

    `format`: how the shapes read; it decides everything that shapes leave open.
    `opaque`: a name for the engine's own order inside a block; blocks are then copied whole.
    `recurrent`: these are pages of recurrent state.
    """

    format: EngineKVFormat | None = None
    num_layers: int | None = None
    num_blocks: int | None = None
    block_tokens: int | None = None
    num_heads: int | None = None
    head_size: int | None = None
    recurrent: bool = False
    opaque: str = ""

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"the hint {name} must be a whole number of at least 1, not {value!r}")
        if self.opaque and self.recurrent:
            raise ConfigError("opaque blocks or recurrent states, not both")


COUNTS = ("num_layers", "num_blocks", "block_tokens", "num_heads", "head_size")
"""Hints that are counts and may decide between two readings of one shape."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One group's layout as it was found. Without heads `num_heads` is 1; opaque blocks may have `head_size` 0.

    Per part of a layer: its name, dtype, and the axes inside a block in chunk order, e.g. "BS=16 NH=8 HS=128".
    """

    format: EngineKVFormat
    num_layers: int
    num_blocks: int
    block_tokens: int
    num_heads: int
    head_size: int
    dtypes: tuple[str, ...]
    parts: tuple[str, ...]
    inner: tuple[str, ...]
    layer_block_bytes: int
    opaque: str = ""

    def __post_init__(self) -> None:
        assert len(self.dtypes) == len(self.parts)
        assert len(self.inner) == len(self.parts)
        assert self.layer_block_bytes > 0
        assert self.num_layers > 0

    @property
    def is_mla(self) -> bool:
        return self.format.is_mla

    @property
    def is_hnd(self) -> bool:
        return self.format.is_hnd

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self.num_layers * self.layer_block_bytes

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """Raises ConfigError unless a chunk is a whole number of blocks."""
        blocks, rest = divmod(chunk_tokens, self.block_tokens)
        if rest or not blocks:
            raise ConfigError(f"a chunk of {chunk_tokens} tokens is no whole number of blocks of {self.block_tokens}")
        return blocks * self.block_bytes

    def __str__(self) -> str:
        size = f"{self.num_layers} layers, {self.num_blocks} blocks of {self.block_tokens} tokens"
        return f"{self.format}: {size}, {self.num_heads} heads of {self.head_size}, {'/'.join(self.dtypes)}"

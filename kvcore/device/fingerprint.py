"""The layout fingerprint: what the bytes of a chunk mean, as text for the namespace.

Two engines may share chunks exactly when a chunk of the one is, byte for byte, what the other would have written. That
depends on the order of bytes *in the chunk*, not on where the engine keeps its blocks: [2, NB, ...] and [NB, 2, ...],
tuples and one cross-layer tensor give equal chunks and equal fingerprints, token-major and head-major do not.

In it: the order of a chunk, layers, block tokens, heads, head size, and for each part its name, dtype and inner axes in
chunk order. Not in it: addresses, strides, the number of blocks. Of opaque blocks only the size and the name of their
inner order are in; their dtype is the namespace's `kv_dtype`.

Nothing is held or freed here.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from kvcore.device.formats import KVLayout
from kvcore.keys import digest_fields

ChunkOrder: TypeAlias = Literal["planes", "blocks"]
"""planes: see `planes.py`. blocks: block after block, inside each layer after layer (copies of whole pages)."""


def layout_fingerprint(layout: KVLayout, order: ChunkOrder = "planes") -> str:
    """32 hexadecimal digits."""
    fields: dict[str, str | int] = {
        "order": order,
        "layers": layout.num_layers,
        "layer_block_bytes": layout.layer_block_bytes,
        "block_tokens": layout.block_tokens,
        "heads": layout.num_heads,
        "head_size": layout.head_size,
        "opaque": layout.opaque,
    }
    parts = zip(layout.parts, layout.dtypes, layout.inner, strict=True)
    for index, (name, dtype, inner) in enumerate(parts):
        fields[f"part{index}"] = name if layout.opaque else f"{name} {dtype} {inner}"
    return digest_fields("kv layout", fields).hex()[:32]

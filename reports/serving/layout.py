"""A model's cache as the core sees it: groups, rows, cell sizes, and the keys of a trace's blocks.

A replica's ranks hold and lose their cells together, so one row stands for the rows of all ranks and its cells have the
bytes of all of them (replicated heads and latent rows counted as often as they exist). Groups: layers with full
attention, with a window, recurrent ones, as far as the model has them. A chunk is a block of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ObjectKey, object_keys
from kvcore.reports.host import Host
from kvcore.reports.model import Model
from kvcore.reports.traces.trace import Request, Trace

HASH_BYTES = 8


def layout_of(model: Model, host: Host, chunk_tokens: int) -> CacheLayout:
    """Rows for the kinds of layers that the model has."""
    per_layer = model.layer_bytes_per_token() * chunk_tokens * model.shard_copies(host.gpus)
    groups = []
    if model.layers_full:
        groups.append(ObjectGroup(GroupKind.FULL, chunk_tokens, round(model.layers_full * per_layer)))
    if model.layers_window:
        size = round(model.layers_window * per_layer)
        groups.append(ObjectGroup(GroupKind.WINDOW, chunk_tokens, size, model.window_tokens))
    if model.layers_recurrent:
        groups.append(ObjectGroup(GroupKind.RECURRENT, chunk_tokens, round(model.state_bytes * host.gpus)))
    return CacheLayout(tuple(groups), 1, chunk_tokens)


class TraceKeys:
    """Object keys of a trace's blocks, one per block and row, made once."""

    def __init__(self, trace: Trace, layout: CacheLayout, model_name: str) -> None:
        ids = list(dict.fromkeys(block for request in trace.requests for block in request.blocks))
        hashes = [block.to_bytes(HASH_BYTES, "little") for block in ids]
        self.chunk_tokens = layout.chunk_tokens
        self._rows: list[dict[int, ObjectKey]] = [
            dict(zip(ids, object_keys(hashes, model_name, row.rank, row.group))) for row in layout.rows
        ]

    def of(self, request: Request) -> list[Sequence[ObjectKey]]:
        """Per row the keys of the prompt's whole chunks; a partial one at the end has none."""
        blocks = request.blocks[: request.input_tokens // self.chunk_tokens]
        return [list(map(row.__getitem__, blocks)) for row in self._rows]

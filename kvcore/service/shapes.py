"""What the two sides of a connection describe to each other: identity, limits, where a worker's pages lie. Pure values.

They travel inside messages (`protocol.py`) and are hostile until checked: `Identity` by comparison with one's own,
`PageSegment` by `page_map.py`.

Who holds, announces, frees: values; nobody frees anything because of one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class GroupShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `ObjectGroup` as it travels."""

    kind: str
    block_tokens: int
    bytes_per_block: int
    window_tokens: int | None


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both sides must agree on before a single hash is exchanged.

    It describes the whole layout, so a server that was started without one can take it from its first client.
    """

    hash_mode: str
    hash_version: int
    chunk_tokens: int
    model_name: Annotated[str, msgspec.Meta(max_length=4096)]
    namespace_digest: bytes
    layout_fingerprint: str
    ranks: int
    groups: Annotated[tuple[GroupShape, ...], msgspec.Meta(max_length=256)]
    placement_mode: str
    servers: int

    def difference(self, other: Identity) -> str:
        """The first field in which `other` differs, with both values; "" when they agree."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: the server has {_readable(ours)}, the client has {_readable(theirs)}"
        return ""


def _readable(value: object) -> str:
    return (value.hex() if isinstance(value, bytes) else repr(value))[:200]


class PageGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Block b of the group: the bytes [offset + b * stride_bytes, ... + block_bytes) of the segment. Groups overlap
    where the engine gives one piece of memory to either."""

    offset: Count
    blocks: Count
    stride_bytes: Count
    block_bytes: Count


class PageSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's paged KV in shared memory. Nothing in it is believed before it is checked."""

    segment: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    size: Count
    groups: Annotated[tuple[PageGroup, ...], msgspec.Meta(max_length=256)]


class ServerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one peer may ask of a server. Over a limit: an error reply, nothing done."""

    frame_bytes_max: int = 8 << 20
    batch_cells_max: int = 8192
    chunks_per_session_max: int = 65_536
    hash_bytes_max: int = 64
    name_chars_max: int = 256  # session, worker and tag names
    salt_chars_max: int = 256
    sessions_max: int = 65_536
    workers_max: int = 1024
    open_per_worker_max: int = 65_536  # stores plus reads that are open at the same time
    connections_max: int = 4096
    lookup_timeout_ms_max: int = 600_000
    worker_silence_ns: int = 30_000_000_000  # who has something open and says nothing for so long is reaped

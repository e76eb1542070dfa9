"""What a client and a server must agree on, taken from their configuration. Pure."""

from __future__ import annotations

from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import HASH_VERSION, Namespace
from kvcore.placement import Placement
from kvcore.service.shapes import GroupShape, Identity


def identity_of(namespace: Namespace, layout: CacheLayout, placement: Placement) -> Identity:
    """The identity both sides compare in the handshake; refuses a namespace and a layout of different chunk sizes."""
    if namespace.chunk_tokens != layout.chunk_tokens:
        raise ConfigError(
            f"the namespace has chunks of {namespace.chunk_tokens} tokens, the layout of {layout.chunk_tokens}"
        )
    return Identity(
        hash_mode=namespace.hash_mode,
        hash_version=HASH_VERSION,
        chunk_tokens=layout.chunk_tokens,
        model_name=namespace.model_name,
        namespace_digest=namespace.digest,
        layout_fingerprint=layout.fingerprint,
        ranks=layout.ranks,
        groups=tuple(
            GroupShape(group.kind.value, group.block_tokens, group.bytes_per_block, group.window_tokens)
            for group in layout.groups
        ),
        placement_mode=placement.mode,
        servers=placement.servers,
    )


def layout_of(identity: Identity) -> CacheLayout:
    """The layout that a peer describes. Raises `ConfigError` when it is none, or not the one its fingerprint names."""
    groups = []
    for shape in identity.groups:
        try:
            kind = GroupKind(shape.kind)
        except ValueError:
            raise ConfigError(f"{shape.kind!r} is no kind of group") from None
        groups.append(ObjectGroup(kind, shape.block_tokens, shape.bytes_per_block, shape.window_tokens))
    layout = CacheLayout(tuple(groups), identity.ranks, identity.chunk_tokens)
    if layout.fingerprint != identity.layout_fingerprint:
        raise ConfigError(f"the groups have the fingerprint {layout.fingerprint}, not {identity.layout_fingerprint}")
    return layout


def placement_of(identity: Identity) -> Placement:
    """The placement that a peer describes. Raises `ConfigError` when it is none."""
    if identity.placement_mode == "rank":
        return Placement("rank", identity.servers)
    if identity.placement_mode == "chunk":
        return Placement("chunk", identity.servers)
    raise ConfigError(f"{identity.placement_mode!r} is no placement")

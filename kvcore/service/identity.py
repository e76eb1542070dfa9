"""What a client and a server must agree on, taken from their configuration. Pure."""

from __future__ import annotations

from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout
from kvcore.keys import HASH_VERSION, Namespace
from kvcore.placement import Placement
from kvcore.service.protocol import Identity


def identity_of(namespace: Namespace, layout: CacheLayout, placement: Placement) -> Identity:
    """The identity both sides compare in the handshake; refuses a namespace and a layout of different chunk sizes."""
    if namespace.chunk_tokens != layout.chunk_tokens:
        raise ConfigError(
            f"the namespace has chunks of {namespace.chunk_tokens} tokens, the layout of {layout.chunk_tokens}"
        )
    return Identity(
        hash_mode=namespace.hash_mode,
        hash_version=HASH_VERSION,
        namespace_digest=namespace.digest,
        layout_fingerprint=layout.fingerprint,
        chunk_tokens=layout.chunk_tokens,
        placement_mode=placement.mode,
        servers=placement.servers,
    )

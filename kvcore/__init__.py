"""kvcore: a KV cache for LLM serving whose correctness can be shown.

The names below are imported when they are first used, so that `import kvcore` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.errors import CallerError, ConfigError, KvcoreError
    from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
    from kvcore.inprocess import Cache
    from kvcore.keys import ChunkHasher, Namespace, ObjectKey

__all__ = [
    "Cache",
    "CacheLayout",
    "CallerError",
    "ChunkHasher",
    "ConfigError",
    "GroupKind",
    "KvcoreError",
    "Namespace",
    "ObjectGroup",
    "ObjectKey",
]

_HOMES = {
    "Cache": "kvcore.inprocess",
    "CacheLayout": "kvcore.groups",
    "CallerError": "kvcore.errors",
    "ChunkHasher": "kvcore.keys",
    "ConfigError": "kvcore.errors",
    "GroupKind": "kvcore.groups",
    "KvcoreError": "kvcore.errors",
    "Namespace": "kvcore.keys",
    "ObjectGroup": "kvcore.groups",
    "ObjectKey": "kvcore.keys",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

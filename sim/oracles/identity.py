"""What must not share a name: neighbours of a namespace and of a layout, each of which differs in one field.

A climb has one model, one revision, one adapter; so that two of them would share their chunks is seen by no output.
Here every field is changed by itself, and the digest must change with it.

Pure; nothing is held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kvcore.groups import CacheLayout, GroupKind
from kvcore.keys import Namespace


def confused(namespace: Namespace, layout: CacheLayout) -> Iterator[str]:
    """In words, each field that could change without the name of the stored bytes."""
    for field in _fields(namespace):
        value: dict[str, Any] = {field: _another(getattr(namespace, field))}
        other = dataclasses.replace(namespace, **value)
        if other.digest == namespace.digest:
            yield f"two namespaces that differ in their {field} share all chunk hashes"
    for what, changed in _layouts(layout):
        if changed.fingerprint == layout.fingerprint:
            yield f"two layouts that differ in {what} have one fingerprint"


def _fields(value: Any) -> Iterator[str]:
    return (field.name for field in dataclasses.fields(value) if field.init)


def _another(value: str | int) -> str | int:
    if isinstance(value, int):
        return value + 1
    return {"tokens": "engine", "engine": "tokens"}.get(value, f"{value}'")


def _layouts(layout: CacheLayout) -> Iterator[tuple[str, CacheLayout]]:
    yield "their ranks", dataclasses.replace(layout, ranks=layout.ranks + 1)
    yield "the size of a chunk", dataclasses.replace(layout, chunk_tokens=2 * layout.chunk_tokens)
    for index, group in enumerate(layout.groups):
        changes: dict[str, Any] = {"bytes_per_block": group.bytes_per_block + 1}
        if group.kind is GroupKind.WINDOW:
            assert group.window_tokens is not None
            changes["window_tokens"] = group.window_tokens + 1
        for field, value in changes.items():
            other = dataclasses.replace(group, **{field: value})
            groups = (*layout.groups[:index], other, *layout.groups[index + 1 :])
            yield f"the {field} of group {index}", dataclasses.replace(layout, groups=groups)

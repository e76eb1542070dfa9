"""What callers may pass to L1. Refused before anything has changed."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import CallerError
from kvcore.keys import ObjectKey
from kvcore.leases import Owner

_KEY_TYPES = frozenset((ObjectKey,))


def check_write(tag: str, keys: Sequence[ObjectKey], sizes: int | Sequence[int]) -> None:
    if not isinstance(tag, str):
        raise CallerError(f"a writer's tag must be text, not {tag!r}")
    if not _KEY_TYPES.issuperset(map(type, keys)):
        raise CallerError("keys must be ObjectKeys")
    if isinstance(sizes, int):
        if sizes <= 0:
            raise CallerError(f"an object must have a positive size, not {sizes}")
    elif len(sizes) != len(keys):
        raise CallerError(f"{len(keys)} keys with {len(sizes)} sizes; give one size, or one per key")
    elif not all(isinstance(size, int) and size > 0 for size in sizes):
        raise CallerError("every object must have a positive whole number of bytes")


def check_owner(owner: Owner) -> None:
    if not isinstance(owner, Owner):
        raise CallerError(f"leases belong to an Owner(session, generation, role), not to {owner!r}")

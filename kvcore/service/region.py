"""A server's arena as its clients in the same process see it: offsets and sizes from replies become views.

Who holds: the arena owns the bytes; a view keeps them alive but gives no right to them - that is the grant's, until
commit, abort or close. Nothing to announce; the arena's owner frees it.
"""

from __future__ import annotations

from kvcore.errors import PeerError
from kvcore.memory import Arena, Slot


class Region:
    """`view_range(offset, size)` over an arena of this process."""

    __slots__ = ("_arena",)

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def view_range(self, offset: int, size: int) -> memoryview:
        """The bytes [offset, offset + size); `PeerError` when a reply names something outside the arena."""
        if offset < 0 or size < 0 or offset + size > self._arena.capacity_bytes:
            raise PeerError(f"the server named bytes [{offset}, {offset + size}) of {self._arena.capacity_bytes}")
        return self._arena.view(Slot(offset, size, size, 0, None))

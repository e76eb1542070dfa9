"""`HeldBlocks`: requests that have ended while their blocks are still read or written.

The ended request's blocks stay its own until every reason is dropped: LOADING by the connector's `received` (a load
that began before an abort may still write), STORING by `sent` (the connector answered True to `finished`). The last
drop frees them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, unique

from kvcore.sim.engine.request import Request
from kvcore.sim.engine.tables import TableManager


@unique
class HoldReason(Enum):
    LOADING = "loading"
    STORING = "storing"


class HeldBlocks:
    def __init__(self, tables: TableManager) -> None:
        self._tables = tables
        self._held: dict[str, tuple[Request, dict[HoldReason, None]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def hold(self, request: Request, reasons: Iterable[HoldReason]) -> None:
        """Free the blocks now, or when the last reason is dropped."""
        assert request.request_id not in self._held
        self._held[request.request_id] = (request, dict.fromkeys(reasons))
        self._free_if_done(request.request_id)

    def drop(self, request_id: str, reason: HoldReason) -> None:
        """An id that is not held is ignored: connectors may report what nobody waits for."""
        if request_id in self._held:
            self._held[request_id][1].pop(reason, None)
            self._free_if_done(request_id)

    def _free_if_done(self, request_id: str) -> None:
        request, reasons = self._held[request_id]
        if not reasons:
            del self._held[request_id]
            self._tables.free(request)

"""`AsyncLoads`: requests whose KV is brought by an asynchronous load, until they run again.

    begin --> LOADING --received, something usable--> LOADED --admit--> gone, it runs
                 |  `--received, nothing usable--> gone, it waits again
                 `--drop--> gone, it has ended (from LOADED too)

They stand in the order in which their loads began; by the policy, that is the order in which they are admitted, or
their priority is. How much of a load is usable is decided here: all of it, or what lies before the first block that was
reported bad meanwhile; a load that failed as a whole leaves what the engine had itself, if there is one group.

Who holds their blocks: the request (`HeldBlocks` if it ends while it loads). The connector announces the end of a load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcore.sim.engine.config import Policy
from kvcore.sim.engine.request import Request, Status
from kvcore.sim.engine.tables import TableManager


class LoadEnd(NamedTuple):
    """`valid`: tokens that are usable. Not `whole`: something of the load has failed, used or not."""

    request: Request
    valid: int
    whole: bool


class AsyncLoads:
    """See the module's text. The only one that sets a request LOADING or LOADED."""

    def __init__(self, tables: TableManager, policy: Policy) -> None:
        self._tables = tables
        self._policy = policy
        self._requests: dict[str, Request] = {}

    @property
    def loading(self) -> list[Request]:
        return [request for request in self._requests.values() if request.status is Status.LOADING]

    @property
    def loaded(self) -> list[Request]:
        """In the order of admission."""
        loaded = [request for request in self._requests.values() if request.status is Status.LOADED]
        return sorted(loaded, key=lambda request: request.order) if self._policy is Policy.PRIORITY else loaded

    def begin(self, request: Request) -> None:
        assert request.request_id not in self._requests
        request.status = Status.LOADING
        self._requests[request.request_id] = request

    def note_errors(self, error_blocks: Iterable[int]) -> None:
        """A connector reported bad blocks; whose they are is asked now, while they belong to the load."""
        for request in self.loading:
            request.bad_blocks.update(dict.fromkeys(held_among(request, error_blocks)))

    def received(self, request_id: str, failed: bool) -> LoadEnd | None:
        """Its load has ended. None: a connector may report a load that was given up already."""
        request = self._requests.get(request_id)
        if request is None or request.status is not Status.LOADING:
            return None
        promised = request.computed
        bad = held_among(request, request.bad_blocks)
        request.bad_blocks.clear()
        if bad:
            valid = self._tables.valid_prefix(request, bad)
        elif failed:
            valid = request.local if len(self._tables.groups) == 1 else 0
        else:
            valid = promised
        if valid:
            request.status = Status.LOADED
        else:
            del self._requests[request_id]
        return LoadEnd(request, min(valid, promised), not (failed or bad))

    def admit(self, request: Request) -> None:
        """It runs from now on."""
        assert request.status is Status.LOADED
        del self._requests[request.request_id]

    def drop(self, request: Request) -> bool:
        """It has ended; whether its load may still write."""
        del self._requests[request.request_id]
        return request.status is Status.LOADING


def held_among(request: Request, blocks: Iterable[int]) -> list[int]:
    """Those of `blocks` that the request holds, in their order."""
    return [block for block in blocks if any(block in table.ids for table in request.tables)]

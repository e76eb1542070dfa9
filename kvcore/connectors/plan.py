"""What the scheduler side tells the workers about one step. Plain MessagePack-able values. Pure.

Block ids are the same on every rank; each worker loads and stores the rows of its own rank. A plan holds nothing: the
leases it relies on belong to (session, generation) at the cache servers, the blocks to the engine's request.

`generation` numbers one attempt to run one request and is never used twice by a scheduler side. Request ids are the
client's and come back; whatever a worker keeps beyond a step is therefore keyed by generation.
"""

from __future__ import annotations

import msgspec


class CellBlocks(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of one group and the engine blocks it maps to, in order.

    `blocks[j]` holds the j-th part of the cell; NULL_BLOCK marks a part that must be left alone (the engine already
    has it, or it lies outside the window). A recurrent cell has one part: the state page of the chunk's end boundary.
    """

    group: int
    chunk: int
    chunk_hash: bytes
    blocks: tuple[int, ...]


class LoadPlan(msgspec.Struct, frozen=True, array_like=True):
    """Load these cells for a request; they are leased under (session, generation).

    No cells: nothing is to be moved (layers that need no past), the load is still reported.
    """

    request_id: str
    session: str
    generation: int
    load_async: bool
    cells: tuple[CellBlocks, ...]


class StorePlan(msgspec.Struct, frozen=True, array_like=True):
    """Store these cells; every block named holds computed tokens once this step's forward pass has run."""

    request_id: str
    generation: int
    cache_salt: str
    cells: tuple[CellBlocks, ...]


class EndedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The engine holds the blocks of this request's last generation until every worker has reported it `sent`."""

    request_id: str
    generation: int


class StepMeta(msgspec.Struct, frozen=True, array_like=True):
    """One step.

    `allocated`: blocks that may be written from now on. `ended`: report these as `sent` when unread. `given_up`:
    generations that will be run again, so that their stores may be lost.
    """

    step: int
    allocated: tuple[int, ...]
    loads: tuple[LoadPlan, ...]
    stores: tuple[StorePlan, ...]
    ended: tuple[EndedRequest, ...]
    given_up: tuple[int, ...] = ()

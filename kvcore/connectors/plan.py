"""What the scheduler side tells the workers about one step. Plain MessagePack-able values.

Block ids are the same on every rank; each worker loads and stores the rows of its own rank. A plan holds nothing: the
leases it relies on belong to (session, generation) at the cache servers, the blocks to the engine's request.
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
    """Load these cells for a request; they are leased under (session, generation)."""

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


class StepMeta(msgspec.Struct, frozen=True, array_like=True):
    """One step. `allocated`: blocks that may be written from now on; `ended`: report these as `sent` when unread."""

    step: int
    allocated: tuple[int, ...]
    loads: tuple[LoadPlan, ...]
    stores: tuple[StorePlan, ...]
    ended: tuple[str, ...]

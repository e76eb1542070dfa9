"""What the scheduler side remembers of one request. Pure.

A request lives through *generations*: one per attempt to run it. A preemption, a failed load or a shrunken local
prefix ends the generation; block ids, leases and the store position of the old one are forgotten, and nothing of it
answers for the new.

    IDLE --ask--> LOOKING --result--> KNOWN --alloc, nothing to load--> RUNNING
                                      KNOWN --alloc, load--> LOADING --received--> RUNNING
    any --preempted / asked again--> IDLE (new generation)

Who holds: the leases of a generation are held by the cache servers under (session, generation). Who announces done: the
lookup client (result), the workers' reports (load). Who frees: `SchedulerConnector`, on every way out of a generation.

The store position `stored_chunks` only grows within a generation, so stores of a generation are disjoint and
increasing. `confirmed` guards against poisoning: while a synchronous load of this generation has not been reported
good by every rank, what the forward pass wrote may rest on garbage and must not be stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

from kvcore.connectors.plan import CellBlocks
from kvcore.connectors.views import NULL_BLOCK, BlockTable
from kvcore.groups import CacheLayout, GroupKind


@unique
class Phase(Enum):
    IDLE = "idle"
    LOOKING = "looking"
    KNOWN = "known"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True)
class RequestTracker:
    """One request of the engine, from the first question to its end."""

    request_id: str
    session: str
    cache_salt: str
    extras: tuple[tuple[int, int, bytes], ...] = ()
    generation: int = 0
    generation_count: int = 0
    phase: Phase = Phase.IDLE
    hashes: list[bytes] = field(default_factory=list)
    tokens: Sequence[int] = ()
    lengths: int = 1  # servable lengths of this generation as a bit set; bit 0 is always set
    looked_up_tokens: int = 0
    skip_chunks: int = 0  # chunks the engine had when the lookup was made
    asked_local: int = 0
    promised: int = 0
    computed_tokens: int = 0  # after the last step that was built
    step_start: int = 0  # computed tokens before that step
    stored_chunks: int = 0
    stores_planned: bool = False  # in any generation: workers may still read blocks of it
    confirmed: bool = True
    load_blocks: dict[int, int] = field(default_factory=dict)  # block -> chunk of this generation's load
    load_failures: int = 0

    def next_generation(self, generation: int) -> None:
        """Forget everything that belonged to the last attempt."""
        assert generation > self.generation
        self.generation = generation
        self.generation_count += 1
        self.phase = Phase.IDLE
        self.lengths = 1
        self.looked_up_tokens = self.skip_chunks = self.asked_local = self.promised = 0
        self.computed_tokens = self.step_start = self.stored_chunks = 0
        self.confirmed = True
        self.load_blocks = {}


def cell_blocks(layout: CacheLayout, group: int, chunk: int, blocks: BlockTable) -> tuple[int, ...]:
    """The engine blocks of (group, chunk); shorter than a whole chunk where the table ends earlier.

    Attention: the blocks of the chunk's tokens. Recurrent: the one state page of its end boundary.
    """
    spec = layout.groups[group]
    end = (chunk + 1) * layout.chunk_tokens // spec.block_tokens
    if spec.kind is GroupKind.RECURRENT:
        return tuple(blocks[group][end - 1 : end])
    return tuple(blocks[group][end - layout.blocks_per_chunk(group) : end])


def load_cells(
    layout: CacheLayout, hashes: Sequence[bytes], needed: Sequence[int], blocks: BlockTable, local_tokens: int
) -> list[CellBlocks]:
    """Cells to load, given the mask of needed chunks per group; parts the engine already has are left alone."""
    cells: list[CellBlocks] = []
    for group, mask in enumerate(needed):
        chunk = 0
        while mask >> chunk:
            if mask >> chunk & 1:
                parts = _beyond(layout, group, chunk, cell_blocks(layout, group, chunk, blocks), local_tokens)
                if any(part != NULL_BLOCK for part in parts):
                    cells.append(CellBlocks(group, chunk, hashes[chunk], parts))
            chunk += 1
    return cells


def _beyond(layout: CacheLayout, group: int, chunk: int, parts: tuple[int, ...], local_tokens: int) -> tuple[int, ...]:
    """Replace the parts that lie inside the engine's own prefix by NULL_BLOCK: others may be reading those blocks."""
    spec = layout.groups[group]
    if spec.kind is GroupKind.RECURRENT:
        return parts if (chunk + 1) * layout.chunk_tokens > local_tokens else (NULL_BLOCK,) * len(parts)
    first = chunk * layout.chunk_tokens
    return tuple(
        NULL_BLOCK if first + index * spec.block_tokens < local_tokens else part for index, part in enumerate(parts)
    )


def store_cells(
    layout: CacheLayout,
    hashes: Sequence[bytes],
    chunks: range,
    blocks: BlockTable,
    state_tokens: Sequence[int],
) -> list[CellBlocks]:
    """Cells of `chunks` that exist in full. `state_tokens`: token counts at which recurrent state is at rest now.

    A cell with a null block (outside the window) does not exist and is left out; so is a recurrent boundary that the
    step ran over.
    """
    cells: list[CellBlocks] = []
    for chunk in chunks:
        for group, spec in enumerate(layout.groups):
            if spec.kind is GroupKind.RECURRENT and (chunk + 1) * layout.chunk_tokens not in state_tokens:
                continue
            parts = cell_blocks(layout, group, chunk, blocks)
            if len(parts) == layout.blocks_per_chunk(group) and NULL_BLOCK not in parts:
                cells.append(CellBlocks(group, chunk, hashes[chunk], parts))
    return cells

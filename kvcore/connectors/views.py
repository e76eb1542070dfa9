"""What an engine shows its connector, engine-neutral.

The engine's thin adapter builds these from its own structures at each step; the connector core and the
preemption ladder speak only in them. All are plain values: holding one holds nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)

NULL_BLOCK = BlockId(0)
"""The engine's null block: stands for tokens outside a window. Never stored, never loaded."""

BlockTable = tuple[list[int], ...]
"""Block ids per object group (index = group position in the layout), from token 0 on, with NULL_BLOCK gaps."""


NO_TOKENS = range(0)


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as the scheduler sees it now.

    `tokens` are prompt plus generated tokens (after a preemption the generated ones are part of what must be
    computed again). `cache_salt` separates tenants. `extras` are (offset, length, id) of multimodal items.
    `reads_cache` False: all of it must be computed (for the log-probabilities of a prompt), and may be stored.
    """

    request_id: str
    tokens: Sequence[int]
    prompt_tokens: int
    cache_salt: str = ""
    extras: tuple[tuple[int, int, bytes], ...] = ()
    reads_cache: bool = True


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: tokens [computed, computed + scheduled) are run.

    `brought`: tokens whose KV another connector of the engine loads for this very step. That may fail, too.
    """

    request_id: str
    computed_tokens: int
    scheduled_tokens: int
    blocks: BlockTable  # the whole table at this step
    new_blocks: BlockTable  # those that were taken from the pool in this step
    resumed: bool
    tokens: Sequence[int] = ()  # all tokens known now (prompt + accepted generated ones)
    brought: range = NO_TOKENS


@dataclass(frozen=True, slots=True)
class StepView:
    """The scheduler's output of one step, as far as a connector needs it.

    `allocated` names every block taken from the free pool in this step, also for asynchronous loads: before the
    forward pass (or a load) may write one, stores that still read it must be fenced.
    """

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    allocated: frozenset[int]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Loads that had the way for themselves, summed: how many, their bytes on one rank, how long each took."""

    count: int = 0
    size: int = 0
    ns: int = 0

    def __add__(self, other: LoadTimes) -> LoadTimes:
        return LoadTimes(self.count + other.count, self.size + other.size, self.ns + other.ns)


NO_LOADS = LoadTimes()


@dataclass(frozen=True, slots=True)
class Finished:
    """What one worker has completed since it was last asked. Every id is reported once.

    sent: ended requests whose blocks no store reads any more (follows `finished() -> True` of the scheduler side).
    received: requests whose asynchronous load has ended, well or not.
    failed: the part of `received` whose blocks must not be used although no block list can say so (several groups).
    loads: how long loads took; an engine may leave them out.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    loads: LoadTimes = NO_LOADS

"""`Connector`: the interface the rungs drive, in the order of vLLM's v1 KV connector.

Bring your own: a class constructed as `Class(config)` with a `scheduler` side and one `worker(rank)` side per rank can
climb (`kvcore ladder --connector pkg.mod:Class`). One object is made per climb in a configuration, and its cache is
what it keeps between the rungs. A side need not derive from its protocol. One that does inherits, for each call that it
leaves out, what a synchronous connector answers: nothing to wait for, nothing kept, nothing sent or failed.

Methods marked *may wait* may return an awaitable; a plain synchronous connector returns None.

Calls per step, scheduler side:  matched_tokens -> after_alloc ... -> preempted ... -> build_meta -> (the step runs)
    -> update_output.  `finished` once per request, when it ends or is aborted, before its blocks are freed.
Calls per step, worker side:     fence -> start_load -> (per layer: wait_load, forward, save) -> wait_save
    -> finished, load_errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvcore.connectors.views import BlockTable, Finished, RequestView, StepView
from kvcore.groups import CacheLayout
from kvcore.ports import CopyEngine

Pages = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What a connector is told. `layout` holds the groups, ranks, chunk and block sizes."""

    layout: CacheLayout
    model_name: str
    load_async: bool
    seed: int


@runtime_checkable
class SchedulerSide(Protocol):
    """Lives with the engine's scheduler; never blocks."""

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `local_tokens` that the cache can supply, and whether the load is asynchronous.

        None: not known yet, ask again. Asked as often as the engine likes; asking has no effect that a second call
        sees. 0 <= answer <= len(tokens) - 1 - local_tokens.
        """
        ...

    def after_alloc(self, request: RequestView, blocks: BlockTable, external_tokens: int) -> None:
        """Blocks were allocated and `external_tokens` of the promise are taken. Again with 0 after an async load."""
        ...

    def build_meta(self, step: StepView) -> Any:
        """Everything the workers must do in this step. Resets the per-step state. Every step, also empty ones."""
        ...

    def preempted(self, request_id: str) -> None:
        """The request lost its blocks; the very step that is being built may write them."""
        ...

    def finished(self, request: RequestView, blocks: BlockTable) -> bool:
        """The request has ended or was aborted. True: keep its blocks until every worker reports it `sent`.

        `request.tokens` includes the last sampled token, whose KV was never computed.
        The blocks of an asynchronous load that still runs are the engine's to keep, until it is reported `received`:
        that report comes in any case.
        """
        return False

    def update_output(self, finished: Finished, error_blocks: frozenset[int]) -> None:
        """The workers' reports of a step, combined over ranks (an id counts when the last rank has reported it).

        Once per step, in the order of the steps, also when there is nothing to report; with synchronous loads exactly
        one batch may be in flight, so that the loads of a step have ended when its reports come. Error blocks of an
        asynchronous load may come rank by rank, before the step that reports it `received`.
        """
        ...


@runtime_checkable
class WorkerSide(Protocol):
    """Lives with one worker (rank)."""

    def register(self, pages: Sequence[Pages], device: CopyEngine) -> None:
        """`pages[g]`: paged KV of group g, [blocks, layers, block_tokens, width]; recurrent: block_tokens axis = 1."""
        ...

    def fence(self, meta: Any) -> Awaitable[None] | None:
        """*May wait.* Before a block allocated in this step is written: end or cancel every store that reads it."""
        ...

    def start_load(self, meta: Any) -> Awaitable[None] | None:
        """*May wait.* Begin all loads of this step."""
        ...

    def wait_load(self, layer: int) -> Awaitable[None] | None:
        """*May wait.* Return when layer `layer` of every synchronous load of this step is in place or has failed."""
        ...

    def save(self, layer: int) -> None:
        """Layer `layer` of this step has been submitted to the compute stream."""
        ...

    def wait_save(self) -> Awaitable[None] | None:
        """*May wait.* Once per step after the last layer, also in empty steps; asynchronous stores begin here."""
        ...

    def finished(self, request_ids: Sequence[str]) -> Finished:
        """`request_ids` ended in this step. What has completed since the last call."""
        return Finished()

    def load_errors(self) -> frozenset[int]:
        """Blocks that were to be loaded and hold no valid KV, each reported once."""
        return frozenset()


@runtime_checkable
class Connector(Protocol):
    """Constructed as `Class(config: ConnectorConfig)`."""

    @property
    def scheduler(self) -> SchedulerSide: ...

    def worker(self, rank: int) -> WorkerSide: ...

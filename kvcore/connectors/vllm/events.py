"""KV events: what vLLM publishes, to routers of requests, about what the cache holds.

Theory of operation
-------------------
    worker       a store has ended (`store_notes`) --StoredMetadata--> scheduler, with the reports of a step
    scheduler    `EventBook.planned`: a step's stores, each with the request whose tokens they are
                 `EventBook.ended`: published cells become `BlockStored`, the others are forgotten
                 `take`: vLLM asks after each step

An event is told after the cell was published, never when it was only planned. Its block hashes, parent, tokens and
extra keys are vLLM's own for these blocks, so a router that knows an engine's prefix cache knows the cache behind it;
the medium is CPU, and a cell has the index of its group. Nobody tells that a cell has been evicted: it may be in
another tier or server. After a reset vLLM itself says that everything is gone, and nothing is told of what was planned
before.

Workers' metadata is the way, rather than vLLM's own channel of events from workers: MultiConnector passes it on.

Who holds: the book holds a request from its arrival to the step after its end, and a cell from the plan to its note.
"""

# mypy: disable-error-code="import-not-found, misc"
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvcore.connectors.plan import StepMeta
from kvcore.connectors.vllm.store_notes import Note


@dataclass
class StoredMetadata(KVConnectorWorkerMetadata):
    """Stores that have ended on a worker."""

    notes: tuple[Note, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StoredMetadata:
        assert isinstance(other, StoredMetadata)
        return StoredMetadata(self.notes + other.notes)


def wants_events(vllm_config: Any) -> bool:
    """Somebody has asked vLLM for KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


@dataclass(slots=True)
class _Planned:
    """Stores of one cell that have not ended. Whichever request began the first: the tokens are the same.

    `request` None: nobody is told, because the cache has been reset since.
    """

    request: Any | None
    chunk: int
    stores: int = 0


class EventBook:
    """The scheduler's side. `block_tokens`: of the engine's block hashes. Used on the engine's thread."""

    def __init__(self, chunk_tokens: int, block_tokens: int) -> None:
        assert chunk_tokens % block_tokens == 0
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._live: dict[str, Any] = {}
        self._ended: dict[str, Any] = {}  # since the last step: their last stores are in the next one
        self._planned: dict[tuple[int, bytes], _Planned] = {}  # by group and chunk hash
        self._events: list[BlockStored] = []

    def arrived(self, request: Any) -> None:
        self._live[request.request_id] = request

    def left(self, request: Any) -> None:
        self._live.pop(request.request_id, None)
        self._ended[request.request_id] = request

    def planned(self, step: StepMeta) -> None:
        last = {each.generation for each in step.ended}
        for plan in step.stores:
            request = (self._ended if plan.generation in last else self._live)[plan.request_id]
            for cell in plan.cells:
                key = cell.group, cell.chunk_hash
                self._planned.setdefault(key, _Planned(request, cell.chunk)).stores += 1
        self._ended = {}

    def ended(self, notes: Iterable[Note]) -> None:
        for note in notes:
            key = note.group, note.chunk_hash
            planned = self._planned[key]
            planned.stores -= 1
            if not planned.stores:
                del self._planned[key]
            if note.published and planned.request is not None:
                self._events.append(self._event(planned.request, note.group, planned.chunk))

    def _event(self, request: Any, group: int, chunk: int) -> BlockStored:
        begin, end = chunk * self._chunk_tokens, (chunk + 1) * self._chunk_tokens
        first, last = begin // self._block_tokens, end // self._block_tokens
        hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[max(0, first - 1) : last]]
        extra = [
            generate_block_hash_extra_keys(request, position, position + self._block_tokens, 0)[0]
            for position in range(begin, end, self._block_tokens)
        ]
        lora = request.lora_request
        return BlockStored(
            block_hashes=hashes[-(last - first) :],
            parent_block_hash=hashes[0] if first else None,
            token_ids=list(request.all_token_ids[begin:end]),
            block_size=self._block_tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=group,
            session_id=request.session_id,
        )

    def reset(self) -> None:
        """Whoever hears that everything is gone must not hear afterwards of something that was stored before."""
        self._events = []
        for planned in self._planned.values():
            planned.request = None

    def take(self) -> list[BlockStored]:
        events, self._events = self._events, []
        return events

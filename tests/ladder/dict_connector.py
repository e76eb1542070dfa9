"""A stranger's connector: synchronous, a Python dict as the cache, nothing of kvcore but the interface.

It is what `kvcore ladder --connector` is for. About as small as a correct connector gets: whole chunks only, keys from
the token prefix, loads and stores at once on the host. `BROKEN` variants below show that the ladder notices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.connectors.views import Finished, RequestView, StepView
from kvcore.groups import CacheLayout, GroupKind
from kvcore.ladder.connector import ConnectorConfig, SchedulerSide, WorkerSide


@dataclass
class Meta:
    """(token prefix hash, blocks) per chunk, to load before and to store after the forward pass."""

    loads: list[tuple[bytes, list[int]]] = field(default_factory=list)
    stores: list[tuple[bytes, list[int]]] = field(default_factory=list)


class DictConnector:
    """Full attention only; the dict lives as long as the object."""

    def __init__(self, config: ConnectorConfig) -> None:
        assert all(group.kind is GroupKind.FULL for group in config.layout.groups)
        self.store: dict[tuple[bytes, int], np.ndarray[Any, Any]] = {}
        self.scheduler = DictScheduler(config.layout, self.store)
        self._workers = [DictWorker(rank, self.store) for rank in range(config.layout.ranks)]

    def worker(self, rank: int) -> DictWorker:
        return self._workers[rank]


class DictScheduler(SchedulerSide):
    """Promises what all ranks hold."""

    def __init__(self, layout: CacheLayout, store: dict[tuple[bytes, int], Any]) -> None:
        self.layout, self.store = layout, store
        self.chunk = layout.chunk_tokens
        self.per_chunk = self.chunk // layout.groups[0].block_tokens
        self.meta = Meta()
        self.stored: dict[str, int] = {}
        self.local: dict[str, int] = {}

    def key(self, tokens: Sequence[int], chunk: int) -> bytes:
        prefix = np.asarray(tokens[: (chunk + 1) * self.chunk], dtype=np.int64)
        return hashlib.sha256(prefix.tobytes()).digest()

    def chunk_blocks(self, blocks: Sequence[int], chunk: int) -> list[int]:
        return list(blocks[chunk * self.per_chunk : (chunk + 1) * self.per_chunk])

    def hit(self, tokens: Sequence[int]) -> int:
        chunk = 0
        while (chunk + 1) * self.chunk <= len(tokens):
            if any((self.key(tokens, chunk), rank) not in self.store for rank in range(self.layout.ranks)):
                break
            chunk += 1
        return chunk

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        self.local[request.request_id] = local_tokens
        usable = min(self.hit(request.tokens) * self.chunk, len(request.tokens) - 1)
        return max(0, usable - local_tokens), False

    def after_alloc(self, request: RequestView, blocks: Any, external_tokens: int) -> None:
        hit = self.hit(request.tokens)
        self.stored[request.request_id] = hit
        local = self.local[request.request_id]
        if external_tokens == 0:
            return
        size = self.layout.groups[0].block_tokens
        for chunk in range(hit):
            table = self.chunk_blocks(blocks[0], chunk)
            first = chunk * self.chunk
            wanted = [0 if first + index * size < local else block for index, block in enumerate(table)]
            if any(wanted):
                self.meta.loads.append((self.key(request.tokens, chunk), wanted))

    def build_meta(self, step: StepView) -> Meta:
        for scheduled in step.scheduled:
            end = (scheduled.computed_tokens + scheduled.scheduled_tokens) // self.chunk
            for chunk in range(self.stored.get(scheduled.request_id, 0), end):
                blocks = self.chunk_blocks(scheduled.blocks[0], chunk)
                self.meta.stores.append((self.key(scheduled.tokens, chunk), blocks))
            self.stored[scheduled.request_id] = max(end, self.stored.get(scheduled.request_id, 0))
        meta, self.meta = self.meta, Meta()
        return meta

    def preempted(self, request_id: str) -> None:
        self.stored.pop(request_id, None)

    def finished(self, request: RequestView, blocks: Any) -> bool:
        self.stored.pop(request.request_id, None)
        return False


class DictWorker(WorkerSide):
    """Copies on the host, at once."""

    def __init__(self, rank: int, store: dict[tuple[bytes, int], Any]) -> None:
        self.rank, self.store = rank, store
        self.pages: Any = None
        self.meta = Meta()

    def register(self, pages: Sequence[Any], device: Any) -> None:
        self.pages = pages[0]

    def start_load(self, meta: Meta) -> None:
        self.meta = meta
        for key, blocks in meta.loads:
            for index, block in enumerate(blocks):
                if block:
                    self.pages[block] = self.store[key, self.rank][index]

    def wait_save(self) -> None:
        for key, blocks in self.meta.stores:
            self.store[key, self.rank] = self.pages[blocks].copy()


class ShiftedStore(DictConnector):
    """BROKEN: stores the blocks of a chunk in the wrong order."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.scheduler.chunk_blocks = _rotated(self.scheduler.chunk_blocks)  # type: ignore[method-assign]


def _rotated(original: Any) -> Any:
    count = 0

    def chunk_blocks(blocks: Sequence[int], chunk: int) -> list[int]:
        nonlocal count
        count += 1
        found = original(blocks, chunk)
        return found[1:] + found[:1] if count % 7 == 0 else found

    return chunk_blocks


class ForgetfulLoad(DictConnector):
    """BROKEN: every ninth block of a load is skipped and nobody is told."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        for worker in self._workers:
            worker.start_load = _skipping(worker)  # type: ignore[method-assign]


def _skipping(worker: DictWorker) -> Any:
    original, seen = worker.start_load, 0

    def start_load(meta: Meta) -> None:
        nonlocal seen
        for _, blocks in meta.loads:
            for index, _block in enumerate(blocks):
                seen += 1
                if seen % 9 == 0:
                    blocks[index] = 0
        original(meta)

    return start_load


class AsyncDictConnector(DictConnector):
    """Loads asynchronously where it may: reported one step after they began."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        if config.load_async:
            self.scheduler = AsyncDictScheduler(config.layout, self.store)
            self._workers = [AsyncDictWorker(rank, self.store) for rank in range(config.layout.ranks)]


class AsyncDictScheduler(DictScheduler):
    def __init__(self, layout: CacheLayout, store: dict[tuple[bytes, int], Any]) -> None:
        super().__init__(layout, store)
        self.begun: list[str] = []

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        tokens, _ = super().matched_tokens(request, local_tokens)
        return tokens, bool(tokens)

    def after_alloc(self, request: RequestView, blocks: Any, external_tokens: int) -> None:
        super().after_alloc(request, blocks, external_tokens)
        if external_tokens:
            self.begun.append(request.request_id)

    def build_meta(self, step: StepView) -> tuple[Meta, list[str]]:  # type: ignore[override]
        begun, self.begun = self.begun, []
        return super().build_meta(step), begun


class AsyncDictWorker(DictWorker):
    def __init__(self, rank: int, store: dict[tuple[bytes, int], Any]) -> None:
        super().__init__(rank, store)
        self.begun: list[str] = []
        self.ended: list[str] = []

    def start_load(self, meta: tuple[Meta, list[str]]) -> None:  # type: ignore[override]
        super().start_load(meta[0])
        self.begun = meta[1]

    def finished(self, request_ids: Sequence[str]) -> Finished:
        received, self.ended = self.ended, self.begun
        return Finished(received=frozenset(received))


class TwoTierConnector(DictConnector):
    """A near tier that can be dropped, in front of a far one that keeps everything."""

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.near = self.store
        self.far = Tiers(self.near)
        self.scheduler.store = self.far
        for worker in self._workers:
            worker.store = self.far

    def drop_near_tier(self) -> None:
        self.near.clear()


class Tiers(dict[tuple[bytes, int], Any]):
    """The far tier; what is read from it comes into the near one."""

    def __init__(self, near: dict[tuple[bytes, int], Any]) -> None:
        super().__init__()
        self.near = near

    def __setitem__(self, key: tuple[bytes, int], pages: Any) -> None:
        super().__setitem__(key, pages)
        self.near[key] = pages

    def __getitem__(self, key: tuple[bytes, int]) -> Any:
        return self.near.setdefault(key, super().__getitem__(key))

"""What a case's plain values mean for the production code: model, stack, engine and requests.

Models and dense references are kept for the process: they are immutable or pure, so cases that share a shape share
them, and no run can tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from blake3 import blake3

from kvcore.groups import CacheLayout
from kvcore.keys import HashMode, Namespace
from kvcore.ladder.server_stack import StackConfig
from kvcore.ladder.swarm.case import CaseRequest, EpisodeConfig
from kvcore.loads import SLICE_BYTES
from kvcore.placement import Placement, PlacementMode
from kvcore.quota import Quota
from kvcore.service.client import ConnectionConfig, SchedulerConfig
from kvcore.service.protocol import Transfer
from kvcore.service.server import ServerConfig
from kvcore.sim.engine.block_pool import BlockNames
from kvcore.sim.engine.config import EngineConfig, Policy
from kvcore.sim.engine.probe import NullProbe
from kvcore.sim.engine.request import RequestSpec
from kvcore.sim.engine.scheduler import Scheduler
from kvcore.sim.model import TOKEN_BITS, FingerprintModel, build_model
from kvcore.sim.reference import Reference
from kvcore.storage import StorageConfig

POSITIONS_MAX = 512
UNLIMITED_BYTES = 1 << 30

_Shape = tuple[str, int, int, int, int, int, int, int]


def _shape(config: EpisodeConfig) -> _Shape:
    return (
        config.groups,
        config.ranks,
        config.chunk_tokens,
        config.full_block_tokens,
        config.window_block_tokens,
        config.recurrent_block_tokens,
        config.window_tokens,
        config.model_seed,
    )


def forget_models() -> None:
    """Drop the models that this process has built: for whoever changes the code that they were built with."""
    _model.cache_clear()


@lru_cache(maxsize=512)
def _model(shape: _Shape) -> tuple[CacheLayout, FingerprintModel, Reference]:
    groups, ranks, chunk, full, window, recurrent, window_tokens, seed = shape
    layout, model = build_model(
        groups,
        ranks,
        chunk_tokens=chunk,
        full_block_tokens=full,
        window_block_tokens=window,
        recurrent_block_tokens=recurrent,
        window_tokens=window_tokens,
        seed=seed,
        positions_max=POSITIONS_MAX,
    )
    return layout, model, Reference(model, layout, sequences_max=64)


def model_of(config: EpisodeConfig) -> tuple[CacheLayout, FingerprintModel, Reference]:
    """Layout, model and dense reference of a case."""
    return _model(_shape(config))


def chunk_bytes(layout: CacheLayout) -> int:
    """Of all cells of one chunk, on all ranks."""
    return sum(layout.cell_bytes_rows)


def stack_config(config: EpisodeConfig, layout: CacheLayout) -> StackConfig:
    """The cache's configuration."""
    mode: HashMode = "engine" if config.hash_mode == "engine" else "tokens"
    namespace = Namespace(
        "fingerprint",
        kv_dtype="uint64",
        layout=layout.fingerprint,
        chunk_tokens=config.chunk_tokens,
        hash_mode=mode,
        engine_algorithm="blake3" if mode == "engine" else "",
    )
    transfer: Transfer = "server" if config.transfer == "server" else "worker"
    placement: PlacementMode = "rank" if config.placement == "rank" else "chunk"
    size = chunk_bytes(layout)
    return StackConfig(
        layout=layout,
        namespace=namespace,
        placement=Placement(placement, max(1, config.servers)),
        load_async=config.load_async,
        l1_bytes=config.l1_chunks * size,
        l2=config.l2,
        l2_bytes=config.l2_chunks * size or None,
        policy=config.policy,
        retain=config.retain,
        skip_l1=config.skip_l1,
        weak_locks=config.weak_locks,
        prefetch_budget_bytes=config.prefetch_budget_chunks * size or UNLIMITED_BYTES,
        quota=Quota(default_bytes=config.tenant_chunks * size) if config.tenant_chunks else None,
        storage=_storage(config, size),
        connection=ConnectionConfig(
            config.request_timeout_ns,
            config.hello_interval_ns,
            config.resend_ns,
            config.resend_ns_max,
            config.resends_max,
        ),
        lookup=SchedulerConfig(config.lookup_timeout_ns, config.server_timeout_ns, config.linger_ns),
        server=ServerConfig(
            session_idle_ns=config.session_idle_ns,
            store_lease_ns=config.store_lease_ns,
            worker_silence_ns=config.worker_silence_ns,
        ),
        transfer=transfer,
        admission=config.admission,
        admission_seed=config.model_seed,
    )


def _storage(config: EpisodeConfig, chunk_bytes: int) -> StorageConfig:
    return StorageConfig(
        load_slice_bytes=config.load_slice_chunks * chunk_bytes or SLICE_BYTES,
        lease_ns=config.lease_ns,
        lookup_deadline_ns=config.server_timeout_ns,
        store_deadline_ns=config.store_deadline_ns,
        store_attempts_max=config.store_attempts_max,
        store_backoff_ns=config.store_backoff_ns,
        close_deadline_ns=config.close_deadline_ns,
    )


def engine_config(config: EpisodeConfig) -> EngineConfig:
    """The engine's configuration during the faults."""
    return EngineConfig(
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        policy=Policy(config.engine_policy),
        prefix_cache=config.prefix_cache,
        partial_hits=config.partial_hits,
        host_ahead=config.host_ahead,
        reserve_whole=config.reserve_whole,
        beyond_engine=config.beyond_engine,
        idle_step_ns=config.idle_step_ns,
    )


def blocks_max(config: EpisodeConfig, requests: Iterable[CaseRequest]) -> int:
    """Blocks with which the largest request can reach its end, whatever its steps look like."""
    layout, _, _ = model_of(config)
    engine = EngineConfig(num_blocks=2, max_batched_tokens=config.max_batched_tokens)
    tables = Scheduler(engine, layout, None, NullProbe(), BlockNames()).tables
    return max(tables.blocks_max(length_of(config, request)) for request in requests)


def length_of(config: EpisodeConfig, request: CaseRequest) -> int:
    """Tokens of the whole sequence, prompt and output."""
    return len(request.chunks) * config.chunk_tokens + request.tail_tokens + request.output_tokens


def request_spec(config: EpisodeConfig, request: CaseRequest) -> RequestSpec:
    """The request with its tokens."""
    prompt: list[int] = []
    for chunk in request.chunks:
        prompt.extend(_tokens(f"{chunk}", config.chunk_tokens))
    if request.tail_tokens:
        prompt.extend(_tokens(f"after {request.chunks}", config.chunk_tokens)[: request.tail_tokens])
    items = [item for item in request.items if item[0] + item[1] <= len(prompt)]
    for offset, length, which in items:
        prompt[offset : offset + length] = _tokens(f"item {which}", length)
    return RequestSpec(
        request.request_id,
        tuple(prompt),
        request.output_tokens,
        request.time_ns,
        request.priority,
        request.salt,
        tuple((offset, length, b"item %d" % which) for offset, length, which in items),
    )


@lru_cache(maxsize=4096)
def _tokens(name: str, count: int) -> list[int]:
    raw = blake3(f"chunk {name}".encode()).digest(length=4 * count)
    words = np.frombuffer(raw, dtype="<u4") & np.uint32((1 << TOKEN_BITS) - 1)
    found: list[int] = words.tolist()
    return found

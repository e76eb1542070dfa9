"""`KvcoreConnector`: kvcore as a KV connector of vLLM (v1 interface), both roles in one process.

    KVTransferConfig(kv_connector="KvcoreConnector", kv_connector_module_path="kvcore.connectors.vllm",
                     kv_role="kv_both", kv_load_failure_policy="recompute",
                     kv_connector_extra_config={"l1_bytes": 1 << 30})

Settings (`kv_connector_extra_config`): `l1_bytes`, `l2` (a URL), `chunk_tokens`, `load_async` (default: true), and
`host` (a `SharedHost` of the caller's own, e.g. one that outlives the engine).

vLLM constructs one object per role and gives them nothing in common but the configuration. The two find each other
through `SharedHost`: the caller's own, or one in `_HOSTS` under the configuration's engine id. That table is the one
piece of module state of kvcore; an entry lives as long as a connector that uses it.

What vLLM cannot be told, and is therefore refused as configuration: a failed synchronous load with several groups, or
while batches overlap (it would deliver what was computed over the hole). Loads are asynchronous by default.
"""

# mypy: disable-error-code="import-not-found, misc"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvcore.connectors.plan import StepMeta
from kvcore.connectors.views import Finished
from kvcore.connectors.vllm.hashes import BlockHasher
from kvcore.connectors.vllm.host import CacheHost, EngineSide, HostConfig, LocalHost, Runner
from kvcore.connectors.vllm.layout import block_sizes_of, layout_of, namespace_of, pages_of
from kvcore.connectors.vllm.scheduler import SchedulerHalf
from kvcore.connectors.vllm.worker import WorkerHalf
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher

L1_BYTES = 1 << 30
LOAD_FAILURES_MAX = 1
"""A request whose load failed is computed. In vLLM 0.32.0 a failed asynchronous load keeps its reservation of blocks:
a second attempt may wait for room that it holds itself, for ever (docs/findings)."""
_SETTINGS = ("l1_bytes", "l2", "chunk_tokens", "load_async", "host")


@dataclass(frozen=True)
class KvcoreMetadata(KVConnectorMetadata):
    """One step's plan on its way to the workers."""

    step: StepMeta


@dataclass(frozen=True, slots=True)
class Settings:
    """`kv_connector_extra_config`, checked."""

    l1_bytes: int
    l2: str | None
    chunk_tokens: int | None
    load_async: bool
    host: SharedHost | None

    @classmethod
    def read(cls, extra: dict[str, Any]) -> Settings:
        unknown = sorted(set(extra) - set(_SETTINGS))
        if unknown:
            raise ConfigError(f"unknown settings {unknown} in kv_connector_extra_config; known are {list(_SETTINGS)}")
        return cls(
            int(extra.get("l1_bytes", L1_BYTES)),
            extra.get("l2"),
            extra.get("chunk_tokens"),
            bool(extra.get("load_async", True)),
            extra.get("host"),
        )


class SharedHost:
    """A host and the way onto its loop, for the connectors of one or several engines in this process.

    `side` makes the halves of an engine when its first role asks, and ends them when the last one leaves.
    """

    def __init__(self, runner: Runner, host: CacheHost, on_empty: Callable[[], None] | None = None) -> None:
        self.runner = runner
        self.host = host
        self._on_empty = on_empty
        self._sides: dict[str, tuple[EngineSide, int]] = {}

    def enter(self, engine_id: str, hasher: ChunkHasher, load_async: bool) -> EngineSide:
        side, users = self._sides.get(engine_id, (None, 0))
        if side is None:
            side = self.runner.call(_join(self.host, hasher, load_async))
        self._sides[engine_id] = (side, users + 1)
        return side

    def side(self, engine_id: str) -> EngineSide:
        """The halves of an engine that has not left, to look at."""
        return self._sides[engine_id][0]

    def leave(self, engine_id: str) -> None:
        side, users = self._sides[engine_id]
        if users > 1:
            self._sides[engine_id] = (side, users - 1)
            return
        del self._sides[engine_id]
        self.runner.call(side.leave())
        if not self._sides and self._on_empty is not None:
            self._on_empty()


_HOSTS: dict[str, SharedHost] = {}


def _host_for(engine_id: str, config: HostConfig) -> SharedHost:
    if engine_id not in _HOSTS:
        local = LocalHost(config)

        def end() -> None:
            del _HOSTS[engine_id]
            local.close()

        _HOSTS[engine_id] = SharedHost(local.runner, local.host, end)
    return _HOSTS[engine_id]


async def _join(host: CacheHost, hasher: ChunkHasher, load_async: bool) -> EngineSide:
    return host.join(hasher, load_async=load_async, load_failures_max=LOAD_FAILURES_MAX)


def _check(vllm_config: Any, layout: CacheLayout, settings: Settings) -> None:
    if vllm_config.parallel_config.world_size != 1:
        raise ConfigError("the in-process cache serves one worker; tensor and pipeline parallelism need a cache server")
    if settings.load_async:
        return
    if len(layout.groups) > 1:
        raise ConfigError("load_async = false with several cache groups: vLLM cannot be told which load failed")
    if vllm_config.max_concurrent_batches > 1:
        raise ConfigError("load_async = false with overlapping batches: vLLM would deliver what a failed load computed")


class KvcoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module text."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings.read(self._kv_transfer_config.kv_connector_extra_config)
        self._layout = layout_of(kv_cache_config, settings.chunk_tokens)
        _check(vllm_config, self._layout, settings)
        namespace = namespace_of(vllm_config, self._layout)
        hasher = BlockHasher(ChunkHasher(namespace), block_sizes_of(vllm_config, kv_cache_config)[1])
        self._engine_id = str(self._kv_transfer_config.engine_id)
        config = HostConfig(self._layout, namespace, settings.l1_bytes, settings.l2)
        self._shared = settings.host or _host_for(self._engine_id, config)
        self._run = self._shared.runner.call
        self._side = self._shared.enter(self._engine_id, hasher, settings.load_async)
        self._open = True
        overlapping = vllm_config.max_concurrent_batches > 1
        self._scheduler = SchedulerHalf(
            self._side.scheduler, self._layout, overlapping=overlapping, load_async=settings.load_async
        )
        self._worker = WorkerHalf(self._side.worker)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a later miss: output of a preempted request need not be dropped for it."""
        return False

    # ------------------------------------------------------------------ scheduler, in the order of the calls

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._run(self._scheduler.matched_tokens(request, num_computed_tokens))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._run(self._scheduler.after_alloc(request, blocks.get_block_ids(), num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KvcoreMetadata:
        return KvcoreMetadata(self._run(self._scheduler.build_meta(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        self._run(self._report(connector_output))

    async def _report(self, output: Any) -> None:
        finished = Finished(
            frozenset(output.finished_sending or ()),
            frozenset(output.finished_recving or ()),
            frozenset(output.failed_recving or ()),
        )
        self._scheduler.report(finished, frozenset(output.invalid_block_ids or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._run(self._scheduler.finished(request, block_ids)), None

    def reset_cache(self) -> bool | None:
        self._run(self._drop())
        return True

    async def _drop(self) -> None:
        self._shared.host.storage.drop_l1()

    # ------------------------------------------------------------------ worker, in the order of the calls

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pages = pages_of(self._kv_cache_config, self._layout, kv_caches)
        self._run(self._worker.register(pages, self._side.device))

    def handle_preemptions(self, kv_connector_metadata: KvcoreMetadata) -> None:
        self._run(self._worker.fence(kv_connector_metadata.step))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if metadata.step.loads:
            self._run(self._worker.start_load(metadata.step))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker.loading:
            self._run(self._worker.wait_load())

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Cells hold all layers of their group: stores begin in `wait_for_save`."""

    def wait_for_save(self) -> None:
        self._run(self._worker.wait_save())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished = self._run(self._worker.take_reports(sorted(finished_req_ids)))
        return KVConnectorTransferResults(set(finished.sent), set(finished.received), set(finished.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """With several groups vLLM takes no block ids; the failed requests have been named instead."""
        errors = self._worker.take_errors()
        return set() if len(self._layout.groups) > 1 else set(errors)

    def shutdown(self) -> None:
        if self._open:
            self._open = False
            self._shared.leave(self._engine_id)

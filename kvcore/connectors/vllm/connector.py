"""`KvcoreConnector`: kvcore as a KV connector of vLLM (v1 interface), in both roles.

    KVTransferConfig(kv_connector="KvcoreConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
                     kv_connector_extra_config={"l1_bytes": 1 << 30})

Installed beside vLLM, kvcore registers the name (`plugin`); `kv_connector_module_path="kvcore.connectors.vllm"` works
as well. `settings` has what may stand in `kv_connector_extra_config`, `sides` where the cache is.

What vLLM cannot be told: which request of a model with several cache groups had a failed synchronous load, and that the
output of a batch in flight stands on one. Loads are asynchronous by default; synchronous ones are refused while batches
overlap, and with several groups unless `kv_load_failure_policy="fail"`: a failed load then stops the engine, because
going on would deliver what was computed over the hole.
"""

# mypy: disable-error-code="import-not-found, misc"
from __future__ import annotations

import os
from collections.abc import Callable, Iterable
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
from kvcore.connectors.vllm.events import EventBook, StoredMetadata, wants_events
from kvcore.connectors.vllm.hashes import BlockHasher
from kvcore.connectors.vllm.layout import block_sizes_of, filled_by, layout_of, namespace_of, pages_of
from kvcore.connectors.vllm.moving import compute_runtime
from kvcore.connectors.vllm.scheduler import SchedulerHalf
from kvcore.connectors.vllm.settings import Settings
from kvcore.connectors.vllm.sides import EngineConfig, attach, check_process
from kvcore.connectors.vllm.stats import KvcoreMetrics, KvcoreStats, loads_of, reader_of
from kvcore.connectors.vllm.worker import WorkerHalf
from kvcore.errors import ConfigError, PeerError
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher
from kvcore.runtime.chance import fresh_bytes

_RENEWAL_BYTES = 16


@dataclass(frozen=True)
class KvcoreMetadata(KVConnectorMetadata):
    """One step's plan on its way to the workers, and the process that made it."""

    step: StepMeta
    process: int


def _check(vllm_config: Any, transfer: Any, layout: CacheLayout, settings: Settings) -> None:
    if vllm_config.parallel_config.world_size != 1:
        raise ConfigError("KvcoreConnector serves engines of one worker; no tensor or pipeline parallelism yet")
    if settings.load_async:
        return
    if len(layout.groups) > 1 and transfer.kv_load_failure_policy != "fail":
        raise ConfigError(
            "load_async = false with several cache groups: vLLM cannot be told which load failed, so a failed load "
            'stops the engine; say that you want this with kv_load_failure_policy = "fail"'
        )
    if vllm_config.max_concurrent_batches > 1:
        raise ConfigError("load_async = false with overlapping batches: vLLM would deliver what a failed load computed")


def _nothing() -> None:
    """Of an engine that computes on the host: it has no streams."""


class KvcoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module text."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        settings = Settings.read(transfer.kv_connector_extra_config)
        self._layout = layout_of(kv_cache_config, settings.chunk_tokens)
        _check(vllm_config, transfer, self._layout, settings)
        namespace = namespace_of(vllm_config, kv_cache_config, self._layout)
        block_tokens, noted = block_sizes_of(vllm_config, kv_cache_config)[1], wants_events(vllm_config)
        engine = EngineConfig(
            str(transfer.engine_id),
            self._layout,
            namespace,
            BlockHasher(ChunkHasher(namespace), block_tokens),
            load_async=settings.load_async,
            limits=settings.limits,
            noted=noted,
        )
        self._book = EventBook(self._layout.chunk_tokens, block_tokens) if noted else None
        self._load_async = settings.load_async
        rank = vllm_config.parallel_config.rank if role is KVConnectorRole.WORKER else None
        self._attached = attach(engine, settings, rank)
        self._run, self._run_now = self._attached.runner.call, self._attached.runner.call_now
        self._side = self._attached.side
        self._open = True
        self._active = False  # of a worker: this step's hooks have something to do
        self._follow: Callable[[], None] = _nothing  # where events are recorded: the stream that we are called on
        self._build_halves(overlapping=vllm_config.max_concurrent_batches > 1)

    def _build_halves(self, overlapping: bool) -> None:
        """A role has its own half only, unless both share a side."""
        core, worker = self._side.scheduler, self._side.worker
        own = core if self.role is KVConnectorRole.SCHEDULER else worker
        assert own is not None, "a side has the half of the role that it was attached for"
        self._stats = reader_of(own)
        if core is not None:
            self._scheduler = SchedulerHalf(
                core, self._layout, self._side.clock, overlapping=overlapping, load_async=self._load_async
            )
        if worker is not None:
            self._worker = WorkerHalf(worker, self._side.noted)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a later miss: output of a preempted request need not be dropped for it."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvcoreStats:
        return KvcoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvcoreMetrics:
        return KvcoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ------------------------------------------------------------------ scheduler, in the order of the calls

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new_request(request)
        if self._book is not None:
            self._book.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._run_now(self._scheduler.matched_tokens(request, num_computed_tokens))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._run_now(self._scheduler.after_alloc(request, blocks.get_block_ids(), num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> KvcoreMetadata:
        step = self._scheduler.quiet_step(scheduler_output)
        if step is None:
            step = self._run_now(self._scheduler.build_meta(scheduler_output))
        if self._book is not None:
            self._book.planned(step)
        return KvcoreMetadata(step, os.getpid())

    def update_connector_output(self, connector_output: Any) -> None:
        """An empty report costs no way to the loop: the scheduler's half makes up for it at its next call."""
        output = connector_output
        finished = Finished(
            frozenset(output.finished_sending or ()),
            frozenset(output.finished_recving or ()),
            frozenset(output.failed_recving or ()),
            loads_of(output.kv_connector_stats),
        )
        self._scheduler.step_ended()
        errors = frozenset(output.invalid_block_ids or ())
        if finished.sent or finished.received or finished.failed or finished.loads.count or errors:
            self._run_now(self._report(finished, errors))
        if self._book is not None and isinstance(output.kv_connector_worker_meta, StoredMetadata):
            self._book.ended(output.kv_connector_worker_meta.notes)

    async def _report(self, finished: Finished, errors: frozenset[int]) -> None:
        self._scheduler.report(finished, errors)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        held = self._run_now(self._scheduler.finished(request, block_ids))
        if self._book is not None:
            self._book.left(request)
        return held, None

    def take_events(self) -> Iterable[Any]:
        return self._book.take() if self._book is not None else ()

    def reset_cache(self) -> bool | None:
        """Nothing stored before is found again by this engine, wherever it lies: its keys are other ones from here on.

        vLLM asks for this when weights have changed. Requests that wait are looked up anew; one that holds blocks is
        not stored any more until it has been preempted.
        """
        self._run(self._renew())
        if self._book is not None:
            self._book.reset()
        return True

    async def _renew(self) -> None:
        self._side.hasher.renew(fresh_bytes(_RENEWAL_BYTES))
        if self._side.scheduler is not None:
            self._side.scheduler.keys_changed()
        if self._attached.host is not None:
            self._attached.host.storage.drop_l1()

    # ------------------------------------------------------------------ worker, in the order of the calls

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pages = pages_of(self._kv_cache_config, kv_caches, filled_by(self._vllm_config))
        runtime, side = compute_runtime(pages), self._side
        if runtime is not None:
            self._follow = runtime.follow
        self._run(self._worker.register(lambda: side.moving(pages, runtime)))

    def handle_preemptions(self, kv_connector_metadata: KvcoreMetadata) -> None:
        if self._attached.host is not None:
            check_process(kv_connector_metadata.process)
        self._active = self._worker.enter(kv_connector_metadata.step)
        if self._active:
            self._run(self._worker.fence(kv_connector_metadata.step))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if metadata.step.loads:
            self._follow()
            self._run(self._worker.start_load(metadata.step))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker.loading:
            self._run(self._worker.wait_load())

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Cells hold all layers of their group: stores begin in `wait_for_save`."""

    def wait_for_save(self) -> None:
        if self._active:
            self._follow()
            self._run(self._worker.wait_save())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if not self._active:
            return KVConnectorTransferResults()
        finished = self._run(self._worker.take_reports(sorted(finished_req_ids)))
        return KVConnectorTransferResults(set(finished.sent), set(finished.received), set(finished.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """With several groups vLLM takes no block ids; failed asynchronous loads have been named by request instead."""
        errors = self._worker.take_errors()
        if len(self._layout.groups) == 1:
            return set(errors)
        if errors and not self._load_async:
            raise PeerError(
                "a synchronous load failed, and vLLM cannot be told for which request of a model with several cache "
                "groups; the engine stops here rather than deliver what was computed over the hole"
            )
        return set()

    def get_kv_connector_stats(self) -> KvcoreStats | None:
        """Of this half. A step in which a worker had nothing to do has changed nothing."""
        if self.role is KVConnectorRole.SCHEDULER:
            return self._stats.take()
        return self._stats.take(self._worker.take_loads()) if self._active else None

    def build_connector_worker_meta(self) -> StoredMetadata | None:
        notes = self._worker.take_notes() if self._active else ()
        return StoredMetadata(notes) if notes else None

    def shutdown(self) -> None:
        if self._open:
            self._open = False
            self._attached.leave()

"""Host memory for vLLM's `OffloadingConnector` where there is no GPU: its own spec takes CUDA and XPU only.

The connector's scheduler half - lookups, asynchronous loads, deferred stores, flushes before preemptions - is vLLM's
code, which is what the ladder is pointed at. Here is the smallest worker that its interface allows: pages are copied
at once, and reported `DELAY_STEPS` questions later, so that loads and stores are under way across steps.

    --ladder-connector vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector
    --ladder-connector-config '{"spec_name": "HostMemorySpec", "cpu_bytes_to_use": 268435456,
                                "spec_module_path": "kvcore.ladder.targets.vllm.host_memory_offload"}'
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return"
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

DELAY_STEPS = 2


class HostMemoryWorker(OffloadingWorker):
    """Copies whole pages; chunk slots live in ordinary memory."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> None:
        self._pages = [
            [tensor.tensor for tensor in (kv_caches.tensors[ref.tensor_idx] for ref in refs)]
            for refs in kv_caches.group_data_refs
        ]
        self._blocks_per_chunk = blocks_per_chunk
        self._slots: dict[tuple[int, int, int], torch.Tensor] = {}  # (slot, part, tensor of its group)
        self._jobs: dict[int, int] = {}  # job -> questions until it is reported

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for group, block, slot, part in self._pairs(src_spec, dst_spec):
            for index, pages in enumerate(self._pages[group]):
                self._slots[slot, part, index] = pages[block].clone()
        self._jobs[job_id] = DELAY_STEPS
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for group, block, slot, part in self._pairs(dst_spec, src_spec):
            for index, pages in enumerate(self._pages[group]):
                pages[block].copy_(self._slots[slot, part, index])
        self._jobs[job_id] = DELAY_STEPS
        return True

    def _pairs(self, gpu: GPULoadStoreSpec, cpu: Any) -> Iterator[tuple[int, int, int, int]]:
        """(group, engine block, slot, part of the slot), in the order in which the two lists belong together."""
        first_block = first_slot = 0
        for group, (count, index) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
            skipped = int(index) % self._blocks_per_chunk
            for offset in range(count):
                slot, part = divmod(skipped + offset, self._blocks_per_chunk)
                yield group, int(gpu.block_ids[first_block + offset]), int(cpu.block_ids[first_slot + slot]), part
            first_block += count
            first_slot += -(-(skipped + count) // self._blocks_per_chunk) if count else 0

    def get_finished(self) -> list[TransferResult]:
        self._jobs = {job: left - 1 for job, left in self._jobs.items()}
        done = [job for job, left in self._jobs.items() if left <= 0]
        for job in done:
            del self._jobs[job]
        return [TransferResult(job_id=job, success=True) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        """Everything was copied when it was submitted."""


class HostMemorySpec(CPUOffloadingSpec):
    """vLLM's own manager of slots, and the worker above."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostMemoryWorker(kv_caches, self.blocks_per_chunk)

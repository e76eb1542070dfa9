"""Building vLLM's real schedulers without a model. Everything vLLM needs to know is made by hand here."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

from kvcore.ladder.targets.vllm_scheduler.case import BLOCK_TOKENS, Case, CaseRequest

ABORTED = RequestStatus.FINISHED_ABORTED
MAX_MODEL_LEN = 512
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 32,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 1024,
    "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip


@cache
def _base_config() -> Any:
    """One real VllmConfig per process (it takes a second); cases get changed copies."""
    logging.disable(logging.WARNING)  # "this API is experimental", once per connector
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN, enforce_eager=True
        )
        model.model = "tiny"
        return VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=MAX_MODEL_LEN,
                max_model_len=MAX_MODEL_LEN,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True, cache_dtype="auto"),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
        )


def make_config(case: Case, transfer: dict[str, Any]) -> Any:
    config = copy.copy(_base_config())
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config.max_num_seqs = case.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = case.max_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.async_scheduling = case.async_scheduling
    config.scheduler_config.policy = "priority" if case.priority_policy else "fcfs"
    config.scheduler_config.scheduler_reserve_full_isl = case.reserve_whole
    config.cache_config.enable_prefix_caching = case.prefix_cache
    config.cache_config.num_gpu_blocks = case.num_blocks
    config.kv_transfer_config = KVTransferConfig(kv_role="kv_both", kv_load_failure_policy="recompute", **transfer)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return config


def layer_names(case: Case) -> list[list[str]]:
    return [[f"g{group}.l{layer}" for layer in range(case.layers)] for group in range(len(case.windows))]


def make_kv_config(case: Case) -> Any:
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups, tensors = [], []
    for window, names in zip(case.windows, layer_names(case), strict=True):
        spec = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
        page = spec.page_size_bytes
        assert page == BLOCK_TOKENS * 8, "one 64-bit word per slot"
        groups.append(KVCacheGroupSpec(names, spec))
        tensors.append(
            KVCacheTensor(
                size=page * case.layers * case.num_blocks,
                layers=names,
                layer_stride=page,
                block_stride=page * case.layers,
            )
        )
    return KVCacheConfig(num_blocks=case.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def make_scheduler(case: Case, config: Any, kv_config: Any) -> Any:
    kind = AsyncScheduler if case.async_scheduling else Scheduler
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=kv_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        hash_block_size=BLOCK_TOKENS,
        log_stats=False,
    )
    scheduler.use_v2_model_runner = case.v2_runner
    return scheduler


def make_request(spec: CaseRequest, arrival: float) -> Any:
    return Request(
        request_id=spec.request_id,
        prompt_token_ids=list(spec.prompt),
        sampling_params=SamplingParams(temperature=0, max_tokens=spec.output_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=arrival,
        priority=spec.priority,
        cache_salt=spec.salt or None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )

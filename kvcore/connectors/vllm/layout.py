"""From vLLM's cache configuration to ours: groups, pages, namespace. What cannot be served is refused here, by name.

vLLM's `KVCacheConfig` has groups of layers with one attention rule and one block size; all groups draw on one pool of
block ids, and the pages of one group may lie over those of another. A group's block must be one piece of memory here:
one layer per group, or layers that lie side by side inside a block (`block_stride` >= layers * `layer_stride`).
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from vllm.v1.core.kv_cache_utils import get_none_hash_seed, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvcore.connectors.vllm.host import engine_namespace
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup, negotiate_chunk_tokens
from kvcore.keys import Namespace

CHUNK_TOKENS = 256
_RANDOM_SEED = ("xxhash",)


def layout_of(kv_cache_config: Any, chunk_tokens: int | None = None) -> CacheLayout:
    """The layout for these groups. `chunk_tokens`: the wish; the nearest legal size is taken."""
    groups = tuple(_group(group) for group in kv_cache_config.kv_cache_groups)
    return CacheLayout(groups, 1, negotiate_chunk_tokens(groups, chunk_tokens or CHUNK_TOKENS))


def _group(group: Any) -> ObjectGroup:
    spec = group.kv_cache_spec
    if spec.prefix_replay_tokens:
        raise ConfigError(f"layers {group.layer_names[:2]}: groups that replay a window after a hit are not supported")
    size = len(group.layer_names) * spec.page_size_bytes
    if isinstance(spec, SlidingWindowSpec):
        if spec.extra_retained_tokens:
            raise ConfigError("a window with extra retained tokens (multi-token prediction) is not supported")
        return ObjectGroup(GroupKind.WINDOW, spec.block_size, size, spec.sliding_window)
    if isinstance(spec, FullAttentionSpec):
        return ObjectGroup(GroupKind.FULL, spec.block_size, size)
    raise ConfigError(
        f"layers {group.layer_names[:2]}: {type(spec).__name__} is not supported; full and sliding-window attention are"
    )


def block_sizes_of(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """(tokens that the scheduler aligns to, tokens per block hash)."""
    scheduler, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return scheduler, hashed


def namespace_of(vllm_config: Any, layout: CacheLayout) -> Namespace:
    """Everything besides tokens that changes the bytes. The engine's hashes carry adapter, salt and images."""
    model = vllm_config.model_config
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return engine_namespace(
        layout,
        model_name=str(model.model),
        revision=str(model.revision or ""),
        kv_dtype=f"{vllm_config.cache_config.cache_dtype}/{model.dtype}",
        algorithm=str(algorithm),
        seed=_hash_seed(str(algorithm)),
    )


def _hash_seed(algorithm: str) -> str:
    """What the engine's first hash is made of; empty when it differs in every process."""
    if algorithm.startswith(_RANDOM_SEED) and os.environ.get("PYTHONHASHSEED") is None:
        return ""
    return str(get_none_hash_seed())


def pages_of(kv_cache_config: Any, layout: CacheLayout, kv_caches: Mapping[str, torch.Tensor]) -> list[Any]:
    """`pages[g]`: [blocks, layers, ...] of group g, on the engine's own memory."""
    pages = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        tensors = [kv_caches[name] for name in group.layer_names]
        view = _side_by_side(tensors)
        if view is None or view[0].nbytes != layout.groups[index].bytes_per_block:
            raise ConfigError(
                f"group {index}: the pages of its {len(tensors)} layers do not lie side by side inside a block, so a "
                "block is no single piece of memory; use a block-outermost cache layout"
            )
        pages.append(view)
    return pages


def _side_by_side(tensors: Sequence[torch.Tensor]) -> Any | None:
    """[blocks, layers, page bytes] over the layers' own memory, or None if they do not lie so."""
    first = tensors[0]
    blocks, page = first.shape[0], prod(first.shape[1:]) * first.element_size()
    stride = first.stride(0) * first.element_size()
    for layer, tensor in enumerate(tensors):
        if not tensor[0].is_contiguous() or tensor.shape != first.shape or tensor.stride(0) != first.stride(0):
            return None
        if tensor.data_ptr() != first.data_ptr() + layer * page:
            return None
    if stride < len(tensors) * page:
        return None
    flat = torch.empty(0, dtype=torch.uint8).set_(
        first.untyped_storage(),
        first.storage_offset() * first.element_size(),
        (blocks, len(tensors), page),
        (stride, page, 1),
    )
    array = flat.numpy()
    assert array.base is not None or array.flags.owndata is False
    return np.asarray(array)

"""From vLLM's cache configuration to ours: groups, pages, namespace. What cannot be served is refused here, by name.

vLLM's `KVCacheConfig` has groups of layers with one attention rule and one block size; all groups draw on one pool of
block ids, and the pages of one group may lie over those of another.

The pages of one layer are copied whole: what a block looks like inside depends on the attention backend (on CPU the
shape says K|V side by side, while the kernel fills one half of a block with K and the other with V). So blocks are
*opaque* (`kvcore.device.formats`), named by device and inner order. Each layer's block must be one piece of memory; the
layers may lie as they like.

The namespace must know the layout before there is any tensor. `fingerprints_of` says it from the configuration; at
registration the tensors are discovered, and must give the same fingerprints, or the engine is refused
(`kvcore.connectors.registration`).
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from blake3 import blake3
from vllm.v1.core.kv_cache_utils import get_none_hash_seed, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from kvcore.connectors.pages import TensorPages
from kvcore.connectors.registration import check_promised, discover, fingerprint
from kvcore.connectors.vllm.host import engine_namespace
from kvcore.device.discover import PagedKV
from kvcore.device.formats import EngineKVFormat, KVLayout, LayoutHints
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup, negotiate_chunk_tokens
from kvcore.keys import Namespace

CHUNK_TOKENS = 256
_RANDOM_SEED = ("xxhash",)
_TOLD_CHARS = 32
_WITHOUT_LAYERS = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
"""Ways to draft tokens that keep no KV."""
_REACHES = {"Llama4ForCausalLM": 32768, "Llama4ForConditionalGeneration": 32768}
"""By architecture: engines that serve longer requests than this compute another attention, from the first token on."""
_KINDS: dict[type, GroupKind] = {
    FullAttentionSpec: GroupKind.FULL,
    MLAAttentionSpec: GroupKind.FULL,
    SlidingWindowSpec: GroupKind.WINDOW,
}
"""By the exact type: vLLM derives others from these whose blocks follow another rule (some lose blocks in between)."""


def layout_of(kv_cache_config: Any, chunk_tokens: int | None = None) -> CacheLayout:
    """The layout for these groups. `chunk_tokens`: the wish; the nearest legal size is taken."""
    groups = tuple(_group(group) for group in kv_cache_config.kv_cache_groups)
    return CacheLayout(groups, 1, negotiate_chunk_tokens(groups, chunk_tokens or CHUNK_TOKENS))


def _group(group: Any) -> ObjectGroup:
    spec, layers = group.kv_cache_spec, f"layers {group.layer_names[:2]}"
    kind = _KINDS.get(type(spec))
    if kind is None:
        raise ConfigError(
            f"{layers} keep a {type(spec).__name__}, which is not supported (recurrent layers, for one, are not); "
            f"supported are {', '.join(known.__name__ for known in _KINDS)}"
        )
    if spec.prefix_replay_tokens:
        raise ConfigError(f"{layers}: groups that replay a window after a hit are not supported")
    if spec.tokens_per_state != 1:
        raise ConfigError(f"{layers}: pages that keep one state for {spec.tokens_per_state} tokens are not supported")
    size = len(group.layer_names) * spec.page_size_bytes
    if kind is GroupKind.FULL:
        return ObjectGroup(kind, spec.block_size, size)
    if spec.extra_retained_tokens:
        raise ConfigError(f"{layers}: a window with extra retained tokens (multi-token prediction) is not supported")
    return ObjectGroup(kind, spec.block_size, size, spec.sliding_window)


def block_sizes_of(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """(tokens that the scheduler aligns to, tokens per block hash)."""
    scheduler, hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return scheduler, hashed


def namespace_of(vllm_config: Any, kv_cache_config: Any, layout: CacheLayout) -> Namespace:
    """Everything besides tokens that changes the bytes. The engine's hashes carry adapter, salt and images."""
    model = vllm_config.model_config
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return engine_namespace(
        layout,
        model_name=str(model.model),
        revision=f"{model.revision or ''}{_told(model)}{_drafter(vllm_config.speculative_config)}",
        quantisation=_quantisation(model),
        kv_dtype=f"{vllm_config.cache_config.cache_dtype}/{model.dtype}",
        algorithm=str(algorithm),
        seed=_hash_seed(str(algorithm)),
        kv_fingerprints=fingerprints_of(kv_cache_config, filled_by(vllm_config)),
    )


def _told(model: Any) -> str:
    """A digest of what the user has told about the model: it changes the KV, and no other name.

    Not of the model's configuration itself. Some models write into theirs while a worker loads them, so scheduler and
    worker would have two names.
    """
    overrides = model.hf_overrides
    if callable(overrides):
        overrides = f"{overrides.__module__}.{overrides.__qualname__}"
    more = [each for each in (_reach(model), _encoder(model.multimodal_config)) if each]
    if not overrides and not model.hf_config_path and not more:
        return ""
    told = json.dumps([model.hf_config_path, overrides, *more], sort_keys=True, default=repr)
    return f"/{blake3(told.encode()).hexdigest()[:_TOLD_CHARS]}"


def _reach(model: Any) -> str:
    """Which of the lengths the longest request exceeds from which on the model computes other KV, also for short ones.

    A length that is fitted to the memory is so after the model was made, for its full length.
    """
    limits = [_REACHES[name] for name in model.architectures if name in _REACHES]
    tuned = model.override_generation_config.get("attn_temperature_tuning") if limits else None
    limits += _stretched_from(getattr(model.hf_text_config, "rope_parameters", None) or {})
    if not limits:
        return ""
    fitted = model.original_max_model_len == -1
    return f"reach {tuned} {['fitted' if fitted else model.max_model_len > limit for limit in limits]}"


def _stretched_from(rope: Any) -> list[int]:
    """LongRoPE has two sets of factors; vLLM takes the long ones if *any* request may be longer than this."""
    if not isinstance(rope, Mapping):
        return []
    if rope.get("rope_type") == "longrope":
        return [rope["original_max_position_embeddings"]]
    return [limit for kind in rope.values() for limit in _stretched_from(kind)]


def _encoder(multimodal: Any) -> str:
    """How images and videos become embeddings, as far as their hashes do not say it."""
    if multimodal is None or not (multimodal.mm_encoder_attn_dtype or multimodal.video_pruning_rate):
        return ""
    scales = f"{multimodal.mm_encoder_attn_dtype} {multimodal.mm_encoder_fp8_scale_path}"
    return f"encoder {scales} {multimodal.video_pruning_rate} {multimodal.video_pruning_method}"


def _drafter(speculative: Any) -> str:
    """The model that drafts tokens, where it has layers of its own in the cache: another one fills them otherwise."""
    if speculative is None or speculative.method in _WITHOUT_LAYERS or speculative.draft_model_config is None:
        return ""
    draft = speculative.draft_model_config
    return f"/drafts {draft.model} {draft.revision or ''}{_told(draft)} {_quantisation(draft)} {draft.dtype}"


def _quantisation(model: Any) -> str:
    """Of the weights. Weights that are rounded make other KV."""
    details = model.quantization_config
    return f"{model.quantization or ''}" if details is None else f"{model.quantization or ''}/{details!r}"


def _hash_seed(algorithm: str) -> str:
    """What the engine's first hash is made of; empty when it differs in every process."""
    if algorithm.startswith(_RANDOM_SEED) and os.environ.get("PYTHONHASHSEED") is None:
        return ""
    return str(get_none_hash_seed())


def filled_by(vllm_config: Any) -> str:
    """Who fills the blocks: "cpu", or another device and the attention backends that were asked for on it."""
    device, attention = vllm_config.device_config.device_type, vllm_config.attention_config
    if device == "cpu":
        return str(device)  # its kernels share one order
    asked = [("", attention.backend), *sorted(attention.backend_per_kind.items())]
    return "-".join([device, *(f"{kind}{backend.name}" for kind, backend in asked if backend is not None)])


def fingerprints_of(kv_cache_config: Any, filler: str) -> list[str]:
    """Per group what its chunks will be, as the configuration has it. `filler`: see `filled_by`."""
    return [fingerprint(_expected(kv_cache_config, group, filler)) for group in kv_cache_config.kv_cache_groups]


def _expected(kv_cache_config: Any, group: Any, filler: str) -> KVLayout:
    spec = group.kv_cache_spec
    return KVLayout(
        EngineKVFormat.LAYERS_OPAQUE,
        len(group.layer_names),
        kv_cache_config.num_blocks,
        spec.block_size,
        spec.num_kv_heads,
        spec.head_size,
        dtypes=(str(spec.dtype),),
        parts=EngineKVFormat.LAYERS_OPAQUE.kv_parts,
        inner=("",),
        layer_block_bytes=spec.page_size_bytes,
        opaque=f"vllm/{filler}/{_inner_order(kv_cache_config)}",
    )


def _inner_order(kv_cache_config: Any) -> str:
    """HNC or NHC: how heads, tokens and content follow each other in a block; empty if the engine does not say."""
    return "".join(axis for axis in kv_cache_config.kv_cache_layout or "" if axis in "HNC")


def pages_of(kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor], filler: str) -> TensorPages:
    """The groups' tensors, discovered. `filler`: see `filled_by`.

    Raises ConfigError when the tensors are not what the namespace promises.
    """
    groups = kv_cache_config.kv_cache_groups
    layouts = [_expected(kv_cache_config, group, filler) for group in groups]
    tensors = [[kv_caches[name] for name in group.layer_names] for group in groups]
    pages = discover([(layers, _hints(layout)) for layers, layout in zip(tensors, layouts, strict=True)])
    if pages.device_type != filler.partition("-")[0]:
        raise ConfigError(f"the pages lie on {pages.device_type}, the configuration promised {filler}")
    check_promised(pages, fingerprints_of(kv_cache_config, filler))
    for index, kv in enumerate(pages.groups):
        _check_inner_order(kv, _inner_order(kv_cache_config), index)
        _check_whole(kv, index)
    return pages


def _hints(layout: KVLayout) -> LayoutHints:
    return LayoutHints(
        num_layers=layout.num_layers,
        num_blocks=layout.num_blocks,
        block_tokens=layout.block_tokens,
        num_heads=layout.num_heads,
        head_size=layout.head_size,
        opaque=layout.opaque,
    )


def _check_inner_order(kv: PagedKV, order: str, index: int) -> None:
    """vLLM's tensors are [blocks, H, N, C] in shape; their strides must tell the order that the configuration named."""
    axes = {f"axis{axis}": name for axis, name in enumerate("BHNC")}
    found = "".join(axes.get(text.partition("=")[0], "?") for text in kv.layout.inner[0].split())
    if order and found != "".join(axis for axis in order if axis in found):
        raise ConfigError(f"group {index}: the pages lie in the order {found}, the configuration promised {order}")


def _check_whole(kv: PagedKV, index: int) -> None:
    if any(plane.run_bytes != plane.share_bytes for plane in kv.planes.simplified().planes):
        raise ConfigError(
            f"group {index}: a block of one layer is no single piece of memory; use a cache layout in which blocks are "
            "compact (LBHNC, LBNHC, BLHNC, BLNHC)"
        )

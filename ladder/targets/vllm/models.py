"""Tiny models with random weights, written where they are needed: nothing is downloaded.

vLLM's own `load_format="dummy"` is no oracle: its output does not depend on the prompt. These weights are drawn so that
it does: queries and keys are large enough for sharp attention, and one changed prompt token, wherever it is, changes
what is generated. Everything is float32: where sums are added in another order a mixture of experts in bfloat16
generates other tokens.

    llama     2 layers, full attention: one cache group
    gemma3    2 layers with a window and 1 with full attention: three cache groups
    gpt-oss   1 layer with a window and 1 with full attention, experts, attention sinks: two cache groups

    fingerprint, fingerprint-window   no weights, whole numbers; see `fingerprint`: one and two cache groups
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvcore.ladder.targets.vllm.fingerprint import config_of

VOCABULARY = 256
POSITIONS_MAX = 512
WINDOW_TOKENS = 64
_HIDDEN = 64
_HEADS = 4
_KV_HEADS = 2
_HEAD = 32
_INNER = 96
_EXPERTS = 4
_FILE_NAME = "model.safetensors"

Weights = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TinyModel:
    """`windows`: of each layer; None is full attention."""

    name: str
    windows: tuple[int | None, ...]

    @property
    def groups(self) -> str:
        """As the matrix of the ladder calls it."""
        return "full+window" if any(self.windows) else "full"


def tiny_model(name: str, window_tokens: int = WINDOW_TOKENS) -> TinyModel:
    """One of `MODELS`."""
    return TinyModel(name, tuple(window_tokens if kind == "w" else None for kind in _LAYERS[name]))


_LAYERS = {"llama": "ff", "gemma3": "wwf", "gpt-oss": "wf", "fingerprint": "ff", "fingerprint-window": "fwfw"}
MODELS = tuple(_LAYERS)


def write_model(model: TinyModel, directory: Path, seed: int = 0) -> Path:
    """config.json and weights; the same seed gives the same bytes."""
    from safetensors.torch import save_file

    config, weights = _KINDS[model.name]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_common(model) | config(model), indent=1))
    draw = _Draw(seed)
    save_file(dict(weights(model, draw)), directory / _FILE_NAME)
    return directory


class _Draw:
    """Normal numbers, in the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed + 1)

    def __call__(self, scale: float, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator) * scale


def _common(model: TinyModel) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": len(model.windows),
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "max_position_embeddings": POSITIONS_MAX,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _layer_types(model: TinyModel) -> list[str]:
    return ["sliding_attention" if window else "full_attention" for window in model.windows]


def _window(model: TinyModel) -> int:
    return next(window for window in model.windows if window)


def _attention(prefix: str, draw: _Draw) -> Weights:
    yield f"{prefix}.q_proj.weight", draw(0.25, _HEADS * _HEAD, _HIDDEN)
    yield f"{prefix}.k_proj.weight", draw(0.25, _KV_HEADS * _HEAD, _HIDDEN)
    yield f"{prefix}.v_proj.weight", draw(0.5, _KV_HEADS * _HEAD, _HIDDEN)
    yield f"{prefix}.o_proj.weight", draw(0.5, _HIDDEN, _HEADS * _HEAD)


def _mlp(prefix: str, draw: _Draw) -> Weights:
    yield f"{prefix}.gate_proj.weight", draw(0.1, _INNER, _HIDDEN)
    yield f"{prefix}.up_proj.weight", draw(0.1, _INNER, _HIDDEN)
    yield f"{prefix}.down_proj.weight", draw(0.1, _HIDDEN, _INNER)


# ---- llama


def _llama_config(model: TinyModel) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    }


def _llama_weights(model: TinyModel, draw: _Draw) -> Weights:
    yield "model.embed_tokens.weight", draw(1.0, VOCABULARY, _HIDDEN)
    for layer in range(len(model.windows)):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", torch.ones(_HIDDEN)
        yield from _attention(f"{prefix}.self_attn", draw)
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(_HIDDEN)
        yield from _mlp(f"{prefix}.mlp", draw)
    yield "model.norm.weight", torch.ones(_HIDDEN)
    yield "lm_head.weight", draw(0.5, VOCABULARY, _HIDDEN)


# ---- gemma3: norms are written as the difference from 1. The head is the embedding, so what the layers add must be
# ---- larger than the embedding itself, or every token repeats for ever.


def _gemma3_config(model: TinyModel) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _layer_types(model),
        "sliding_window": _window(model),
        "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
        "query_pre_attn_scalar": _HEAD,
        "tie_word_embeddings": True,
    }


def _gemma3_weights(model: TinyModel, draw: _Draw) -> Weights:
    yield "model.embed_tokens.weight", draw(0.25, VOCABULARY, _HIDDEN)
    for layer in range(len(model.windows)):
        prefix = f"model.layers.{layer}"
        for norm, weight in (
            ("input", 0.0),
            ("post_attention", 3.0),
            ("pre_feedforward", 0.0),
            ("post_feedforward", 3.0),
        ):
            yield f"{prefix}.{norm}_layernorm.weight", torch.full((_HIDDEN,), weight)
        yield from _attention(f"{prefix}.self_attn", draw)
        yield f"{prefix}.self_attn.q_norm.weight", torch.full((_HEAD,), 0.5)
        yield f"{prefix}.self_attn.k_norm.weight", torch.full((_HEAD,), 0.5)
        yield from _mlp(f"{prefix}.mlp", draw)
    yield "model.norm.weight", torch.zeros(_HIDDEN)


# ---- gpt-oss


def _gpt_oss_config(model: TinyModel) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "layer_types": _layer_types(model),
        "sliding_window": _window(model),
        "attention_bias": True,
        "num_local_experts": _EXPERTS,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "original_max_position_embeddings": POSITIONS_MAX // 2,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "tie_word_embeddings": False,
    }


def _gpt_oss_weights(model: TinyModel, draw: _Draw) -> Weights:
    yield "model.embed_tokens.weight", draw(1.0, VOCABULARY, _HIDDEN)
    for layer in range(len(model.windows)):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", torch.ones(_HIDDEN)
        yield from _attention(f"{prefix}.self_attn", draw)
        for name, size in (("q", _HEADS * _HEAD), ("k", _KV_HEADS * _HEAD), ("v", _KV_HEADS * _HEAD), ("o", _HIDDEN)):
            yield f"{prefix}.self_attn.{name}_proj.bias", draw(0.05, size)
        yield f"{prefix}.self_attn.sinks", draw(0.5, _HEADS)
        yield f"{prefix}.post_attention_layernorm.weight", torch.ones(_HIDDEN)
        yield from _experts(f"{prefix}.mlp", draw)
    yield "model.norm.weight", torch.ones(_HIDDEN)
    yield "lm_head.weight", draw(0.5, VOCABULARY, _HIDDEN)


def _experts(prefix: str, draw: _Draw) -> Weights:
    yield f"{prefix}.router.weight", draw(1 / math.sqrt(_HIDDEN), _EXPERTS, _HIDDEN)
    yield f"{prefix}.router.bias", draw(0.05, _EXPERTS)
    yield f"{prefix}.experts.gate_up_proj", draw(0.1, _EXPERTS, _HIDDEN, 2 * _INNER)
    yield f"{prefix}.experts.gate_up_proj_bias", draw(0.05, _EXPERTS, 2 * _INNER)
    yield f"{prefix}.experts.down_proj", draw(0.1, _EXPERTS, _INNER, _HIDDEN)
    yield f"{prefix}.experts.down_proj_bias", draw(0.05, _EXPERTS, _HIDDEN)


# ---- fingerprint


def _fingerprint_config(model: TinyModel) -> dict[str, Any]:
    return config_of(model.windows)


def _no_weights(model: TinyModel, draw: _Draw) -> Weights:
    return iter(())


_Config = Callable[[TinyModel], dict[str, Any]]
_Make = Callable[[TinyModel, _Draw], Weights]
_KINDS: dict[str, tuple[_Config, _Make]] = {
    "llama": (_llama_config, _llama_weights),
    "gemma3": (_gemma3_config, _gemma3_weights),
    "gpt-oss": (_gpt_oss_config, _gpt_oss_weights),
    "fingerprint": (_fingerprint_config, _no_weights),
    "fingerprint-window": (_fingerprint_config, _no_weights),
}

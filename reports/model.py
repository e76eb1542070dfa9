"""A model as the cost sees it: its layers by kind, its KV bytes, its work per token.

Theory of operation
-------------------
A layer keeps its past in one of three ways, and only the first grows with the sequence:

    full        keys and values of every token; with MLA one latent row instead (`latent_dim` values for all heads)
    window      keys and values of the last `window_tokens` tokens: grows to a constant
    recurrent   a state of fixed size: a constant from the first token on

So `kv_bytes(n) = n * full + min(n, window_tokens) * window + state`, and a hit on any prefix, however short, must load
the constants too. Bytes per token and layer are 2 * kv_heads * head_dim * value_bytes (one key, one value), or
latent_dim * value_bytes with MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Work per token: 2 FLOPs per active parameter (one multiply, one add; Kaplan et al., arXiv:2001.08361, section 2.1), and
per pair of a query with a key `2 * heads * (qk_dim + v_dim)` in each layer: the score and the weighted sum. Where keys
and values have head_dim values this is the 4 * q * d of the literature. Pairs are counted causally: token i sees i
tokens, or `window_tokens` of them in a window layer. Recurrent layers have no pairs; their work is in the parameters.

Tensor parallelism: keys and values are cut by heads, so a rank holds `1/gpus` of the bytes until it holds a single KV
head; more ranks hold copies. An MLA row belongs to all heads and every rank holds all of it.

Values only; nothing here knows a GPU or a link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore.errors import ConfigError
from kvcore.reports.numbers import check_count, check_positive, check_text

VALUE_BYTES = (1, 2, 4)
LAYERS_MAX = 10_000
DIM_MAX = 1_000_000
TOKENS_MAX = 100_000_000
PARAMETERS_MAX = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model. Bytes are whole; `params_active` without embeddings; `unsure` names fields to check before use.

    `qk_dim` and `v_dim` are the widths of a query and a value per head at prefill; 0 stands for head_dim.
    """

    name: str
    layers_full: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_dim: int
    params_active: float
    params_total: float
    weight_bytes: float
    layers_window: int = 0
    window_tokens: int = 0
    layers_recurrent: int = 0
    state_bytes: int = 0
    latent_dim: int = 0
    qk_dim: int = 0
    v_dim: int = 0
    value_bytes: int = 2
    source: str = ""
    unsure: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_text("name", self.name)
        self._check_layers()
        self._check_dims()
        self._check_sizes()

    def _check_layers(self) -> None:
        for field in ("layers_full", "layers_window", "layers_recurrent"):
            check_count(field, getattr(self, field), 0, LAYERS_MAX)
        check_count("window_tokens", self.window_tokens, 0, TOKENS_MAX)
        check_count("state_bytes", self.state_bytes, 0, 10**13)
        if self.layers < 1:
            raise ConfigError("a model needs at least one layer: layers_full, layers_window and layers_recurrent are 0")
        if bool(self.layers_window) != bool(self.window_tokens):
            raise ConfigError("layers_window and window_tokens go together: give both or neither")
        if bool(self.layers_recurrent) != bool(self.state_bytes):
            raise ConfigError("layers_recurrent and state_bytes go together: give both or neither")

    def _check_dims(self) -> None:
        for field in ("heads", "kv_heads", "head_dim", "hidden_dim"):
            check_count(field, getattr(self, field), 1, DIM_MAX)
        for field in ("latent_dim", "qk_dim", "v_dim"):
            check_count(field, getattr(self, field), 0, DIM_MAX)
        if self.kv_heads > self.heads:
            raise ConfigError(f"kv_heads {self.kv_heads} exceed heads {self.heads}: were the two exchanged?")
        if self.value_bytes not in VALUE_BYTES:
            raise ConfigError(f"value_bytes must be one of {VALUE_BYTES} (2 for bf16, 1 for fp8): {self.value_bytes}")

    def _check_sizes(self) -> None:
        check_positive("params_active", self.params_active, PARAMETERS_MAX)
        check_positive("params_total", self.params_total, PARAMETERS_MAX)
        check_positive("weight_bytes", self.weight_bytes, 4 * PARAMETERS_MAX)
        if self.params_active > self.params_total:
            raise ConfigError(f"params_active {self.params_active:.4g} exceed params_total {self.params_total:.4g}")

    @property
    def layers(self) -> int:
        return self.layers_full + self.layers_window + self.layers_recurrent

    def layer_bytes_per_token(self) -> int:
        """KV bytes of one token in one layer that keeps tokens."""
        values = self.latent_dim or 2 * self.kv_heads * self.head_dim
        return values * self.value_bytes

    def kv_bytes_per_token(self) -> int:
        """What one more token adds once the windows are full."""
        return self.layers_full * self.layer_bytes_per_token()

    def constant_bytes(self) -> int:
        """What any sequence of at least `window_tokens` holds besides: full windows and recurrent states."""
        return self.layers_window * self.window_tokens * self.layer_bytes_per_token() + self.state_bytes

    def flops_per_token(self) -> float:
        """Linear work: 2 per active parameter."""
        return 2.0 * self.params_active

    def flops_per_pair(self) -> int:
        """Attention work of one query with one key, in one layer, all heads."""
        return 2 * self.heads * ((self.qk_dim or self.head_dim) + (self.v_dim or self.head_dim))

    def shard_copies(self, gpus: int) -> float:
        """How many times the bytes of a sequence exist in a replica of so many tensor-parallel ranks."""
        shards = 1 if self.latent_dim else min(gpus, self.kv_heads)
        return gpus / shards

    def with_value_bytes(self, value_bytes: int) -> Model:
        """The same model with its KV kept in another width (1: fp8)."""
        return replace(self, value_bytes=value_bytes)


def kv_bytes(model: Model, tokens: int) -> int:
    """Bytes that a sequence of so many tokens holds: 0 for none (module text)."""
    if tokens <= 0:
        return 0
    window = model.layers_window * min(tokens, model.window_tokens)
    return (model.layers_full * tokens + window) * model.layer_bytes_per_token() + model.state_bytes


def attention_pairs(new_tokens: int, prefix_tokens: int, window_tokens: int | None = None) -> float:
    """Pairs of a causal layer: the integral of min(x, window) over the new tokens; n p + n^2/2 without a window."""
    end = prefix_tokens + new_tokens
    if window_tokens is None or end <= window_tokens:
        return new_tokens * prefix_tokens + new_tokens * new_tokens / 2
    ramp = max(0, window_tokens - prefix_tokens)
    return ramp * prefix_tokens + ramp * ramp / 2 + (new_tokens - ramp) * window_tokens


def attention_flops(model: Model, new_tokens: int, prefix_tokens: int) -> float:
    """4 * L * q * d * (n p + n^2/2) over the full layers, capped pairs over the window layers."""
    pairs = model.layers_full * attention_pairs(new_tokens, prefix_tokens)
    if model.layers_window:
        pairs += model.layers_window * attention_pairs(new_tokens, prefix_tokens, model.window_tokens)
    return model.flops_per_pair() * pairs

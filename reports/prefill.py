"""What the GPU needs to compute: prefill of new tokens after a prefix, and a decode step.

Theory of operation
-------------------
    prefill(n after p) = step + max(linear + attention, memory)
    linear             = 2 * P_active * n / (G * e_lin)
    attention          = 4 * L * q * d * (n p + n^2/2) / (G * e_attn)      windows cap the pairs
    memory             = (weights touched + KV of p) / HBM

The shares of the peak, e_lin and e_attn, are from vLLM's blog of 2026-01-08, figure 1. `memory` is the floor of small
batches: one token costs a full read of the weights. A mixture of experts reads only the experts its tokens chose: with
n tokens that each choose a share f = P_active/P_total of the weights, independently, that is 1 - (1 - f)^n of them.
(That choice is ours: routers are not independent, and f counts the shared part too.)

A decode step is the same with one new token per sequence, `batch` of them, each reading its own KV:

    decode(batch, context) = step + max(batch * (2 P + 4 L q d context) / G', (weights + batch * KV(context)) / HBM)

While a copy kernel loads, it has `sm_share` of the SMs, and the step is longer by 1/(1 - sm_share).

`PrefillTerms` are the coefficients with model and host put in. They may also come from a fit through measured points,
which is how a published table or this machine's calibration enters the same break-even.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.reports.host import Host
from kvcore.reports.model import Model, attention_flops, attention_pairs, kv_bytes


@dataclass(frozen=True, slots=True)
class PrefillTerms:
    """Seconds by tokens and pairs. `pair_s` is all full layers together; `memory` is None where a fit knows none."""

    fixed_s: float
    token_s: float
    pair_s: float
    window_pair_s: float = 0.0
    window_tokens: int = 0
    memory: MemoryTerms | None = None

    def seconds(self, new_tokens: int, prefix_tokens: int = 0) -> float:
        """Prefill of the new tokens; nothing to compute costs nothing."""
        if new_tokens <= 0:
            return 0.0
        compute = self.compute_s(new_tokens, prefix_tokens)
        if self.memory is None:
            return self.fixed_s + compute
        return self.fixed_s + max(compute, self.memory.seconds(new_tokens, prefix_tokens))

    def compute_s(self, new_tokens: int, prefix_tokens: int) -> float:
        """Without the fixed part and the floor."""
        total = self.token_s * new_tokens + self.pair_s * attention_pairs(new_tokens, prefix_tokens)
        if self.window_pair_s:
            total += self.window_pair_s * attention_pairs(new_tokens, prefix_tokens, self.window_tokens)
        return total

    def marginal_s(self, prefix_tokens: int) -> float:
        """Seconds that one more token after so many costs, in a large batch."""
        windows = self.window_pair_s * min(prefix_tokens, self.window_tokens)
        return self.token_s + self.pair_s * prefix_tokens + windows


@dataclass(frozen=True, slots=True)
class MemoryTerms:
    """The floor: reads of weights and of the prefix's KV."""

    model: Model
    copies: float
    bytes_per_s: float

    def seconds(self, new_tokens: int, prefix_tokens: int) -> float:
        kv = kv_bytes(self.model, prefix_tokens) * self.copies
        return (weights_touched_bytes(self.model, new_tokens) + kv) / self.bytes_per_s


def weights_touched_bytes(model: Model, tokens: int) -> float:
    """Bytes of weights that a step over so many tokens reads (module text)."""
    share = model.params_active / model.params_total
    return model.weight_bytes * (1 - (1 - share) ** tokens) if _sparse(share) else model.weight_bytes


def _sparse(share: float) -> bool:
    # Embeddings are not counted as active; a dense 8B model has a share of 0.87 and reads all of its layers.
    return share < 0.6


def prefill_terms(model: Model, host: Host) -> PrefillTerms:
    """Coefficients for a model on a replica."""
    pair_s = model.flops_per_pair() / host.attention_flops()
    return PrefillTerms(
        host.step_s,
        model.flops_per_token() / host.linear_flops(),
        pair_s * model.layers_full,
        pair_s * model.layers_window,
        model.window_tokens,
        MemoryTerms(model, model.shard_copies(host.gpus), host.memory_Bps()),
    )


def prefill_s(model: Model, host: Host, new_tokens: int, prefix_tokens: int = 0) -> float:
    """Seconds to compute `new_tokens` after a prefix whose KV is there."""
    return prefill_terms(model, host).seconds(new_tokens, prefix_tokens)


def decode_step_s(model: Model, host: Host, batch: int, context_tokens: int, sm_share: float = 0.0) -> float:
    """Seconds of one step of `batch` sequences with `context_tokens` each; `sm_share` of the SMs copy meanwhile."""
    if batch <= 0:
        return 0.0
    linear = batch * model.flops_per_token() / host.linear_flops()
    attention = batch * attention_flops(model, 1, context_tokens) / host.attention_flops()
    kv = batch * kv_bytes(model, context_tokens) * model.shard_copies(host.gpus)
    memory = (weights_touched_bytes(model, batch) + kv) / host.memory_Bps()
    return host.step_s + max(linear + attention, memory) / (1 - sm_share)

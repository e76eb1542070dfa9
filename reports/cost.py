"""The cost model: is it cheaper to load KV or to compute it again? The public surface of the closed forms.

Theory of operation
-------------------
All formulas are stated, with their source, in the module that holds them:

    reports/model.py      KV bytes by kind of layer; FLOPs per token and per pair of tokens
    reports/host.py       peak rates and the shares of them that an engine reaches
    reports/tier.py       load = lookup + t0 + copies * per_block + bytes / bandwidth
    reports/prefill.py    prefill = step + max(linear + attention, memory); decode step
    reports/breakeven.py  pays, break-even, marginal bandwidth, overlap by layers, split, busy GPU and link

This module puts model, host and tier into them:

    TTFT = queue + request + lookup + load + prefill of the rest, or with overlap and split what replaces the last two

Units: seconds, bytes, tokens, rates per second. Functions are pure: the same arguments give the same figure on every
machine. Parameters with their sources, and a user's own file, come from `kvcore.reports.parameters`. A caller that asks
often (a simulation) takes `prefill_terms` and `load_terms` once and asks those.

Bad numbers are refused where a value is made (Model, Host, Tier), so the formulas need no checks of their own; token
counts below zero are the caller's mistake and refused here.
"""

from __future__ import annotations

from kvcore.errors import CallerError
from kvcore.reports.breakeven import (
    IDLE,
    TOKENS_MAX,
    Busy,
    LineLoad,
    bandwidth_floor,
    break_even,
    inflation,
    overlapped_s,
    paying_ranges,
    pays,
    saved_s,
    split,
    split_s,
)
from kvcore.reports.host import Host
from kvcore.reports.model import Model, attention_flops, attention_pairs, kv_bytes
from kvcore.reports.prefill import PrefillTerms, decode_step_s, prefill_s, prefill_terms, weights_touched_bytes
from kvcore.reports.tier import BLOCK_TOKENS, LoadTerms, Tier, host_memory, load_s, load_terms

__all__ = [
    "BLOCK_TOKENS",
    "IDLE",
    "TOKENS_MAX",
    "Busy",
    "Host",
    "LineLoad",
    "LoadTerms",
    "Model",
    "PrefillTerms",
    "Tier",
    "attention_flops",
    "attention_pairs",
    "bandwidth_floor",
    "break_even",
    "break_even_tokens",
    "decode_step_s",
    "host_memory",
    "inflation",
    "kv_bytes",
    "load_pays",
    "load_s",
    "load_terms",
    "marginal_bandwidth",
    "overlapped_s",
    "paying_ranges",
    "pays",
    "prefill_s",
    "prefill_terms",
    "saved_s",
    "split",
    "split_s",
    "split_tokens",
    "ttft_s",
    "weights_touched_bytes",
]


def break_even_tokens(
    model: Model,
    host: Host,
    tier: Tier,
    *,
    rest_tokens: int = 1,
    block_tokens: int = BLOCK_TOKENS,
    lookup_s: float = 0.0,
    busy: Busy = IDLE,
    tokens_max: int = TOKENS_MAX,
) -> int | None:
    """Smallest prefix from which on loading beats recomputing; None where it does not up to `tokens_max`.

    `kvcore.reports.breakeven.paying_ranges` on the same terms shows shorter ranges that pay as well.
    """
    return break_even(
        prefill_terms(model, host),
        load_terms(model, tier, block_tokens=block_tokens, gpus=host.gpus, lookup_s=lookup_s),
        rest_tokens=max(rest_tokens, 1),
        block_tokens=block_tokens,
        busy=busy,
        tokens_max=tokens_max,
    )


def load_pays(
    model: Model,
    host: Host,
    tier: Tier,
    prefix_tokens: int,
    *,
    rest_tokens: int = 1,
    block_tokens: int = BLOCK_TOKENS,
    lookup_s: float = 0.0,
    busy: Busy = IDLE,
) -> bool:
    """The decision for one request: is loading this prefix faster than computing it?"""
    load = load_terms(model, tier, block_tokens=block_tokens, gpus=host.gpus, lookup_s=lookup_s)
    return pays(prefill_terms(model, host), load, prefix_tokens, max(rest_tokens, 1), busy)


def marginal_bandwidth(model: Model, host: Host, prefix_tokens: int = 0) -> float:
    """Bytes per second that a tier must exceed: kv_bytes * G * MFU / (2 P), with attention where the prefix is long.

    For a replica, all its links together.
    """
    kv = model.kv_bytes_per_token() * model.shard_copies(host.gpus)
    return bandwidth_floor(kv, prefill_terms(model, host).marginal_s(prefix_tokens))


def split_tokens(
    model: Model, host: Host, tier: Tier, prefix_tokens: int, *, block_tokens: int = BLOCK_TOKENS, lookup_s: float = 0.0
) -> int:
    """Tokens at the front of the prefix to compute while the back is loaded (reports/breakeven.py)."""
    load = load_terms(model, tier, block_tokens=block_tokens, gpus=host.gpus, lookup_s=lookup_s)
    return split(prefill_terms(model, host), load, prefix_tokens, block_tokens)


def ttft_s(
    model: Model,
    host: Host,
    tier: Tier | None,
    prompt_tokens: int,
    prefix_tokens: int = 0,
    *,
    block_tokens: int = BLOCK_TOKENS,
    queue_s: float = 0.0,
    lookup_s: float = 0.0,
    overlap: bool = False,
    front_tokens: int = 0,
) -> float:
    """Seconds to the first token of a prompt whose first `prefix_tokens` come from `tier` (None: recompute).

    Only whole blocks load, and at least one token is computed. With `front_tokens` that much of the prefix is computed
    beside the load (a split), else with `overlap` the load overlaps the rest by layers.
    """
    if not 0 <= prefix_tokens <= prompt_tokens or prompt_tokens < 1:
        raise CallerError(f"a prompt of {prompt_tokens} tokens cannot have a prefix of {prefix_tokens}")
    prefill = prefill_terms(model, host)
    before = queue_s + host.request_s
    loaded = min(prefix_tokens, prompt_tokens - 1) // block_tokens * block_tokens
    if tier is None or loaded == 0:
        return before + prefill.seconds(prompt_tokens)
    load = load_terms(model, tier, block_tokens=block_tokens, gpus=host.gpus, lookup_s=lookup_s)
    rest = prefill.seconds(prompt_tokens - loaded, loaded)
    if front_tokens:
        return before + split_s(prefill, load, loaded, min(front_tokens, loaded)) + rest
    if overlap:
        return before + overlapped_s(load, loaded, rest, model.layers)
    return before + load.seconds(loaded) + rest

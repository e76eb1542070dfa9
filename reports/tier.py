"""A place KV is loaded from, and what a load costs: latency, blocks, bytes.

Theory of operation
-------------------
    load(tokens) = lookup + t0 + copies * per_block + bytes / bandwidth

The third term is why small blocks are slow: a DMA copy costs about 3.3 us however small it is, one block of a copy
kernel about 0.23 us, but the kernel's peak is lower (51.8 against 47.9 GB/s) and it takes `sm_share` of the GPU from
decode while it runs (vLLM blog 2026-01-08, figure 4; `reports/published.py` finds these figures again).
`copies` is blocks times `copies_per_block`: 1 where a block's layers are one piece of memory, `layers` where each
layer has its own.

A load into a replica of several GPUs: where `per_gpu` is set, each GPU has its own link (PCIe) and they run side by
side, so the time is that of one rank's share; else all ranks share one pipe (one network card, one disk).
What comes from further out passes host memory on its way; `through` joins two tiers: piece by piece (pipelined, the
slower one sets the pace) or all of it first.

`LoadTerms` are the same sum with model, tier and block size put in, for callers that ask often. `link_s` is the part
that occupies the link and `wait_s` the part that does not: only the former queues (reports/breakeven.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore.reports.host import Host
from kvcore.reports.model import Model, kv_bytes
from kvcore.reports.numbers import check_count, check_not_negative, check_positive, check_text

BLOCK_TOKENS = 16
BLOCK_TOKENS_MAX = 1_000_000
SECONDS_MAX = 3_600.0
# vLLM blog 2026-01-08, figure 4, host to device: fixed cost per block, and peak as a share of the DMA's.
DMA_BLOCK_S = 3.30e-6
KERNEL_BLOCK_S = 0.23e-6
KERNEL_PEAK_SHARE = 47.9 / 51.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier. Seconds, bytes per second; `sm_share` is the part of the SMs that its copies take from decode."""

    name: str
    t0_s: float
    bytes_per_s: float
    per_block_s: float = 0.0
    per_gpu: bool = False
    sm_share: float = 0.0
    source: str = ""
    unsure: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_not_negative("t0_s", self.t0_s, SECONDS_MAX)
        check_not_negative("per_block_s", self.per_block_s, SECONDS_MAX)
        check_positive("bytes_per_s", self.bytes_per_s, 1e18)
        check_not_negative("sm_share", self.sm_share, 0.99)

    def through(self, inner: Tier, pipelined: bool = True) -> Tier:
        """This tier with `inner` (host memory) on the way to the GPU."""
        rate = min(self.bytes_per_s, inner.bytes_per_s)
        if not pipelined:
            rate = 1 / (1 / self.bytes_per_s + 1 / inner.bytes_per_s)
        return replace(
            self,
            name=f"{self.name} through {inner.name}",
            t0_s=self.t0_s + inner.t0_s,
            bytes_per_s=rate,
            per_block_s=self.per_block_s + inner.per_block_s,
            sm_share=inner.sm_share,
        )


def host_memory(host: Host, kernel: bool = False, t0_s: float = 13e-6) -> Tier:
    """Host memory over this GPU's own link, copied by DMA or by a copy kernel."""
    if kernel:
        peak = host.link_Bps * KERNEL_PEAK_SHARE
        return Tier(name="host memory (kernel)", t0_s=t0_s, bytes_per_s=peak, per_block_s=KERNEL_BLOCK_S, per_gpu=True)
    return Tier(name="host memory (DMA)", t0_s=t0_s, bytes_per_s=host.link_Bps, per_block_s=DMA_BLOCK_S, per_gpu=True)


@dataclass(frozen=True, slots=True)
class LoadTerms:
    """What a load costs by tokens. `share` is the part of a sequence's bytes that passes one link."""

    model: Model
    wait_s: float
    copy_s: float
    byte_s: float
    share: float
    block_tokens: int

    def link_s(self, tokens: int) -> float:
        """Seconds that a load of the first `tokens` occupies the link."""
        if tokens <= 0:
            return 0.0
        blocks = -(-tokens // self.block_tokens)
        return blocks * self.copy_s + kv_bytes(self.model, tokens) * self.share * self.byte_s

    def seconds(self, tokens: int) -> float:
        """Seconds from the decision to load until all of it is there; nothing to load costs nothing."""
        return self.wait_s + self.link_s(tokens) if tokens > 0 else 0.0


def load_terms(
    model: Model,
    tier: Tier,
    *,
    block_tokens: int = BLOCK_TOKENS,
    copies_per_block: int = 1,
    gpus: int = 1,
    lookup_s: float = 0.0,
) -> LoadTerms:
    """The load's terms for a model over a tier into a replica (module text)."""
    check_count("block_tokens", block_tokens, 1, BLOCK_TOKENS_MAX)
    check_count("copies_per_block", copies_per_block, 1, BLOCK_TOKENS_MAX)
    check_not_negative("lookup_s", lookup_s, SECONDS_MAX)
    copies = model.shard_copies(gpus)
    share = copies / gpus if tier.per_gpu else copies
    copy_s = tier.per_block_s * copies_per_block * (1 if tier.per_gpu else gpus)
    return LoadTerms(model, lookup_s + tier.t0_s, copy_s, 1 / tier.bytes_per_s, share, block_tokens)


def load_s(
    model: Model,
    tier: Tier,
    tokens: int,
    block_tokens: int = BLOCK_TOKENS,
    *,
    copies_per_block: int = 1,
    gpus: int = 1,
    lookup_s: float = 0.0,
) -> float:
    """Seconds to load the KV of the first `tokens` tokens of a sequence."""
    terms = load_terms(
        model, tier, block_tokens=block_tokens, copies_per_block=copies_per_block, gpus=gpus, lookup_s=lookup_s
    )
    return terms.seconds(tokens)

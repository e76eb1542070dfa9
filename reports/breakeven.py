"""From which prefix length on is loading cheaper than recomputing?

Theory of operation
-------------------
A request has `prefix` tokens in the cache and `rest` tokens after them (at least one: the engine computes the last
token to have a first answer). Recomputing costs prefill(prefix + rest), loading costs load(prefix) + prefill(rest after
prefix). The difference of the two prefills is the GPU time *saved*.

    pays        saved / (1 - rho_gpu)  >  wait + link / (1 - rho_link)
    break-even  the smallest prefix, in whole blocks, from which on loading pays
    marginal    B > kv_bytes_per_token / marginal prefill time = kv_bytes * G * MFU / (2 P) for short prefixes

Without load both rho are 0. Under load a second of GPU time saved spares the others that second too, so a queue of
load rho makes it worth 1/(1 - rho) (M/G/1: the mean wait grows as 1/(1 - rho); Kleinrock, Queueing Systems I, 5.6), and
the same holds for the link's time. The wait (lookup, latency) occupies nobody and is not inflated. At rho_link = 1 a
load never ends: it never pays. At rho_gpu = 1 with a link that has room, it always does.

For a dense model saved time grows at least linearly in the prefix and the link's time linearly, so the curves cross
once. A mixture of experts is another matter: its first tokens make it read more and more experts, so a short prefix may
pay that a longer one does not, until attention makes a long one pay again. (Where the batch reads all experts anyway,
that first range is not real.) `paying_ranges` shows all ranges; the break-even is the beginning of the one that does
not end. It looks at every block at first, then in steps of 3 %, and halves between two that differ.

Three ways to be faster than load-then-compute:

    overlap   layer i is computed while layer i+1 is loaded: link/L + (L-1) * max(link, compute)/L + compute/L
    split     the GPU computes the front of the prefix while the link loads its back: max(prefill(s), load(p - s))
    neither where it is slower: `split_tokens` returns 0 for "load all" and the whole prefix for "load nothing"

The back of a split attends to the front, but its own KV is in the cache already, so the two need no order until both
are there. A state of recurrent layers and the windows belong to the end of the prefix and are loaded with any back.

Pure; all of it works on terms (reports/prefill.py, reports/tier.py), whether they come from parameters or from a fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

TOKENS_MAX = 131_072
GRID_STEP = 0.03
TIE = 1e-9  # relative: rounding must not decide between two ways that take as long


class Prefill(Protocol):
    """Seconds to compute; kvcore.reports.prefill.PrefillTerms."""

    def seconds(self, new_tokens: int, prefix_tokens: int = 0) -> float: ...


class Load(Protocol):
    """Seconds to load; kvcore.reports.tier.LoadTerms, or LineLoad."""

    @property
    def wait_s(self) -> float: ...
    def link_s(self, tokens: int) -> float: ...
    def seconds(self, tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class LineLoad:
    """A measured load: a fixed wait and seconds per token."""

    wait_s: float
    token_s: float

    def link_s(self, tokens: int) -> float:
        return self.token_s * max(tokens, 0)

    def seconds(self, tokens: int) -> float:
        return self.wait_s + self.link_s(tokens) if tokens > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Busy:
    """Utilisation of the GPU and of the link, 0 to 1 and beyond: what a running system measures."""

    gpu: float = 0.0
    link: float = 0.0


IDLE = Busy()


def inflation(busy: float) -> float:
    """1/(1 - rho); endless from rho = 1 on."""
    return 1 / (1 - busy) if busy < 1 else math.inf


def saved_s(prefill: Prefill, prefix_tokens: int, rest_tokens: int) -> float:
    """GPU seconds that a loaded prefix spares."""
    return prefill.seconds(prefix_tokens + rest_tokens, 0) - prefill.seconds(rest_tokens, prefix_tokens)


def pays(prefill: Prefill, load: Load, prefix_tokens: int, rest_tokens: int = 1, busy: Busy = IDLE) -> bool:
    """Is loading this prefix faster than computing it? (module text)"""
    link = load.link_s(prefix_tokens)
    if busy.link >= 1 and link > 0:
        return False
    saved = saved_s(prefill, prefix_tokens, rest_tokens)
    if busy.gpu >= 1:
        return saved > 0
    return saved * inflation(busy.gpu) > (load.wait_s + link * inflation(busy.link)) * (1 + TIE)


def paying_ranges(
    prefill: Prefill,
    load: Load,
    *,
    rest_tokens: int = 1,
    block_tokens: int = 1,
    busy: Busy = IDLE,
    tokens_max: int = TOKENS_MAX,
) -> list[tuple[int, int]]:
    """Prefixes for which loading pays, in whole blocks, as (first, last) with both in; shortest first."""
    assert rest_tokens >= 1, "the engine computes at least one token"
    assert block_tokens >= 1
    wins = functools.partial(_block_pays, prefill, load, rest_tokens, block_tokens, busy)
    ranges: list[tuple[int, int]] = []
    before, first = 0, 0  # in blocks; `first` is 0 outside of a range
    for block in _grid(tokens_max // block_tokens):
        if wins(block) != bool(first):
            edge = _edge(wins, before, block)
            if first:
                ranges.append((first * block_tokens, (edge - 1) * block_tokens))
            first = 0 if first else edge
        before = block
    if first:
        ranges.append((first * block_tokens, before * block_tokens))
    return ranges


def break_even(
    prefill: Prefill,
    load: Load,
    *,
    rest_tokens: int = 1,
    block_tokens: int = 1,
    busy: Busy = IDLE,
    tokens_max: int = TOKENS_MAX,
) -> int | None:
    """Smallest prefix in whole blocks from which on loading pays; None: there is none up to `tokens_max`."""
    ranges = paying_ranges(
        prefill, load, rest_tokens=rest_tokens, block_tokens=block_tokens, busy=busy, tokens_max=tokens_max
    )
    longest = tokens_max // block_tokens * block_tokens
    return ranges[-1][0] if ranges and ranges[-1][1] == longest else None


def _block_pays(prefill: Prefill, load: Load, rest: int, block_tokens: int, busy: Busy, block: int) -> bool:
    return pays(prefill, load, block * block_tokens, rest, busy)


def _grid(last: int) -> Iterator[int]:
    """Every block at first, then steps of `GRID_STEP`, and the last block."""
    block = 1
    while block < last:
        yield block
        block += max(1, int(block * GRID_STEP))
    if last >= 1:
        yield last


def _edge(wins: Callable[[int], bool], before: int, after: int) -> int:
    """The first block that answers as `after` does, where `before` answers otherwise; no blocks at all never pay."""
    wanted = wins(after)
    while after - before > 1:
        middle = (before + after) // 2
        if wins(middle) == wanted:
            after = middle
        else:
            before = middle
    return after


def bandwidth_floor(kv_bytes_per_token: float, prefill_s_per_token: float) -> float:
    """Bytes per second that a link must exceed so that a longer prefix pays at all: the marginal form."""
    return kv_bytes_per_token / prefill_s_per_token


def overlapped_s(load: Load, prefix_tokens: int, compute_s: float, layers: int) -> float:
    """Load and compute overlapped by layers (module text)."""
    assert layers >= 1
    if prefix_tokens <= 0:
        return compute_s
    link = load.link_s(prefix_tokens) / layers
    compute = compute_s / layers
    return load.wait_s + link + (layers - 1) * max(link, compute) + compute


def split_s(prefill: Prefill, load: Load, prefix_tokens: int, front_tokens: int) -> float:
    """Seconds until the prefix is there when its front is computed and its back loaded side by side."""
    return max(prefill.seconds(front_tokens, 0), load.seconds(prefix_tokens - front_tokens))


def split(prefill: Prefill, load: Load, prefix_tokens: int, block_tokens: int = 1) -> int:
    """Front tokens to compute, in whole blocks, for the earliest end: 0 loads all, prefix_tokens loads nothing."""
    blocks = prefix_tokens // block_tokens
    low, high = 0, blocks
    while low < high:  # the smallest front that takes longer than the load of the back
        middle = (low + high) // 2
        front = middle * block_tokens
        if prefill.seconds(front, 0) >= load.seconds(prefix_tokens - front):
            high = middle
        else:
            low = middle + 1
    fronts = {0, max(low - 1, 0) * block_tokens, low * block_tokens, prefix_tokens}
    return min(sorted(fronts), key=lambda front: split_s(prefill, load, prefix_tokens, front))

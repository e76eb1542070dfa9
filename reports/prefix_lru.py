"""Hit rate of a prefix cache of a given size under LRU: what a trace can give at most to a cache without times.

Theory of operation
-------------------
The rule is the one under which the published rates were made (kvcache-simulator 0.1.3), so that they can be compared:

1. A request hits its leading resident blocks, until the first that is not there.
2. Hit tokens are min(input tokens, block_tokens * blocks): the last block of a prompt is usually partial.
3. All its blocks become resident and young, the last first and the first last, so that the beginning of a prompt,
   without which the rest serves nothing, is evicted last.
4. Then the oldest blocks leave until no more than the capacity are resident. A prompt may be larger than the cache.
5. Only the last half of the requests is counted; the first half warms the cache.

No times, no engine: this is the reference for the serving simulation's cache, not a prediction of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcore.reports.numbers import check_count

BLOCK_TOKENS = 512
CAPACITY_MAX = 10**12
Prompt = tuple[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class HitRate:
    """Tokens hit and asked for in the counted half."""

    hit_tokens: int
    input_tokens: int

    @property
    def percent(self) -> float:
        return 100 * self.hit_tokens / self.input_tokens if self.input_tokens else 0.0


def prefix_lru(prompts: Sequence[Prompt], capacity_blocks: int, block_tokens: int = BLOCK_TOKENS) -> HitRate:
    """Hit rate over (input tokens, block ids) in order of arrival; the first half warms up."""
    check_count("capacity_blocks", capacity_blocks, 0, CAPACITY_MAX)
    check_count("block_tokens", block_tokens, 1, CAPACITY_MAX)
    resident: OrderedDict[int, None] = OrderedDict()
    hit_tokens = input_tokens = 0
    for at, (tokens, blocks) in enumerate(prompts):
        if at >= len(prompts) // 2:
            hit_tokens += min(tokens, block_tokens * _leading(resident, blocks))
            input_tokens += tokens
        _touch(resident, blocks)
        while len(resident) > capacity_blocks:
            resident.popitem(last=False)
    assert hit_tokens <= input_tokens
    return HitRate(hit_tokens, input_tokens)


def _leading(resident: OrderedDict[int, None], blocks: Iterable[int]) -> int:
    count = 0
    for block in blocks:
        if block not in resident:
            break
        count += 1
    return count


def _touch(resident: OrderedDict[int, None], blocks: Sequence[int]) -> None:
    for block in reversed(blocks):
        resident[block] = None
        resident.move_to_end(block)

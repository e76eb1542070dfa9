"""What one lookup decision may cost: 64 rows x 4,096 chunks, half of them full, half with a window of 16 chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore.bitmap import ones
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup

CHUNKS = 4096
CHUNK_TOKENS = 256
FOLD_UNFOLD_US_MAX = 50
LAYOUT = CacheLayout(
    (
        ObjectGroup(GroupKind.FULL, 16, 4096),
        ObjectGroup(GroupKind.WINDOW, 16, 4096, 16 * CHUNK_TOKENS),
    ),
    32,
    CHUNK_TOKENS,
)


def rows_named(name: str) -> list[int]:
    source = random.Random(name)
    if name == "full":
        return [ones(CHUNKS)] * 64
    if name == "random":
        return [source.getrandbits(CHUNKS) for _ in range(64)]
    return [ones(CHUNKS) & ~(1 << source.randrange(CHUNKS // 2, CHUNKS)) for _ in range(64)]  # one hole each


def decide(rows: list[int], prompt_tokens: int) -> tuple[int, list[int]]:
    """What the planner asks: the best length, and per row the cells it needs."""
    best = LAYOUT.best(LAYOUT.fold(rows, CHUNKS, prompt_tokens))
    return best, LAYOUT.unfold(best, prompt_tokens)


@pytest.mark.parametrize("tail", [0, 1], ids=["whole-prompt", "longer-prompt"])
@pytest.mark.parametrize("name", ["full", "random", "holes"])
def test_fold_and_unfold(benchmark: Any, name: str, tail: int) -> None:
    rows = rows_named(name)
    best, needed = benchmark.pedantic(
        decide, (rows, CHUNKS * CHUNK_TOKENS + tail), rounds=50, iterations=20, warmup_rounds=2
    )
    assert best == CHUNKS if name == "full" else best < CHUNKS
    assert len(needed) == 64
    assert needed[0] == ones(best)
    if benchmark.enabled:
        assert benchmark.stats.stats.min * 1e6 <= FOLD_UNFOLD_US_MAX

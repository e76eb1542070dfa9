"""What hashing may cost: 131,072 tokens in chunks of 256."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvcore.keys import ChunkHasher, Namespace, key_text, object_keys

TOKENS = 131_072
LIST_MS_MAX = 2.2
ARRAY_MS_MAX = 1.3


@pytest.fixture
def hasher() -> ChunkHasher:
    return ChunkHasher(Namespace("model", chunk_tokens=256))


@pytest.fixture
def tokens() -> list[int]:
    source = random.Random(1)
    return [source.randrange(151_936) for _ in range(TOKENS)]


def within(benchmark: Any, limit_ms: float) -> None:
    """The fastest round is what the code costs; slower ones are what the machine did besides."""
    if benchmark.enabled:
        assert benchmark.stats.stats.min * 1e3 <= limit_ms


def test_hash_a_list_of_tokens(benchmark: Any, hasher: ChunkHasher, tokens: list[int]) -> None:
    hashes = benchmark.pedantic(hasher.hash_tokens, (tokens,), rounds=50, warmup_rounds=3)
    assert len(hashes) == TOKENS // 256
    within(benchmark, LIST_MS_MAX)


def test_hash_an_array_of_tokens(benchmark: Any, hasher: ChunkHasher, tokens: list[int]) -> None:
    array = np.array(tokens, dtype=np.uint32)
    hashes = benchmark.pedantic(hasher.hash_tokens, (array,), rounds=50, warmup_rounds=3)
    assert hashes == hasher.hash_tokens(tokens)
    within(benchmark, ARRAY_MS_MAX)


def test_extend_a_conversation_by_one_chunk(benchmark: Any, hasher: ChunkHasher, tokens: list[int]) -> None:
    known = hasher.hash_tokens(tokens)[:-1]
    hashes = benchmark.pedantic(hasher.hash_tokens, (tokens,), {"known": known}, rounds=50, iterations=20)
    assert hashes[:-1] == known
    within(benchmark, 0.05)


@pytest.mark.benchmark(disable_gc=True)  # what the collector adds depends on everything else alive in the process
def test_build_a_hundred_thousand_keys(benchmark: Any) -> None:
    hashes = [number.to_bytes(32, "little") for number in range(100_000)]
    keys = benchmark.pedantic(object_keys, (hashes, "model", 1, 2, "salt"), rounds=10)
    assert keys[99_999].chunk_hash == hashes[99_999]
    within(benchmark, 60)


def test_key_text_of_a_thousand_keys(benchmark: Any) -> None:
    keys = object_keys([number.to_bytes(32, "little") for number in range(1000)], "model", 1)
    texts = benchmark.pedantic(lambda: [key_text(key) for key in keys], rounds=20)
    assert len(set(texts)) == 1000
    within(benchmark, 10)

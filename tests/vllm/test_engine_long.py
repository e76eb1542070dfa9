"""`KvcoreConnector` on vLLM's real engine, long: a part of `make ladder-vllm`, and not of its short form."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import expand_rungs, failures

pytestmark = pytest.mark.vllm

CHUNK = 64
HYBRID = "full+window/r1/inproc/async"


def climb(cell: str, *, requests: int = 12, **options: Any) -> None:
    """All rungs and the replay; green."""
    result = climb_all(
        LadderOptions(
            target="vllm",
            requests=requests,
            families=requests // 2,
            chunk_tokens=CHUNK,
            cells=(MatrixCell.parse(cell),),
            passes=expand_rungs(range(5)),
            **options,
        )
    )
    assert not failures(result.cells), failures(result.cells)


@pytest.mark.parametrize("window_tokens", [CHUNK - 1, CHUNK, CHUNK + 1])
def test_windows_around_the_border_of_a_chunk(window_tokens: int) -> None:
    climb(HYBRID, requests=8, window_tokens=window_tokens)


def test_experts_and_attention_sinks() -> None:
    climb(HYBRID, requests=8, model="gpt-oss")


@pytest.mark.parametrize("cell", ["full/r1/inproc/sync", "full+window/r1/s1/sync"])
def test_synchronous_loads(cell: str) -> None:
    climb(cell)

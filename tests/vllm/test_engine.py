"""`KvcoreConnector` on vLLM's real engine, short: the rungs are green in the process and in front of a server."""

from __future__ import annotations

import pytest

from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import expand_rungs, failures

pytestmark = [pytest.mark.ladder, pytest.mark.vllm]

REQUESTS = 12


@pytest.mark.parametrize("cell", ["full/r1/inproc/async", "full+window/r1/s1/async"])
def test_the_rungs_are_green(cell: str) -> None:
    result = climb_all(
        LadderOptions(
            target="vllm",
            requests=REQUESTS,
            families=REQUESTS // 2,
            chunk_tokens=64,
            cells=(MatrixCell.parse(cell),),
            passes=expand_rungs(range(5)),
        )
    )
    assert not failures(result.cells), failures(result.cells)

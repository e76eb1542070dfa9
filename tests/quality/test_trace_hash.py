"""Same seed, same trace: over repeats in one process and over interpreters with other hash seeds.

`KVCORE_REPEATS=100` asks for more repeats than `make test` can afford.
"""

from __future__ import annotations

import os
import subprocess
import sys

from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions

CELL = "full+window+recurrent/r2/s2/async"
REPEATS = int(os.environ.get("KVCORE_REPEATS", "5"))


def trace_hash(seed: int) -> str:
    """Of a short climb in the configuration with the most moving parts: reference, cold, hot."""
    options = LadderOptions(cells=(MatrixCell.parse(CELL),), seed=seed, requests=40, passes=("0", "2", "3"))
    return climb_all(options).cells[0].trace_hash


def in_fresh_interpreter(hash_seed: int) -> str:
    code = (
        "from kvcore.ladder.climb import climb_all\n"
        "from kvcore.ladder.matrix import MatrixCell\n"
        "from kvcore.ladder.options import LadderOptions\n"
        f"cells = (MatrixCell.parse({CELL!r}),)\n"
        "options = LadderOptions(cells=cells, seed=3, requests=40, passes=('0', '2', '3'))\n"
        "print(climb_all(options).cells[0].trace_hash)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    return result.stdout.strip()


def test_the_same_seed_gives_the_same_trace_in_every_repeat_and_another_seed_another() -> None:
    """Over a climb with two servers, two ranks, three groups and asynchronous loads."""
    first = trace_hash(3)
    assert len(first) >= 16
    assert {trace_hash(3) for _ in range(REPEATS - 1)} == {first}
    assert trace_hash(4) != first


def test_fresh_interpreters_with_other_hash_seeds_give_the_same_trace() -> None:
    """No order of a set, no default repr and no address reaches a decision."""
    assert {in_fresh_interpreter(seed) for seed in (1, 77, 4242)} == {trace_hash(3)}

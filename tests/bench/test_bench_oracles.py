"""What the trace and the oracles cost: the same climb with them and with all of them taken out, in turns.

CPU time of whole climbs, medians of three interleaved pairs. The bar of the project: at most double.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.ladder import rungs, stack
from kvcore.ladder.climb import climb_all
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import Floors
from kvcore.sim.engine.probe import NullProbe
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.trace import Trace

CELLS = ("full/r1/inproc/sync", "full+window+recurrent/r2/s2/async")


class BareL1(L1Cache):
    """L1 without its judge."""

    def __init__(self, name: str, truth: Any, findings: Any, tracer: Any, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.ever_published: dict[ObjectKey, None] = {}

    def check_at_rest(self) -> None:
        return None

    def protected(self, session: str) -> list[ObjectKey]:
        return []


class BareOracle(NullProbe):
    """The engine's probe without a judge; keeps the counters that the rung table reads."""

    def __init__(self, parts: Any) -> None:
        self.hashes: dict[str, list[bytes]] = {}
        self.preemptions_store_inflight = self.tokens_loaded = self.tokens_loadable = 0


def bare_adapter(inner: Any, *rest: Any) -> Any:
    inner.check_at_rest = lambda: None
    inner.inner = inner
    return inner


def without_oracles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stack, "WatchedL1", BareL1)
    patch.setattr(stack, "WatchedAdapter", bare_adapter)
    patch.setattr(rungs, "LadderOracle", BareOracle)
    patch.setattr(rungs, "FLOORS", dict.fromkeys(rungs.FLOORS, Floors(requests=120)))
    patch.setattr(Truth, "check", lambda *args: True)
    patch.setattr(Trace, "event", lambda *args: None)
    muted = Trace.__init__

    def quiet(self: Trace, **options: Any) -> None:
        muted(self, **options)
        self.mute()

    patch.setattr(Trace, "__init__", quiet)


def cpu_s(cell: str, passes: Sequence[str]) -> float:
    result = climb_all(LadderOptions(cells=(MatrixCell.parse(cell),), passes=tuple(passes))).cells[0]
    assert [rung.rung for rung in result.rungs] == list(passes)
    return result.cpu_s


@pytest.mark.parametrize("cell", CELLS)
def test_trace_and_oracles_at_most_double_the_cpu_time(cell: str, benchmark: Any) -> None:
    """Rungs 0 to 3, the same seed, with and without."""
    passes = ("0", "1", "2", "3", "3b")
    ratios: list[float] = []

    def pair() -> None:
        watched = cpu_s(cell, passes)
        with pytest.MonkeyPatch.context() as patch:
            without_oracles(patch)
            bare = cpu_s(cell, passes)
        ratios.append(watched / bare)

    benchmark.pedantic(pair, rounds=3, iterations=1)
    benchmark.extra_info["cpu ratio with/without"] = round(statistics.median(ratios), 3)
    print(f"\n{cell}: CPU time with trace and oracles / without: {statistics.median(ratios):.2f}")
    assert statistics.median(ratios) <= 2

"""What a key costs in L1. Bars: the whole cycle at most 4 us per key in batches of 512, 7 us in batches of 16.

Run with `pytest tests/bench/test_bench_l1.py`; the bars themselves are asserted only when the run asks for them with
`--benchmark-only`, because a loaded machine proves nothing about the code.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvcore.answers import Answer
from kvcore.eviction import LruPolicy, PolicyFactory, S3FifoPolicy
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.leases import Owner
from kvcore.memory import VirtualArena

SIZE = 4096
OWNER = Owner("bench", 1, "read")
BAR_US = {512: 4.0, 16: 7.0}


def keys_of(count: int) -> list[ObjectKey]:
    return [ObjectKey(n.to_bytes(32, "big"), "model", 0) for n in range(count)]


def cycle(l1: L1Cache, keys: list[ObjectKey]) -> None:
    l1.reserve_write("w", keys, SIZE, deadline_ns=1 << 60)
    l1.finish_write("w", keys)
    l1.reserve_read(OWNER, keys, deadline_ns=1 << 60)
    l1.finish_read(OWNER, keys)
    l1.delete(keys)


@pytest.mark.parametrize("policy", [LruPolicy, S3FifoPolicy])
@pytest.mark.parametrize("batch", [512, 16])
def test_cycle_of_reserve_publish_read_and_delete(
    benchmark: BenchmarkFixture, request: pytest.FixtureRequest, batch: int, policy: PolicyFactory
) -> None:
    l1 = L1Cache(VirtualArena(1 << 40), policy)
    keys = keys_of(batch)
    cycles: list[None] = []

    def counted() -> None:
        cycles.append(None)
        cycle(l1, keys)

    benchmark.pedantic(counted, rounds=51200 // batch, warmup_rounds=2)
    l1.check()
    assert l1.statistics().bytes_used == 0
    assert l1.statistics().published == batch * len(cycles), "some cycle has not published every key"
    if benchmark.stats is None:
        return  # benchmarks are disabled: the cycle ran once, and was checked
    us_per_key = benchmark.stats.stats.min / batch * 1e6
    benchmark.extra_info["us_per_key"] = us_per_key
    if request.config.getoption("benchmark_only"):
        assert us_per_key <= BAR_US[batch]


@pytest.mark.parametrize("policy", [LruPolicy, S3FifoPolicy])
def test_refusal_by_a_cache_whose_objects_are_all_pinned(benchmark: BenchmarkFixture, policy: PolicyFactory) -> None:
    """R71: looks at no pinned object twice."""
    objects = 100_000
    l1 = L1Cache(VirtualArena(objects * SIZE), policy)
    keys = keys_of(objects + 1)
    l1.reserve_write("w", keys[:-1], SIZE)
    l1.finish_write("w", keys[:-1])
    l1.reserve_read(OWNER, keys[:-1])
    answers, _ = benchmark(l1.reserve_write, "w", keys[-1:], SIZE)
    assert answers == [Answer.NO_SPACE]
    assert l1._order.steps <= objects

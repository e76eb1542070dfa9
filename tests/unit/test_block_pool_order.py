"""In which order the pool reuses blocks: what nobody can find goes first."""

from __future__ import annotations

from kvcore.sim.engine.block_pool import BlockPool
from kvcore.sim.engine.probe import NullProbe


def test_a_nameless_block_is_reused_before_all_others_and_the_last_released_one_first() -> None:
    pool = BlockPool(8, NullProbe())
    first, second = pool.take(1, "a"), pool.take(1, "b")
    pool.release(first, "a")
    pool.release(second, "b")
    assert pool.take(2, "c") == [*second, *first]


def test_within_one_release_the_first_one_given_is_reused_first() -> None:
    pool = BlockPool(8, NullProbe())
    blocks = pool.take(3, "a")
    pool.release(reversed(blocks), "a")
    assert pool.take(3, "b") == blocks[::-1]


def test_a_named_block_is_reused_last_and_the_longest_released_one_first() -> None:
    pool = BlockPool(6, NullProbe())
    old, new = pool.take(2, "a")
    for name, block in enumerate((old, new)):
        pool.publish(block, 0, name)
    pool.release([old], "a")
    pool.release([new], "a")
    assert pool.take(5, "b")[3:] == [old, new]

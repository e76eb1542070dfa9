"""The engine's block pool: references, names, and which block is given out next."""

from __future__ import annotations

import pytest

from kvcore.sim.engine.block_pool import BlockNames, BlockPool
from kvcore.sim.engine.probe import NullProbe


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(6, NullProbe())


def test_block_zero_is_never_given_out(pool: BlockPool) -> None:
    assert pool.take(5, "a") == [1, 2, 3, 4, 5]
    assert pool.free_count == 0
    pool.check()


def test_the_block_released_longest_ago_is_taken_first(pool: BlockPool) -> None:
    blocks = pool.take(5, "a")
    pool.release([blocks[3], blocks[0], blocks[2]], "a")
    assert pool.take(2, "b") == [blocks[3], blocks[0]]


def test_a_released_block_is_found_by_its_name_until_it_is_taken(pool: BlockPool) -> None:
    (block,) = pool.take(1, "a")
    pool.publish(block, 0, 77)
    pool.release([block], "a")
    assert pool.find(0, 77) == block
    assert pool.find(1, 77) is None
    pool.take(5, "b")
    assert pool.find(0, 77) is None
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_holder(pool: BlockPool) -> None:
    (block,) = pool.take(1, "a")
    pool.publish(block, 0, 1)
    pool.share(block, "b")
    pool.release([block], "a")
    assert pool.held_count == 1
    pool.release([block], "b")
    assert pool.held_count == 0
    pool.share(block, "c")
    assert pool.references(block) == 1
    assert block not in pool.take(4, "d")
    pool.check()


def test_the_first_block_of_a_name_keeps_it(pool: BlockPool) -> None:
    first, second = pool.take(2, "a")
    pool.publish(first, 0, 5)
    pool.publish(second, 0, 5)
    assert pool.find(0, 5) == first
    pool.check()


def test_a_forgotten_block_is_not_found_and_may_be_named_again(pool: BlockPool) -> None:
    (block,) = pool.take(1, "a")
    pool.publish(block, 0, 5)
    pool.forget(block)
    assert pool.find(0, 5) is None
    pool.publish(block, 0, 6)
    assert pool.find(0, 6) == block
    pool.check()


def test_releasing_what_nobody_holds_is_our_mistake(pool: BlockPool) -> None:
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([3], "a")


def test_a_reset_forgets_names_and_keeps_holders(pool: BlockPool) -> None:
    (block,) = pool.take(1, "a")
    pool.publish(block, 0, 5)
    pool.reset_prefix_cache()
    assert pool.find(0, 5) is None
    assert pool.held_count == 1
    pool.check()


def test_names_are_equal_exactly_when_prefixes_are() -> None:
    names = BlockNames()
    chains: list[list[int]] = [[], [], [], []]
    names.extend(chains[0], "", b"aaaabbbbcc", 4)
    names.extend(chains[1], "", b"aaaacccc", 4)
    names.extend(chains[2], "", b"xxxxbbbb", 4)
    names.extend(chains[3], "tenant", b"aaaabbbb", 4)
    assert len(chains[0]) == 2
    assert chains[0][0] == chains[1][0]
    assert len({chains[0][1], chains[1][1], chains[2][1], chains[3][1]}) == 4
    assert chains[3][0] != chains[0][0]
    longer = list(chains[0])
    names.extend(longer, "", b"aaaabbbbccdd", 4)
    assert longer[:2] == chains[0]
    assert len(longer) == 3

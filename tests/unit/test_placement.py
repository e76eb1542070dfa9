"""Which server holds a cell, and how the answers of several servers are put together."""

from __future__ import annotations

from functools import reduce
from operator import and_, or_
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.bitmap import ones
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.placement import Placement

LAYOUT = CacheLayout(
    (
        ObjectGroup(GroupKind.FULL, 4, 1),
        ObjectGroup(GroupKind.WINDOW, 4, 1, 9),
        ObjectGroup(GroupKind.RECURRENT, 4, 1),
    ),
    3,
    4,
)
HASHES = [blake3(bytes([number])).digest() for number in range(200)]
PLACEMENTS = st.builds(Placement, st.sampled_from(["rank", "chunk"]), st.integers(1, 5))


@given(PLACEMENTS, st.integers(0, 200))
def test_every_cell_belongs_to_exactly_the_server_that_server_of_names(placement: Placement, count: int) -> None:
    hashes = HASHES[:count]
    masks = [placement.masks(LAYOUT, hashes, server) for server in range(placement.servers)]
    for row in LAYOUT.rows:
        for chunk, chunk_hash in enumerate(hashes):
            holders = [server for server, rows in enumerate(masks) if rows[row.index] >> chunk & 1]
            assert holders == [placement.server_of(row.rank, chunk_hash)]
        assert reduce(or_, (rows[row.index] for rows in masks)) == ones(count)


def test_without_a_word_there_is_one_server_for_everything() -> None:
    assert (Placement().mode, Placement().servers) == ("rank", 1)


def test_by_rank_a_server_holds_whole_rows() -> None:
    assert [Placement("rank", 2).server_of(rank, b"any") for rank in range(5)] == [0, 1, 0, 1, 0]
    assert Placement("rank", 2).masks(LAYOUT, HASHES[:4], 1) == [0, 0, 0, 15, 15, 15, 0, 0, 0]


def test_more_servers_than_ranks_leave_some_idle() -> None:
    assert Placement("rank", 5).masks(LAYOUT, HASHES[:4], 4) == [0] * 9


def test_by_chunk_the_rank_does_not_matter_and_the_load_is_even() -> None:
    placement = Placement("chunk", 4)
    homes = [placement.server_of(0, chunk_hash) for chunk_hash in HASHES]
    assert homes == [placement.server_of(2, chunk_hash) for chunk_hash in HASHES]
    assert all(30 <= homes.count(server) <= 70 for server in range(4))


def test_by_chunk_the_home_is_a_fixed_function_of_the_hash() -> None:
    assert Placement("chunk", 7).server_of(0, bytes(range(32))) == 0x0706050403020100 % 7


@settings(deadline=None)
@given(PLACEMENTS, st.lists(st.integers(0, 2**8 - 1), min_size=9, max_size=9), st.integers(0, 9), st.integers(0, 9))
def test_the_intersection_over_servers_is_what_one_server_with_all_cells_answers(
    placement: Placement, rows: list[int], tail: int, skip_chunks: int
) -> None:
    prompt = 8 * 4 + tail
    answers = []
    for server in range(placement.servers):
        mine = placement.masks(LAYOUT, HASHES[:8], server)
        counted = [(row & mask) | (ones(8) & ~mask) for row, mask in zip(rows, mine)]
        answers.append(LAYOUT.fold(counted, 8, prompt, skip_chunks))
    assert reduce(and_, answers) == LAYOUT.fold(rows, 8, prompt, skip_chunks)


def test_a_minimum_of_the_servers_best_lengths_would_be_wrong() -> None:
    layout = CacheLayout((ObjectGroup(GroupKind.WINDOW, 4, 1, 5),), 2, 4)
    first, second = (layout.fold(rows, 3, 100) for rows in ([0b101, 0b111], [0b111, 0b010]))
    assert min(layout.best(first), layout.best(second)) == 2
    assert layout.best(first & second) == 0


@pytest.mark.parametrize("arguments", [("hash", 1), ("rank", 0), ("chunk", -1), ("rank", True), ("rank", 1.0)])
def test_a_placement_that_cannot_work_is_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError):
        Placement(*arguments)

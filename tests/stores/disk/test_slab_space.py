"""Free room of a slab store: nothing is given twice, nothing is lost, and what is free can be used."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.l2.slab_space import Claims, Run, Space

REGION = 16


def space_of(*runs):
    space = Space(REGION)
    for run in runs:
        space.give_back(Run(*run))
    return space


def test_a_free_run_of_exactly_that_length_is_taken_first():
    space = space_of((0, 10), (16, 4), (32, 6))
    assert space.take(4) == Run(16, 4)
    assert list(space) == [Run(0, 10), Run(32, 6)]


def test_otherwise_the_longest_run_is_cut():
    space = space_of((0, 10), (16, 4))
    assert space.take(3) == Run(0, 3)
    assert list(space) == [Run(3, 7), Run(16, 4)]


def test_what_follows_the_last_run_comes_before_a_longer_one():
    space = space_of((0, 10), (16, 9))
    assert [space.take(3), space.take(2), space.take(4)] == [Run(0, 3), Run(3, 2), Run(5, 4)]
    assert space.take(3) == Run(16, 3)


def test_what_no_run_holds_is_put_together_from_the_longest_ones():
    space = space_of((0, 5), (16, 3), (32, 2))
    assert space.take(6) is None
    assert space.take_scattered(7) == (Run(0, 5), Run(16, 2))
    assert space.take_scattered(4) is None
    assert space.free_units == 3


def test_neighbours_become_one_run_again_but_never_across_a_region():
    space = space_of((0, 4), (8, 8), (4, 4), (16, 4))
    assert list(space) == [Run(0, 16), Run(16, 4)]


def test_a_run_that_is_free_cannot_be_given_back():
    space = space_of((4, 4))
    with pytest.raises(AssertionError):
        space.give_back(Run(4, 2))


def test_claims_are_all_or_none():
    claims = Claims(40)
    assert claims.claim((Run(3, 4), Run(20, 2)))
    assert not claims.claim((Run(10, 2), Run(6, 1)))
    assert not claims.claim((Run(10, 2), Run(11, 1)))
    assert not claims.claim((Run(38, 3),))
    assert list(claims.free_runs(REGION)) == [Run(0, 3), Run(7, 9), Run(16, 4), Run(22, 10), Run(32, 8)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 63)), max_size=80))
def test_units_are_free_or_taken_once_in_any_history(steps):
    space = space_of((0, 16), (16, 16), (32, 9))
    taken = []
    for give, scattered, number in steps:
        if give and taken:
            space.give_back(taken.pop(number % len(taken)))
            continue
        count = 1 + number % 20
        free, longest = space.free_units, max((run.count for run in space), default=0)
        if scattered:
            runs = space.take_scattered(count)
            assert (runs is None) == (count > free)
        else:
            run = space.take(count)
            assert (run is None) == (count > longest)
            runs = (run,) if run else None
        assert runs is None or sum(run.count for run in runs) == count
        taken += runs or ()
        units = sorted(unit for run in [*taken, *space] for unit in range(run.start, run.end))
        assert units == list(range(41))

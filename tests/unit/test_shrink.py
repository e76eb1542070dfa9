"""Delta debugging finds the least part, asks no question twice, and stops at its budget with the best it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.sim.shrink import Budget, BudgetSpent, Judge, ddmin, descend, lowest


def judge_of(test: Callable[[list[int]], bool], runs: int = 100_000) -> Judge[list[int]]:
    return Judge(test, Budget(runs), tuple)


def all_of(needed: Sequence[int]) -> Callable[[list[int]], bool]:
    return lambda items: set(needed) <= set(items)


@given(st.integers(1, 40), st.data())
def test_what_a_failure_needs_is_what_is_left(count: int, data: st.DataObject) -> None:
    needed = data.draw(st.lists(st.sampled_from(range(count)), unique=True, max_size=6))
    assert ddmin(range(count), judge_of(all_of(needed))) == sorted(needed)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=24), st.integers(1, 60))
def test_the_result_fails_and_does_not_without_any_one_of_its_items(items: list[int], least: int) -> None:
    """Also where failures are not monotone: here a sum decides, and an odd number of items."""

    def fails(some: list[int]) -> bool:
        return sum(some) >= least and len(some) % 2 == len(items) % 2

    if not fails(items):
        return
    left = ddmin(items, judge_of(fails))
    assert fails(left)
    assert not any(fails(left[:index] + left[index + 1 :]) for index in range(len(left)))


def test_two_of_a_thousand_are_found_in_few_questions() -> None:
    judge = judge_of(all_of([17, 801]))
    assert ddmin(range(1000), judge) == [17, 801]
    assert judge.budget.runs < 100


def test_no_candidate_is_run_twice() -> None:
    seen: list[tuple[int, ...]] = []

    def test(some: list[int]) -> bool:
        seen.append(tuple(some))
        return {3, 9, 12} <= set(some)

    judge = judge_of(test)
    first = ddmin(range(16), judge)
    assert ddmin(range(16), judge) == first == [3, 9, 12]
    assert len(seen) == len(set(seen)) == judge.budget.runs
    assert judge.answered_from_memory >= judge.budget.runs


@pytest.mark.parametrize("runs", [0, 1, 5, 20])
def test_a_spent_budget_ends_with_something_that_fails(runs: int) -> None:
    fails = all_of([5, 50])
    judge = judge_of(fails, runs)
    left = ddmin(range(64), judge)
    assert fails(left)
    assert judge.budget.runs <= runs
    assert left == sorted(left)


def test_seconds_bound_a_search_as_well() -> None:
    ticks = iter(range(1000))
    budget = Budget(1000, seconds=10, clock=lambda: float(next(ticks)))
    judge: Judge[list[int]] = Judge(all_of([1, 60]), budget, tuple)
    left = ddmin(range(64), judge)
    assert {1, 60} <= set(left)
    assert budget.runs <= 10
    with pytest.raises(BudgetSpent):
        judge([99])


def test_edits_are_kept_where_they_hold_and_tried_again_after_a_change() -> None:
    """Halving `a` is possible only after `b` is gone, which comes later in the row."""

    def fails(value: tuple[int, int]) -> bool:
        a, b = value
        return a >= (3 if b == 0 else 8)

    halve = lambda value: (value[0] // 2, value[1]) if value[0] > 1 else None  # noqa: E731
    drop = lambda value: (value[0], 0)  # noqa: E731
    assert descend((8, 5), [halve, drop], fails) == (4, 0)


def test_an_edit_that_does_not_apply_costs_nothing() -> None:
    judge: Judge[int] = Judge(lambda value: True, Budget(10), lambda value: value)
    assert descend(7, [lambda value: None, lambda value: value], judge) == 7
    assert judge.budget.runs == 0


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_the_least_number_that_fails_is_found_where_failures_are_monotone(a: int, b: int, c: int) -> None:
    floor, threshold, value = sorted((a, b, c))
    assert lowest(floor, value, lambda count: count >= threshold) == threshold

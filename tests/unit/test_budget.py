"""Bytes are admitted first come, first served, and given back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcore.budget import BudgetStatistics, ByteBudget, Grant
from kvcore.errors import ConfigError


def test_a_demand_that_fits_is_admitted_at_once() -> None:
    budget = ByteBudget(100)
    grant = budget.request(60)
    assert not grant.waiting
    assert grant.limit_bytes == 60
    assert budget.bytes_used == 60


def test_a_small_demand_does_not_overtake_a_large_one() -> None:
    budget = ByteBudget(100)
    first = budget.request(60)
    large = budget.request(80)
    small = budget.request(10)
    assert large.waiting
    assert small.waiting
    assert budget.admit() == []
    budget.give_back(first, 60)
    assert budget.admit() == [large, small]


def test_a_demand_over_the_whole_budget_is_cut_to_it() -> None:
    budget = ByteBudget(100)
    grant = budget.request(1000)
    assert grant.limit_bytes == 100
    assert budget.statistics().cut == 1
    for fits in (0, 99, 100):
        budget.request(fits)
    assert budget.statistics().cut == 1


def test_a_new_budget_has_counted_nothing() -> None:
    assert ByteBudget(100).statistics() == BudgetStatistics(100, 0, 0, 0, 0, 0, 0)


def test_zero_bytes_never_wait() -> None:
    budget = ByteBudget(100)
    budget.request(100)
    budget.request(1)
    assert not budget.request(0).waiting


def test_a_waiting_demand_that_others_make_superfluous_is_admitted_out_of_line() -> None:
    budget = ByteBudget(100)
    budget.request(100)
    front = budget.request(50)
    joined = budget.request(50)
    budget.revise(joined, 0)
    assert budget.admit() == [joined]
    assert front.waiting


def test_a_revision_never_asks_for_more() -> None:
    budget = ByteBudget(100)
    budget.request(100)
    grant = budget.request(10)
    budget.revise(grant, 50)
    assert grant.bytes_wanted == 10


def test_bytes_given_back_twice_are_our_own_mistake() -> None:
    budget = ByteBudget(100)
    grant = budget.request(60)
    budget.give_back(grant, 40)
    with pytest.raises(AssertionError, match="given back twice"):
        budget.give_back(grant, 40)


def test_withdrawing_lets_the_next_one_in() -> None:
    budget = ByteBudget(100)
    budget.request(50)
    large = budget.request(90)
    small = budget.request(40)
    budget.withdraw(large)
    assert budget.admit() == [small]
    assert not large.waiting


def test_a_budget_of_nothing_still_admits_those_who_ask_for_nothing() -> None:
    budget = ByteBudget(0)
    assert budget.request(70).limit_bytes == 0


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        ByteBudget(-1)


class BudgetMachine(RuleBasedStateMachine):
    """Used bytes are the sum of what is held, never above the capacity; nobody waits while the line could move."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = ByteBudget(100)
        self.held: list[Grant] = []
        self.line: list[Grant] = []

    @rule(size=st.integers(0, 150))
    def request(self, size: int) -> None:
        grant = self.budget.request(size)
        (self.line if grant.waiting else self.held).append(grant)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            grant = data.draw(st.sampled_from(self.held))
            self.budget.give_back(grant, data.draw(st.integers(0, grant.bytes_held)))

    @rule(data=st.data())
    def leave_the_line(self, data: st.DataObject) -> None:
        if self.line:
            grant = self.line.pop(data.draw(st.integers(0, len(self.line) - 1)))
            self.budget.withdraw(grant)

    @rule(data=st.data())
    def ask_for_less(self, data: st.DataObject) -> None:
        if self.line:
            self.budget.revise(data.draw(st.sampled_from(self.line)), data.draw(st.integers(1, 100)))

    @rule()
    def admit(self) -> None:
        admitted = self.budget.admit()
        assert admitted == self.line[: len(admitted)], "out of order"
        del self.line[: len(admitted)]
        self.held += admitted
        if self.line:
            assert self.budget.bytes_used + self.line[0].bytes_wanted > self.budget.capacity_bytes

    @invariant()
    def used_is_the_sum(self) -> None:
        assert self.budget.bytes_used == sum(grant.bytes_held for grant in self.held) <= self.budget.capacity_bytes
        assert self.budget.waiting == len(self.line)


TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

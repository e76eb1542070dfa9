"""What the machines share: a search that must end with a failure, for planted bugs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

Finds = Callable[..., str]


@pytest.fixture
def finds() -> Finds:
    """`finds(Machine)`: the first line of the first failure that the machine finds. If it finds none, the test fails.

    The search is the same each time (derandomized) and does not shrink: whether a bug is found is the question, not
    how small the example is.
    """

    def search(machine: type[RuleBasedStateMachine], examples: int = 400) -> str:
        budget = settings(
            max_examples=examples,
            stateful_step_count=machine.TestCase.settings.stateful_step_count,
            phases=(Phase.generate,),
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        with pytest.raises(AssertionError) as caught:
            run_state_machine_as_test(machine, settings=budget)
        return str(caught.value).partition("\n")[0] or "an assertion of the code itself"

    return search


@pytest.fixture(scope="session", autouse=True)
def small_collections() -> None:
    """Every SimLoop collects garbage at both ends of its run; what was there before need not be walked each time."""
    gc.collect()
    gc.freeze()

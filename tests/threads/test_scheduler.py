"""The scheduler itself: it plays every order once, and finds what can go wrong in any of them."""

from __future__ import annotations

from math import comb
from types import SimpleNamespace
from typing import Any

import pytest


class Shared:
    """What the threads of a scenario meet at."""

    def __init__(self) -> None:
        self.value = 0
        self.flag = False
        self.items: list[int] = []

    def increment(self) -> None:
        self.value += 1


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_without_a_bound_every_order_comes_once(threads: SimpleNamespace, explore: Any, steps: int) -> None:
    """Two threads of n steps each have (2n choose n) orders."""
    orders: list[str] = []

    def scenario(run: Any) -> Any:
        order: list[str] = []

        def body(name: str) -> None:
            for _ in range(steps):
                threads.step("a step")
                order.append(name)

        for name in "ab":
            run.spawn(lambda name=name: body(name), name)
        return lambda: orders.append("".join(order))

    report = explore(scenario, None, traced=[])
    assert report.failure == ""
    assert len(set(orders)) == len(orders) == report.runs == comb(2 * steps, steps)


def test_the_bound_counts_preemptions_only(threads: SimpleNamespace, explore: Any) -> None:
    """Without any there are two orders of two threads: one after the other."""

    def scenario(run: Any) -> Any:
        for _ in range(2):
            run.spawn(lambda: [threads.step("a step") for _ in range(4)])
        return lambda: True

    runs = [explore(scenario, bound, traced=[]).runs for bound in (0, 1, 2, None)]
    assert runs[0] == 2
    assert runs == sorted(set(runs)), "each bound has more orders than the last"


def test_a_lost_update_is_found_inside_of_one_line(threads: SimpleNamespace, broken: Any) -> None:
    def scenario(run: Any) -> Any:
        shared = Shared()
        run.spawn(shared.increment)
        run.spawn(shared.increment)
        return lambda: shared.value == 2

    assert "check" in broken(scenario)


def test_a_lock_around_it_makes_it_good(threads: SimpleNamespace, proven: Any) -> None:
    def scenario(run: Any) -> Any:
        shared, lock = Shared(), threads.Lock()

        def increment() -> None:
            with lock:
                shared.increment()

        run.spawn(increment)
        run.spawn(increment)
        return lambda: shared.value == 2

    assert proven(scenario, None) == 2, "the lock leaves the order of the two, and nothing else"


def test_a_container_that_is_looked_at_before_the_lock_is_found(threads: SimpleNamespace, broken: Any) -> None:
    """Reported as good by frontrun 0.7."""

    def scenario(run: Any) -> Any:
        shared, lock = Shared(), threads.Lock()

        def fill() -> None:
            shared.items.append(1)
            with lock:
                shared.flag = True

        def empty() -> None:
            while shared.items:
                shared.items.pop()
            with lock:
                shared.flag = False

        run.spawn(fill)
        run.spawn(empty)
        return lambda: shared.flag or not shared.items

    broken(scenario)


def test_two_locks_in_two_orders_are_a_deadlock(threads: SimpleNamespace, broken: Any) -> None:
    def scenario(run: Any) -> Any:
        first, second = threads.Lock(), threads.Lock()

        def both(one: Any, other: Any) -> None:
            with one, other:
                pass

        run.spawn(lambda: both(first, second), "forwards")
        run.spawn(lambda: both(second, first), "backwards")
        return lambda: True

    assert broken(scenario) == "deadlock: forwards waits, backwards waits"


def test_an_exception_in_a_thread_fails_the_scenario(threads: SimpleNamespace, broken: Any) -> None:
    def scenario(run: Any) -> Any:
        shared = Shared()
        run.spawn(shared.items.pop, "popper")
        run.spawn(lambda: shared.items.append(1))
        return lambda: True

    assert "IndexError" in broken(scenario)


def test_a_scenario_without_shared_state_has_one_order(threads: SimpleNamespace, explore: Any) -> None:
    def scenario(run: Any) -> Any:
        for _ in range(3):
            run.spawn(lambda: sum(range(10)))
        return lambda: True

    assert explore(scenario, None).runs == 1


def test_a_thread_that_turns_in_a_circle_is_stopped(threads: SimpleNamespace, broken: Any) -> None:
    def scenario(run: Any) -> Any:
        shared = Shared()

        def spin() -> None:
            while not shared.flag:
                threads.step("look")

        run.spawn(spin)
        return lambda: True

    assert broken(scenario, 0) == "a thread turns in a circle"

"""Making a failing thing smaller: delta debugging, and edits tried one after the other. Knows nothing of cases.

Theory of operation
-------------------
Everything here asks one question, `holds(candidate)`: does the smaller one still fail in the same way? The answer
costs a whole simulated run, so what counts is the number of questions.

    `ddmin`     the least part of a list (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input",
                2002). First the empty list, then halves, quarters, ... and their complements. The result is
                1-minimal: without any single one of its items the failure is gone.
    `descend`   a row of edits in fixed order, each kept where it holds, round after round, until a whole round has
                changed nothing. An edit that does not apply answers None and costs nothing.
    `lowest`    the least integer of a range for which a failure holds, found by halving. Failures need not be
                monotone; then it is *a* small one, which was tried.

A `Judge` stands between them and the runs. It remembers every answer by the candidate's key, so that no candidate is
run twice; it counts runs and, if it has a clock, seconds; and it raises `BudgetSpent` when either is used up. The
functions here catch that and answer with the best they have. With a bound on runs alone the result is a function of
the input: same case, same result. With a bound on seconds it depends on the machine.

Rejected: Hypothesis' shrinker (its choice sequence would have to be the case; ours is read and edited by people),
hierarchical delta debugging (cases are flat), probabilistic orders (another result on another day).

Who holds: the caller holds the judge over as many calls as the budget shall cover. Nobody frees anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")
C = TypeVar("C")

_PARTS_ALONE_MAX = 8  # with more parts, one part alone hardly ever fails, and only complements lead to 1-minimality


class BudgetSpent(Exception):
    """No further run is allowed. The functions of this module catch it; who asks a judge directly must, too."""


class Budget:
    """How many runs are allowed and, given a `clock` in seconds, how long they may take together."""

    def __init__(self, runs: int, seconds: float | None = None, clock: Callable[[], float] | None = None) -> None:
        assert runs >= 0
        assert (seconds is None) or (clock is not None), "a bound on seconds needs a clock"
        self.runs_max = runs
        self.runs = 0
        self._clock = clock
        self._end = clock() + seconds if clock is not None and seconds is not None else None

    @property
    def spent(self) -> bool:
        return self.runs >= self.runs_max or (self._clock is not None and self._late())

    def _late(self) -> bool:
        assert self._clock is not None
        return self._end is not None and self._clock() >= self._end

    def spend(self) -> None:
        """Pay for one run."""
        if self.spent:
            raise BudgetSpent(f"{self.runs} runs")
        self.runs += 1


class Judge(Generic[C]):
    """Answers `holds` for candidates, from memory or by a run."""

    def __init__(self, test: Callable[[C], bool], budget: Budget, key: Callable[[C], Hashable]) -> None:
        self._test = test
        self._key = key
        self._known: dict[Hashable, bool] = {}
        self.budget = budget
        self.answered_from_memory = 0

    def __call__(self, candidate: C) -> bool:
        key = self._key(candidate)
        known = self._known.get(key)
        if known is not None:
            self.answered_from_memory += 1
            return known
        self.budget.spend()
        answer = self._known[key] = self._test(candidate)
        return answer


def ddmin(items: Sequence[T], holds: Callable[[list[T]], bool]) -> list[T]:
    """The items without which the failure is gone; `items` itself is taken to fail and is not tried."""
    best = list(items)
    try:
        if best and holds([]):
            return []
        parts = 2
        while len(best) >= 2:
            smaller = _first_that_holds(_candidates(best, parts), holds)
            if smaller is None:
                if parts >= len(best):
                    break
                parts = min(2 * parts, len(best))
                continue
            best, alone = smaller
            parts = min(2 if alone else max(parts - 1, 2), len(best))
    except BudgetSpent:
        pass
    return best


def _candidates(items: list[T], parts: int) -> Iterable[tuple[list[T], bool]]:
    """Each of the parts alone (True) while there are few, then each complement (False), that of the last part first."""
    bounds = [len(items) * part // parts for part in range(parts + 1)]
    ranges = list(pairwise(bounds))
    if parts <= _PARTS_ALONE_MAX:
        yield from ((items[start:end], True) for start, end in ranges)
    if parts > 2:  # the complement of a half is the other half
        yield from ((items[:start] + items[end:], False) for start, end in reversed(ranges))


def _first_that_holds(
    candidates: Iterable[tuple[list[T], bool]], holds: Callable[[list[T]], bool]
) -> tuple[list[T], bool] | None:
    for candidate in candidates:
        if holds(candidate[0]):
            return candidate
    return None


def descend(start: C, edits: Sequence[Callable[[C], C | None]], holds: Callable[[C], bool], rounds: int = 4) -> C:
    """`start` with every edit that holds; at most `rounds` times through all of them."""
    best = start
    try:
        for _ in range(rounds):
            before = best
            for edit in edits:
                smaller = edit(best)
                if smaller is not None and smaller != best and holds(smaller):
                    best = smaller
            if best == before:
                break
    except BudgetSpent:
        pass
    return best


def lowest(floor: int, value: int, holds: Callable[[int], bool]) -> int:
    """A small integer from `floor` to `value` that holds; `value` is taken to hold."""
    assert floor <= value
    best = value
    try:
        low = floor
        if low < best and holds(low):
            return low
        while low + 1 < best:
            middle = (low + best) // 2
            if holds(middle):
                best = middle
            else:
                low = middle
    except BudgetSpent:
        pass
    return best

"""Blocking work of an adapter on its way to the executor and back.

Each piece has a result for certain: when it breaks off (the executor was closed, its thread died) `broken` makes one
from the error. After `stop` results are dropped, and `inflight` still counts down as running work ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from kvcore.errors import CallerError, StoreError
from kvcore.ports import Executor, Outcome
from kvcore.runtime.confined import LoopConfined

T = TypeVar("T")


class Runner:
    """See the module text. The executor is the caller's; an outcome is held by nobody but the `ended` it goes to."""

    def __init__(self, executor: Executor, confined: LoopConfined) -> None:
        self.inflight = 0
        self._executor = executor
        self._confined = confined
        self._stopped = False

    def submit_each(
        self, run: Callable[[], list[T]], ended: Callable[[list[T]], None], asked: Sequence[object], cost_bytes: int = 0
    ) -> None:
        """Work with a result for each of `asked`; an exception is one of the values of T."""
        self.submit(run, ended, partial(_each_broken, len(asked)), cost_bytes)

    def submit(
        self, run: Callable[[], T], ended: Callable[[T], None], broken: Callable[[StoreError], T], cost_bytes: int = 0
    ) -> None:
        self.inflight += 1
        try:
            self._executor.submit(run, partial(self._ended, ended, broken), cost_bytes)
        except CallerError as error:  # the executor was closed under us
            self._ended(ended, broken, Outcome(None, error))

    def stop(self) -> None:
        self._stopped = True

    def _ended(self, ended: Callable[[T], None], broken: Callable[[StoreError], T], outcome: Outcome[T]) -> None:
        self._confined.check()
        self.inflight -= 1
        assert self.inflight >= 0
        if not self._stopped:
            value = outcome.value
            ended(broken(StoreError(f"the work broke off: {outcome.error!r}")) if value is None else value)


def _each_broken(count: int, error: StoreError) -> list[Any]:
    return [error] * count

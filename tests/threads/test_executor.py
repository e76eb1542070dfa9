"""`ThreadExecutor`: each outcome comes to the loop once, in the order of the ends, and never after close."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import CallerError
from kvcore.ports import Outcome
from kvcore.runtime import executor
from kvcore.runtime.executor import ThreadExecutor


class EarlyExecutor(ThreadExecutor):
    """Planted: the notice before the outcome."""

    def _serve(self) -> None:
        while (piece := self._waiting.get()) is not None and not self._closed:
            work, deliver = piece
            outcome = executor._run(work)
            self._notice.signal()
            self._ended.put((deliver, outcome))


class DeafExecutor(ThreadExecutor):
    """Planted: close does not wake the threads that wait for work."""

    def close(self) -> None:
        self._closed = True
        self._notice.close()


class LoudExecutor(ThreadExecutor):
    """Planted: a thread that ends its work while the executor closes does not expect the notice to be gone."""

    def _serve(self) -> None:
        while (piece := self._waiting.get()) is not None and not self._closed:
            work, deliver = piece
            self._ended.put((deliver, executor._run(work)))
            self._notice.signal()


class Office:
    """An executor on a loop, and what came back."""

    def __init__(self, threads: SimpleNamespace, made: type[ThreadExecutor], count: int) -> None:
        self.loop = threads.Loop()
        self.executor = made(self.loop, count)
        self.ended: list[int] = []
        self.delivered: list[int] = []
        self.late: list[int] = []
        self.closed = False

    def submit(self, *numbers: int) -> None:
        for number in numbers:
            self.executor.submit(lambda number=number: self.work(number), self.deliver)

    def work(self, number: int) -> int:
        self.ended.append(number)
        return number

    def deliver(self, outcome: Outcome[int]) -> None:
        assert outcome.value is not None
        (self.late if self.closed else self.delivered).append(outcome.value)

    def wait(self, count: int) -> None:
        self.loop.turn_until(lambda: len(self.delivered) == count)

    def close(self) -> None:
        """Close; the loop may have seen the notice readable just before."""
        (_, deliver) = self.loop.reader
        self.executor.close()
        self.closed = True
        deliver()
        with pytest.raises(CallerError):
            self.submit(0)


def working(threads: SimpleNamespace, count: int, made: type[ThreadExecutor] = ThreadExecutor) -> Any:
    def scenario(run: Any) -> Any:
        office = Office(threads, made, count)

        def loop() -> None:
            office.submit(1, 2)
            office.wait(2)
            office.close()

        run.spawn(loop, "loop")
        return lambda: sorted(office.delivered) == [1, 2] and not office.late and not office.loop.errors

    return scenario


@pytest.mark.parametrize("count", [1, 2])
def test_every_outcome_is_delivered_once_and_the_threads_end(threads: SimpleNamespace, proven: Any, count: int) -> None:
    assert proven(working(threads, count), {1: 2, 2: 1}[count]) > 50


def test_one_thread_delivers_in_the_order_of_submission(threads: SimpleNamespace, proven: Any) -> None:
    def scenario(run: Any) -> Any:
        office = Office(threads, ThreadExecutor, 1)

        def loop() -> None:
            office.submit(1, 2)
            office.wait(2)
            office.close()

        run.spawn(loop, "loop")
        return lambda: office.delivered == office.ended == [1, 2]

    proven(scenario)


def closing(threads: SimpleNamespace, made: type[ThreadExecutor] = ThreadExecutor) -> Any:
    """The loop closes at once, whatever the thread is doing."""

    def scenario(run: Any) -> Any:
        office = Office(threads, made, 1)

        def loop() -> None:
            office.submit(1, 2)
            office.close()

        run.spawn(loop, "loop")
        return lambda: office.delivered == office.late == [] and set(office.ended) <= {1, 2}

    return scenario


def test_nothing_is_delivered_after_close_and_the_threads_end(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(closing(threads), 3) > 50


def test_a_notice_before_the_outcome_is_found(threads: SimpleNamespace, broken: Any) -> None:
    assert "deadlock" in broken(working(threads, 1, EarlyExecutor))


def test_a_thread_that_close_does_not_wake_is_found(threads: SimpleNamespace, broken: Any) -> None:
    assert "deadlock" in broken(closing(threads, DeafExecutor))


def test_a_thread_that_trips_over_the_closed_notice_is_found(threads: SimpleNamespace, broken: Any) -> None:
    assert "signal on a closed notice" in broken(closing(threads, LoudExecutor))

"""`EventfdNotice` between threads: no signal is lost, and no thread touches a descriptor that is not ours any more."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import CallerError
from kvcore.runtime.notice import EventfdNotice


class UnlockedNotice(EventfdNotice):
    """Planted: the lock is gone."""

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        self._lock = NO_LOCK()


class LateNotice(EventfdNotice):
    """Planted: cleared after the call instead of before it."""

    def _deliver(self) -> None:
        assert self._callback is not None
        self._callback()
        with self._lock:
            self._wakeup.clear()
            self._signalled = False


NO_LOCK: Any = None


@pytest.fixture(autouse=True)
def _no_lock(threads: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "NO_LOCK", threads.NoLock)


class Results:
    """Producers add results and signal; the loop drains until it has all of them."""

    def __init__(self, threads: SimpleNamespace, notice: type[EventfdNotice]) -> None:
        self.loop = threads.Loop()
        self.added: list[int] = []
        self.drained: list[int] = []
        self.notice = notice(self.loop)
        self.notice.subscribe(self.drain)

    def drain(self) -> None:
        while self.added:
            self.drained.append(self.added.pop(0))

    def produce(self, *numbers: int) -> None:
        for number in numbers:
            self.added.append(number)
            self.notice.signal()

    def signal_first(self, number: int) -> None:
        """Planted: the result comes after its signal."""
        self.notice.signal()
        self.added.append(number)

    def sleeps(self) -> bool:
        """What is readable will be cleared by the next delivery; else the loop would turn in a circle for ever."""
        return self.notice._signalled or not self.notice._wakeup.readable  # type: ignore[attr-defined]

    def consume(self, count: int) -> None:
        self.loop.turn_until(lambda: len(self.drained) == count)


def two_producers(threads: SimpleNamespace, notice: type[EventfdNotice] = EventfdNotice, early: bool = False) -> Any:
    def scenario(run: Any) -> Any:
        results = Results(threads, notice)
        first = results.signal_first if early else results.produce
        run.spawn(lambda: first(1), "one")
        run.spawn(lambda: results.produce(2), "two")
        run.spawn(lambda: results.consume(2), "loop")
        return lambda: sorted(results.drained) == [1, 2] and results.sleeps()

    return scenario


def test_no_result_is_lost_between_two_producers_and_the_loop(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(two_producers(threads)) > 100


def test_results_of_one_producer_come_in_its_order(threads: SimpleNamespace, proven: Any) -> None:
    def scenario(run: Any) -> Any:
        results = Results(threads, EventfdNotice)
        run.spawn(lambda: results.produce(1, 2), "producer")
        run.spawn(lambda: results.consume(2), "loop")
        return lambda: results.drained == [1, 2]

    assert proven(scenario, 3) > 100


def test_a_signal_before_the_result_is_found(threads: SimpleNamespace, broken: Any) -> None:
    assert "deadlock" in broken(two_producers(threads, early=True))


@pytest.mark.parametrize("notice", [UnlockedNotice, LateNotice])
def test_a_notice_that_loses_a_signal_or_never_sleeps_is_found(
    threads: SimpleNamespace, broken: Any, notice: type[EventfdNotice]
) -> None:
    broken(two_producers(threads, notice))


def closing(threads: SimpleNamespace, notice: type[EventfdNotice] = EventfdNotice) -> Any:
    """A thread signals while the loop closes the notice, whose descriptor it has perhaps seen readable."""

    def scenario(run: Any) -> Any:
        loop = threads.Loop()
        made = notice(loop)
        delivered: list[str] = []
        made.subscribe(lambda: delivered.append("closed" if made._closed else "open"))
        _, deliver = loop.reader

        def signal() -> None:
            with suppress(CallerError):
                made.signal()

        def close() -> None:
            if made._wakeup.readable:  # type: ignore[attr-defined]
                deliver()
            made.close()
            deliver()  # the loop had it among its ready ones when the callback before it closed the notice

        run.spawn(signal, "thread")
        run.spawn(signal, "another thread")
        run.spawn(close, "loop")
        return lambda: "closed" not in delivered and loop.reader is None

    return scenario


def test_signal_and_close_never_touch_a_descriptor_that_is_gone(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(closing(threads)) > 100


def test_closing_without_the_lock_is_found(threads: SimpleNamespace, broken: Any) -> None:
    assert "that is closed" in broken(closing(threads, UnlockedNotice))

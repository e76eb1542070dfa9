"""HTTP threads ask the loop and touch nothing: an answer in time, or 503; also when the loop ends at that moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.operations import http
from kvcore.operations.http import HttpServer

ONLY_IT = [http.__file__]  # the models below say their steps themselves


class Future:
    """`concurrent.futures.Future`: the time-out passes whenever the waiting thread is chosen before the answer."""

    step: Any = None

    def __init__(self) -> None:
        self.value: Any = None
        self.there = False

    def set_result(self, value: Any) -> None:
        Future.step("answer")
        self.value, self.there = value, True

    def set_exception(self, error: BaseException) -> None:
        raise AssertionError("the snapshot failed") from error

    def result(self, timeout: float) -> Any:
        Future.step("wait for the answer")
        if not self.there:
            raise TimeoutError
        return self.value


class Asking:
    """A loop that answers for a while and is then closed."""

    def __init__(self, threads: SimpleNamespace) -> None:
        self.step = threads.step
        self.posted: list[Any] = []
        self.closed = False
        self.answering = False
        self.snapshots = 0
        self.statuses: list[int] = []
        self.server = HttpServer.__new__(HttpServer)  # without a socket
        self.server._loop = self  # type: ignore[assignment]
        self.server._snapshot = self.snapshot  # type: ignore[assignment]

    def call_soon_threadsafe(self, callback: Any, *given: Any) -> None:
        self.step("post to the loop")
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.posted.append(lambda: callback(*given))

    def snapshot(self) -> str:
        assert self.answering, "the state was looked at outside of the loop's turn"
        self.snapshots += 1
        return "state"

    def live(self) -> None:
        for _ in range(2):
            self.step("turn")
            self.answering = True
            while self.posted:
                self.posted.pop(0)()
            self.answering = False
        self.step("close the loop")
        self.closed = True

    def ask(self) -> None:
        self.statuses.append(self.server.answer("/healthz")[0])


def asking(threads: SimpleNamespace) -> Any:
    def scenario(run: Any) -> Any:
        asked = Asking(threads)
        run.spawn(asked.ask, "one")
        run.spawn(asked.ask, "another")
        run.spawn(asked.live, "loop")
        return lambda: len(asked.statuses) == 2 and asked.statuses.count(200) <= asked.snapshots <= 2

    return scenario


@pytest.fixture(autouse=True)
def _future(threads: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    Future.step = threads.step
    monkeypatch.setattr(http, "Future", Future)


def test_every_question_is_answered_by_the_loop_or_with_unavailable(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(asking(threads), 4, ONLY_IT) > 100


def test_looking_at_the_state_from_the_thread_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpServer, "_ask", lambda server: server._snapshot())
    assert "outside of the loop's turn" in broken(asking(threads), 2, ONLY_IT)


def test_a_closed_loop_that_is_not_expected_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(server: Any) -> Any:
        answered = http.Future()
        server._loop.call_soon_threadsafe(http._resolve, answered, server._snapshot)
        return answered.result(1)

    monkeypatch.setattr(HttpServer, "_ask", careless)
    assert "Event loop is closed" in broken(asking(threads), 2, ONLY_IT)

"""`LoopThread`: whoever calls gets an answer, also when somebody else stops the loop at that moment."""

from __future__ import annotations

from asyncio import CancelledError
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import CallerError
from kvcore.runtime import loop_thread
from kvcore.runtime.loop_thread import LoopThread

ONLY_IT = [loop_thread.__file__]  # the model below says its steps itself


class Work:
    """A coroutine that needs two turns of the loop as a task, and none when it is run through."""

    def __init__(self) -> None:
        self.closed = False

    def send(self, value: None) -> None:
        raise StopIteration("done")

    def close(self) -> None:
        self.closed = True


class Future:
    def __init__(self, step: Callable[..., None]) -> None:
        self._step = step
        self.outcome = ""

    def result(self) -> str:
        self._step("wait for the result", lambda: not self.outcome)
        if self.outcome == "cancelled":
            raise CancelledError
        return self.outcome

    def cancel(self) -> None:
        self.outcome = self.outcome or "cancelled"

    def set_result(self, value: str) -> None:
        self.outcome = value


class Loop:
    """asyncio's order of things: a turn runs what was ready when it began; `stop` ends `run_forever` after the turn."""

    def __init__(self, step: Callable[..., None]) -> None:
        self._step = step
        self._ready: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._closed = False
        self.futures: dict[Future, None] = {}

    def call_soon_threadsafe(self, callback: Callable[..., None], *given: Any) -> None:
        self._step("post to the loop")
        if self._closed:
            raise RuntimeError("Event loop is closed")
        self._ready.append(lambda: callback(*given))

    def run_forever(self) -> None:
        while not self._stopping:
            self._step("sleep", lambda: not self._ready)
            self._turn()
        self._stopping = False

    def run_until_complete(self, turns: int) -> None:
        for _ in range(turns):
            self._step("turn")
            self._turn()

    def _turn(self) -> None:
        for _ in range(len(self._ready)):
            self._ready.popleft()()

    def stop(self) -> None:
        self._stopping = True

    def shutdown_asyncgens(self) -> int:
        return 2  # turns

    def close(self) -> None:
        self._step("close the loop")
        self._closed = True
        self._ready.clear()

    def begin(self, future: Future) -> None:
        def end() -> None:
            future.outcome = future.outcome or "done"
            self.futures.pop(future, None)

        self.futures[future] = None
        self._ready.append(lambda: self._ready.append(end))


@pytest.fixture(autouse=True)
def _model(threads: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(work: Work, loop: Loop) -> Future:
        future = Future(threads.step)
        loop.call_soon_threadsafe(loop.begin, future)
        return future

    def gather(*tasks: Future, **_: bool) -> int:
        return 2  # turns

    model = SimpleNamespace(
        new_event_loop=lambda: Loop(threads.step),
        set_event_loop=lambda loop: None,
        run_coroutine_threadsafe=submit,
        all_tasks=lambda loop: list(loop.futures),
        gather=gather,
    )
    monkeypatch.setattr(loop_thread, "asyncio", model)
    monkeypatch.setattr(loop_thread, "Future", lambda: Future(threads.step))


def calling(callers: int, way: str = "call") -> Any:
    def scenario(run: Any) -> Any:
        thread = LoopThread("loop")
        works = [Work() for _ in range(callers)]
        ends: list[str] = []

        def call(work: Work) -> None:
            try:
                ends.append(getattr(thread, way)(work))
            except CancelledError:
                ends.append("cancelled")
            except CallerError:
                assert work.closed, "a coroutine that was not taken is closed"
                ends.append("refused")

        for work in works:
            run.spawn(lambda work=work: call(work), "caller")
        run.spawn(lambda: thread.stop(1.0), "stopper")
        return lambda: len(ends) == callers

    return scenario


@pytest.mark.parametrize("callers", [1, 2])
def test_a_call_is_answered_cancelled_or_refused_whenever_the_loop_stops(proven: Any, callers: int) -> None:
    assert proven(calling(callers), 4 - callers, ONLY_IT) > 10


@pytest.mark.parametrize("callers", [1, 2])
def test_work_that_never_waits_is_answered_or_refused_whenever_the_loop_stops(proven: Any, callers: int) -> None:
    assert proven(calling(callers, "call_now"), 4 - callers, ONLY_IT) > 10


@pytest.mark.parametrize("way", ["call", "call_now"])
def test_a_call_that_looks_before_it_posts_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The loop stops in between: the call is posted to nobody, and waits for ever."""
    monkeypatch.setattr(loop_thread.threading, "Lock", threads.NoLock)
    broken(calling(1, way), 2, ONLY_IT)

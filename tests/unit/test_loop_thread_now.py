"""`LoopThread.call_now`: what a caller gets back, on a real loop. `tests/threads` has its races with `stop`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvcore.errors import CallerError, InternalError
from kvcore.runtime.loop_thread import LoopThread

STOPS_IN_S = 30.0


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("now")
    yield thread
    assert thread.stop(STOPS_IN_S)


async def where() -> str:
    assert asyncio.get_running_loop().is_running()
    return threading.current_thread().name


async def failing() -> None:
    raise KeyError("mine")


async def waiting(closed: list[str]) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        closed.append("closed")


def test_it_runs_on_the_loop_and_its_result_comes_back(thread: LoopThread) -> None:
    assert thread.call_now(where()) == "now"


def test_what_it_raises_is_raised_here_and_the_loop_goes_on(thread: LoopThread) -> None:
    with pytest.raises(KeyError, match="mine"):
        thread.call_now(failing())
    assert thread.call_now(where()) == "now"


def test_work_that_waits_after_all_is_our_mistake_and_is_closed(thread: LoopThread) -> None:
    closed: list[str] = []
    with pytest.raises(InternalError, match="never to wait"):
        thread.call_now(waiting(closed))
    assert closed == ["closed"]
    assert thread.call_now(where()) == "now"


def test_a_stopped_loop_refuses_it_and_closes_the_work() -> None:
    thread = LoopThread("now")
    assert thread.stop(STOPS_IN_S)
    work = where()
    with pytest.raises(CallerError, match="has been stopped"):
        thread.call_now(work)
    assert work.cr_frame is None, "closed: nobody warns that it was never awaited"


def test_the_loops_own_thread_would_wait_for_itself(thread: LoopThread) -> None:
    async def ask_again() -> str:
        with pytest.raises(CallerError, match="own thread"):
            thread.call_now(where())
        return "refused"

    assert thread.call_now(ask_again()) == "refused"

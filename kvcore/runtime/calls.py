"""Blocking calls into client libraries, from several threads at once: their end, their parallelism, their patience.

* `CallGate` counts calls into something that must not be closed while one runs in it. The last one out after `close`
  closes it, in a thread of its own if that takes long.
* `RequestThreads` runs the requests of one batch side by side, for stores whose latency is much longer than their work.
* `answer_within` gives up waiting for a call that hangs, for commands that may end without it.
* `pause` waits for a foreign library that announces nothing. It is for polling under another bound, never for timing.

Who holds: the backend that made it. Threads end with `close`, as soon as what they run has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from kvcore.errors import StoreError

T = TypeVar("T")
R = TypeVar("R")


class CallGate:
    """`end` runs once: after `close`, when no call is inside any more. No call begins after `close`."""

    def __init__(self, what: str, end: Callable[[], None]) -> None:
        self._what = what
        self._end = end
        self._state = threading.Lock()  # guards the next two
        self._inside = 0
        self._closed = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """StoreError: it is closed."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @property
    def inside(self) -> int:
        """Calls that run now."""
        return self._inside

    def close(self) -> None:
        with self._state:
            last = not self._closed and self._inside == 0
            self._closed = True
        if last:
            self._end()

    def _enter(self) -> None:
        with self._state:
            if self._closed:
                raise StoreError(f"{self._what} is closed")
            self._inside += 1

    def _leave(self) -> None:
        with self._state:
            self._inside -= 1
            last = self._closed and self._inside == 0
        if last:
            self._end()


class RequestThreads:
    """Up to `count` requests at once. Threads start when they are needed. Any thread may call `map`."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    def map(self, call: Callable[[T], R], orders: Sequence[T]) -> list[R]:
        """`call` for each order, results in their order. One order alone runs in the calling thread. `call` raises
        nothing. StoreError: closed before all of them had begun."""
        if len(orders) == 1:
            return [call(orders[0])]
        try:
            return list(self._threads.map(call, orders))
        except (CancelledError, RuntimeError) as error:
            raise StoreError("the store was closed in the middle of a batch") from error

    def close(self) -> None:
        """Requests that have not begun never do; running ones are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def in_background(work: Callable[[], None], name: str) -> None:
    """Run `work` in a thread of its own. Not a daemon: the interpreter waits for it at its end."""
    threading.Thread(target=work, name=name).start()


def answer_within(seconds: float, work: Callable[[], T], name: str) -> T | None:
    """What `work` returns; None after so many seconds. It then goes on in a daemon thread, which ends with the process.

    `work` raises nothing.
    """
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(work()), name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def pause(seconds: float) -> None:
    time.sleep(seconds)

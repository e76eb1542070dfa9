"""`ThreadExecutor`: blocking work in threads, outcomes back on the loop.

Theory of operation
-------------------
Two unbounded queues and one notice:

    submit -> [waiting] -> worker thread runs the work -> [ended] + notice -> loop drains -> deliver(outcome)

1. `submit` appends to `waiting` and returns. Threads start one by one as they are needed, up to `threads`.
2. A thread runs the work. Whatever it raises, `SystemExit` included, becomes `Outcome.error`: the thread goes on.
3. The thread appends (deliver, outcome) to `ended` and then signals the notice: in this order, so that a drain never
   misses an outcome.
4. The loop drains what `ended` holds at that moment, first in, first out. A `deliver` that raises is reported to
   the loop's exception handler and does not keep the others from being delivered.

`close` never waits. The waiting work is dropped, work that has begun runs to its end in its (daemon) thread and its
outcome is dropped. Buffers that such work still fills are kept alive by the work itself; their owner must not
reuse them before the work has ended, which after `close` it can only know by the death of the process.

Rejected: `concurrent.futures.ThreadPoolExecutor`, whose exit hook joins hung threads, so that one stuck disk keeps the
process from ending; `loop.run_in_executor`, which loses the order in which pieces of work ended.

Who holds, announces, frees: the executor holds a piece of work until it has ended; the notice announces; the
`deliver` callback of the submitter owns the outcome from then on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from kvcore.errors import CallerError
from kvcore.ports import Outcome
from kvcore.runtime.confined import LoopConfined
from kvcore.runtime.notice import EventfdNotice

T = TypeVar("T")
_Piece = tuple[Callable[[], Any], Callable[[Outcome[Any]], None]]


class ThreadExecutor:
    """`kvcore.ports.Executor` on `threads` daemon threads. Used from the loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int, name: str = "kvcore-io") -> None:
        if threads < 1:
            raise CallerError(f"an executor needs at least one thread, not {threads}")
        self._loop = loop
        self._threads_max = threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._waiting: SimpleQueue[_Piece | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[Callable[[Outcome[Any]], None], Outcome[Any]]] = SimpleQueue()
        self._unended = 0
        self._closed = False
        self._confined = LoopConfined()
        self._notice = EventfdNotice(loop)
        self._notice.subscribe(self._drain)

    def submit(self, work: Callable[[], T], deliver: Callable[[Outcome[T]], None], cost_bytes: int = 0) -> None:
        self._confined.check()
        if self._closed:
            raise CallerError("submit on a closed executor")
        self._unended += 1
        self._waiting.put((work, deliver))
        if len(self._threads) < min(self._threads_max, self._unended):
            self._start_thread()

    def close(self) -> None:
        if self._closed:
            return
        self._confined.check()
        self._closed = True
        self._unended = 0
        for _ in self._threads:
            self._waiting.put(None)
        self._notice.close()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        """Body of a worker thread."""
        while (piece := self._waiting.get()) is not None and not self._closed:
            work, deliver = piece
            self._ended.put((deliver, _run(work)))
            del piece, work, deliver  # do not keep buffers alive while idle
            with suppress(CallerError):  # closed meanwhile: the outcome is dropped
                self._notice.signal()

    def _drain(self) -> None:
        # Only what is there now: outcomes that come during the drain have signalled again, and the loop gets its turn.
        for _ in range(self._ended.qsize()):
            if self._closed:
                return
            deliver, outcome = self._ended.get_nowait()
            self._unended -= 1
            self._hand_over(deliver, outcome)

    def _hand_over(self, deliver: Callable[[Outcome[Any]], None], outcome: Outcome[Any]) -> None:
        try:
            deliver(outcome)
        except Exception as error:
            self._loop.call_exception_handler({"message": "deliver callback of an executor raised", "exception": error})
        except BaseException:
            if not self._closed:
                self._notice.signal()  # the loop is being torn down or debugged: what is left stays deliverable
            raise


def _run(work: Callable[[], Any]) -> Outcome[Any]:
    try:
        return Outcome(work(), None)
    except BaseException as error:
        return Outcome(None, error)

"""A private event loop in its own daemon thread, for synchronous callers.

`call` and `stop` exclude each other: a call is posted to the loop before the stop, and is then answered or cancelled;
or it is refused. Without that, a call that has looked at the flag before a stop would be posted to a loop that has
ended, and wait for ever.

Who holds: the object that started it; the thread ends when that object calls `stop`, and does not keep the process from
ending. `call` hands a coroutine over and waits for its result; if the waiting is interrupted, the coroutine is
cancelled, so that its own `finally` gives back what it held.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from kvcore.errors import CallerError, InternalError

T = TypeVar("T")


def _run_through(work: Coroutine[Any, Any, T], future: Future[T]) -> None:
    try:
        work.send(None)
    except StopIteration as ended:
        future.set_result(ended.value)
    except BaseException as error:  # whoever waits must be told
        future.set_exception(error)
    else:
        work.close()
        future.set_exception(InternalError("work that was said never to wait has waited"))


class LoopThread:
    """Runs from construction until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopped = False
        self._lock = threading.Lock()  # guards `_stopped` and the order of what is posted
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop, return or raise what it does. Never from the loop's own thread: it would wait for
        itself."""
        future = self._post(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_now(self, work: Coroutine[Any, Any, T]) -> T:
        """As `call`, for work that never waits: it runs in one callback and needs no task, at half the price."""
        future: Future[T] = Future()
        reason = "call() from the loop's own thread"
        if threading.current_thread() is not self._thread:
            with self._lock:
                if not self._stopped:
                    self._loop.call_soon_threadsafe(_run_through, work, future)
                    reason = ""
                else:
                    reason = "this loop has been stopped"
        if reason:
            work.close()
            raise CallerError(reason)
        return future.result()

    def stop(self, timeout_s: float) -> bool:
        """End the loop and the thread; False if the thread has not ended in time. A second call changes nothing."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        reason = "call() from the loop's own thread"
        if threading.current_thread() is not self._thread:
            with self._lock:
                if not self._stopped:
                    return asyncio.run_coroutine_threadsafe(work, self._loop)
            reason = "this loop has been stopped"
        work.close()
        raise CallerError(reason)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._end_tasks()
            self._loop.close()

    def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

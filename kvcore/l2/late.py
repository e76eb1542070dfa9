"""`LateAdapter`: a store that is not there yet, so that a server can start without it and use it when it comes.

Theory of operation
-------------------
    AWAY --opening succeeds--> THERE         tried at once, then again every `retry_ns`, on the loop's timer

0. Opening is two steps: `prepare` blocks and runs in the executor, so a store that does not answer never stops the
   loop; `build` makes the adapter on the loop from what `prepare` returned. One attempt at a time: an attempt that
   hangs is not followed by another one.
1. While the store is away every task is refused with an exception, which the pump turns into "nothing was found,
   nothing was stored" at once: no lookup waits for a store that does not answer.
2. When it has come, calls go straight through; the inner notices are passed on to the three that the cache has
   subscribed to before.
3. Lock strength is NONE for good: the cache reads it once, when nobody knows yet what the store will promise.

Losing a store later is not this module's business: adapters answer that with misses by themselves.

Who holds: this object the inner adapter, once there is one, and the timer until then. Who announces: the inner
adapter's notices, through ours. Who frees: `close` ends both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvcore.errors import KvcoreError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Adapter, L2Usage, LockKind, LockStrength, StoreAnswer, TaskId
from kvcore.l2.guards import GuardStatistics, guard_statistics
from kvcore.l2.statistics import L2Statistics
from kvcore.l2.wrapped import CountingAdapter
from kvcore.l2.wrapped_backend import AnyBackend
from kvcore.ports import Executor, Notice, Outcome

_NS_PER_S = 1_000_000_000
_log = logging.getLogger("kvcore.l2")


class LateAdapter:
    """See the module text. `shown` is the store's name without secrets; the executor is the caller's."""

    def __init__(
        self,
        name: str,
        shown: str,
        executor: Executor,
        prepare: Callable[[], AnyBackend],
        build: Callable[[AnyBackend], CountingAdapter],
        notice_factory: Callable[[], Notice],
        *,
        retry_ns: int = 2 * _NS_PER_S,
    ) -> None:
        self.name = name
        self.lock_strength = LockStrength(LockKind.NONE)
        self.store_notice = notice_factory()
        self.lookup_notice = notice_factory()
        self.load_notice = notice_factory()
        self.attempts = 0
        self._shown = shown
        self._executor = executor
        self._prepare = prepare
        self._build = build
        self._retry_s = retry_ns / _NS_PER_S
        self._inner: CountingAdapter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._tried = asyncio.Event()
        self._try()

    async def first_attempt(self) -> None:
        """Return when the first attempt to open the store has ended, well or not. Give it a limit."""
        await self._tried.wait()

    @property
    def work_inflight(self) -> int:
        return self._inner.work_inflight if self._inner is not None else 0

    @property
    def there(self) -> bool:
        return self._inner is not None

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        return self._present().submit_store(keys, buffers)

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        return self._inner.pop_completed_stores() if self._inner is not None else {}

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        return self._present().submit_lookup_and_lock(keys)

    def take_lookup(self, task: TaskId) -> int | None:
        return self._present().take_lookup(task)

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        return self._present().submit_load(keys, buffers)

    def take_load(self, task: TaskId) -> int | None:
        return self._present().take_load(task)

    def submit_unlock(self, keys: Sequence[ObjectKey]) -> None:
        self._present().submit_unlock(keys)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        if self._inner is not None:
            self._inner.delete(keys)

    def usage(self) -> L2Usage:
        return self._inner.usage() if self._inner is not None else L2Usage(0, None, 0, 0)

    def keys(self) -> list[ObjectKey]:
        return self._inner.keys() if self._inner is not None else []

    def statistics(self) -> L2Statistics | None:
        """The store's own; None while it is away."""
        return self._inner.statistics() if self._inner is not None else None

    def guards(self) -> GuardStatistics | None:
        """What stands around it has seen; None while it is away."""
        return guard_statistics(self._inner) if self._inner is not None else None

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._inner is not None:
            self._inner.close()
        for notice in (self.store_notice, self.lookup_notice, self.load_notice):
            notice.close()

    def _present(self) -> L2Adapter:
        if self._inner is None:
            raise StoreError(f"{self._shown} has not answered yet; it is tried every {self._retry_s:g} s")
        return self._inner

    def _try(self) -> None:
        self._timer = None
        if self._closed:
            return
        self.attempts += 1
        self._executor.submit(self._prepare, self._prepared)

    def _prepared(self, outcome: Outcome[AnyBackend]) -> None:
        if self._closed:
            if outcome.value is not None:
                outcome.value.close()
            return
        try:
            if outcome.error is not None:
                raise outcome.error
            assert outcome.value is not None
            self._take(self._build(outcome.value))
        except (KvcoreError, OSError) as error:
            self._wait(error)
        finally:
            self._tried.set()

    def _take(self, inner: CountingAdapter) -> None:
        self._inner = inner
        if self.attempts > 1:
            _log.info("%s is there now, at attempt %d", self._shown, self.attempts)
        inner.store_notice.subscribe(self.store_notice.signal)
        inner.lookup_notice.subscribe(self.lookup_notice.signal)
        inner.load_notice.subscribe(self.load_notice.signal)

    def _wait(self, error: Exception) -> None:
        if self.attempts == 1:
            _log.warning("%s does not answer (%s); going on without it, tried again every %g s",
                         self._shown, error, self._retry_s)  # fmt: skip
        self._timer = asyncio.get_running_loop().call_later(self._retry_s, self._try)

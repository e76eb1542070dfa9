"""A channel: a labelled queue of deliveries that keeps its order while its timing is free.

asyncio promises first in, first out for `call_soon`; the simulated loop breaks that on purpose. Whatever promises
order in reality (one connection, one device stream, one notice, the posts of one thread) therefore goes through a
channel of its own. Only the *first* delivery of a channel is ever ready or has a timer; it ties with everything else
like any other entry, and when it has been taken the next one follows:

    1.  `post` appends. Its time is never before that of the post in front of it.
    2.  If it is alone, it is armed: ready at once when its time has come, else by a timer of the loop.
    3.  When the loop takes the armed delivery (to run it, or to drop it because it was cancelled or its process is
        dead), the next one is armed.

The delivery runs in the context given, or in a copy of the poster's: a message must be posted in the *receiver's*
context to die with the receiver and not with the sender.

A channel is held by the port that made it; nobody frees it.

`FutureOrder` does the same for the callbacks of one future, without times.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any

from kvcore.sim.tasks import SimHandle

if TYPE_CHECKING:
    from kvcore.sim.loop import SimLoop


class Channel:
    """First in, first out, with delivery times. Made by `SimLoop.channel`."""

    __slots__ = ("_last_ns", "_loop", "_queue", "label")

    def __init__(self, loop: SimLoop, label: str) -> None:
        self._loop = loop
        self.label = label
        self._queue: deque[SimHandle] = deque()
        self._last_ns = 0

    def __len__(self) -> int:
        """Deliveries that have not been taken yet."""
        return len(self._queue)

    def post(
        self, callback: Callable[..., object], *args: Any, delay_ns: int = 0, context: Context | None = None
    ) -> SimHandle:
        """Deliver after `delay_ns`, and after everything that was posted before."""
        return self.post_at(self._loop.now_ns() + delay_ns, callback, *args, context=context)

    def post_at(
        self, when_ns: int, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> SimHandle:
        """Deliver at `when_ns`, or later if the post in front of it is later."""
        self._last_ns = max(self._last_ns, when_ns, self._loop.now_ns())
        handle = self._loop.make_handle(callback, args, context, self._last_ns)
        handle.fifo = self
        self._queue.append(handle)
        if len(self._queue) == 1:
            self._loop.timers.arm(handle)
        return handle

    def taken(self, handle: SimHandle) -> None:
        first = self._queue.popleft()
        assert first is handle
        if self._queue:
            self._loop.timers.arm(self._queue[0])


class FutureOrder:
    """Keeps the callbacks of one future in order: only the first of them is ready at a time."""

    __slots__ = ("_push", "_tails")

    def __init__(self, push: Callable[[SimHandle], None]) -> None:
        self._push = push
        self._tails: dict[int, SimHandle] = {}  # by id of the future, which its entries keep alive

    def add(self, handle: SimHandle, future: asyncio.Future[Any]) -> None:
        handle.fifo = self
        handle.future = future
        handle.following = None
        tail = self._tails.get(id(future))
        self._tails[id(future)] = handle
        if tail is None:
            self._push(handle)
        else:
            tail.following = handle

    def taken(self, handle: SimHandle) -> None:
        following = handle.following
        if following is None:
            del self._tails[id(handle.future)]
        else:
            self._push(following)

    def clear(self) -> None:
        self._tails.clear()

"""`EventfdNotice`: wake the loop from any thread, at most once per drain.

Theory of operation
-------------------
A notice is one bit, "something is ready", kept twice: as a Python flag and as the readiness of a descriptor that the
loop watches. `signal` sets both unless the flag is set already, so that a thousand signals cost one system call.
When the loop finds the descriptor readable it

1. clears the descriptor, then the flag, under the lock;
2. calls the subscriber, outside the lock.

Clearing *before* the call closes the lost-wakeup window: whoever adds a result after the subscriber has drained finds
the flag clear and signals again. The price is an occasional call that finds nothing to drain, which subscribers accept.
The descriptor is watched from `subscribe` on; an earlier signal keeps it readable, which delivers it then.

The lock also covers `close`: a thread that signals while the loop closes must never write to a descriptor number
that somebody else has got in the meantime.

Rejected: `loop.call_soon_threadsafe` (allocates a handle per signal, wakes the loop through a socket each time, and
raises after the loop has closed); one descriptor per result (they are many).

Who holds, announces, frees: the descriptor belongs to the notice; the loop announces readiness; `close` removes
it from the loop and closes it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Protocol

from kvcore.errors import CallerError


class _Wakeup(Protocol):
    """A descriptor that is readable from `set` to `clear`."""

    read_fd: int

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class _EventfdWakeup:
    def __init__(self) -> None:
        self.read_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.read_fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self.read_fd)

    def close(self) -> None:
        os.close(self.read_fd)


class _PipeWakeup:
    """For systems without eventfd. Holds at most one byte, so that it can never be full."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)

    def set(self) -> None:
        os.write(self._write_fd, b"\0")

    def clear(self) -> None:
        os.read(self.read_fd, 1)

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self._write_fd)


class EventfdNotice:
    """`kvcore.ports.Notice` for an asyncio (or uvloop) loop. `signal` from any thread, the rest on the loop thread.

    Subscribing again replaces the subscriber. Closing twice is harmless; signalling or subscribing after `close` is
    the caller's mistake (`CallerError`).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, use_pipe: bool = not hasattr(os, "eventfd")) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._wakeup: _Wakeup = _PipeWakeup() if use_pipe else _EventfdWakeup()
        self._signalled = False
        self._closed = False
        self._callback: Callable[[], None] | None = None

    def signal(self) -> None:
        with self._lock:
            if self._closed:
                raise CallerError("signal on a closed notice")
            if not self._signalled:
                self._signalled = True
                self._wakeup.set()

    def subscribe(self, callback: Callable[[], None]) -> None:
        if self._closed:
            raise CallerError("subscribe on a closed notice")
        self._callback = callback
        # Also on a second subscription: the handle takes the new subscriber's context.
        self._loop.add_reader(self._wakeup.read_fd, self._deliver)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._callback is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._wakeup.read_fd)
            self._wakeup.close()
        self._callback = None

    def _deliver(self) -> None:
        with self._lock:
            if self._closed or not self._signalled:  # closed by a callback that ran before us in this turn
                return
            self._wakeup.clear()
            self._signalled = False
        assert self._callback is not None
        self._callback()

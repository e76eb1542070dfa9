"""A cheap guard for objects that live on one thread.

The shell is written for one loop thread and holds no locks. A call from another thread would mostly work and corrupt
state once a month; this turns it into an `AssertionError` at the first call. One `get_ident` and one comparison (about
60 ns), so it stays on in production, also under `python -O`, which takes `assert` statements out.
"""

from __future__ import annotations

import threading


class LoopConfined:
    """Bound to the thread of the first `check` (objects may be built before the loop's thread starts).

    Held by the object it guards; nothing to free.
    """

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = 0  # no thread has the identity 0

    def check(self) -> None:
        if threading.get_ident() != self._thread:
            self._bind()

    def _bind(self) -> None:
        if self._thread != 0:
            raise AssertionError(
                f"used from thread {threading.get_ident()}, but confined to thread {self._thread}: "
                "hand the call over with loop.call_soon_threadsafe"
            )
        self._thread = threading.get_ident()

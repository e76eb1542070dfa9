"""The simulated notice: one bit and a channel.

`signal` sets the bit and, if somebody has subscribed, posts one delivery; the delivery clears the bit before it calls
the subscriber, exactly as the event descriptor does. When the delivery runs among everything else that is ready is
the seed's choice. The delivery belongs to the subscriber: it runs in the subscriber's context and dies with it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.errors import CallerError
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.owner import Owner


class SimNotice:
    """`kvcore.ports.Notice` in virtual time."""

    def __init__(self, loop: SimLoop, label: str = "notice") -> None:
        self._maker = Owner()
        self._channel = loop.channel(label)
        self._callback: Callable[[], None] | None = None
        self._subscriber = self._maker
        self._signalled = False
        self._posted = False
        self._closed = False

    def signal(self) -> None:
        self._check_open("signal")
        self._signalled = True
        self._post()

    def subscribe(self, callback: Callable[[], None]) -> None:
        self._check_open("subscribe")
        self._callback, self._subscriber = callback, Owner()
        self._post()

    def close(self) -> None:
        self._closed = True
        self._callback = None

    def _check_open(self, call: str) -> None:
        self._maker.check()
        if self._closed:
            raise CallerError(f"{call} on a closed notice")

    def _post(self) -> None:
        if self._signalled and self._callback is not None and not self._posted:
            self._posted = True
            self._channel.post(self._deliver, context=self._maker.context())

    def _deliver(self) -> None:
        self._posted = False
        if self._callback is None:
            return
        assert self._signalled
        self._signalled = False
        if self._subscriber.alive:
            self._subscriber.call(self._callback)

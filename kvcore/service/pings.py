"""A worker's signs of life to its servers. Shell: confined to the loop's thread.

A server reaps a worker that has something open there and is not heard of for `worker_silence_ns` (which the server
names in its limits). Every message is a sign of life; where a copy takes long there is none, so `Pings` sends PING
several times per silence for as long as something is open at that server, and then stops by itself: at rest no timer is
left.

A PING that is answered with UNKNOWN_WORKER says that the worker was reaped: it registers again.

Who holds: this object its timers. Who announces: `open_at` says whether there is still something to hold. Who frees:
the timer that finds nothing open, or `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kvcore.service import protocol as wire
from kvcore.service.connection import Connection
from kvcore.service.protocol import Error, ErrorCode, Reply

PINGS_PER_SILENCE = 4
"""Three may be lost."""

_NS_PER_S = 1_000_000_000


class Pings:
    """See the module text. `open_at(server)`: the worker has, or is asking for, something there."""

    def __init__(
        self,
        connections: Sequence[Connection],
        worker: str,
        open_at: Callable[[int], bool],
        reaped: Callable[[Connection], None],
    ) -> None:
        self._connections = connections
        self._worker = worker
        self._open_at = open_at
        self._reaped = reaped
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self.sent = 0
        for server, connection in enumerate(connections):
            connection.on_ready(partial(self._met, server))

    def need(self, server: int) -> None:
        """Something is being opened at this server."""
        if server not in self._timers:
            self._set(server)

    def _met(self, server: int, connection: Connection) -> None:
        """A new life of the server: only now its silence is known."""
        timer = self._timers.pop(server, None)
        if timer is not None:
            timer.cancel()
            self._set(server)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _set(self, server: int) -> None:
        period_ns = self._period_ns(server)
        self._timers[server] = asyncio.get_running_loop().call_later(period_ns / _NS_PER_S, self._due, server)

    def _period_ns(self, server: int) -> int:
        return max(1, self._connections[server].limits.worker_silence_ns // PINGS_PER_SILENCE)

    def _due(self, server: int) -> None:
        del self._timers[server]
        if not self._open_at(server):
            return
        self.sent += 1
        connection = self._connections[server]
        connection.request(wire.Ping(self._worker), partial(self._answered, connection), self._period_ns(server))
        self._set(server)

    def _answered(self, connection: Connection, reply: Reply) -> None:
        if isinstance(reply, Error) and reply.code is ErrorCode.UNKNOWN_WORKER:
            self._reaped(connection)

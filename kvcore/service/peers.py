"""At most once: which requests of which connection a server has seen. Pure.

A `Connection` numbers its requests upwards. The table keeps, per connection number, the highest id that was executed;
a request with that id or a lower one is a duplicate (a retry of the transport, or a copy that a network delivered
twice) and is not executed again. So nothing behind this table has to be idempotent by itself, and a STORE that arrives
twice does not reserve twice.

The table is bounded: the connection that was silent longest is forgotten first. Its next request is answered with
"hello required", which its client repairs by itself; a duplicate of a forgotten connection gets the same answer and is
not executed either. Held by the server; nothing to announce; freed with it.
"""

from __future__ import annotations

from kvcore.errors import CallerError


class ConnectionTable:
    """Last executed request id per connection number, least recently heard first."""

    __slots__ = ("_connections_max", "_last_id")

    def __init__(self, connections_max: int) -> None:
        if connections_max < 1:
            raise CallerError(f"a server needs room for at least one connection, not {connections_max}")
        self._connections_max = connections_max
        self._last_id: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._last_id)

    def greet(self, connection: int, request_id: int) -> None:
        """A handshake succeeded. A repeated or late one never moves the count back."""
        last_id = self._last_id.pop(connection, 0)
        self._last_id[connection] = max(last_id, request_id)
        while len(self._last_id) > self._connections_max:
            del self._last_id[next(iter(self._last_id))]
        assert connection in self._last_id

    def known(self, connection: int) -> bool:
        return connection in self._last_id

    def admit(self, connection: int, request_id: int) -> bool:
        """True: new, and counted as executed from now on. False: a duplicate. Only for known connections."""
        last_id = self._last_id.pop(connection)
        self._last_id[connection] = max(last_id, request_id)  # now the one heard last
        return request_id > last_id

"""An in-memory connection between clients and a server on one loop.

Theory of operation
-------------------
The in-process cache speaks the same messages as the separate server, through this transport: one data path, one proof.
A server object makes its clients with `connect`. Each connection has two mailboxes, one per direction. A mailbox is a
deque and at most one pending drain:

1. `send` appends to the receiver's mailbox and returns. Nothing is handled inside the call.
2. If a callback is set and no drain is pending, one drain is scheduled with `call_soon`.
3. The drain hands over, first in, first out, what the mailbox held when the drain began; a callback that raises is
   reported to the loop's exception handler and does not stop the others.

Order inside a connection is therefore the deque's, whatever order the loop gives its handles. Messages that come
before `receive` was called wait for it. A full mailbox refuses (`send` answers False), like a socket's.

Rejected: one `call_soon` per message, because order among handles is the loop's business and the simulation shuffles
it; calling the handler from `send`, because a reply would re-enter the sender in the middle of its own step.

Who holds, announces, frees: a message belongs to the mailbox of its receiver until it is handed over. `close` of either
end drops what is in flight and makes the other end's `send` answer False.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable

from kvcore.errors import CallerError
from kvcore.service.limits import MESSAGE_BYTES_MAX, QUEUE_MESSAGES_MAX, check_message


class _Mailbox:
    """One direction of one connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, messages_max: int) -> None:
        self._loop = loop
        self._messages_max = messages_max
        self._messages: deque[bytes] = deque()
        self._callback: Callable[[bytes], None] | None = None
        self._context: contextvars.Context | None = None
        self._drain_pending = False

    def put(self, payload: bytes) -> bool:
        if len(self._messages) >= self._messages_max:
            return False
        self._messages.append(payload)
        self._schedule()
        return True

    def deliver_to(self, callback: Callable[[bytes], None]) -> None:
        """The callback runs in the context of this call, not in that of some sender."""
        self._callback = callback
        self._context = contextvars.copy_context()
        self._schedule()

    def shut(self) -> None:
        self._messages.clear()
        self._callback = None

    def _schedule(self) -> None:
        if self._messages and self._callback is not None and not self._drain_pending:
            self._drain_pending = True
            self._loop.call_soon(self._drain, context=self._context)

    def _drain(self) -> None:
        self._drain_pending = False
        for _ in range(len(self._messages)):
            if self._callback is None or not self._messages:  # closed by the callback before this one
                return
            self._hand_over(self._callback, self._messages.popleft())
        self._schedule()

    def _hand_over(self, callback: Callable[[bytes], None], payload: bytes) -> None:
        try:
            callback(payload)
        except Exception as error:
            self._loop.call_exception_handler({"message": "receive callback raised", "exception": error})
        except BaseException:
            self._schedule()
            raise


class LocalClientTransport:
    """`kvcore.ports.ClientTransport`; made by `LocalServerTransport.connect`."""

    def __init__(self, server: LocalServerTransport, identity: bytes, inbox: _Mailbox, outbox: _Mailbox) -> None:
        self._server: LocalServerTransport | None = server
        self.identity = identity
        self._inbox = inbox
        self._outbox = outbox
        self._bytes_max = server.message_bytes_max
        self._closed = False

    def send(self, payload: bytes) -> bool:
        self._check_open()
        check_message(payload, self._bytes_max)
        return self._server is not None and self._outbox.put(payload)

    def receive(self, callback: Callable[[bytes], None]) -> None:
        self._check_open()
        self._inbox.deliver_to(callback)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server._drop(self.identity)
        self._disconnected()

    def _disconnected(self) -> None:
        self._server = None
        self._inbox.shut()
        self._outbox.shut()

    def _check_open(self) -> None:
        if self._closed:
            raise CallerError("call on a closed transport")


class LocalServerTransport:
    """`kvcore.ports.ServerTransport` for any number of clients on the same loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        queue_messages_max: int = QUEUE_MESSAGES_MAX,
    ) -> None:
        self._loop = loop
        self.message_bytes_max = message_bytes_max
        self._queue_messages_max = queue_messages_max
        self._clients: dict[bytes, LocalClientTransport] = {}
        self._callback: Callable[[bytes, bytes], None] | None = None
        self._context: contextvars.Context | None = None
        self._connections = 0
        self._closed = False

    def connect(self) -> LocalClientTransport:
        self._check_open()
        self._connections += 1
        identity = self._connections.to_bytes(5, "big")
        to_client = _Mailbox(self._loop, self._queue_messages_max)
        to_server = _Mailbox(self._loop, self._queue_messages_max)
        client = LocalClientTransport(self, identity, to_client, to_server)
        self._clients[identity] = client
        self._attach(client)
        return client

    def send(self, peer: bytes, payload: bytes) -> bool:
        self._check_open()
        check_message(payload, self.message_bytes_max)
        client = self._clients.get(peer)
        return client is not None and client._inbox.put(payload)

    def receive(self, callback: Callable[[bytes, bytes], None]) -> None:
        self._check_open()
        self._callback = callback
        self._context = contextvars.copy_context()
        for client in self._clients.values():
            self._attach(client)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._callback = None
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client._disconnected()

    def _attach(self, client: LocalClientTransport) -> None:
        if self._callback is None or self._context is None:
            return
        callback, identity = self._callback, client.identity
        # The context of `receive`, copied: two mailboxes must not enter one context object at once.
        self._context.copy().run(client._outbox.deliver_to, lambda payload: callback(identity, payload))

    def _drop(self, identity: bytes) -> None:
        self._clients.pop(identity, None)

    def _check_open(self) -> None:
        if self._closed:
            raise CallerError("call on a closed transport")

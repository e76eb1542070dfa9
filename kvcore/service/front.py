"""`ServerFront`: a server that has not yet met an engine, and hands over when the first one has come.

Theory of operation
-------------------
`kvcore serve` is started before anybody knows what will be stored: layers, ranks and groups are the engine's to say.

    WAITING --a HELLO whose identity is complete and has our chunk size--> ADOPTED: everything goes to the `CacheServer`

1. While it waits, STATUS and CLEAR are answered (there is nothing), a HELLO is judged, and anything else is refused
   with "hello required", which a client repairs by itself. Bad frames are answered and counted as the server does.
2. A HELLO is adopted when its layout is one and fits its fingerprint, when its chunk size is ours, and when two chunks
   of all its rows fit into L1. Else the refusal names both sides' values, and the front goes on waiting.
3. `build` makes the server for that identity; the HELLO that caused it is then answered by the server itself. From here
   on another identity is refused by the server: one server serves one model.

Who holds: the front holds the server it has built, until `close`. Who announces: `server`, at once. Nothing is freed
here. Rejected: describing the model in the server's own configuration (written twice, it differs sooner or later).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvcore.errors import CallerError, ConfigError
from kvcore.ports import ServerTransport
from kvcore.service import protocol as wire
from kvcore.service.identity import layout_of
from kvcore.service.protocol import Error, ErrorCode, Header, Hello, Identity, Reply
from kvcore.service.server import CacheServer

Build = Callable[[Identity, int], CacheServer]
"""(identity, server index) -> the server, not yet attached. Raises `ConfigError` when it cannot serve that."""


class ServerFront:
    """See the module text. Loop-confined, like the server behind it."""

    def __init__(
        self,
        build: Build,
        *,
        chunk_tokens: int,
        l1_bytes: int,
        incarnation: int,
        offered: tuple[str, ...] = ("worker",),
    ) -> None:
        self._build = build
        self._chunk_tokens = chunk_tokens
        self._l1_bytes = l1_bytes
        self._incarnation = incarnation
        self._offered = offered  # transfers
        self._transport: ServerTransport | None = None
        self._counts: Counter[str] = Counter()
        self.server: CacheServer | None = None

    def attach(self, transport: ServerTransport) -> None:
        """Serve a transport on the running loop, until somebody is adopted, who then serves it."""
        if self._transport is not None:
            raise CallerError("this front is attached to a transport already")
        self._transport = transport
        transport.receive(self._received)

    def counters(self) -> dict[str, int]:
        """Frames seen while waiting, and the errors among them by code."""
        return dict(self._counts)

    def close(self) -> None:
        self._transport = None
        if self.server is not None:
            self.server.close()

    def handle(self, peer: bytes, payload: bytes) -> bytes:
        """Answer one frame. Never raises."""
        if self.server is None:
            header = wire.read_header(payload)
            reply = self._answer(header, payload)
            if reply is not None:
                return self._packed(header, reply)
        assert self.server is not None
        return self.server.handle(peer, payload)

    def _received(self, peer: bytes, payload: bytes) -> None:
        reply = self.handle(peer, payload)
        if self._transport is not None:
            self._transport.send(peer, reply)
            if self.server is not None:
                transport, self._transport = self._transport, None
                self.server.attach(transport)

    def _packed(self, header: Header | None, reply: Reply) -> bytes:
        self._counts["requests"] += 1
        if isinstance(reply, Error):
            self._counts[f"errors_{reply.code.value}"] += 1
        request_id, connection = (header.request_id, header.connection) if header is not None else (0, 0)
        return wire.pack(Header(wire.PROTOCOL_VERSION, request_id, connection, self._incarnation), reply)

    def _answer(self, header: Header | None, payload: bytes) -> Reply | None:
        """None: somebody was adopted, who answers."""
        if header is None:
            return Error(ErrorCode.MALFORMED, "this is not a kvcore frame")
        if header.version != wire.PROTOCOL_VERSION:
            text = f"protocol version: the server speaks {wire.PROTOCOL_VERSION}, the client {header.version}"
            return Error(ErrorCode.VERSION, text)
        try:
            request = wire.read_request(payload)
        except wire.UndecodableError as error:
            return Error(error.code, error.text)
        if isinstance(request, wire.Status):
            return wire.StatusReply({"waiting_for_engine": 1, **self._counts})
        if isinstance(request, wire.Clear):
            return wire.Cleared(0)
        if isinstance(request, Hello):
            return self._judge(request)
        return Error(ErrorCode.HELLO_REQUIRED, "no engine has shaken hands with this server yet")

    def _judge(self, hello: Hello) -> Error | None:
        identity = hello.identity
        if identity.chunk_tokens != self._chunk_tokens:
            return Error(
                ErrorCode.MISMATCH,
                f"chunk_tokens: the server has {self._chunk_tokens}, the client has {identity.chunk_tokens}",
            )
        if hello.transfer not in self._offered:
            text = f"the server offers {' and '.join(self._offered)}, the client wants {hello.transfer}"
            return Error(ErrorCode.MISMATCH, f"transfer: {text}")
        try:
            self._check_room(identity)
            self.server = self._build(identity, hello.server_index)
        except CallerError as error:
            return Error(ErrorCode.MISMATCH, str(error))
        return None

    def _check_room(self, identity: Identity) -> None:
        layout = layout_of(identity)
        needed = 2 * sum(layout.cell_bytes_rows)
        if needed > self._l1_bytes:
            raise ConfigError(
                f"two chunks of this model need {needed} bytes of L1, the server has {self._l1_bytes}; give it more"
            )

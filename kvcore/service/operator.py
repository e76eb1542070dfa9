"""The operator's side of a server: one question over its socket, one answer, for `kvcore ping`, `status` and `clear`.

A question needs no handshake and names no model. It waits for its answer for a bounded time and says which of the two
happened: nobody listens there, or somebody does and does not answer.
"""

from __future__ import annotations

import asyncio

from kvcore.errors import PeerError
from kvcore.runtime.clock import SystemClock
from kvcore.service import protocol as wire
from kvcore.service.curve import CurveClient
from kvcore.service.protocol import PROTOCOL_VERSION, Error, Header, Reply
from kvcore.service.zmq_transport import ZmqClientTransport


async def ask(
    address: str, request: wire.Status | wire.Clear, *, timeout_s: float, curve: CurveClient | None = None
) -> Reply:
    """The server's reply. Raises `PeerError` when there is none, or an error."""
    loop = asyncio.get_running_loop()
    connection = 1 + (int(SystemClock().token(8), 16) >> 2)
    answer: asyncio.Future[Reply] = loop.create_future()

    def received(payload: bytes) -> None:
        header = wire.read_header(payload)
        if header is not None and (header.request_id, header.connection) == (1, connection) and not answer.done():
            answer.set_result(wire.read_reply(payload))

    transport = ZmqClientTransport(loop, address, curve=curve)
    try:
        transport.receive(received)
        transport.send(wire.pack(Header(PROTOCOL_VERSION, 1, connection, 0), request))
        async with asyncio.timeout(timeout_s):
            reply = await answer
    except TimeoutError:
        raise PeerError(f"no answer from {address} in {timeout_s:g} s; is `kvcore serve` running there?") from None
    finally:
        transport.close()
    if isinstance(reply, Error):
        raise PeerError(f"{address} answered {reply.code.value}: {reply.message}")
    return reply

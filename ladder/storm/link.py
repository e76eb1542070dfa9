"""`Link`: the road between an engine and one server, on which bytes can be slow, stuck, lost or cut off.

Theory of operation
-------------------
A link listens where the engine believes its server to be, and connects to the server once per client that comes: bytes
go through unchanged, in both directions, so ZeroMQ's protocol runs over it as over any socket. It forwards one read at
a time and lets the tap hear what has been forwarded. Between reading and forwarding a fault may act:

    slow       small pieces, each delayed                stall    nothing moves, then everything does
    truncate   half of a piece arrives, then the end      half     one direction is swallowed; a cut ends it
    cut        all connections end at once                refuse   new connections end at once

A stream that has lost bytes is never continued: whoever swallows or truncates cuts afterwards, as a broken network
does. A server that is not there is an ended connection; the client comes again by itself.

Who holds: the link its listening socket, and per passage two sockets and two tasks. Who frees: the end of either side
ends the other; `close` ends all and waits until they have ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from kvcore.ladder.storm.tap import FrameReader, Tap

_READ_BYTES = 1 << 16
UP, DOWN = "up", "down"
"""Directions: to the server, to the client."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Passage:
    """One client's connection and ours to the server."""

    def __init__(self, client: Streams, server: Streams) -> None:
        self.client = client
        self.server = server

    def abort(self) -> None:
        """Now, without delivering what is buffered."""
        for _, writer in (self.client, self.server):
            writer.transport.abort()

    async def gone(self) -> None:
        for _, writer in (self.client, self.server):
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class Link:
    """See the module text. Addresses as ZeroMQ writes them: ipc:///path or tcp://127.0.0.1:port (0: any)."""

    def __init__(self, listen: str, server: str, tap: Tap) -> None:
        self.address = listen
        self.tap = tap
        self.counts: Counter[str] = Counter()
        self.errors: list[Exception] = []  # our own bugs
        self.piece_bytes = 0  # 0: whole reads
        self.delay_s = 0.0  # before each piece
        self.swallowed = ""  # a direction
        self.refusing = False
        self._truncated: asyncio.Event | None = None  # somebody waits for a message to be truncated
        self._server = server
        self._listener: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._passages: set[Passage] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen. `address` is then where."""
        parts = urlsplit(self.address)
        if parts.scheme == "ipc":
            self._listener = await asyncio.start_unix_server(self._accept, parts.path)
            return
        self._listener = await asyncio.start_server(self._accept, parts.hostname, parts.port or 0)
        self.address = f"tcp://{parts.hostname}:{self._listener.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self.heal()
        self.cut()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._listener is not None:
            await self._listener.wait_closed()

    # -- faults

    def cut(self) -> int:
        """End all connections; how many there were."""
        for passage in self._passages:
            passage.abort()
        return len(self._passages)

    async def truncate(self, patience_s: float) -> bool:
        """Cut one connection in the middle of the next piece of data. False: nothing was sent in time."""
        truncated = self._truncated = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await truncated.wait()
        self._truncated = None
        return truncated.is_set()

    def stall(self) -> None:
        self._flowing.clear()

    def heal(self) -> None:
        """From now on bytes go through as they come. What has lost bytes must be cut by whoever made it lose them."""
        self.piece_bytes, self.delay_s = 0, 0.0
        self.swallowed, self.refusing = "", False
        self._flowing.set()

    @property
    def passages(self) -> int:
        return len(self._passages)

    # -- forwarding

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        server = None if self.refusing else await self._connect()
        self.counts["refused"] += self.refusing
        if server is None:
            writer.transport.abort()
            return
        self.counts["accepted"] += 1
        await self._carry(Passage((reader, writer), server))

    async def _connect(self) -> Streams | None:
        """None: the server is not there."""
        parts = urlsplit(self._server)
        with suppress(OSError):
            return await asyncio.open_unix_connection(parts.path)
        return None

    async def _carry(self, passage: Passage) -> None:
        """Both ways, until one side has ended; what that side had sent before is delivered."""
        self._passages.add(passage)
        up = self._pump(passage.client[0], passage.server[1], UP, self.tap.request)
        down = self._pump(passage.server[0], passage.client[1], DOWN, self.tap.reply)
        pumps = [asyncio.ensure_future(up), asyncio.ensure_future(down)]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            ends = await asyncio.gather(*pumps, return_exceptions=True)
            self.errors += [end for end in ends if isinstance(end, Exception)]
            self._passages.discard(passage)
            await passage.gone()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: str,
        hear: Callable[[bytes], None],
    ) -> None:
        frames = FrameReader()
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                self.counts["bytes"] += len(data)
                if self.swallowed == direction:
                    self.counts["bytes_swallowed"] += len(data)
                    continue
                if self._truncated is not None and len(data) > 1:
                    self._truncated.set()
                    writer.write(data[: len(data) // 2])
                    return  # which ends the passage
                await self._forward(writer, data)
                for message in frames.feed(data):
                    hear(message)

    async def _forward(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        await self._flowing.wait()
        if not self.delay_s:
            writer.write(data)
            await writer.drain()
            return
        size = self.piece_bytes or len(data)
        for start in range(0, len(data), size):
            await asyncio.sleep(self.delay_s)
            writer.write(data[start : start + size])
            await writer.drain()
            self.counts["pieces_delayed"] += 1

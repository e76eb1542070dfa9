"""The road between an engine and a server: ZeroMQ runs over it unchanged, and every fault does what it says."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvcore.ladder.storm.link import DOWN, UP, Link
from kvcore.ladder.storm.tap import Tap
from kvcore.service.zmq_transport import ZmqClientTransport, ZmqServerTransport

PATIENCE_S = 60.0


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvl-") as path:
        yield Path(path)


class Echo:
    """A client, a link and a server that answers everything with itself."""

    def __init__(self, link: Link, client: ZmqClientTransport, asked: list[bytes]) -> None:
        self.link = link
        self.asked = asked
        self._client = client
        self._rounds = 0
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        client.receive(self._answers.put_nowait)

    def send(self, payload: bytes) -> bool:
        return self._client.send(payload)

    async def answer(self) -> bytes:
        return await self._answers.get()

    async def works(self) -> None:
        """Return when a message has made it there and back; the connection may still be on its way.

        The last one that was sent: those before it have been answered by then, or are lost, and none comes later.
        """
        answer, payload = b"", b"none yet"
        while answer != payload:
            self._rounds += 1
            payload = b"round %d" % self._rounds
            self.send(payload)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    while answer != payload:
                        answer = await self._answers.get()


@asynccontextmanager
async def echo(directory: Path, listen: str) -> AsyncIterator[Echo]:
    loop, asked = asyncio.get_running_loop(), []
    server = ZmqServerTransport(loop, f"ipc://{directory}/server.sock")

    def received(peer: bytes, payload: bytes) -> None:
        asked.append(payload)
        server.send(peer, payload)

    server.receive(received)
    link = Link(listen, server.address, Tap())
    await link.open()
    client = ZmqClientTransport(loop, link.address)
    try:
        yield Echo(link, client, asked)
    finally:
        client.close()
        server.close()
        await link.close()


def run(directory: Path, body: Callable[[Echo], Awaitable[None]], listen: str = "") -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), echo(directory, listen or f"ipc://{directory}/via.sock") as this:
            await body(this)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("listen", ["ipc", "tcp://127.0.0.1:0"])
def test_messages_of_any_size_go_through_unchanged(directory: Path, listen: str) -> None:
    messages = [b"", b"x", os.urandom(255), os.urandom(256), os.urandom(300_000)]

    async def body(this: Echo) -> None:
        for message in messages:
            this.send(message)
        assert [await this.answer() for _ in messages] == messages
        assert this.link.tap.counts["unreadable"] == 2 * len(messages)
        assert not this.link.errors

    run(directory, body, "" if listen == "ipc" else listen)


def test_slow_is_late_and_whole(directory: Path) -> None:
    message = os.urandom(5000)

    async def body(this: Echo) -> None:
        this.link.piece_bytes, this.link.delay_s = 100, 0.0001
        this.send(message)
        assert await this.answer() == message
        assert this.link.counts["pieces_delayed"] > 50

    run(directory, body)


def test_what_is_stalled_arrives_when_the_stall_ends(directory: Path) -> None:
    async def body(this: Echo) -> None:
        await this.works()
        this.link.stall()
        before = len(this.asked)
        this.send(b"late")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(this.answer(), 0.1)
        assert len(this.asked) == before
        this.link.heal()
        while b"late" not in this.asked:
            await this.answer()

    run(directory, body)


@pytest.mark.parametrize("direction", [UP, DOWN])
def test_what_is_swallowed_never_arrives_and_a_cut_repairs_it(directory: Path, direction: str) -> None:
    async def body(this: Echo) -> None:
        await this.works()
        this.link.swallowed = direction
        this.send(b"lost")
        while not this.link.counts["bytes_swallowed"]:
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(this.answer(), 0.1)
        assert (b"lost" in this.asked) == (direction == DOWN)
        this.link.heal()
        assert this.link.cut() == 1
        await this.works()
        assert this.link.counts["accepted"] == 2

    run(directory, body)


def test_a_truncated_message_is_not_delivered_and_ends_its_connection(directory: Path) -> None:
    async def body(this: Echo) -> None:
        await this.works()
        truncated = asyncio.ensure_future(this.link.truncate(PATIENCE_S))
        await asyncio.sleep(0)
        this.send(b"y" * 1000)
        assert await truncated
        await this.works()
        assert b"y" * 1000 not in this.asked
        assert this.link.counts["accepted"] == 2

    run(directory, body)


def test_a_truncation_without_a_message_says_that_it_has_not_happened(directory: Path) -> None:
    async def body(this: Echo) -> None:
        await this.works()
        assert not await this.link.truncate(0.01)
        await this.works()
        assert this.link.counts["accepted"] == 1

    run(directory, body)


def test_a_refusing_link_is_one_that_is_tried_again(directory: Path) -> None:
    async def body(this: Echo) -> None:
        await this.works()
        this.link.refusing = True
        this.link.cut()
        while this.link.counts["refused"] < 2:
            await asyncio.sleep(0)
        assert this.link.passages == 0
        this.link.heal()
        await this.works()

    run(directory, body)


def test_a_server_that_is_not_there_costs_the_client_a_connection_and_nothing_else(directory: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        link = Link(f"ipc://{directory}/via.sock", f"ipc://{directory}/nobody.sock", Tap())
        await link.open()
        gc.collect()  # what an earlier test has left open
        before = len(os.listdir("/proc/self/fd"))
        reader, writer = await asyncio.open_unix_connection(f"{directory}/via.sock")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert len(os.listdir("/proc/self/fd")) <= before
        await link.close()
        assert loop.is_running()

    asyncio.run(main())

"""What the ZeroMQ transport promises beyond the port: addresses, hostile peers, files, and an end in bounded time."""

from __future__ import annotations

import asyncio
import select
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from kvcore.errors import ConfigError
from kvcore.service.zmq_transport import ZmqClientTransport, ZmqServerTransport


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory() as path:  # short: the path of a socket is at most 107 bytes
        yield Path(path)


def run(scenario):
    async def bounded():
        async with asyncio.timeout(60):  # only what hangs takes so long
            await scenario()

    asyncio.run(bounded())


class Stranger:
    """A peer that speaks ZeroMQ but not our protocol."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def close(self):
        self.socket.close(0)
        self.context.term()


async def ask(client, payload):
    reply = asyncio.get_running_loop().create_future()
    client.receive(lambda answer: reply.done() or reply.set_result(answer))
    assert client.send(payload)
    return await reply


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:5555",
        "tcp://*:5555",
        "tcp://example.org:1",
        "tcp://[::]:1",
        "ipc://relative",
        "ipc://@x",
        "inproc://x",
        "x",
    ],
)
def test_an_address_that_others_could_reach_is_refused(address):
    async def scenario():
        loop = asyncio.get_running_loop()
        with pytest.raises(ConfigError):
            ZmqServerTransport(loop, address)
        with pytest.raises(ConfigError):
            ZmqClientTransport(loop, address)

    run(scenario)


def test_the_socket_file_is_for_its_owner_only_and_goes_with_the_server(directory):
    async def scenario():
        server = ZmqServerTransport(asyncio.get_running_loop(), f"ipc://{directory}/s")
        assert stat.S_IMODE((directory / "s").stat().st_mode) == 0o600
        server.close()
        assert not (directory / "s").exists()

    run(scenario)


def test_a_path_that_is_served_is_not_taken_over(directory):
    async def scenario():
        loop, address = asyncio.get_running_loop(), f"ipc://{directory}/s"
        server = ZmqServerTransport(loop, address)
        server.receive(server.send)
        with pytest.raises(ConfigError, match="another server"):
            ZmqServerTransport(loop, address)
        client = ZmqClientTransport(loop, address)
        assert await ask(client, b"still there?") == b"still there?"
        client.close()
        server.close()

    run(scenario)


def test_a_socket_file_left_by_a_dead_server_is_replaced(directory):
    async def scenario():
        loop, address = asyncio.get_running_loop(), f"ipc://{directory}/s"
        (directory / "s").touch()
        server = ZmqServerTransport(loop, address)
        server.receive(server.send)
        client = ZmqClientTransport(loop, address)
        assert await ask(client, b"x") == b"x"
        client.close()
        server.close()

    run(scenario)


def test_a_port_or_directory_that_cannot_be_used_is_one_clear_error(directory):
    async def scenario():
        loop = asyncio.get_running_loop()
        server = ZmqServerTransport(loop, "tcp://127.0.0.1:*")
        with pytest.raises(ConfigError, match="cannot listen"):
            ZmqServerTransport(loop, server.address)
        with pytest.raises(ConfigError, match="cannot listen"):
            ZmqServerTransport(loop, f"ipc://{directory}/missing/s")
        server.close()

    run(scenario)


def test_frames_that_are_not_ours_arrive_as_an_empty_payload(directory):
    async def scenario():
        loop, address = asyncio.get_running_loop(), f"ipc://{directory}/s"
        server, received = ZmqServerTransport(loop, address), asyncio.Queue()
        server.receive(lambda peer, payload: received.put_nowait(payload))
        stranger = Stranger(address)
        stranger.socket.send_multipart([b"a", b"b", b"c"])
        stranger.socket.send_multipart([b"", b"an envelope of REQ"])
        stranger.socket.send(b"one frame")
        assert [await received.get() for _ in range(3)] == [b"", b"", b"one frame"]
        stranger.close()
        server.close()

    run(scenario)


def test_a_peer_that_sends_too_much_harms_only_itself(directory):
    async def scenario():
        loop, address = asyncio.get_running_loop(), f"ipc://{directory}/s"
        server, received = ZmqServerTransport(loop, address, message_bytes_max=1000), []

        def answer(peer, payload):
            received.append(payload)
            server.send(peer, payload)

        server.receive(answer)
        client, stranger = ZmqClientTransport(loop, address), Stranger(address)
        stranger.socket.send(b"x" * 1001)
        while b"over a new connection" not in received:
            with suppress(zmq.Again):  # its queue is full while it reconnects
                stranger.socket.send(b"over a new connection", zmq.DONTWAIT)  # lost while the old one is being cut
            assert await ask(client, b"others go on") == b"others go on"
        assert max(map(len, received)) <= 1000
        stranger.close()
        client.close()
        server.close()

    run(scenario)


def test_a_message_whose_signal_was_swallowed_by_a_send_is_delivered(directory):
    """ZeroMQ takes the signal off the descriptor in whatever call notices the message first."""

    async def scenario():
        loop, address = asyncio.get_running_loop(), f"ipc://{directory}/s"
        router = zmq.Context().socket(zmq.ROUTER)
        router.bind(address)
        client, received = ZmqClientTransport(loop, address), asyncio.Queue()
        client.receive(received.put_nowait)
        client.send(b"hello")
        peer, _ = await asyncio.to_thread(router.recv_multipart)
        descriptor = client._socket._fd
        router.send_multipart([peer, b"reply"])
        assert select.select([descriptor], [], [], 60)[0], "the reply never came"
        for _ in range(100_000):  # sends look at the mailbox only now and then
            client.send(b"x")
            if not select.select([descriptor], [], [], 0)[0]:
                break
        else:
            raise AssertionError("no send swallowed the signal: the test tests nothing")
        assert received.empty()
        assert await received.get() == b"reply"
        client.close()
        router.close(0)
        router.context.term()

    run(scenario)


def test_messages_before_the_first_connection_wait_in_a_bounded_backlog(directory):
    async def scenario():
        loop, address = asyncio.get_running_loop(), f"ipc://{directory}/s"
        client, received = ZmqClientTransport(loop, address, queue_messages_max=3), asyncio.Queue()
        assert [client.send(b"%d" % number) for number in range(5)] == [True, True, True, False, False]
        server = ZmqServerTransport(loop, address)
        server.receive(lambda peer, payload: received.put_nowait(payload))
        assert [await received.get() for _ in range(3)] == [b"0", b"1", b"2"]
        client.close()
        server.close()

    run(scenario)


def test_a_connect_that_nobody_answers_is_tried_anew_long_before_the_system_gives_it_up(directory):
    """S09: the connect that a moving server swallowed held every message up for the system's two minutes."""

    async def scenario():
        client = ZmqClientTransport(asyncio.get_running_loop(), f"ipc://{directory}/s")
        assert 0 < client._socket._zmq.getsockopt(zmq.CONNECT_TIMEOUT) <= 5_000
        client.close()

    run(scenario)


def test_closing_with_unsent_messages_waits_for_nobody(directory):
    async def scenario():
        loop, address = asyncio.get_running_loop(), f"ipc://{directory}/s"
        server = ZmqServerTransport(loop, address, queue_messages_max=5)
        peers = asyncio.Queue()
        server.receive(lambda peer, payload: peers.put_nowait(peer))
        deaf = Stranger(address)
        deaf.socket.send(b"hello")
        peer = await peers.get()
        while server.send(peer, b"x" * 1_000_000):
            pass
        begun_ns = time.monotonic_ns()
        server.close()
        assert time.monotonic_ns() - begun_ns < 30_000_000_000  # bounded; LINGER would wait for ever
        deaf.close()

    run(scenario)

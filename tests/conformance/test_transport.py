"""What every pair of `ClientTransport` and `ServerTransport` promises: in memory, over ZeroMQ, and simulated."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from kvcore.errors import CallerError
from kvcore.service.local import LocalServerTransport
from kvcore.service.zmq_transport import ZmqClientTransport, ZmqServerTransport
from kvcore.sim.ports.network import SimNetwork

SIMULATED = ["sim-1", "sim-2", "sim-3"]
RECONNECTING = ["zmq-ipc", "zmq-tcp", *SIMULATED]


@pytest.fixture(params=["memory", "memory-on-sim-1", "memory-on-sim-2", *RECONNECTING])
def port(request):
    return request.param


class LocalLink:
    def __init__(self, **limits):
        self.limits = limits
        self.server = None

    def listen(self):
        self.server = LocalServerTransport(asyncio.get_running_loop(), **self.limits)
        return self.server

    def connect(self):
        return self.server.connect()


class ZmqLink:
    def __init__(self, address, **limits):
        self.address = address
        self.limits = limits

    def listen(self):
        server = ZmqServerTransport(asyncio.get_running_loop(), self.address, **self.limits)
        self.address = server.address  # a port that was chosen is kept for the next life
        return server

    def connect(self):
        return ZmqClientTransport(asyncio.get_running_loop(), self.address, **self.limits)


class SimLink:
    def __init__(self, **limits):
        self.network = SimNetwork(asyncio.get_running_loop(), **limits)

    def listen(self):
        return self.network.listen("cache")

    def connect(self):
        return self.network.connect("cache")


@pytest.fixture
def new_link(port):
    """One address: `listen` opens a server there, `connect` a client to it."""
    with tempfile.TemporaryDirectory() as directory:  # short: the path of a socket is at most 107 bytes
        counter = iter(range(100))

        def make(**limits):
            if port.startswith("memory"):
                return LocalLink(**limits)
            if port.startswith("sim"):
                return SimLink(**limits)
            if port == "zmq-tcp":
                return ZmqLink("tcp://127.0.0.1:*", **limits)
            return ZmqLink(f"ipc://{Path(directory)}/{next(counter)}", **limits)

        yield make


def echo(server):
    server.receive(lambda peer, payload: server.send(peer, payload))


def test_messages_arrive_unchanged_and_replies_go_back(world, inbox, new_link):
    payloads = [b"", b"\0", bytes(range(256)), b"x" * 1_000_000]

    async def scenario():
        box, link = inbox(), new_link()
        server, client = link.listen(), link.connect()
        echo(server)
        client.receive(box.put)
        for payload in payloads:
            assert client.send(payload)
        assert await box.first(len(payloads)) == payloads
        close(client, server)

    world.run(scenario)


def test_a_connection_keeps_its_order_in_both_directions(world, inbox, new_link):
    async def scenario():
        up, down, link = inbox(), inbox(), new_link()
        server, client = link.listen(), link.connect()

        def twice(peer, payload):
            up.put(payload)
            assert server.send(peer, payload + b"a")
            assert server.send(peer, payload + b"b")

        server.receive(twice)
        client.receive(down.put)
        sent = [b"%d" % number for number in range(300)]
        for payload in sent:
            assert client.send(payload)
        assert await down.first(600) == [payload + suffix for payload in sent for suffix in (b"a", b"b")]
        assert up.items == sent
        close(client, server)

    world.run(scenario)


def test_every_client_is_a_peer_of_its_own_and_gets_its_own_replies(world, inbox, new_link):
    async def scenario():
        link, peers = new_link(), {}
        server = link.listen()

        def answer(peer, payload):
            peers.setdefault(payload[:1], set()).add(peer)
            server.send(peer, payload)

        server.receive(answer)
        clients = [link.connect() for _ in range(4)]
        boxes = [inbox() for _ in clients]
        for client, box in zip(clients, boxes, strict=True):
            client.receive(box.put)
        for number in range(50):
            for name, client in zip(b"abcd", clients, strict=True):
                assert client.send(bytes([name, number]))
        for name, box in zip(b"abcd", boxes, strict=True):
            assert await box.first(50) == [bytes([name, number]) for number in range(50)]
        assert all(len(identities) == 1 for identities in peers.values())
        assert len(set.union(*peers.values())) == 4
        close(*clients, server)

    world.run(scenario)


def test_messages_that_come_before_receive_wait_for_it(world, inbox, new_link):
    async def scenario():
        box, early, link = inbox(), inbox(), new_link()
        server, client = link.listen(), link.connect()
        for payload in (b"1", b"2", b"3"):
            assert client.send(payload)
        await round_trips(inbox, new_link, 3)

        def answer(peer, payload):
            early.put(payload)
            server.send(peer, payload)

        server.receive(answer)
        assert early.items == [], "delivered inside the call"
        assert await early.first(3) == [b"1", b"2", b"3"]
        await round_trips(inbox, new_link, 3)
        client.receive(box.put)
        assert box.items == [], "delivered inside the call"
        assert await box.first(3) == [b"1", b"2", b"3"]
        close(client, server)

    world.run(scenario)


def test_nothing_is_delivered_inside_send(world, inbox, new_link):
    async def scenario():
        box, link, sending = inbox(), new_link(), []
        server, client = link.listen(), link.connect()

        def send(transport, *message):
            sending.append(message)
            transport.send(*message)
            sending.pop()

        def on_server(peer, payload):
            assert sending == []
            send(server, peer, payload)

        def on_client(payload):
            assert sending == []
            box.put(payload)
            if len(box.items) < 50:
                send(client, b"again")

        server.receive(on_server)
        client.receive(on_client)
        send(client, b"first")
        await box.first(50)
        close(client, server)

    world.run(scenario)


def test_a_callback_that_raises_loses_no_other_message(world, inbox, new_link):
    async def scenario():
        box, link = inbox(), new_link()
        server, client = link.listen(), link.connect()
        echo(server)

        def fragile(payload):
            if payload == b"2":
                raise LookupError(payload)
            box.put(payload)

        client.receive(fragile)
        for payload in (b"1", b"2", b"3"):
            assert client.send(payload)
        assert await box.first(2) == [b"1", b"3"]
        close(client, server)

    world.run(scenario)
    (error,) = world.loop_errors
    assert isinstance(error, LookupError)
    world.loop_errors.clear()


def test_what_is_no_message_is_the_callers_mistake(world, inbox, new_link):
    async def scenario():
        box, link = inbox(), new_link(message_bytes_max=1000)
        server, client = link.listen(), link.connect()
        peers = inbox()
        server.receive(lambda peer, payload: peers.put(peer) or server.send(peer, payload))
        client.receive(box.put)
        for payload in (b"x" * 1001, bytearray(b"x"), "x"):
            with pytest.raises(CallerError):
                client.send(payload)
        assert client.send(b"x" * 1000)
        assert await box.first(1) == [b"x" * 1000]
        with pytest.raises(CallerError):
            server.send(peers.items[0], b"x" * 1001)
        close(client, server)

    world.run(scenario)


def test_sending_to_a_stranger_is_not_accepted(world, new_link):
    async def scenario():
        server = new_link().listen()
        assert server.send(b"nobody", b"x") is False
        assert server.send(b"", b"x") is False
        close(server)

    world.run(scenario)


def test_a_full_queue_refuses_and_what_was_accepted_arrives(world, inbox, new_link):
    async def scenario():
        box, link = inbox(), new_link(queue_messages_max=5)
        server, client = link.listen(), link.connect()
        assert client.send(b"hello")  # a connection first: what follows is about its queue
        accepted = [b"hello"]
        refused_in_a_row = 0
        while refused_in_a_row < 3:
            payload = b"%06d" % len(accepted) + b"." * 100_000
            if client.send(payload):
                accepted.append(payload)
                refused_in_a_row = 0
            else:
                refused_in_a_row += 1
                await round_trips(inbox, new_link, 1)
            assert len(accepted) < 1000, "the queue has no bound"
        server.receive(lambda peer, payload: box.put(payload))
        assert await box.first(len(accepted)) == accepted
        assert client.send(b"room again")
        assert (await box.first(len(accepted) + 1))[-1] == b"room again"
        close(client, server)

    world.run(scenario)


def test_nothing_is_delivered_to_a_closed_side_and_its_calls_are_the_callers_mistake(world, inbox, new_link):
    async def scenario():
        box, link = inbox(), new_link()
        server, client = link.listen(), link.connect()
        server.receive(lambda peer, payload: box.put(payload))
        client.receive(box.put)
        assert client.send(b"x")
        await box.first(1)
        client.send(b"y")
        close(server, client, server, client)
        await round_trips(inbox, new_link, 5)
        assert box.items == [b"x"]
        for call in (
            lambda: client.send(b"x"),
            lambda: client.receive(box.put),
            lambda: server.send(b"x", b"x"),
            lambda: server.receive(box.put),
        ):
            with pytest.raises(CallerError):
                call()

    world.run(scenario)


def test_a_callback_may_close_its_transport(world, inbox, new_link):
    async def scenario():
        box, link = inbox(), new_link()
        server, client = link.listen(), link.connect()
        echo(server)

        def close_at_once(payload):
            client.close()
            box.put(payload)

        client.receive(close_at_once)
        for payload in (b"1", b"2", b"3"):
            assert client.send(payload)
        await box.first(1)
        await round_trips(inbox, new_link, 5)
        assert box.items == [b"1"]
        close(server)

    world.run(scenario)


def test_a_peer_that_has_closed_is_no_longer_accepted(world, inbox, new_link):
    async def scenario():
        peers, link = inbox(), new_link()
        server, client = link.listen(), link.connect()
        server.receive(lambda peer, payload: peers.put(peer))
        assert client.send(b"x")
        (peer,) = await peers.first(1)
        client.close()
        await until(lambda: not server.send(peer, b"x"), inbox, new_link)
        close(server)

    world.run(scenario)


def test_a_server_that_has_closed_is_no_longer_sent_to(world, inbox, new_link):
    async def scenario():
        box, link = inbox(), new_link()
        server, client = link.listen(), link.connect()
        server.receive(lambda peer, payload: box.put(payload))
        assert client.send(b"x")
        await box.first(1)
        server.close()
        await until(lambda: not client.send(b"y"), inbox, new_link)
        close(client)

    world.run(scenario)


@pytest.mark.parametrize("port", RECONNECTING, indirect=True)
def test_a_client_finds_a_restarted_server_by_itself_and_is_a_new_peer(world, inbox, new_link):
    async def scenario():
        first, second, link = inbox(), inbox(), new_link()
        server, client = link.listen(), link.connect()
        server.receive(lambda peer, payload: first.put(peer))
        assert client.send(b"to the first life")
        (old_peer,) = await first.first(1)
        server.close()
        await until(lambda: not client.send(b"lost"), inbox, new_link)
        restarted = link.listen()
        restarted.receive(lambda peer, payload: second.put((peer, payload)))
        await until(lambda: client.send(b"to the second life"), inbox, new_link)
        ((new_peer, payload),) = await second.first(1)
        assert payload == b"to the second life"
        assert new_peer != old_peer
        assert restarted.send(old_peer, b"x") is False
        assert restarted.send(new_peer, b"x") is True
        close(client, restarted)

    world.run(scenario)


@pytest.mark.parametrize("port", RECONNECTING, indirect=True)
def test_a_client_may_be_there_before_its_server(world, inbox, new_link):
    async def scenario():
        box, link = inbox(), new_link()
        link.listen().close()  # fixes the address
        client = link.connect()
        await round_trips(inbox, new_link, 1)
        server = link.listen()
        server.receive(lambda peer, payload: box.put(payload))
        await until(lambda: client.send(b"x"), inbox, new_link)
        assert await box.first(1) == [b"x"]
        close(client, server)

    world.run(scenario)


def close(*transports):
    for transport in transports:
        transport.close()


async def round_trips(inbox, new_link, count):
    """Gives what must not (or will) happen elsewhere the time that `count` messages take there and back."""
    box, link = inbox(), new_link()
    server, client = link.listen(), link.connect()
    echo(server)
    client.receive(box.put)
    for number in range(count):
        assert client.send(b"x")
        await box.first(number + 1)
    close(client, server)


async def until(condition, inbox, new_link):
    """Wait for something that nobody announces. Time passes by messages; the deadline is the world's."""
    while not condition():
        await round_trips(inbox, new_link, 1)

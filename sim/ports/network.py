"""The simulated network: ordered connections with random delays, which can be cut, clogged and partitioned.

Theory of operation
-------------------
`listen` opens a server at an address, `connect` a client to that address. A connection is made by the client's first
`send` while the server is there, and lives until something cuts it:

    none --server listens, client sends--> open --cut, or either end closed or crashed--> none

Each direction of a connection is a channel: first in, first out inside, with delays drawn per message, and no order
between two connections. A message carries its connection; when it arrives after the connection was cut it is lost. A
client that connects again is a new peer to the server: its identity is never used twice in a run, as with ZeroMQ.

What can go wrong, for the faults:

* `cut(client)`: the connection breaks, what is in flight is lost. `send` answers False for the `reconnect_ns` that
  connecting again takes.
* `partition(client, to_server=, to_client=)`: what is sent in these directions vanishes; `send` still answers True, as
  it does when a cable is pulled. `heal(client)` ends it. Messages that were lost stay lost.
* `clog(client, extra_ns)`: every later message takes this much longer (0 ends it).
* `meddle(client, to_server, payload)`: answers what is delivered in place of a message: nothing, two of it, a torn one.
* `add_rule(rule)`: any number of rules, asked in the order in which they were added, each about what the one before it
  has left. A rule sees the letters that a message has become - what arrives, and after what time - and answers others:
  none (the message is lost), several, later or changed ones; or None, and `send` answers False. Rules go by client
  name, so they outlive connections and clients.

Later letters never overtake earlier ones of their direction: a connection keeps its order whatever the delays. A
network loses, delays and repeats messages and breaks connections; changing one is more than it may do, and is for
hostile peers. A message over `message_bytes_max` that a rule has made breaks the connection when it arrives, as with
ZeroMQ.

Everything is named by the client's name, which is unique among living clients. A process that crashes loses its
connections at once; a message it had sent before is lost with them or not, as the seed has it.

Rejected: one queue for the whole network (total order would hide races between servers), delivery inside `send`.

Who holds, announces, frees: a message is held by its channel until it arrives or its connection is cut; the receiver's
callback announces it, in the receiver's context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass

import xxhash

from kvcore.errors import CallerError
from kvcore.service.limits import MESSAGE_BYTES_MAX, QUEUE_MESSAGES_MAX, check_message
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.owner import Owner

Meddler = Callable[[str, bool, bytes], Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class Letter:
    """What arrives, and how long after `send`."""

    payload: bytes
    delay_ns: int


Rule = Callable[[str, bool, Sequence[Letter]], Sequence[Letter] | None]
"""(client, to_server, letters) -> what travels in their place. None: `send` answers False."""


class SimNetwork:
    """Makes the transports of one world. `delay_ns` is the range of one message's way."""

    def __init__(
        self,
        loop: SimLoop,
        stream: str = "network",
        *,
        delay_ns: tuple[int, int] = (5_000, 80_000),
        reconnect_ns: int = 0,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        queue_messages_max: int = QUEUE_MESSAGES_MAX,
    ) -> None:
        self.loop = loop
        self.random = loop.streams[stream]
        self.delay_ns = delay_ns
        self.reconnect_ns = reconnect_ns
        self.message_bytes_max = message_bytes_max
        self.queue_messages_max = queue_messages_max
        self.meddle: Meddler | None = None
        self.name_of: Callable[[bytes], str] | None = None  # what a message says, for the trace
        self.messages_lost = 0
        self.messages_underway = 0
        self._rules: dict[int, Rule] = {}
        self._rules_added = 0
        self._servers: dict[str, SimServerTransport] = {}
        self._clients: dict[str, SimClientTransport] = {}
        self._connections = 0

    def listen(self, address: str) -> SimServerTransport:
        """A server at `address`, owned by the process that is running."""
        if self.server_at(address) is not None:
            raise CallerError(f"somebody listens at {address} already")
        server = self._servers[address] = SimServerTransport(self, address)
        return server

    def connect(self, address: str, name: str = "") -> SimClientTransport:
        """A client, owned by the process that is running. Nobody needs to listen yet."""
        name = name or f"client{len(self._clients)}"
        present = self._clients.get(name)
        if present is not None and present.usable:
            raise CallerError(f"there is a client {name!r} already")
        client = self._clients[name] = SimClientTransport(self, address, name)
        if present is not None:  # the cable is the same
            client.blocked, client.extra_ns = present.blocked, present.extra_ns
        return client

    def add_rule(self, rule: Rule) -> Callable[[], None]:
        """See the module's text. The answer takes the rule away again."""
        number = self._rules_added
        self._rules_added += 1
        self._rules[number] = rule

        def remove() -> None:
            self._rules.pop(number, None)

        return remove

    def cut(self, client: str, reconnect_ns: int | None = None) -> None:
        """Break the connection; the next one takes `reconnect_ns` to make (None: what it always takes)."""
        self.loop.trace.event("net.cut", client)
        self._clients[client].lose_connection(reconnect_ns)

    def partition(self, client: str, *, to_server: bool = True, to_client: bool = True) -> None:
        self.loop.trace.event("net.partition", client, int(to_server), int(to_client))
        self._clients[client].blocked = (to_server, to_client)

    def heal(self, client: str) -> None:
        self.loop.trace.event("net.heal", client)
        self._clients[client].blocked = (False, False)

    def clog(self, client: str, extra_ns: int) -> None:
        self.loop.trace.event("net.clog", client, extra_ns)
        self._clients[client].extra_ns = extra_ns

    @property
    def clients(self) -> list[str]:
        """The names that the faults can use, in the order in which they connected."""
        return [name for name, client in self._clients.items() if client.usable]

    def connected(self, client: str) -> bool:
        """There is a client of this name, and it has a connection."""
        present = self._clients.get(client)
        return present is not None and present.connected

    # ---- for the transports

    def apply_rules(self, client: str, to_server: bool, letters: Sequence[Letter]) -> Sequence[Letter] | None:
        for rule in list(self._rules.values()):
            answer = rule(client, to_server, letters)
            if answer is None:
                return None
            letters = answer
        return letters

    def server_at(self, address: str) -> SimServerTransport | None:
        server = self._servers.get(address)
        return server if server is not None and server.usable else None

    def next_identity(self) -> bytes:
        self._connections += 1
        return self._connections.to_bytes(5, "big")


class _Connection:
    """Between one client and one server, from connecting until it is cut."""

    def __init__(self, client: SimClientTransport, server: SimServerTransport) -> None:
        network = client.network
        self.client = client
        self.server = server
        self.identity = network.next_identity()
        self.open = True
        label = f"net.{client.name}.{int.from_bytes(self.identity, 'big')}"
        self.to_server = _Direction(network, self, f"{label}.up", True)
        self.to_client = _Direction(network, self, f"{label}.down", False)

    @property
    def usable(self) -> bool:
        return self.open and self.client.usable and self.server.usable

    def end(self) -> None:
        """One side breaks the connection."""
        self.open = False
        self.client.connection_ended(self)

    def may_deliver(self, to_server: bool) -> bool:
        """Whether the next message of this direction still arrives. After a loss, none behind it does."""
        sender, receiver = (self.client, self.server) if to_server else (self.server, self.client)
        if self.open and not sender.usable and not sender.network.random.chance(1, 2):
            self.open = False
        return self.open and receiver.usable


class _Direction:
    """One direction of one connection: messages on their way, and those that wait for a receiver's callback."""

    def __init__(self, network: SimNetwork, connection: _Connection, label: str, to_server: bool) -> None:
        self._network = network
        self._connection = connection
        self._to_server = to_server
        self._channel = network.loop.channel(label)
        self._underway = 0
        self._arrived: deque[bytes] = deque()
        self._callback: Callable[[bytes], None] | None = None
        self._receiver: Owner | None = None
        self._drains = 0

    def send(self, payload: bytes) -> bool:
        if self._underway + len(self._arrived) >= self._network.queue_messages_max:
            return False
        letters = self._letters(payload)
        if letters is None:
            self._trace("net.refuse", payload)
            return False
        self._trace("net.send", payload)
        if not letters:
            self._lose(payload)
        for letter in letters:
            self._underway += 1
            self._network.messages_underway += 1
            self._channel.post(self._arrive, letter.payload, delay_ns=letter.delay_ns, context=Context())
        return True

    def _letters(self, payload: bytes) -> Sequence[Letter] | None:
        """What the message becomes on its way."""
        network, client = self._network, self._connection.client
        if client.blocked[0 if self._to_server else 1]:
            return ()
        meddle = network.meddle
        copies = (payload,) if meddle is None else meddle(client.name, self._to_server, payload)
        letters = [Letter(copy, network.random.random_ns(*network.delay_ns) + client.extra_ns) for copy in copies]
        return network.apply_rules(client.name, self._to_server, letters)

    def deliver_to(self, callback: Callable[[bytes], None], receiver: Owner) -> None:
        self._callback, self._receiver = callback, receiver
        for _ in range(len(self._arrived) - self._drains):
            self._post_delivery()

    def _arrive(self, payload: bytes) -> None:
        self._underway -= 1
        self._network.messages_underway -= 1
        if not self._connection.may_deliver(self._to_server):
            self._lose(payload)
            return
        if len(payload) > self._network.message_bytes_max:
            self._trace("net.oversized", payload)
            self._connection.end()
            return
        self._arrived.append(payload)
        if self._callback is not None:
            self._hand_over()

    def _post_delivery(self) -> None:
        self._drains += 1
        self._channel.post(self._late_delivery, context=Context())

    def _late_delivery(self) -> None:
        """Of a message that had arrived before there was a callback."""
        self._drains -= 1
        if self._connection.may_deliver(self._to_server):
            self._hand_over()

    def _hand_over(self) -> None:
        assert self._callback is not None
        assert self._receiver is not None
        life = self._receiver.life
        if life is not None and life.alive and life.gate is not None and not life.process.lets_in(self._post_delivery):
            return
        payload = self._arrived.popleft()
        if not self._receiver.alive:
            self._lose(payload)
            return
        self._trace("net.deliver", payload)
        self._receiver.call(self._callback, payload)

    def _lose(self, payload: bytes) -> None:
        self._network.messages_lost += 1
        self._trace("net.lose", payload)

    def _trace(self, label: str, payload: bytes) -> None:
        direction = "up" if self._to_server else "down"
        network, client = self._network, self._connection.client.name
        digest = xxhash.xxh3_64_intdigest(payload)
        name = "" if network.name_of is None else network.name_of(payload)
        network.loop.trace.event(label, client, direction, len(payload), digest, name)


class SimClientTransport:
    """`kvcore.ports.ClientTransport` in the simulated network; made by `SimNetwork.connect`."""

    def __init__(self, network: SimNetwork, address: str, name: str) -> None:
        self.network = network
        self.name = name
        self.blocked = (False, False)  # what vanishes: (to the server, to the client)
        self.extra_ns = 0
        self._address = address
        self._owner = Owner()
        self._connection: _Connection | None = None
        self._connect_after_ns = 0
        self._callback: Callable[[bytes], None] | None = None
        self._receiver = self._owner
        self._closed = False

    @property
    def usable(self) -> bool:
        return not self._closed and self._owner.alive

    def send(self, payload: bytes) -> bool:
        self._check_open()
        check_message(payload, self.network.message_bytes_max)
        connection = self._connected()
        return connection is not None and connection.to_server.send(payload)

    def receive(self, callback: Callable[[bytes], None]) -> None:
        self._check_open()
        self._callback, self._receiver = callback, Owner()
        if self._connection is not None:
            self._connection.to_client.deliver_to(callback, self._receiver)

    def close(self) -> None:
        self._closed = True
        self.lose_connection()

    @property
    def connected(self) -> bool:
        return self._connection is not None and self._connection.usable

    def connection_ended(self, connection: _Connection) -> None:
        if self._connection is connection:
            self.lose_connection()

    def lose_connection(self, reconnect_ns: int | None = None) -> None:
        if self._connection is not None:
            self._connection.open = False
            self._connection = None
            wait_ns = self.network.reconnect_ns if reconnect_ns is None else reconnect_ns
            self._connect_after_ns = self.network.loop.now_ns() + wait_ns

    def _connected(self) -> _Connection | None:
        if self._connection is not None and not self._connection.usable:
            self.lose_connection()
        if self._connection is None and self.network.loop.now_ns() >= self._connect_after_ns:
            self._connect()
        return self._connection

    def _connect(self) -> None:
        server = self.network.server_at(self._address)
        if server is None:
            return
        self._connection = server.accept(self)
        if self._callback is not None:
            self._connection.to_client.deliver_to(self._callback, self._receiver)

    def _check_open(self) -> None:
        self._owner.check()
        if self._closed:
            raise CallerError("call on a closed transport")


class SimServerTransport:
    """`kvcore.ports.ServerTransport` in the simulated network; made by `SimNetwork.listen`."""

    def __init__(self, network: SimNetwork, address: str) -> None:
        self.network = network
        self.address = address
        self._owner = Owner()
        self._peers: dict[bytes, _Connection] = {}
        self._callback: Callable[[bytes, bytes], None] | None = None
        self._receiver = self._owner
        self._closed = False

    @property
    def usable(self) -> bool:
        return not self._closed and self._owner.alive

    def accept(self, client: SimClientTransport) -> _Connection:
        connection = _Connection(client, self)
        self._peers[connection.identity] = connection
        self._attach(connection)
        return connection

    def send(self, peer: bytes, payload: bytes) -> bool:
        self._check_open()
        check_message(payload, self.network.message_bytes_max)
        connection = self._peers.get(peer)
        if connection is None:
            return False
        if not connection.usable:
            del self._peers[peer]
            return False
        return connection.to_client.send(payload)

    def receive(self, callback: Callable[[bytes, bytes], None]) -> None:
        self._check_open()
        self._callback, self._receiver = callback, Owner()
        for connection in self._peers.values():
            self._attach(connection)

    def close(self) -> None:
        self._closed = True
        self._peers.clear()

    def _attach(self, connection: _Connection) -> None:
        callback = self._callback
        if callback is not None:
            identity = connection.identity
            connection.to_server.deliver_to(lambda payload: callback(identity, payload), self._receiver)

    def _check_open(self) -> None:
        self._owner.check()
        if self._closed:
            raise CallerError("call on a closed transport")

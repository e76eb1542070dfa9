"""Plane transport: what each fault does to messages, that it fires when it does, and that the network is well after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.service.limits import MESSAGE_BYTES_MAX
from kvcore.service.protocol import PROTOCOL_VERSION, Ack, Header, Lookup, Query, Ready, Release, pack
from kvcore.sim.faults.catalogue import CATALOGUE
from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.trace import TraceEvent

MS = 1_000_000
DELAY_NS_MAX = 80_000
World = Callable[..., Any]
NAMES = ("scheduler>server0", "worker0>server0", "scheduler>server1")


class Echoes:
    """Three clients of two servers. A server echoes what it gets; everything is written down with its time."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.arrived: list[tuple[int, str, bytes, bytes]] = []  # time, server, peer, payload
        self.echoed: dict[str, list[tuple[int, bytes]]] = {name: [] for name in NAMES}
        self.taken: dict[str, list[bool]] = {name: [] for name in NAMES}
        self.replies_taken: list[bool] = []
        network, loop = world.world.network, world.loop
        self.servers = {name: network.listen(name) for name in ("server0", "server1")}
        self.clients = {name: network.connect(name.partition(">")[2], name) for name in NAMES}
        for name, server in self.servers.items():
            server.receive(lambda peer, payload, name=name: self._serve(name, peer, payload))
        for name, client in self.clients.items():
            client.receive(lambda payload, name=name: self.echoed[name].append((loop.now_ns(), payload)))

    def _serve(self, name: str, peer: bytes, payload: bytes) -> None:
        self.arrived.append((self.world.loop.now_ns(), name, peer, payload))
        self.replies_taken.append(self.servers[name].send(peer, payload))

    def send(self, name: str, payload: bytes) -> None:
        self.taken[name].append(self.clients[name].send(payload))

    def send_at(self, time_ns: int, name: str, payload: bytes) -> None:
        self.world.loop.call_at_ns(time_ns, self.send, name, payload)

    def talk(self, spacing_ns: int = MS, count: int = 20) -> None:
        """Each client sends a numbered message each millisecond."""
        for number in range(count):
            for name in NAMES:
                self.send_at(number * spacing_ns, name, f"{name} {number}".encode())
        self.world.run_for((count + 30) * spacing_ns)

    def payloads(self, name: str) -> list[bytes]:
        return [payload for _, payload in self.echoed[name]]

    def all_of(self, name: str, count: int = 20) -> list[bytes]:
        return [f"{name} {number}".encode() for number in range(count)]


EVENTS = [
    FaultEvent("transport.delay_tail", 2 * MS, 12 * MS, amount=8 * MS),
    FaultEvent("transport.reorder", 2 * MS, 12 * MS, "scheduler>server0", amount=MS // 2),
    FaultEvent("transport.clog", 2 * MS, 12 * MS, "scheduler>server0"),
    FaultEvent("transport.duplicate", 2 * MS, 12 * MS, amount=500),
    FaultEvent("transport.partition", 2 * MS, 12 * MS, "server0", amount=2),
    FaultEvent("transport.refuse_send", 2 * MS, 12 * MS, "scheduler>server0", amount=1),
    FaultEvent("transport.blocked", 2 * MS, 12 * MS, "scheduler>server0", amount=3),
    FaultEvent("transport.fail_send", 2 * MS, 0, "scheduler>server0", 3),
    FaultEvent("transport.fail_send", 2 * MS, 0, "scheduler>server0", 3, 1),
    FaultEvent("transport.peer_restart", 2 * MS, 0, "scheduler>server0", 0, 3 * MS),
    FaultEvent("transport.peer_restart", 2 * MS, 0, "scheduler>server0", 2, 3 * MS),
    FaultEvent("transport.truncate", 2 * MS, 0, "scheduler>server0", 2, 500),
    FaultEvent("transport.oversize", 2 * MS, 0, "scheduler>server0", 2, 64),
]


def test_the_events_of_this_file_are_of_every_kind_but_one() -> None:
    """`late_reply` reads the protocol, which an echo does not speak; it has a test of its own."""
    kinds = {name for name in CATALOGUE if name.startswith("transport.")}
    assert {event.kind for event in EVENTS} == kinds - {"transport.late_reply"}


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_it_fires_changes_the_run_and_is_over_after_it(small: World, event: FaultEvent) -> None:
    world, calm = small(), small()
    with_fault, without = Echoes(world), Echoes(calm)
    world.arm(event)
    with_fault.talk()
    without.talk()
    assert world.fired > 0
    assert world.seen != calm.seen
    assert world.loop.trace.hash != calm.loop.trace.hash
    world.injector.stop()
    began_ns = world.loop.now_ns()
    for name in NAMES:
        with_fault.echoed[name].clear()
    for number in range(5):
        for name in NAMES:
            with_fault.send_at(began_ns + number * MS, name, bytes([number]))
    world.run_for(20 * MS)
    for name in NAMES:
        assert with_fault.payloads(name) == [bytes([number]) for number in range(5)]
        times = [time_ns - began_ns for time_ns, _ in with_fault.echoed[name]]
        assert all(time_ns <= number * MS + 2 * DELAY_NS_MAX for number, time_ns in enumerate(times))


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_a_connection_keeps_its_order_and_others_are_left_alone(small: World, event: FaultEvent) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(event)
    echoes.talk()
    for name in NAMES:
        whole = [payload for payload in echoes.payloads(name) if payload in echoes.all_of(name)]
        seen = list(dict.fromkeys(whole))
        assert seen == sorted(seen, key=echoes.all_of(name).index)
        if event.target and event.target not in (name, *name.split(">")):
            assert echoes.payloads(name) == echoes.all_of(name)


def test_a_partition_in_one_direction_lets_the_other_through(small: World) -> None:
    for amount, arrives in ((1, False), (2, True), (3, False)):
        world = small()
        echoes = Echoes(world)
        world.arm(FaultEvent("transport.partition", 0, 0, "worker0", amount=amount))
        echoes.talk(count=4)
        assert echoes.echoed["worker0>server0"] == []
        assert any(payload.startswith(b"worker0") for *_, payload in echoes.arrived) == arrives
        assert all(echoes.taken["worker0>server0"]), "whoever pulls a cable tells nobody"
        assert world.fired == 4


def test_partitions_that_overlap_end_one_by_one(small: World) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(
        FaultEvent("transport.partition", 0, 10 * MS - 1, "scheduler>server0", amount=1),
        FaultEvent("transport.partition", 0, 5 * MS - 1, "server0", amount=3),
    )
    echoes.talk()
    assert echoes.payloads("scheduler>server0")[0] == b"scheduler>server0 10"
    assert echoes.payloads("worker0>server0")[0] == b"worker0>server0 5"


def test_a_clogged_connection_delivers_everything_at_its_end(small: World) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent("transport.clog", MS // 2, 10 * MS, "scheduler>server0"))
    echoes.talk(count=6)
    assert echoes.payloads("scheduler>server0") == echoes.all_of("scheduler>server0", 6)
    times = [time_ns for time_ns, _ in echoes.echoed["scheduler>server0"]]
    assert times[0] < MS < 10 * MS <= times[1]
    assert max(times) < 10 * MS + 12 * DELAY_NS_MAX


def test_a_peer_that_does_not_read_takes_so_many_messages_and_no_more(small: World) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent("transport.blocked", 0, 15 * MS, "scheduler>server0", amount=3))
    echoes.talk(count=8)
    assert echoes.taken["scheduler>server0"] == [True] * 3 + [False] * 5
    assert echoes.payloads("scheduler>server0") == echoes.all_of("scheduler>server0", 3)
    assert world.fired == 5


@pytest.mark.parametrize(("amount", "taken"), [(0, False), (1, True)])
@pytest.mark.parametrize("nth", range(1, 9))
def test_exactly_the_nth_send_fails(small: World, nth: int, amount: int, taken: bool) -> None:
    """Odd sends of this client are its own, even ones the server's echoes."""
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent("transport.fail_send", 0, 0, "scheduler>server0", nth, amount))
    echoes.talk(count=6)
    asked, answered = echoes.taken["scheduler>server0"], echoes.payloads("scheduler>server0")
    refused = asked.count(False) + echoes.replies_taken.count(False)
    assert refused == (not taken)
    assert len(answered) == 5
    assert world.fired == 1


def test_a_send_without_a_target_is_the_nth_of_all(small: World) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent("transport.fail_send", nth=2))
    echoes.talk(count=1)
    assert [echoes.taken[name] for name in NAMES].count([False]) == 1


def test_a_peer_that_restarts_comes_back_later_under_a_new_identity(small: World) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent("transport.peer_restart", 5 * MS - 1, 0, "scheduler>server0", 0, 3 * MS))
    echoes.talk(count=12)
    assert echoes.taken["scheduler>server0"] == [True] * 5 + [False] * 3 + [True] * 4
    peers = [peer for *_, peer, payload in echoes.arrived if payload.startswith(b"scheduler>server0")]
    assert len(set(peers)) == 2
    assert len(set(peers[:5])) == 1


def test_what_is_in_flight_is_lost_with_the_connection(small: World) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent("transport.peer_restart", 0, 0, "scheduler>server0", 5))
    echoes.talk(count=6)
    assert len(echoes.payloads("scheduler>server0")) == 5
    assert all(echoes.taken["scheduler>server0"])


@pytest.mark.parametrize(
    ("kind", "amount", "arrives"),
    [
        ("truncate", 500, b"scheduler"),
        ("truncate", 0, b""),
        ("oversize", 24, b"scheduler>server0 1" + bytes(5)),
        ("oversize", 1, b"scheduler>server0 1" + bytes(1)),
    ],
)
def test_a_frame_is_cut_or_grown_and_the_rest_is_whole(small: World, kind: str, amount: int, arrives: bytes) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent(f"transport.{kind}", 0, 0, "scheduler>server0", 3, amount))
    for number in range(4):
        echoes.send_at(number * MS, NAMES[0], f"{NAMES[0]} {number}".encode())
    world.run_for(10 * MS)
    whole = echoes.all_of(NAMES[0], 4)
    assert [payload for *_, payload in echoes.arrived] == [whole[0], arrives, whole[2], whole[3]]


def test_a_frame_over_the_transports_limit_breaks_the_connection_and_nothing_else(small: World) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent("transport.oversize", 0, 0, "scheduler>server0", 3, MESSAGE_BYTES_MAX + 1))
    echoes.talk(count=6)
    assert all(len(payload) < 100 for *_, payload in echoes.arrived)
    assert [event.label for event in world.seen].count("net.oversized") == 1
    peers = {peer for *_, peer, payload in echoes.arrived if payload.startswith(b"scheduler>server0")}
    assert len(peers) == 2
    assert echoes.payloads("scheduler>server0")[-1] == b"scheduler>server0 5"


class Lookups:
    """A scheduler that looks a session up and a server that answers each request at once."""

    def __init__(self, world: Any) -> None:
        self.world = world
        network = world.world.network
        self.server = network.listen("server0")
        self.client = network.connect("server0", "scheduler>server0")
        self.server.receive(lambda peer, payload: self.server.send(peer, self._answer(payload)))
        self.replies: list[tuple[int, int]] = []
        self.client.receive(lambda payload: self.replies.append((world.loop.now_ns(), payload[10])))

    def _answer(self, payload: bytes) -> bytes:
        number = payload[10]
        return pack(Header(PROTOCOL_VERSION, number, 7, 1), Ready(b"\1") if number > 1 else Ack())

    def send_at(self, time_ns: int, number: int, message: Any) -> None:
        self.world.loop.call_at_ns(time_ns, self.client.send, pack(Header(PROTOCOL_VERSION, number, 7, 1), message))


def lookup(epoch: int) -> Lookup:
    return Lookup("r0", epoch, epoch, 0, b"", [b"h"], 10, 0, "", 50)


@pytest.mark.parametrize(
    ("newer", "fires"),
    [(lookup(2), True), (Release("r0", 1, 1), True), (Query("r0", 1, 1), False), (Release("other", 1, 1), False)],
    ids=["replaced", "given up", "asked again", "another session"],
)
def test_a_late_reply_is_one_about_a_lookup_that_is_over(small: World, newer: Any, fires: bool) -> None:
    world = small()
    lookups = Lookups(world)
    world.arm(FaultEvent("transport.late_reply", 0, 0, "scheduler>server0", 2, 10 * MS))
    lookups.send_at(0, 1, lookup(1))
    lookups.send_at(MS, 2, Query("r0", 1, 1))
    lookups.send_at(3 * MS, 3, newer)
    world.run_for(40 * MS)
    assert world.fired == fires
    assert [number for _, number in lookups.replies] == [1, 2, 3], "the connection keeps its order"
    times = [time_ns for time_ns, _ in lookups.replies]
    assert times[0] < MS
    assert 11 * MS <= times[1] <= times[2]


def labels(events: list[TraceEvent]) -> list[str]:
    return [event.label for event in events]


def test_a_refused_send_is_in_the_trace(small: World) -> None:
    world = small()
    echoes = Echoes(world)
    world.arm(FaultEvent("transport.refuse_send", 0, 0, "scheduler>server0", amount=1))
    echoes.talk(count=2)
    assert labels(world.seen).count("net.refuse") == 2
    assert echoes.taken["scheduler>server0"] == [False, False]

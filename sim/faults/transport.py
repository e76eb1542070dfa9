"""Faults of the network between the engine's side and the cache servers.

Inside what a network may do: messages take long (`delay_tail`, `clog`), overtake those of other connections
(`reorder`), come twice (`duplicate`), vanish (`partition`), meet a full queue (`refuse_send`, `blocked`), and a
connection breaks with all that is in flight and comes back as another peer (`peer_restart`). A connection keeps its
order through all of this. Beyond it: frames cut short (`truncate`) or grown beyond a limit (`oversize`), as hostile or
broken peers send them; the only legal outcomes are a refusal, a broken connection and a clean miss.

`late_reply` holds an answer about a lookup, and so all behind it, until the scheduler has asked for something newer:
an answer of an old generation meets a client that has gone on.

Targets: a client ("worker1>server0"), a process with all its connections ("worker1", "server0"), or "" for everybody.
A message is counted when it is sent, in either direction. Each effect on a message fires by itself.

Each fault is a rule of the network (`SimNetwork.add_rule`); to end it is to take the rule away. What is under way by
then still takes its time, and what was lost stays lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.service.limits import MESSAGE_BYTES_MAX
from kvcore.service.protocol import (
    EndSession,
    Lookup,
    Query,
    Release,
    ServerLimits,
    UndecodableError,
    read_header,
    read_request,
)
from kvcore.sim.faults.kind import MS, End, FaultEvent, Kind, Shape, counted, lasting
from kvcore.sim.faults.scene import Scene
from kvcore.sim.faults.trigger import Trigger
from kvcore.sim.ports.network import Letter
from kvcore.sim.streams import RandomStream

Letters = Sequence[Letter]
Change = Callable[[str, bool, Letters], Letters | None]

UP, DOWN = 1, 2
_DOWN_NS = (MS // 4, 15 * MS)
_UP_NS = (MS, 8 * MS)
_SIZES = (64, ServerLimits().frame_bytes_max + 1, MESSAGE_BYTES_MAX + 1)


def concerns(target: str, client: str) -> bool:
    """`client` is "process>server"."""
    return target in ("", client, *client.split(">"))


def _always(scene: Scene, event: FaultEvent, change: Change) -> End:
    """A rule for every message of the target that is still there."""

    def rule(client: str, to_server: bool, letters: Letters) -> Letters | None:
        return change(client, to_server, letters) if letters and concerns(event.target, client) else letters

    return scene.world.network.add_rule(rule)


def _once(scene: Scene, event: FaultEvent, change: Change) -> End:
    """A rule for the n-th message of the target (for each, where `nth` is 0). Fires there."""
    trigger = Trigger(scene, event)

    def rule(client: str, to_server: bool, letters: Letters) -> Letters | None:
        return change(client, to_server, letters) if trigger.hits() else letters

    return _always(scene, event, rule)


def _later(letters: Letters, extra_ns: int) -> Letters:
    return [Letter(letter.payload, letter.delay_ns + extra_ns) for letter in letters]


def _end_ns(scene: Scene, event: FaultEvent) -> int:
    """When a fault that begins now ends by itself; those without an end last `amount`."""
    return scene.loop.now_ns() + (event.lasts_ns or event.amount)


def _clients(shape: Shape) -> tuple[str, ...]:
    return () if shape.in_process else shape.clients


def _clients_and_all(shape: Shape) -> tuple[str, ...]:
    clients = _clients(shape)
    return (*clients, *shape.server_names, "") if clients else ()


# ---- slow


def draw_delay_tail(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting(
        "transport.delay_tail", stream, shape, _clients_and_all(shape),
        down_ns=(MS, 40 * MS), up_ns=_UP_NS, amount=(MS // 2, 20 * MS),
    )  # fmt: skip


def begin_delay_tail(scene: Scene, event: FaultEvent) -> End:
    stream, usual_ns = scene.stream(event), scene.world.network.delay_ns[1]

    def change(client: str, to_server: bool, letters: Letters) -> Letters:
        extra_ns = stream.tail_ns(0, event.amount)
        if extra_ns > usual_ns:
            scene.fired(event)
        return _later(letters, extra_ns)

    return _always(scene, event, change)


def draw_reorder(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    clients = _clients(shape) if len(shape.clients) > 1 else ()
    return lasting(
        "transport.reorder", stream, shape, clients, down_ns=(MS, 20 * MS), up_ns=_UP_NS, amount=(MS // 10, 4 * MS)
    )


def begin_reorder(scene: Scene, event: FaultEvent) -> End:
    loop = scene.loop
    slowest_ns = 0  # when the last of the delayed messages arrives

    def rule(client: str, to_server: bool, letters: Letters) -> Letters:
        nonlocal slowest_ns
        if letters and concerns(event.target, client):
            letters = _later(letters, event.amount)
            slowest_ns = max(slowest_ns, loop.now_ns() + letters[-1].delay_ns)
        elif letters and loop.now_ns() + letters[0].delay_ns < slowest_ns:
            scene.fired(event)
        return letters

    return scene.world.network.add_rule(rule)


def draw_clog(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting("transport.clog", stream, shape, _clients_and_all(shape), down_ns=_DOWN_NS, up_ns=_UP_NS)


def begin_clog(scene: Scene, event: FaultEvent) -> End:
    loop, end_ns = scene.loop, _end_ns(scene, event)

    def change(client: str, to_server: bool, letters: Letters) -> Letters:
        scene.fired(event)
        return _later(letters, max(0, end_ns - loop.now_ns()))

    return _always(scene, event, change)


def draw_late_reply(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    clients = tuple(client for client in _clients(shape) if client.startswith("scheduler>"))
    events = counted("transport.late_reply", stream, shape, clients, nth=(1, 8))
    return [_with_amount(event, stream.random_ns(2 * MS, 150 * MS)) for event in events]


class _LateReply:
    """Holds the n-th answer about a lookup for `amount`; fires when that lookup is given up or replaced meanwhile."""

    def __init__(self, scene: Scene, event: FaultEvent) -> None:
        self._scene = scene
        self._event = event
        self._countdown = max(1, event.nth)
        self._asked: dict[tuple[str, int, int], tuple[str, int]] = {}  # client, connection, request -> session, epoch
        self._held: tuple[str, int] | None = None
        self._until_ns = 0

    def __call__(self, client: str, to_server: bool, letters: Letters) -> Letters:
        header = read_header(letters[0].payload)
        if header is None:
            return letters
        place = (client, header.connection, header.request_id)
        if to_server:
            self._request(place, letters[0].payload)
        elif place in self._asked:
            return self._reply(self._asked.pop(place), letters)
        return letters

    def _request(self, place: tuple[str, int, int], payload: bytes) -> None:
        try:
            request = read_request(payload)
        except UndecodableError:
            return
        if isinstance(request, Lookup | Query) and self._countdown:
            self._asked[place] = (request.session, request.epoch)
        if self._held is None or self._scene.loop.now_ns() >= self._until_ns:
            return
        session, epoch = self._held
        replaced = isinstance(request, Lookup) and request.session == session and request.epoch > epoch
        given_up = isinstance(request, Release | EndSession) and request.session == session and request.epoch >= epoch
        if replaced or given_up:
            self._held = None
            self._scene.fired(self._event)

    def _reply(self, about: tuple[str, int], letters: Letters) -> Letters:
        if self._countdown == 0:
            return letters
        self._countdown -= 1
        if self._countdown:
            return letters
        self._held = about
        self._until_ns = self._scene.loop.now_ns() + letters[0].delay_ns + self._event.amount
        return _later(letters, self._event.amount)


def begin_late_reply(scene: Scene, event: FaultEvent) -> End:
    return _always(scene, event, _LateReply(scene, event))


# ---- lost, repeated, refused


def draw_duplicate(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting(
        "transport.duplicate", stream, shape, _clients_and_all(shape),
        down_ns=(MS, 40 * MS), up_ns=_UP_NS, amount=(20, 500),
    )  # fmt: skip


def begin_duplicate(scene: Scene, event: FaultEvent) -> End:
    stream = scene.stream(event)

    def change(client: str, to_server: bool, letters: Letters) -> Letters:
        if not stream.chance(min(event.amount, 1000), 1000):
            return letters
        scene.fired(event)
        return [*letters, *_later(letters[-1:], stream.tail_ns(0, 5 * MS))]

    return _always(scene, event, change)


def draw_partition(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    """Of a client or a whole server; two times in three in one direction only."""
    events = lasting("transport.partition", stream, shape, _clients_and_all(shape), down_ns=_DOWN_NS, up_ns=_UP_NS)
    return [_with_amount(event, stream.pick((UP, DOWN, UP | DOWN))) for event in events]


def _with_amount(event: FaultEvent, amount: int) -> FaultEvent:
    return FaultEvent(event.kind, event.at_ns, event.until_ns, event.target, event.nth, amount)


def _cuts(event: FaultEvent, to_server: bool) -> bool:
    return bool((event.amount or UP | DOWN) & (UP if to_server else DOWN))


def begin_partition(scene: Scene, event: FaultEvent) -> End:
    def change(client: str, to_server: bool, letters: Letters) -> Letters:
        if not _cuts(event, to_server):
            return letters
        scene.fired(event)
        return ()

    return _always(scene, event, change)


def draw_refuse_send(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    events = lasting("transport.refuse_send", stream, shape, _clients(shape), down_ns=_DOWN_NS, up_ns=_UP_NS)
    return [_with_amount(event, stream.pick((UP, DOWN, UP | DOWN))) for event in events]


def begin_refuse_send(scene: Scene, event: FaultEvent) -> End:
    def change(client: str, to_server: bool, letters: Letters) -> Letters | None:
        if not _cuts(event, to_server):
            return letters
        scene.fired(event)
        return None

    return _always(scene, event, change)


def draw_blocked(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting(
        "transport.blocked", stream, shape, _clients(shape), down_ns=(MS, 15 * MS), up_ns=_UP_NS, amount=(1, 6)
    )


def begin_blocked(scene: Scene, event: FaultEvent) -> End:
    loop, end_ns = scene.loop, scene.loop.now_ns() + event.lasts_ns
    queued = {True: 0, False: 0}  # by direction

    def change(client: str, to_server: bool, letters: Letters) -> Letters | None:
        if queued[to_server] >= event.amount:
            scene.fired(event)
            return None
        queued[to_server] += 1
        return _later(letters, max(0, end_ns - loop.now_ns()))

    return _always(scene, event, change)


def draw_fail_send(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    events = counted("transport.fail_send", stream, shape, _clients_and_all(shape), nth=(1, 100))
    return [_with_amount(event, stream.randint(0, 1)) for event in events]


def begin_fail_send(scene: Scene, event: FaultEvent) -> End:
    return _once(scene, event, lambda client, to_server, letters: () if event.amount else None)


def draw_peer_restart(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    """By time, or in the middle of the n-th message."""
    clients = _clients(shape)
    if stream.chance(1, 2):
        return counted("transport.peer_restart", stream, shape, clients, nth=(1, 60), amount=(0, 8 * MS))
    events = lasting(
        "transport.peer_restart", stream, shape, clients, down_ns=(0, 8 * MS), up_ns=_UP_NS, amount=(0, 8 * MS)
    )
    return [FaultEvent(event.kind, event.at_ns, 0, event.target, amount=event.amount) for event in events]


def begin_peer_restart(scene: Scene, event: FaultEvent) -> End | None:
    network = scene.world.network

    def cut(client: str, to_server: bool, letters: Letters) -> Letters:
        network.cut(client, event.amount)
        return letters

    if event.nth:
        return _once(scene, event, cut)
    for client in network.clients:
        if concerns(event.target, client) and network.connected(client):
            scene.fired(event)
            network.cut(client, event.amount)
    return None


# ---- beyond what a network may do


def draw_truncate(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return counted("transport.truncate", stream, shape, _clients_and_all(shape), nth=(1, 60), amount=(0, 999))


def begin_truncate(scene: Scene, event: FaultEvent) -> End:
    def change(client: str, to_server: bool, letters: Letters) -> Letters:
        kept = min(event.amount, 999)
        return [Letter(each.payload[: len(each.payload) * kept // 1000], each.delay_ns) for each in letters]

    return _once(scene, event, change)


def draw_oversize(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    events = counted("transport.oversize", stream, shape, _clients_and_all(shape), nth=(1, 60))
    return [_with_amount(event, stream.pick(_SIZES)) for event in events]


def begin_oversize(scene: Scene, event: FaultEvent) -> End:
    def change(client: str, to_server: bool, letters: Letters) -> Letters:
        return [Letter(_grown(letter.payload, event.amount), letter.delay_ns) for letter in letters]

    return _once(scene, event, change)


def _grown(payload: bytes, size: int) -> bytes:
    """`payload` with zeros behind it, `size` bytes in all and one more at least."""
    return payload + bytes(max(1, size - len(payload)))


KINDS = (
    Kind(
        "transport.delay_tail",
        "each message is late by up to `amount` ns, most by little",
        draw_delay_tail,
        begin_delay_tail,
    ),
    Kind(
        "transport.reorder",
        "one connection is `amount` ns slower, so that others overtake it",
        draw_reorder,
        begin_reorder,
    ),
    Kind("transport.clog", "nothing arrives before it ends (or for `amount` ns); then all does", draw_clog, begin_clog),
    Kind(
        "transport.late_reply",
        "the `nth` answer about a lookup comes `amount` ns late, after the lookup was given up or replaced",
        draw_late_reply,
        begin_late_reply,
    ),
    Kind("transport.duplicate", "`amount` per mille of the messages come twice", draw_duplicate, begin_duplicate),
    Kind(
        "transport.partition",
        "messages vanish: `amount` 1 those to the server, 2 those to the client, 3 both",
        draw_partition,
        begin_partition,
    ),
    Kind(
        "transport.refuse_send",
        "sends are refused: `amount` 1 the client's, 2 the server's, 3 both",
        draw_refuse_send,
        begin_refuse_send,
    ),
    Kind(
        "transport.blocked",
        "the peer does not read: nothing arrives, and sends beyond `amount` queued messages are refused",
        draw_blocked,
        begin_blocked,
    ),
    Kind(
        "transport.fail_send",
        "the `nth` send is refused (`amount` 0) or its message vanishes (1)",
        draw_fail_send,
        begin_fail_send,
    ),
    Kind(
        "transport.peer_restart",
        "the connection breaks (at the `nth` message) and comes back under a new identity after `amount` ns",
        draw_peer_restart,
        begin_peer_restart,
    ),
    Kind(
        "transport.truncate",
        "the `nth` message is cut to `amount` per mille of its length",
        draw_truncate,
        begin_truncate,
    ),
    Kind(
        "transport.oversize",
        "the `nth` message has `amount` bytes: behind its end, over the server's limit, or over the transport's",
        draw_oversize,
        begin_oversize,
    ),
)

"""A request that goes on into a server's next life takes what is owed about it along.

Found by a climb in which servers restarted: a LOOKUP that was under way when its request ended was carried out by the
next life of the server, but the END that followed it had been dropped as a debt of the old one. Its leases stayed
until they ran out, and the staging of a STORE under its hold for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.answers import Answer
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace
from kvcore.placement import Placement
from kvcore.service import protocol as wire
from kvcore.service.client import Connection, SchedulerClient, StoreCell, WorkerClient, identity_of
from kvcore.service.protocol import Error, ErrorCode, Header
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.clock import SimClock

LAYOUT = CacheLayout(groups=(ObjectGroup(GroupKind.FULL, 4, 64),), ranks=1, chunk_tokens=4)
IDENTITY = identity_of(Namespace("m", chunk_tokens=4), LAYOUT, Placement())
LOOKUP = wire.Lookup("s", 1, 7, 0, b"", [b"h" * 32], 8, 0, "", 50)
STORE = wire.Store("w", "w:1/0", 0, "", [(0, b"h" * 32)])


class Wire:
    """A client transport whose other end is the test: it sees what was sent and says what comes back."""

    def __init__(self) -> None:
        self.sent: list[tuple[Header, wire.Request]] = []
        self._callback: Callable[[bytes], None] = lambda payload: None

    def send(self, payload: bytes) -> bool:
        header = wire.read_header(payload)
        assert header is not None
        self.sent.append((header, wire.read_request(payload)))
        return True

    def receive(self, callback: Callable[[bytes], None]) -> None:
        self._callback = callback

    def close(self) -> None:
        return None

    def answer(self, index: int, reply: Any, incarnation: int) -> None:
        """Reply to the message at `index` of what was sent, as a server of this life."""
        header = self.sent[index][0]
        self._callback(wire.pack(header._replace(incarnation=incarnation), reply))

    def names(self, start: int = 0) -> list[str]:
        return [type(message).__name__ for _, message in self.sent[start:]]


@pytest.mark.parametrize(
    ("request_", "debt", "key"),
    [
        (LOOKUP, wire.EndSession("s", 7), "session:s"),
        (LOOKUP, wire.Release("s", 1, 7), "session:s"),
        (STORE, wire.Abort("w", "w:1/0"), "store:w:1/0"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_owed_about_a_surviving_request_is_sent_behind_it(request_: Any, debt: Any, key: str) -> None:
    async def whole() -> None:
        ends = Wire()
        connection = Connection(ends, IDENTITY, SimClock(loop))
        await greet(connection, ends, 1)
        connection.request(request_, lambda reply: None)
        connection.owe(key, debt)
        connection.owe("session:other", wire.EndSession("other", 3))
        start = len(ends.sent)
        ends.answer(start - 2, Error(ErrorCode.STALE_INCARNATION, ""), 2)
        await loop_turns(loop)
        ends.answer(start, wire.Welcome(wire.ServerLimits()), 2)
        await loop_turns(loop)
        assert ends.names(start) == ["Hello", type(request_).__name__, type(debt).__name__]
        assert all(header.incarnation == 2 for header, _ in ends.sent[start + 1 :])
        assert connection.statistics().debts == 1
        ends.answer(start + 1, wire.Unknown(), 2)
        ends.answer(start + 2, wire.Unknown(), 2)
        assert connection.statistics().debts == 0
        connection.close()

    with SimLoop(0) as loop:
        loop.run_until_complete(whole())


def test_what_is_owed_about_anything_else_is_void() -> None:
    async def whole() -> None:
        ends = Wire()
        connection = Connection(ends, IDENTITY, SimClock(loop))
        await greet(connection, ends, 1)
        connection.owe("session:s", wire.EndSession("s", 7))
        connection.request(wire.Query("s", 1, 7), lambda reply: None)
        start = len(ends.sent)
        ends.answer(start - 1, Error(ErrorCode.STALE_INCARNATION, ""), 2)
        await loop_turns(loop)
        assert connection.statistics().debts == 0
        assert ends.names(start) == []
        connection.close()

    with SimLoop(0) as loop:
        loop.run_until_complete(whole())


async def greet(connection: Connection, ends: Wire, incarnation: int) -> None:
    """Shake hands with a server of this life."""
    connection.request(wire.Ping("w"), lambda reply: None)
    ends.answer(0, wire.Welcome(wire.ServerLimits()), incarnation)
    ends.answer(1, wire.Done(), incarnation)


async def loop_turns(loop: SimLoop) -> None:
    """Let what was called soon run; virtual time stays short of every time-out."""
    done = loop.create_future()
    loop.call_later_ns(1000, done.set_result, None)
    await done


def test_a_session_that_had_ended_is_ended_again_where_a_restarted_server_begins_its_lookup() -> None:
    """The END was answered by the old life, which had never seen the LOOKUP; the new life gets the LOOKUP."""

    async def whole() -> None:
        ends = Wire()
        connection = Connection(ends, IDENTITY, SimClock(loop))
        await greet(connection, ends, 1)
        client = SchedulerClient([connection], Placement(), LAYOUT, SimClock(loop))
        start = len(ends.sent)
        client.start("s", 1, [b"h" * 32], prompt_tokens=8)
        client.end("s")
        ends.answer(start + 1, wire.Unknown(), 1)
        assert connection.statistics().debts == 0
        await restart_after(loop, connection, ends)
        assert ends.names(start) == ["Lookup", "EndSession", "Ping", "Hello", "Lookup"]
        ends.answer(start + 4, wire.Ack(), 2)
        assert ends.names(start + 5) == ["EndSession"]
        assert ends.sent[-1][1] == ends.sent[start + 1][1]
        ends.answer(start + 5, wire.Done(), 2)
        assert connection.statistics().debts == 0
        connection.close()

    with SimLoop(0) as loop:
        loop.run_until_complete(whole())


def test_a_store_that_was_given_up_is_given_up_again_where_a_restarted_server_begins_it() -> None:
    async def whole() -> None:
        ends = Wire()
        connection = Connection(ends, IDENTITY, SimClock(loop))
        await greet(connection, ends, 1)
        client = WorkerClient([connection], Placement(), LAYOUT, 0, "w", lambda segment: Nowhere())
        start = len(ends.sent)
        store = loop.create_task(client.reserve_store("t", [StoreCell(0, b"h" * 32)]), name="store")
        await loop_turns(loop)
        client.abort_store("t")
        ends.answer(start + 1, Error(ErrorCode.UNKNOWN_TAG, ""), 1)
        assert connection.statistics().debts == 0
        await restart_after(loop, connection, ends)
        assert ends.names(start) == ["Store", "Abort", "Ping", "Hello", "Register", "Store"]
        ends.answer(start + 5, wire.Reserved("", [Answer.RESERVED], [(0, 64, 1)]), 2)
        assert await store == [None]
        assert ends.names(start + 6) == ["Abort"]
        ends.answer(start + 6, wire.Finished([Answer.ABORTED]), 2)
        assert connection.statistics().debts == 0
        connection.close()

    with SimLoop(0) as loop:
        loop.run_until_complete(whole())


class Nowhere:
    """A segment that no test here looks into."""

    def view_range(self, offset: int, size: int) -> memoryview:
        return memoryview(bytearray(size))


async def restart_after(loop: SimLoop, connection: Connection, ends: Wire) -> None:
    """The next request finds the server in its second life, and the handshake is made."""
    connection.request(wire.Ping("w"), lambda reply: None)
    ends.answer(len(ends.sent) - 1, Error(ErrorCode.STALE_INCARNATION, ""), 2)
    await loop_turns(loop)
    ends.answer(len(ends.sent) - 1, wire.Welcome(wire.ServerLimits()), 2)
    await loop_turns(loop)

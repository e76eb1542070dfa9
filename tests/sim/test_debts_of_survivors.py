"""A request that goes on into a server's next life takes what is owed about it along.

Found by a climb in which servers restarted: a LOOKUP that was under way when its request ended was carried out by the
next life of the server, but the END that followed it had been dropped as a debt of the old one. Its leases stayed
until they ran out, and the staging of a STORE under its hold for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace
from kvcore.placement import Placement
from kvcore.service import protocol as wire
from kvcore.service.client import Connection, identity_of
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

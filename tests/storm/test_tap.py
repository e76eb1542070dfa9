"""What the storm hears on the wire: messages out of any pieces, and what is under way between them."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from kvcore.answers import Answer
from kvcore.ladder.storm.tap import FrameReader, Open, Tap
from kvcore.service import protocol as wire
from kvcore.service.protocol import PROTOCOL_VERSION, Error, ErrorCode, Header, Reply, Request

GREETING = bytes(64)
SLOT = (0, 64, 1)
STORE = wire.Store("w", "w/1", 0, "", [(0, b"h1"), (0, b"h2")])
RETRIEVE = wire.Retrieve("w", 1, "q", 0, 0, [(0, 0), (0, 1)])


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


class Talk:
    """One client and one server behind a tap."""

    def __init__(self) -> None:
        self.tap = Tap()
        self._ids = count(1)

    def ask(self, request: Request) -> int:
        number = next(self._ids)
        self.tap.request(wire.pack(Header(PROTOCOL_VERSION, number, 7, 5), request))
        return number

    def answer(self, number: int, reply: Reply, incarnation: int = 5) -> None:
        self.tap.reply(wire.pack(Header(PROTOCOL_VERSION, number, 7, incarnation), reply))


@pytest.mark.parametrize("piece", [1, 3, 64, 65, 4096])
def test_messages_are_found_however_the_bytes_arrive(piece: int) -> None:
    messages = [b"", b"short", b"x" * 300, b"last"]
    parts = [GREETING, frame(b"\x05READY", 4), *map(frame, messages[:3]), frame(b"la", 1), frame(b"st")]
    stream, reader, found = b"".join(parts), FrameReader(), []
    for start in range(0, len(stream), piece):
        found += reader.feed(stream[start : start + piece])
    assert found == messages


def test_a_store_is_open_from_its_request_until_its_commit_is_answered() -> None:
    talk = Talk()
    asked = talk.ask(STORE)
    assert talk.tap.open() == Open(stores=1, unanswered=1)
    talk.answer(asked, wire.Reserved("s", [Answer.RESERVED, Answer.RESIDENT], [SLOT, None]))
    assert talk.tap.open() == Open(stores=1)
    committed = talk.ask(wire.Commit("w", "w/1", b"\x01"))
    talk.answer(committed, wire.Finished([Answer.PUBLISHED, Answer.UNKNOWN]))
    assert talk.tap.open() == Open()


def test_a_store_without_room_is_not_open_and_is_counted() -> None:
    talk = Talk()
    talk.answer(talk.ask(STORE), wire.Reserved("s", [Answer.NO_SPACE, Answer.NO_SPACE], [None, None]))
    assert talk.tap.open() == Open()
    assert talk.tap.counts["cells_without_room"] == 2


def test_a_read_is_open_until_all_its_granted_cells_are_done() -> None:
    talk = Talk()
    talk.answer(talk.ask(RETRIEVE), wire.Granted("s", [SLOT, SLOT]))
    talk.answer(talk.ask(wire.LoadDone("w", 1, b"\x01")), wire.Finished([Answer.RELEASED, Answer.UNKNOWN]))
    assert talk.tap.open() == Open(reads=1)
    talk.answer(talk.ask(wire.LoadDone("w", 1, b"\x02")), wire.Finished([Answer.UNKNOWN, Answer.RELEASED]))
    assert talk.tap.open() == Open()
    assert talk.tap.counts["loads_broken"] == 0


def test_a_load_that_lost_its_lease_or_its_server_is_broken() -> None:
    talk = Talk()
    talk.answer(talk.ask(RETRIEVE), wire.Granted("s", [SLOT, None]))
    assert talk.tap.counts["loads_broken"] == 1
    talk.answer(talk.ask(wire.LoadDone("w", 1, b"\x01")), wire.Finished([Answer.EXPIRED]))
    assert talk.tap.counts["loads_broken"] == 2
    talk.ask(wire.Retrieve("w", 2, "q", 0, 0, [(0, 0)]))
    assert talk.tap.forget() == Open(reads=1, unanswered=1)
    assert talk.tap.counts["loads_broken"] == 3
    assert talk.tap.open() == Open()


def test_a_lookup_is_open_until_it_is_answered_with_more_than_pending() -> None:
    talk = Talk()
    talk.answer(talk.ask(wire.Lookup("q", 0, 1, 0, b"", [b"h1"], 16, 0, "", 1000)), wire.Ack())
    talk.answer(talk.ask(wire.Query("q", 0, 1)), wire.Pending())
    assert talk.tap.open() == Open(lookups=1)
    talk.answer(talk.ask(wire.Query("q", 0, 1)), wire.Ready(b"\x01"))
    assert talk.tap.open() == Open()


def test_a_client_that_is_welcomed_by_two_lives_is_a_reunion() -> None:
    talk = Talk()
    talk.answer(1, wire.Welcome(wire.ServerLimits()))
    talk.answer(2, wire.Welcome(wire.ServerLimits()))
    assert talk.tap.reunions == 0
    talk.answer(3, wire.Welcome(wire.ServerLimits()), incarnation=6)
    assert talk.tap.reunions == 1


def test_refusals_and_what_cannot_be_read_are_counted() -> None:
    talk = Talk()
    talk.answer(talk.ask(RETRIEVE), Error(ErrorCode.STALE_INCARNATION, "restarted"))
    talk.tap.request(b"noise")
    talk.tap.reply(b"noise")
    assert talk.tap.counts["error_stale_incarnation"] == 1
    assert talk.tap.counts["unreadable"] == 2
    assert talk.tap.open() == Open()


def test_a_moment_comes_with_the_next_request_of_its_kind_or_not_at_all() -> None:
    async def main() -> None:
        talk = Talk()
        waiting = asyncio.ensure_future(talk.tap.moment("loading", 20.0))
        await asyncio.sleep(0)
        talk.ask(STORE)
        await asyncio.sleep(0)
        assert not waiting.done()
        talk.ask(RETRIEVE)
        assert await waiting
        assert not await talk.tap.moment("looking", 0.01)
        assert await talk.tap.moment("any", 0.0)

    asyncio.run(main())

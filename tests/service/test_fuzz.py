"""A hundred thousand malformed frames: the server stays up, answers others, and does not grow."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace
from kvcore.placement import Placement
from kvcore.service import protocol as wire
from kvcore.service.client import identity_of
from kvcore.service.protocol import PROTOCOL_VERSION, Header

Serve = Callable[..., Any]

FRAMES = 100_000
BURST = 500
GROWTH_BYTES_MAX = 8 << 20
CHUNK = 16
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, CHUNK, 4096),), ranks=1, chunk_tokens=CHUNK)
IDENTITY = identity_of(Namespace("fuzz", layout=LAYOUT.fingerprint, chunk_tokens=CHUNK), LAYOUT, Placement())
SMALL_TABLES = {
    "KVCORE_LIMITS_SESSIONS_MAX": "64",
    "KVCORE_LIMITS_WORKERS_MAX": "16",
    "KVCORE_LIMITS_OPEN_PER_WORKER_MAX": "64",
    "KVCORE_LIMITS_CONNECTIONS_MAX": "64",
}


class Peer:
    """A bare socket that says anything and forgets the answers."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self._socket.connect(address)
        self.answers = 0

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def ask(self, frame: bytes) -> wire.Reply:
        self._socket.send(frame)
        return wire.read_reply(self._socket.recv())

    def hear(self, count: int) -> list[bytes]:
        """The next `count` answers: every frame gets one."""
        self.answers += count
        return [self._socket.recv() for _ in range(count)]

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


class Fuzz:
    """Frames that are wrong in a drawn way, from a seed."""

    def __init__(self, seed: int, incarnation: int) -> None:
        self._draw = random.Random(seed)
        self._number = 1
        self._incarnation = incarnation

    def frames(self) -> Iterator[tuple[bytes, ...]]:
        kinds = (self._noise, self._cut, self._flipped, self._version, self._unknown, self._fine, self._deep)
        while True:
            yield self._draw.choice(kinds)()

    def _noise(self) -> tuple[bytes, ...]:
        return (self._draw.randbytes(self._draw.choice((0, 1, 2, 27, 28, 64, 700))),)

    def _cut(self) -> tuple[bytes, ...]:
        frame = self._frame()
        return (frame[: self._draw.randrange(len(frame))],)

    def _flipped(self) -> tuple[bytes, ...]:
        frame = bytearray(self._frame())
        for _ in range(self._draw.choice((1, 1, 3, 20))):
            frame[self._draw.randrange(len(frame))] ^= 1 << self._draw.randrange(8)
        return (bytes(frame),)

    def _version(self) -> tuple[bytes, ...]:
        frame = bytearray(self._frame())
        frame[2] = self._draw.randrange(256)  # behind the two bytes of the magic
        return (bytes(frame),)

    def _unknown(self) -> tuple[bytes, ...]:
        return (self._frame()[: wire.HEADER_BYTES] + b"\x81\xa2op\xa5dance",)

    def _fine(self) -> tuple[bytes, ...]:
        return (self._frame(),)

    def _deep(self) -> tuple[bytes, ...]:
        """Nested arrays, a length that is not there, several frames in one message."""
        head = self._frame()[: wire.HEADER_BYTES]
        return self._draw.choice(((head + b"\x91" * 3000,), (head + b"\xdd\xff\xff\xff\xff",), (head, b"more", b"")))

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _frame(self) -> bytes:
        draw = self._draw
        number = draw.choice((self._next(), 0, 2**63))
        incarnation = draw.choice((self._incarnation, 0, 99))
        return wire.pack(Header(PROTOCOL_VERSION, number % 2**64, draw.choice((5, 6)), incarnation), self._message())

    def _message(self) -> wire.Request:
        draw, name = self._draw, f"x{self._draw.randrange(200)}"
        hashes = [draw.randbytes(32) for _ in range(draw.randrange(5))]
        return draw.choice(
            (
                wire.Hello(IDENTITY, draw.choice((0, 0, 7))),
                wire.Lookup(name, 1, 1, draw.randrange(3), b"", hashes, 16 * len(hashes), 0, "", 50),
                wire.Query(name, 1, 1, draw.choice((False, True))),
                wire.Settle(name, 1, 1, draw.randrange(9)),
                wire.EndSession(name, draw.randrange(3)),
                wire.Register(name, draw.randrange(3), "1:2:3"),
                wire.Store(name, 0, name, "", [(draw.randrange(3), key) for key in hashes]),
                wire.Commit(name, name, b"\xff"),
                wire.Retrieve(name, draw.randrange(9), name, 1, 0, [(0, draw.randrange(3))]),
                wire.LoadDone(name, draw.randrange(9), b"\x01"),
                wire.StorePages(name, name, 0, "", [(draw.randrange(3), key, [draw.getrandbits(9)]) for key in hashes]),
                wire.RetrievePages(name, name, name, 1, 0, [(0, draw.randrange(3), [draw.getrandbits(9)])]),
                wire.Copies(name, name, draw.randbytes(2)),
                wire.Clear(),
            )
        )


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def fuzzed(serve: Serve) -> Iterator[tuple[Any, Peer, Peer, int]]:
    """A server with small tables, a peer that shakes hands and then goes wild, an honest one, the incarnation."""
    server = serve("--chunk-tokens", str(CHUNK), environ=SMALL_TABLES)
    wild, honest = Peer(server.address), Peer(server.address)
    wild.say(wire.pack(Header(PROTOCOL_VERSION, 1, 5, 0), wire.Hello(IDENTITY, 0)))
    header = wire.read_header(wild.hear(1)[0])
    assert header is not None
    yield server, wild, honest, header.incarnation
    wild.close()
    honest.close()


def test_malformed_frames_are_answered_and_cost_nothing(fuzzed: tuple[Any, Peer, Peer, int]) -> None:
    server, wild, honest, incarnation = fuzzed
    frames = Fuzz(7, incarnation).frames()
    settled = 0
    for sent in range(0, FRAMES, BURST):
        for _ in range(BURST):
            wild.say(*next(frames))
        wild.hear(BURST)
        if sent == 10_000:
            settled = rss_bytes(server.pid)
        if sent % 5000 == 0:
            assert isinstance(honest.ask(_status(sent + 1)), wire.StatusReply)
    assert wild.answers == FRAMES + 1
    assert server.alive
    assert rss_bytes(server.pid) - settled <= GROWTH_BYTES_MAX
    reply = honest.ask(_status(FRAMES + 1))
    assert isinstance(reply, wire.StatusReply)
    assert reply.counters["errors_malformed"] > FRAMES // 10
    assert reply.counters.get("errors_internal", 0) == 0, "a frame has found a bug"
    assert "Traceback" not in server.text


def test_a_message_over_the_limit_disconnects_its_sender_and_nobody_else(fuzzed: tuple[Any, Peer, Peer, int]) -> None:
    server, wild, honest, _ = fuzzed
    wild.say(b"x" * (17 << 20))
    assert isinstance(honest.ask(_status(1)), wire.StatusReply)
    assert server.alive


def _status(number: int) -> bytes:
    return wire.pack(Header(PROTOCOL_VERSION, number, 9, 0), wire.Status())

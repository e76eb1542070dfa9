"""A peer that says anything to a server, in the middle of a climb: every frame is answered, and no output changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from kvcore.ladder.pressure import Press, climb_pressed, floors
from kvcore.ladder.result import Floors
from kvcore.ports import ClientTransport
from kvcore.service import protocol as wire
from kvcore.service.identity import identity_of
from kvcore.service.protocol import Error, Header
from kvcore.service.shapes import PageGroup, PageSegment
from kvcore.sim.engine.engine import Engine
from kvcore.sim.workload import Draws

pytestmark = pytest.mark.ladder

REQUESTS = 40
LOADED = Floors(requests=REQUESTS, loads_verified=1)
NUMBER = 0xBAD
LONG = "x" * 300
HASH = b"h" * 32
OTHERS = "f00-0#1"  # a session that the engine has
FINE = wire.Lookup("mallory", 1, 1, 0, b"", [HASH, HASH[::-1]], 64, 0, "", 50)


def requests() -> Iterator[wire.Request]:
    """What somebody without an engine, and without manners, may ask."""
    yield from (wire.Query(name, 1, 1) for name in (OTHERS, "nobody"))
    yield from (wire.Settle(name, 1, 1, length) for name, length in ((OTHERS, 0), ("nobody", 1), ("nobody", 1 << 40)))
    yield from (wire.Release(OTHERS, 1, 99), wire.EndSession(OTHERS, 99))
    yield FINE
    yield from (wire.Query("mallory", 1, 1), wire.Settle("mallory", 1, 1, 1), wire.Settle("mallory", 1, 1, 0))
    yield wire.Lookup("mallory", 1, 2, 1, HASH[::-1], [HASH], 64, 0, "", 50)
    yield wire.Lookup("nobody", 1, 1, 1, HASH, [HASH], 64, 0, "", 50)
    yield wire.Lookup(OTHERS, 1, 1, 0, b"", [HASH], 64, 0, "", 50)
    yield wire.Lookup("m2", 1, 1, 0, b"", [HASH], 3, 0, "", 50)
    yield wire.Lookup("m2", 1, 1, 0, b"", [], 64, 0, "", 50)
    yield wire.Lookup("m2", 1, 1, 1 << 30, HASH, [HASH], 64, 0, "", 50)
    yield wire.Lookup("m2", 1, 1, 0, b"", [HASH], 64, 0, "", 1 << 40)
    yield wire.Lookup("m2", 1, 1, 0, b"", [HASH * 3], 64, 0, "", 50)
    yield wire.Lookup("m2", 1, 1, 0, b"", [HASH], 64, 0, LONG, 50)
    yield wire.Lookup(LONG, 1, 1, 0, b"", [HASH], 64, 0, "", 50)
    yield wire.Ping("mallory")
    yield from (wire.Register(LONG, 0), wire.Register("mallory", 99), wire.Register("mallory", 0))
    yield from (wire.Ping("mallory"), wire.Register("mallory", 1), wire.Register("mallory", 0))
    yield wire.Store("mallory", "t", 1, "", [(0, HASH)])
    yield wire.Store("mallory", "t", 0, "", [(99, HASH)])
    yield wire.Store("mallory", LONG, 0, "", [(0, HASH)])
    yield wire.Store("mallory", "t", 0, "", [(0, HASH * 3)])
    yield wire.Store("mallory", "t", 0, "", [(0, HASH)] * 9000)
    yield wire.Store("mallory", "t", 0, "", [(0, HASH), (0, HASH)])
    yield wire.Store("mallory", "t", 0, "", [(0, HASH)])
    yield wire.Commit("mallory", "t", b"\xff" * 9000)
    yield from (wire.Commit("mallory", "t", b""), wire.Commit("mallory", "t", b"\1"), wire.Abort("mallory", "t"))
    yield wire.Retrieve("mallory", 1, OTHERS, 1, 0, [(0, 0), (0, 1)])
    yield wire.Retrieve("mallory", 2, "nobody", 1, 0, [(0, 0)])
    yield wire.Retrieve("mallory", 3, OTHERS, 1, 0, [(0, 1 << 40)])
    yield from (
        wire.LoadDone("mallory", 1, b"\3"),
        wire.LoadDone("mallory", 1, b"\3"),
        wire.LoadDone("mallory", 9, b"\1"),
    )
    pages = PageSegment("kvcore-mallory", 1 << 20, (PageGroup(0, 8, 64, 64),))
    yield from (wire.Register("mallory", 0, "", pages), wire.StorePages("mallory", "p", 0, "", [(0, HASH, [1 << 62])]))
    yield wire.RetrievePages("mallory", "p", OTHERS, 1, 0, [(0, 0, [1]), (99, 0, [])])
    yield from (wire.Copies("mallory", "p", b"\xff"), wire.Copies("mallory", LONG, b"\xff" * 9000))
    yield from (wire.Status(), wire.Clear(), wire.EndSession("mallory", 9), wire.Unregister("mallory"))
    yield wire.Abort("mallory", "t")
    yield from (wire.EndSession(name, 99) for name in (OTHERS, "nobody", "m2"))


class Hostile(Press):
    """Shakes hands, asks everything, and throws torn, foreign and repeated frames in between."""

    def __init__(self) -> None:
        self.sent = 0
        self.replies: Counter[str] = Counter()
        self._incarnation = 0

    async def during(self, rung: str, engine: Engine) -> None:
        port = self.world.network.connect("server0", f"mallory{rung}")
        port.receive(self._received)
        try:
            await self._talk(port, Draws(ord(rung[0]), "mallory"))
            await asyncio.sleep(1000)
        finally:
            port.close()

    async def _talk(self, port: ClientTransport, draws: Draws) -> None:
        identity = self._identity()
        await self._send(port, b"", b"KV", b"not a frame at all, but long enough to hold a header" * 2)
        await self._send(port, self._frame(1, wire.Query("early", 1, 1)))
        for index, hello in enumerate((wire.Hello(identity, 7), wire.Hello(identity, 0)), 1):
            await self._send(port, self._frame(index, hello))
        for number, request in enumerate(requests(), 3):
            frame = self._frame(number, request)
            await self._send(port, frame, frame, frame[: draws.below(len(frame))], frame + b"\xc1")
        await self._send(port, b"KV\x09" + self._frame(900, FINE)[3:], self._frame(901, FINE, incarnation=5))
        await self._send(port, self._frame(902, FINE)[:27] + b"\x81\xa2op\xa5dance", b"\0" * (9 << 20))

    def _identity(self) -> wire.Identity:
        config = self.stack.config
        return identity_of(config.namespace, config.layout, config.placement)

    def _frame(self, number: int, message: wire.Request, incarnation: int = 0) -> bytes:
        header = Header(wire.PROTOCOL_VERSION, number, NUMBER, incarnation or self._incarnation)
        return wire.pack(header, message)

    async def _send(self, port: ClientTransport, *frames: bytes) -> None:
        for frame in frames:
            self.sent += port.send(frame)
        await asyncio.sleep(0.0002)

    def _received(self, payload: bytes) -> None:
        header, reply = wire.read_header(payload), wire.read_reply(payload)
        assert header is not None
        self._incarnation = header.incarnation
        self.replies[reply.code.value if isinstance(reply, Error) else type(reply).__name__] += 1


def test_a_hostile_peer_is_answered_and_changes_no_output() -> None:
    press = Hostile()
    demands = floors(REQUESTS, r3=LOADED, r4=LOADED, rreplay=LOADED)
    climbed = climb_pressed("full+window/r2/s1/async", press=press, demands=demands)
    assert climbed.problems == []
    assert press.replies.total() == press.sent > 1000
    assert {"malformed", "too_large", "version", "unknown_operation", "invalid", "mismatch", "hello_required"} <= set(
        press.replies
    )
    assert {"stale_incarnation", "duplicate", "base_mismatch", "unknown_worker", "unknown_tag"} <= set(press.replies)
    assert "bad_pages" in press.replies, "these servers do not copy; they say so"
    assert "internal" not in press.replies

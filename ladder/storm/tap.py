"""`Tap`: reads along what an engine and one server say to each other, and so knows what is under way at any moment.

Theory of operation
-------------------
A link hands over every byte it has forwarded. `FrameReader` cuts a ZMTP 3 stream into messages (a greeting of 64 bytes;
then frames of flags, length and body; commands are skipped), and the messages are read with the service's own decoder.

    store   STORE --> open --COMMIT or ABORT answered, or refused--> ended
    read    RETRIEVE --> open --LOAD_DONE answered for all its granted cells, or refused--> ended
    copies  STORE_PAGES, RETRIEVE_PAGES --> open, as store or read --COPIED names none that runs, or refused--> ended
    lookup  LOOKUP --> open --QUERY answered with anything but "pending", or refused, or END_SESSION--> ended

So a storm can wait for a moment (`moment`) in which something is open, and can count what it has hit. What is said here
comes from the wire alone, not from the counters of the code that is on trial.

Who holds: the tap is one link's; it holds no connection. Who announces: `request` and `reply`, when the link calls
them. When a server's life or the engine's has ended, `forget` drops what was open and tells how much that was.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvcore.answers import Answer
from kvcore.service import protocol as wire

_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class FrameReader:
    """One direction of one ZMTP connection: bytes in, whole messages out."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._skip = _GREETING_BYTES
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that end within `data`."""
        self._data += data
        skipped = min(self._skip, len(self._data))
        del self._data[:skipped]
        self._skip -= skipped
        messages = []
        while (frame := self._frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                continue
            self._parts.append(body)
            if not flags & _MORE:
                messages.append(b"".join(self._parts))
                self._parts = []
        return messages

    def _frame(self) -> tuple[int, bytes] | None:
        head = 9 if self._data and self._data[0] & _LONG else 2
        if len(self._data) < head:
            return None
        end = head + int.from_bytes(self._data[1:head], "big")
        if len(self._data) < end:
            return None
        flags, body = self._data[0], bytes(self._data[head:end])
        del self._data[:end]
        return flags, body


@dataclass(frozen=True, slots=True)
class Open:
    """What was under way at one moment. `unanswered`: requests of any kind."""

    stores: int = 0
    reads: int = 0
    lookups: int = 0
    unanswered: int = 0

    def __add__(self, other: Open) -> Open:
        return Open(
            self.stores + other.stores,
            self.reads + other.reads,
            self.lookups + other.lookups,
            self.unanswered + other.unanswered,
        )

    def __str__(self) -> str:
        return f"{self.stores} stores, {self.reads} loads, {self.lookups} lookups, {self.unanswered} unanswered"


MOMENTS: dict[str, Callable[[Open], bool]] = {
    "any": lambda now: True,
    "storing": lambda now: now.stores > 0,
    "loading": lambda now: now.reads > 0,
    "looking": lambda now: now.lookups > 0,
    "talking": lambda now: now.unanswered > 0,
}


class Tap:
    """See the module text. On the loop of its link."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._asked: dict[tuple[int, int], wire.Request] = {}
        self._stores: set[tuple[str, str]] = set()
        # By worker and ticket or tag: the granted cells that are open; None: not answered yet, or the server copies.
        self._reads: dict[tuple[str, int | str], int | None] = {}
        self._lookups: set[tuple[str, int]] = set()
        self._lives: dict[int, set[int]] = {}  # by connection: the server's lives it has been welcomed by
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    def open(self) -> Open:
        return Open(len(self._stores), len(self._reads), len(self._lookups), len(self._asked))

    def forget(self) -> Open:
        """A life has ended. What was under way then is over, one way or another."""
        now = self.open()
        self.counts["loads_broken"] += len(self._reads)
        self._asked.clear()
        self._stores.clear()
        self._reads.clear()
        self._lookups.clear()
        return now

    @property
    def reunions(self) -> int:
        """Connections of clients that went on with another life of the server."""
        return sum(len(lives) > 1 for lives in self._lives.values())

    async def moment(self, name: str, patience_s: float) -> bool:
        """Return at the next moment of that kind: True; False if none comes in time."""
        if MOMENTS[name](self.open()) and name == "any":
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, waiter))
        done, _ = await asyncio.wait([waiter], timeout=patience_s)
        self._waiting = [entry for entry in self._waiting if entry[1] is not waiter]
        return bool(done)

    # -- what the link hands over

    def request(self, payload: bytes) -> None:
        header = wire.read_header(payload)
        if header is None:
            self.counts["unreadable"] += 1
            return
        try:
            message = wire.read_request(payload)
        except wire.UndecodableError:
            self.counts["unreadable"] += 1
            return
        self.counts[f"{_name(message)}_asked"] += 1
        self._asked[header.connection, header.request_id] = message
        if isinstance(message, wire.Store | wire.StorePages):
            self._stores.add((message.worker, message.tag))
        elif isinstance(message, wire.Retrieve):
            self._reads[message.worker, message.ticket] = None
        elif isinstance(message, wire.RetrievePages):
            self._reads[message.worker, message.tag] = None
        elif isinstance(message, wire.Lookup):
            self._lookups.add((message.session, message.epoch))
        self._wake()

    def reply(self, payload: bytes) -> None:
        header = wire.read_header(payload)
        if header is None:
            self.counts["unreadable"] += 1
            return
        try:
            message = wire.read_reply(payload)
        except wire.UndecodableError:
            self.counts["unreadable"] += 1
            return
        if isinstance(message, wire.Welcome):
            self._lives.setdefault(header.connection, set()).add(header.incarnation)
        if isinstance(message, wire.Error):
            self.counts[f"error_{message.code.value}"] += 1
        asked = self._asked.pop((header.connection, header.request_id), None)
        if asked is not None:
            self._answered(asked, message)

    def _answered(self, asked: wire.Request, reply: wire.Reply) -> None:
        if isinstance(asked, wire.Store):
            self._store_answered(asked, reply)
        elif isinstance(asked, wire.Commit | wire.Abort):
            self._stores.discard((asked.worker, asked.tag))
        elif isinstance(asked, wire.Retrieve):
            self._retrieve_answered(asked, reply)
        elif isinstance(asked, wire.LoadDone):
            self._load_answered(asked, reply)
        elif isinstance(asked, wire.StorePages | wire.RetrievePages | wire.Copies):
            self._copies_answered(asked, reply)
        elif isinstance(asked, wire.Lookup | wire.Query) and not isinstance(reply, wire.Ack | wire.Pending):
            self._lookups.discard((asked.session, asked.epoch))
        elif isinstance(asked, wire.EndSession):
            self._lookups = {(session, epoch) for session, epoch in self._lookups if session != asked.session}

    def _store_answered(self, asked: wire.Store, reply: wire.Reply) -> None:
        if isinstance(reply, wire.Reserved):
            self.counts["cells_without_room"] += sum(answer is Answer.NO_SPACE for answer in reply.answers)
            if any(slot is not None for slot in reply.slots):
                return
        self._stores.discard((asked.worker, asked.tag))

    def _retrieve_answered(self, asked: wire.Retrieve, reply: wire.Reply) -> None:
        slots = reply.slots if isinstance(reply, wire.Granted) else [None] * len(asked.cells)
        granted = sum(1 << bit for bit, slot in enumerate(slots) if slot is not None)
        if granted:
            self._reads[asked.worker, asked.ticket] = granted
        else:
            self._reads.pop((asked.worker, asked.ticket), None)
        self.counts["loads_broken"] += len(asked.cells) > granted.bit_count()

    def _load_answered(self, asked: wire.LoadDone, reply: wire.Reply) -> None:
        key = asked.worker, asked.ticket
        answers = reply.answers if isinstance(reply, wire.Finished) else []
        done = wire.unpack_bits(asked.done)
        bad = [
            bit for bit in range(done.bit_length()) if done >> bit & 1 and _answer(answers, bit) is not Answer.RELEASED
        ]
        granted = self._reads.get(key) or 0
        self.counts["loads_broken"] += any(granted >> bit & 1 for bit in bad)
        left = granted & ~done if isinstance(reply, wire.Finished) else 0
        if left:
            self._reads[key] = left
        else:
            self._reads.pop(key, None)

    def _copies_answered(self, asked: wire.StorePages | wire.RetrievePages | wire.Copies, reply: wire.Reply) -> None:
        name = asked.worker, asked.tag
        answers = reply.answers if isinstance(reply, wire.Copied) else []
        if isinstance(asked, wire.StorePages):
            self.counts["cells_without_room"] += answers.count(Answer.NO_SPACE)
        if isinstance(reply, wire.Copied) and wire.unpack_bits(reply.running):
            return
        self._stores.discard(name)
        if name in self._reads:
            del self._reads[name]
            self.counts["loads_broken"] += not answers or any(answer is not Answer.RELEASED for answer in answers)

    def _wake(self) -> None:
        now = self.open()
        for name, waiter in self._waiting:
            if not waiter.done() and MOMENTS[name](now):
                waiter.set_result(None)


def _answer(answers: list[Answer], bit: int) -> Answer | None:
    return answers[bit] if bit < len(answers) else None


def _name(message: wire.Request) -> str:
    return str(message.__struct_config__.tag)

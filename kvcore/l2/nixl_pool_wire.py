"""What the users of a memory pool and the pool say to each other, over a unix socket.

A frame is its length (4 bytes, little endian) and one MessagePack message. A user asks, the pool answers, one at a
time. The bytes of records never come this way: NIXL moves them.

    Join      -> Welcome     first; versions must be equal
    Find      -> Lengths     per name, None where nothing is
    Reserve   -> Places      per (name, length): a place to write to, or "present", "busy", "full"
    Commit    -> Done        per number: filled well, or not
    Locate    -> Places      per name a place to read from, which stays until Release; or "missing"
    Release   -> Done
    Remove    -> Done        per name; with a number only if it still is that record
    List      -> Listed      page by page
    Measure   -> Measured

Nothing is held here. A frame that is longer than `FRAME_BYTES_MAX` or no message ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated, TypeAlias

import msgspec

from kvcore.errors import StoreError

VERSION = 1
FRAME_BYTES_MAX = 16 * 1024 * 1024
_LENGTH_BYTES = 4

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The base of all messages."""


class Join(Message, frozen=True):
    version: int


class Find(Message, frozen=True):
    names: list[bytes]


class Reserve(Message, frozen=True):
    records: list[tuple[bytes, Positive]]


class Commit(Message, frozen=True):
    records: list[tuple[int, bool]]


class Locate(Message, frozen=True):
    names: list[bytes]


class Release(Message, frozen=True):
    pass


class Remove(Message, frozen=True):
    records: list[tuple[bytes, int | None]]


class List(Message, frozen=True):
    """The next records of this connection's listing. `start`: of a new one, as everything is now."""

    start: bool
    limit: Positive


class Measure(Message, frozen=True):
    pass


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where a record lies in the pool's memory."""

    offset: int
    length: int
    number: int


class Welcome(Message, frozen=True):
    """`pool` names this life of the pool; `metadata` is its NIXL agent's, `base` the address of its memory there."""

    version: int
    pool: str
    metadata: bytes
    base: int


class Lengths(Message, frozen=True):
    lengths: list[int | None]


class Places(Message, frozen=True):
    places: list[Place | str]


class Done(Message, frozen=True):
    pass


class Listed(Message, frozen=True):
    """(name, length, nanoseconds since its last use)"""

    records: list[tuple[bytes, int, int]]


class Measured(Message, frozen=True):
    bytes_used: int
    bytes_capacity: int
    objects: int


Ask: TypeAlias = Join | Find | Reserve | Commit | Locate | Release | Remove | List | Measure
Answer: TypeAlias = Welcome | Lengths | Places | Done | Listed | Measured

_asks = msgspec.msgpack.Decoder(Ask)
_answers = msgspec.msgpack.Decoder(Answer)


def frame(message: Ask | Answer) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def send(sock: socket.socket, message: Ask) -> None:
    sock.sendall(frame(message))


async def read_ask(reader: asyncio.StreamReader) -> Ask:
    """OSError: it ended. StoreError: that was no message."""
    try:
        length = _checked(await reader.readexactly(_LENGTH_BYTES))
        return _asks.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("a user of the memory pool has closed the connection") from error
    except msgspec.MsgspecError as error:
        raise StoreError("a user of the memory pool sent something unknown") from error


def receive_answer(sock: socket.socket) -> Answer:
    """ConnectionError: the pool is gone. StoreError: that was no message."""
    try:
        length = _checked(_exactly(sock, _LENGTH_BYTES))
        return _answers.decode(_exactly(sock, length))
    except msgspec.MsgspecError as error:
        raise StoreError("the memory pool answered something unknown") from error


def _checked(prefix: bytes | bytearray) -> int:
    length = int.from_bytes(prefix, "little")
    if length > FRAME_BYTES_MAX:
        raise StoreError(f"a message of {length} bytes is too long for a memory pool")
    return length


def _exactly(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionResetError("the other side of a memory pool has closed the connection")
        view = view[got:]
    return data

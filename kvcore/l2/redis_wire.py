"""One connection to a Redis or Valkey server: commands out of, and answers into, the caller's own buffers.

Client libraries make a fresh `bytes` of every value, and the page faults of that cost more than the network. So this
is the protocol itself (RESP version 2, of which we need five answer types), over a plain, unix or TLS socket:

* a command is sent with `sendmsg`: its head, the caller's view, the line end, many commands in one call;
* a value is received into the caller's view, and what comes behind it into our buffer, by one call; only what came
  along with the line before it is copied. TLS has neither call; there each part is sent and received by itself.

Time. Each exchange has a `Deadline`: `timeout_s` for the server to answer plus the time that its bytes take at
`rate_bytes_per_s_min`. It bounds the whole exchange, so a server that gives one byte a second is given up too. The
system itself bounds each call (SO_SNDTIMEO, SO_RCVTIMEO), which it is told again only when what is left has become
a tenth shorter; so the end may come that tenth later. Python's own timeouts make two more system calls of each one and
cut a large value into pieces as long as the socket's buffer. TLS has to use them, and so do unix sockets, where the
system's bound begins anew with each packet of a call.

Errors. `ErrorAnswer` is the server's own "-..." line: the connection is still in step. Everything else (`OSError`, and
`StoreError` for bytes that are not the protocol) leaves it out of step, and its user closes it.

Who holds: the connection its socket and one small buffer; the caller all else. One user at a time, no thread safety.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, TypeVar

from kvcore.errors import StoreError
from kvcore.ports import Clock

_BUFFER_BYTES = 16 * 1024
_BEHIND_BYTES = 512  # the end of a value, and the line and header of the next one; payload would have to be copied
_LINE_BYTES_MAX = 4096
BULK_BYTES_MAX = 512 * 1024 * 1024  # the protocol's own limit; a larger length is not believed
_PARTS_MAX = 512  # of one sendmsg; systems take 1024
_DEPTH_MAX = 4
_NS_PER_S = 1_000_000_000
_US_PER_S = 1_000_000
_TIMEVAL = struct.Struct("@ll")
_LATE = 1.05  # by so much the system's bound is set longer than what is left,
_LATE_MAX = 1.1  # and set anew when it is longer than that
_CRLF = b"\r\n"

T = TypeVar("T")
R = TypeVar("R")

Part: TypeAlias = bytes | memoryview


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What the server answered instead of doing it, such as "OOM command not allowed ..."."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


Answer: TypeAlias = int | str | bytes | ErrorAnswer | list["Answer"] | None


class Deadline:
    """When an exchange is given up."""

    __slots__ = ("_clock", "_end_ns")

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._end_ns = clock.now_ns() + int(seconds * _NS_PER_S)

    def left_s(self) -> float:
        left_ns = self._end_ns - self._clock.now_ns()
        if left_ns <= 0:
            raise TimeoutError("the server did not answer in time")
        return left_ns / _NS_PER_S


def command(*words: bytes) -> list[Part]:
    """One command of short words."""
    return [b"*%d\r\n%b" % (len(words), packed(words))]


def opening_of(words: Sequence[bytes], words_after: int) -> bytes:
    """The beginning of a command up to its value: the same for each value, so it can be kept."""
    return b"*%d\r\n%b" % (len(words) + 1 + words_after, packed(words))


def command_with_value(opening: bytes, head: bytes, value: memoryview, closing: bytes) -> list[Part]:
    """`opening`, then `head` + `value` as one word, then `closing` (packed words). The value is not copied."""
    return [b"%b$%d\r\n%b" % (opening, len(head) + len(value), head), value, _CRLF + closing]


def packed(words: Sequence[bytes]) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Wire:
    """See the module text. `sock` is connected; the wire owns it from now on. `generation` is its pool's.

    `near`: the server is on this machine, so that waiting for an answer costs next to nothing.
    """

    def __init__(self, sock: socket.socket, generation: int) -> None:
        self.generation = generation
        self._socket = sock
        self._gathers = not hasattr(sock, "cipher")  # a TLS socket cannot
        self._bounded_by_system = self._gathers and sock.family != socket.AF_UNIX
        if self._bounded_by_system:
            sock.setblocking(True)
        self.near = _is_near(sock)
        self._bounds_s = {socket.SO_SNDTIMEO: 0.0, socket.SO_RCVTIMEO: 0.0}
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._behind = self._view[:_BEHIND_BYTES]
        self.closed = False
        self._start = 0  # unread bytes are buffer[start:end]
        self._end = 0

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    # --- out -----------------------------------------------------------------------------------------------------

    def send(self, commands: Sequence[Sequence[Part]], deadline: Deadline) -> None:
        parts = list(chain.from_iterable(commands))
        if self._gathers:
            self._gather(parts, deadline)
            return
        for part in parts:
            self._bounded(socket.SO_SNDTIMEO, deadline, self._socket.sendall, part)

    def _gather(self, parts: list[Part], deadline: Deadline) -> None:
        first = 0
        while first < len(parts):
            some = parts[first : first + _PARTS_MAX]
            sent = self._bounded(socket.SO_SNDTIMEO, deadline, self._socket.sendmsg, some)
            if sent == sum(map(len, some)):  # as a rule
                first += len(some)
                continue
            while sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            parts[first] = memoryview(parts[first])[sent:]

    # --- in ------------------------------------------------------------------------------------------------------

    def answer(self, deadline: Deadline) -> Answer:
        """The next answer, whatever it is. For small ones: a value becomes `bytes`."""
        return self._answer(deadline, _DEPTH_MAX)

    def bulk_length(self, deadline: Deadline) -> int | ErrorAnswer | None:
        """The length of the value that comes next, which `fill` and `end_bulk` then read. None: there is no value."""
        line = self._line(deadline)
        if line[:1] == b"-":
            return _error(line)
        if line[:1] != b"$":
            raise StoreError("the server answered with something else than a value")
        return _length(line)

    def take(self, count: int, deadline: Deadline) -> bytes:
        """The next few bytes of the value: no more than the buffer holds."""
        assert count <= _BUFFER_BYTES
        while self._end - self._start < count:
            self._refill(deadline)
        start, self._start = self._start, self._start + count
        return bytes(self._view[start : self._start])

    def fill(self, into: memoryview, deadline: Deadline) -> None:
        """The next bytes of the value."""
        filled = min(len(into), self._end - self._start)
        into[:filled] = self._view[self._start : self._start + filled]
        self._start += filled
        while filled < len(into):
            filled += self._scatter(into[filled:], deadline)

    def skip(self, count: int, deadline: Deadline) -> None:
        """Read on without keeping anything."""
        while count > 0:
            if self._start == self._end:
                self._refill(deadline)
            step = min(count, self._end - self._start)
            self._start += step
            count -= step

    def end_bulk(self, deadline: Deadline) -> None:
        while self._end - self._start < len(_CRLF):
            self._refill(deadline)
        self._start += len(_CRLF)
        if self._buffer[self._start - len(_CRLF) : self._start] != _CRLF:
            raise StoreError("a value of the server does not end where it should")

    def _answer(self, deadline: Deadline, depth: int) -> Answer:
        line = self._line(deadline)
        kind, text = line[:1], line[1:]
        if kind == b"+":
            return text.decode("utf-8", "replace")
        if kind == b"-":
            return _error(line)
        if kind == b":":
            return _number(text)
        if kind == b"$":
            return self._bulk(_length(line), deadline)
        if kind == b"*" and depth:
            return self._array(_length(line), deadline, depth)
        raise StoreError("the server does not speak the protocol of Redis")

    def _bulk(self, length: int | None, deadline: Deadline) -> bytes | None:
        if length is None:
            return None
        value = bytearray(length)
        self.fill(memoryview(value), deadline)
        self.end_bulk(deadline)
        return bytes(value)

    def _array(self, length: int | None, deadline: Deadline, depth: int) -> list[Answer] | None:
        return None if length is None else [self._answer(deadline, depth - 1) for _ in range(length)]

    def _line(self, deadline: Deadline) -> bytes:
        """The next line without its end. What follows it stays in the buffer."""
        while (at := self._buffer.find(_CRLF, self._start, self._end)) < 0:
            if self._end - self._start > _LINE_BYTES_MAX:
                raise StoreError("the server does not speak the protocol of Redis: a line does not end")
            self._refill(deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + len(_CRLF)
        return line

    def _refill(self, deadline: Deadline) -> None:
        left = self._end - self._start
        if left:
            self._buffer[:left] = self._buffer[self._start : self._end]
        self._start, self._end = 0, left
        self._end += self._receive(self._view[left:], deadline)

    def _scatter(self, into: memoryview, deadline: Deadline) -> int:
        """Receive into `into`, and what is behind it into the buffer, which is empty. How much of `into` was filled."""
        assert self._start == self._end
        if not self._gathers:
            return self._receive(into, deadline)
        count = self._bounded(socket.SO_RCVTIMEO, deadline, self._socket.recvmsg_into, [into, self._behind])[0]
        self._start, self._end = 0, max(0, count - len(into))
        return min(len(into), self._some(count))

    def _receive(self, into: memoryview, deadline: Deadline) -> int:
        return self._some(self._bounded(socket.SO_RCVTIMEO, deadline, self._socket.recv_into, into))

    def _bounded(self, direction: int, deadline: Deadline, call: Callable[[T], R], argument: T) -> R:
        """One call of the system. TimeoutError: it has not ended by the deadline, or soon after it."""
        if self.closed:
            raise StoreError("the connection was given up by its user")
        left_s = deadline.left_s()
        if not self._bounded_by_system:
            self._socket.settimeout(left_s)
        elif not left_s <= self._bounds_s[direction] <= left_s * _LATE_MAX:
            self._bound(direction, left_s * _LATE)
        try:
            return call(argument)
        except BlockingIOError:
            raise TimeoutError("the server did not answer in time") from None

    def _bound(self, direction: int, bound_s: float) -> None:
        value = _TIMEVAL.pack(*divmod(int(bound_s * _US_PER_S) + 1, _US_PER_S))  # 0 would be no bound at all
        self._socket.setsockopt(socket.SOL_SOCKET, direction, value)
        self._bounds_s[direction] = bound_s

    def _some(self, count: int) -> int:
        if count == 0:
            raise ConnectionResetError("the server has closed the connection")
        return count


def _error(line: bytes) -> ErrorAnswer:
    return ErrorAnswer(line[1:].decode("utf-8", "replace"))


def _length(line: bytes) -> int | None:
    """-1 says that there is nothing."""
    length = _number(line[1:])
    if length > BULK_BYTES_MAX:
        raise StoreError("the server announced a value that is too long to be true")
    return length if length >= 0 else None


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise StoreError("the server does not speak the protocol of Redis: a number is none") from error


def _is_near(sock: socket.socket) -> bool:
    if sock.family == socket.AF_UNIX:
        return True
    with suppress(OSError, ValueError):  # it has gone already
        return ipaddress.ip_address(sock.getpeername()[0].partition("%")[0]).is_loopback
    return False

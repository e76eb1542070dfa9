"""The ZeroMQ transport: a ROUTER server and DEALER clients, driven by the asyncio loop without tasks.

Theory of operation
-------------------
A ZeroMQ socket shows the loop one descriptor (`ZMQ_FD`) which says only "something has changed". What has changed is in
`ZMQ_EVENTS`, and reading that, sending or receiving takes the signal off the descriptor. From this follow the rules of
`_Socket`:

1. A *turn* (the descriptor is readable) always reads `ZMQ_EVENTS`, or the descriptor would stay readable for ever.
2. A turn receives until there is nothing more, but at most `_BURST_MESSAGES`. Then it gives way to the rest of the loop
   and schedules the next turn itself: the descriptor will not signal again for messages it has announced.
3. After a send, `ZMQ_EVENTS` is read too: a message that came in, or a connection that was made, during the send has no
   signal left. For either a turn is scheduled; nothing is ever delivered from inside `send`. A send from inside a turn
   leaves that to the end of the turn, which reads `ZMQ_EVENTS` anyhow: a server answers a burst with one look.
4. Nothing is received before `receive` was called; ZeroMQ's own queue keeps it.

Connections. The client sets `ZMQ_IMMEDIATE`: `send` answers False while there is no connection, instead of queueing
requests that some later incarnation of the server would find. One exception: before the *first* connection, messages
wait in a bounded backlog, because connecting takes a millisecond and a starting client is not a failing one.
ZeroMQ reconnects by itself; the server sees every connection under a new identity (we set none). What was in flight on
a broken connection is lost. The server sets `ZMQ_ROUTER_MANDATORY`: `send` to a peer that has gone answers False.

Hostile peers. A message over the limit disconnects its sender (`ZMQ_MAXMSGSIZE`, before memory is taken for it). A
message of several frames is not ours: the server gets it as an empty payload, which it answers as malformed.

Addresses: `ipc://` (socket 0600; its directory is the caller's to keep private) and `tcp://` on loopback. Other tcp
addresses need CURVE keys (`curve.py`): without them everybody on the network could read and write the cache. A path on
which another server answers is refused as well, because ZeroMQ would silently take it over.

Rejected: `zmq.asyncio` (a future and a task step per message; its ordering relies on that of tasks); a thread per
socket (the server is synchronous and must stay on the loop).

Who holds, announces, frees: a message belongs to ZeroMQ from `send` to the peer's callback. `close` drops what is
unsent (`LINGER` 0), so it never waits for a peer.
"""

from __future__ import annotations

import asyncio
import contextvars
import ipaddress
import os
import socket as sockets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

import zmq

from kvcore.errors import CallerError, ConfigError
from kvcore.runtime.confined import LoopConfined
from kvcore.service.curve import CurveClient, CurveServer, Gatekeeper
from kvcore.service.limits import MESSAGE_BYTES_MAX, QUEUE_MESSAGES_MAX, check_message

_BURST_MESSAGES = 256
_RECONNECT_MS = 20
_RECONNECT_MS_MAX = 1000
_CONNECT_TIMEOUT_MS = 3000
"""A connect that is not answered at all (a server that moved) is tried anew; the system would wait two minutes."""
_IPC = "ipc://"

# As plain numbers: arithmetic with the flags of an enum costs more than receiving a message.
_DONTWAIT = int(zmq.DONTWAIT)
_DONTWAIT_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)
_EVENTS = int(zmq.EVENTS)

Frames = list[bytes]


class _Socket:
    """One ZeroMQ socket on the loop: the rules in the module text, the same for both sides."""

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: int, bytes_max: int, messages_max: int) -> None:
        self._loop = loop
        self._bytes_max = bytes_max
        self._zmq_context = zmq.Context(io_threads=1)
        self._zmq = self._zmq_context.socket(kind)
        self._zmq.setsockopt(zmq.LINGER, 0)
        self._zmq.setsockopt(zmq.MAXMSGSIZE, bytes_max)
        self._zmq.setsockopt(zmq.SNDHWM, messages_max)
        self._zmq.setsockopt(zmq.RCVHWM, messages_max)
        self._fd = int(self._zmq.getsockopt(zmq.FD))
        self._confined = LoopConfined()
        self._deliver: Callable[[Frames], None] | None = None
        self._writable: Callable[[], None] | None = None
        self._context: contextvars.Context | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._turn_pending = False
        self._turning = False
        self._watching = False
        self._closed = False

    def set(self, option: int, value: int | bytes) -> None:
        self._zmq.setsockopt(option, value)

    def serve_curve(self, keys: CurveServer) -> None:
        """Only clients with a known key get through; before `bind`."""
        self._gatekeeper = Gatekeeper(self._zmq_context, keys.clients)
        self.set(zmq.CURVE_SERVER, 1)
        self.set(zmq.CURVE_SECRETKEY, keys.secret)

    def use_curve(self, keys: CurveClient) -> None:
        """Prove who we are, to that one server; before `connect`."""
        self.set(zmq.CURVE_SERVERKEY, keys.server)
        self.set(zmq.CURVE_PUBLICKEY, keys.public)
        self.set(zmq.CURVE_SECRETKEY, keys.secret)

    def bind(self, address: str) -> str:
        """The address as bound (with the port that was chosen)."""
        try:
            self._zmq.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        endpoint = self._zmq.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.rstrip(b"\0").decode()

    def connect(self, address: str, writable: Callable[[], None]) -> None:
        self._zmq.connect(address)
        self._writable = writable
        self._watch()

    def receive(self, deliver: Callable[[Frames], None]) -> None:
        """`deliver` runs in the context of this call."""
        self._deliver = deliver
        self._watch()
        self._schedule_turn()  # for what came before

    def send(self, frames: Frames) -> bool:
        sent = self._try_send(frames)
        if not self._turning:
            self._look_again(self._events(), refused=not sent)
        return sent

    def check_open(self) -> None:
        self._confined.check()
        if self._closed:
            raise CallerError("call on a closed transport")

    def check_payload(self, payload: bytes) -> None:
        check_message(payload, self._bytes_max)

    def close(self) -> None:
        if self._closed:
            return
        self._confined.check()
        self._closed = True
        self._deliver = None
        if self._watching and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._zmq.close(0)
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._zmq_context.term()

    def _watch(self) -> None:
        self._context = contextvars.copy_context()
        self._loop.add_reader(self._fd, self._turn)
        self._watching = True

    def _try_send(self, frames: Frames) -> bool:
        *heads, last = frames
        try:
            for head in heads:
                self._zmq.send(head, _DONTWAIT_MORE)
            self._zmq.send(last, _DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # no room or no connection; no such peer
                return False
            raise
        return True

    def _try_receive(self) -> Frames | None:
        """All frames of one message. Asking a `zmq.Frame` whether more follow is cheaper than asking the socket."""
        try:
            frame = self._zmq.recv(_DONTWAIT, copy=False)
        except zmq.Again:
            return None
        frames = [frame.bytes]
        while frame.more:
            frame = self._zmq.recv(_DONTWAIT, copy=False)
            frames.append(frame.bytes)
        return frames

    def _events(self) -> int:
        return int(self._zmq.getsockopt(_EVENTS))

    def _schedule_turn(self) -> None:
        if not self._turn_pending:
            self._turn_pending = True
            self._loop.call_soon(self._scheduled_turn, context=self._context)

    def _scheduled_turn(self) -> None:
        self._turn_pending = False
        self._turn()

    def _turn(self) -> None:
        if self._closed:
            return
        if not self._receive_burst():
            return
        events = self._events()  # last: what receiving and sending have noticed on the way is in it
        if events & _POLLOUT and self._writable is not None:
            self._writable()
        self._look_again(events, refused=False)

    def _receive_burst(self) -> bool:
        """Hand over what has arrived, up to a limit. False: a callback has closed this end."""
        self._turning = True
        try:
            for _ in range(_BURST_MESSAGES):
                frames = None if self._deliver is None else self._try_receive()
                if frames is None or self._deliver is None:
                    break
                self._hand_over(self._deliver, frames)
        finally:
            self._turning = False
        return not self._closed

    def _look_again(self, events: int, refused: bool) -> None:
        """Schedule a turn for what the descriptor no longer signals, because we have just read it."""
        receivable = self._deliver is not None and events & _POLLIN
        sendable = refused and self._writable is not None and events & _POLLOUT
        if receivable or sendable:
            self._schedule_turn()

    def _hand_over(self, deliver: Callable[[Frames], None], frames: Frames) -> None:
        try:
            deliver(frames)
        except Exception as error:
            self._loop.call_exception_handler({"message": "receive callback raised", "exception": error})
        except BaseException:
            if not self._closed:
                self._schedule_turn()
            raise


class ZmqServerTransport:
    """`kvcore.ports.ServerTransport` on a ROUTER socket. `address` tells where it really listens."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        queue_messages_max: int = QUEUE_MESSAGES_MAX,
        curve: CurveServer | None = None,
    ) -> None:
        check_address(address, with_keys=curve is not None)
        _check_unused(address)
        self._socket = _Socket(loop, zmq.ROUTER, message_bytes_max, queue_messages_max)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket_file: _SocketFile | None = None
        try:
            if curve is not None:
                self._socket.serve_curve(curve)
            self.address = self._socket.bind(address)
            if address.startswith(_IPC):
                self._socket_file = _SocketFile(address.removeprefix(_IPC))
        except BaseException:
            self._socket.close()
            raise

    def send(self, peer: bytes, payload: bytes) -> bool:
        self._socket.check_open()
        self._socket.check_payload(payload)
        return self._socket.send([peer, payload])

    def receive(self, callback: Callable[[bytes, bytes], None]) -> None:
        self._socket.check_open()
        self._socket.receive(lambda frames: callback(frames[0], frames[1] if len(frames) == 2 else b""))

    def close(self) -> None:
        if self._socket_file is not None:
            self._socket_file.remove()  # while we still listen: afterwards it may be somebody else's
            self._socket_file = None
        self._socket.close()


class ZmqClientTransport:
    """`kvcore.ports.ClientTransport` on a DEALER socket. Connects, and reconnects, in the background."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        queue_messages_max: int = QUEUE_MESSAGES_MAX,
        curve: CurveClient | None = None,
    ) -> None:
        check_address(address, with_keys=curve is not None)
        self._queue_messages_max = queue_messages_max
        self._backlog: deque[bytes] = deque()
        self._was_connected = False
        self._socket = _Socket(loop, zmq.DEALER, message_bytes_max, queue_messages_max)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
        self._socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        if curve is not None:
            self._socket.use_curve(curve)
        self._socket.connect(address, self._send_backlog)

    def send(self, payload: bytes) -> bool:
        self._socket.check_open()
        self._socket.check_payload(payload)
        if self._was_connected and not self._backlog:
            return self._socket.send([payload])
        if len(self._backlog) >= self._queue_messages_max:
            return False
        self._backlog.append(payload)
        self._send_backlog()
        return True

    def receive(self, callback: Callable[[bytes], None]) -> None:
        self._socket.check_open()
        self._socket.receive(lambda frames: callback(frames[0]) if len(frames) == 1 else None)

    def close(self) -> None:
        self._socket.close()
        self._backlog.clear()

    def _send_backlog(self) -> None:
        """As much as the socket takes. Runs whenever the socket may have become writable."""
        while self._backlog and self._socket.send([self._backlog[0]]):
            self._was_connected = True
            self._backlog.popleft()


class _SocketFile:
    """The file of an ipc socket. ZeroMQ makes it with the default mode and leaves it behind."""

    def __init__(self, path: str) -> None:
        os.chmod(path, 0o600)
        self._path = path
        self._inode = os.stat(path).st_ino

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def check_address(address: str, *, with_keys: bool) -> None:
    """Raise `ConfigError` for an address that a transport must not use, with or without CURVE keys."""
    if address.startswith(_IPC + "/"):
        if with_keys:
            raise ConfigError(f"{address}: CURVE keys are for tcp; an ipc socket is protected by its file mode")
        return
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname:
        raise ConfigError(f"{address}: use ipc:///absolute/path or tcp://HOST:PORT")
    if not with_keys and not _is_loopback(parts.hostname):
        raise ConfigError(
            f"{address} is reachable from other machines: that needs CURVE keys (`kvcore keys`); without them use "
            "ipc:///absolute/path or tcp://127.0.0.1:PORT"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def _check_unused(address: str) -> None:
    """ZeroMQ replaces a socket file without asking; a living server behind it would lose its new clients."""
    if not address.startswith(_IPC):
        return
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        try:
            probe.connect(address.removeprefix(_IPC))
        except OSError:
            return
    raise ConfigError(f"{address}: another server listens there; stop it or choose another path")

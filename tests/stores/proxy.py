"""`Proxy`: a TCP proxy between a client and a real server, on which bytes can be slow, stuck, lost, cut off or changed.

It listens on a free loopback port and makes one connection to the server for each client that comes, with two threads
that pass bytes on. What goes wrong is set by attributes, at any time, and acts on the next bytes:

    latency_s           what comes from the server after a silence waits so long; what follows on its heels does not
    rate_bytes_per_s    both ways, 0: no limit
    refuse              new connections are reset
    blackhole           nothing is passed on any more, in either direction
    reset_after         the client's connection is reset after so many more bytes from the server
    end_after           the same with an orderly end (FIN)
    reset_each          each connection is reset after so many bytes from the server, as long as this is set
    flip_at             the byte so many bytes further on from the server is changed

The three byte counts count down over all connections together, act once, and are then None again. `heal()` takes
everything back, and cuts the connections that a blackhole has swallowed something of: a stream with a hole is never
continued. `cut()` resets all connections now.

Waiting uses an event that `heal`, `cut` and `close` set, never a bare sleep. TCP in between is the kernel's own.
With `tls` (an SSL server context) clients speak TLS to the proxy, and the server plain TCP.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from contextlib import suppress

_PIECE_BYTES = 1 << 18
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close() sends RST


class _Passage:
    """One client's connection and ours to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.swallowed = False
        self.bytes_from_server = 0

    def end(self, reset: bool) -> None:
        """To the client an RST or a FIN, to the server a FIN. A thread that is blocked in recv() wakes up."""
        if reset:
            with suppress(OSError):
                self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        for sock in (self.client, self.server):
            # Shutting down the sending side of a connection to be reset would send a FIN first.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RD if reset and sock is self.client else socket.SHUT_RDWR)


class Proxy:
    """See the module text. Use as a context manager."""

    def __init__(self, target: tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self.target = target
        self.connections = 0  # accepted since the start
        self.bytes_from_server = 0
        self.latency_s = 0.0
        self.rate_bytes_per_s = 0
        self.refuse = False
        self.reset_after: int | None = None
        self.end_after: int | None = None
        self.reset_each: int | None = None
        self.flip_at: int | None = None
        self._blackhole = False
        self._tls = tls
        self.moved = threading.Event()  # set when bytes have come from the server; whoever waits clears it
        self._wake = threading.Event()
        self._state = threading.Lock()
        self._passages: set[_Passage] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.settimeout(None)
        self.host, self.port = self._listener.getsockname()
        self._start(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def blackhole(self) -> bool:
        return self._blackhole

    @blackhole.setter
    def blackhole(self, value: bool) -> None:
        self._blackhole = value
        if value:
            with self._state:
                for passage in self._passages:
                    passage.swallowed = True

    def heal(self) -> None:
        self.latency_s = 0.0
        self.rate_bytes_per_s = 0
        self.refuse = False
        self.reset_after = self.end_after = self.reset_each = self.flip_at = None
        self._blackhole = False
        self._end([passage for passage in self._open() if passage.swallowed])
        self._interrupt()

    def cut(self) -> None:
        self._end(self._open())
        self._interrupt()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread of the proxy hangs"

    # --- threads ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.refuse:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
            else:
                self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        """Connect to the server and pass both directions on; the last of the two threads closes."""
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(self.target, 5)
            server.settimeout(None)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            with suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        passage = _Passage(client, server)
        with self._state:
            passage.swallowed = self._blackhole
            self._passages.add(passage)
        up = self._start(self._pump, passage, client, server)
        self._pump(passage, server, client)
        up.join()
        with self._state:
            self._passages.discard(passage)
        client.close()
        server.close()

    def _pump(self, passage: _Passage, source: socket.socket, sink: socket.socket) -> None:
        down = source is passage.server
        passed_s = 0.0
        try:
            while data := source.recv(_PIECE_BYTES):
                silent = down and time.monotonic() - passed_s > self.latency_s
                self._delay(len(data), self.latency_s if silent else 0.0)
                passed_s = time.monotonic()
                if self._swallow(passage):
                    continue
                data, ending = self._spoil(data, passage) if down else (data, None)
                sink.sendall(data)
                if down:
                    self.bytes_from_server += len(data)
                    self.moved.set()
                if ending is not None:
                    passage.end(reset=ending == "reset")
                    return
        except (OSError, ValueError):
            pass
        passage.end(reset=False)

    def _delay(self, count: int, wait_s: float) -> None:
        if self.rate_bytes_per_s:
            wait_s += count / self.rate_bytes_per_s
        if wait_s:
            self._wake.wait(wait_s)

    def _swallow(self, passage: _Passage) -> bool:
        """In a blackhole: keep the bytes for ever, and the connection as it is."""
        if not (self._blackhole or passage.swallowed):
            return False
        passage.swallowed = True
        return True

    def _spoil(self, data: bytes, passage: _Passage) -> tuple[bytes, str | None]:
        with self._state:
            data = self._flipped(data)
            passage.bytes_from_server += len(data)
            if self.reset_each is not None and passage.bytes_from_server > self.reset_each:
                return data[: max(0, len(data) - passage.bytes_from_server + self.reset_each)], "reset"
            reset_after, self.reset_after = self.reset_after, _less(self.reset_after, len(data))
            end_after, self.end_after = self.end_after, _less(self.end_after, len(data))
        if reset_after is not None and self.reset_after is None:
            return data[:reset_after], "reset"
        if end_after is not None and self.end_after is None:
            return data[:end_after], "end"
        return data, None

    def _flipped(self, data: bytes) -> bytes:
        at = self.flip_at
        if at is None:
            return data
        self.flip_at = at - len(data) if at >= len(data) else None
        return data if at >= len(data) else data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]

    # --- inside ----------------------------------------------------------------------------------------------------

    def _start(self, body: object, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=body, args=arguments, daemon=True, name="proxy")  # type: ignore[arg-type]
        self._threads = [other for other in self._threads if other.is_alive()]
        thread.start()
        self._threads.append(thread)
        return thread

    def _open(self) -> list[_Passage]:
        with self._state:
            return list(self._passages)

    def _end(self, passages: list[_Passage]) -> None:
        for passage in passages:
            passage.end(reset=True)

    def _interrupt(self) -> None:
        self._wake.set()
        self._wake.clear()


def _less(left: int | None, count: int) -> int | None:
    """What is left of a byte count after `count` more bytes; None: it has come, or was not set."""
    return None if left is None or left <= count else left - count

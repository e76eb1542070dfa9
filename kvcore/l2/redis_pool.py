"""How connections to a Redis or Valkey server are made, kept, used again and given up.

Theory of operation
-------------------
An exchange is a function that sends commands and reads all their answers. It gets the connection that was idle last, or
a fresh one (connect, TLS, AUTH, SELECT). Afterwards

    it went well                                the connection is idle again, if there are not too many
    timeout, bytes that are not the protocol    it is closed; the exchange has failed
    closed or reset, on one that was idle       perhaps the server has restarted: all idle ones are closed, and the
                                                exchange is done once more on a fresh one. All our commands may
                                                be done twice: they set, get and remove whole values
    closed or reset, on a fresh one             the exchange has failed

so a restarted server is used again by the first exchange after it is back, and a dead one fails each exchange within
`connect_timeout_s`, a silent one within `timeout_s` and the time of the bytes (`kvcore.l2.redis_wire`), twice at most.

Certificates and CA files are read anew when they have been replaced: where they live for a day, connections are made
for longer than that. Connections that are there stay.

Secrets appear in no text and no repr from here. Errors of `ssl` are `OSError`s.

Threads. The idle connections are in a deque, whose `append` and `pop` are atomic; there is no lock. A connection that
comes back while the others are dropped is looked at again after it was put there, so none outlives `close`.

Who holds: the pool its idle connections, an exchange the one that it uses. `close` closes the idle ones; the others are
closed when their exchange ends.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from kvcore.config.values import HIDDEN
from kvcore.errors import ConfigError, StoreError
from kvcore.l2.redis_wire import Deadline, ErrorAnswer, Part, Wire, command
from kvcore.ports import Clock

T = TypeVar("T")

_IDLE_MAX = 16
_NEVER = frozenset({"WRONGPASS", "NOAUTH", "NOPERM", "MOVED"})
"""Error codes that no waiting makes good. (DENIED is protected mode.)"""
_NOT_READY = ("LOADING", "BUSY", "MASTERDOWN", "ERR max number of clients")
"""What a server may answer at the door that will have us later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Where the server is and how long it may take. Secrets are not part of the repr.

    `ttl_s`: records vanish so long after they were stored last. `connect_timeout_s` bounds the making of a connection,
    `timeout_s` the wait for an answer; an exchange of n bytes may take n / `rate_bytes_per_s_min` longer.
    """

    host: str = "127.0.0.1"
    port: int = 6379
    unix_path: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: bool = False
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_verify: bool = True
    prefix: str = "kvcore:"
    ttl_s: float | None = None
    connect_timeout_s: float = 1.0
    timeout_s: float = 1.0
    rate_bytes_per_s_min: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536 or self.db < 0:
            raise ConfigError(f"a Redis store needs a port of 1 to 65535 and a database of 0 or more, not {self!r}")
        if min(self.connect_timeout_s, self.timeout_s, self.rate_bytes_per_s_min) <= 0:
            raise ConfigError("the time-outs and the lowest rate of a Redis store are more than 0")
        if self.ttl_s is not None and self.ttl_s < 0.001:
            raise ConfigError("the time to live of a Redis store is 1 ms or more")
        if self.tls and self.unix_path is not None:
            raise ConfigError("a Redis store has TLS or a unix socket, not both")

    @property
    def where(self) -> str:
        return self.unix_path if self.unix_path is not None else f"{self.host}:{self.port}"


class RedisPool:
    """See the module text."""

    def __init__(self, options: RedisOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._generation = 0
        self._idle: deque[Wire] = deque()
        self._closed = False
        self._tls: tuple[object, ssl.SSLContext] | None = None  # what its files were, and the context made of them

    def exchange(self, talk: Callable[[Wire, Deadline], T], count_bytes: int = 0) -> T:
        """`talk` sends commands and reads all their answers. `count_bytes`: about how much goes over."""
        wire = self._take()
        if wire is not None:
            try:
                return self._exchange(wire, talk, count_bytes)
            except (ConnectionError, ssl.SSLError):  # TLS has an error of its own for a stream that has ended
                self._drop_idle()
        return self._exchange(self.connect(), talk, count_bytes)

    def connect(self) -> Wire:
        """A fresh connection, ready for use. ConfigError: the server will never have us."""
        if self._closed:
            raise StoreError(f"the Redis store {self._options.where} is closed")
        deadline = Deadline(self._clock, self._options.connect_timeout_s)
        generation = self._generation
        wire = Wire(self._connected(deadline), generation)
        try:
            self._introduce(wire, deadline)
        except BaseException:
            wire.close()
            raise
        return wire

    def give_back(self, wire: Wire) -> None:
        usable = not wire.closed and wire.generation == self._generation
        if not usable or len(self._idle) >= _IDLE_MAX:
            wire.close()
            return
        self._idle.append(wire)
        if (
            self._closed or wire.generation != self._generation
        ):  # by now: the others may have been dropped before it came
            self._drop_idle()

    def renew(self) -> None:
        """The server behind the name may be another one by now: later exchanges connect again."""
        self._generation += 1
        self._drop_idle()

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    def refuse(self, answer: ErrorAnswer) -> StoreError | ConfigError:
        """The exception for an error answer. Some servers quote what they do not understand, passwords too."""
        text = f"the Redis store {self._options.where} answered: {self._harmless(answer)}"
        return ConfigError(text) if answer.code in _NEVER else StoreError(text)

    def deadline(self, count_bytes: int) -> Deadline:
        return Deadline(self._clock, self._options.timeout_s + count_bytes / self._options.rate_bytes_per_s_min)

    def _exchange(self, wire: Wire, talk: Callable[[Wire, Deadline], T], count_bytes: int) -> T:
        try:
            result = talk(wire, self.deadline(count_bytes))
        except BaseException:
            wire.close()
            raise
        self.give_back(wire)
        return result

    def _take(self) -> Wire | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _drop_idle(self) -> None:
        while (wire := self._take()) is not None:
            wire.close()

    # --- connecting ----------------------------------------------------------------------------------------------

    def _connected(self, deadline: Deadline) -> socket.socket:
        options = self._options
        if options.unix_path is not None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(deadline.left_s())
                sock.connect(options.unix_path)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((options.host, options.port), deadline.left_s())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._secured(sock, deadline) if options.tls else sock

    def _secured(self, sock: socket.socket, deadline: Deadline) -> socket.socket:
        try:
            context = self._tls_now()
            sock.settimeout(deadline.left_s())
            return context.wrap_socket(sock, server_hostname=self._options.host)
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise ConfigError(
                f"the certificate of {self._options.where} is not trusted ({error.verify_message}); name its CA file"
            ) from error
        except BaseException:
            sock.close()
            raise

    def _tls_now(self) -> ssl.SSLContext:
        files = _state_of_files(self._options)
        if self._tls is None or self._tls[0] != files:
            self._tls = (files, _tls_context(self._options))
        return self._tls[1]

    def _introduce(self, wire: Wire, deadline: Deadline) -> None:
        options = self._options
        words: list[list[Part]] = []
        if options.password is not None:
            user = [] if options.username is None else [options.username.encode()]
            words.append(command(b"AUTH", *user, options.password.encode()))
        if options.db:
            words.append(command(b"SELECT", b"%d" % options.db))
        if not words:
            return
        wire.send(words, deadline)
        for _ in words:
            answer = wire.answer(deadline)
            if isinstance(answer, ErrorAnswer):
                raise self._refused(answer)

    def _refused(self, answer: ErrorAnswer) -> StoreError | ConfigError:
        """At the door an error is for good, unless the server says that it is only not ready."""
        if answer.text.startswith(_NOT_READY):
            return self.refuse(answer)
        return ConfigError(f"the Redis store {self._options.where} does not let us in: {self._harmless(answer)}")

    def _harmless(self, answer: ErrorAnswer) -> str:
        password = self._options.password
        return (answer.text.replace(password, HIDDEN) if password else answer.text)[:200]


def _state_of_files(options: RedisOptions) -> list[tuple[int, int, int] | None]:
    """Another list: one of the TLS files was replaced or written anew."""
    states: list[tuple[int, int, int] | None] = []
    for path in (options.tls_ca_file, options.tls_cert_file, options.tls_key_file):
        states.append(None)
        if path is not None:
            with suppress(OSError):  # reading it will say so
                status = os.stat(path)
                states[-1] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return states


def _tls_context(options: RedisOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.tls_ca_file)
        if options.tls_cert_file is not None:
            context.load_cert_chain(options.tls_cert_file, options.tls_key_file)
    except OSError as error:
        raise ConfigError(f"a TLS file of {options.where} cannot be used: {error}") from error
    if not options.tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context

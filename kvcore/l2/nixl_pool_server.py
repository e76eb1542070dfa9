"""`kvcore store pool SOCKET --memory 8GiB`: a memory pool for the processes of one machine, behind `nixl+ucx://SOCKET`.

The process holds the memory and says over a unix socket (0600) what lies where (`kvcore.l2.nixl_pool`); the bytes are
moved by its users' own NIXL agents, through UCX's shared memory, and never touch a socket. It outlives the servers that
use it, and takes everything with it when it ends.

One thread per connection, one lock around the pool; each ask is a few dictionary steps. A connection that ends gives
back what it held. One that says something unknown is closed. A user who can open the socket can write into the
whole pool: records are checked by their envelope when they are read, as everywhere.

Who holds: this object its memory, agent, socket and threads; `close` ends all of them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice

from kvcore.errors import ConfigError, StoreError
from kvcore.l2 import nixl_pool_wire as wire
from kvcore.l2.nixl_agent import NixlAgent, Span
from kvcore.l2.nixl_pool import MemoryPool, PoolRecord
from kvcore.memory import PlainArena
from kvcore.runtime.clock import SystemClock

_TOKEN_BYTES = 8
_BACKLOG = 128
_log = logging.getLogger("kvcore.l2")


class PoolAgent(NixlAgent):
    """The pool's side: memory that others reach into."""

    def __init__(self, name: str, memory: memoryview) -> None:
        super().__init__(name, "UCX", {}, threads=True)
        self.base = Span.of(memory).first
        self.registered(memory, [memory])
        self.metadata = bytes(self._native.get_agent_metadata())


class PoolServer:
    """See the module text. Listens when it is made; `serve` blocks until `close`."""

    def __init__(self, path: str, capacity_bytes: int) -> None:
        self._clock = SystemClock()
        self._arena = PlainArena(capacity_bytes)
        self.pool = MemoryPool(self._arena)
        self._state = threading.RLock()  # guards the pool and the next two; a signal may come while it is held
        self._links: set[socket.socket] = set()
        self._closed = False
        self._name = f"kvcore-pool-{self._clock.token(_TOKEN_BYTES)}"
        self._path = path
        self._listener = _listening(path)
        try:
            self._agent = _agent(self._name, self._arena.buffer)
        except BaseException:
            self.close()
            raise

    def serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with self._state:
                if self._closed:
                    link.close()
                    return
                self._links.add(link)
            threading.Thread(target=self._attend, args=(link,), name="kvcore-pool", daemon=True).start()

    def close(self) -> None:
        with self._state:
            self._closed = True
            links = list(self._links)
        with suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _attend(self, link: socket.socket) -> None:
        """Body of a connection's thread."""
        user = _User(self, link)
        with closing(link), suppress(OSError, StoreError):
            while True:
                wire.send(link, user.answer(wire.receive_ask(link)))
        with self._state:
            self._links.discard(link)
            self.pool.release(link)
            self.pool.leave(link)

    def welcome(self) -> wire.Welcome:
        return wire.Welcome(wire.VERSION, self._name, self._agent.metadata, self._agent.base)

    def locked(self) -> threading.RLock:
        return self._state

    def now_ns(self) -> int:
        return self._clock.now_ns()


class _User:
    """One connection: its asks, and how far its listing has come."""

    def __init__(self, server: PoolServer, link: socket.socket) -> None:
        self._server = server
        self._link = link
        self._joined = False
        self._listing: Iterator[tuple[bytes, int, int]] = iter(())

    def answer(self, ask: wire.Ask) -> wire.Answer:
        if isinstance(ask, wire.Join):
            self._joined = ask.version == wire.VERSION
            return self._server.welcome()
        if not self._joined:
            raise StoreError("a user of the memory pool did not join it")
        with self._server.locked():
            return self._act(ask, self._server.pool, self._server.now_ns())

    def _act(self, ask: wire.Ask, pool: MemoryPool, now_ns: int) -> wire.Answer:
        match ask:
            case wire.Find(names):
                return wire.Lengths([pool.find(name, now_ns) for name in names])
            case wire.Reserve(records):
                return wire.Places([_place(pool.reserve(self._link, *record, now_ns)) for record in records])
            case wire.Locate(names):
                return wire.Places([_place(pool.pin(self._link, name, now_ns) or "missing") for name in names])
            case wire.Commit(ended):
                for number, good in ended:
                    pool.commit(self._link, number, good, now_ns)
            case wire.Release():
                pool.release(self._link)
            case wire.Remove(gone):
                for name, known in gone:
                    pool.remove(name, known)
            case wire.List(start, limit):
                if start:
                    self._listing = iter(
                        [(one.name, one.slot.size, max(0, now_ns - one.used_ns)) for one in pool.records()]
                    )
                return wire.Listed(list(islice(self._listing, limit)))
            case wire.Measure():
                return wire.Measured(pool.bytes_used, pool.arena.capacity_bytes, pool.objects)
        return wire.Done()


def _place(found: PoolRecord | str) -> wire.Place | str:
    return found if isinstance(found, str) else wire.Place(found.slot.offset, found.slot.size, found.number)


def _agent(name: str, memory: memoryview) -> PoolAgent:
    try:
        return PoolAgent(name, memory)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"NIXL has no UCX plugin that works here: {error}") from error


def _listening(path: str) -> socket.socket:
    """ConfigError: somebody listens there, or what is there is no socket. The socket of a dead pool is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        listener.bind(path)
        os.chmod(path, 0o600)  # before anybody can connect
        listener.listen(_BACKLOG)
    except (OSError, ConfigError) as error:
        listener.close()
        raise ConfigError(f"the memory pool cannot listen on {path}: {error}") from error
    return listener


def _clear(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        try:
            knock.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ConfigError("another process listens there")

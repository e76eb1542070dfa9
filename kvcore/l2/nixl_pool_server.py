"""`kvcore store pool SOCKET --memory 8GiB`: a memory pool for the processes of one machine, behind `nixl+ucx://SOCKET`.

The process holds the memory and says over a unix socket (0600) what lies where (`kvcore.l2.nixl_pool`); the bytes are
moved by its users' own NIXL agents, through UCX's shared memory, and never touch a socket. It outlives the servers that
use it, and takes everything with it when it ends.

One event loop does everything, so the pool needs no lock: each ask is a few dictionary steps, and its answer is written
before the next one of that connection is read. A connection that ends gives back what it held. One that says something
unknown, or breaks off in the middle, is closed; the others do not notice. A user who can open the socket can write into
the whole pool: records are checked by their envelope when they are read, as everywhere.

Who holds: this object its memory, agent, socket and connections. Who ends them: `close`, which lets `serve` return
when the last connection has given back what it held.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from kvcore.errors import ConfigError, StoreError
from kvcore.l2 import nixl_pool_wire as wire
from kvcore.l2.nixl_agent import NixlAgent, Span
from kvcore.l2.nixl_pool import MemoryPool, PoolRecord
from kvcore.memory import PlainArena
from kvcore.runtime.clock import SystemClock

_TOKEN_BYTES = 8
_BACKLOG = 128


class PoolAgent(NixlAgent):
    """The pool's side: memory that others reach into."""

    def __init__(self, name: str, memory: memoryview) -> None:
        super().__init__(name, "UCX", {}, threads=True)
        self.base = Span.of(memory).first
        self.registered(memory, [memory])
        self.metadata = bytes(self._native.get_agent_metadata())


class PoolServer:
    """See the module text. Listens when it is made; `serve` lasts until `close`, which is called in the same loop."""

    def __init__(self, path: str, capacity_bytes: int) -> None:
        self._clock = SystemClock()
        self._arena = PlainArena(capacity_bytes)
        self.pool = MemoryPool(self._arena)
        self._links: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._ending = asyncio.Event()
        self._name = f"kvcore-pool-{self._clock.token(_TOKEN_BYTES)}"
        self._path = path
        self._listener = _listening(path)
        try:
            self._agent = _agent(self._name, self._arena.buffer)
        except BaseException:
            self._vanish()
            self._listener.close()
            raise

    async def serve(self) -> None:
        server = await asyncio.start_unix_server(self._attend, sock=self._listener, backlog=_BACKLOG)
        try:
            await self._ending.wait()
        finally:
            self._vanish()
            server.close()
            await self._show_out()

    def close(self) -> None:
        self._ending.set()

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Body of a connection's task."""
        user = _User(self)
        task = asyncio.current_task()
        assert task is not None
        self._links[writer] = task
        try:
            while not self._ending.is_set():
                writer.write(wire.frame(user.answer(await wire.read_ask(reader))))
                await writer.drain()
        except (OSError, StoreError):
            pass  # it has ended, or is shown out
        finally:
            self.pool.leave(user)
            del self._links[writer]
            writer.close()

    async def _show_out(self) -> None:
        """Until all have given back what they held. Answers that nobody reads are not waited for."""
        for link in self._links:
            link.transport.abort()
        if self._links:
            await asyncio.wait(self._links.values())

    def _vanish(self) -> None:
        """While the socket still listens: afterwards the path may be the next pool's."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def welcome(self) -> wire.Welcome:
        return wire.Welcome(wire.VERSION, self._name, self._agent.metadata, self._agent.base)

    def now_ns(self) -> int:
        return self._clock.now_ns()


class _User:
    """One connection: its asks, and how far its listing has come. To the pool, it is an owner."""

    def __init__(self, server: PoolServer) -> None:
        self._server = server
        self._joined = False
        self._listing: Iterator[tuple[bytes, int, int]] = iter(())

    def answer(self, ask: wire.Ask) -> wire.Answer:
        if isinstance(ask, wire.Join):
            self._joined = ask.version == wire.VERSION
            return self._server.welcome()
        if not self._joined:
            raise StoreError("a user of the memory pool did not join it")
        return self._act(ask, self._server.pool, self._server.now_ns())

    def _act(self, ask: wire.Ask, pool: MemoryPool, now_ns: int) -> wire.Answer:
        match ask:
            case wire.Find(names):
                return wire.Lengths([pool.find(name, now_ns) for name in names])
            case wire.Reserve(records):
                return wire.Places([_place(pool.reserve(self, *record, now_ns)) for record in records])
            case wire.Locate(names):
                return wire.Places([_place(pool.pin(self, name, now_ns) or "missing") for name in names])
            case wire.Commit(ended):
                for number, good in ended:
                    pool.commit(self, number, good, now_ns)
            case wire.Release():
                pool.release(self)
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

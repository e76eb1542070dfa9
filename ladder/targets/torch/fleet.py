"""`Fleet`: all processes of one climb - cache servers, the engine's scheduler, its workers - and what kills and
restarts them.

Theory of operation
-------------------
    servers    `kvcore serve` on private sockets, each with its own L2 directory where the climb has one
    engine     one scheduler and a worker per rank; they live and die together

`serve` hands requests to the engine and collects answers as they come. An engine that dies in the middle
(`kill_engine`, a signal from somebody, a bug) leaves the answers it has given; `serve` raises `EngineDied`, and
whoever wants to go on restarts it and asks for the rest.

Servers are asked for their state over HTTP; `settle` waits until nothing runs in them any more.

Who holds: the fleet every process and directory. Who announces: `start` returns when all can be used. Who frees:
`close`, which also tells what was left behind.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcore.errors import InternalError
from kvcore.l2.open import parse_store
from kvcore.ladder.targets.torch.messages import Answered, Ask, EngineSetup, Failed, Serve, Served, pack, read_answer
from kvcore.runtime.child import ENDS_IN_S, Child, ServerChild, stop_all
from kvcore.service import protocol as wire
from kvcore.service.operator import ask
from kvcore.service.zmq_transport import ZmqClientTransport
from kvcore.sim.engine.config import EngineConfig

ASKS_FOR_S = 60.0  # a machine with more to do than processors must not look like a server that hangs
_LOOKS_EVERY_S = 0.02
_DEAD_AFTER_LOOKS = 2


FILES = "files"


class EngineDied(Exception):
    """A process of the engine has ended, or said that it cannot go on."""


class Fleet:
    """See the module text. `l2`: FILES, where every server keeps files of its own behind its L1, the URL of one store
    that all share, or "" for none."""

    def __init__(self, setup: EngineSetup, servers: int, *, l1_bytes: int, l2: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvf-"))  # short: an ipc path has about 100 bytes at most
        addresses = tuple(f"ipc://{self.directory}/server{index}.sock" for index in range(servers))
        self.setup = msgspec.structs.replace(setup, directory=str(self.directory), servers=addresses)
        self._l1_bytes = l1_bytes
        self._l2 = l2
        self.servers: list[ServerChild] = []
        self.engine: Child | None = None
        self.workers: list[Child] = []
        self._lives = 0

    # -- processes

    def start(self) -> None:
        self._start_servers()
        self.start_engine()

    def _start_servers(self) -> None:
        self.servers = [self._spawn_server(index) for index in range(len(self.setup.servers))]
        for index in range(len(self.servers)):
            self._await_server(index)

    def start_engine(self) -> None:
        """Workers first: the scheduler talks to them at once."""
        (self.directory / "ranks").unlink(missing_ok=True)
        text = self.setup.to_text()
        package = "kvcore.ladder.targets.torch"
        self.workers = [
            Child(self._log(f"worker{rank}"), f"{package}.worker", str(rank), text) for rank in range(self.setup.ranks)
        ]
        for worker in self.workers:
            worker.line_with("ready")
        self.engine = Child(self._log("engine"), f"{package}.engine", text)
        self.engine.line_with("ready")

    def _spawn_server(self, index: int) -> ServerChild:
        arguments = ["--listen", self.setup.servers[index], "--l1", str(self._l1_bytes)]
        arguments += ["--chunk-tokens", str(self.setup.chunk_tokens), "--log-level", "warning"]
        if self._l2:
            arguments += ["--l2", f"file://{self.l2_directory(index)}" if self._l2 == FILES else self._l2]
        return ServerChild(self._log(f"server{index}"), *arguments)

    def _await_server(self, index: int) -> None:
        self.servers[index].started()

    def restart_server(self, index: int) -> None:
        """The process may be dead already; the next one has an empty L1 and the files of the last."""
        self.servers[index].kill()
        self.servers[index] = self._spawn_server(index)
        self._await_server(index)

    def kill_engine(self) -> None:
        """Every process of the engine, at once."""
        for child in self.engine_children:
            child.kill()

    @property
    def engine_children(self) -> list[Child]:
        return [*([self.engine] if self.engine is not None else []), *self.workers]

    def l2_directory(self, index: int) -> Path:
        return self.directory / f"l2-{index}"

    def restart_without(self, lost: Callable[[], bool]) -> None:
        """Restart all servers; meanwhile the records for which `lost` says so are removed, a shared store's once."""
        stop_all(self.servers, ENDS_IN_S)
        if self._l2 == FILES:
            for record in sorted(self.directory.glob("l2-*/**/*.kv")):
                if lost():
                    record.unlink()
        elif self._l2:
            _forget_shared(self._l2, lost)
        self._start_servers()

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    # -- work

    async def serve(
        self,
        requests: Sequence[Ask],
        config: EngineConfig,
        *,
        cache: bool,
        answered: Callable[[Answered], None],
    ) -> Served:
        """Have the engine serve all requests. Raises `EngineDied` when it ends before it is done."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Served | Failed] = loop.create_future()

        def received(payload: bytes) -> None:
            message = read_answer(payload)
            if isinstance(message, Answered):
                answered(message)
            elif not done.done():
                done.set_result(message)

        transport = ZmqClientTransport(loop, self.setup.socket("engine"))
        try:
            transport.receive(received)
            transport.send(pack(Serve(tuple(requests), config, cache)))
            message = await self._done_or_dead(done)
        finally:
            transport.close()
        if isinstance(message, Failed):
            raise EngineDied(message.text)
        return message

    async def _done_or_dead(self, done: asyncio.Future[Served | Failed]) -> Served | Failed:
        looks = 0
        while not done.done():
            await asyncio.wait([done], timeout=_LOOKS_EVERY_S)
            dead = [child for child in self.engine_children if not child.alive]
            looks = looks + 1 if dead else 0
            if looks > _DEAD_AFTER_LOOKS and not done.done():
                raise EngineDied(f"process {dead[0].pid} has ended: {dead[0].last_words()}")
        return done.result()

    # -- the servers, as an operator sees them

    async def status(self, index: int) -> dict[str, Any]:
        """What `/status` says."""

        def fetch() -> dict[str, Any]:
            with urllib.request.urlopen(self.servers[index].http + "/status", timeout=ASKS_FOR_S) as reply:
                found: dict[str, Any] = json.loads(reply.read())
            return found

        return await asyncio.to_thread(fetch)

    async def drop_l1(self) -> None:
        for address in self.setup.servers:
            await ask(address, wire.Clear(), timeout_s=ASKS_FOR_S)

    async def settle(self, timeout_s: float) -> str:
        """Wait until nothing runs in any server and nothing is held. Empty, or what is still there at the end."""
        left = "nobody was asked"
        try:
            async with asyncio.timeout(timeout_s):
                while left:
                    left = "; ".join(filter(None, [_at_rest(await self.status(i)) for i in range(len(self.servers))]))
                    await asyncio.sleep(_LOOKS_EVERY_S)
        except TimeoutError:
            return left
        return ""

    # -- the end

    def close(self) -> list[str]:
        """End everything in good order; what was wrong with that."""
        problems = []
        for name, children in (("engine", self.engine_children), ("server", self.servers)):
            try:
                statuses = stop_all(children, ENDS_IN_S)
            except InternalError as error:
                problems.append(f"[liveness] {name}: {error}")
                statuses = []
            problems += [f"[liveness] a {name} process ended with {status}" for status in statuses if status]
        for child in (*self.engine_children, *self.servers):
            child.kill()
        problems += [f"[memory] socket {path.name} was left behind" for path in self.directory.glob("server*.sock")]
        shutil.rmtree(self.directory, ignore_errors=True)
        return problems


def _at_rest(state: dict[str, Any]) -> str:
    """What a server still holds or does; empty at rest."""
    server, storage = state["server"], state["storage"]
    if server is None:
        return ""
    l1, writeback, prefetch = storage["l1"], storage["writeback"], storage["prefetch"]
    busy = {name: server[name] for name in ("lookups_open", "stores_open", "reads_open")}
    busy |= {name: l1[name] for name in ("leases", "holds", "objects_staging", "objects_draining")}
    busy |= {name: writeback[name] for name in ("queued", "backing_off", "inflight")}
    busy |= {"prefetch." + name: prefetch[name] for name in ("jobs_pending", "jobs_waiting", "locks_held")}
    return ", ".join(f"{name} {count}" for name, count in busy.items() if count)


def _forget_shared(url: str, lost: Callable[[], bool]) -> None:
    backend: Any = parse_store(url).open_backend()
    try:
        keys = sorted(stored.key for stored in backend.scan() if stored.key is not None)
        for error in backend.delete([key for key in keys if lost()]):
            if error is not None:
                raise error
    finally:
        backend.close()

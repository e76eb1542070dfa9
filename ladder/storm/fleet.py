"""`StormFleet`: the processes of the torch target, with links between the engine and its servers, and with every life
of every process on record.

The engine is told the links' addresses instead of the servers'. Servers have little L1, files behind it that are
bounded too, and short leases, so that full memory, eviction and expiry are part of every storm and what dead engines
have left is gone soon.

Starting and waiting for processes blocks; it is done in threads (`revive_engine`, `revive_server`), because the links
run on this loop.

Who holds: this object, as `Fleet`; the links belong to whoever made them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvcore.errors import InternalError
from kvcore.ladder.storm.remains import Usage, segment_of, usage_of
from kvcore.ladder.targets.torch.fleet import FILES, Fleet
from kvcore.ladder.targets.torch.messages import EngineSetup
from kvcore.runtime.child import Child, ServerChild

SESSION_IDLE_S = 6
WORKER_SILENCE_S = 4
TERM_SECONDS_MAX = 25.0
"""What a server may take to end, whatever it is doing: 5 s (`shutdown_ns`), and the rest for an interpreter to wind up
on a busy machine. A server that waits for something that never comes takes longer."""
_TERM_PATIENCE_S = 60.0  # until it is killed for it
_DAMAGE = ("short", "torn", "flipped")
"""What a torn record is, by `L2Statistics`."""
_NS = 1_000_000_000
_PACKAGE = "kvcore.ladder.targets.torch"


@dataclass(slots=True)
class ServerLife:
    """One server process. `usage`: at each calm of its life; `refused`: damaged records, up to the last one."""

    index: int
    pid: int
    segment: str
    usage: list[Usage] = field(default_factory=list)
    refused: int = 0


class StormFleet(Fleet):
    """See the module text. `via` must be set before `start`: where the engine goes instead of `setup.servers`."""

    def __init__(self, setup: EngineSetup, l1_bytes: tuple[int, ...], l2_bytes: int) -> None:
        super().__init__(setup, len(l1_bytes), l1_bytes=max(l1_bytes), l2=FILES)
        self.via: tuple[str, ...] = self.setup.servers
        self.pids: list[int] = []
        self.lives: list[ServerLife] = []
        self.page_segments: list[str] = []  # of every worker life, where servers copy
        self.engines_started = 0
        self.engine_hit = False  # somebody has ended a process of this engine on purpose
        self.engine_up = asyncio.Event()
        self.server_locks = [asyncio.Lock() for _ in l1_bytes]
        self._l1_of = l1_bytes
        self._l2_bytes = l2_bytes
        self._config = self.directory / "serve.toml"
        self._config.write_text(_CONFIG)

    # -- starting

    def start_engine(self) -> None:
        """All its processes at once; each waits for the others where it must."""
        (self.directory / "ranks").unlink(missing_ok=True)
        text = msgspec.structs.replace(self.setup, servers=self.via).to_text()
        self.engine_hit = False
        self.workers = [
            Child(self._log(f"worker{rank}"), f"{_PACKAGE}.worker", str(rank), text) for rank in range(self.setup.ranks)
        ]
        self.engine = Child(self._log("engine"), f"{_PACKAGE}.engine", text)
        self.pids += [child.pid for child in self.engine_children]
        for child in self.engine_children:
            child.line_with("ready")
        if self.setup.transfer == "server":
            self.page_segments += [segment_of(worker.pid) for worker in self.workers]
        self.engines_started += 1

    def _spawn_server(self, index: int) -> ServerChild:
        child = ServerChild(
            self._log(f"server{index}"),
            *("--listen", self.setup.servers[index], "--l1", str(self._l1_of[index])),
            *("--l2", f"file://{self.l2_directory(index)}?capacity={self._l2_bytes}"),
            *("--chunk-tokens", str(self.setup.chunk_tokens), "--config", str(self._config)),
        )
        self.pids.append(child.pid)
        return child

    def _await_server(self, index: int) -> None:
        super()._await_server(index)
        pid = self.servers[index].pid
        self.lives.append(ServerLife(index, pid, segment_of(pid)))

    async def revive_engine(self) -> None:
        """End what is left of the engine; start the next one."""
        self.engine_up.clear()
        await asyncio.to_thread(self.kill_engine)
        await asyncio.to_thread(self.start_engine)
        self.engine_up.set()

    async def revive_server(self, index: int) -> None:
        await asyncio.to_thread(self.restart_server, index)

    # -- hitting

    def hit_engine(self, child: Child) -> None:
        """Kill one of its processes, now."""
        self.engine_hit = True
        self.engine_up.clear()
        child.signal(signal.SIGKILL)

    async def terminate_server(self, index: int) -> tuple[int, float]:
        """SIGTERM: (exit status, seconds until its end). A server that does not end is killed: status -9."""
        begin = asyncio.get_running_loop().time()
        try:
            status = await asyncio.to_thread(self.servers[index].stop, _TERM_PATIENCE_S)
        except InternalError:
            status = -signal.SIGKILL
        return status, asyncio.get_running_loop().time() - begin

    async def give_room(self, l1_bytes: int) -> None:
        """Every server ends in good order and begins again with that much L1, on the same files."""
        self._l1_of = (l1_bytes,) * len(self._l1_of)
        for index in range(len(self.servers)):
            await self.terminate_server(index)
            await self.revive_server(index)

    async def note_damage(self, index: int) -> None:
        """How many damaged records this life has refused so far."""
        adapters = (await self.status(index))["adapters"].values()
        self.life_of(index).refused = sum(adapter[name] for adapter in adapters for name in _DAMAGE)

    def go_on(self) -> None:
        """Nobody stays stopped."""
        for child in (*self.engine_children, *self.servers):
            child.signal(signal.SIGCONT)

    # -- looking

    def life_of(self, index: int) -> ServerLife:
        """The one that runs now."""
        return next(life for life in reversed(self.lives) if life.index == index)

    def measure(self, index: int) -> Usage:
        return usage_of(self.servers[index].pid)

    def records(self, index: int) -> list[Path]:
        """Files of its L2, the youngest first."""
        found = []
        for path in self.l2_directory(index).rglob("*.kv"):
            try:
                found.append((path.stat().st_mtime_ns, str(path)))
            except FileNotFoundError:
                continue
        return [Path(path) for _, path in sorted(found, reverse=True)]

    def logs(self) -> dict[str, str]:
        return {path.stem: path.read_text(errors="replace") for path in sorted(self.directory.glob("*.log"))}


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


_CONFIG = f"""\
[log]
level = "warning"

[storage]
lease_ns = {8 * _NS}
retain = true

[server]
session_idle_ns = {SESSION_IDLE_S * _NS}
store_lease_ns = {8 * _NS}
worker_silence_ns = {WORKER_SILENCE_S * _NS}
"""

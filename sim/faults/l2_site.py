"""`L2Site`: one L2 adapter of one life of a server, with every place at which a fault can take hold.

    port        the adapter's calls (`UnreliableAdapter`, put in between at the first fault)
    executor    its blocking work, piece by piece
    backend     its records, one call at a time (`UnreliableBackend`)
    medium      the stored bytes themselves, which outlive the process

What is done to a site from outside is done as code of its server's process, so that a crash takes what follows with it.
A site of a life that has ended does nothing any more.

Who holds: each fault the sites it has found. The hooks it puts in are taken out by the same fault, or die with the
life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvcore.keys import ObjectKey
from kvcore.l2.file import record_name
from kvcore.l2.memory import MemoryBackend
from kvcore.sim.faults.scene import Scene, ServerHooks
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.files import SimFiles
from kvcore.sim.ports.owner import Owner
from kvcore.sim.unreliable import UnreliableAdapter, UnreliableBackend


class Medium(Protocol):
    """The stored bytes, as somebody who owns the machine can read and change them."""

    def read(self, key: ObjectKey) -> bytes | None: ...

    def write(self, key: ObjectKey, record: bytes) -> None: ...

    def remove(self, key: ObjectKey) -> None: ...

    def wipe(self) -> None: ...


class DiskMedium:
    """The directory of a file adapter."""

    def __init__(self, files: SimFiles) -> None:
        self.files = files

    def read(self, key: ObjectKey) -> bytes | None:
        try:
            return self.files.data(record_name(key))
        except FileNotFoundError:
            return None

    def write(self, key: ObjectKey, record: bytes) -> None:
        self.files.put(record_name(key), record)

    def remove(self, key: ObjectKey) -> None:
        self.files.vanish(record_name(key))

    def wipe(self) -> None:
        self.files.wipe()


class MemoryMedium:
    """The records of a memory adapter."""

    def __init__(self, store: MemoryBackend) -> None:
        self._records = store.records

    def read(self, key: ObjectKey) -> bytes | None:
        return self._records.get(key)

    def write(self, key: ObjectKey, record: bytes) -> None:
        self._records[key] = record

    def remove(self, key: ObjectKey) -> None:
        del self._records[key]

    def wipe(self) -> None:
        self._records.clear()


class L2Site:
    """See the module's text."""

    def __init__(self, scene: Scene, server: ServerHooks, position: int) -> None:
        process = scene.world.process(server.name)
        watched = server.adapters[position]
        self.name: str = watched.name
        self.executor: SimExecutor = server.executors[position]
        self._life = Owner(process)
        if not isinstance(watched.inner, UnreliableAdapter):
            process.run(watched.interpose, lambda inner: UnreliableAdapter(inner, scene.loop))
        self.port: UnreliableAdapter = watched.inner
        indexed: Any = self.port
        while hasattr(indexed, "inner"):
            indexed = indexed.inner
        if not isinstance(indexed._backend, UnreliableBackend):
            indexed._backend = UnreliableBackend(indexed._backend)
        self.backend: UnreliableBackend = indexed._backend
        self.medium = self._medium(scene)

    def _medium(self, scene: Scene) -> Medium:
        if self.name in scene.world.disks:
            return DiskMedium(scene.world.disks[self.name])
        return MemoryMedium(scene.stack.memories[self.name])

    @property
    def files(self) -> SimFiles | None:
        """The disk, where there is one."""
        return self.medium.files if isinstance(self.medium, DiskMedium) else None

    def known_keys(self) -> list[ObjectKey]:
        """What the adapter's index takes for present."""
        return self.port.keys()

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call `function` as code of the server. Not at all when this life of it has ended."""
        if self._life.alive:
            self._life.call(function, *args)


def sites_of(scene: Scene, target: str) -> list[L2Site]:
    """The L2s called `target` ("server0.file"; "server0": all of its; "": all), of servers that are up."""
    server_name, _, kind = target.partition(".")
    return [
        L2Site(scene, server, position)
        for server in scene.stack.servers
        if server_name in ("", server.name) and scene.world.process(server.name).alive
        for position, adapter in enumerate(server.adapters)
        if not kind or adapter.name == target
    ]

"""The engine's side of running servers: connections, clients and mappings of their shared memory, put together.

    link = ServerLink(loop, RemoteConfig(("ipc:///run/user/1000/kvcore/server.sock",)), namespace, layout)
    scheduler = link.scheduler()          # in the engine's scheduler process
    worker = link.worker(rank)            # in each worker process, with a link of its own
    link.close()

One link per process and engine start. Loop-confined: everything is used on the loop it was made on.

Who holds: the link holds its transports, connections, clients and mappings. Who announces: nobody; a server that is not
there is a miss until it is. Who frees: `close`, which ends them in the order client, connection, transport, mapping; a
view that is still out keeps its mapping alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from kvcore.errors import CallerError, ConfigError, PeerError
from kvcore.groups import CacheLayout
from kvcore.keys import Namespace
from kvcore.placement import Placement, PlacementMode
from kvcore.ports import Clock
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.deaths import DeathWatch, this_process
from kvcore.runtime.populate import Populating
from kvcore.runtime.shared_memory import SharedSegment
from kvcore.service.client import (
    Connection,
    ConnectionConfig,
    SchedulerClient,
    SchedulerConfig,
    Segment,
    WorkerClient,
    identity_of,
)
from kvcore.service.curve import CurveClient
from kvcore.service.protocol import Transfer
from kvcore.service.zmq_transport import ZmqClientTransport

_MAPPINGS_MAX = 16


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """Where the servers are, in the order of the placement; the same in every process of an engine.

    `transfer`: who copies KV between the engine's pages and L1, the workers or the servers; servers need the pages in
    shared memory (`kvcore.runtime.worker_pages`).
    """

    addresses: tuple[str, ...]
    placement: PlacementMode = "rank"
    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    lookup: SchedulerConfig = field(default_factory=SchedulerConfig)
    curve: CurveClient | None = None
    transfer: Transfer = "worker"

    def __post_init__(self) -> None:
        if self.transfer not in get_args(Transfer):
            raise ConfigError(f"transfer = {self.transfer!r}; known are {', '.join(get_args(Transfer))}")
        if not self.addresses:
            raise ConfigError("no server address was given")
        if len(set(self.addresses)) != len(self.addresses):
            raise ConfigError("a server address is given twice; each server once, in the order of the placement")


class MappedSegments:
    """Shared memory of the servers as this process maps it: each segment when a reply first names it.

    A new mapping is populated in the background, so that copies into it do not pay for its page faults.
    A restarted server has a new segment. The oldest mappings are given up when there are many; bytes that somebody
    still looks at stay mapped as long as they do.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[SharedSegment, Populating]] = {}

    def __call__(self, segment: str) -> Segment:
        """`PeerError`: there is no such segment, or it is not one to trust."""
        found = self._mapped.get(segment)
        if found is None:
            try:
                mapping = SharedSegment(segment)
            except CallerError as error:  # a name that no server of ours gives
                raise PeerError(str(error)) from None
            found = self._mapped[segment] = mapping, Populating(mapping.buffer)
            while len(self._mapped) > _MAPPINGS_MAX:
                self._unmap(next(iter(self._mapped)))
        return found[0]

    @property
    def populated(self) -> bool:
        """Every mapping of now has been populated, or cannot be."""
        return all(populating.ended for _, populating in self._mapped.values())

    def close(self) -> None:
        for segment in list(self._mapped):
            self._unmap(segment)

    def _unmap(self, segment: str) -> None:
        mapping, populating = self._mapped.pop(segment)
        populating.stop()
        mapping.close()


class ServerLink:
    """See the module text."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: RemoteConfig,
        namespace: Namespace,
        layout: CacheLayout,
        clock: Clock | None = None,
    ) -> None:
        self.placement = Placement(config.placement, len(config.addresses))
        self._loop = loop
        self._config = config
        self._layout = layout
        self._clock = clock if clock is not None else SystemClock()
        self._identity = identity_of(namespace, layout, self.placement)
        self._segments = MappedSegments()
        self._closing: list[Callable[[], None]] = [self._segments.close]
        self._connections: list[Connection] = []

    def scheduler(self) -> SchedulerClient:
        """A client for the engine's scheduler, with connections of its own."""
        client = SchedulerClient(self._connect(), self.placement, self._layout, self._clock, self._config.lookup)
        self._closing.append(client.close)
        return client

    def worker(self, rank: int) -> WorkerClient:
        """A client for one worker, under a name that no other worker life has."""
        name = f"worker{rank}-{self._clock.token(8)}"
        deaths = None
        if self._config.transfer == "server":
            deaths = DeathWatch(self._loop)
            self._closing.append(deaths.close)
        client = WorkerClient(
            self._connect(),
            self.placement,
            self._layout,
            rank,
            name,
            self._segments,
            this_process(),
            self._config.transfer,
            deaths,
        )
        self._closing.append(client.close)
        return client

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All of this process, for statistics."""
        return tuple(self._connections)

    def close(self) -> None:
        """May be called twice. What the servers still hold for this process they get back by its leases' end."""
        while self._closing:
            self._closing.pop()()

    def _connect(self) -> list[Connection]:
        return [self._connect_one(index, address) for index, address in enumerate(self._config.addresses)]

    def _connect_one(self, index: int, address: str) -> Connection:
        transport = ZmqClientTransport(self._loop, address, curve=self._config.curve)
        self._closing.append(transport.close)
        config = self._config
        connection = Connection(
            transport, self._identity, self._clock, config.connection, index=index, transfer=config.transfer
        )
        self._closing.append(connection.close)
        self._connections.append(connection)
        return connection

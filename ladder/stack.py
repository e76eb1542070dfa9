"""`CacheStack`: kvcore itself, put together for a climb, in any world: servers, connections, clients, connector.

Who holds: the stack holds servers and connector for the length of a climb; `close` ends them in the order client,
server, ports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from kvcore.connectors.scheduler import SchedulerConnector, SchedulerConnectorConfig
from kvcore.connectors.tracker import Phase
from kvcore.connectors.worker import WorkerConnector
from kvcore.keys import ObjectKey
from kvcore.l2.memory import MemoryBackend
from kvcore.ladder.admissions import admission_for, refusals
from kvcore.ladder.engine_hashes import hasher_for
from kvcore.ladder.server_stack import AttachedRegion, ServerStack, StackConfig, World
from kvcore.service.client import Connection, Region, SchedulerClient, Segment, WorkerClient, identity_of
from kvcore.service.page_shares import PageRegistry, describe
from kvcore.service.protocol import PageSegment
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.hits import Cell
from kvcore.sim.oracles.truth import Truth

__all__ = ["CacheStack", "StackConfig"]


def cell_of(key: ObjectKey) -> Cell:
    """(group, rank, hash) of a key."""
    return key.object_group_id, key.kv_rank, key.chunk_hash


class CacheStack:
    """A `ladder.Connector` made of kvcore, and the servers behind it.

    `pages`: where servers that copy find those of the workers.
    """

    def __init__(
        self,
        world: World,
        config: StackConfig,
        truth: Truth,
        findings: Findings,
        pages: PageRegistry | None = None,
    ) -> None:
        self.config = config
        self._truth = truth
        self._findings = findings
        self._world = world
        self.memories: dict[str, MemoryBackend] = {}  # by adapter
        self.pages = (pages or PageRegistry()) if config.transfer == "server" else None
        self._lives = [0] * config.placement.servers
        self._past: dict[ObjectKey, None] = {}  # published in an earlier life of a server
        self.servers = [self._start_server(index) for index in range(config.placement.servers)]
        self._engine_life = 0
        self.faults_over = False  # somebody who waits for recovery says so
        self._regions: list[dict[str, Region | AttachedRegion]] = []
        self._start_engine_side()

    def _start_engine_side(self) -> None:
        """What belongs to the engine's processes, in their present lives."""
        ranks = range(self.config.layout.ranks)
        self._generation_lost = 0
        self._connections: list[Connection] = []
        self._clients: list[SchedulerClient | WorkerClient] = []
        self._close_regions()
        self._regions = [{} for _ in ranks]
        self._scheduler = self._world.inside("scheduler", self._build_scheduler)
        self._workers = [
            self._world.inside(f"worker{rank}", lambda rank=rank: self._build_worker(rank))  # type: ignore[misc]
            for rank in ranks
        ]

    def _start_server(self, index: int) -> ServerStack:
        world, life = self._world, self._lives[index]

        def build() -> ServerStack:
            return ServerStack(world, index, self.config, self._truth, self._findings, self.memories, life, self.pages)

        return world.inside(f"server{index}", build)

    def _connect(self, client: str) -> list[Connection]:
        namespace = self.config.engine_namespace or self.config.namespace
        identity = identity_of(namespace, self.config.layout, self.config.placement)
        made = [
            Connection(
                self._world.connect(index, client),
                identity,
                self._world.clock,
                self.config.connection,
                index=index,
                transfer=self.config.transfer,
            )
            for index in range(self.config.placement.servers)
        ]
        self._connections += made
        return made

    def _build_scheduler(self) -> SchedulerConnector:
        config = self.config
        self._asking = self._connect("scheduler")
        client = SchedulerClient(self._asking, config.placement, config.layout, self._world.clock, config.lookup)
        self._clients.append(client)
        self._client = client
        hasher = hasher_for(config.namespace, config.layout)
        settings = SchedulerConnectorConfig(load_async=config.load_async, session_prefix=self._session_prefix)
        admission = admission_for(
            config.admission,
            config.layout,
            self._world.clock,
            seed=config.admission_seed,
            life=self._engine_life,
            over=lambda: self.faults_over,
            floor_tokens=config.admission_floor_tokens,
        )
        return SchedulerConnector(config.layout, hasher, client, settings, admission)

    @property
    def _session_prefix(self) -> str:
        """No two lives of the engine name a session alike."""
        return f"life{self._engine_life}." if self._engine_life else ""

    def worker_id(self, rank: int) -> str:
        """The name by which the servers know the present life of a worker."""
        return f"worker{rank}.{self._engine_life}" if self._engine_life else f"worker{rank}"

    def _build_worker(self, rank: int) -> WorkerConnector:
        def region(segment: str) -> Segment:
            return self._region(rank, segment)

        connections = self._connect(f"worker{rank}")
        config, process = self.config, self._world.process_name(f"worker{rank}")
        client = WorkerClient(
            connections,
            config.placement,
            config.layout,
            rank,
            self.worker_id(rank),
            region,
            process,
            config.transfer,
            self._world.deaths() if config.transfer == "server" else None,
        )
        self._clients.append(client)
        share = partial(self._share, self.worker_id(rank)) if config.transfer == "server" else None
        return WorkerConnector(self.config.layout, rank, client, share=share, clock=self._world.clock)

    def _share(self, worker: str, pages: Sequence[Any]) -> PageSegment:
        """The engine's pages are views of one buffer; servers find it under a name of this worker life."""
        assert self.pages is not None
        name, buffer = f"pages.{worker}", pages[0].base
        self.pages.share(name, buffer)
        return describe(name, buffer, pages)

    def _region(self, rank: int, segment: str) -> Segment:
        """The worker's mapping, made when a reply first names the segment. KeyError: no server of now has it."""
        mapped = self._regions[rank]
        if segment not in mapped:
            mapped[segment] = {server.segment: server for server in self.servers}[segment].region()
        return mapped[segment]

    def server_restarted(self, index: int) -> None:
        """The process of a server has died and runs again: cold L1, and an L2 that is what its disk still has."""
        self._past.update(self.servers[index].l1.ever_published)
        self._generation_lost = self._scheduler.statistics().generations
        self._lives[index] += 1
        self.servers[index] = self._start_server(index)

    def engine_restarted(self) -> None:
        """The engine's processes have died and live again: new connections, clients and connectors, which know nothing.

        The servers keep what the dead ones held until they learn of it: workers' holds by the proof of their death,
        sessions by their idleness.
        """
        self._engine_life += 1
        self._start_engine_side()

    # ---- ladder.Connector

    @property
    def scheduler(self) -> SchedulerConnector:
        return self._scheduler

    def worker(self, rank: int) -> WorkerConnector:
        return self._workers[rank]

    # ---- for the rungs

    async def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing runs in the background any more, then check that nothing is left behind."""
        try:
            async with asyncio.timeout(timeout_s):
                polls = 0
                while not self._quiet():
                    await asyncio.sleep(min(0.001 * 2 ** max(0, polls - 16), 0.1))
                    polls += 1
        except TimeoutError:
            self._findings.report("liveness", f"the cache did not come to rest in {timeout_s} s: {self.describe()}")
            return
        for server in self.living_servers:
            server.check_at_rest()
        for client in self._clients:
            if isinstance(client, WorkerClient):
                state = client.statistics()
                if state.stores_open or state.reads_open or state.copies_open:
                    self._findings.report("leases", f"{client.worker_id}: at rest, {state}")

    def _quiet(self) -> bool:
        living = self.living_servers
        if not all(worker.idle for worker in self._workers) or not all(server.idle for server in living):
            return False
        if self._left_by_the_dead():
            return False
        there = [server.index for server in living]
        states = [connection.statistics() for connection in self._connections if connection.index in there]
        return not any(state.outstanding or state.waiting or state.debts for state in states)

    @property
    def living_servers(self) -> list[ServerStack]:
        """Those whose process has not died since they were started."""
        return [server for server in self.servers if server.alive]

    def _left_by_the_dead(self) -> bool:
        """A server still has sessions of a dead scheduler, or what a dead worker had open. Both end by themselves."""
        if not self._engine_life:
            return False
        states = [server.server for server in self.living_servers]
        mine = self._session_prefix
        return any(
            not all(name.startswith(mine) for name in server.session_names)
            or any(worker not in map(self.worker_id, range(self.config.layout.ranks)) for worker in server.worker_names)
            for server in states
        )

    def describe(self) -> str:
        """One line per part that is not at rest."""
        parts = [f"worker{rank} {worker.statistics()}" for rank, worker in enumerate(self._workers) if not worker.idle]
        parts += [f"{server.name} {server.storage.statistics()}" for server in self.servers if not server.idle]
        parts += [str(state) for state in (each.statistics() for each in self._connections) if state.debts]
        return "; ".join(parts) or "everything is idle"

    def states(self) -> Iterator[tuple[str, object]]:
        """(component, its statistics) of all parts, also those at rest: for the state lines of a failing run."""
        yield "scheduler", self._scheduler.statistics()
        for client in self._clients:
            yield client.worker_id if isinstance(client, WorkerClient) else "scheduler", client.statistics()
        for rank, worker in enumerate(self._workers):
            yield f"worker{rank}", worker.statistics()
        for number, connection in enumerate(self._connections):
            yield f"connection{number}", connection.statistics()
        for server in self.servers:
            yield server.name, server.server.statistics()
            yield server.name, server.storage.statistics()
            for adapter in server.adapters:
                yield adapter.name, adapter.usage()

    def drop_l1(self) -> int:
        """Forget L1 everywhere; L2 keeps what it has."""
        return sum(server.storage.drop_l1() for server in self.servers)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Delete chunks from every tier, as an eviction would."""
        gone = frozenset(hashes)
        for server in self.servers:
            server.l1.delete([key for key in server.l1.resident_keys() if key.chunk_hash in gone])
            for adapter in server.adapters:
                adapter.delete(list(filter(lambda key: key.chunk_hash in gone, adapter.keys())))

    def ever_published(self, cell: Cell, salt: str) -> bool:
        group, rank, chunk_hash = cell
        server = self.servers[self.config.placement.server_of(rank, chunk_hash)]
        key = ObjectKey(chunk_hash, self.config.namespace.model_name, rank, group, salt)
        return key in server.l1.ever_published or key in self._past

    def held(self, request_id: str) -> tuple[set[Cell], int] | None:
        """As in `rungs.Cache`. None also where leases, or the session with all its leases, have ended under a lookup
        that was answered before: its promise was right then, and the load will find out. Nothing counts as held for a
        lookup that has failed or was not wanted, nothing of another tenant, and nothing beyond the length that the
        admission chose."""
        tracker = self._scheduler.tracker(request_id)
        if tracker is None or not tracker.looked_up_tokens:
            return None
        if tracker.generation <= self._generation_lost or any(
            server.l1.lapsed(tracker.session) for server in self.servers
        ):
            return None
        if tracker.chosen == 0:
            return set(), tracker.skip_chunks
        if self._lookup_failed(tracker.session, tracker.generation):
            return set(), tracker.skip_chunks
        if any(_died_of_idleness(tracker.session, server) for server in self.servers):
            return None
        keys = [key for server in self.servers for key in server.l1.protected(tracker.session)]
        wanted = None if tracker.chosen is None else frozenset(tracker.hashes[: tracker.chosen])
        cells = [key for key in keys if wanted is None or key.chunk_hash in wanted]
        return {cell_of(key) for key in cells if key.cache_salt == tracker.cache_salt}, tracker.skip_chunks

    def left_held(self, request_id: str) -> str:
        """Leases of a request that runs and loads nothing (any more), though nobody owes the servers a word; "": none.

        They are of no use to it, and keep others out of the cache until it ends.
        """
        tracker = self._scheduler.tracker(request_id)
        if tracker is None or tracker.phase is not Phase.RUNNING or not tracker.confirmed:
            return ""
        states = [connection.statistics() for connection in self._asking]
        if any(state.debts or state.outstanding or state.waiting for state in states):
            return ""
        keys = [key for server in self.living_servers for key in server.l1.protected(tracker.session)]
        return f"{request_id} runs and its lookup still has {len(keys)} cells under lease" if keys else ""

    def _lookup_failed(self, session: str, generation: int) -> bool:
        outcome = self._client.poll(session, generation)
        return outcome is not None and bool(outcome.reason)

    def lookup_of(self, request_id: str) -> int:
        tracker = self._scheduler.tracker(request_id)
        return -1 if tracker is None else tracker.generation

    def stores_inflight(self, request_id: str) -> int:
        return sum(worker.stores_inflight(request_id) for worker in self._workers)

    def counters(self) -> dict[str, int]:
        """What the rung table shows of the connector; the workers' counters are summed over ranks."""
        states = [worker.statistics() for worker in self._workers]
        return {
            "fences_waited": sum(state.fences_waited for state in states),
            "stores_cancelled": sum(state.stores_cancelled for state in states),
            "resumes_with_load": self._scheduler.statistics().resumes_with_load,
            "refusals": refusals(self._scheduler.admission),
        }

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        for connection in self._connections:
            connection.close()
        self._close_regions()
        for server in self.servers:
            await server.close()

    def _close_regions(self) -> None:
        for mapped in self._regions:
            for region in mapped.values():
                if isinstance(region, AttachedRegion):
                    region.close()


def _died_of_idleness(session: str, server: ServerStack) -> bool:
    """Whether the server knows the session no more, and has ended some because nobody named them."""
    return session not in server.server.session_names and server.server.statistics().sessions_expired > 0

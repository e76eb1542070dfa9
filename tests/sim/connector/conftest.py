"""`Desk`: an engine of one batch, driven by hand, before the real connector, clients, servers and simulated devices.

Each token has one word per group and rank that depends on all tokens before it. The forward pass reads its context
back from the pages: over wrong KV it writes wrong KV, so that a poisoned cell shows. `desk.run(scenario)` runs a
scenario and then holds the cache to account: nothing leased, held or staged, no session open, and every cell holds
its own bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore.admission import Limits
from kvcore.connectors.measured import LoadIfItPays
from kvcore.connectors.plan import StepMeta
from kvcore.connectors.scheduler import SchedulerConnector, SchedulerConnectorConfig
from kvcore.connectors.views import NO_TOKENS, Finished, RequestView, ScheduledRequest, StepView
from kvcore.connectors.worker import WorkerConnector, WorkerConnectorConfig
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.l1 import L1Cache
from kvcore.l2.memory import MemoryBackend, memory_adapter
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.ports import Copy
from kvcore.service.client import Connection, Region, SchedulerClient, WorkerClient, identity_of
from kvcore.service.server import CacheServer, ServerConfig
from kvcore.sim.engine.worker import ReportCombiner, WorkerReport
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.world import SimWorld
from kvcore.storage import Storage, StorageConfig

MS = 1_000_000
CHUNK = 16
BLOCKS = 512
FULL = ObjectGroup(GroupKind.FULL, 4, 4 * 8)
WINDOW = ObjectGroup(GroupKind.WINDOW, 8, 8 * 8, 24)
RECURRENT = ObjectGroup(GroupKind.RECURRENT, 16, 8)


def word_of(tokens: Sequence[int], end: int, group: int, rank: int) -> int:
    """The KV word of token `end - 1`."""
    text = repr((tuple(tokens[:end]), group, rank)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass
class Job:
    """A request as the engine sees it."""

    name: str
    tokens: list[int]
    salt: str = ""
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    brought: range = NO_TOKENS  # by another connector, for its next step

    def view(self) -> RequestView:
        return RequestView(self.name, tuple(self.tokens), len(self.tokens), self.salt)


@dataclass(frozen=True)
class Report:
    meta: StepMeta
    finished: Finished
    errors: frozenset[int]


class Server:
    """One cache server and what it stands on."""

    def __init__(self, desk: Desk, index: int) -> None:
        world, layout = desk.world, desk.layout
        arena = PlainArena(desk.l1_bytes)
        self.l1 = L1Cache(arena, LruPolicy)
        self.executor = world.executor(f"l2.{index}")
        adapter = memory_adapter("l2", executor=self.executor, notice_factory=world.notice, backend=MemoryBackend())
        self.storage = Storage(
            layout=layout,
            model_name="m",
            l1=self.l1,
            adapters=[adapter],
            clock=world.clock,
            config=StorageConfig(
                prefetch_budget_bytes=desk.l1_bytes, retain=True, load_slice_bytes=desk.load_slice_bytes
            ),
        )
        self.server = CacheServer(
            self.storage,
            layout=layout,
            model_name="m",
            identity=identity_of(desk.namespace, layout, desk.placement),
            placement=desk.placement,
            clock=world.clock,
            index=index,
            config=ServerConfig(segment=f"segment{index}"),
            on_bug=desk.loop.fail,
        )
        desk.regions[f"segment{index}"] = Region(arena)
        self.server.attach(world.listen(index))


class Desk:
    """See the module text. Times are virtual; a step takes as long as its copies and fences make it.

    `limits`: of an admission that loads what pays; None: everything is loaded. `token_ns`: to compute one token.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        groups: tuple[ObjectGroup, ...] = (FULL,),
        ranks: int = 1,
        servers: int = 1,
        load_async: bool = False,
        in_process: bool = True,
        l1_bytes: int = 1 << 16,
        load_slice_bytes: int = 1 << 16,
        page_ns: tuple[int, int] = (1_000, 5_000),
        worker: WorkerConnectorConfig | None = None,
        token_ns: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self.loop = SimLoop(seed)
        self.layout = CacheLayout(groups, ranks, CHUNK)
        self.namespace = Namespace("m", chunk_tokens=CHUNK)
        self.hasher = ChunkHasher(self.namespace)
        self.placement = Placement("rank" if ranks > 1 else "chunk", servers)
        self.l1_bytes = l1_bytes
        self.load_slice_bytes = load_slice_bytes
        self.page_ns = page_ns
        self.regions: dict[str, Region] = {}
        self.world = SimWorld(self.loop, in_process=in_process)
        self._worker_config = worker
        self._token_ns = token_ns
        self._limits = limits
        self.load_async = load_async
        self._combiner = ReportCombiner(ranks)
        self._known: dict[bytes, list[int]] = {}  # chunk hash -> the tokens up to its end
        self._next_block = 1
        self._allocated: set[int] = set()
        self._steps = 0

    # ---- building and ending

    def run(self, scenario: Callable[[Desk], Coroutine[Any, Any, None]], *, at_rest: bool = True) -> Desk:
        async def whole() -> None:
            self._build()
            await scenario(self)
            if at_rest:
                await self.at_rest()
            self._close()

        try:
            self.loop.run_until_complete(whole())
        finally:
            self.loop.close()
        return self

    def _build(self) -> None:
        count = self.placement.servers
        self.servers = [self.world.inside(f"server{i}", lambda i=i: Server(self, i)) for i in range(count)]  # type: ignore[misc]
        self.connections: list[Connection] = []
        config = SchedulerConnectorConfig(load_async=self.load_async)
        self.client = SchedulerClient(self._connect("scheduler"), self.placement, self.layout, self.world.clock)
        pays = None if self._limits is None else LoadIfItPays(self.layout, self.world.clock, self._limits)
        self.scheduler = SchedulerConnector(self.layout, self.hasher, self.client, config, pays)
        self.workers: list[WorkerConnector] = []
        self.devices: list[SimCopyEngine] = []
        self.pages: list[list[Any]] = []
        for rank in range(self.layout.ranks):
            self._build_worker(rank)

    def _build_worker(self, rank: int) -> None:
        name = f"worker{rank}"
        client = WorkerClient(
            self._connect(name), self.placement, self.layout, rank, name, lambda segment: self.regions[segment]
        )
        device = SimCopyEngine(self.loop, f"device{rank}", page_ns=self.page_ns)
        tokens = [1 if g.kind is GroupKind.RECURRENT else g.block_tokens for g in self.layout.groups]
        pages = [np.zeros((BLOCKS, 1, count, 1), dtype=np.uint64) for count in tokens]
        device.register_pages(pages)
        worker = WorkerConnector(self.layout, rank, client, self._worker_config, clock=self.world.clock)
        worker.register(pages, device)
        self.workers.append(worker)
        self.devices.append(device)
        self.pages.append(pages)

    def _connect(self, name: str) -> list[Connection]:
        identity = identity_of(self.namespace, self.layout, self.placement)
        made = [
            Connection(self.world.connect(i, name), identity, self.world.clock, index=i)
            for i in range(self.placement.servers)
        ]
        self.connections += made
        return made

    def _close(self) -> None:
        for connection in self.connections:
            connection.close()
        for server in self.servers:
            server.server.close()

    async def pause(self, time_ns: int = MS) -> None:
        done = self.loop.create_future()
        self.loop.call_later_ns(time_ns, done.set_result, None)
        await done

    async def settle(self) -> None:
        """Let everything that runs by itself come to its end."""
        for _ in range(1_000):
            states = [connection.statistics() for connection in self.connections]
            busy = any(state.outstanding or state.debts for state in states)
            if not busy and all(worker.idle for worker in self.workers) and all(s.storage.idle for s in self.servers):
                return
            await self.pause()
        raise AssertionError("the cache does not come to rest")

    async def at_rest(self) -> None:
        """Nothing is left behind, and nothing is in the cache that is not its key's."""
        await self.settle()
        state = self.scheduler.statistics()
        assert (state.requests_open, state.loads_open, state.orphans) == (0, 0, 0), state
        for server in self.servers:
            self.check_server(server)

    def check_server(self, server: Server) -> None:
        held = server.l1.statistics()
        assert (held.leases, held.holds, held.objects_staging, held.bytes_draining) == (0, 0, 0, 0), held
        books = server.server.statistics()
        assert (books.sessions, books.lookups_open, books.stores_open, books.reads_open) == (0, 0, 0, 0), books
        server.l1.check()
        self.check_bytes(server)

    def check_bytes(self, server: Server) -> None:
        """The oracle against poisoning."""
        for key in server.l1.resident_keys():
            tokens = self._known[key.chunk_hash]
            group = self.layout.groups[key.object_group_id]
            ends = (
                [len(tokens)] if group.kind is GroupKind.RECURRENT else range(len(tokens) - CHUNK + 1, len(tokens) + 1)
            )
            words = [word_of(tokens, end, key.object_group_id, key.kv_rank) for end in ends]
            slot = server.l1.slot_of(key)
            assert slot is not None
            assert bytes(server.l1.view(slot)) == np.array(words, dtype=np.uint64).tobytes(), "a poisoned cell"

    # ---- what a test sees

    def leases(self) -> int:
        return sum(server.l1.statistics().leases for server in self.servers)

    def resident(self, job: Job) -> list[int]:
        """Per chunk of the job's tokens: how many of its cells the servers hold."""
        keys = [
            key.chunk_hash for server in self.servers for key in server.l1.resident_keys() if key.cache_salt == job.salt
        ]
        return [keys.count(digest) for digest in self.hasher.hash_tokens(job.tokens)]

    def right(self, job: Job, tokens: int) -> bool:
        """Does every block of the job that is not null hold the right words for its first `tokens` tokens?"""
        return all(
            self._word_at(rank, group, job, end) in (None, word_of(job.tokens, end, group, rank))
            for rank in range(self.layout.ranks)
            for group in range(len(self.layout.groups))
            for end in self._ends(group, tokens)
        )

    def _ends(self, group: int, tokens: int) -> Iterable[int]:
        return (tokens,) if self.layout.groups[group].kind is GroupKind.RECURRENT and tokens else range(1, tokens + 1)

    def _word_at(self, rank: int, group: int, job: Job, end: int) -> int | None:
        block, offset = self._place(group, job, end)
        return int(self.pages[rank][group][block, 0, offset, 0]) if block else None

    def _place(self, group: int, job: Job, end: int) -> tuple[int, int]:
        """(block, offset) of token `end - 1`; recurrent: the state page after it."""
        spec = self.layout.groups[group]
        table, index = job.tables[group], (end - 1) // spec.block_tokens
        block = table[index] if index < len(table) else 0
        return block, 0 if spec.kind is GroupKind.RECURRENT else (end - 1) % spec.block_tokens

    # ---- what an engine does

    def job(self, name: str, tokens: int | Sequence[int], salt: str = "") -> Job:
        """A request; a number of tokens means the common prompt's first ones."""
        job = Job(name, [7 + i % 251 for i in range(tokens)] if isinstance(tokens, int) else list(tokens), salt)
        self.know(job.tokens)
        return job

    def know(self, tokens: Sequence[int]) -> None:
        for chunk, digest in enumerate(self.hasher.hash_tokens(tokens)):
            self._known[digest] = list(tokens[: (chunk + 1) * CHUNK])

    async def ask(self, job: Job, local: int = 0) -> int:
        """The engine asks once per step until there is an answer."""
        for _ in range(5_000):
            tokens, load_async = self.scheduler.matched_tokens(job.view(), local)
            if tokens is not None:
                assert load_async is (self.load_async and tokens > 0)
                return tokens
            await self.pause(MS // 5)
        raise AssertionError(f"{job.name}: no answer")

    def table(self, tokens: int) -> list[list[int]]:
        """Fresh blocks for so many tokens, in every group."""
        tables = []
        for spec in self.layout.groups:
            count = -(-tokens // spec.block_tokens)
            tables.append(list(range(self._next_block, self._next_block + count)))
            self._next_block += count
        return tables

    def admit(
        self, job: Job, external: int, local: int = 0, tables: list[list[int]] | None = None, shared: Sequence[int] = ()
    ) -> None:
        """Allocate, with `local` tokens found in the engine's own cache (or in `shared` blocks of another request)."""
        job.tables = self.table(len(job.tokens) + CHUNK) if tables is None else tables
        for rank in range(self.layout.ranks):
            for group in range(len(self.layout.groups)):
                for end in self._ends(group, local) if not shared else ():
                    self._write(rank, group, job, end, word_of(job.tokens, end, group, rank))
        own = {self._place(g, job, end)[0] for g in range(len(self.layout.groups)) for end in range(1, local + 1)}
        self._allocated |= {block for table in job.tables for block in table} - own - {0}
        self.scheduler.after_alloc(job.view(), tuple(list(table) for table in job.tables), external)
        job.computed = local + external

    def _write(self, rank: int, group: int, job: Job, end: int, word: int) -> None:
        block, offset = self._place(group, job, end)
        if block:
            self.pages[rank][group][block, 0, offset, 0] = word

    async def step(
        self, *entries: tuple[Job, int], preempted: Sequence[Job] = (), not_brought: Iterable[int] = ()
    ) -> Report:
        """Run one step: each job computes so many tokens. `not_brought`: blocks that another connector reports bad."""
        scheduled = tuple(
            ScheduledRequest(
                job.name, job.computed, count, tuple(job.tables), (), False, tuple(job.tokens), job.brought
            )
            for job, count in entries
        )
        view = StepView(self._steps, scheduled, frozenset(self._allocated), tuple(job.name for job in preempted), ())
        self._steps += 1
        self._allocated = set()
        meta = self.scheduler.build_meta(view)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=StepMeta) == meta
        tasks = [self.loop.create_task(self._run_rank(rank, meta, entries)) for rank in range(self.layout.ranks)]
        finished, errors = self._combiner.combine([await task for task in tasks])
        errors |= frozenset(not_brought)
        self.scheduler.update_output(finished, errors)
        for job, count in entries:
            job.brought = NO_TOKENS
            if not any(block in errors for table in job.tables for block in table):
                job.computed += count
        return Report(meta, finished, errors)

    async def receive(self) -> Report:
        """Empty steps until an asynchronous load is reported; that step's report."""
        for _ in range(200):
            report = await self.step()
            if report.finished.received:
                return report
            await self.pause(MS // 4)
        raise AssertionError("no load is ever reported")

    async def _run_rank(self, rank: int, meta: StepMeta, entries: Sequence[tuple[Job, int]]) -> WorkerReport:
        worker, device = self.workers[rank], self.devices[rank]
        if (fence := worker.fence(meta)) is not None:
            await fence
        worker.start_load(meta)
        if (load := worker.wait_load(0)) is not None:
            await load
        step_ns = MS // 5 + self._token_ns * sum(count for _, count in entries)
        event = device.run_compute(lambda: self._forward(rank, entries), step_ns)
        worker.save(0)
        worker.wait_save()
        await event.wait()
        return WorkerReport(worker.finished(()), worker.load_errors())

    def _forward(self, rank: int, entries: Sequence[tuple[Job, int]]) -> None:
        for job, count in entries:
            for group in range(len(self.layout.groups)):
                wrong = 0 if self.right(job, job.computed) else 1
                spec = self.layout.groups[group]
                last = job.computed + count
                for end in range(job.computed + 1, last + 1) if spec.kind is not GroupKind.RECURRENT else (last,):
                    block, _ = self._place(group, job, end)
                    assert not block or self.devices[rank].overwritten([block]) is None, "a store still reads the block"
                    assert not block or self.devices[rank].torn([block]) is None, "a load still writes the block"
                    self._write(rank, group, job, end, word_of(job.tokens, end, group, rank) ^ wrong)

    async def compute(self, job: Job, tokens: int | None = None, local: int = 0) -> Report:
        """Ask, admit and run a job's tokens in one step (a synchronous load included)."""
        external = await self.ask(job, local)
        self.admit(job, external, local)
        return await self.step((job, (len(job.tokens) if tokens is None else tokens) - job.computed))

    def finish(self, job: Job) -> bool:
        return self.scheduler.finished(
            RequestView(job.name, tuple(job.tokens), len(job.tokens)),
            tuple(job.tables) if job.tables else tuple([] for _ in self.layout.groups),
        )

    def preempt(self, job: Job) -> list[list[int]]:
        """Take the job's blocks away; they are returned, to be given to somebody else."""
        tables, job.tables, job.computed = job.tables, [], 0
        self.scheduler.preempted(job.name)
        return tables

    async def store(self, name: str, tokens: int | Sequence[int]) -> Job:
        """A whole request whose chunks are in the cache afterwards."""
        job = self.job(name, tokens)
        await self.compute(job)
        held = self.finish(job)
        await self.settle()
        report = await self.step()
        assert report.finished.sent == (frozenset({name}) if held else frozenset())
        return job

    def fail_loads(self, blocks: Iterable[int], rank: int = 0) -> None:
        bad = frozenset(blocks)

        def fault(copy: Copy) -> OSError | None:
            return OSError("the bus failed") if copy.label == "load" and copy.block_id in bad else None

        self.devices[rank].fault = fault


@pytest.fixture
def desk_of() -> Callable[..., Desk]:
    return Desk


@pytest.fixture
def hybrid() -> tuple[ObjectGroup, ...]:
    return (FULL, WINDOW, RECURRENT)

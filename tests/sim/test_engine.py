"""The simulated engine, driven by a small dictionary connector that knows groups, ranks, delays and failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvcore.connectors.views import NULL_BLOCK, BlockTable, Finished, RequestView, StepView
from kvcore.errors import CallerError, PeerError
from kvcore.groups import CacheLayout, GroupKind
from kvcore.ports import Copy, CopyEngine, DeviceEvent
from kvcore.sim.engine import Engine, EngineConfig, EngineStats, NullProbe, PagedMemory, Policy, RequestSpec
from kvcore.sim.engine.block_pool import BlockNames
from kvcore.sim.engine.device import POISON
from kvcore.sim.engine.request import Status
from kvcore.sim.engine.scheduler import Scheduler
from kvcore.sim.engine.step import StepOutput
from kvcore.sim.loop import SimLoop
from kvcore.sim.model import MODEL_KINDS, build_model
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.reference import Reference

KINDS = tuple(MODEL_KINDS)


# -- a device that does everything at once


class Done:
    """Has happened already, but whoever waits for it gives others a turn first."""

    error = None

    def __init__(self, done: bool = True) -> None:
        self.done = done

    async def wait(self) -> None:
        if not self.done:
            await asyncio.sleep(0)
            self.done = True

    def cancel(self) -> bool:
        return False

    def on_done(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(callback)


class InlineDevice:
    def run_compute(self, fn: Callable[[], None], duration_ns: int = 0) -> DeviceEvent:
        fn()
        return Done(False)

    def compute_event(self) -> DeviceEvent:
        return Done()

    def submit(self, copies: Sequence[Copy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> Done:
        for copy in copies:
            copy.target[:] = copy.source
        return Done()

    def close(self) -> None:
        return None


# -- a connector on a dictionary


@dataclass
class Load:
    request_id: str
    sync: bool
    cells: list[tuple[int, bytes, list[tuple[int, int]]]]  # group, key, (index in the cell, block)


@dataclass
class Meta:
    step: int
    loads: list[Load] = field(default_factory=list)
    stores: list[tuple[str, int, bytes, list[int]]] = field(default_factory=list)
    ended: tuple[str, ...] = ()


@dataclass
class Knobs:
    load_async: bool = False
    delay_steps: int = 3  # of an asynchronous load
    unknown_answers: int = 0  # this many times None before an answer
    fail_every: int = 0  # every n-th load loses its last cell
    hold_steps: int = 0  # steps between a request's end and `sent`
    skip_load: int = 0  # BROKEN: every n-th load brings nothing and says nothing
    overpromise: int = 0  # BROKEN


class DictConnector:
    """Stores every whole chunk whose blocks are there, synchronously, and loads by the layout's own prefix rule."""

    def __init__(self, layout: CacheLayout, knobs: Knobs) -> None:
        self.layout, self.knobs = layout, knobs
        self.cells: dict[tuple[int, int, bytes], np.ndarray] = {}  # rank, group, prefix
        self._keys: dict[tuple[int, ...], list[bytes]] = {}
        self.scheduler = DictScheduler(self)
        self.workers = [DictWorker(self, rank) for rank in range(layout.ranks)]

    def worker(self, rank: int) -> DictWorker:
        return self.workers[rank]

    def key(self, tokens: Sequence[int], chunk: int) -> bytes:
        keys = self._keys.get(tuple(tokens))
        if keys is None:
            raw, size = np.asarray(tokens, dtype=np.uint32).tobytes(), 4 * self.layout.chunk_tokens
            keys = self._keys[tuple(tokens)] = [raw[: end * size] for end in range(1, len(raw) // size + 1)]
        return keys[chunk]


class DictScheduler:
    def __init__(self, connector: DictConnector) -> None:
        self._connector = connector
        self._layout, self._knobs = connector.layout, connector.knobs
        self._asked: dict[str, int] = {}
        self._promise: dict[str, tuple[int, int]] = {}  # length in chunks, local tokens
        self._pending: list[Load] = []
        self._tokens: dict[str, Sequence[int]] = {}
        self.failed: dict[str, None] = {}
        self.views: list[StepView] = []
        self.preempted_ids: list[str] = []
        self.finished_ids: list[str] = []
        self.after_allocs: list[tuple[str, int]] = []

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        name, tokens, layout = request.request_id, request.tokens, self._layout
        assert local_tokens < len(tokens)
        assert all(local_tokens % group.block_tokens == 0 for group in layout.groups)
        if name in self.failed:
            return 0, False
        if self._asked.setdefault(name, 0) < self._knobs.unknown_answers:
            self._asked[name] += 1
            return None, False
        chunks = len(tokens) // layout.chunk_tokens
        keys = [self._connector.key(tokens, chunk) for chunk in range(chunks)]
        rows = [
            sum(1 << i for i, key in enumerate(keys) if (row.rank, row.group, key) in self._connector.cells)
            for row in layout.rows
        ]
        length = layout.best(layout.fold(rows, chunks, len(tokens)))
        usable = layout.usable_tokens(length, len(tokens))
        if self._knobs.overpromise and usable:
            return len(tokens) - local_tokens + self._knobs.overpromise, False
        if usable <= local_tokens:
            return 0, False
        self._promise[name] = (length, local_tokens)
        return usable - local_tokens, self._knobs.load_async

    def after_alloc(self, request: RequestView, blocks: BlockTable, external_tokens: int) -> None:
        name, layout = request.request_id, self._layout
        self.after_allocs.append((name, external_tokens))
        self._tokens[name] = request.tokens
        if external_tokens == 0:
            return
        length, local = self._promise.pop(name)
        cells = []
        for g, group in enumerate(layout.groups):
            mask = layout.unfold(length, len(request.tokens))[g]
            per_chunk = layout.blocks_per_chunk(g)
            for chunk in range(length):
                if mask >> chunk & 1:
                    first = chunk * per_chunk
                    if group.kind is GroupKind.RECURRENT:
                        first = (chunk + 1) * layout.chunk_tokens // group.block_tokens - 1
                    wanted = [
                        (i, blocks[g][first + i])
                        for i in range(per_chunk)
                        if blocks[g][first + i] != NULL_BLOCK and (first + i + 1) * group.block_tokens > local
                    ]
                    cells.append((g, self._connector.key(request.tokens, chunk), wanted))
        self._pending.append(Load(name, not self._knobs.load_async, cells))

    def build_meta(self, step: StepView) -> Meta:
        self.views.append(step)
        meta = Meta(step.step, self._pending, ended=step.finished)
        self._pending = []
        for scheduled in step.scheduled:
            end = scheduled.computed_tokens + scheduled.scheduled_tokens
            for chunk in range(end // self._layout.chunk_tokens):
                self._store(meta, scheduled.request_id, scheduled.blocks, chunk, end)
        return meta

    def _store(self, meta: Meta, name: str, blocks: BlockTable, chunk: int, end: int) -> None:
        layout = self._layout
        tokens = self._tokens[name]
        if (chunk + 1) * layout.chunk_tokens > len(tokens):
            return  # generated since the last admission: not known here
        for g, group in enumerate(layout.groups):
            boundary = (chunk + 1) * layout.chunk_tokens
            if group.kind is GroupKind.RECURRENT:
                index = boundary // group.block_tokens - 1
                ids = blocks[g][index : index + 1]
                if index == (end - 1) // group.block_tokens and boundary != end:
                    continue  # the running state, not a snapshot
            else:
                per_chunk = layout.blocks_per_chunk(g)
                ids = blocks[g][chunk * per_chunk : (chunk + 1) * per_chunk]
            if ids and NULL_BLOCK not in ids:
                meta.stores.append((name, g, self._connector.key(tokens, chunk), list(ids)))

    def preempted(self, request_id: str) -> None:
        self.preempted_ids.append(request_id)

    def finished(self, request: RequestView, blocks: BlockTable) -> bool:
        request_id = request.request_id
        self.finished_ids.append(request_id)
        self._pending = [load for load in self._pending if load.request_id != request_id]
        return self._knobs.hold_steps > 0

    def update_output(self, finished: Finished, error_blocks: frozenset[int]) -> None:
        return None


class DictWorker:
    def __init__(self, connector: DictConnector, rank: int) -> None:
        self._connector, self._rank, self._knobs = connector, rank, connector.knobs
        self._pages: Sequence[np.ndarray] = ()
        self._running: list[tuple[int, Load]] = []
        self._received: list[str] = []
        self._failed: list[str] = []
        self._errors: list[int] = []
        self._spoiled: dict[str, None] = {}
        self._held: list[tuple[int, str]] = []
        self._loads = 0
        self._meta = Meta(0)
        self._device: CopyEngine | None = None
        self.order: list[str] = []
        self.loaded_cells = 0

    def register(self, pages: Sequence[np.ndarray], device: CopyEngine) -> None:
        self._pages, self._device = pages, device

    def fence(self, meta: Meta) -> None:
        self.order = ["fence"]

    def start_load(self, meta: Meta) -> None:
        self.order.append("start_load")
        self._meta, self._spoiled = meta, {}
        for load in meta.loads:
            if load.sync:
                self._load(load)
            else:
                self._running.append((meta.step + self._knobs.delay_steps + self._rank, load))
        for due, load in list(self._running):
            if due <= meta.step:
                self._running.remove((due, load))
                self._load(load)
                self._received.append(load.request_id)

    def _load(self, load: Load) -> None:
        self._loads += 1
        if self._knobs.skip_load and self._loads % self._knobs.skip_load == 0:
            return
        fails = self._knobs.fail_every and self._loads % self._knobs.fail_every == 0
        for position, (g, key, wanted) in enumerate(load.cells):
            if fails and position == len(load.cells) - 1:
                self._connector.scheduler.failed[load.request_id] = None
                self._spoiled[load.request_id] = None
                if load.sync or len(self._pages) == 1:
                    self._errors.extend(block for _, block in wanted)
                else:
                    self._failed.append(load.request_id)
                return
            cell = self._connector.cells[self._rank, g, key]
            self.loaded_cells += 1
            for index, block in wanted:
                self._pages[g][block] = cell[index]

    def wait_load(self, layer: int) -> None:
        self.order.append(f"wait_load {layer}")

    def save(self, layer: int) -> None:
        self.order.append(f"save {layer}")

    def wait_save(self) -> Awaitable[None]:
        self.order.append("wait_save")
        return self._save()

    async def _save(self) -> None:
        assert self._device is not None
        await self._device.compute_event().wait()
        for name, g, key, ids in self._meta.stores:
            if name not in self._spoiled:
                self._connector.cells.setdefault((self._rank, g, key), self._pages[g][ids].copy())

    def finished(self, request_ids: Sequence[str]) -> Finished:
        step = self._meta.step
        self._held += [(step + self._knobs.hold_steps, name) for name in request_ids if self._knobs.hold_steps]
        sent = [name for due, name in self._held if due <= step]
        self._held = [(due, name) for due, name in self._held if due > step]
        received, self._received = self._received, []
        failed, self._failed = self._failed, []
        return Finished(frozenset(sent), frozenset(received), frozenset(failed))

    def load_errors(self) -> frozenset[int]:
        errors, self._errors = self._errors, []
        return frozenset(errors)


# -- the rig


def workload(seed: int, count: int = 24, families: int = 6, longest: int = 300) -> list[RequestSpec]:
    draws = np.random.default_rng(seed)
    roots = [draws.integers(0, 1 << 30, longest) for _ in range(families)]
    specs = []
    for index in range(count):
        shared = int(draws.integers(1, 12)) * 16
        prompt = np.concatenate([roots[index % families][:shared], draws.integers(0, 1 << 30, longest)])
        length = int(draws.integers(8, longest))
        if index % 3 == 0:
            length = max(16, length // 16 * 16) + int(draws.integers(-1, 2))
        tokens = tuple(int(token) for token in prompt[:length])
        specs.append(RequestSpec(f"r{index}", tokens, int(draws.integers(6, 24)), 0, int(index % 4)))
    return specs


class Recorder(NullProbe):
    """Counts, and holds the engine to: a block is written only by whom it belongs to, and nobody frees it twice."""

    def __init__(self) -> None:
        self.holders: dict[int, list[str]] = {}
        self.events: list[tuple[Any, ...]] = []

    def block_allocated(self, block: int, request_id: str) -> None:
        assert not self.holders.get(block), "taken while held"
        self.holders[block] = [request_id]

    def block_shared(self, block: int, request_id: str) -> None:
        self.holders.setdefault(block, []).append(request_id)

    def block_freed(self, block: int, request_id: str) -> None:
        self.holders[block].remove(request_id)

    def forward_writes(self, rank: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert len(self.holders[block]) >= 1, "written while nobody holds it"

    def poisoned(self, rank: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            assert len(self.holders[block]) == 1, "poisoned while shared"

    def request_admitted(self, request_id: str, local_tokens: int, external_tokens: int) -> None:
        self.events.append(("admitted", request_id, local_tokens, external_tokens))

    def preempted(self, request_id: str) -> None:
        self.events.append(("preempted", request_id))

    def load_ended(self, request_id: str, valid_tokens: int, promised_tokens: int) -> None:
        self.events.append(("load", request_id, valid_tokens, promised_tokens))


class Rig:
    def __init__(self, kind: str = "full", ranks: int = 1, knobs: Knobs | None = None, blocks: int = 2_000) -> None:
        self.layout, self.model = build_model(kind, ranks, full_block_tokens=4, window_block_tokens=4)
        self.reference = Reference(self.model, self.layout)
        self.pages = PagedMemory(self.layout, self.model, blocks)
        self.probe = Recorder()
        self.connector = DictConnector(self.layout, knobs) if knobs is not None else None
        self.config = EngineConfig(blocks, max_num_seqs=16, max_batched_tokens=128)
        self.engine = Engine(
            self.config, self.model, self.layout, self.pages, [InlineDevice()] * ranks, self.connector, self.probe
        )

    def run(self, specs: Sequence[RequestSpec], **settings: Any) -> dict[str, list[int]]:
        self.engine.configure(replace(self.config, **settings))
        got = asyncio.run(self.engine.run(specs))
        assert not any(self.probe.holders.values()), "blocks are still held"
        return got

    def expected(self, specs: Sequence[RequestSpec]) -> dict[str, list[int]]:
        return {spec.request_id: self.reference.tokens(spec.prompt, spec.output_tokens) for spec in specs}

    @property
    def stats(self) -> EngineStats:
        return self.engine.statistics()

    @property
    def cells(self) -> DictConnector:
        assert self.connector is not None
        return self.connector


TIGHT = {"full": 140, "full+window": 180, "full+window+recurrent": 180}
"""Blocks that hold the longest request and about as much again."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("policy", list(Policy))
def test_without_a_connector_tokens_equal_the_reference_also_when_preempted(
    kind: str, prefix_cache: bool, policy: Policy
) -> None:
    rig, specs = Rig(kind), workload(1)
    assert rig.run(specs, prefix_cache=prefix_cache, policy=policy) == rig.expected(specs)
    assert rig.stats.preemptions == 0
    assert (rig.stats.local_hit_tokens > 0) == prefix_cache
    got = rig.run(specs, prefix_cache=prefix_cache, policy=policy, num_blocks=TIGHT[kind])
    assert got == rig.expected(specs)
    assert rig.stats.preemptions > 0
    assert rig.stats.resumes > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load_async", [False, True])
@pytest.mark.parametrize(("ranks", "prefix_cache"), [(1, True), (2, False)])
def test_cold_hot_and_preempted_tokens_equal_the_reference(
    kind: str, ranks: int, load_async: bool, prefix_cache: bool
) -> None:
    rig, specs = Rig(kind, ranks, Knobs(load_async=load_async, hold_steps=2)), workload(2)
    expected = rig.expected(specs)
    assert rig.run(specs, prefix_cache=prefix_cache) == expected, "cold"
    assert rig.run(specs, prefix_cache=prefix_cache) == expected, "hot"
    assert rig.stats.external_hit_tokens > 1_000
    assert rig.run(specs, prefix_cache=prefix_cache, num_blocks=TIGHT[kind]) == expected, "preempted"
    assert rig.stats.preemptions > 0
    assert rig.stats.resumes_with_load > 0
    for (rank, group, key), cell in rig.cells.cells.items():
        tokens = np.frombuffer(key, dtype=np.uint32)
        assert cell.tobytes() == rig.reference.cell_bytes(tokens, group, rank, len(tokens) // 16 - 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load_async", [False, True])
def test_failed_loads_are_recomputed_and_never_enter_the_prefix_cache(kind: str, load_async: bool) -> None:
    rig, specs = Rig(kind, 2, Knobs(load_async=load_async)), workload(1)
    expected = rig.expected(specs)
    assert rig.run(specs) == expected
    rig.cells.knobs.fail_every = 2
    for blocks in (2_000, TIGHT[kind]):
        rig.cells.scheduler.failed.clear()
        assert rig.run(specs, num_blocks=blocks) == expected
        assert rig.stats.load_failures > 0
    partial = [event for event in rig.probe.events if event[0] == "load" and 0 < event[2] < event[3]]
    assert bool(partial) == (kind == "full"), "with one group the longest valid prefix is kept, with several nothing is"


def test_a_load_that_silently_brings_nothing_changes_the_tokens() -> None:
    for load_async in (False, True):
        rig, specs = Rig("full", 1, Knobs(load_async=load_async)), workload(3)
        assert rig.run(specs) == rig.expected(specs)
        rig.cells.knobs.skip_load = 4
        assert rig.run(specs, prefix_cache=False) != rig.expected(specs)


def test_an_unknown_answer_skips_the_request_and_lets_others_pass() -> None:
    rig, specs = Rig("full", 1, Knobs()), workload(4, count=10)
    assert rig.run(specs) == rig.expected(specs)
    rig.cells.knobs.unknown_answers = 5
    rig.cells.scheduler._asked.clear()
    rig.cells.scheduler._asked["r5"] = 5  # only this one is known at once
    rig.probe.events.clear()
    specs = [replace(spec, time_ns=0) for spec in specs]
    assert rig.run(specs, max_num_seqs=4) == rig.expected(specs)
    admitted = [event[1] for event in rig.probe.events if event[0] == "admitted"]
    assert admitted[0] == "r5"


@pytest.mark.parametrize("beyond_engine", [False, True])
def test_a_step_that_preempted_admits_nobody_unless_beyond_engine(beyond_engine: bool) -> None:
    rig, specs = Rig("full", 1, Knobs()), workload(5)

    async def serve() -> dict[str, list[int]]:
        serving = asyncio.ensure_future(rig.engine.run(specs))
        while rig.stats.tokens_generated < 20:
            await asyncio.sleep(0)
        rig.engine.force_preemptions()
        return await serving

    rig.engine.configure(replace(rig.config, beyond_engine=beyond_engine))
    assert asyncio.run(serve()) == rig.expected(specs)
    (view,) = [view for view in rig.cells.scheduler.views if view.preempted]
    resumed = [entry.request_id for entry in view.scheduled if entry.resumed]
    assert resumed == (list(view.preempted) if beyond_engine else [])


def test_a_forced_preemption_loses_all_blocks_and_changes_no_token() -> None:
    for load_async in (False, True):
        rig, specs = Rig("full+window+recurrent", 2, Knobs(load_async=load_async)), workload(12)

        async def serve(rig: Rig = rig, specs: list[RequestSpec] = specs) -> dict[str, list[int]]:
            serving = asyncio.ensure_future(rig.engine.run(specs))
            steps = 0
            while not serving.done():
                await asyncio.sleep(0)
                if rig.engine.statistics().steps >= steps + 3:
                    steps = rig.engine.statistics().steps
                    rig.engine.force_preemptions(2)
            return await serving

        assert rig.run(specs) == rig.expected(specs)
        rig.engine.configure(replace(rig.config, prefix_cache=False))
        assert asyncio.run(serve()) == rig.expected(specs)
        assert rig.stats.preemptions > 20
        assert rig.stats.resumes_with_load > 5
        assert not any(rig.probe.holders.values())


def test_the_first_come_is_never_the_victim_of_later_ones() -> None:
    rig, specs = Rig("full"), workload(6)
    rig.run(specs, num_blocks=TIGHT["full"])
    victims = {event[1] for event in rig.probe.events if event[0] == "preempted"}
    assert victims
    assert "r0" not in victims


def test_by_priority_the_most_urgent_is_never_preempted() -> None:
    rig = Rig("full")
    specs = [replace(spec, priority=0 if spec.request_id == "r20" else 5, time_ns=0) for spec in workload(6)]
    assert rig.run(specs, policy=Policy.PRIORITY, num_blocks=TIGHT["full"]) == rig.expected(specs)
    events = [event for event in rig.probe.events if event[0] in ("preempted", "admitted")]
    assert events[0][1] == "r20"
    assert ("preempted", "r20") not in events
    assert any(event[0] == "preempted" for event in events)


def test_every_call_of_a_step_comes_in_order() -> None:
    rig = Rig("full", 1, Knobs())
    rig.run([RequestSpec("a", tuple(range(1, 20)), 2)])
    empty_step = rig.cells.workers[0].order
    assert empty_step == ["fence", "start_load", "wait_save"]
    orders: list[list[str]] = []
    worker = rig.cells.workers[0]
    original = worker.finished
    worker.finished = lambda ids: (orders.append(list(worker.order)), original(ids))[1]  # type: ignore[method-assign]
    rig.run([RequestSpec("b", tuple(range(1, 20)), 2)])
    assert orders[0] == ["fence", "start_load", "wait_load 0", "save 0", "wait_load 1", "save 1", "wait_save"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load_async", [False, True])
def test_aborts_at_any_moment_leave_nothing_behind(kind: str, load_async: bool) -> None:
    rig, specs = Rig(kind, 2, Knobs(load_async=load_async, hold_steps=3)), workload(7)
    expected = rig.expected(specs)
    assert rig.run(specs) == expected
    aborted_loading = 0
    for seed in range(4):
        draws = np.random.default_rng(seed)
        victims = [specs[i].request_id for i in draws.choice(len(specs), 15, replace=False)]
        delays = [int(delay) for delay in draws.integers(0, 40, len(victims))]

        async def serve(victims: list[str] = victims, delays: list[int] = delays) -> dict[str, list[int]]:
            nonlocal aborted_loading
            serving = asyncio.ensure_future(rig.engine.run(specs))
            for turn in range(40):
                for victim, delay in zip(victims, delays, strict=True):
                    if delay == turn:
                        aborted_loading += victim in rig.engine.scheduler.open_requests(Status.LOADING)
                        rig.engine.abort(victim)
                target = rig.engine.statistics().steps + 1
                while not serving.done() and rig.engine.statistics().steps < target:
                    await asyncio.sleep(0)
            return await serving

        rig.engine.configure(replace(rig.config, num_blocks=TIGHT[kind]))
        got = asyncio.run(serve())
        assert not any(rig.probe.holders.values())
        assert rig.stats.requests_aborted > 0
        assert len(got) == len(specs) - rig.stats.requests_aborted
        assert all(tokens == expected[name] for name, tokens in got.items())
    finished = rig.cells.scheduler.finished_ids
    assert len(finished) == 5 * len(specs), "each request is told once that it has ended"
    assert (aborted_loading > 0) == load_async


def test_blocks_of_a_finished_request_are_held_until_every_rank_has_sent() -> None:
    rig = Rig("full", 2, Knobs(hold_steps=4))
    rig.run([RequestSpec("a", tuple(range(1, 40)), 2)])
    assert rig.stats.empty_steps >= 4


def test_a_reset_preempts_running_requests_and_forgets_the_prefix_cache() -> None:
    rig, specs = Rig("full", 1, Knobs()), [replace(spec, time_ns=0) for spec in workload(8)]

    async def serve() -> dict[str, list[int]]:
        serving = asyncio.ensure_future(rig.engine.run(specs))
        while rig.engine.statistics().tokens_generated < 5:
            await asyncio.sleep(0)
        rig.engine.reset_prefix_cache(reset_running_requests=True)
        return await serving

    assert asyncio.run(serve()) == rig.expected(specs)
    assert rig.stats.preemptions > 0
    view = next(view for view in rig.cells.scheduler.views if view.preempted)
    resumed = {entry.request_id for entry in view.scheduled if entry.resumed}
    assert resumed & set(view.preempted), "here preemption and resumption share a step"


def test_a_promise_beyond_the_last_token_is_refused() -> None:
    rig, specs = Rig("full", 1, Knobs()), workload(9, count=3)
    rig.run(specs)
    rig.cells.knobs.overpromise = 1
    with pytest.raises(PeerError, match="at most n-1 can be loaded"):
        rig.run(specs)


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    rig = Rig("full")
    with pytest.raises(CallerError, match="may need 11 blocks, the engine has 9"):
        rig.run([RequestSpec("a", tuple(range(40)), 4)], num_blocks=10)


def test_an_asynchronous_load_calls_after_alloc_twice() -> None:
    rig, spec = Rig("full", 1, Knobs(load_async=True)), RequestSpec("a", tuple(range(1, 41)), 2)
    rig.run([spec])
    rig.cells.scheduler.after_allocs.clear()
    rig.run([spec])
    assert rig.cells.scheduler.after_allocs == [("a", 32), ("a", 0)]


def test_a_whole_prompt_found_locally_is_used_up_to_its_last_token() -> None:
    rig = Rig("full+window")
    spec = RequestSpec("a", tuple(range(1, 65)), 3)
    again = replace(spec, request_id="b", time_ns=50_000_000)
    for partial_hits, local in ((True, 63), (False, 60)):
        rig.probe.events.clear()
        got = rig.run([spec, again], partial_hits=partial_hits)
        assert got["a"] == got["b"] == rig.reference.tokens(spec.prompt, 3)
        assert ("admitted", "b", local, 0) in rig.probe.events


def test_window_tables_forget_and_recurrent_tables_keep_boundaries_only() -> None:
    rig = Rig("full+window+recurrent", 1, Knobs())
    rig.run([RequestSpec("a", tuple(range(1, 200)), 6)])
    entries = [entry for view in rig.cells.scheduler.views for entry in view.scheduled]
    ends = [entry.computed_tokens + entry.scheduled_tokens for entry in entries]
    assert ends[:3] == [128, 192, 199], "prefill ends at multiples of the block and at the last boundary before n"
    last = entries[-1]
    window, recurrent = last.blocks[1], last.blocks[2]
    first_visible = (last.computed_tokens - 40 + 1) // 4
    assert not any(window[:first_visible])
    assert all(window[first_visible:])
    assert [index for index, block in enumerate(recurrent) if block] == [12]
    assert [index for index, block in enumerate(entries[0].blocks[2]) if block] == [7]


def test_fresh_blocks_are_poisoned_before_anything_can_read_them() -> None:
    rig, spec = Rig("full", 1, Knobs()), RequestSpec("a", tuple(range(1, 42)), 1)
    rig.pages.buffers[0][:] = 1
    rig.run([spec])
    view = rig.cells.scheduler.views[0]
    tail = rig.pages.groups[0][0][view.scheduled[0].blocks[0][-1]]
    assert (tail[:, 1:] == POISON).all(), "the rest of the last block"
    rig.run([spec], poison=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("host_ahead", [False, True])
def test_the_engine_runs_on_the_simulated_loop_and_device(kind: str, ranks: int, host_ahead: bool) -> None:
    loop = SimLoop(3)
    try:
        rig = Rig(kind, ranks, Knobs(load_async=True, hold_steps=2))
        specs = workload(11, count=20)
        devices = [SimCopyEngine(loop, f"worker{rank}") for rank in range(ranks)]
        config = replace(rig.config, num_blocks=TIGHT[kind], host_ahead=host_ahead)
        engine = Engine(config, rig.model, rig.layout, rig.pages, devices, rig.connector, rig.probe)

        async def passes() -> None:
            for _ in range(2):
                assert await engine.run(specs) == rig.expected(specs)

        loop.run_until_complete(passes())
        assert engine.statistics().external_hit_tokens > 0
    finally:
        loop.close()


def test_an_exception_in_the_forward_pass_reaches_the_caller() -> None:
    rig = Rig("full", 2, Knobs())

    def explode(rank: int, blocks: Sequence[int]) -> None:
        raise RuntimeError(f"rank {rank}")

    rig.probe.forward_writes = explode  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup) as caught:
        rig.run([RequestSpec("a", (1, 2, 3), 1)])
    assert caught.group_contains(RuntimeError)


class TwoPromises(DictScheduler):
    """Promises "short" its first 32 tokens and "long" its first 16, both to be loaded beside the steps."""

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        return {"short": 32, "long": 16}[request.request_id], True

    def after_alloc(self, request: RequestView, blocks: BlockTable, external_tokens: int) -> None:
        self._tokens[request.request_id] = request.tokens


def test_by_priority_a_loaded_request_without_room_lets_another_one_go_and_make_room() -> None:
    """Found by the swarm (seed 169): the most urgent of two loaded requests lacked blocks that the other one held, and
    nobody was admitted any more."""
    rig = Rig("full", 1, Knobs(load_async=True))
    config = EngineConfig(num_blocks=20, policy=Policy.PRIORITY)
    scheduler = Scheduler(config, rig.layout, TwoPromises(rig.cells), NullProbe(), BlockNames())
    scheduler.add(RequestSpec("short", tuple(range(1, 34)), 2, priority=5))
    scheduler.update(scheduler.schedule(), StepOutput({}))
    scheduler.add(RequestSpec("long", tuple(range(100, 170)), 2, priority=0))
    both = Finished(received=frozenset({"short", "long"}))
    scheduler.update(scheduler.schedule(), StepOutput({}, both))
    plan = scheduler.schedule()
    assert [entry.request.request_id for entry in plan.entries] == ["short"]

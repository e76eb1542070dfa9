"""An engine's tensors under the connector: registered by discovery, fingerprint and round trip; stored and loaded by
paged copies, through the CPU's engine and through CUDA's on an emulated device; each link of the event order that is
left out is caught by bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvcore.connectors.page_check import check_tensors
from kvcore.connectors.pages import ArrayPages, TensorPages
from kvcore.connectors.plan import CellBlocks, LoadPlan, StepMeta, StorePlan
from kvcore.connectors.registration import discover, fingerprints, layout_name, register
from kvcore.connectors.views import NULL_BLOCK
from kvcore.connectors.worker import WorkerConnector
from kvcore.device.cpu_engine import CpuCopyEngine
from kvcore.device.cuda_engine import CudaCopyEngine
from kvcore.device.examples import EXAMPLES, Shape, build
from kvcore.device.formats import LayoutHints
from kvcore.errors import ConfigError, InternalError
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.l1 import L1Cache
from kvcore.ladder.cuda_mutants import DoneWhenQueued, ProducerIsNotWaitedFor
from kvcore.ladder.emulated_cuda import EmulatedCuda
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.deaths import DeathWatch, this_process
from kvcore.service.client import (
    Connection,
    ConnectionConfig,
    Region,
    SchedulerClient,
    SchedulerConfig,
    WorkerClient,
    identity_of,
)
from kvcore.service.local import LocalServerTransport
from kvcore.service.server import CacheServer, ServerConfig
from kvcore.storage import Storage, StorageConfig

TOKENS, LAYERS, WIDTH, BLOCKS, PARTS = 2, 2, 512, 12, 2
BLOCK_BYTES = LAYERS * TOKENS * WIDTH
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, TOKENS, BLOCK_BYTES),), 1, PARTS * TOKENS)
SOURCES, TARGETS = (3, 1), (7, 4)
STEPS, SEEDS = 5, range(40)
PATIENCE_S = 60
"""Only a hang takes so long."""
CONNECTION = ConnectionConfig(request_timeout_ns=PATIENCE_S * 10**9)
LOOKUP = SchedulerConfig(lookup_timeout_ns=PATIENCE_S * 10**9, server_timeout_ns=PATIENCE_S * 10**9)


def tensors() -> list[Any]:
    """One per layer, blocks of all layers apart."""
    return [torch.zeros((BLOCKS, TOKENS, WIDTH), dtype=torch.uint8) for _ in range(LAYERS)]


def hints(**more: Any) -> LayoutHints:
    return LayoutHints(block_tokens=TOKENS, **more)


class Rig:
    """A cache in this process and one worker whose engine fills the same two blocks anew in every step."""

    def __init__(self, device: Any, fill: Callable[[Callable[[], None]], object]) -> None:
        loop, clock, placement = asyncio.get_running_loop(), SystemClock(), Placement("chunk", 1)
        self.layers = tensors()
        pages = discover([(self.layers, hints())])
        namespace = Namespace("m", chunk_tokens=PARTS * TOKENS, layout=layout_name(LAYOUT, fingerprints(pages)))
        identity = identity_of(namespace, LAYOUT, placement)
        self.hashes = ChunkHasher(namespace).hash_tokens(range(STEPS * PARTS * TOKENS))
        self.device, self.pages, self._fill = device, pages, fill
        arena = PlainArena(1 << 20)
        self.l1 = L1Cache(arena, LruPolicy)
        self.storage = Storage(
            layout=LAYOUT, model_name="m", l1=self.l1, adapters=[], clock=clock,
            config=StorageConfig(prefetch_budget_bytes=1 << 20),
        )  # fmt: skip
        self.server = CacheServer(
            self.storage, layout=LAYOUT, model_name="m", identity=identity, placement=placement, clock=clock,
            config=ServerConfig(), on_bug=self._bug,
        )  # fmt: skip
        road = LocalServerTransport(loop)
        self.server.attach(road)
        self.connections = [Connection(road.connect(), identity, clock, CONNECTION) for _ in range(2)]
        self.client = WorkerClient(self.connections[:1], placement, LAYOUT, 0, "w", lambda segment: Region(arena))
        self.scheduler = SchedulerClient(self.connections[1:], placement, LAYOUT, clock, LOOKUP)
        self.worker = WorkerConnector(LAYOUT, 0, self.client, clock=clock)
        self.wrong: list[str] = []
        self.published = 0
        self._commit, self.storage.commit_store = self.storage.commit_store, self._committed  # type: ignore[method-assign]

    def _bug(self, error: BaseException) -> None:
        self.wrong.append(repr(error))

    def _committed(self, tag: str, holder: str, keys: Any) -> Any:
        """At the moment of publication every byte must be there."""
        answers = self._commit(tag, holder, keys)
        for key in keys:
            slot = self.l1.slot_of(key)
            found = set(np.frombuffer(self.l1.view(slot), np.uint8).tolist()) if slot is not None else set()
            step = 1 + self.hashes.index(key.chunk_hash)
            self.published += 1
            if found != {step}:
                self.wrong.append(f"step {step}: {sorted(found)}")
        return answers

    async def forward(self, number: int) -> None:
        """The blocks are filled with the step's number, and stored."""
        cell = CellBlocks(0, number - 1, self.hashes[number - 1], SOURCES)
        await self._step(StepMeta(number, SOURCES, (), (StorePlan("r", number, "", (cell,)),), ()), number)

    async def _step(self, meta: StepMeta, number: int = 0) -> None:
        """In the order of every engine: fence, loads, forward pass, stores."""
        waiting = self.worker.fence(meta)
        if waiting is not None:
            await waiting
        self.worker.start_load(meta)
        loading = self.worker.wait_load(0)
        if loading is not None:
            await loading
        for layer in self.layers if number else ():
            self._fill(partial(self._write, layer, number))
        self.worker.wait_save()
        for _ in range(30):  # until its messages have gone to and fro: the copy is with the device then
            await asyncio.sleep(0)

    def _write(self, layer: Any, number: int) -> None:
        layer[list(SOURCES)] = number

    async def run(self) -> None:
        await register(self.worker, self.pages, self.device, fingerprints(self.pages))
        for number in range(1, STEPS + 1):
            await self.forward(number)
        await self.at_rest()

    async def at_rest(self) -> None:
        while not self.worker.idle:
            await asyncio.wait([*self.worker._jobs])

    async def load(self, blocks: tuple[int, int]) -> frozenset[int]:
        """The second step's cell into `blocks`. The blocks of it that failed."""
        self.scheduler.start("s", 1, self.hashes[:2], prompt_tokens=2 * PARTS * TOKENS + 1)
        outcome = await self.scheduler.wait("s", 1)
        self.scheduler.settle("s", 1, outcome.best)
        plan = LoadPlan("r", "s", 1, False, (CellBlocks(0, 1, self.hashes[1], blocks),))
        await self._step(StepMeta(STEPS + 1, TARGETS, (plan,), (), ()))
        await self.at_rest()
        return self.worker.load_errors()

    async def close(self) -> None:
        self.client.close()
        for connection in self.connections:
            connection.close()
        self.server.close()
        await self.storage.close()
        self.device.close()


def on_cuda(
    scenario: Callable[[Rig], Coroutine[Any, Any, None]], engine: type[CudaCopyEngine] = CudaCopyEngine, seed: int = 0
) -> Rig:
    gpu = EmulatedCuda(seed)
    try:
        return run(scenario, lambda loop: engine(loop, gpu), lambda device: partial(gpu.compute_on, gpu.compute))
    finally:
        gpu.close()


def on_cpu(scenario: Callable[[Rig], Coroutine[Any, Any, None]]) -> Rig:
    return run(scenario, CpuCopyEngine, lambda device: device.run_compute)


def run(scenario: Any, engine: Callable[[Any], Any], fill_of: Callable[[Any], Any]) -> Rig:
    async def whole() -> Rig:
        device = engine(asyncio.get_running_loop())
        rig = Rig(device, fill_of(device))
        async with asyncio.timeout(PATIENCE_S):
            await scenario(rig)
            await rig.close()
        return rig

    return asyncio.run(whole())


@pytest.mark.parametrize("on", [on_cpu, on_cuda])
def test_an_engines_tensors_are_stored_and_loaded_into_other_blocks(on: Callable[..., Rig]) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.run()
        assert await rig.load((TARGETS[0], NULL_BLOCK)) == frozenset()

    rig = on(scenario)
    assert (rig.wrong, rig.published) == ([], STEPS)
    for layer in rig.layers:
        assert (layer[TARGETS[0]] == 2).all()
        assert not layer[NULL_BLOCK].any()
        assert not layer[TARGETS[1]].any()
        assert (layer[list(SOURCES)] == STEPS).all()


# -- what is left out is caught


async def stores(rig: Rig) -> None:
    await rig.run()


def test_no_order_of_the_device_lets_wrong_bytes_be_published() -> None:
    for seed in range(8):
        rig = on_cuda(stores, seed=seed)
        assert (rig.wrong, rig.published) == ([], STEPS)


def caught(engine: type[CudaCopyEngine] = CudaCopyEngine) -> bool:
    def found(seed: int) -> bool:
        try:
            return bool(on_cuda(stores, engine, seed).wrong)
        except InternalError:  # the round trip at registration has seen it
            return True

    return any(map(found, SEEDS))


@pytest.mark.parametrize("mutant", [ProducerIsNotWaitedFor, DoneWhenQueued])
def test_an_engine_that_leaves_out_an_event_is_caught(mutant: type[CudaCopyEngine]) -> None:
    assert caught(mutant)


def test_a_missing_fence_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def fence(self: WorkerConnector, meta: Any) -> None:
        self._meta = meta

    monkeypatch.setattr(WorkerConnector, "fence", fence)
    assert caught()


# -- registration


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda-emulated"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_layout_passes_the_round_trip_through_the_engine_and_is_as_before(name: str, cuda: bool) -> None:
    example = build(name, Shape(layers=2, blocks=5, tokens=4, heads=2, size=4))
    pages = discover([(example.kv, example.hints)])
    before = [part.clone() for part in pages.groups[0].parts]
    check(pages, cuda)
    assert all(bytes_of(part) == bytes_of(old) for part, old in zip(pages.groups[0].parts, before, strict=True))


def bytes_of(part: Any) -> bytes:
    return bytes(part.contiguous().view(-1).view(torch.uint8).numpy())


def check(pages: TensorPages, cuda: bool, spoil: Callable[[Any], Any] = lambda engine: engine) -> None:
    gpu = EmulatedCuda()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        engine = CudaCopyEngine(loop, gpu) if cuda else CpuCopyEngine(loop)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await check_tensors(pages.groups, spoil(engine))
        finally:
            engine.close()

    try:
        asyncio.run(run())
    finally:
        gpu.close()


class Forgetful:
    """An engine that moves nothing of what it says it has moved."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def compute_event(self) -> Any:
        return self._inner.compute_event()

    def submit(self, copies: Any, **more: Any) -> Any:
        return self._inner.submit((), **more)


@pytest.mark.parametrize("cuda", [False, True], ids=["cpu", "cuda-emulated"])
def test_an_engine_that_moves_nothing_is_refused_and_the_pages_are_as_before(cuda: bool) -> None:
    pages = discover([(tensors(), hints())])
    with pytest.raises(InternalError, match="a block that was written differs"):
        check(pages, cuda, Forgetful)
    assert not any(part.any() for part in pages.groups[0].parts)


def test_pages_of_another_layout_than_the_keys_were_named_for_are_refused() -> None:
    async def scenario(rig: Rig) -> None:
        opaque = discover([(rig.layers, hints(opaque="another order"))])
        with pytest.raises(ConfigError, match="named for other bytes"):
            await register(rig.worker, rig.pages, rig.device, fingerprints(opaque))

    on_cpu(scenario)


def test_servers_that_copy_by_themselves_are_refused_pages_on_a_device() -> None:
    """They can open shared memory of the host only."""

    async def scenario(rig: Rig) -> None:
        deaths = DeathWatch(asyncio.get_running_loop())
        client = WorkerClient(
            rig.connections[:1], Placement("chunk", 1), LAYOUT, 0, "v", lambda segment: Region(PlainArena(1 << 20)),
            this_process(), "server", deaths,
        )  # fmt: skip
        worker = WorkerConnector(LAYOUT, 0, client, share=lambda pages: pytest.fail("pages on a device were shared"))
        with pytest.raises(ConfigError, match="no server can copy pages on meta"):
            worker.register(discover([([layer.to("meta") for layer in rig.layers], hints())]), rig.device)
        client.close()
        deaths.close()

    on_cpu(scenario)


def test_groups_on_several_devices_have_no_device_in_common() -> None:
    pages = discover([(tensors(), hints()), ([layer.to("meta") for layer in tensors()], hints())])
    with pytest.raises(ConfigError, match="several devices: cpu, meta"):
        _ = pages.device_type


def test_the_name_of_a_layout_tells_layouts_of_the_pages_apart() -> None:
    names = {
        layout_name(LAYOUT, fingerprints(discover([(layers, more)])))
        for layers, more in (
            (tensors(), hints()),
            (tensors(), hints(opaque="a")),
            (tensors(), hints(opaque="b")),
            (tensors()[:1], hints()),
        )
    }
    assert len(names) == 4


def test_both_kinds_of_pages_give_the_same_bytes() -> None:
    """A cell does not tell who has stored it."""
    memory = torch.randint(0, 256, (BLOCKS, LAYERS, TOKENS, WIDTH), dtype=torch.uint8)
    arrays, paged = ArrayPages([memory.numpy()]), discover([(list(memory.unbind(1)), hints())])
    found = []
    for pages in (arrays, paged):
        cell = bytearray(PARTS * BLOCK_BYTES)
        assert pages.block_bytes(0) == BLOCK_BYTES
        carry_out(pages.out_of(0, SOURCES, memoryview(cell)))
        found.append(bytes(cell))
        carry_out(pages.into(0, TARGETS, memoryview(cell)))
        assert torch.equal(memory[list(TARGETS)], memory[list(SOURCES)])
    assert found[0] == found[1]


def carry_out(copies: list[Any]) -> None:
    async def run() -> None:
        engine = CpuCopyEngine(asyncio.get_running_loop())
        ticket = engine.submit(copies, stream="copy")
        await ticket.wait()
        assert ticket.error is None
        engine.close()

    asyncio.run(run())

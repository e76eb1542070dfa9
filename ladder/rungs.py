"""The rungs: what each pass runs, and what it must have shown.

    0  reference       one request at a time, no cache, no own prefix cache; also against the dense reference
    1  no cache        full concurrency, the engine alone
    2  cold            full concurrency, empty cache
    3  hot from L1     the same prompts, cache warm
    3b hot from L2     L1 dropped before
    4  preempted       part of the chunks forgotten, L1 dropped, too few blocks
    replay             everything is read back without pressure

Rung 4 forgets on purpose: where everything is cached nothing is stored, and the dangerous moment - a victim whose
stores are in flight - would never come.

One `Stage` per configuration: the engine, its oracles, the connector and the workload. It lives for one climb.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvcore.connectors.interface import Connector
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher
from kvcore.ladder.result import Floors, RungCounts, RungResult
from kvcore.sim.engine.config import EngineConfig
from kvcore.sim.engine.device import ComputeDevice, PagedMemory
from kvcore.sim.engine.engine import Engine
from kvcore.sim.engine.request import RequestSpec
from kvcore.sim.model import FingerprintModel
from kvcore.sim.oracles.engine import CopyWatch, EngineOracle
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.hits import Cell, HitOracle, usable_prefix
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.workload import Draws, Workload

ROOMY_BLOCKS = 4096
WAVES_MAX = 6
TIGHTNESS_PERCENT = (125, 105, 180)
TIGHT_STEP_TOKENS = 64

FLOORS = {
    "0": Floors(requests=120),
    "1": Floors(requests=120),
    "2": Floors(requests=120, stores_verified=250),
    "3": Floors(requests=120, loads_verified=150, hit_share=0.8),
    "3b": Floors(requests=120, loads_verified=150, hit_share=0.8),
    "4": Floors(
        requests=120,
        loads_verified=200,
        stores_verified=100,
        preemptions_store_inflight=20,
        stores_cancelled=1,
        resumes_with_load=1,
        hit_share=0.05,
    ),
    "replay": Floors(requests=120, loads_verified=500, hit_share=0.8),
}
"""What each pass must have done in one configuration of the full matrix, with 120 requests."""


def floors_for(requests: int) -> dict[str, Floors]:
    """`FLOORS` for a climb of another size: counts in proportion, shares unchanged."""
    return {rung: floors.scaled(requests, FLOORS["0"].requests) for rung, floors in FLOORS.items()}


class Cache(Connector, Protocol):
    """A connector that the ladder can also look behind: kvcore's own (`CacheStack`), or a stranger's in
    `StrangerCache`."""

    async def settle(self) -> None:
        """Return at rest; report what is left behind."""
        ...

    def drop_l1(self) -> int: ...

    def forget(self, hashes: Sequence[bytes]) -> None: ...

    def ever_published(self, cell: Cell, salt: str) -> bool:
        """Would a cache that forgot nothing hold this cell of this tenant by now?"""
        ...

    def held(self, request_id: str) -> tuple[Collection[Cell], int] | None:
        """Cells under lease for the request's lookup, and the chunks it was told to skip. None: there is no lookup."""
        ...

    def left_held(self, request_id: str) -> str:
        """Words for leases of a running request that it has no use for; "": there are none."""
        ...

    def lookup_of(self, request_id: str) -> int:
        """A number that changes with every new lookup of the request."""
        ...

    def stores_inflight(self, request_id: str) -> int: ...

    def counters(self) -> dict[str, int]: ...


class Pressure:
    """What somebody does to the world while a ladder is climbed in it. This one does nothing."""

    def before(self, rung: str) -> None:
        """Everything is at rest; the next thing is this pass (each wave of it)."""

    async def during(self, rung: str, engine: Engine) -> None:
        """Runs beside each pass with the cache, and is cancelled at its end."""


class WatchableDevice(ComputeDevice, CopyWatch, Protocol):
    """A device that also tells the oracle about its unfinished copies."""


@dataclass(frozen=True, slots=True)
class StageParts:
    """What a target provides for one configuration. `reference`: rung 0's tokens, if they were run already.

    `at_rest` looks at the cache after every pass with it, given the chunk hashes of each request's whole sequence.
    """

    layout: CacheLayout
    model: FingerprintModel
    hasher: ChunkHasher
    truth: Truth
    findings: Findings
    devices: Sequence[WatchableDevice]
    memory: PagedMemory
    workload: Workload
    cache: Cache
    seed: int
    host_ahead: bool = True
    idle_step_ns: int = 1_000_000
    floors: Mapping[str, Floors] = field(default_factory=lambda: FLOORS)
    pressure: Pressure | None = None
    reference: Mapping[str, list[int]] | None = None
    at_rest: Callable[[Mapping[str, list[bytes]]], None] | None = None


async def run_alone(engine: Engine, requests: Sequence[RequestSpec]) -> dict[str, list[int]]:
    """Rung 0's runs: one request at a time, no cache of any kind. Its tokens per request."""
    engine.configure(EngineConfig(num_blocks=ROOMY_BLOCKS, prefix_cache=False, max_num_seqs=1))
    answers: dict[str, list[int]] = {}
    for spec in requests:
        answers |= await engine.run([RequestSpec(spec.request_id, spec.prompt, spec.output_tokens)])
    return answers


class LadderOracle(EngineOracle):
    """The engine's oracle, which also judges promises and adds up what could have been loaded."""

    def __init__(self, parts: StageParts) -> None:
        super().__init__(
            parts.layout,
            parts.model,
            parts.memory,
            parts.truth,
            parts.findings,
            parts.devices,
            parts.cache.stores_inflight,
        )
        self._cache = parts.cache
        self._hits = HitOracle(parts.layout, parts.findings)
        self.hashes: dict[str, list[bytes]] = {}  # of each request's whole sequence
        self.aborted: set[str] = set()  # in the current pass
        self._salts = {spec.request_id: spec.cache_salt for spec in parts.workload.requests}
        self._judged: dict[str, tuple[int, int | None, int]] = {}
        self.tokens_loaded = 0
        self.tokens_loadable = 0

    def engine_restarted(self) -> None:
        super().engine_restarted()
        self._judged.clear()

    def asked(self, request_id: str, local_tokens: int, answer: int | None) -> None:
        super().asked(request_id, local_tokens, answer)
        question = (local_tokens, answer, self._cache.lookup_of(request_id))
        if self._judged.get(request_id) == question:
            return  # the same answer to the same question, on the strength of the same lookup
        self._judged[request_id] = question
        held = self._cache.held(request_id) if answer is not None else None
        if held is None:
            return
        cells, skip = held
        assert answer is not None
        tokens = self.tokens_of(request_id)
        self._hits.check_answer(request_id, answer, local_tokens, self.hashes[request_id], tokens, cells, skip)

    def request_admitted(self, request_id: str, local_tokens: int, external_tokens: int) -> None:
        super().request_admitted(request_id, local_tokens, external_tokens)
        self.tokens_loaded += external_tokens
        skip = local_tokens // self._layout.chunk_tokens
        tokens = self.tokens_of(request_id)
        salt = self._salts[request_id]
        usable = usable_prefix(
            self._layout, self.hashes[request_id], tokens, lambda cell: self._cache.ever_published(cell, salt), skip
        )
        self.tokens_loadable += max(0, usable - local_tokens)

    def request_finished(self, request_id: str, tokens: Sequence[int]) -> None:
        super().request_finished(request_id, tokens)
        if text := self._cache.left_held(request_id):
            self._report("leases", text)

    def request_aborted(self, request_id: str) -> None:
        super().request_aborted(request_id)
        self.aborted.add(request_id)


class Stage:
    """One climb in one configuration."""

    def __init__(self, parts: StageParts) -> None:
        self._parts = parts
        self._oracle = LadderOracle(parts)
        self._expected: dict[str, list[int]] = {}
        roomy = self._config(ROOMY_BLOCKS)
        shape = (parts.model, parts.layout, parts.memory, parts.devices)
        self._alone = Engine(roomy, *shape)
        self._cached = Engine(roomy, *shape, parts.cache, self._oracle)
        self._oracle.tokens_of = lambda request_id: self._cached.scheduler.tokens_of(request_id)

    async def climb(self, passes: Sequence[str], results: list[RungResult] | None = None) -> list[RungResult]:
        """Run the passes in order; the first that fails ends the climb, since later ones would only echo it.

        Results are also appended to `results` as they come, for a caller whom an exception may cut short.
        """
        results = [] if results is None else results
        for rung in passes:
            result = await self._pass(rung)
            results.append(result)
            if result.verdict != "pass":
                break
        return results

    async def _pass(self, rung: str) -> RungResult:
        before = self._reading()
        if rung == "0":
            counts = await self._reference()
        elif rung == "1":
            counts = await self._compare(self._alone)
        elif rung == "4":
            counts = await self._waves(before)
        else:
            await self._prepare(rung)
            counts = await self._compare_cached(rung)
            await self._settle()
        self._take_readings(counts, before)
        problems = self._parts.findings.take()
        return RungResult(rung, counts, problems or self._parts.floors[rung].unmet(counts))

    def _take_readings(self, counts: RungCounts, before: dict[str, int]) -> None:
        for name, value in self._reading().items():
            setattr(counts, name, value - before[name])

    async def _waves(self, before: dict[str, int]) -> RungCounts:
        """Rung 4 again, with other chunks forgotten and another pressure, until it has shown what it is for."""
        counts = RungCounts()
        for wave in range(WAVES_MAX):
            await self._prepare("4", wave)
            counts.add(await self._compare_cached("4"))
            await self._settle()
            self._take_readings(counts, before)
            if self._parts.findings.violations or not self._parts.floors["4"].unmet(counts):
                break
        return counts

    async def _settle(self) -> None:
        await self._parts.cache.settle()
        if self._parts.at_rest is not None:
            self._parts.at_rest(self._oracle.hashes)

    async def _prepare(self, rung: str, wave: int = 0) -> None:
        parts = self._parts
        blocks = self._tight_blocks(wave) if rung == "4" else ROOMY_BLOCKS
        if rung == "4":
            parts.cache.forget(self._forgotten(wave))
        if rung in ("3b", "4", "replay"):
            parts.cache.drop_l1()
        await parts.cache.settle()
        if parts.pressure is not None:
            parts.pressure.before(rung)
        own = rung != "replay"  # there, every chunk of every request comes from the cache, none from the engine's own
        config = self._config(blocks, prefix_cache=own)
        if rung == "4":
            config = replace(config, max_batched_tokens=TIGHT_STEP_TOKENS)
        self._cached.configure(config)

    def _config(self, num_blocks: int, prefix_cache: bool = True) -> EngineConfig:
        return EngineConfig(
            num_blocks=num_blocks,
            prefix_cache=prefix_cache,
            host_ahead=self._parts.host_ahead,
            idle_step_ns=self._parts.idle_step_ns,
        )

    def _tight_blocks(self, wave: int) -> int:
        """Room for little more than the largest request, so that running requests soon starve each other."""
        tables = self._cached.scheduler.tables
        largest = max(
            tables.blocks_max(len(spec.prompt) + spec.output_tokens) for spec in self._parts.workload.requests
        )
        return 1 + largest * TIGHTNESS_PERCENT[wave % len(TIGHTNESS_PERCENT)] // 100

    def _forgotten(self, wave: int) -> list[bytes]:
        """For every request, everything from a drawn chunk of its first half on."""
        draws = Draws(self._parts.seed + wave, "forget")
        gone: dict[bytes, None] = {}
        for hashes in self._oracle.hashes.values():
            if hashes:
                gone.update(dict.fromkeys(hashes[draws.below(-(-len(hashes) // 2)) :]))
        return list(gone)

    # ---- running and comparing

    async def _reference(self) -> RungCounts:
        """One at a time, own prefix cache off. Every later pass is compared with what comes out here."""
        parts = self._parts
        answers = parts.reference or await run_alone(self._alone, parts.workload.requests)
        counts = RungCounts()
        for spec in parts.workload.requests:
            tokens = answers[spec.request_id]
            self._expected[spec.request_id] = parts.truth.tokens(spec.prompt, spec.output_tokens)
            self._count(counts, spec, tokens)
            self._oracle.hashes[spec.request_id] = parts.truth.register(spec.request_id, [*spec.prompt, *tokens])
        self._alone.configure(self._config(ROOMY_BLOCKS))
        return counts

    async def _compare_cached(self, rung: str) -> RungCounts:
        """A pass with the cache, and with whatever presses on it. Aborted requests have nothing to compare."""
        pressure = self._parts.pressure
        self._oracle.aborted.clear()
        if pressure is None:
            return await self._compare(self._cached)
        beside = asyncio.get_running_loop().create_task(pressure.during(rung, self._cached), name="pressure")
        try:
            return await self._compare(self._cached)
        finally:
            beside.cancel()
            await asyncio.wait([beside])
            if not beside.cancelled():
                beside.result()

    async def _compare(self, engine: Engine) -> RungCounts:
        counts = RungCounts()
        tokens = await engine.run(self._parts.workload.requests)
        for spec in self._parts.workload.requests:
            if spec.request_id in tokens or spec.request_id not in self._oracle.aborted:
                self._count(counts, spec, tokens.get(spec.request_id, []))
        state = engine.statistics()
        counts.preemptions, counts.steps = state.preemptions, state.steps
        return counts

    def _count(self, counts: RungCounts, spec: RequestSpec, tokens: list[int]) -> None:
        expected = self._expected[spec.request_id]
        counts.requests += 1
        counts.tokens_compared += len(expected)
        wrong = [index for index, token in enumerate(expected) if index >= len(tokens) or tokens[index] != token]
        if wrong:
            counts.mismatches += len(wrong)
            self._parts.findings.report("output", f"{spec.request_id} differs from the reference at token {wrong[0]}")

    def _reading(self) -> dict[str, int]:
        """Counters that only grow; a rung's share is the difference."""
        findings, oracle = self._parts.findings, self._oracle
        return {
            "loads_verified": findings.loads_verified,
            "stores_verified": findings.stores_verified,
            "cells_byte_checked": findings.cells_byte_checked,
            "preemptions_store_inflight": oracle.preemptions_store_inflight,
            "tokens_loaded": oracle.tokens_loaded,
            "tokens_loadable": oracle.tokens_loadable,
            **self._parts.cache.counters(),
        }

"""`Traffic`: requests to the engine, answers compared with the dense reference, and again whatever a dead engine left.

Requests come in batches, half of them new (families of a shared prefix, so there is something to store and something to
load), half asked before, mostly of late: what was being stored when a fault came is what is asked for next. The
engine's own prefix cache is on for every other batch, and its blocks are few, so that there are preemptions too.

An engine may die if somebody has killed one of its processes. If it dies without that, or says that it cannot go on,
that is a finding, whatever the weather: servers and networks may fail an engine only in speed.

Who holds: this object the open requests of the batch. Who announces: `answered`, per request. Nothing is freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvcore.groups import CacheLayout
from kvcore.ladder.storm.fleet import StormFleet
from kvcore.ladder.storm.link import Link
from kvcore.ladder.storm.record import Record
from kvcore.ladder.targets.torch.climb import asks
from kvcore.ladder.targets.torch.dense import DenseReference
from kvcore.ladder.targets.torch.fleet import EngineDied
from kvcore.ladder.targets.torch.messages import Answered, Ask, Served
from kvcore.ladder.targets.torch.model import TorchModel
from kvcore.sim.engine.config import EngineConfig
from kvcore.sim.workload import Draws, load_workload

BATCH_REQUESTS = 12
RECENT_REQUESTS = 12
PAGE_REQUESTS = 120
BATCH_SECONDS_MAX = 240.0
BLOCKS_TIGHT_PERCENT = 260  # of what the longest request needs
ROOMY_BLOCKS = 1024
PAGE_FAMILIES = 20


class Traffic:
    """See the module text."""

    def __init__(
        self,
        seed: int,
        fleet: StormFleet,
        links: Sequence[Link],
        record: Record,
        layout: CacheLayout,
        model: TorchModel,
    ) -> None:
        self._seed = seed
        self._layout = layout
        self._pages = 0
        self._pool: list[Ask] = []
        self._grow()
        self._fleet = fleet
        self._links = links
        self._record = record
        self._reference = DenseReference(model)
        self._draws = Draws(seed, "traffic")
        self._asked = 0  # of the pool
        self._batches = 0
        self._expected: dict[str, list[int]] = {}  # by request id of the pool
        self._open: dict[str, Ask] = {}
        longest = max(len(ask.prompt) + ask.output_tokens for ask in self._pool)
        needed = sum(-(-longest // group.block_tokens) for group in layout.groups)
        self._tight = EngineConfig(
            2 + needed * BLOCKS_TIGHT_PERCENT // 100, max_batched_tokens=64, host_ahead=True, idle_step_ns=500_000
        )
        self.roomy = EngineConfig(
            ROOMY_BLOCKS, max_num_seqs=1, host_ahead=True, idle_step_ns=500_000, prefix_cache=False
        )

    @property
    def known(self) -> list[Ask]:
        """Everything that was asked so far, each prompt once."""
        return self._pool[: self._asked]

    def _grow(self) -> None:
        """Another workload's worth of prompts; a fleet's first ones are of its seed."""
        chunk = self._layout.chunk_tokens
        seed = self._seed + 1_000_003 * self._pages
        workload = load_workload(None, seed, requests=PAGE_REQUESTS, families=PAGE_FAMILIES, chunk_tokens=chunk)
        self._pool += [
            msgspec.structs.replace(ask, request_id=f"{self._pages}-{ask.request_id}") for ask in asks(workload)
        ]
        self._pages += 1

    async def batch(self) -> None:
        """Some new requests and some old ones, until all are answered."""
        if self._asked + BATCH_REQUESTS > len(self._pool):
            self._grow()
        fresh = self._pool[self._asked : self._asked + BATCH_REQUESTS // 2]
        self._asked += len(fresh)
        chosen = list(fresh)
        while len(chosen) < BATCH_REQUESTS:
            reach = min(self._asked, (len(self._pool), RECENT_REQUESTS)[self._draws.below(2)])
            chosen.append(self._pool[self._asked - 1 - self._draws.below(reach)])
        self._batches += 1
        requests = [named(ask, f"{self._batches}.{index}") for index, ask in enumerate(chosen)]
        await self.serve(requests, replace(self._tight, prefix_cache=self._batches % 2 == 0))

    async def serve(self, requests: Sequence[Ask], config: EngineConfig) -> list[Served]:
        """All of them, whoever dies meanwhile. One `Served` per engine that came to its end."""
        await asyncio.to_thread(self._reckon, requests)
        self._open = {ask.request_id: ask for ask in requests}
        served: list[Served] = []
        try:
            async with asyncio.timeout(BATCH_SECONDS_MAX):
                while self._open:
                    served += await self._attempt(config)
        except TimeoutError:
            self._record.problem(f"[liveness] {len(self._open)} requests not answered in {BATCH_SECONDS_MAX:g} s")
            raise
        return served

    async def _attempt(self, config: EngineConfig) -> list[Served]:
        try:
            served = await self._fleet.serve(list(self._open.values()), config, cache=True, answered=self._answered)
        except EngineDied as died:
            await self._engine_died(died)
            return []
        for finding in served.findings:
            self._record.problem(finding)
        self._record.counts["layers byte-checked"] += served.counts["cells_byte_checked"]
        self._record.counts["chunks loaded and checked"] += served.counts["loads_verified"]
        self._record.counts["preemptions"] += served.counts["preemptions"]
        for request_id in self._open:
            self._record.problem(f"[output] {request_id} was never answered by an engine that was done")
        self._open = {}
        return [served]

    async def _engine_died(self, died: EngineDied) -> None:
        if not self._fleet.engine_hit:
            self._record.problem(f"[crash] an engine that nobody killed has died: {died}")
        self._record.counts["engines that were killed"] += self._fleet.engine_hit
        self._record.counts["requests asked for again"] += len(self._open)
        await self._fleet.revive_engine()
        for link in self._links:
            link.tap.forget()

    def _answered(self, message: Answered) -> None:
        ask = self._open.pop(message.request_id, None)
        if ask is None:
            self._record.problem(f"[output] {message.request_id} was answered and had not been asked")
            return
        expected = self._expected[_prompt_id(ask)]
        self._record.counts["requests answered"] += 1
        self._record.counts["tokens compared"] += len(expected)
        if list(message.tokens) != expected:
            wrong = next(i for i, pair in enumerate(zip((*message.tokens, -1), expected)) if pair[0] != pair[1])
            self._record.problem(f"[output] {ask.request_id} differs from the reference at token {wrong}")

    def _reckon(self, requests: Sequence[Ask]) -> None:
        """What must come out; before anything is asked, so that nothing waits for it."""
        for ask in requests:
            if _prompt_id(ask) not in self._expected:
                self._expected[_prompt_id(ask)] = self._reference.tokens(ask.prompt, ask.output_tokens)


def _prompt_id(ask: Ask) -> str:
    """The request of the pool that this one repeats."""
    return ask.request_id.partition("/")[0]


def named(ask: Ask, name: str) -> Ask:
    """The same prompt, asked for again at once under another name."""
    return msgspec.structs.replace(ask, request_id=f"{_prompt_id(ask)}/{name}", time_ns=0)

"""The rungs on the torch engine: the same passes as on target `sim`, driven from outside.

    0 reference   1 no cache   2 cold   3 hot from L1   3b hot from L2   4 preempted   replay

Tokens are compared with the dense reference; bytes are compared in the workers, before anything attends to what was
loaded. Between passes the servers must come to rest: no lease, no hold, nothing on its way.

Rung 4 forgets before each wave, as elsewhere: half of the records are removed from the servers' directories, or from
the store that they share, while no server runs, and all start again with an empty L1 - so a real restart is part of
every climb. Without an L2 all of L1 is dropped instead, and rung 3b, which has nothing to come from, is left out.

A pass that must have loaded much and has found too little is made once more, and that one counts. Stores that were
given up at a preemption, and whatever else time decides, are not held against a cache: the pass computed what it did
not find, and stored it, so the next one has no excuse.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from kvcore.errors import ConfigError
from kvcore.keys import ChunkHasher
from kvcore.ladder.admissions import floors_with
from kvcore.ladder.guarded import say
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import CellResult, Floors, RungCounts, RungResult
from kvcore.ladder.targets.torch.dense import DenseReference, one_thread
from kvcore.ladder.targets.torch.fleet import FILES, EngineDied, Fleet
from kvcore.ladder.targets.torch.messages import Admission, Answered, Ask, EngineSetup, Served
from kvcore.ladder.targets.torch.model import POSITIONS_MAX, VOCABULARY, build_torch_model
from kvcore.ladder.targets.torch.wiring import namespace_of
from kvcore.sim.engine.config import EngineConfig
from kvcore.sim.oracles.hits import Cell, usable_prefix
from kvcore.sim.workload import Draws, Workload

CELLS = tuple(
    map(
        MatrixCell.parse,
        ("full+window+recurrent/r2/s1/async", "full+window/r1/s2/sync", "full/r2/s2/async", "full/r1/s1/sync"),
    )
)
WITHOUT_L2 = frozenset({MatrixCell.parse("full/r1/s1/sync")})
ROOMY_BLOCKS = 1024
L1_BYTES = 16 << 20
PASS_SECONDS_MAX = 240.0  # up to four waves; only a hang takes so long, whatever else the machine does
SETTLE_SECONDS_MAX = 60.0
WAVES_MAX = 4
PASSES_MAX = 2  # of one that has found too little
TIGHTNESS_PERCENT = (125, 105, 180)
PROMPT_TOKENS_MAX = 160


def check(options: LadderOptions) -> None:
    """Raises `ConfigError` for options that this target cannot serve."""
    if options.connector is not None:
        raise ConfigError("--connector climbs on target sim, not on torch")
    if options.l2_dir is not None:
        raise ConfigError("--l2 is for target local; target torch makes directories of its own")


def cells(options: LadderOptions) -> tuple[MatrixCell, ...]:
    return tuple(cell for cell in options.cells if cell in CELLS)


def floors(requests: int) -> dict[str, Floors]:
    """What each pass must have done; here timing decides what meets what."""
    loaded = Floors(requests, loads_verified=requests // 2, hit_share=0.8)
    return {
        "0": Floors(requests),
        "1": Floors(requests),
        "2": Floors(requests, stores_verified=requests),
        "3": loaded,
        "3b": loaded,
        "4": Floors(requests, loads_verified=1, stores_verified=1, preemptions=1, resumes_with_load=1),
        "replay": loaded,
    }


def climb_cell(cell: MatrixCell, options: LadderOptions, workload: Workload, reproduce: str) -> CellResult:
    """Climb in one configuration, with processes of its own."""
    begin = time.process_time()
    stage = TorchStage(cell, options, workload)
    rungs = asyncio.run(stage.climb(options.passes))
    return CellResult(str(cell), reproduce, rungs, "", 0, time.process_time() - begin, workload.describe())


class TorchStage:
    """One climb. Holds its fleet from `climb` on until that returns."""

    def __init__(self, cell: MatrixCell, options: LadderOptions, workload: Workload) -> None:
        setup = EngineSetup(
            directory="",
            model=cell.groups,
            ranks=cell.ranks,
            chunk_tokens=options.chunk_tokens,
            seed=options.seed + 1,
            num_blocks=ROOMY_BLOCKS,
            load_async=cell.load_async,
            servers=(),
            placement="rank" if cell.ranks > 1 else "chunk",
            transfer=options.transfer,
            admission=options.admission,
        )
        l2 = options.store or ("" if cell in WITHOUT_L2 else FILES)
        self._has_l2 = bool(l2)
        self._layout, model = build_torch_model(
            setup.model, setup.ranks, chunk_tokens=setup.chunk_tokens, seed=setup.seed
        )
        self.fleet = Fleet(setup, cell.servers, l1_bytes=L1_BYTES, l2=l2)
        self._reference = DenseReference(model)
        self._hasher = ChunkHasher(namespace_of(setup, self._layout, model))
        self._requests = asks(workload)
        self._floors = floors_with(options.admission, floors(len(self._requests)))
        self._seed = options.seed
        self._config = EngineConfig(ROOMY_BLOCKS, host_ahead=True, idle_step_ns=500_000)
        self._expected: dict[str, list[int]] = {}
        self._sequences: dict[str, list[int]] = {}
        self._stored: set[bytes] = set()  # chunk hashes that a cache that forgot nothing would have by now

    async def climb(self, passes: Sequence[str]) -> list[RungResult]:
        results: list[RungResult] = []
        try:
            self.fleet.start()
            for rung in passes:
                if rung == "3b" and not self._has_l2:
                    continue
                results.append(await self._guarded(rung))
                if results[-1].verdict != "pass":
                    break
        finally:
            problems = self.fleet.close()
        if results and results[-1].verdict == "pass":
            results[-1].problems += problems
        return results

    async def _guarded(self, rung: str) -> RungResult:
        try:
            async with asyncio.timeout(PASS_SECONDS_MAX) as deadline:
                return await self._pass(rung)
        except TimeoutError as error:  # an OSError as well
            if deadline.expired():
                return RungResult(rung, problems=[f"[liveness] not over after {PASS_SECONDS_MAX:g} s"])
            return RungResult(rung, problems=[f"[crash] {say(error)}"])
        except (EngineDied, OSError) as error:
            return RungResult(rung, problems=[f"[crash] {error}"])

    async def _pass(self, rung: str) -> RungResult:
        result = RungResult(rung)
        if rung == "0":
            await self._alone(result)
        elif rung == "4":
            await self._waves(result)
        else:
            await self._roomy(result)
        result.problems = result.problems or self._floors[rung].unmet(result.counts)
        return result

    async def _alone(self, result: RungResult) -> None:
        """Rung 0: one request at a time, no cache of any kind, against the dense reference."""
        with one_thread():
            for request in self._requests:
                tokens = self._reference.tokens(request.prompt, request.output_tokens)
                self._expected[request.request_id] = tokens
                self._sequences[request.request_id] = [*request.prompt, *tokens]
        await self._run(result, replace(self._config, prefix_cache=False, max_num_seqs=1), cache=False)

    async def _roomy(self, result: RungResult) -> None:
        """Every rung but 0 and 4. The module text says why a pass may be made again."""
        wanted = self._floors[result.rung]
        for _ in range(PASSES_MAX if wanted.hit_share else 1):
            if result.rung in ("3b", "replay") and self._has_l2:
                await self.fleet.drop_l1()
            result.counts = RungCounts()
            config = replace(self._config, prefix_cache=result.rung != "replay")
            await self._run(result, config, cache=result.rung != "1")
            if result.problems or not wanted.unmet(result.counts):
                return

    async def _waves(self, result: RungResult) -> None:
        """Rung 4 again with other records forgotten and another pressure, until it has shown what it is for."""
        for wave in range(WAVES_MAX):
            await self._forget(wave)
            config = replace(self._config, num_blocks=self._tight_blocks(wave), max_batched_tokens=64)
            counts = RungCounts()
            await self._run(result, config, cache=True, counts=counts)
            if result.problems or not self._floors["4"].unmet(result.counts):
                return

    async def _forget(self, wave: int) -> None:
        if not self._has_l2:
            await self.fleet.drop_l1()
            return
        draws = Draws(self._seed + wave, "forget")
        self.fleet.restart_without(lambda: bool(draws.below(2)))

    def _tight_blocks(self, wave: int) -> int:
        longest = max(len(request.prompt) + request.output_tokens for request in self._requests)
        largest = sum(-(-longest // group.block_tokens) for group in self._layout.groups)
        return 2 + largest * TIGHTNESS_PERCENT[wave % len(TIGHTNESS_PERCENT)] // 100

    async def _run(
        self, result: RungResult, config: EngineConfig, *, cache: bool, counts: RungCounts | None = None
    ) -> None:
        """Serve everything once, compare, come to rest. Counts are added to the result's."""
        counts = RungCounts() if counts is None else counts
        answers: dict[str, list[int]] = {}

        def answered(message: Answered) -> None:
            answers[message.request_id] = list(message.tokens)

        served = await self.fleet.serve(self._requests, config, cache=cache, answered=answered)
        self._compare(counts, answers, result)
        result.problems += served.findings
        self._count(counts, served, cache)
        result.counts.add(counts)
        left = await self.fleet.settle(SETTLE_SECONDS_MAX) if cache else ""
        if left:
            result.problems.append(f"[leases] the servers did not come to rest: {left}")

    def _compare(self, counts: RungCounts, answers: dict[str, list[int]], result: RungResult) -> None:
        for request in self._requests:
            expected, tokens = self._expected[request.request_id], answers.get(request.request_id, [])
            counts.requests += 1
            counts.tokens_compared += len(expected)
            wrong = [i for i, token in enumerate(expected) if i >= len(tokens) or tokens[i] != token]
            counts.mismatches += len(wrong)
            if wrong:
                result.problems.append(f"[output] {request.request_id} differs from the reference at token {wrong[0]}")

    def _count(self, counts: RungCounts, served: Served, cache: bool) -> None:
        for name, value in served.counts.items():
            setattr(counts, name, getattr(counts, name) + value)
        if cache:
            for admission in served.admissions:
                counts.tokens_loaded += admission.external_tokens
                counts.tokens_loadable += self._loadable(admission)
            for sequence in self._sequences.values():
                self._stored.update(self._hasher.hash_tokens(sequence))

    def _loadable(self, admission: Admission) -> int:
        """What a cache that forgot nothing since the pass began could have given."""
        hashes = self._hasher.hash_tokens(self._sequences[admission.request_id][: admission.tokens])
        skip = admission.local_tokens // self._layout.chunk_tokens

        def present(cell: Cell) -> bool:
            return cell[2] in self._stored

        usable = usable_prefix(self._layout, hashes, admission.tokens, present, skip)
        return max(0, usable - admission.local_tokens)


def asks(workload: Workload) -> tuple[Ask, ...]:
    """The workload's requests as the small model can take them: its vocabulary, prompts that are not too long."""
    assert PROMPT_TOKENS_MAX < POSITIONS_MAX
    return tuple(
        Ask(
            spec.request_id,
            tuple(token % VOCABULARY for token in spec.prompt[:PROMPT_TOKENS_MAX]),
            spec.output_tokens,
            spec.time_ns,
        )
        for spec in workload.requests
    )

"""Target `local`: the same rungs on the real asyncio loop, with real threads, eventfd, files, sockets and clock.

The simulation replaces what lies behind the ports; this target shows that what it replaces fits: the seam itself. The
engine and the model are the simulated ones, so every token and every byte can be judged here too. Threads are not
deterministic: there is no trace hash, and what timing decides - how many preemptions meet a store in flight - is
counted but not demanded.

The oracles run on the loop's thread, except for those that look at pages when they are read or written; these run
inside compute work, one at a time (`WatchedDevice`). What the two sides share is locked here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvcore.errors import ConfigError
from kvcore.keys import ChunkHasher, Extra, ObjectKey
from kvcore.ladder.admissions import floors_with
from kvcore.ladder.configure import configure
from kvcore.ladder.guarded import climb_guarded, say
from kvcore.ladder.local_world import LocalWorld, check_directory
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import CellResult, Floors, RungResult
from kvcore.ladder.rungs import ROOMY_BLOCKS, Stage, StageParts
from kvcore.ladder.server_stack import StackConfig
from kvcore.ladder.stack import CacheStack
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.model import U64, Layer
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.reference import Reference
from kvcore.sim.workload import Workload

CELLS = tuple(
    map(
        MatrixCell.parse,
        (
            "full/r1/inproc/sync",
            "full/r2/s2/async",
            "full+window/r2/s1/async",
            "full+window+recurrent/r1/inproc/async",
            "full+window+recurrent/r2/s2/sync",
        ),
    )
)
PASS_SECONDS_MAX = 120.0  # one takes less than a second; only a hang takes so long on a machine that does other things
CLOSE_SECONDS_MAX = 60.0
REPLAYS_MAX = 5  # of replays that found too little; with neighbours on both cores two were too few in one climb of ten
BALLAST_BYTES = 512 << 10
PATIENT_NS = 30_000_000_000
"""Of a lookup and of a request to a server: none is given up because the machine does other things."""


def floors(requests: int) -> dict[str, Floors]:
    """What each pass must have done. Less than in the simulation: here timing decides what meets what. On a busy
    machine every pass gives up states anew that a step overwrites before they are copied.
    """
    return {
        "0": Floors(requests),
        "1": Floors(requests),
        "2": Floors(requests, stores_verified=requests),
        "3": Floors(requests, loads_verified=1, hit_share=0.5),
        "3b": Floors(requests, loads_verified=requests, hit_share=0.5),
        "4": Floors(requests, loads_verified=1, stores_verified=1, preemptions=1),
        "replay": Floors(requests, loads_verified=requests, hit_share=0.5),
    }


class SharedFindings(Findings):
    """Reports come from the loop's thread and from compute threads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock = threading.Lock()

    def report(self, oracle: str, text: str) -> None:
        with self._lock:
            super().report(oracle, text)


class SharedTruth(Truth):
    """Both sides ask what is right; the reference behind it computes on demand and forgets the oldest."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock = threading.Lock()

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        with self._lock:
            return super().tokens(prompt, count)

    def register(self, name: str, tokens: Sequence[int], items: Sequence[Extra] = ()) -> list[bytes]:
        with self._lock:
            return super().register(name, tokens, items)

    def expected(self, key: ObjectKey) -> bytes | None:
        with self._lock:
            return super().expected(key)

    def layer_words(self, name: str, layer: Layer, rank: int) -> U64:
        with self._lock:
            return super().layer_words(name, layer, rank)


def check(options: LadderOptions) -> None:
    """Raises `ConfigError` for options that this target cannot serve; nothing is left behind."""
    if options.connector is not None:
        raise ConfigError("--connector climbs on target sim, not on local")
    if options.l2_dir is not None:
        check_directory(options.l2_dir)


def cells(options: LadderOptions) -> tuple[MatrixCell, ...]:
    return tuple(cell for cell in options.cells if cell in CELLS)


def climb_cell(cell: MatrixCell, options: LadderOptions, workload: Workload, reproduce: str) -> CellResult:
    """Climb in one configuration, on a loop of its own."""
    begin = time.process_time()
    rungs = asyncio.run(_climb(cell, options, workload))
    return CellResult(str(cell), reproduce, rungs, "", 0, time.process_time() - begin, workload.describe())


async def _climb(cell: MatrixCell, options: LadderOptions, workload: Workload) -> list[RungResult]:
    config, model = configure(cell, options, l2=("file",))
    config = _patient(config)
    memory = PagedMemory(config.layout, model, ROOMY_BLOCKS)
    world = LocalWorld(memory, in_process=cell.servers == 0, l2=options.l2_dir, ballast_bytes=BALLAST_BYTES)
    findings = SharedFindings(world.clock.now_ns)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: _stray(findings, context))
    hasher = ChunkHasher(config.namespace)
    truth = SharedTruth(config.layout, Reference(model, config.layout), hasher, findings)
    devices = [world.device(rank) for rank in range(cell.ranks)]
    try:
        stack = CacheStack(world, config, truth, findings)
        parts = StageParts(
            config.layout, model, hasher, truth, findings, devices, memory, workload, stack, options.seed,
            idle_step_ns=1_000_000, floors=floors_with(options.admission, floors(options.requests)),
        )  # fmt: skip
        rungs = await _climb_patiently(Stage(parts), options.passes)
        await _close(stack, findings)
        rungs[-1].problems += findings.take()
        return rungs
    finally:
        world.close()


def _patient(config: StackConfig) -> StackConfig:
    return replace(
        config,
        storage=replace(config.storage, lookup_deadline_ns=PATIENT_NS),
        connection=replace(config.connection, request_timeout_ns=PATIENT_NS),
        lookup=replace(config.lookup, lookup_timeout_ns=PATIENT_NS, server_timeout_ns=PATIENT_NS),
    )


async def _climb_patiently(stage: Stage, passes: Sequence[str]) -> list[RungResult]:
    """The passes in order. A replay that found too little is made again, and the last one counts: each stores what was
    given up before it. On a busy machine it gives up some itself, where a step overwrites a state that is still read.
    """
    rungs = await climb_guarded(stage, passes, PASS_SECONDS_MAX)
    demands = floors(rungs[0].counts.requests)
    for _ in range(REPLAYS_MAX - 1):
        last = rungs[-1]
        if last.rung != "replay" or not last.problems or last.problems != demands["replay"].unmet(last.counts):
            break
        rungs[-1:] = await climb_guarded(stage, ["replay"], PASS_SECONDS_MAX)
    return rungs


async def _close(stack: CacheStack, findings: Findings) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS_MAX):
            await stack.close()
    except Exception as error:
        findings.report("liveness", f"the cache could not be closed: {say(error)}")


def _stray(findings: Findings, context: Mapping[str, Any]) -> None:
    """An exception that reached nobody but the loop."""
    error = context.get("exception")
    findings.report("loop", f"{context.get('message')}: {say(error)}" if error else str(context.get("message")))

"""`--connector pkg.mod:Class`: anybody's connector climbs on the simulated engine, in process, against the oracles.

The class is built once per configuration, and its cache lives as long as the object. Configurations that it refuses
(by raising in its constructor) are left out; if it refuses all, that is an error. Those with asynchronous loads are
climbed only if a small trial shows that the class ever loads asynchronously. Pass 3b needs the optional hook
`drop_near_tier()` on the object.

Time is simulated: a class that reads the machine's clock, sleeps or starts threads is stopped by the simulation's
fence, and the rung in which it does so fails and says where.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from kvcore.connectors.interface import ConnectorConfig
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher
from kvcore.ladder.configure import MODEL_NAME, configure
from kvcore.ladder.guarded import climb_guarded, say
from kvcore.ladder.matrix import FULL_MATRIX, MatrixCell
from kvcore.ladder.options import LadderOptions, load_connector
from kvcore.ladder.result import CellResult, Floors, RungResult
from kvcore.ladder.rungs import ROOMY_BLOCKS, Stage, StageParts
from kvcore.ladder.stranger_cache import KnownTruth, RefusedError, StrangerCache, build
from kvcore.sim.engine import Engine, EngineConfig, RequestSpec
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.reference import Reference
from kvcore.sim.trace import Trace
from kvcore.sim.workload import Workload
from kvcore.sim.world import SimWorld

CELLS = tuple(cell for cell in FULL_MATRIX if cell.servers == 0)
PASS_SECONDS_MAX = 20.0  # virtual
_TRIAL_BLOCKS = 128


def floors(requests: int) -> dict[str, Floors]:
    """Of a stranger's cache we demand that it is used, not how well it keeps what it has."""
    hot = Floors(requests, loads_verified=1, hit_share=0.5)
    return {
        "0": Floors(requests),
        "1": Floors(requests),
        "2": Floors(requests),
        "3": hot,
        "3b": hot,
        "4": Floors(requests, loads_verified=1, preemptions=1, hit_share=0.1),
        "replay": hot,
    }


def check(options: LadderOptions) -> None:
    """Raises `ConfigError` for options that make no sense with somebody else's cache."""
    if options.target != "sim":
        raise ConfigError(f"--connector climbs on target sim, not on {options.target}")
    if options.l1_bytes is not None or options.l2_dir is not None:
        raise ConfigError("--l1 and --l2 belong to kvcore's own cache; with --connector, configure your class")


def cells(options: LadderOptions) -> tuple[MatrixCell, ...]:
    """The configurations that the class accepts. Raises `ConfigError` if that is none, with what the class said."""
    refusals: list[str] = []
    accepted = tuple(_accepted([cell for cell in options.cells if cell in CELLS], options, refusals))
    if not accepted and refusals:
        raise ConfigError(refusals[0])
    return accepted


def _accepted(wanted: list[MatrixCell], options: LadderOptions, refusals: list[str]) -> Iterator[MatrixCell]:
    for cell in wanted:
        try:
            _build(cell, options)
        except RefusedError as error:
            refusals.append(str(error))
            continue
        if not cell.load_async or _loads_async(cell, options):
            yield cell
        else:
            refusals.append(f"--connector {options.connector} does not load asynchronously, as {cell} would need")


def _build(cell: MatrixCell, options: LadderOptions) -> Any:
    assert options.connector is not None
    layout = configure(cell, options)[0].layout
    config = ConnectorConfig(layout, MODEL_NAME, cell.load_async, options.seed)
    return build(load_connector(options.connector), options.connector, config)


def _loads_async(cell: MatrixCell, options: LadderOptions) -> bool:
    """A trial: one prompt, twice. True also when the class fails in it, so that the climb shows how."""
    with SimLoop(options.seed) as loop:
        try:
            return loop.run_until_complete(_trial(loop, cell, options))
        except Exception:
            return True


async def _trial(loop: SimLoop, cell: MatrixCell, options: LadderOptions) -> bool:
    config, model = configure(cell, options)
    cache = StrangerCache(_build(cell, options), ())
    memory = PagedMemory(config.layout, model, _TRIAL_BLOCKS)
    devices = _devices(loop, memory, config.layout)
    settings = EngineConfig(_TRIAL_BLOCKS, prefix_cache=False)
    engine = Engine(settings, model, config.layout, memory, devices, cache)
    for turn in ("first", "second"):
        await engine.run([RequestSpec(turn, tuple(range(3 * options.chunk_tokens + 1)), 2)])
        await cache.settle()
    return cache.scheduler.loads_async


def _devices(loop: SimLoop, memory: PagedMemory, layout: CacheLayout) -> list[SimCopyEngine]:
    world = SimWorld(loop, in_process=True)
    devices = [world.device(rank) for rank in range(layout.ranks)]
    for rank, device in enumerate(devices):
        device.register_pages(memory.groups[rank])
    return devices


def climb_cell(cell: MatrixCell, options: LadderOptions, workload: Workload, reproduce: str) -> CellResult:
    """Climb in one configuration, in one simulated world."""
    begin = time.process_time()
    trace = Trace()
    with SimLoop(options.seed, trace=trace) as loop:
        rungs = loop.run_until_complete(_climb(loop, cell, options, workload))
        callbacks = loop.callbacks_run
    cpu_s = time.process_time() - begin
    return CellResult(str(cell), reproduce, rungs, trace.hash, callbacks, cpu_s, workload.describe())


async def _climb(loop: SimLoop, cell: MatrixCell, options: LadderOptions, workload: Workload) -> list[RungResult]:
    config, model = configure(cell, options)
    layout = config.layout
    connector = _build(cell, options)
    findings = Findings(loop.now_ns)
    hasher = ChunkHasher(config.namespace)
    truth = KnownTruth(layout, Reference(model, layout), hasher, findings)
    memory = PagedMemory(layout, model, ROOMY_BLOCKS)
    devices = _devices(loop, memory, layout)
    cache = StrangerCache(connector, truth.hashes)
    parts = StageParts(
        layout, model, hasher, truth, findings, devices, memory, workload, cache, options.seed,
        host_ahead=False, floors=floors(options.requests),
    )  # fmt: skip
    try:
        stage = Stage(parts)
    except Exception as error:
        raise ConfigError(f"--connector {options.connector}: register() raised {say(error)}") from None
    rungs = await climb_guarded(stage, _passes(options, connector), PASS_SECONDS_MAX)
    rungs[-1].problems += findings.take()  # what was seen before a crash
    return rungs


def _passes(options: LadderOptions, connector: Any) -> list[str]:
    has_tiers = hasattr(connector, "drop_near_tier")
    return [rung for rung in options.passes if has_tiers or rung != "3b"]

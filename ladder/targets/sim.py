"""Target `sim`: everything on one `SimLoop`, from one seed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvcore.errors import ConfigError
from kvcore.keys import ChunkHasher
from kvcore.ladder.admissions import floors_with
from kvcore.ladder.configure import configure
from kvcore.ladder.guarded import say
from kvcore.ladder.matrix import FULL_MATRIX, MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.pressure import tenants
from kvcore.ladder.quiet import check_quiet
from kvcore.ladder.result import CellResult, RungResult
from kvcore.ladder.rungs import ROOMY_BLOCKS, Pressure, Stage, StageParts, floors_for, run_alone
from kvcore.ladder.stack import CacheStack
from kvcore.sim.engine.config import EngineConfig
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.engine.engine import Engine
from kvcore.sim.loop import SimLoop
from kvcore.sim.model import build_model
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.reference import Reference
from kvcore.sim.trace import Trace
from kvcore.sim.workload import Workload
from kvcore.sim.world import SimWorld

CELLS = FULL_MATRIX
TENANTS = ("", "blue", "red")
TENANTS_EVERY = 5
"""In one cell of so many the requests are of several tenants."""


@dataclass(frozen=True, slots=True)
class Reference0:
    """What rung 0 gave: tokens per request, and the trace of the run."""

    answers: Mapping[str, list[int]]
    trace_hash: str
    callbacks: int


def check(options: LadderOptions) -> None:
    """Raises `ConfigError` for options that this target cannot serve."""
    if options.l2_dir is not None:
        raise ConfigError("--l2 names a real directory; target sim has simulated files (use --target local)")


def cells(options: LadderOptions) -> tuple[MatrixCell, ...]:
    return options.cells


@lru_cache(maxsize=8)
def reference_pass(groups: str, ranks: int, chunk_tokens: int, seed: int, workload: Workload) -> Reference0:
    """Rung 0 in a world of its own: it depends on the model alone, so the cells with that model share it."""
    layout, model = build_model(groups, ranks, chunk_tokens=chunk_tokens, seed=seed + 1)
    trace = Trace()
    with SimLoop(seed, trace=trace) as loop:
        world = SimWorld(loop, in_process=True)
        devices = [world.device(rank) for rank in range(ranks)]
        memory = PagedMemory(layout, model, ROOMY_BLOCKS)
        engine = Engine(EngineConfig(num_blocks=ROOMY_BLOCKS), model, layout, memory, devices)
        answers = loop.run_until_complete(run_alone(engine, workload.requests))
        callbacks = loop.callbacks_run
    return Reference0(answers, trace.hash, callbacks)


class SlowStores(Pressure):
    """Page copies of stores take four times as long on rung 4, so that preemptions find them in flight.

    `copiers` make the servers' copies.
    """

    def __init__(self, devices: Sequence[SimCopyEngine], copiers: Sequence[SimExecutor]) -> None:
        self._devices = devices
        self._page_ns = [device.page_ns for device in devices]
        self._copiers = copiers
        self._latency_ns = [copier.latency_ns for copier in copiers]

    def before(self, rung: str) -> None:
        factor = 4 if rung == "4" else 1
        for device, (least, most) in zip(self._devices, self._page_ns, strict=True):
            device.page_ns = (least * factor, most * factor)
        for copier, (least, most) in zip(self._copiers, self._latency_ns, strict=True):
            copier.latency_ns = (least * factor, most * factor)


def climb_cell(cell: MatrixCell, options: LadderOptions, workload: Workload, reproduce: str) -> CellResult:
    """Climb in one configuration, in one simulated world."""
    begin = time.process_time()
    reference = reference_pass(cell.groups, cell.ranks, options.chunk_tokens, options.seed, workload)
    trace = Trace()
    trace.event("reference", reference.trace_hash)
    rungs: list[RungResult] = []
    with SimLoop(options.seed, trace=trace) as loop:
        try:
            loop.run_until_complete(_climb(loop, cell, options, workload, reference.answers, rungs))
        except ConfigError:
            raise
        except Exception as error:  # whatever ends the world - a deadlock, an assertion, a bug - fails the rung
            rungs.append(RungResult(options.passes[len(rungs)], problems=[f"[crash] {say(error)}"]))
        callbacks = loop.callbacks_run
    cpu_s = time.process_time() - begin
    return CellResult(str(cell), reproduce, rungs, trace.hash, callbacks, cpu_s, workload.describe())


async def _climb(
    loop: SimLoop,
    cell: MatrixCell,
    options: LadderOptions,
    workload: Workload,
    reference: Mapping[str, list[int]],
    rungs: list[RungResult],
) -> None:
    config, model = configure(cell, options)
    if FULL_MATRIX.index(cell) % TENANTS_EVERY == TENANTS_EVERY - 1:
        workload = tenants(workload, TENANTS, options.seed)
    world = SimWorld(loop, in_process=cell.servers == 0)
    findings = Findings(loop.now_ns)
    hasher = ChunkHasher(config.namespace)
    truth = Truth(config.layout, Reference(model, config.layout), hasher, findings)
    memory = PagedMemory(config.layout, model, ROOMY_BLOCKS)
    devices = [world.device(rank) for rank in range(cell.ranks)]
    for rank, device in enumerate(devices):
        device.register_pages(memory.groups[rank])
    stack = CacheStack(world, config, truth, findings)
    parts = StageParts(
        config.layout,
        model,
        hasher,
        truth,
        findings,
        devices,
        memory,
        workload,
        stack,
        options.seed,
        floors=floors_with(options.admission, floors_for(len(workload.requests))),
        pressure=SlowStores(devices, [each.copier for each in stack.servers if isinstance(each.copier, SimExecutor)]),
        reference=reference,
        at_rest=lambda hashes: check_quiet(stack, workload.requests, hashes, findings),
    )
    await Stage(parts).climb(options.passes, rungs)
    await stack.close()

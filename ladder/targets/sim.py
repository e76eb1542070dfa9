"""Target `sim`: everything on one `SimLoop`, from one seed."""

from __future__ import annotations

import time

from kvcore.errors import ConfigError
from kvcore.keys import ChunkHasher
from kvcore.ladder.configure import configure
from kvcore.ladder.guarded import say
from kvcore.ladder.matrix import FULL_MATRIX, MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import CellResult, RungResult
from kvcore.ladder.rungs import ROOMY_BLOCKS, Stage, StageParts, floors_for
from kvcore.ladder.stack import CacheStack
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.reference import Reference
from kvcore.sim.trace import Trace
from kvcore.sim.workload import Workload
from kvcore.sim.world import SimWorld

CELLS = FULL_MATRIX


def check(options: LadderOptions) -> None:
    """Raises `ConfigError` for options that this target cannot serve."""
    if options.l2_dir is not None:
        raise ConfigError("--l2 names a real directory; target sim has simulated files (use --target local)")


def cells(options: LadderOptions) -> tuple[MatrixCell, ...]:
    return options.cells


def climb_cell(cell: MatrixCell, options: LadderOptions, workload: Workload, reproduce: str) -> CellResult:
    """Climb in one configuration, in one simulated world."""
    begin = time.process_time()
    trace = Trace()
    rungs: list[RungResult] = []
    with SimLoop(options.seed, trace=trace) as loop:
        try:
            loop.run_until_complete(_climb(loop, cell, options, workload, rungs))
        except ConfigError:
            raise
        except Exception as error:  # whatever ends the world - a deadlock, an assertion, a bug - fails the rung
            rungs.append(RungResult(options.passes[len(rungs)], problems=[f"[crash] {say(error)}"]))
        callbacks = loop.callbacks_run
    cpu_s = time.process_time() - begin
    return CellResult(str(cell), reproduce, rungs, trace.hash, callbacks, cpu_s, workload.describe())


async def _climb(
    loop: SimLoop, cell: MatrixCell, options: LadderOptions, workload: Workload, rungs: list[RungResult]
) -> None:
    config, model = configure(cell, options)
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
        floors=floors_for(len(workload.requests)),
    )
    await Stage(parts).climb(options.passes, rungs)
    await stack.close()

"""Climbs under pressure: one configuration, changed, in one simulated world to which something is done meanwhile.

The 36 cells of the matrix have room, time and a good network; what is rarely short there is short here. `climb_pressed`
builds the same stack as target `sim` and hands a `Press` to the rungs: before each pass, and beside it, the test may
restart servers, damage disks, cut connections and abort requests. Every token and every byte is judged as always; what
a climb must have *done* (floors) is the caller's to say, because hits may rightly be fewer.

Who holds: the climb's `SimLoop` everything; `Climbed` keeps what is of interest when it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcore.ladder.configure import configure
from kvcore.ladder.engine_hashes import hasher_for
from kvcore.ladder.guarded import say
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.result import Floors, RungCounts, RungResult
from kvcore.ladder.rungs import ROOMY_BLOCKS, Pressure, Stage, StageParts
from kvcore.ladder.stack import CacheStack, StackConfig
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.reference import Reference
from kvcore.sim.trace import Trace
from kvcore.sim.workload import Draws, Workload, load_workload
from kvcore.sim.world import SimWorld

PASSES = ("0", "2", "3", "3b", "4", "replay")


class Press(Pressure):
    """A pressure that knows the world and the stack it presses on."""

    world: SimWorld
    stack: CacheStack

    def meets(self, world: SimWorld, stack: CacheStack) -> None:
        """The climb is about to begin."""
        self.world = world
        self.stack = stack

    def restart(self, index: int, *, torn: bool = False) -> None:
        """Kill a server's process and start it again."""
        self.world.restart(f"server{index}", torn=torn)
        self.stack.server_restarted(index)

    async def outage(self, index: int, seconds: float) -> None:
        """A server's process dies and is gone for a while."""
        self.world.crash(f"server{index}")
        try:
            await asyncio.sleep(seconds)
        finally:
            self.world.process(f"server{index}").restart()
            self.stack.server_restarted(index)


@dataclass(slots=True)
class Climbed:
    """What is left of a climb."""

    rungs: list[RungResult] = field(default_factory=list)
    stack: CacheStack | None = None
    world: SimWorld | None = None
    trace_hash: str = ""

    @property
    def problems(self) -> list[str]:
        return [f"rung {rung.rung}: {problem}" for rung in self.rungs for problem in rung.problems]

    def counts(self, rung: str) -> RungCounts:
        return next(result.counts for result in self.rungs if result.rung == rung)

    def total(self, *path: str) -> int:
        """A counter of the storages' statistics, summed over the servers' last lives: `total("l1", "evictions")`."""
        assert self.stack is not None
        found: list[Any] = [server.storage.statistics() for server in self.stack.servers]
        for name in path:
            found = [getattr(each, name) for each in found]
        return sum(found)


def tenants(workload: Workload, salts: Sequence[str], seed: int = 0) -> Workload:
    """The same requests, each of a drawn tenant."""
    draws = Draws(seed, "tenants")
    requests = tuple(replace(spec, cache_salt=salts[draws.below(len(salts))]) for spec in workload.requests)
    return replace(workload, requests=requests)


def floors(requests: int, **rungs: Floors) -> dict[str, Floors]:
    """That every request ran on every rung, and what `rungs` (`r3b=Floors(...)`) demands beyond."""
    return {
        rung: rungs.get(f"r{rung}", Floors(requests=requests)) for rung in ("0", "1", "2", "3", "3b", "4", "replay")
    }


def climb_pressed(
    cell: str,
    *,
    change: Callable[[StackConfig], StackConfig] = lambda config: config,
    demands: Mapping[str, Floors],
    requests: int = 40,
    seed: int = 0,
    passes: Sequence[str] = PASSES,
    salts: Sequence[str] = (),
    press: Press | None = None,
    **world: Any,
) -> Climbed:
    """Climb in `cell` with its configuration changed by `change`; `world` are arguments of `SimWorld`."""
    options = LadderOptions(cells=(MatrixCell.parse(cell),), requests=requests, seed=seed)
    workload = load_workload(None, seed, requests=requests, chunk_tokens=options.chunk_tokens)
    if salts:
        workload = tenants(workload, salts, seed)
    climbed = Climbed()
    trace = Trace()
    with SimLoop(seed, trace=trace) as loop:
        try:
            loop.run_until_complete(_climb(loop, options, workload, change, demands, passes, press, world, climbed))
        except Exception as error:  # as in target sim: whatever ends the world fails the rung
            climbed.rungs.append(RungResult(passes[min(len(climbed.rungs), len(passes) - 1)], problems=[say(error)]))
    climbed.trace_hash = trace.hash
    return climbed


async def _climb(
    loop: SimLoop,
    options: LadderOptions,
    workload: Workload,
    change: Callable[[StackConfig], StackConfig],
    demands: Mapping[str, Floors],
    passes: Sequence[str],
    press: Press | None,
    world_options: Mapping[str, Any],
    climbed: Climbed,
) -> None:
    (cell,) = options.cells
    config, model = configure(cell, options)
    config = change(config)
    world = SimWorld(loop, in_process=cell.servers == 0, **world_options)
    findings = Findings(loop.now_ns)
    hasher = hasher_for(config.namespace, config.layout)
    truth = Truth(config.layout, Reference(model, config.layout), hasher, findings)
    memory = PagedMemory(config.layout, model, ROOMY_BLOCKS)
    devices = [world.device(rank) for rank in range(cell.ranks)]
    for rank, device in enumerate(devices):
        device.register_pages(memory.groups[rank])
    stack = CacheStack(world, config, truth, findings)
    climbed.stack, climbed.world = stack, world
    if press is not None:
        press.meets(world, stack)
    parts = StageParts(
        config.layout, model, hasher, truth, findings, devices, memory, workload, stack, options.seed,
        floors=demands, pressure=press,
    )  # fmt: skip
    await Stage(parts).climb(passes, climbed.rungs)
    await stack.close()

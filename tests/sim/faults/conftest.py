"""A small world for faults: a loop, ports, a scene and an injector, without a cache in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcore.sim.faults.injector import Injector
from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.faults.scene import Scene
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.schedule import TiePolicy
from kvcore.sim.trace import Trace, TraceEvent
from kvcore.sim.world import SimWorld


class SmallWorld:
    """`seen`: the trace without the faults' own events. The planes tested here need neither stack nor engine."""

    def __init__(self, seed: int, schedule: str | TiePolicy) -> None:
        trace = Trace(keep=True)
        self.loop = SimLoop(seed, trace=trace, schedule=schedule)
        self.world = SimWorld(self.loop, in_process=False)
        nothing: Any = None
        self.scene = Scene(self.loop, self.world, nothing, nothing, Findings(self.loop.now_ns))
        self.injector = Injector(self.scene, ())

    def arm(self, *events: FaultEvent) -> Injector:
        self.injector = Injector(self.scene, events)
        self.injector.arm()
        return self.injector

    def run_for(self, duration_ns: int) -> None:
        self.loop.call_later_ns(duration_ns, self.loop.stop)
        self.loop.run_forever()

    @property
    def fired(self) -> int:
        return sum(self.injector.fired.values())

    @property
    def seen(self) -> list[TraceEvent]:
        return [event for event in self.loop.trace.events if not event.label.startswith("fault.")]


@pytest.fixture
def small() -> Iterator[Callable[..., SmallWorld]]:
    """`small(seed=1, schedule="random")` makes one; all are closed at the end of the test."""
    made: list[SmallWorld] = []

    def make(seed: int = 1, schedule: str | TiePolicy = "random") -> SmallWorld:
        made.append(SmallWorld(seed, schedule))
        return made[-1]

    yield make
    for world in made:
        world.loop.close()

"""The storm rungs: which planes of faults each of them draws from, and what a hundred of its cases must have shown.

    5  lying and slow L2     the stores lie, lose, hang and forget; L1 is without room
    6  hostile network       messages late, doubled, lost, cut short; partitions; clocks that lie
    7  crashes, restarts     servers, workers and schedulers die, also while they recover; the engine aborts and
                             preempts; devices fail
    8  the whole swarm       all of it at once, the schedule too

On each of them the faults stop after a while, a part of the world may stay dead, and the rest must be at rest within 60
virtual seconds and serve a second workload as a world without faults does.

A rung's cases are those of the first seeds, from `first_seed` on, that draw a fault of its planes at all. Rungs, and
ladders of different seeds, are far apart in seeds, so that they do not share configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.ladder.result import RUNG_NAMES
from kvcore.ladder.swarm_rungs.result import StormFloors

LADDERS_APART = 1_000_000
SEEDS_APART = 100_000
_OWN_CASES = 50_000


@dataclass(frozen=True, slots=True)
class StormRung:
    """One rung. `planes` None: all planes there are. `marks`: every common rare state must be met, in a large rung."""

    rung: str
    planes: tuple[str, ...] | None
    floors: StormFloors = field(default_factory=StormFloors)
    marks: bool = False

    @property
    def name(self) -> str:
        return RUNG_NAMES[self.rung]

    def first_seed(self, seed: int) -> int:
        """Where its cases begin, when the ladder's seed is `seed`."""
        return LADDERS_APART * seed + SEEDS_APART * int(self.rung)

    def first_own_seed(self, seed: int) -> int:
        """Where the cases begin that are drawn for one kind of fault alone."""
        return self.first_seed(seed) + _OWN_CASES


STORM_RUNGS: dict[str, StormRung] = {
    rung.rung: rung
    for rung in (
        StormRung("5", ("l1", "l2")),
        StormRung("6", ("transport", "clock")),
        StormRung(
            "7",
            ("process", "engine", "device"),
            StormFloors(
                deaths_server=20,
                deaths_scheduler=20,
                deaths_worker=20,
                deaths_engine=5,
                deaths_in_recovery=10,
                deaths_twice=10,
            ),
        ),
        StormRung(
            "8",
            None,
            StormFloors(deaths_server=5, deaths_scheduler=5, deaths_worker=5, deaths_in_recovery=1, deaths_twice=1),
            marks=True,
        ),
    )
}

"""Which admission a stack's scheduler side has: the product's, or one that decides by chance.

    always       what was found is promised
    if-it-pays   the product's measurements decide, in the world's time; every other seed has an objective to keep
    drawn        chance decides: any servable length, or none, and any lookup may be hurried or not begun. No policy can
                 do worse, and no output may depend on it

`drawn` draws from a stream of its own, and stops when it is told that the faults are over: what is then still not
loaded was lost, and not refused.

A climb with `if-it-pays` cannot ask for a share of hits: what the clock measures decides. It asks for both decisions,
on rung 3. Loads come of themselves, since what was not measured yet is loaded; a floor makes some of the shortest
prefixes too short on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvcore.admission import Limits
from kvcore.bitmap import bits
from kvcore.connectors.admission import Admission, LoadAll
from kvcore.connectors.measured import LoadIfItPays
from kvcore.connectors.tracker import Phase, RequestTracker
from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout
from kvcore.ladder.result import Floors
from kvcore.objective import Objective
from kvcore.ports import Clock
from kvcore.sim.streams import RandomStream

KINDS = ("always", "if-it-pays", "drawn")
OBJECTIVE = "ttft:1000 tpot:2"
"""Of every other seed: some answers of an episode meet it, some do not."""
FLOOR_CHUNKS = 4
"""Of a climb: shorter prefixes are never loaded. Every workload has requests below it, and more above. Target vllm has
fewer chunks to a prompt, and takes a floor from its workload."""


class DrawnAdmission(LoadAll):
    """See the module text."""

    def __init__(self, stream: RandomStream, over: Callable[[], bool]) -> None:
        self._stream = stream
        self._over = over

    def worth_asking(self, tracker: RequestTracker, tokens: int, local_tokens: int) -> bool:
        return self._over() or not self._stream.chance(1, 40 if tracker.phase is Phase.IDLE else 10)

    def length(self, tracker: RequestTracker, local_tokens: int) -> int:
        if self._over() or self._stream.chance(1, 3):
            return tracker.length
        return self._stream.pick(list(bits(tracker.lengths)))


def admission_for(
    kind: str,
    layout: CacheLayout,
    clock: Clock,
    *,
    seed: int,
    life: int = 0,
    over: Callable[[], bool] = lambda: False,
    floor_tokens: int = 0,
) -> Admission:
    """The admission of one life of a scheduler side."""
    if kind == "if-it-pays":
        objective = Objective.read(OBJECTIVE) if seed % 2 else None
        return LoadIfItPays(layout, clock, Limits(floor_tokens, objective=objective))
    if kind == "drawn":
        return DrawnAdmission(RandomStream(seed, f"admission.{life}"), over)
    if kind != "always":
        raise ConfigError(f"there is no admission {kind!r}; known: {', '.join(KINDS)}")
    return LoadAll()


def settings_for(kind: str, *, seed: int, floor_tokens: int) -> dict[str, Any]:
    """The same admission, for a connector that reads settings (`kvcore.connectors.vllm.settings`)."""
    if kind == "always":
        return {}
    settings = {"admission": kind, "admission_floor_tokens": floor_tokens}
    return settings | ({"admission_objective": OBJECTIVE} if seed % 2 else {})


def refusals(admission: Admission) -> int:
    """How often it has preferred computing to what was, or might have been, found."""
    if not isinstance(admission, LoadIfItPays):
        return 0
    state = admission.statistics()
    return state.decided_compute + state.lookups_unwanted


def floors_with(kind: str, floors: Mapping[str, Floors]) -> Mapping[str, Floors]:
    """What the rungs of a climb with this admission must have done, given what they must do when all is loaded."""
    if kind == "always":
        return floors
    free = {rung: replace(each, loads_verified=0, resumes_with_load=0, hit_share=0.0) for rung, each in floors.items()}
    return free | {"3": replace(free["3"], loads_verified=1, refusals=1)}

"""Faults of the schedule: who runs first among what is ready at one instant.

Each is a layer over the run's own tie policy (`kvcore.sim.schedule.LayeredTies`) for as long as it lasts, so it works
whatever the case's schedule is; over a replayed schedule it does nothing, because what is replayed holds its choices.

    schedule.ties      uniform among what is ready. Fires at the first choice that first in, first out would not make.
    schedule.priority  random priorities per task with few change points. Fires when a demotion has changed who runs.
    schedule.starve    one process, or one task, never runs while anybody else is ready. Fires when it was passed over.

Virtual time stands still while anything is ready, so a starved task is the last one to run at each instant, not one
that is late by the clock; for that there are the pauses of plane `process`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.sim.faults.kind import MS, End, FaultEvent, Kind, Shape, lasting
from kvcore.sim.faults.scene import Scene
from kvcore.sim.process import CURRENT
from kvcore.sim.schedule import Choose, PriorityTies, RandomTies, ReadyEntry, Starvation
from kvcore.sim.streams import RandomStream
from kvcore.sim.tasks import SimHandle

_DOWN_NS = (MS, 40 * MS)
_UP_NS = (MS, 10 * MS)
_PASSES = 1_000  # of a starvation whose event does not say
_CHANGE_POINTS = 4


def draw_ties(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting("schedule.ties", stream, shape, ("",), down_ns=_DOWN_NS, up_ns=_UP_NS)


def begin_ties(scene: Scene, event: FaultEvent) -> End:
    ties, fire = RandomTies(scene.stream(event)), scene.once(event)

    def choose(below: Choose, ready: Sequence[ReadyEntry]) -> int:
        index = ties.choose(ready)
        if index:
            fire()
        return index

    return scene.loop.layers.add(choose)


def draw_priority(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting("schedule.priority", stream, shape, ("",), down_ns=_DOWN_NS, up_ns=_UP_NS, amount=(2, 12))


def begin_priority(scene: Scene, event: FaultEvent) -> End:
    ties = PriorityTies(scene.stream(event), event.amount or _CHANGE_POINTS)
    ties.on_switch = scene.once(event)

    def choose(below: Choose, ready: Sequence[ReadyEntry]) -> int:
        return ties.choose(ready)

    return scene.loop.layers.add(choose)


def draw_starve(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    """A process, or (without a target) the task that is met at the n-th tie."""
    whole = not shape.in_process and stream.chance(1, 2)
    targets = shape.processes if whole else ("",)
    events = lasting("schedule.starve", stream, shape, targets, down_ns=_DOWN_NS, up_ns=_UP_NS, amount=(20, 2_000))
    nth = 0 if whole else stream.tail_ns(1, 200)
    return [FaultEvent(each.kind, each.at_ns, each.until_ns, each.target, nth, each.amount) for each in events]


def begin_starve(scene: Scene, event: FaultEvent) -> End:
    passes, fire = event.amount or _PASSES, scene.once(event)
    if event.target:
        return scene.loop.layers.add(Starvation(lambda entry: _process_of(entry) == event.target, passes, fire))
    return scene.loop.layers.add(_OneTask(scene.stream(event), max(1, event.nth), passes, fire))


def _process_of(entry: ReadyEntry) -> str:
    assert isinstance(entry, SimHandle)
    life = entry.get_context().get(CURRENT)
    return "" if life is None else life.process.name


class _OneTask:
    """Starves one task: one of those that are ready at the n-th tie, or at the next one at which any task is."""

    def __init__(self, stream: RandomStream, nth: int, passes: int, fire: Callable[[], None]) -> None:
        self._stream = stream
        self._countdown = nth
        self._victim: int | None = None
        self._starvation = Starvation(lambda entry: entry.actor == self._victim, passes, fire)

    def __call__(self, below: Choose, ready: Sequence[ReadyEntry]) -> int:
        self._countdown -= 1
        if self._victim is None and self._countdown <= 0:
            tasks = [entry.actor for entry in ready if entry.actor is not None]
            self._victim = self._stream.pick(tasks) if tasks else None
        return below(ready) if self._victim is None else self._starvation(below, ready)


KINDS = (
    Kind("schedule.ties", "ties go by the seed instead of first in, first out", draw_ties, begin_ties),
    Kind(
        "schedule.priority",
        "tasks have random priorities, with `amount` change points",
        draw_priority,
        begin_priority,
    ),
    Kind(
        "schedule.starve",
        "a process, or the task met at the `nth` tie, is passed over up to `amount` times",
        draw_starve,
        begin_starve,
    ),
)

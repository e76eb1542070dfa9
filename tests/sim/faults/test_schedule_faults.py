"""Plane schedule: who runs first at one instant, and that it is as before when the fault is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.schedule import FifoTies, LayeredTies, PriorityTies, RandomTies, RecordingTies, ReplayTies, Starvation
from kvcore.sim.streams import RandomStream

MS = 1_000_000
World = Callable[..., Any]
NAMES = [f"t{number}" for number in range(6)]


def rounds(world: Any, count: int, spacing_ns: int = MS) -> list[list[str]]:
    """Six processes do one thing at the same instant, again and again: who came when, per round."""
    order: list[list[str]] = [[] for _ in range(count)]

    async def work(name: str) -> None:
        for number in range(count):
            order[number].append(name)
            await asyncio.sleep(spacing_ns / 1e9)

    for name in NAMES:
        world.loop.process(name).spawn(work(name), name)
    world.run_for((count + 1) * spacing_ns)
    return order


def test_ties_break_first_in_first_out_for_a_while_and_then_no_more(small: World) -> None:
    world = small(schedule="fifo")
    world.arm(FaultEvent("schedule.ties", 2 * MS, 6 * MS))
    order = rounds(world, 10)
    assert world.fired == 1
    assert order[:2] == [NAMES, NAMES]
    assert any(each != order[1] for each in order[3:6])
    assert len({tuple(each) for each in order[7:]}) == 1, "first in, first out again"


def test_without_a_choice_that_differs_ties_have_not_fired(small: World) -> None:
    world = small(schedule="fifo")
    world.arm(FaultEvent("schedule.ties", 50 * MS, 60 * MS))
    rounds(world, 3)
    assert world.fired == 0


def test_priorities_change_who_runs_at_change_points(small: World) -> None:
    world = small(schedule="fifo")
    world.arm(FaultEvent("schedule.priority", 0, 40 * MS, amount=12))
    order = rounds(world, 60)
    assert world.fired == 1
    assert order[1] != NAMES
    assert len({tuple(each) for each in order[45:]}) == 1


def test_a_demotion_that_changes_nobody_is_not_a_switch() -> None:
    class Entry:
        actor: int | None

        def __init__(self, sequence: int, actor: int) -> None:
            self.sequence, self.actor = sequence, actor

    def switches(*actors: int) -> int:
        count = 0

        def switched() -> None:
            nonlocal count
            count += 1

        ties = PriorityTies(RandomStream(1, "ties"), 12)
        ties.on_switch = switched
        for tie in range(500):
            ties.choose([Entry(2 * tie + position, actor) for position, actor in enumerate(actors)])
        return count

    assert switches(7, 7) == 0, "one task only: it is always the one to run"
    assert switches(7, 8) > 1


@pytest.mark.parametrize("schedule", ["fifo", "random", "priority"])
def test_a_starved_process_is_last_at_every_instant(small: World, schedule: str) -> None:
    world = small(schedule=schedule)
    world.arm(FaultEvent("schedule.starve", 0, 9 * MS + MS // 2, "t0", amount=10_000))
    order = rounds(world, 20)
    assert world.fired == 1
    assert all(each[-1] == "t0" for each in order[:9])
    if schedule == "random":
        assert any(each[-1] != "t0" for each in order[10:])


def test_one_task_is_starved_where_no_process_is_named(small: World) -> None:
    world = small(schedule="random")
    world.arm(FaultEvent("schedule.starve", 0, 0, nth=7, amount=10_000))
    order = rounds(world, 12)
    assert world.fired == 1
    assert len({each[-1] for each in order[3:]}) == 1
    world.injector.stop()


def test_starvation_is_bounded() -> None:
    passed: list[int] = []
    layer = Starvation(lambda entry: entry.sequence == 0, 3, lambda: passed.append(1))

    class Entry:
        actor = None

        def __init__(self, sequence: int) -> None:
            self.sequence = sequence

    ready = [Entry(0), Entry(1)]
    below = FifoTies().choose
    assert [layer(below, ready) for _ in range(5)] == [1, 1, 1, 0, 0]
    assert len(passed) == 3


def test_layers_come_and_go_in_any_order() -> None:
    ties = LayeredTies(FifoTies())
    first = ties.add(lambda below, ready: 1)
    second = ties.add(lambda below, ready: below(ready) + 1)
    ready: list[Any] = [None] * 4
    assert ties.choose(ready) == 2
    first()
    assert ties.choose(ready) == 1
    second()
    second()
    assert ties.choose(ready) == 0


@pytest.mark.parametrize(
    "event",
    [
        FaultEvent("schedule.ties", MS, 5 * MS),
        FaultEvent("schedule.priority", MS, 5 * MS, amount=6),
        FaultEvent("schedule.starve", MS, 5 * MS, "t2"),
    ],
    ids=lambda event: event.kind,
)
def test_a_recorded_schedule_has_the_faults_choices_in_it(small: World, event: FaultEvent) -> None:
    recorder = RecordingTies(RandomTies(RandomStream(5, "schedule")))
    world = small(schedule=recorder)
    world.arm(event)
    order = rounds(world, 8)
    assert world.fired == 1
    again = small(schedule=ReplayTies(recorder.exceptions))
    again.arm(event)
    assert rounds(again, 8) == order
    assert again.fired == 0, "over a replay layers have no effect"

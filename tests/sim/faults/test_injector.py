"""The injector: faults begin and end at their times, once, and what it is told to leave alone stays broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.errors import CallerError
from kvcore.sim.faults.injector import Injector
from kvcore.sim.faults.kind import FaultEvent

MS = 1_000_000
World = Callable[..., Any]


def traced(world: Any) -> list[tuple[int, str, str]]:
    return [
        (event.time_ns, event.label, str(event.fields[1]))
        for event in world.loop.trace.events
        if event.label.startswith("fault.")
    ]


def test_a_fault_begins_and_ends_at_its_times_since_the_episode_began(small: World) -> None:
    world = small()
    world.run_for(5 * MS)
    world.arm(FaultEvent("device.stalled_stream", 2 * MS, 3 * MS, "device0.store"))
    world.run_for(10 * MS)
    assert traced(world) == [(7 * MS, "fault.begin", "device0.store"), (8 * MS, "fault.end", "device0.store")]
    world.injector.stop()
    assert len(traced(world)) == 2, "it had ended already"


def test_stop_ends_what_lasts_and_disarms_the_rest(small: World) -> None:
    world = small()
    injector = world.arm(
        FaultEvent("transport.clog", 0, 50 * MS, "a"),
        FaultEvent("transport.clog", 0, 0, "b", amount=MS),
        FaultEvent("transport.clog", 30 * MS, 50 * MS, "c"),
    )
    world.run_for(10 * MS)
    injector.stop()
    world.run_for(100 * MS)
    ends = [(time_ns, target) for time_ns, label, target in traced(world) if label == "fault.end"]
    assert ends == [(10 * MS, "a"), (10 * MS, "b")]
    assert all(target != "c" for _, _, target in traced(world))
    assert injector.lasting == []
    assert injector.enabled == {"transport.clog": 3}


def test_what_has_begun_on_a_target_that_stays_dead_is_never_ended(small: World) -> None:
    world = small()
    dead = FaultEvent("transport.partition", MS, 20 * MS, "server0")
    injector = world.arm(dead, FaultEvent("transport.partition", MS, 20 * MS, "server1"))
    world.run_for(5 * MS)
    injector.stop(leave=("server0",))
    world.run_for(100 * MS)
    assert injector.lasting == [dead]
    assert [target for _, label, target in traced(world) if label == "fault.end"] == ["server1"]


def test_faults_of_time_0_begin_at_once_and_in_order(small: World) -> None:
    world = small()
    world.arm(*(FaultEvent("device.fail_copy", nth=n, target=f"device{n}") for n in (3, 1, 2)))
    assert [target for _, _, target in traced(world)] == ["device3", "device1", "device2"]


def test_faults_are_armed_once_and_must_exist(small: World) -> None:
    world = small()
    world.arm()
    with pytest.raises(CallerError):
        world.injector.arm()
    with pytest.raises(CallerError, match=r"transport\.gremlins"):
        Injector(world.scene, [FaultEvent("transport.gremlins")])


def test_what_is_random_about_an_event_does_not_depend_on_the_others(small: World) -> None:
    one, two = FaultEvent("transport.duplicate", 0, MS, "a"), FaultEvent("transport.duplicate", 0, MS, "b")
    world, other = small(3), small(3)
    world.scene.stream(one).getrandbits(64)
    drawn = [each.scene.stream(two).getrandbits(64) for each in (world, other)]
    assert drawn[0] == drawn[1]
    assert world.scene.stream(one) is not world.scene.stream(two)

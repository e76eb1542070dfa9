"""Plane device: what each fault does to copies, that it fires when it does, and that the device is well after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore.ports import Copy
from kvcore.sim.faults.catalogue import CATALOGUE
from kvcore.sim.faults.device import DeviceError
from kvcore.sim.faults.kind import FaultEvent

MS = 1_000_000
World = Callable[..., Any]
BLOCKS = 6


class Batches:
    """A device that copies blocks out ("store") and in ("load"), four pages each."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.pages = np.arange(BLOCKS * 4, dtype=np.uint64).reshape(BLOCKS, 4)
        self.host = np.zeros_like(self.pages)
        self.device = world.world.device(0)
        self.device.register_pages([self.pages])
        self.ended: list[tuple[str, int, bool]] = []  # stream, time, well
        self.refused: list[str] = []

    def submit(self, stream: str) -> None:
        moves = [
            Copy(self.pages[block], self.host[block], stream, block)
            if stream == "store"
            else Copy(self.host[block], self.pages[block], stream, block)
            for block in range(4)
        ]
        try:
            ticket = self.device.submit(moves, stream=stream)
        except DeviceError:
            self.refused.append(stream)
            return
        ticket.on_done(lambda: self.ended.append((stream, self.world.loop.now_ns(), ticket.error is None)))

    def work(self, count: int = 6, spacing_ns: int = 2 * MS) -> None:
        for number in range(count):
            for stream in ("store", "load"):
                self.world.loop.call_later_ns(number * spacing_ns, self.submit, stream)
        self.world.loop.call_later_ns(0, self.device.run_compute, lambda: None, MS)
        for number in range(count):  # blocks get new owners all the time
            self.world.loop.call_later_ns(number * spacing_ns + MS // 2, self.device.given_away, number % BLOCKS)
        self.world.run_for((count + 20) * spacing_ns)

    def well(self, stream: str) -> list[bool]:
        return [well for name, _, well in self.ended if name == stream]


EVENTS = [
    FaultEvent("device.late_completion", MS, 9 * MS, "device0", amount=4 * MS),
    FaultEvent("device.stalled_stream", MS, 9 * MS, "device0.store"),
    FaultEvent("device.stalled_stream", MS, 9 * MS, "device0.load"),
    FaultEvent("device.fail_copy", 0, 0, "device0", 7),
    FaultEvent("device.fail_copy", 0, 0, "", 7),
    FaultEvent("device.fail_copy", 3 * MS, 7 * MS, "device0.load"),
    FaultEvent("device.slow_store", MS, 20 * MS, "device0", amount=2 * MS),
    FaultEvent("device.refuse_submit", 0, 0, "device0", 3),
    FaultEvent("device.refuse_submit", 3 * MS, 7 * MS, "device0.store"),
]


def test_the_events_of_this_file_are_of_every_kind() -> None:
    assert {event.kind for event in EVENTS} == {name for name in CATALOGUE if name.startswith("device.")}


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_it_fires_changes_the_run_and_is_over_after_it(small: World, event: FaultEvent) -> None:
    world, calm = small(), small()
    with_fault, without = Batches(world), Batches(calm)
    world.arm(event)
    with_fault.work()
    without.work()
    assert world.fired > 0
    assert calm.fired == 0
    assert world.seen != calm.seen
    assert all(well for *_, well in without.ended)
    assert len(with_fault.ended) + len(with_fault.refused) == 12, "every batch has ended or was refused"
    world.injector.stop()
    with_fault.ended.clear()
    with_fault.refused.clear()
    began_ns = world.loop.now_ns()
    with_fault.work(count=4)
    assert with_fault.refused == []
    assert all(well for *_, well in with_fault.ended)
    assert len(with_fault.ended) == 8
    assert max(time_ns for _, time_ns, _ in with_fault.ended) < began_ns + 3 * 2 * MS + 2 * MS


def test_a_stalled_stream_is_overtaken_and_goes_on_when_it_is_opened(small: World) -> None:
    world = small()
    batches = Batches(world)
    world.arm(FaultEvent("device.stalled_stream", 0, 30 * MS, "device0.store"))
    batches.work(count=3)
    assert [stream for stream, *_ in batches.ended] == ["load"] * 3 + ["store"] * 3
    assert batches.well("store") == [True] * 3
    assert min(time_ns for stream, time_ns, _ in batches.ended if stream == "store") > 30 * MS
    assert world.fired == 1


def test_a_stalled_stream_that_nobody_overtakes_has_not_fired(small: World) -> None:
    world = small()
    batches = Batches(world)
    world.arm(FaultEvent("device.stalled_stream", 0, 10 * MS, "device0.store"))
    batches.submit("store")
    world.run_for(40 * MS)
    assert batches.well("store") == [True]
    assert world.fired == 0


def test_two_who_shut_a_stream_must_both_open_it(small: World) -> None:
    world = small()
    batches = Batches(world)
    world.arm(
        FaultEvent("device.stalled_stream", 0, 10 * MS, "device0.store"),
        FaultEvent("device.stalled_stream", MS, 20 * MS, "device0.store"),
    )
    batches.submit("store")
    world.run_for(40 * MS)
    assert batches.ended[0][1] > 20 * MS


@pytest.mark.parametrize("nth", range(1, 9))
def test_exactly_the_nth_page_fails_and_its_batch_with_it(small: World, nth: int) -> None:
    world = small()
    batches = Batches(world)
    world.arm(FaultEvent("device.fail_copy", 0, 0, "device0.store", nth))
    for _ in range(2):
        batches.submit("store")
    world.run_for(20 * MS)
    assert batches.well("store") == [nth > 4, nth <= 4]
    assert world.fired == 1
    moved = batches.host[: (nth - 1) % 4] == batches.pages[: (nth - 1) % 4]
    assert bool(moved.all())


def test_a_refused_submission_raises_and_moves_nothing(small: World) -> None:
    world = small()
    batches = Batches(world)
    world.arm(FaultEvent("device.refuse_submit", 0, 0, "device0", 1))
    batches.submit("store")
    batches.submit("load")
    world.run_for(20 * MS)
    assert batches.refused == ["store"]
    assert batches.well("load") == [True]
    assert not batches.device.inflight_reads()
    assert [event.label for event in world.seen].count("copy.refuse") == 1


def test_slow_stores_fire_only_when_a_block_is_given_away_under_them(small: World) -> None:
    world = small()
    batches = Batches(world)
    world.arm(FaultEvent("device.slow_store", 0, 0, "device0", amount=8 * MS))
    batches.submit("store")
    world.loop.call_later_ns(0, batches.device.given_away, 5)
    world.loop.call_later_ns(1, batches.device.given_away, 2)
    world.loop.call_later_ns(99 * MS, batches.device.given_away, 2)
    world.run_for(100 * MS)
    assert world.fired == 1


def test_the_rules_outlive_the_device_of_a_dead_worker(small: World) -> None:
    world = small()
    Batches(world)
    world.arm(FaultEvent("device.fail_copy", 0, 0, "device0", 1))
    next_life = Batches(world)
    next_life.submit("load")
    world.run_for(20 * MS)
    assert next_life.well("load") == [False]

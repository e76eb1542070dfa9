"""The device of target `local`: what its book says about copies that have not ended, on real threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import numpy as np

from kvcore.ladder.watched_device import STORE_STREAM, WatchedDevice
from kvcore.ports import Copy, DeviceEvent
from kvcore.runtime.copy import ThreadCopyEngine

WAIT_SECONDS = 60.0  # a deadline for threads that never come; nothing waits this long


class Bench:
    """Two devices over pages of 4 words, and a gate that holds their compute streams until it is opened."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pages = np.arange(40, dtype=np.uint64).reshape(10, 4)
        self.outside = np.zeros((10, 4), dtype=np.uint64)
        self.turns = threading.Lock()
        self.gate = threading.Event()
        self.devices = [
            WatchedDevice(ThreadCopyEngine(self.loop, f"test{rank}"), self.pages, self.turns, 1024) for rank in range(2)
        ]
        self.device = self.devices[0]

    def hold_compute(self) -> DeviceEvent:
        def wait() -> None:
            self.gate.wait(WAIT_SECONDS)

        return self.device.run_compute(wait)

    def store(self, block: int) -> Copy:
        return Copy(self.pages[block], self.outside[block], "store", block)

    def load(self, block: int) -> Copy:
        return Copy(self.outside[block], self.pages[block], "load", block)


def on_loop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(scenario)
    def test() -> None:
        asyncio.run(scenario())

    return test


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            yield made
    finally:
        made.gate.set()
        for device in made.devices:
            device.close()


@on_loop
async def test_a_store_behind_the_writing_pass_is_ordered_and_no_race() -> None:
    async with bench() as world:
        event = world.hold_compute()
        ticket = world.device.submit([world.store(3)], stream=STORE_STREAM, after=[event])
        assert world.device.overwritten([3]) is None
        world.gate.set()
        await ticket.wait()
        assert world.device.overwritten([3]) is None
        assert np.array_equal(world.outside[3], world.pages[3])


@on_loop
async def test_a_store_that_nothing_holds_back_is_a_race_until_it_is_done() -> None:
    async with bench() as world:
        held = world.device.submit([world.store(2)], stream=STORE_STREAM, after=[world.hold_compute()])
        ticket = world.device.submit([world.store(4)], stream=STORE_STREAM)  # waits only for its turn in the stream
        assert world.device.overwritten([3, 4, 5]) == 4
        assert world.device.torn([4]) is None
        world.gate.set()
        await held.wait()
        await ticket.wait()
        assert world.device.overwritten([3, 4, 5]) is None


@on_loop
async def test_a_cancelled_store_can_be_overwritten_at_once() -> None:
    async with bench() as world:
        world.device.submit([world.store(2)], stream=STORE_STREAM, after=[world.hold_compute()])
        ticket = world.device.submit([world.store(4)], stream=STORE_STREAM)
        assert ticket.cancel()
        assert world.device.overwritten([4]) is None


@on_loop
async def test_a_load_tears_whatever_is_written_to_its_block_before_it_is_done() -> None:
    async with bench() as world:
        event = world.hold_compute()
        ticket = world.device.submit([world.load(6)], stream="load", after=[event])
        assert world.device.torn([5, 6]) == 6
        assert world.device.overwritten([6]) is None
        world.gate.set()
        await ticket.wait()
        assert world.device.torn([5, 6]) is None
        assert not world.pages[6].any()


@on_loop
async def test_compute_work_of_two_devices_takes_turns() -> None:
    async with bench() as world:
        inside, most = [0], [0]

        def work() -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            sum(range(20_000))
            inside[0] -= 1

        events = [device.run_compute(work) for _ in range(20) for device in world.devices]
        for event in events:
            await event.wait()
        assert most[0] == 1

"""How many callbacks per second SimLoop runs, and what the trace costs. Aim: 300,000 callbacks per second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcore.sim.loop import SimLoop
from kvcore.sim.trace import Trace, TraceEvent

CHAIN_CALLBACKS = 50_000
SLEEPERS = 100
SLEEPS = 100
TRACED_EVENTS = 10_000


def _chain() -> int:
    with SimLoop(1) as loop:
        left = CHAIN_CALLBACKS

        def again() -> None:
            nonlocal left
            left -= 1
            if left:
                loop.call_soon(again)

        loop.call_soon(again)
        loop.run_until_idle()
        return loop.callbacks_run


def _sleepers(schedule: str) -> int:
    async def sleeper() -> None:
        for _ in range(SLEEPS):
            await asyncio.sleep(0.001)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(SLEEPERS):
                group.create_task(sleeper())

    with SimLoop(1, schedule=schedule, change_points=3) as loop:
        loop.run_until_complete(main())
        return loop.callbacks_run


def _report(benchmark: Any, callbacks: int) -> None:
    if benchmark.stats is not None:  # absent with --benchmark-disable
        benchmark.extra_info["callbacks_per_second"] = round(callbacks / benchmark.stats.stats.min)


def test_a_tight_chain_of_call_soon(benchmark: Any) -> None:
    callbacks = benchmark(_chain)
    assert callbacks == CHAIN_CALLBACKS
    _report(benchmark, callbacks)


@pytest.mark.parametrize("schedule", ["random", "fifo", "priority"])
def test_a_hundred_tasks_that_sleep(benchmark: Any, schedule: str) -> None:
    callbacks = benchmark(_sleepers, schedule)
    assert callbacks >= 2 * SLEEPERS * SLEEPS
    _report(benchmark, callbacks)


@pytest.mark.parametrize("watched", [False, True], ids=["hashed", "hashed and watched"])
def test_trace_events(benchmark: Any, watched: bool) -> None:
    seen = 0

    def watch(_event: TraceEvent) -> None:
        nonlocal seen
        seen += 1

    def emit() -> str:
        trace = Trace()
        if watched:
            trace.subscribe(watch)
        for number in range(TRACED_EVENTS):
            trace.event("l1.publish", "model", number, b"0123456789abcdef")
        return trace.hash

    assert len(benchmark(emit)) == 32
    assert (seen > 0) is watched


def test_an_empty_run_costs_little(benchmark: Any) -> None:
    def run() -> int:
        with SimLoop(1) as loop:
            loop.run_until_complete(asyncio.sleep(0))
            return loop.callbacks_run

    assert benchmark(run) >= 2

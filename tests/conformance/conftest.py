"""The harness of the conformance suites: one scenario, run on the real loop or on simulated ones.

A scenario is a coroutine function. The real world runs it on an asyncio loop under a deadline; a simulated world runs
it on a `SimLoop` of one seed, where a scenario that waits for nothing ends in a deadlock report. Errors that reach the
loop's exception handler are collected in `world.loop_errors` and fail the test unless it takes them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvcore.sim.loop import SimLoop

DEADLINE_S = 60  # nothing here waits for anything slow: only a hang gets this far


class World:
    """Runs scenarios. `simulated` is for the choice of the implementation, never for other expectations."""

    def __init__(self, seed: int | None) -> None:
        self.simulated = seed is not None
        self._seed = seed
        self.loop_errors: list[BaseException] = []

    def run(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._seed is None:
            self._run_real(scenario)
        else:
            self._run_simulated(scenario, self._seed)

    def _run_real(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await scenario()

        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(self._collect)
            runner.run(bounded())

    def _run_simulated(self, scenario: Callable[[], Coroutine[Any, Any, None]], seed: int) -> None:
        loop = SimLoop(seed)
        loop.set_exception_handler(self._collect)
        try:
            loop.run_until_complete(scenario())
        finally:
            loop.close()

    def _collect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.loop_errors.append(context.get("exception") or RuntimeError(context["message"]))


class Inbox:
    """Where callbacks put things and scenarios wait for them."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._grown = asyncio.Event()

    def put(self, item: Any = None) -> None:
        self.items.append(item)
        self._grown.set()

    async def first(self, count: int) -> list[Any]:
        """The first `count` items, when they are there."""
        while len(self.items) < count:
            self._grown.clear()
            await self._grown.wait()
        return self.items[:count]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The world of the test's `port` parameter: "sim-7" is a simulated one with seed 7, anything else is real."""
    port = request.getfixturevalue("port")
    seed = int(port.rpartition("-")[2]) if "sim-" in port else None
    made = World(seed)
    yield made
    assert made.loop_errors == []


@pytest.fixture
def inbox() -> type[Inbox]:
    return Inbox

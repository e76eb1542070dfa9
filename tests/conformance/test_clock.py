"""What every `Clock` promises."""

from __future__ import annotations

import asyncio

import pytest

from kvcore.runtime.clock import SystemClock
from kvcore.sim.ports.clock import SimClock


@pytest.fixture(params=["system", "sim-1"])
def port(request):
    return request.param


@pytest.fixture
def new_clock(port):
    return lambda: SimClock(asyncio.get_running_loop()) if port.startswith("sim") else SystemClock()


def test_time_is_whole_nanoseconds_and_passes_while_the_loop_waits(world, inbox, new_clock):
    async def scenario():
        box, clock = inbox(), new_clock()
        before_ns = clock.now_ns()
        asyncio.get_running_loop().call_later(0.002, box.put)
        await box.first(1)
        passed_ns = clock.now_ns() - before_ns
        assert isinstance(passed_ns, int)
        assert passed_ns >= 1_900_000

    world.run(scenario)


def test_tokens_are_hexadecimal_of_the_length_asked_for_and_differ(world, new_clock):
    async def scenario():
        clock = new_clock()
        tokens = [clock.token(8) for _ in range(1000)]
        assert all(len(token) == 16 for token in tokens)
        assert all(bytes.fromhex(token) for token in tokens)
        assert len(set(tokens)) == 1000

    world.run(scenario)

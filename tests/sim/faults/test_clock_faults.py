"""Plane clock: deadlines of a run, the clock of one process, the timers of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.ladder.swarm.case import EpisodeConfig
from kvcore.ladder.swarm.setting import model_of, stack_config
from kvcore.service.client import ConnectionConfig, SchedulerConfig
from kvcore.service.server import ServerConfig
from kvcore.sim.faults.clock import DEADLINES, shortened, timeout_divisor
from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.ports.clock import SimClock
from kvcore.storage import StorageConfig

MS = 1_000_000
World = Callable[..., Any]


def readings(world: Any, times_ns: list[int], process: str = "server0") -> list[tuple[int, int]]:
    """(the world's time, what the process's clock shows) at these moments."""
    seen: list[tuple[int, int]] = []
    shown = world.world.process(process)

    def read() -> None:
        seen.append((world.loop.now_ns(), world.world.clock.now_ns()))

    for time_ns in times_ns:
        world.loop.call_at_ns(time_ns, read, context=shown.context())
    world.run_for(max(times_ns) + 1)
    return seen


def test_a_clock_steps_forward_once_and_stays_ahead(small: World) -> None:
    world = small()
    world.arm(FaultEvent("clock.step", 3 * MS, target="server0", amount=500 * MS))
    seen = readings(world, [1 * MS, 2 * MS, 4 * MS, 5 * MS])
    assert [shown - now for now, shown in seen] == [0, 0, 500 * MS, 500 * MS]
    assert world.fired == 0, "no timer was under way: nobody can tell"


def test_only_the_process_that_is_named_sees_another_time(small: World) -> None:
    world = small()
    world.arm(FaultEvent("clock.step", 0, target="server0", amount=500 * MS))
    assert [shown - now for now, shown in readings(world, [MS, 2 * MS], "scheduler")] == [0, 0]
    assert world.world.clock.now_ns() == world.loop.now_ns(), "code outside all processes sees the world's time"
    assert world.fired == 0


@pytest.mark.parametrize("amount", [-200, 40, 1000])
def test_a_clock_drifts_and_keeps_what_it_has_gained_or_lost(small: World, amount: int) -> None:
    world = small()
    world.arm(FaultEvent("clock.drift", 2 * MS, 12 * MS, "server0", amount=amount))
    seen = readings(world, [1 * MS, 7 * MS, 12 * MS + 1, 90 * MS])
    assert [shown - now for now, shown in seen] == [0, 5_000 * amount, 10_000 * amount, 10_000 * amount]
    assert [shown for _, shown in seen] == sorted(shown for _, shown in seen)


def test_skews_of_one_process_add_up(small: World) -> None:
    world = small()
    world.arm(
        FaultEvent("clock.step", MS, target="server0", amount=7),
        FaultEvent("clock.step", 2 * MS, target="server0", amount=9),
    )
    assert [shown - now for now, shown in readings(world, [MS + 1, 3 * MS])] == [7, 16]


def test_a_clock_that_goes_back_is_refused(small: World) -> None:
    world = small()
    clock = world.world.process_clocks
    assert isinstance(clock, SimClock)
    world.world.process("server0").run(clock.skew, "server0", lambda now_ns: -now_ns // 2 if now_ns > MS else 0)
    with pytest.raises(AssertionError, match="went back"):
        readings(world, [MS, MS + 1])


def test_the_timers_under_way_come_earlier_by_a_step(small: World) -> None:
    world = small()
    world.arm(FaultEvent("clock.step", MS, target="server0", amount=5 * MS))
    woken: dict[str, int] = {}

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken[name] = world.loop.now_ns()

    for process in ("server0", "scheduler"):
        for seconds in (0.003, 0.009):
            name = f"{process} {seconds}"
            world.world.process(process).spawn(sleep(name, seconds), name)
    world.run_for(20 * MS)
    expected = {"server0 0.003": 1 * MS, "server0 0.009": 4 * MS, "scheduler 0.003": 3 * MS, "scheduler 0.009": 9 * MS}
    assert woken == expected
    assert world.fired == 1


@pytest.mark.parametrize(("amount", "lasts_ns"), [(1_000, 5 * MS), (-200, 12_500_000)])
def test_the_timers_of_a_clock_that_drifts_go_with_it(small: World, amount: int, lasts_ns: int) -> None:
    world = small()
    world.arm(FaultEvent("clock.drift", 0, 0, "server0", amount=amount))
    assert lateness(world, [10 * MS]) == [lasts_ns - 10 * MS]
    assert lateness(world, [10 * MS], "scheduler") == [0]
    assert world.fired == 1


def lateness(world: Any, delays_ns: list[int], process: str = "server0") -> list[int]:
    """By how much each timer of the process runs late."""
    late: list[int] = []

    async def wait(delay_ns: int) -> None:
        begin_ns = world.loop.now_ns()
        await asyncio.sleep(delay_ns / 1e9)
        late.append(world.loop.now_ns() - begin_ns - delay_ns)

    async def all_of_them() -> None:
        for delay_ns in delays_ns:
            await wait(delay_ns)

    world.world.process(process).spawn(all_of_them(), "waits")
    world.run_for(10 * sum(delays_ns))
    return late


def test_coarse_timers_are_rounded_up_until_the_fault_ends(small: World) -> None:
    world = small()
    world.arm(FaultEvent("clock.coarse_timers", 0, 9 * MS, "server0", amount=4 * MS))
    late = lateness(world, [MS, 4 * MS, 2 * MS, MS, MS])
    assert late == [3 * MS, 0, 2 * MS, 0, 0], "at 4, 8 and 12 ms; then it is over"
    assert world.fired == 1


def test_timers_may_come_early_by_half_of_their_time_at_most(small: World) -> None:
    world = small()
    world.arm(FaultEvent("clock.coarse_timers", 0, 0, "server0", amount=-2 * MS))
    late = lateness(world, [MS, 100 * MS, MS, 100 * MS, 1, 0])
    assert all(-delay // 2 <= each <= 0 for delay, each in zip([MS, 2 * 2 * MS, MS, 2 * 2 * MS, 0, 0], late))
    assert min(late) < -MS // 2
    assert world.fired == 1


def test_the_timers_of_others_are_exact(small: World) -> None:
    world = small()
    world.arm(FaultEvent("clock.coarse_timers", 0, 0, "server0", amount=4 * MS))
    assert lateness(world, [MS, MS], "scheduler") == [0, 0]
    assert world.fired == 0


def test_a_coarse_timer_that_is_cancelled_in_time_has_changed_nothing(small: World) -> None:
    world = small()
    world.arm(FaultEvent("clock.coarse_timers", 0, 0, "server0", amount=50 * MS))

    async def in_time() -> None:
        async with asyncio.timeout(0.010):
            pass

    world.world.process("server0").spawn(in_time(), "in time")
    world.run_for(100 * MS)
    assert world.fired == 0


CONFIGURATIONS = (StorageConfig(), ConnectionConfig(), SchedulerConfig(), ServerConfig())


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda config: type(config).__name__)
def test_every_deadline_of_a_configuration_is_shortened_and_nothing_else(config: Any) -> None:
    short = shortened(config, 600)
    for name in type(config).__dataclass_fields__:
        before, after = getattr(config, name), getattr(short, name)
        assert after == (before // 600 if name in DEADLINES else before)
    assert shortened(config, 1) == config


def test_a_stack_is_shortened_with_all_that_is_in_it() -> None:
    config = EpisodeConfig(lookup_timeout_ns=1_000 * MS, server_timeout_ns=MS, lease_ns=60_000 * MS)
    layout, _, _ = model_of(config)
    stack = shortened(stack_config(config, layout), 100)
    assert stack.lookup.lookup_timeout_ns == 20 * MS
    assert stack.lookup.server_timeout_ns == MS, "what is shorter already stays"
    assert stack.storage.lease_ns == 600 * MS
    assert stack.layout is layout


def test_the_shortest_of_several_time_outs_counts() -> None:
    events = [FaultEvent("clock.short_timeouts", amount=60), FaultEvent("clock.short_timeouts", amount=600)]
    assert timeout_divisor(events) == 600
    assert timeout_divisor([FaultEvent("clock.step", amount=7)]) == 1


@pytest.mark.parametrize("divisor", [1, 600])
def test_short_time_outs_fire_when_something_is_given_up_in_a_stack_built_with_them(small: World, divisor: int) -> None:
    world = small()
    config = EpisodeConfig(request_timeout_ns=2_000 * MS)
    layout, _, _ = model_of(config)
    late = SimpleNamespace(timeouts=0)
    stack: Any = SimpleNamespace(
        config=shortened(stack_config(config, layout), divisor), states=lambda: iter([("connection0", late)])
    )
    world.scene.stack = stack
    world.arm(FaultEvent("clock.short_timeouts", amount=600))
    world.loop.trace.event("prefetch.plan", "r0", 1, 0, 0)
    assert world.fired == 0
    world.loop.trace.event("prefetch.deadline", "r0", 1, "loading")
    assert world.fired == (divisor == 600)
    world.injector.stop()
    assert world.fired == (divisor == 600)
    world.arm(FaultEvent("clock.short_timeouts", MS, amount=600))
    late.timeouts = 1
    world.run_for(2 * MS)
    world.injector.stop()
    assert world.fired == 2 * (divisor == 600), "requests have timed out"

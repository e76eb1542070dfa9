"""Faults of time: deadlines that come early, clocks that disagree, timers that come late.

What was decided about the three faults of this plane:

*Time-outs shrunk up to 600x* (`clock.short_timeouts`) are a property of the whole run: a deadline is a setting, and
none changes while a part runs. The event's `amount` is the divisor. Whoever builds the stack asks `timeout_divisor` of
the events and hands every configuration with deadlines to `shortened`: each deadline becomes at most the production
default over the divisor. In a stack that was built so it fires when the storage gives something up because its time
has passed, and at its end if requests of a client have.

*Wall clock stepping* (`clock.step`, `clock.drift`). The product reads no wall clock in anything it decides, and
the fence of a simulated run forbids it; all its deadlines are on `ports.Clock`, which is monotonic per process and
promises nothing between processes. So what a step of time can be is this: the clock of one process, and the timers of
its loop with it, jump forward, as they do where the time counts in which a machine was suspended; or they run at
another rate. A clock never goes back, so what is gained or lost stays when the fault ends: the processes then disagree
for good, as those of two machines always do. A step fires when a timer was under way, which comes earlier by it; an
offset alone is seen by nobody.

*Coarse timers* (`clock.coarse_timers`): asyncio's timers of one process are rounded up to a grain, as on a loop that
counts milliseconds, or come early by up to a grain (never by more than half of their time), as those of real loops may.
Clocks stay exact, so whoever measures the time then finds that it is not over yet. Fires when a timer is due at another
time than it was asked for and was not cancelled before; so does a drift.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from kvcore.sim.faults.kind import MS, End, FaultEvent, Kind, Shape, lasting, moment
from kvcore.sim.faults.scene import Scene
from kvcore.sim.process import CURRENT
from kvcore.sim.streams import RandomStream
from kvcore.sim.tasks import SimHandle
from kvcore.sim.trace import TraceEvent

Config = TypeVar("Config")

SHORT_TIMEOUTS = "clock.short_timeouts"
DIVISOR_MAX = 600
DEADLINES = (
    "lease_ns", "lookup_deadline_ns", "store_deadline_ns", "close_deadline_ns", "request_timeout_ns",
    "hello_interval_ns", "lookup_timeout_ns", "server_timeout_ns", "linger_ns", "session_idle_ns", "store_lease_ns",
    "worker_silence_ns",
)  # fmt: skip
"""The fields that `shortened` divides. Not among them are intervals at which something is tried again: shorter ones
would only make more noise. (That of HELLO is how long its answer is waited for.)"""
_GIVEN_UP = ("prefetch.deadline", "prefetch.expire", "writeback.deadline", "writeback.late")
_STEP_NS = (MS, 120_000 * MS)
_WORKER_STEP_NS_MAX = 50_000 * MS
"""A worker whose clock jumps over the deadline of its fence (60 s) has to stop, as for a device that hangs."""
_PER_MILLE = 1_000


def timeout_divisor(events: Iterable[FaultEvent]) -> int:
    """By what a run with these faults divides its deadlines; 1: it does not."""
    return max((event.amount for event in events if event.kind == SHORT_TIMEOUTS), default=1) or 1


def shortened(config: Config, divisor: int) -> Config:
    """The configuration with each deadline at most its class's default over `divisor`, also in what it contains."""
    if divisor <= 1:
        return config
    assert is_dataclass(config)
    assert not isinstance(config, type)
    changed: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in DEADLINES:
            assert isinstance(field.default, int), f"{field.name} has no default to shorten"
            changed[field.name] = max(1, min(value, field.default // divisor))
        elif is_dataclass(value) and any(name.name in DEADLINES for name in fields(value)):
            changed[field.name] = shortened(value, divisor)
    return replace(config, **changed)


def draw_short_timeouts(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return [
        FaultEvent(SHORT_TIMEOUTS, amount=stream.pick((DIVISOR_MAX, stream.randint(DIVISOR_MAX // 10, DIVISOR_MAX))))
    ]


def begin_short_timeouts(scene: Scene, event: FaultEvent) -> End | None:
    """Nothing is left to do: the stack was built with it. Where it was not, the fault never fires."""
    if shortened(scene.stack.config, event.amount) != scene.stack.config:
        return None
    ended = False

    def given_up(seen: TraceEvent) -> None:
        if not ended:
            scene.once(event)()

    def end() -> None:
        nonlocal ended
        ended = True
        if any(getattr(state, "timeouts", 0) for _, state in scene.stack.states()):
            scene.once(event)()

    scene.loop.trace.subscribe(given_up, *_GIVEN_UP)
    return end


def draw_step(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    at_ns, target = moment(stream, shape), stream.pick(shape.processes)
    amount = stream.tail_ns(*_STEP_NS)
    if not target.startswith("server"):
        amount = min(amount, _WORKER_STEP_NS_MAX)
    return [FaultEvent("clock.step", at_ns, target=target, amount=amount)]


def begin_step(scene: Scene, event: FaultEvent) -> None:
    scene.world.process_clocks.skew(event.target, lambda now_ns: event.amount)
    timers = scene.loop.timers.of(scene.world.process(event.target))
    if timers:
        scene.fired(event)
        scene.loop.timers.hasten(timers, event.amount)


def draw_drift(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    """Up to a fifth slower, or up to twice as fast."""
    events = lasting(
        "clock.drift", stream, shape, shape.processes, down_ns=(shape.horizon_ns, 4 * shape.horizon_ns), up_ns=(MS, MS)
    )
    amount = stream.pick((-stream.randint(1, 200), stream.tail_ns(1, _PER_MILLE)))
    return [FaultEvent(each.kind, each.at_ns, each.until_ns, each.target, 0, amount) for each in events[:1]]


def begin_drift(scene: Scene, event: FaultEvent) -> End:
    assert event.amount > -_PER_MILLE, "a clock that stands still or goes back"
    loop = scene.loop
    began_ns = loop.now_ns()
    ended_ns: int | None = None

    def ahead(now_ns: int) -> int:
        return ((now_ns if ended_ns is None else ended_ns) - began_ns) * event.amount // _PER_MILLE

    def set_timer(handle: SimHandle) -> None:
        lasts_ns = handle.when_ns - loop.now_ns()
        if lasts_ns > 0 and _process_of(handle) == event.target:
            moved_ns = loop.now_ns() + -(-lasts_ns * _PER_MILLE // (_PER_MILLE + event.amount))
            _move(scene, event, handle, moved_ns)

    def end() -> None:
        nonlocal ended_ns
        ended_ns = loop.now_ns()
        loop.timer_rules.remove(set_timer)

    scene.world.process_clocks.skew(event.target, ahead)
    loop.timer_rules.append(set_timer)
    return end


def _move(scene: Scene, event: FaultEvent, handle: SimHandle, when_ns: int) -> None:
    """Set the timer to another time; fires when it is then late or early, and was not cancelled before."""
    asked_ns, handle.when_ns = handle.when_ns, when_ns
    if when_ns == asked_ns or scene.fired_events[event]:
        return
    fire = scene.once(event)
    scene.loop.call_at_ns(min(asked_ns, when_ns), lambda: None if handle.cancelled() else fire())


def _process_of(handle: SimHandle) -> str:
    life = handle.get_context().get(CURRENT)
    return "" if life is None else life.process.name


def draw_coarse_timers(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    """Late in two cases of three, early in the others."""
    events = lasting(
        "clock.coarse_timers", stream, shape, shape.processes,
        down_ns=(shape.horizon_ns // 2, 2 * shape.horizon_ns), up_ns=(MS, 10 * MS), amount=(MS // 10, 16 * MS),
    )  # fmt: skip
    sign = stream.pick((1, 1, -1))
    return [FaultEvent(each.kind, each.at_ns, each.until_ns, each.target, 0, sign * each.amount) for each in events]


def begin_coarse_timers(scene: Scene, event: FaultEvent) -> End:
    loop, stream = scene.loop, scene.stream(event)

    def moved_ns(asked_ns: int) -> int:
        if event.amount > 0:
            return -(-asked_ns // event.amount) * event.amount
        return asked_ns - stream.random_ns(0, min(-event.amount, (asked_ns - loop.now_ns()) // 2))

    def set_timer(handle: SimHandle) -> None:
        if handle.when_ns > loop.now_ns() and _process_of(handle) == event.target:
            _move(scene, event, handle, moved_ns(handle.when_ns))

    loop.timer_rules.append(set_timer)
    return lambda: loop.timer_rules.remove(set_timer)


KINDS = (
    Kind(
        SHORT_TIMEOUTS,
        "every deadline is at most the default over `amount`, up to 600; applied when the stack is built",
        draw_short_timeouts,
        begin_short_timeouts,
    ),
    Kind("clock.step", "a process's clock jumps `amount` ns forward", draw_step, begin_step),
    Kind("clock.drift", "a process's clock runs `amount` per mille fast (negative: slow)", draw_drift, begin_drift),
    Kind(
        "clock.coarse_timers",
        "a process's timers are rounded up to `amount` ns, or early by as much where it is negative",
        draw_coarse_timers,
        begin_coarse_timers,
    ),
)

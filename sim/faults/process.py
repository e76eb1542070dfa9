"""Faults of whole processes: killed, restarted, stopped.

    process.server_restart      a server dies and is back at `until_ns`: L1 cold, L2 as its disk has it
    process.power_loss          the same, and files that were not flushed lose their end
    process.scheduler_kill      the engine's scheduler dies; the workers go on until the host notices
    process.worker_kill         one worker dies; the scheduler waits for it until the host notices
    process.engine_kill         in-process: engine and cache die together
    process.kill_in_recovery    `target` dies, and again `nth` callbacks after it was started anew
    process.pause               `target` is stopped until `until_ns`: its messages queue, its timers are late
    process.crash_at_step       `target` dies right before its `nth` callback from `at_ns` on

A server that was killed by count starts again after `amount` nanoseconds (0: a millisecond). An engine's processes come
back by their host. A server that stays dead is one whose fault is not ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context

from kvcore.sim.faults.kind import MS, End, FaultEvent, Kind, Shape, counted, lasting
from kvcore.sim.faults.scene import Scene
from kvcore.sim.streams import RandomStream

_DOWN_NS = (MS // 5, 15 * MS)
_UP_NS = (3 * MS, 12 * MS)
_PAUSE_NS = (MS, 120 * MS)
_STEPS = (1, 400)
_RECOVERY_STEPS = (1, 60)


def _servers(shape: Shape) -> tuple[str, ...]:
    return () if shape.in_process else shape.server_names


# ---- servers


def draw_server_restart(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting("process.server_restart", stream, shape, _servers(shape), down_ns=_DOWN_NS, up_ns=_UP_NS)


def begin_server_restart(scene: Scene, event: FaultEvent) -> End | None:
    return _outage(scene, event, torn=False)


def draw_power_loss(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    targets = _servers(shape) if "file" in shape.l2 else ()
    return lasting("process.power_loss", stream, shape, targets, down_ns=_DOWN_NS, up_ns=_UP_NS)[:2]


def begin_power_loss(scene: Scene, event: FaultEvent) -> End | None:
    return _outage(scene, event, torn=True)


def _outage(scene: Scene, event: FaultEvent, *, torn: bool) -> End | None:
    """None: it is down already, by another fault, which will also end it."""
    if not scene.world.process(event.target).alive:
        return None
    scene.fired(event)
    scene.world.crash(event.target, torn=torn)
    return lambda: _start_server(scene, event.target)


def _start_server(scene: Scene, name: str) -> None:
    process = scene.world.process(name)
    if not process.alive:
        process.restart()
        scene.stack.server_restarted(int(name.removeprefix("server")))


# ---- the engine's processes


def _kill(scene: Scene, event: FaultEvent) -> None:
    if scene.world.process(event.target).alive:
        scene.fired(event)
        scene.engine.crash(event.target)


def _kills(name: str, stream: RandomStream, shape: Shape, targets: tuple[str, ...]) -> list[FaultEvent]:
    """One or two, with time to come back in between."""
    if not targets:
        return []
    times = [stream.random_ns(0, shape.horizon_ns)]
    if stream.chance(1, 3):
        times.append(times[0] + stream.random_ns(8 * MS, 24 * MS))
    return [FaultEvent(name, at_ns, target=stream.pick(targets)) for at_ns in times]


def draw_scheduler_kill(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _kills("process.scheduler_kill", stream, shape, () if shape.in_process else ("scheduler",))


def draw_worker_kill(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    targets = tuple(name for name in shape.processes if name.startswith("worker"))
    return _kills("process.worker_kill", stream, shape, targets)


def draw_engine_kill(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _kills("process.engine_kill", stream, shape, ("engine",) if shape.in_process else ())


# ---- by count


def draw_crash_at_step(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return counted("process.crash_at_step", stream, shape, shape.processes, nth=_STEPS, amount=_DOWN_NS)


def begin_crash_at_step(scene: Scene, event: FaultEvent) -> End:
    process = scene.world.process(event.target)
    return process.at_step(max(1, event.nth), lambda: _crash_and_return(scene, event, lambda: None))


def _crash_and_return(scene: Scene, event: FaultEvent, returned: Callable[[], object]) -> None:
    """Kill the target now. `returned` is called when it has been started anew."""
    scene.fired(event)
    if event.target.startswith("server"):
        scene.world.crash(event.target)

        def start() -> None:
            _start_server(scene, event.target)
            returned()

        scene.loop.call_later_ns(event.amount or MS, start, context=Context())
    else:
        scene.engine.once_restarted(returned)
        scene.engine.crash(event.target)


def draw_kill_in_recovery(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return counted(
        "process.kill_in_recovery", stream, shape, shape.processes, nth=_RECOVERY_STEPS, amount=_DOWN_NS
    )  # fmt: skip


def begin_kill_in_recovery(scene: Scene, event: FaultEvent) -> End | None:
    """The second kill is the fault; the first one only opens the door for it."""
    process = scene.world.process(event.target)
    if not process.alive:
        return None
    endings: list[End] = []

    def again() -> None:
        if process.alive:
            kill = process.at_step(max(1, event.nth), lambda: _crash_and_return(scene, event, lambda: None))
            endings.append(kill)

    if event.target.startswith("server"):
        scene.world.crash(event.target)

        def start() -> None:
            _start_server(scene, event.target)
            again()

        scene.loop.call_later_ns(event.amount or MS, start, context=Context())
    else:
        scene.engine.once_restarted(again)
        scene.engine.crash(event.target)

    def end() -> None:
        for ending in endings:
            ending()

    return end


# ---- pause


def draw_pause(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return lasting("process.pause", stream, shape, shape.processes, down_ns=_PAUSE_NS, up_ns=_UP_NS)


def begin_pause(scene: Scene, event: FaultEvent) -> End | None:
    process = scene.world.process(event.target)
    if not process.alive or process.stopped:
        return None
    life = process.incarnation
    process.pause(lambda: scene.fired(event))

    def end() -> None:
        if process.incarnation == life:
            process.resume()

    return end


KINDS = (
    Kind("process.server_restart", "a server dies and comes back", draw_server_restart, begin_server_restart),
    Kind("process.power_loss", "a server loses power and comes back", draw_power_loss, begin_power_loss),
    Kind("process.scheduler_kill", "the engine's scheduler dies", draw_scheduler_kill, _kill),
    Kind("process.worker_kill", "a worker of the engine dies", draw_worker_kill, _kill),
    Kind("process.engine_kill", "the engine with the cache inside it dies", draw_engine_kill, _kill),
    Kind(
        "process.kill_in_recovery", "a process dies again `nth` callbacks after its restart; `amount`: ns of downtime",
        draw_kill_in_recovery, begin_kill_in_recovery,
    ),
    Kind("process.pause", "a process is stopped for a while", draw_pause, begin_pause),
    Kind(
        "process.crash_at_step", "a process dies before its `nth` callback; `amount`: ns until a server is back",
        draw_crash_at_step, begin_crash_at_step,
    ),
)  # fmt: skip
"""The process plane."""

"""Faults that come from the engine and its clients: preemption, abort, reuse of ids, a crash at a bad moment.

    engine.preempt             `amount` victims lose their blocks, as if blocks had run out
    engine.preempt_mid_copy    the victim has stores in flight, which read blocks that others get in the same step
    engine.resume_same_step    the prefix cache is reset with everything that runs preempted; it all comes back at once
    engine.abort               the client gives the request `target` up, wherever it is
    engine.abort_loading       a request is given up while its asynchronous load writes its blocks
    engine.end_races_load      a request is given up when its load has ended on a worker and nobody has heard of it
    engine.reuse_after_abort   the request `target` is given up and asked again under the same id
    engine.reuse_after_finish  the request `target` has been answered and is asked again under the same id
    engine.crash_with_leases   the scheduler dies while a server holds leases for it

All of them wait, from `at_ns` on, for an *opportunity* between two steps: there is somebody to preempt, the request is
there, and so on. `nth` n takes the n-th opportunity, 0 the first one. So they fire in the run in which they are
reported, and at a step that a replay finds again.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.sim.engine.request import Status
from kvcore.sim.faults.kind import End, FaultEvent, Kind, Shape
from kvcore.sim.faults.scene import EngineControl, Scene
from kvcore.sim.streams import RandomStream

Action = Callable[[], object]
Opportunity = Callable[[Scene, FaultEvent], Action | None]
"""Looked at between two steps: what to do now, or None when this is no opportunity."""

_EVENTS_MAX = 3
_NTH_MAX = 12


def _waits_for(opportunity: Opportunity) -> Callable[[Scene, FaultEvent], End]:
    """A `begin` that takes an opportunity, once."""

    def begin(scene: Scene, event: FaultEvent) -> End:
        left = max(1, event.nth)

        def look() -> None:
            nonlocal left
            action = opportunity(scene, event)
            if action is None:
                return
            left -= 1
            if left == 0:
                end()
                scene.fired(event)
                action()

        end = scene.engine.each_step(look)
        return end

    return begin


def _times(
    name: str, stream: RandomStream, shape: Shape, targets: tuple[str, ...] = ("",), amount: tuple[int, int] = (0, 0)
) -> list[FaultEvent]:
    """One to three events at drawn times, each on a target of its own choice."""
    if not targets:
        return []
    return [
        FaultEvent(
            name,
            stream.random_ns(0, shape.horizon_ns),
            target=stream.pick(targets),
            nth=stream.randint(0, 1) and stream.randint(1, _NTH_MAX),
            amount=stream.randint(*amount),
        )
        for _ in range(stream.randint(1, _EVENTS_MAX))
    ]


def _is_open(engine: EngineControl, request_id: str) -> bool:
    return request_id in engine.scheduler.open_requests()


def draw_preempt(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _times("engine.preempt", stream, shape, amount=(1, 3))


def preempt(scene: Scene, event: FaultEvent) -> Action | None:
    engine = scene.engine
    return (lambda: engine.preempt(max(1, event.amount))) if engine.scheduler.next_victim is not None else None


def draw_preempt_mid_copy(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _times("engine.preempt_mid_copy", stream, shape)


def preempt_mid_copy(scene: Scene, event: FaultEvent) -> Action | None:
    engine = scene.engine
    victim = engine.scheduler.next_victim
    if victim is None or not engine.stores_inflight(victim):
        return None
    return lambda: engine.preempt(1)


def draw_resume_same_step(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _times("engine.resume_same_step", stream, shape)


def resume_same_step(scene: Scene, event: FaultEvent) -> Action | None:
    engine = scene.engine
    return (lambda: engine.reset(True)) if engine.scheduler.next_victim is not None else None


def draw_abort(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _times("engine.abort", stream, shape, shape.request_ids)


def abort(scene: Scene, event: FaultEvent) -> Action | None:
    engine = scene.engine
    return (lambda: engine.abort(event.target)) if _is_open(engine, event.target) else None


def draw_abort_loading(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _times("engine.abort_loading", stream, shape) if shape.load_async else []


def abort_loading(scene: Scene, event: FaultEvent) -> Action | None:
    return _give_up_one(scene.engine, scene.engine.scheduler.open_requests(Status.LOADING), event.target)


def draw_end_races_load(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _times("engine.end_races_load", stream, shape) if shape.load_async else []


def end_races_load(scene: Scene, event: FaultEvent) -> Action | None:
    landed = scene.engine.landed()
    loading = scene.engine.scheduler.open_requests(Status.LOADING) if landed else []
    return _give_up_one(scene.engine, [name for name in loading if name in landed], event.target)


def _give_up_one(engine: EngineControl, names: list[str], target: str) -> Action | None:
    """Of these, the target, or the one that came last if none is named."""
    chosen = [name for name in names if target in ("", name)]
    return (lambda: engine.abort(chosen[-1])) if chosen else None


def draw_reuse_after_abort(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _times("engine.reuse_after_abort", stream, shape, shape.request_ids)


def reuse_after_abort(scene: Scene, event: FaultEvent) -> Action | None:
    engine = scene.engine
    return (lambda: engine.reuse_id(event.target)) if _is_open(engine, event.target) else None


def draw_reuse_after_finish(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    return _times("engine.reuse_after_finish", stream, shape, shape.request_ids)


def reuse_after_finish(scene: Scene, event: FaultEvent) -> Action | None:
    engine = scene.engine
    return (lambda: engine.reuse_id(event.target)) if event.target in engine.scheduler.results() else None


def draw_crash_with_leases(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
    first = FaultEvent(
        "engine.crash_with_leases",
        stream.random_ns(0, shape.horizon_ns),
        target="engine" if shape.in_process else "scheduler",
        nth=stream.randint(1, _NTH_MAX),
    )
    return [first]


def crash_with_leases(scene: Scene, event: FaultEvent) -> Action | None:
    if not any(server.l1.statistics().leases for server in scene.stack.servers):
        return None
    return lambda: scene.engine.crash(event.target or "scheduler")


KINDS = (
    Kind("engine.preempt", "`amount` requests are preempted", draw_preempt, _waits_for(preempt)),
    Kind(
        "engine.preempt_mid_copy", "a request is preempted while its stores read its blocks",
        draw_preempt_mid_copy, _waits_for(preempt_mid_copy),
    ),
    Kind(
        "engine.resume_same_step", "everything is preempted and comes back in the same step",
        draw_resume_same_step, _waits_for(resume_same_step),
    ),
    Kind("engine.abort", "a request is given up", draw_abort, _waits_for(abort)),
    Kind(
        "engine.abort_loading", "a request is given up while its load runs",
        draw_abort_loading, _waits_for(abort_loading),
    ),
    Kind(
        "engine.end_races_load", "a request is given up when its load has ended and nobody knows yet",
        draw_end_races_load, _waits_for(end_races_load),
    ),
    Kind(
        "engine.reuse_after_abort", "a request is given up and asked again under the same id",
        draw_reuse_after_abort, _waits_for(reuse_after_abort),
    ),
    Kind(
        "engine.reuse_after_finish", "a request is asked again under the same id after its end",
        draw_reuse_after_finish, _waits_for(reuse_after_finish),
    ),
    Kind(
        "engine.crash_with_leases", "the scheduler dies while servers hold leases for it",
        draw_crash_with_leases, _waits_for(crash_with_leases),
    ),
)  # fmt: skip
"""The engine plane."""

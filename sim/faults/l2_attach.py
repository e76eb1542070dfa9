"""How an L2 fault takes hold of its sites and lets go of them; shared by the modules of plane L2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from kvcore.sim.faults.kind import MS, Draw, End, FaultEvent, Shape, counted, lasting
from kvcore.sim.faults.l2_site import L2Site, sites_of
from kvcore.sim.faults.scene import Scene
from kvcore.sim.faults.trigger import Trigger
from kvcore.sim.streams import RandomStream

H = TypeVar("H")

Attach = Callable[[L2Site, Trigger, RandomStream], End]

DOWN_NS = (4 * MS, 60 * MS)
UP_NS = (2 * MS, 10 * MS)


def hooked(hooks: list[H], hook: H) -> End:
    """Put a hook in; the answer takes it out, unless a restart has done that."""
    hooks.append(hook)

    def end() -> None:
        if hook in hooks:
            hooks.remove(hook)

    return end


def everywhere(attach: Attach) -> Callable[[Scene, FaultEvent], End | None]:
    """`Kind.begin` that attaches to every site of the event's target."""

    def begin(scene: Scene, event: FaultEvent) -> End | None:
        trigger, stream = Trigger(scene, event), scene.stream(event)
        endings = [attach(site, trigger, stream) for site in sites_of(scene, event.target)]

        def end() -> None:
            for ending in endings:
                ending()

        return end if endings else None

    return begin


def for_a_while(name: str, amount: tuple[int, int] = (0, 0)) -> Draw:
    """Spans on one adapter."""

    def draw(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
        return lasting(name, stream, shape, shape.adapters, down_ns=DOWN_NS, up_ns=UP_NS, amount=amount)

    return draw


def by_count(name: str, nth: tuple[int, int] = (1, 8), amount: tuple[int, int] = (0, 0)) -> Draw:
    """One to three events, each by its own count; several can be on the same adapter. They begin early: a run is short,
    and the count itself comes late enough."""

    def draw(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
        early = replace(shape, horizon_ns=shape.horizon_ns // 2)
        events: list[FaultEvent] = []
        for _ in range(stream.randint(1, 3)):
            events += counted(name, stream, early, shape.adapters, nth=nth, amount=amount)
        return events

    return draw


def throughout(name: str, amount: tuple[int, int] = (0, 0)) -> Draw:
    """One event on one adapter from an early moment on, for what strikes operations that are rare."""

    def draw(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
        if not shape.adapters:
            return []
        at_ns = stream.random_ns(0, shape.horizon_ns // 8)
        return [FaultEvent(name, at_ns, 0, stream.pick(shape.adapters), amount=stream.tail_ns(*amount))]

    return draw


def either(first: Draw, second: Draw) -> Draw:
    """One or the other, equally likely."""

    def draw(stream: RandomStream, shape: Shape) -> list[FaultEvent]:
        return (first if stream.chance(1, 2) else second)(stream, shape)

    return draw

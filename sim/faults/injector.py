"""`Injector`: begins the faults of one run at their times and ends them.

    armed --at_ns--> begun --until_ns--> ended
      |                |
      +---- stop ------+--> disarmed, ended

`arm` sets one timer per event; those of time 0 begin at once, in the order of the list, so that a sweep over "the n-th
operation" counts from the very first one. Faults run outside all processes: no crash takes them along. An event that
lasts is ended once: at `until_ns` or by `stop`, whichever comes first. `stop(leave)` leaves alone what has begun on the
targets in `leave`: this part of the world stays as broken as it is, for good.

Every begin, effect and end is in the trace: "fault.begin", "fault.fired", "fault.end".

Who holds: the injector holds timers and endings until `stop`. A fault that cannot begin is a bug of its kind and ends
the run as any exception in a callback does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from contextvars import Context

from kvcore.errors import CallerError
from kvcore.sim.faults.catalogue import CATALOGUE
from kvcore.sim.faults.kind import End, FaultEvent
from kvcore.sim.faults.scene import Scene
from kvcore.sim.tasks import SimHandle


class Injector:
    """See the module's text. `enabled` counts the events per kind, `fired` their effects."""

    def __init__(self, scene: Scene, events: Iterable[FaultEvent]) -> None:
        self._scene = scene
        self.events = tuple(events)
        for event in self.events:
            if event.kind not in CATALOGUE:
                raise CallerError(f"there is no fault kind {event.kind!r}; kvcore.sim.faults.catalogue lists them")
        self.enabled: Counter[str] = Counter(event.kind for event in self.events)
        self._timers: dict[int, SimHandle] = {}  # by position in `events`: to begin, or to end
        self._endings: dict[int, End] = {}
        self._began_ns: int | None = None

    @property
    def fired(self) -> Counter[str]:
        return self._scene.fired_counts

    @property
    def lasting(self) -> list[FaultEvent]:
        """Those that have begun and could still be ended."""
        return [self.events[index] for index in self._endings]

    def arm(self) -> None:
        """The episode begins now."""
        if self._began_ns is not None:
            raise CallerError("the faults of this run are armed already")
        self._began_ns = self._scene.loop.now_ns()
        for index, event in enumerate(self.events):
            if event.at_ns <= 0:
                Context().run(self._begin, index)
            else:
                self._at(event.at_ns, self._begin, index)

    def stop(self, leave: Collection[str] = ()) -> None:
        """End what lasts and disarm the rest, except what has begun on a target in `leave`."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for index in list(self._endings):
            if self.events[index].target not in leave:
                Context().run(self._end, index)

    def _at(self, time_ns: int, step: object, index: int) -> None:
        assert self._began_ns is not None
        assert callable(step)
        loop = self._scene.loop
        self._timers[index] = loop.call_at_ns(self._began_ns + time_ns, step, index, context=Context())

    def _begin(self, index: int) -> None:
        event = self.events[index]
        self._timers.pop(index, None)
        self._scene.loop.trace.event("fault.begin", event.kind, event.target, event.until_ns, event.nth, event.amount)
        ending = CATALOGUE[event.kind].begin(self._scene, event)
        if ending is None:
            return
        self._endings[index] = ending
        if event.until_ns:
            self._at(event.until_ns, self._end, index)

    def _end(self, index: int) -> None:
        event = self.events[index]
        self._timers.pop(index, None)
        self._scene.loop.trace.event("fault.end", event.kind, event.target)
        self._endings.pop(index)()

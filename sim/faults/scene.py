"""`Scene`: what faults act on in one run, and the book of what has really happened.

A fault reaches the world through the hooks of the simulated ports and oracles, never by touching the code under test:
the network's and the devices' rules by name, the executors', disks' and adapters' hooks through the stack, the engine
and the processes through `EngineControl`. Whatever belongs to a process is looked up when it is needed: after a restart
the parts of the same name are other objects.

Who holds: the run holds its scene. The scene frees nothing; each fault ends itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvcore.sim.engine.scheduler import Scheduler
from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.streams import RandomStream
from kvcore.sim.world import SimWorld


class ServerHooks(Protocol):
    """One cache server as faults see it. `adapters` and `executors` are in the order of the configuration."""

    @property
    def name(self) -> str: ...

    @property
    def l1(self) -> Any: ...

    @property
    def adapters(self) -> Sequence[Any]: ...

    @property
    def executors(self) -> Sequence[Any]: ...

    @property
    def storage(self) -> Any: ...

    @property
    def server(self) -> Any: ...


class StackHooks(Protocol):
    """The cache as faults see it. `servers[i]` is the present life of server i; `memories` outlive it. `config` is what
    all of it was built from."""

    @property
    def config(self) -> Any: ...

    @property
    def servers(self) -> Sequence[ServerHooks]: ...

    @property
    def memories(self) -> Mapping[str, Any]: ...

    def server_restarted(self, index: int) -> None: ...

    def states(self) -> Iterator[tuple[str, object]]:
        """(component, its statistics) of all parts."""
        ...


class EngineControl(Protocol):
    """What may be done to the engine from outside (`kvcore.sim.engine.host.EngineHost`).

    What changes requests takes effect between two steps: at once if called by a function of `each_step`, else before
    the next one. While the engine is down it does nothing.
    """

    @property
    def scheduler(self) -> Scheduler:
        """Of the present run, to look at."""
        ...

    def each_step(self, look: Callable[[], object]) -> Callable[[], None]:
        """Call `look` between any two steps; the answer ends that."""
        ...

    def stores_inflight(self, request_id: str) -> int:
        """Copies that still read this request's blocks, or blocks that it had."""
        ...

    def landed(self) -> list[str]:
        """Requests whose asynchronous load has ended on some worker while the scheduler has not heard of it."""
        ...

    def abort(self, request_id: str) -> None: ...

    def preempt(self, count: int) -> None: ...

    def reset(self, running: bool) -> None:
        """Forget the engine's prefix cache; `running`: preempt all that runs, too."""
        ...

    def reuse_id(self, request_id: str) -> None:
        """Abort the request, unless it has ended, and ask for the same again under its id."""
        ...

    def crash(self, process: str) -> None:
        """Kill "scheduler", "worker{r}" or, in-process, "engine"; the host finds out and starts all of it again."""
        ...

    def once_restarted(self, action: Callable[[], object]) -> None:
        """Call `action` right after the next restart."""
        ...


class Scene:
    """See the module's text. `fired_counts` counts effects per kind; `fired_events` per event of the run."""

    __slots__ = ("engine", "findings", "fired_counts", "fired_events", "loop", "stack", "world")

    def __init__(
        self, loop: SimLoop, world: SimWorld, stack: StackHooks, engine: EngineControl, findings: Findings
    ) -> None:
        self.loop = loop
        self.world = world
        self.stack = stack
        self.engine = engine
        self.findings = findings
        self.fired_counts: Counter[str] = Counter()
        self.fired_events: Counter[FaultEvent] = Counter()

    def fired(self, event: FaultEvent) -> None:
        """The fault takes effect, at this very moment."""
        self.fired_counts[event.kind] += 1
        self.fired_events[event] += 1
        self.loop.trace.event("fault.fired", event.kind, event.target, event.at_ns, event.nth)

    def once(self, event: FaultEvent) -> Callable[[], None]:
        """`fired` for an effect that goes on and on: only the first call counts."""

        def fire() -> None:
            if not self.fired_events[event]:
                self.fired(event)

        return fire

    def stream(self, event: FaultEvent) -> RandomStream:
        """What is random about this event while it lasts. No other event draws from it."""
        return self.loop.streams[f"fault.{event.kind}.{event.target}.{event.at_ns}.{event.nth}"]

    def server(self, name: str) -> ServerHooks:
        """The present life of the server called `name`. KeyError: there is none of that name."""
        for server in self.stack.servers:
            if server.name == name:
                return server
        raise KeyError(name)

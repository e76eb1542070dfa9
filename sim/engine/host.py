"""`EngineHost`: an engine whose scheduler and workers are processes that can be killed, and what brings them back.

Theory of operation
-------------------
    UP --a process dies--> HALF --notice_ns--> the rest is killed --restart_ns--> UP, in the next life

1. `serve` runs the engine's loop as code of "scheduler"; a step's work runs as code of "worker<rank>" (in-process all
   of it is "engine"). The copies of a rank are its worker's: they stop when it dies.
2. When one process dies, the others go on for a drawn time, as they would: a scheduler waits for a worker that answers
   nothing, workers end the copies they have begun. Then the supervisor kills the rest, since what a rank holds is of no
   use without the others.
3. After another drawn time all start again: new devices, pages full of garbage, new connections and clients
   (`RestartableCache.engine_restarted`), a new engine without a prefix cache of its own. What has not been answered and
   not been given up is submitted again, under the same ids.
4. Servers learn of a worker's death by its proof (`kvcore.sim.ports.deaths`), each after a time of its own. Nobody
   tells them of a dead scheduler: its sessions die by idleness.
5. A process that is stopped for `hang_ns` gives no sign of life and is killed; 2 follows.

The supervisor runs outside all processes, from crash to restart by timers alone, so an engine also comes back that
died while nobody was being served.

Who holds: the host holds the present engine, its devices and what is unanswered; a dead life's tasks are the loop's.
Who announces a crash: the process (`on_crash`), whoever killed it. Who frees: nobody; a dead engine is forgotten.

Rejected: catching the crash as an exception inside the engine (a crash runs no handlers); restarting one worker alone
(the engine's blocks exist on all ranks or on none).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Protocol

from kvcore.connectors.interface import Connector
from kvcore.errors import CallerError
from kvcore.groups import CacheLayout
from kvcore.sim.engine.config import EngineConfig
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.engine.engine import Engine, StepTime, default_step_time
from kvcore.sim.engine.probe import EngineProbe
from kvcore.sim.engine.request import RequestSpec
from kvcore.sim.engine.scheduler import Scheduler
from kvcore.sim.model import FingerprintModel
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.process import SimProcess
from kvcore.sim.world import SimWorld


class RestartableCache(Connector, Protocol):
    """The cache that the engine uses, as its host needs it (`kvcore.ladder.stack.CacheStack`)."""

    @property
    def servers(self) -> Sequence[object]: ...

    def stores_inflight(self, request_id: str) -> int: ...

    def engine_restarted(self) -> None:
        """The engine's processes live again, empty: build what belongs to them anew."""
        ...

    def server_restarted(self, index: int) -> None:
        """The process of a server lives again, empty."""
        ...


@dataclass(frozen=True, slots=True)
class HostTiming:
    """Least and most of each drawn time, in nanoseconds."""

    notice_ns: tuple[int, int] = (50_000, 3_000_000)
    restart_ns: tuple[int, int] = (100_000, 2_000_000)
    hang_ns: tuple[int, int] = (1_000_000_000, 2_000_000_000)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What outlives a crash. `devices` is changed in place at a restart; `restarted` is told after it (for oracles)."""

    layout: CacheLayout
    model: FingerprintModel
    memory: PagedMemory
    devices: list[SimCopyEngine]
    probe: EngineProbe
    restarted: Callable[[], None] = lambda: None
    step_time: StepTime = default_step_time


def open_devices(world: SimWorld, memory: PagedMemory) -> list[SimCopyEngine]:
    """One device per rank, of the present life of its worker."""
    return [_open_device(world, memory, rank) for rank in range(len(memory.buffers))]


def _open_device(world: SimWorld, memory: PagedMemory, rank: int) -> SimCopyEngine:
    device = world.inside(f"worker{rank}", lambda: world.device(rank))
    device.register_pages(memory.groups[rank])
    return device


class EngineHost:
    """See the module's text. `each_step` is for faults: they look in between two steps."""

    def __init__(
        self,
        world: SimWorld,
        cache: RestartableCache,
        parts: EngineParts,
        config: EngineConfig,
        findings: Findings,
        timing: HostTiming | None = None,
    ) -> None:
        self.lives = 0
        self.crashes = 0
        self._world = world
        self._cache = cache
        self._parts = parts
        self._config = config
        self._findings = findings
        self._timing = timing or HostTiming()
        self._random = world.loop.streams["host"]
        names = ["scheduler", *(f"worker{rank}" for rank in range(parts.layout.ranks))]
        self._processes: dict[str, SimProcess] = {world.process(name).name: world.process(name) for name in names}
        for name, process in self._processes.items():
            process.on_pause(lambda name=name: self._stopped(name))  # type: ignore[misc]
        self._up = asyncio.Event()
        self._broken = asyncio.Event()
        self._watchers: dict[int, Callable[[], object]] = {}
        self._watchers_added = 0
        self._after_restart: list[Callable[[], object]] = []
        self._closed = False
        self._specs: dict[str, RequestSpec] = {}
        self._began_ns = 0
        self._answers: dict[str, list[int]] = {}
        self._given_up: dict[str, None] = {}
        self._answered_before: dict[str, list[int]] = {}
        self._start_engine()

    # ---- the engine's user

    @property
    def engine(self) -> Engine:
        """The present engine, or the one that has just died."""
        return self._engine

    @property
    def up(self) -> bool:
        """All processes of the engine live."""
        return self._up.is_set()

    @property
    def steps(self) -> int:
        """Of the present run."""
        return self._engine.statistics().steps

    def configure(self, config: EngineConfig) -> None:
        """Settings of the next `serve`, also after a crash."""
        self._config = config
        if self.up:
            self._engine.configure(config)

    async def serve(self, requests: Sequence[RequestSpec]) -> dict[str, list[int]]:
        """Serve all requests, however often the engine dies; the tokens of those that were not given up."""
        if self._specs:
            raise CallerError("the engine is serving already")
        self._specs = {spec.request_id: spec for spec in requests}
        self._began_ns = self._world.loop.now_ns()
        self._answers, self._given_up, self._answered_before = {}, {}, {}
        try:
            while True:
                await self.wait_until_up()
                if await self._serve_in_this_life():
                    break
            self._check_answers()
            return self._answers
        finally:
            self._specs = {}

    async def _serve_in_this_life(self) -> bool:
        """True: everything is answered or given up. False: the engine died before."""
        engine = self._engine
        scheduler = self._world.process("scheduler")
        run = scheduler.spawn(engine.run(self._unanswered()), "engine", may_fail=True)
        died = asyncio.get_running_loop().create_task(self._until_broken(), name="engine host")
        await asyncio.wait([run, died], return_when=asyncio.FIRST_COMPLETED)
        self._take_answers(engine)
        if not run.done():
            return False
        died.cancel()
        run.result()
        return True

    async def _until_broken(self) -> None:
        await self._broken.wait()

    def _unanswered(self) -> list[RequestSpec]:
        passed_ns = self._world.loop.now_ns() - self._began_ns
        return [
            replace(spec, time_ns=max(0, spec.time_ns - passed_ns))
            for name, spec in self._specs.items()
            if name not in self._answers and name not in self._given_up
        ]

    def _take_answers(self, engine: Engine) -> None:
        """What the client has seen by now. A request that was added again has no answer until its second end."""
        for name, tokens in engine.scheduler.results().items():
            if name not in engine.to_be_added:
                self._answers[name] = tokens

    def _check_answers(self) -> None:
        for name, tokens in self._answered_before.items():
            if self._answers.get(name, tokens) != tokens:
                self._findings.report("output", f"{name}, asked again under the same id, was answered otherwise")
        for name in self._given_up:
            if name not in self._answers:
                self._parts.probe.request_aborted(name)  # also where the engine died before it heard of it

    async def wait_until_up(self) -> None:
        """Return when no restart of the engine is under way."""
        while not self.up:
            await self._up.wait()

    def close(self) -> None:
        """No engine is started any more."""
        self._closed = True

    # ---- EngineControl: what may be done to the engine from outside

    def abort(self, request_id: str) -> None:
        """The client gives the request up, wherever it is."""
        if request_id in self._specs:
            self._given_up[request_id] = None
        if self.up:
            self._engine.abort(request_id)

    def preempt(self, count: int = 1) -> None:
        if self.up:
            self._engine.force_preemptions(count)

    def reset(self, running: bool) -> None:
        """Forget the engine's prefix cache; `running`: preempt all that runs, too."""
        if self.up:
            self._engine.reset_prefix_cache(reset_running_requests=running)

    def reuse_id(self, request_id: str) -> None:
        """Abort the request, unless it has ended, and ask for the same again under its id."""
        spec = self._specs.get(request_id)
        if spec is None or not self.up:
            return
        answered = self._engine.scheduler.results().get(request_id)
        if answered is not None:
            self._answered_before[request_id] = answered
        self._engine.abort(request_id)
        self._engine.add_again(replace(spec, time_ns=0))

    def crash(self, process: str) -> None:
        """Kill a process of the engine (or of a server), at once; from its own code, when the running callback ends."""
        loop, victim = self._world.loop, self._world.process(process)
        if loop.current_process() is victim:
            loop.after_callback(self._crash_life, process, victim.incarnation)
        else:
            self._world.crash(process)

    def _crash_life(self, process: str, incarnation: int) -> None:
        if self._world.process(process).incarnation == incarnation:
            self._world.crash(process)

    @property
    def scheduler(self) -> Scheduler:
        """Of the present run, to look at."""
        return self._engine.scheduler

    def stores_inflight(self, request_id: str) -> int:
        """Copies that still read blocks of this request."""
        return self._cache.stores_inflight(request_id)

    def each_step(self, look: Callable[[], object]) -> Callable[[], None]:
        """Call `look` between any two steps, when no part of a step is under way. The answer ends it."""
        number = self._watchers_added
        self._watchers_added += 1
        self._watchers[number] = look

        def end() -> None:
            self._watchers.pop(number, None)

        return end

    def boundary(self) -> None:
        """The engine is between two steps (`StepWatch`)."""
        for look in list(self._watchers.values()):
            look()

    def once_restarted(self, action: Callable[[], object]) -> None:
        """Call `action` right after the next restart of the engine."""
        self._after_restart.append(action)

    def landed(self) -> list[str]:
        """Requests whose load has ended on some worker while the scheduler has not heard of it."""
        ranks = range(self._parts.layout.ranks)
        return sorted({name for rank in ranks for name in getattr(self._cache.worker(rank), "loads_landed", ())})

    # ---- lives

    def _start_engine(self) -> None:
        parts = self._parts
        self._broken.clear()
        for process in self._processes.values():
            process.on_crash(self._died)
        contexts = (lambda rank: self._world.process(f"worker{rank}").context()) if len(self._processes) > 1 else None
        self._engine = self._world.inside(
            "scheduler",
            lambda: Engine(
                self._config, parts.model, parts.layout, parts.memory, parts.devices, self._cache, parts.probe,
                parts.step_time, contexts, self,
            ),
        )  # fmt: skip
        self._up.set()

    def _died(self) -> None:
        """A process of the engine has just died. Runs in whatever context killed it."""
        self.crashes += 1
        if self.up:
            self._up.clear()
            self._broken.set()
            self._later(self._timing.notice_ns, self._kill_the_rest)

    def _stopped(self, name: str) -> None:
        """Give a stopped process some time to come back."""
        process = self._processes[name]
        life = process.incarnation

        def check() -> None:
            if process.incarnation == life and process.stopped:
                self._world.crash(name)

        self._later(self._timing.hang_ns, check)

    def _later(self, range_ns: tuple[int, int], step: Callable[[], None]) -> None:
        self._world.loop.call_later_ns(self._random.random_ns(*range_ns), step, context=Context())

    def _kill_the_rest(self) -> None:
        for name in self._processes:
            self._world.crash(name)
        self._later(self._timing.restart_ns, self._restart)

    def _restart(self) -> None:
        if self._closed:
            return
        self.lives += 1
        for process in self._processes.values():
            process.restart()
        if self._world.in_process:
            for index in range(len(self._cache.servers)):
                self._cache.server_restarted(index)
        parts = self._parts
        parts.memory.renew()
        for rank in range(parts.layout.ranks):
            parts.devices[rank] = _open_device(self._world, parts.memory, rank)
        self._cache.engine_restarted()
        parts.restarted()
        self._start_engine()
        actions, self._after_restart = self._after_restart, []
        for action in actions:
            action()

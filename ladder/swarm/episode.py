"""`run_case`: one case in one simulated world, judged from the first byte to the last.

Theory of operation
-------------------
1. The engine serves the requests twice, cold and then hot, in blocks that hardly suffice, while faults happen.
2. Faults stop `fault_ns` after the beginning (or when all is served); what is in `dead` stays dead. From then
   on all that lives must be served and at rest within 60 virtual seconds.
3. At rest the books of every living component are closed and what is resident is right.
4. The second workload: new prompts, then the same again without the engine's own prefix cache. The share of what could
   be loaded that was loaded must be within 5 points of the same case without faults. Who was idle while the faults
   happened learns of a broken connection or a new server from the first message that it sends, and that message may be
   a store: when the share is low, the same prompts come once more, and that pass counts.

Every token is compared with the dense reference; rung 0 of the ladder has shown that the engine alone agrees with it.

A cache that is too small for the second workload serves less than all of it, and how much depends on what was there
before; its share is not judged. Everywhere else all of it must be loaded, except where a recurrent state is kept only
at the boundaries at which a step happened to end. There a few twins without faults run, with other delays and ties,
and say what is usual; where these disagree there is no rate to compare with.

Who holds: the case's `SimLoop` holds the world, until the end of `run_case`. Nothing of it is left but the `Outcome`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvcore.ladder.engine_hashes import hasher_for
from kvcore.ladder.guarded import say
from kvcore.ladder.quiet import check_kept
from kvcore.ladder.rungs import LadderOracle, StageParts
from kvcore.ladder.stack import CacheStack
from kvcore.ladder.stack_counters import check_page_counters
from kvcore.ladder.stack_marks import StackMarks
from kvcore.ladder.stack_progress import watch_progress
from kvcore.ladder.swarm.case import Case
from kvcore.ladder.swarm.outcome import Finding, Outcome
from kvcore.ladder.swarm.rest import check_at_rest, open_books, underway
from kvcore.ladder.swarm.setting import blocks_max, chunk_bytes, engine_config, model_of, request_spec, stack_config
from kvcore.ladder.watched_pages import WatchedPages
from kvcore.sim.deadlock import DeadlockError
from kvcore.sim.engine.device import PagedMemory
from kvcore.sim.engine.engine import Engine
from kvcore.sim.engine.host import EngineHost, EngineParts, open_devices
from kvcore.sim.engine.request import RequestSpec
from kvcore.sim.engine.traced import TracedProbe
from kvcore.sim.faults.clock import SHORT_TIMEOUTS, shortened, timeout_divisor
from kvcore.sim.faults.injector import Injector
from kvcore.sim.faults.scene import Scene
from kvcore.sim.livelock import LivelockError
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.hits import usable_prefix
from kvcore.sim.oracles.truth import Truth
from kvcore.sim.schedule import RecordingTies, ReplayTies, TiePolicy, make_policy
from kvcore.sim.streams import RandomStream
from kvcore.sim.trace import Trace
from kvcore.sim.workload import Workload
from kvcore.sim.world import SimWorld

LIVENESS_NS = 60_000_000_000
STANDSTILL_NS = 30_000_000_000
"""Without anything getting done. No deadline of a drawn configuration is longer than 20 s."""
HIT_SHARE_LOSS_MAX = 0.05
TWINS = 24
ROOM_FACTOR = 3
PATIENT_NS = 10_000_000
"""A request that is answered in time unless something is wrong."""
STORE_LEASE_NS = 50_000_000
LEASE_NS = 1_000_000_000
"""And a lease that no load outlives."""
CALLBACKS_MAX = 400_000
"""Of one phase after the faults. A case has some thousand in all; whoever needs so many polls without end."""
NS_PER_S = 1_000_000_000
WATCH_S = 0.5
_POLL_S_FIRST, _POLL_S_MOST = 0.001, 0.25


def run_case(
    case: Case, *, trace: Trace | None = None, record_ties: bool = False, watch: Callable[[Episode], None] | None = None
) -> Outcome:
    """Run it. Whatever happens in the world is in the answer; nothing is raised.

    `watch` gets the world before anything happens in it, for readers of its components' states.
    """
    begin = time.process_time()
    outcome = _run(case, trace, record_ties, watch)
    if 0 <= outcome.hit_share < 1 - HIT_SHARE_LOSS_MAX and not outcome.findings:
        _compare_with_twins(case, outcome)
    elif outcome.hit_share >= 0:
        outcome.share_loss = 1 - outcome.hit_share
    outcome.cpu_s = time.process_time() - begin
    return outcome


def _compare_with_twins(case: Case, outcome: Outcome) -> None:
    """Is the hit share what it would be without faults? Twins differ in the seed of their delays and ties."""
    reason = _why_not_judged(case)
    if reason:
        outcome.notes.append(f"hit share {outcome.hit_share:.2f} not judged: {reason}")
        return
    if "recurrent" not in case.config.groups and _is_patient(case):
        text = f"the second workload loaded {outcome.hit_share:.2f} of what it had stored, with room and time for all"
        outcome.findings.append(Finding("lost", outcome.time_ns, text))
        return
    settings = tuple(event for event in case.faults if event.kind == SHORT_TIMEOUTS)  # how it is built, no event
    shares: list[float] = []
    for number in range(TWINS):
        twin = msgspec.structs.replace(case, faults=settings, seed=case.seed + (number << 40))
        shares.append(_run(twin, None, False).hit_share)
        if outcome.hit_share >= shares[-1] - HIT_SHARE_LOSS_MAX:
            outcome.share_loss = max(0.0, shares[-1] - outcome.hit_share)
            return
    if max(shares) - min(shares) > HIT_SHARE_LOSS_MAX:
        outcome.notes.append(
            f"hit share {outcome.hit_share:.2f} not judged: without faults it varies by itself, {shares}"
        )
        return
    text = f"the second workload loaded {outcome.hit_share:.2f} of what was loadable, without faults {min(shares):.2f}"
    outcome.findings.append(Finding("liveness", outcome.time_ns, text))


def _lookup_deadline_ns(case: Case) -> int:
    layout, _, _ = model_of(case.config)
    return shortened(stack_config(case.config, layout), timeout_divisor(case.faults)).storage.lookup_deadline_ns


def _patience_ns(case: Case) -> int:
    """A lookup and a load in every tier, each behind two others."""
    return 6 * max(1, len(case.config.l2)) * case.config.l2_latency_ns[1]


def _is_patient(case: Case) -> bool:
    """Whether all is stored in time, and loaded in one go, unless something is wrong."""
    config = case.config
    budget, needed = config.prefetch_budget_chunks, sum(len(request.chunks) for request in case.second)
    return (
        config.request_timeout_ns >= PATIENT_NS
        and config.store_lease_ns >= STORE_LEASE_NS
        and (not budget or budget >= needed)
    )


def _why_not_judged(case: Case) -> str:
    """Where the hit share says nothing about recovery."""
    if not any(request.chunks for request in case.second):
        return "there is no second workload"
    if case.dead:
        return f"{', '.join(case.dead)} stayed dead"
    if not case.faults and "recurrent" in case.config.groups:
        return "there are no faults, and states are kept where steps end"
    if case.config.admission == "if-it-pays":
        return "what does not pay is computed"
    if (case.config.second_from_l2 or case.config.skip_l1) and _lookup_deadline_ns(case) < _patience_ns(case):
        return "lookups are given up before L2 may have answered"
    needed = ROOM_FACTOR * sum(len(request.chunks) for request in case.second)
    sizes = {
        "L1": case.config.l1_chunks,
        "L2": case.config.l2_chunks,
        "the tenant's share": case.config.tenant_chunks,
    }
    small = [f"{name} of {chunks} chunks" for name, chunks in sizes.items() if 0 < chunks < needed]
    return f"{small[0]} is too small to keep the second workload in any case" if small else ""


def _run(case: Case, trace: Trace | None, record_ties: bool, watch: Callable[[Episode], None] | None = None) -> Outcome:
    outcome = Outcome(case)
    trace = Trace() if trace is None else trace
    policy = _policy(case)
    recorder = RecordingTies(policy) if record_ties else None
    with SimLoop(case.seed, schedule=recorder or policy, trace=trace) as loop:
        findings = Findings(loop.now_ns, tracer=loop.trace)
        try:
            loop.run_until_complete(_live(case, loop, outcome, findings, watch))
        except (DeadlockError, LivelockError) as error:
            findings.report("liveness", str(error))
        except Exception as error:  # whatever ends the world is a finding
            findings.report("crash", say(error))
        outcome.callbacks, outcome.time_ns = loop.callbacks_run, loop.now_ns()
        _take_readings(outcome, findings)
    outcome.trace_hash, outcome.events = trace.hash, trace.event_count
    outcome.ties = recorder.exceptions if recorder else {}
    return outcome


async def _live(
    case: Case, loop: SimLoop, outcome: Outcome, findings: Findings, watch: Callable[[Episode], None] | None
) -> None:
    """The components want a running loop when they are built."""
    episode = Episode(case, loop, outcome, findings)
    if watch is not None:
        watch(episode)
    await episode.course()


def _take_readings(outcome: Outcome, findings: Findings) -> None:
    """What the oracles have, into the outcome."""
    outcome.findings[:0] = [Finding.parse(line, outcome.time_ns) for line in findings.take()]
    outcome.loads_verified, outcome.stores_verified = findings.loads_verified, findings.stores_verified
    outcome.cells_checked = findings.cells_byte_checked
    outcome.marks = findings.sometimes.counts
    layout, _, _ = model_of(outcome.case.config)
    outcome.bytes_checked = findings.cells_byte_checked * chunk_bytes(layout) // len(layout.rows)


def _policy(case: Case) -> TiePolicy:
    schedule = case.schedule
    if schedule.kind == "replay":
        return ReplayTies(schedule.exceptions)
    return make_policy(schedule.kind, RandomStream(case.seed, "schedule"), schedule.change_points)


class Episode:
    """The world of one case, and its course."""

    def __init__(self, case: Case, loop: SimLoop, outcome: Outcome, findings: Findings) -> None:
        self._case = case
        self._loop = loop
        self._outcome = outcome
        self._faults_ended_ns = 0
        config = case.config
        self._layout, self._model, reference = model_of(config)
        self.world = SimWorld(
            loop,
            in_process=config.servers == 0,
            page_ns=config.page_ns,
            load_page_ns=config.load_page_ns,
            l2_latency_ns=config.l2_latency_ns,
            copy_ns=config.copy_ns,
            reconnect_ns=config.reconnect_ns,
        )
        self.findings = findings
        stack = shortened(stack_config(config, self._layout), timeout_divisor(case.faults))
        hasher = hasher_for(stack.namespace, self._layout)
        self._truth = Truth(self._layout, reference, hasher, self.findings)
        self._first = [request_spec(config, request) for request in case.requests]
        self._second = [request_spec(config, request) for request in case.second]
        self._expected = {spec.request_id: self._truth.tokens(spec.prompt, spec.output_tokens) for spec in self._specs}
        roomy = 1 + sum(blocks_max(config, [request]) for request in case.second)
        self._second_blocks = max(roomy, config.num_blocks)
        memory = PagedMemory(self._layout, self._model, self._second_blocks)
        self.devices = open_devices(self.world, memory)
        self.pages = WatchedPages(self._page_fails, findings)
        self.stack = CacheStack(self.world, stack, self._truth, self.findings, self.pages)
        workload = Workload(tuple(self._specs), (), config.chunk_tokens, "swarm")
        parts = StageParts(
            self._layout, self._model, hasher, self._truth, self.findings, self.devices, memory, workload, self.stack,
            case.seed,
        )  # fmt: skip
        self._oracle = LadderOracle(parts)
        for spec in self._specs:
            tokens = [*spec.prompt, *self._expected[spec.request_id]]
            self._oracle.hashes[spec.request_id] = self._truth.register(spec.request_id, tokens, spec.items)
        self.host = self._build_host(memory)
        self._oracle.tokens_of = lambda request_id: self.engine.scheduler.tokens_of(request_id)
        self._marks = StackMarks(self.stack, findings, loop.trace)
        self._progress = watch_progress(loop, findings, self.stack, lambda: self.engine, STANDSTILL_NS)
        self._scene = Scene(loop, self.world, self.stack, self.host, findings)

    def _page_fails(self) -> bool:
        """Whether a server finds a block gone; never when the faults have stopped."""
        share = self._case.config.pages_fail
        return bool(share) and not self._faults_ended_ns and self._loop.streams["pages"].chance(share, 1000)

    def _build_host(self, memory: PagedMemory) -> EngineHost:
        probe = TracedProbe(self._oracle, self._loop.trace)
        parts = EngineParts(
            self._layout, self._model, memory, self.devices, probe, restarted=self._oracle.engine_restarted
        )
        return EngineHost(self.world, self.stack, parts, engine_config(self._case.config), self.findings)

    @property
    def engine(self) -> Engine:
        """The present engine, for readers of its state."""
        return self.host.engine

    @property
    def _specs(self) -> list[RequestSpec]:
        return [*self._first, *self._second]

    # ---- the course

    async def course(self) -> None:
        """All phases; the first that finds something is the last."""
        self._progress.start()
        try:
            for phase in (self._under_faults, self._rest, self._afterwards, self._close):
                await phase()
                if self.findings.violations:
                    return
        finally:
            self._progress.stop()
            self._marks.finish()

    async def _under_faults(self) -> None:
        """Phase 1 and 2: faults run until their time is over or there is nothing left to disturb."""
        case = self._case
        injector = Injector(self._scene, case.faults)
        injector.arm()
        serving = self._loop.create_task(self._serve_twice(), name="serving")
        if case.config.clear_ns:
            self._loop.call_later(case.config.clear_ns / NS_PER_S, self._clear)
        await asyncio.wait([serving], timeout=case.config.fault_ns / NS_PER_S)
        injector.stop(case.dead)
        self.stack.faults_over = True
        self._faults_ended_ns = self._loop.now_ns()
        self._outcome.enabled, self._outcome.fired = dict(injector.enabled), dict(injector.fired)
        await self._live_until(serving, "serving")
        self._outcome.fired = dict(injector.fired)

    def _clear(self) -> None:
        for server in self.stack.living_servers:
            server.storage.drop_l1()

    async def _serve_twice(self) -> None:
        await self._serve(self._first)
        if self._case.config.between_passes == "drop_l1":
            self.stack.drop_l1()
        await self._serve(self._first)

    async def _serve(self, specs: Sequence[RequestSpec]) -> None:
        self._oracle.aborted.clear()
        self._judge(specs, await self.host.serve(specs))

    async def _live_until(self, work: Coroutine[Any, Any, None] | asyncio.Task[None], what: str) -> None:
        """`work` must be done in time from now on, and with not too many steps: a finding if it is not."""
        task = work if isinstance(work, asyncio.Task) else self._loop.create_task(work, name=what)
        deadline_ns = self._loop.now_ns() + LIVENESS_NS
        callbacks_max = self._loop.callbacks_run + CALLBACKS_MAX
        while not task.done():
            if self._progress.stuck:
                return
            if self._loop.now_ns() >= deadline_ns or self._loop.callbacks_run > callbacks_max:
                self._not_live(what, deadline_ns)
                return
            await asyncio.wait([task], timeout=WATCH_S)
        task.result()

    def _not_live(self, what: str, deadline_ns: int) -> None:
        over = f"not over {LIVENESS_NS // NS_PER_S} virtual seconds after the faults stopped"
        if self._loop.now_ns() < deadline_ns:
            over = f"not over after {CALLBACKS_MAX} callbacks"
        self.findings.report(
            "liveness", f"{what} is {over}: {self.stack.describe()}\n{self._loop.waits('who waits for what:')}"
        )

    async def _close(self) -> None:
        self.host.close()
        await self._live_until(self.stack.close(), "closing")

    async def _afterwards(self) -> None:
        await self._live_until(self._second_workload(), "the second workload")

    async def _rest(self) -> None:
        """Phase 3: wait until all books can be closed, then let the oracles look into each of them."""
        self._progress.stop()  # waiting for a deadline to pass is all that happens now
        dead = self._case.dead
        deadline_ns = self._loop.now_ns() + LIVENESS_NS
        pause_s = _POLL_S_FIRST
        while (not self.host.up or any(self._not_over())) and self._loop.now_ns() < deadline_ns:
            await asyncio.sleep(pause_s)
            pause_s = min(_POLL_S_MOST, 2 * pause_s)
        if self._outcome.converge_ns < 0:
            self._outcome.converge_ns = self._loop.now_ns() - self._faults_ended_ns
        check_at_rest(self.stack, dead, self.findings)
        check_page_counters(self.stack, self.pages, self.findings)
        still_open = list(self._not_over())
        if still_open and not self.findings.violations:
            text = f"not at rest after {LIVENESS_NS // NS_PER_S} virtual seconds: {'; '.join(still_open)}"
            self.findings.report("liveness", f"{text}\n{self._loop.waits('who waits for what:')}")
        self._progress.start()

    def _not_over(self) -> Iterator[str]:
        """What keeps the world from being at rest. A fault that has ended may have left messages that come late."""
        yield from open_books(self.stack, self._case.dead)
        yield from underway(self.world.network, self._case.dead)

    async def _second_workload(self) -> None:
        failures = self.stack.scheduler.statistics().load_failures
        await self._second_pass(prefix_cache=True)
        share = await self._second_pass(prefix_cache=False)
        if share < 1 - HIT_SHARE_LOSS_MAX:
            share = await self._second_pass(prefix_cache=False)
        self._outcome.hit_share = share
        if not _why_not_judged(self._case) and _is_patient(self._case):
            check_kept(self.stack, self._second, self._oracle.hashes, self.findings)
            failed = self.stack.scheduler.statistics().load_failures - failures
            if failed and self._case.config.lease_ns >= LEASE_NS:
                self.findings.report("lost", f"{failed} loads failed after the faults, and were computed instead")

    async def _second_pass(self, *, prefix_cache: bool) -> float:
        """The share of what could be loaded that was loaded."""
        if not prefix_cache and self._case.config.second_from_l2:
            self.stack.drop_l1()
        config = replace(engine_config(self._case.config), num_blocks=self._second_blocks)
        self.host.configure(replace(config, prefix_cache=prefix_cache))
        self._oracle.aborted.clear()
        before = self._oracle.tokens_loaded
        self._judge(self._second, await self.host.serve(self._second))
        await self._rest()
        return (self._oracle.tokens_loaded - before) / self._tokens_loadable()

    def _tokens_loadable(self) -> int:
        """Of the second workload, in a cache that has stored all of it: what was never stored counts as missed."""
        total = 0
        for spec in self._second:
            hashes = self._oracle.hashes[spec.request_id]
            total += usable_prefix(self._layout, hashes, len(spec.prompt), lambda cell: True, 0)
        return max(1, total)

    def _judge(self, specs: Sequence[RequestSpec], answers: dict[str, list[int]]) -> None:
        for spec in specs:
            if spec.request_id not in answers and spec.request_id in self._oracle.aborted:
                continue
            expected, tokens = self._expected[spec.request_id], answers.get(spec.request_id, [])
            self._outcome.tokens_compared += len(expected)
            if tokens != expected:
                wrong = [index for index, token in enumerate(expected) if tokens[index : index + 1] != [token]]
                where = f"at token {wrong[0]}" if wrong else "in its length"
                self.findings.report("output", f"{spec.request_id} differs from the reference {where}")

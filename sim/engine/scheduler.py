"""`Scheduler`: continuous batching over paged blocks, with preemption and a connector.

Theory of operation
-------------------
The rules are those of vLLM 0.32's scheduler with one batch in flight. States of a request:

    WAITING --admitted, nothing or a synchronous load--> RUNNING
    WAITING --admitted with an asynchronous load--> LOADING --received--> LOADED --admitted, not asked again--> RUNNING
    LOADING --received, nothing usable--> WAITING (at the head; blocks freed; asked again)
    RUNNING --preempted, or (several groups) its synchronous load failed--> WAITING (at the head)
    RUNNING --its synchronous load failed--> RUNNING, rewound to the first bad block
    any --finished or aborted--> ENDED

`schedule()` builds one step:

1. Running requests first, in order, each with the tokens it lacks, within the token budget. If the pool cannot give
   the blocks, the victim (last of `running`, or greatest (priority, arrival)) is preempted: its blocks are freed at
   once, its computed tokens are 0 and it goes to the head of the waiting queue. Repeat until there is room or the
   victim was the request itself.
2. A step that preempted admits nobody (unless `beyond_engine`). Otherwise loaded requests are admitted first, then the
   waiting ones in order: own prefix cache, then the connector, which sees the local hit floored to whole blocks.
   Answer None: skipped, those behind are tried. No blocks: admission ends for this step.
3. With `reserve_whole` nobody is admitted whose whole sequence would not fit into the free blocks. An asynchronous load
   must always leave free what every request lacks that is still prefilling or loading. It is never a victim; without
   the reservation, loads could hold all blocks and none could go on.
4. With a recurrent group prefill steps end at multiples of its block, and at the last boundary <= n-1, so that there
   is a snapshot to come back to.

`update()` takes the step's results: failed loads first, so that nothing computed from them is kept and none of their
blocks gets a name in the prefix cache; then tokens; then what the connector has finished.

Loaded requests go before all others because they hold blocks and cannot be victims: behind a head of the queue that
waits for just those blocks they would wait for ever.

Who holds blocks: a request from admission until preemption or end; after its end the scheduler itself while a load
still writes them (until `received`) or the connector still reads them (`finished` answered True; until `sent`).
The connector announces both; `HeldBlocks` frees.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcore.errors import CallerError, InternalError
from kvcore.groups import CacheLayout
from kvcore.sim.engine.block_pool import BlockNames, BlockPool
from kvcore.sim.engine.config import EngineConfig, EngineStats, Policy
from kvcore.sim.engine.holds import HeldBlocks, HoldReason
from kvcore.sim.engine.loads import AsyncLoads, held_among
from kvcore.sim.engine.probe import EngineProbe
from kvcore.sim.engine.request import Request, RequestSpec, Status
from kvcore.sim.engine.step import StepEntry, StepOutput, StepPlan, step_view
from kvcore.sim.engine.tables import LocalHit, TableManager

if TYPE_CHECKING:  # the interface belongs to the ladder, which imports us; at run time only its shape matters
    from kvcore.connectors.interface import SchedulerSide


class Scheduler:
    """One engine run. In turn: schedule, (the step runs), update; abort and reset_prefix_cache between steps."""

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout,
        connector: SchedulerSide | None,
        probe: EngineProbe,
        names: BlockNames,
    ) -> None:
        self._config = config
        self._groups = len(layout.groups)
        self._connector = connector
        self._probe = probe
        self.pool = BlockPool(config.num_blocks, probe)
        self.tables = TableManager(layout, self.pool, names, config.max_batched_tokens)
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._loads = AsyncLoads(self.tables, config.policy)
        self._prefilling: dict[str, Request] = {}  # admitted, prompt not yet computed; loading ones included
        self._held = HeldBlocks(self.tables)
        self._budget = 0
        self._forced = 0
        self._step = 0
        self._arrivals = 0
        self._preempted: list[str] = []  # since the last step was built
        self._ended: list[str] = []
        self._results: dict[str, list[int]] = {}
        self._counters = dict.fromkeys(EngineStats.__slots__, 0)

    # -- what the engine calls

    def add(self, spec: RequestSpec) -> None:
        if spec.request_id in self._requests or spec.request_id in self._held:
            raise CallerError(f"request id {spec.request_id!r} is in use")
        if not spec.prompt or spec.output_tokens < 1:
            raise CallerError(f"request {spec.request_id!r} needs at least one prompt and one output token")
        need = self.tables.blocks_max(len(spec.prompt) + spec.output_tokens)
        usable = self.pool.num_blocks - 1
        if need > usable:
            raise CallerError(f"request {spec.request_id!r} may need {need} blocks, the engine has {usable}")
        request = Request(spec, self._arrivals, self._groups)
        self._arrivals += 1
        self._requests[spec.request_id] = request
        self._results.pop(spec.request_id, None)
        self._enqueue(request)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._held or self._ended)

    @property
    def waits_for_connector(self) -> bool:
        """Nothing to run now, but a connector's report can change that."""
        return bool(self._loads.loading or self._held or (self._waiting and self._connector is not None))

    def in_use(self, request_id: str) -> bool:
        """A request of this id has not ended, or its blocks are still read or written."""
        return request_id in self._requests or request_id in self._held

    def open_requests(self, *statuses: Status) -> list[str]:
        """Requests that have not ended, in order of arrival; only those in one of `statuses`, if any are named."""
        return [name for name, each in self._requests.items() if not statuses or each.status in statuses]

    @property
    def next_victim(self) -> str | None:
        """Who would be preempted now."""
        return self._victim().request_id if self._running else None

    def tokens_of(self, request_id: str) -> int:
        """Prompt and generated tokens of a request that has not ended."""
        return self._requests[request_id].length

    def results(self) -> dict[str, list[int]]:
        return dict(self._results)

    def statistics(self) -> EngineStats:
        return EngineStats(**self._counters)

    def abort(self, request_id: str) -> bool:
        """End a request between two steps. False: there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._count(requests_aborted=1)
        self._probe.request_aborted(request_id)
        self._end(request)
        return True

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        if reset_running_requests:
            while self._running:
                self._preempt(self._victim())
        self.pool.reset_prefix_cache()

    def force_preemptions(self, count: int) -> None:
        """The next step preempts this many victims (if it has them), as if blocks had run out."""
        self._forced += count

    def schedule(self) -> StepPlan:
        plan = StepPlan(self._step)
        self._step += 1
        self._budget = self._config.max_batched_tokens
        preemptions = self._counters["preemptions"]
        for _ in range(min(self._forced, len(self._running))):
            self._preempt(self._victim())
        self._forced = 0
        self._schedule_running(plan)
        if self._counters["preemptions"] == preemptions or self._config.beyond_engine:
            self._admit_loaded(plan)
            self._admit_waiting(plan)
        plan.preempted, self._preempted = tuple(self._preempted), []
        plan.finished, self._ended = tuple(self._ended), []
        if self._connector is not None:
            plan.meta = self._connector.build_meta(step_view(plan))
        self._count(steps=1, empty_steps=int(not plan.entries), tokens_computed=plan.tokens)
        return plan

    def update(self, plan: StepPlan, output: StepOutput) -> None:
        """Take a step's results."""
        for request_id, sources in plan.copy_holders:
            self.pool.release(sources, request_id)
        if self._connector is not None:
            self._connector.update_output(output.finished, output.error_blocks)
        failed = self._take_errors(output.error_blocks)
        for entry in plan.entries:
            if entry.request.request_id not in failed:
                self._advance(entry, output.sampled)
        for request_id in sorted(output.finished.received):
            self._received(request_id, request_id in output.finished.failed)
        for request_id in sorted(output.finished.sent):
            self._held.drop(request_id, HoldReason.STORING)

    # -- running requests

    def _schedule_running(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self._running) and self._budget:
            request = self._running[index]
            count = self._step_tokens(request, request.computed)
            if count:
                new_blocks = self._grow_or_preempt(request, request.computed + count, plan)
                if new_blocks is None:
                    return  # it was the victim itself
                plan.fresh.extend(block for blocks in new_blocks for block in blocks)
                self._schedule(plan, request, count, new_blocks)
            index = self._running.index(request) + 1  # a victim may have stood before it

    def _step_tokens(self, request: Request, computed: int) -> int:
        """Tokens of the next step: all that lack, cut to the budget and to recurrent boundaries."""
        return self.tables.cut_step(request, computed, min(request.length - computed, self._budget))

    def _grow_or_preempt(self, request: Request, target: int, plan: StepPlan) -> tuple[list[int], ...] | None:
        while (new_blocks := self.tables.grow(request, target)) is None:
            victim = self._victim()
            self._unschedule(plan, victim)
            self._preempt(victim)
            if victim is request:
                return None
        return new_blocks

    def _victim(self) -> Request:
        if self._config.policy is Policy.FCFS:
            return self._running[-1]
        return max(self._running, key=lambda request: request.order)

    def _unschedule(self, plan: StepPlan, victim: Request) -> None:
        """By priority the victim may already be part of this step; what it took goes back unwritten."""
        for entry in plan.entries:
            if entry.request is victim:
                self._budget += entry.scheduled
                plan.entries.remove(entry)
                victim.resumed = entry.resumed
                returned = {block for blocks in entry.new_blocks for block in blocks}
                plan.fresh[:] = [block for block in plan.fresh if block not in returned]
                return

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._back_to_waiting(request)
        request.preemptions += 1
        self._count(preemptions=1)
        self._probe.preempted(request.request_id)

    def _back_to_waiting(self, request: Request) -> None:
        self.tables.free(request)
        self._prefilling.pop(request.request_id, None)
        request.computed = request.local = request.external = 0
        request.bad_blocks.clear()
        request.resumed = True
        request.status = Status.WAITING
        self._enqueue(request, head=True)
        self._preempted.append(request.request_id)
        if self._connector is not None:
            self._connector.preempted(request.request_id)

    def _enqueue(self, request: Request, head: bool = False) -> None:
        if self._config.policy is Policy.PRIORITY:
            insort(self._waiting, request, key=lambda other: other.order)
        elif head:
            self._waiting.insert(0, request)
        else:
            self._waiting.append(request)

    def _schedule(self, plan: StepPlan, request: Request, count: int, new_blocks: tuple[list[int], ...]) -> None:
        assert 0 < count <= self._budget
        plan.entries.append(StepEntry(request, request.computed, count, new_blocks, request.resumed))
        request.resumed = False
        self._budget -= count
        if request.computed + count < request.length:
            self._prefilling[request.request_id] = request
        else:
            self._prefilling.pop(request.request_id, None)

    # -- admission

    def _has_room(self) -> bool:
        return self._budget > 0 and len(self._running) < self._config.max_num_seqs

    def _admit_loaded(self, plan: StepPlan) -> None:
        """In order, up to the first that does not fit. Where nobody runs, it is passed over: by priority it may be the
        one for whom nothing was reserved, and only the end of a later one makes room for it."""
        for request in self._loads.loaded:
            new_blocks = self._blocks_for_loaded(request)
            if new_blocks is None and plan.entries:
                return
            if new_blocks is not None:
                self._admit_one_loaded(plan, request, new_blocks)

    def _blocks_for_loaded(self, request: Request) -> tuple[list[int], ...] | None:
        """None: there is no room for its next tokens."""
        count = self._step_tokens(request, request.computed) if self._has_room() else 0
        if self._config.reserve_whole and self.tables.blocks_lacking(request) > self.pool.free_count:
            return None
        return self.tables.grow(request, request.computed + count) if count else None

    def _admit_one_loaded(self, plan: StepPlan, request: Request, new_blocks: tuple[list[int], ...]) -> None:
        count = self._step_tokens(request, request.computed)
        if self._connector is not None:
            self._connector.after_alloc(request.view(), request.block_table(), 0)
        plan.fresh.extend(block for blocks in new_blocks for block in blocks)
        self._loads.admit(request)
        self._start(plan, request, count, new_blocks)

    def _admit_waiting(self, plan: StepPlan) -> None:
        if self._loads.loaded:
            return  # admission has ended, or there is no room
        index = 0
        while index < len(self._waiting) and self._has_room():
            request = self._waiting[index]
            hit = self._local_hit(request)
            external, load_async = self._ask(request, hit)
            if external is None:
                index += 1
                continue
            if external == 0:
                hit = self._with_partial(request, hit)
            if not self._admit(plan, request, hit, external, load_async):
                return
            del self._waiting[index]

    def _local_hit(self, request: Request) -> LocalHit:
        if self._config.prefix_cache:
            return self.tables.local_hit(request)
        return LocalHit(0, tuple([] for _ in range(self._groups)))

    def _with_partial(self, request: Request, hit: LocalHit) -> LocalHit:
        if not (self._config.prefix_cache and self._config.partial_hits):
            return hit
        return self.tables.partial_hit(request) or hit

    def _ask(self, request: Request, hit: LocalHit) -> tuple[int | None, bool]:
        if self._connector is None:
            return 0, False
        external, load_async = self._connector.matched_tokens(request.view(), hit.tokens)
        self._probe.asked(request.request_id, hit.tokens, external)
        if external is not None:
            self.tables.check_promise(request, hit.tokens, external)
        return external, load_async and bool(external)

    def _admit(self, plan: StepPlan, request: Request, hit: LocalHit, external: int, load_async: bool) -> bool:
        computed = hit.tokens + external
        count = 0 if load_async else self._step_tokens(request, computed)
        if count == 0 and not load_async:
            return False  # the budget does not reach the next recurrent boundary
        if self._config.reserve_whole and self.tables.blocks_whole(request, hit, computed) > self.pool.free_count:
            return False
        reserved = sum(map(self.tables.blocks_lacking, self._prefilling.values())) if load_async else 0
        new_blocks = self.tables.admit(request, hit, computed, computed + count, reserved=reserved)
        if new_blocks is None:
            return False
        request.local, request.external, request.computed = hit.tokens, external, computed
        self._take_blocks(plan, request, hit, new_blocks)
        self._count(
            local_hit_tokens=hit.tokens,
            external_hit_tokens=external,
            resumes=int(request.preemptions > 0),
            resumes_with_load=int(request.preemptions > 0 and external > 0),
        )
        self._probe.request_admitted(request.request_id, hit.tokens, external)
        if self._connector is not None:
            self._connector.after_alloc(request.view(), request.block_table(), external)
        if load_async:
            self._loads.begin(request)
            self._prefilling[request.request_id] = request
        else:
            self._start(plan, request, count, new_blocks)
        return True

    def _take_blocks(self, plan: StepPlan, request: Request, hit: LocalHit, new_blocks: tuple[list[int], ...]) -> None:
        loading = dict.fromkeys(self.tables.load_targets(request)) if request.external else {}
        for block in (block for blocks in new_blocks for block in blocks):
            (plan.loading if block in loading else plan.fresh).append(block)
        if hit.copy_sources:
            targets = [table.ids[-1] for table in request.tables]
            plan.copies.extend(zip(hit.copy_sources, targets, strict=True))
            plan.copy_holders.append((request.request_id, hit.copy_sources))

    def _start(self, plan: StepPlan, request: Request, count: int, new_blocks: tuple[list[int], ...]) -> None:
        request.status = Status.RUNNING
        self._running.append(request)
        self._schedule(plan, request, count, new_blocks)

    # -- results

    def _advance(self, entry: StepEntry, sampled: dict[str, int]) -> None:
        request = entry.request
        assert request.status is Status.RUNNING
        assert request.computed == entry.computed
        samples = entry.samples
        request.computed += entry.scheduled
        self._count(tokens_recomputed=max(0, min(request.computed, request.tokens_computed_max) - entry.computed))
        request.tokens_computed_max = max(request.tokens_computed_max, request.computed)
        self._publish(request)
        if not samples:
            return
        request.append(sampled[request.request_id])
        self._count(tokens_generated=1)
        if request.complete:
            self._count(requests_finished=1)
            self._results[request.request_id] = request.generated
            self._probe.request_finished(request.request_id, request.generated)
            self._end(request)

    def _publish(self, request: Request) -> None:
        if self._config.prefix_cache:
            self.tables.publish(request)

    def _take_errors(self, error_blocks: frozenset[int]) -> dict[str, None]:
        """Requests whose synchronous load failed: rewound to the valid prefix, their sampled tokens are dropped."""
        failed: dict[str, None] = {}
        if not error_blocks:
            return failed
        self._loads.note_errors(sorted(error_blocks))
        for request in list(self._running):
            bad = held_among(request, sorted(error_blocks))
            if bad:
                failed[request.request_id] = None
                self._rewind(request, bad)
        return failed

    def _rewind(self, request: Request, bad: Sequence[int]) -> None:
        for block in bad:
            self.pool.forget(block)  # never to be found, whoever else may hold it
        valid = self.tables.valid_prefix(request, bad)
        self._load_failed(request, valid)
        if valid == 0 and self._groups > 1:
            self._running.remove(request)
            self._back_to_waiting(request)
            return
        request.computed = min(request.computed, valid)
        request.published = [
            min(count, valid // group.block_tokens)
            for count, group in zip(request.published, self.tables.groups, strict=True)
        ]

    def _load_failed(self, request: Request, valid: int) -> None:
        self._count(load_failures=1)
        self._probe.load_ended(request.request_id, valid, request.local + request.external)

    # -- asynchronous loads, ends and holds

    def _received(self, request_id: str, failed: bool) -> None:
        if request_id in self._held:
            self._held.drop(request_id, HoldReason.LOADING)
            return
        end = self._loads.received(request_id, failed)
        if end is None:
            return
        request, valid, whole = end
        if whole:
            self._probe.load_ended(request_id, valid, valid)
        else:
            self._load_failed(request, valid)
        if valid == 0:
            self._back_to_waiting(request)
            return
        request.computed = valid
        self._publish(request)

    def _end(self, request: Request) -> None:
        """Finished or aborted, between two steps."""
        request_id = request.request_id
        reasons: list[HoldReason] = []
        if request.status is Status.RUNNING:
            self._running.remove(request)
        elif request.status is Status.WAITING:
            self._waiting.remove(request)
        elif self._loads.drop(request):
            reasons.append(HoldReason.LOADING)
        request.status = Status.ENDED
        del self._requests[request_id]
        self._prefilling.pop(request_id, None)
        self._ended.append(request_id)
        self.tables.trim(request)
        if self._connector is not None and self._connector.finished(request.view(), request.block_table()):
            reasons.append(HoldReason.STORING)
        self._held.hold(request, reasons)

    def check_idle(self) -> None:
        """Nothing is left behind after all requests have ended."""
        if self.pool.held_count or self._held or self._requests:
            raise InternalError(f"{self.pool.held_count} blocks are still held after the last request ended")
        self.pool.check()

    def describe(self) -> str:
        return (
            f"step {self._step}: {len(self._waiting)} waiting, {len(self._running)} running,"
            f" {len(self._loads.loading)} loading, {len(self._loads.loaded)} loaded,"
            f" {len(self._held)} ended with held blocks, {self.pool.free_count} free blocks"
        )

    def _count(self, **increments: int) -> None:
        for name, increment in increments.items():
            self._counters[name] += increment

"""Lookups and prefetch: observe, look up, plan once, load, answer. Shell (one loop thread), driven by callbacks.

Theory of operation
-------------------
A `LookupJob` goes through these phases, forwards only:

    start --observe--> [waiting] --admitted--> looking --all adapters answered--> loading --last load ended--> answered
      |                    |                      |                                  |                            |
      |  nothing can come  |  the job's deadline, or `hurry`, in any phase: answer with what is held now         |
      `--------------------+----------------------+-----------> answered <-----------'           settle, reads -> ended
                                cancel, in any phase: give everything back -----------------------------------> ended

1. *Observe*: take read leases in L1 on every cell this server has to supply, and join the loads in flight of the
   others.
2. *Admission*: if further cells could make the answer longer, the worst case of their bytes is asked of the byte
   budget (`kvcore.budget_line`). That is the only wait for another request, and it ends at the deadline.
3. *Look up*: every adapter at once, only cells that L1 lacks and nobody is loading. Each lookup has a deadline; what
   a late one locked is unlocked on arrival.
4. *Plan* once (`kvcore.planner`); unused L2 locks go back at once; the grant shrinks to the planned bytes.
5. *Load*: stage, submit per adapter, publish slice by slice (`kvcore.loads`). A refused or failed cell makes the hit
   shorter. At the first failure the plan is made again, once, over what is held or still coming: loads that can no
   longer help are left. Nothing new is begun.
6. *Answer*: fold what is leased. `lengths` is the set of servable lengths, fixed from then on; leases beyond the
   greatest are given back. `settle(length)` keeps exactly the leases that this length needs.

The record of a job is its `held` rows (leases), `found` (L2 locks between lookup and plan), `joined` (loads it waits
for) and its grant. `_detach` (everything but leases) and `_end_leases` are the only places that give these back;
answer, cancel, deadline, expiry and close all go through them, so each thing is returned once.

Rejected: a coroutine per job (every await is a place where a cancel can lose what a result carried); looking up again
after a failure (a second round doubles the worst case and the first answer is usually enough); pinning a plan in L2
until its load may begin (locks of a weak store do not last).

Who holds leases: the job's owner. Who announces: `on_done` callbacks, and `state` for those who poll. Who frees:
the engine's reads (`Storage.close_read`), `settle`, `cancel`/`release_owner`, or the lease deadline, which is one
for all leases of a job: its own deadline plus the configured lease time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcore import bitmap
from kvcore.answers import Answer
from kvcore.budget import BudgetStatistics, ByteBudget, Grant
from kvcore.budget_line import BudgetLine
from kvcore.deadlines import NS_PER_S, DeadlineTimer
from kvcore.errors import CallerError
from kvcore.groups import CacheLayout
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l2.pump import AdapterPump
from kvcore.leases import Owner
from kvcore.loads import Load, LoadStatistics, LoadTable
from kvcore.lookup_job import Cells, LookupJob, LookupState, Phase, distinct_prefix
from kvcore.planner import (
    Plan,
    Rows,
    cells_in,
    demand_of,
    minus,
    none_of,
    plan,
    union,
    useful,
    worst_case_bytes,
)
from kvcore.ports import Clock, Tracer


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    jobs: int
    jobs_pending: int
    jobs_waiting: int
    started: int
    ready: int
    cancelled: int
    deadlines: int
    hurried: int
    expired: int
    replanned: int
    cells_asked: int
    cells_l1: int
    cells_found: int
    locks_held: int
    budget: BudgetStatistics
    loads: LoadStatistics


class PrefetchController:
    """Runs the lookup jobs of one Storage. See the module text."""

    def __init__(
        self,
        *,
        layout: CacheLayout,
        model_name: str,
        l1: L1Cache,
        pumps: Sequence[AdapterPump],
        clock: Clock,
        tracer: Tracer,
        budget_bytes: int,
        slice_bytes: int,
        lease_ns: int,
        lookup_deadline_ns: int,
        retain: bool,
        ended: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._model_name = model_name
        self._l1 = l1
        self._pumps = pumps
        self._clock = clock
        self._tracer = tracer
        self._lease_ns = lease_ns
        self._lookup_deadline_ns = lookup_deadline_ns
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._budget = ByteBudget(budget_bytes)
        self._line = BudgetLine(self._budget, self._admitted)
        self.loads = LoadTable(
            l1, pumps, self._budget, slice_bytes, retain=retain, freed=self._line.freed, ended=self._ended
        )
        self._jobs: dict[Owner, LookupJob] = {}
        self._closed = False
        self._started = self._ready = self._cancelled = self._deadlines = self._hurried = self._expired = 0
        self._replanned = self._cells_asked = self._cells_l1 = self._cells_found = 0

    # Starting

    def start(
        self,
        owner: Owner,
        hashes: Sequence[bytes],
        *,
        salt: str,
        prompt_tokens: int,
        masks: Sequence[int],
        skip_chunks: int,
        deadline_ns: int,
    ) -> LookupJob:
        self._check_start(owner, hashes, prompt_tokens, masks, skip_chunks)
        hashes = distinct_prefix(hashes)
        demand = demand_of(self._layout, len(hashes), prompt_tokens, masks, skip_chunks)
        cells = Cells(self._layout, self._model_name, salt, hashes, demand)
        lease_deadline_ns = max(deadline_ns, self._clock.now_ns()) + self._lease_ns
        job = LookupJob(self, owner, cells, demand, deadline_ns, lease_deadline_ns)
        self._jobs[owner] = job
        self._started += 1
        self._cells_asked += cells_in(demand.required)
        self._observe(job)
        self._cells_l1 += job.leases
        self._tracer.event(
            "prefetch.begin", owner.session, owner.generation, len(hashes), cells_in(demand.required), job.leases
        )
        self._begin(job)
        return job

    def _check_start(
        self, owner: Owner, hashes: Sequence[bytes], prompt_tokens: int, masks: Sequence[int], skip_chunks: int
    ) -> None:
        if self._closed:
            raise CallerError("the storage is closed; no lookup can start")
        if owner in self._jobs:
            raise CallerError(f"owner {owner} still has a lookup; release it or use the next generation")
        if len(masks) != len(self._layout.rows):
            raise CallerError(f"{len(masks)} masks for a layout of {len(self._layout.rows)} rows")
        if skip_chunks < 0 or min(masks) < 0:
            raise CallerError("skip_chunks and masks must not be negative")
        if len(hashes) * self._layout.chunk_tokens > prompt_tokens:
            raise CallerError(f"{len(hashes)} chunks are more than a prompt of {prompt_tokens} tokens has")

    def _begin(self, job: LookupJob) -> None:
        """Answer, wait for loads of others, or ask for admission."""
        if job.deadline_ns <= self._clock.now_ns():
            self._deadline(job)
            return
        wanted = self._wanted(job)
        if not any(wanted) and not job.joined:
            self._answer(job)  # nothing can come that would change it: neither a plan nor a timer is needed
            return
        job.timer = DeadlineTimer(self._loop, self._clock, job.deadline_ns, lambda: self._deadline(job))
        if not any(wanted):
            self._plan(job)
            return
        if self._line.ask(job, worst_case_bytes(job.demand, wanted)):
            self._look_up(job, wanted)
        else:
            assert job.grant is not None
            self._tracer.event("prefetch.wait", job.owner.session, job.owner.generation, job.grant.bytes_wanted)

    def _observe(self, job: LookupJob) -> None:
        """Lease what is resident, join what is loading. Repeated before each decision."""
        missing = minus(job.demand.required, job.held)
        keys = job.cells.keys(missing)
        if not keys:
            return
        answers = self._l1.reserve_read(job.owner, keys, deadline_ns=job.lease_deadline_ns)
        found = answers.count(Answer.RESERVED)
        leased: list[ObjectKey] = []
        if found == len(keys):
            leased = keys
            job.held = job.demand.required
        elif found:
            leased = [key for key, answer in zip(keys, answers, strict=True) if answer is Answer.RESERVED]
            job.held = union(job.held, job.cells.rows(leased))
        self.loads.unread.join(job.owner, leased)
        if job.joined:
            for key in leased:
                self._leave(job, key)
        if self.loads.in_flight:
            for key in keys:
                load = self.loads.in_flight.get(key)
                if load is not None and job.lacks(key):
                    self._join(job, load)

    def _wanted(self, job: LookupJob) -> Rows:
        """The cells that could make the answer longer and that nobody is bringing yet."""
        if not self._pumps or job.held == job.demand.required:
            return none_of(job.held)
        coming = union(job.held, job.cells.rows(job.joined))
        return useful(job.demand, coming, minus(job.demand.required, coming))

    # Admission

    def _admitted(self, job: LookupJob) -> None:
        self._observe(job)
        self._look_up(job, self._wanted(job))

    def _offer(self, loads: Sequence[Load]) -> None:
        """Loads have begun: those who wait in line for the same cells join them and ask for less."""
        for job in self._line.jobs():
            before = len(job.joined)
            for load in loads:
                if job.lacks(load.key):
                    self._join(job, load)
            if len(job.joined) > before:
                self._line.lower(job, worst_case_bytes(job.demand, self._wanted(job)))

    # Looking up

    def _look_up(self, job: LookupJob, wanted: Rows) -> None:
        assert job.phase is Phase.WAITING
        job.phase = Phase.LOOKING
        job.found = [none_of(wanted) for _ in self._pumps]
        keys = job.cells.keys(wanted)
        if not keys:
            self._plan(job)
            return
        remaining_ns = job.deadline_ns - self._clock.now_ns()
        deadline_s = max(0, min(remaining_ns, self._lookup_deadline_ns)) / NS_PER_S
        job.lookups = len(self._pumps)
        for adapter, pump in enumerate(self._pumps):
            self._ask(job, adapter, pump, keys, deadline_s)

    def _ask(self, job: LookupJob, adapter: int, pump: AdapterPump, keys: list[ObjectKey], deadline_s: float) -> None:
        def late(bits: int) -> None:
            pump.unlock([keys[position] for position in bitmap.bits(bits)])
            self._ended()

        def answer(bits: int | None) -> None:
            if bits is not None and job.phase is not Phase.LOOKING:
                late(bits)
            elif job.phase is Phase.LOOKING:
                self._answered_lookup(job, adapter, [keys[position] for position in bitmap.bits(bits or 0)])

        pump.lookup(keys, answer, late, deadline_s)

    def _answered_lookup(self, job: LookupJob, adapter: int, found: list[ObjectKey]) -> None:
        assert job.lookups > 0
        job.lookups -= 1
        job.found[adapter] = job.cells.rows(found)
        self._cells_found += len(found)
        if job.lookups == 0:
            self._observe(job)
            self._plan(job)
        self._ended()

    # Planning and loading

    def _plan(self, job: LookupJob) -> None:
        assert job.lookups == 0
        job.phase = Phase.LOADING
        found, job.found = job.found, []
        grant, job.grant = job.grant, None
        made = plan(
            job.demand,
            present=job.held,
            loading=job.cells.rows(job.joined),
            found=found,
            budget_bytes=grant.limit_bytes if grant is not None else 0,
        )
        self._tracer.event("prefetch.plan", job.owner.session, job.owner.generation, made.length, made.load_bytes)
        for pump, rows in zip(self._pumps, made.unlocks, strict=False):
            pump.unlock(job.cells.keys(rows))
        self._leave_unneeded(job, made)
        if grant is not None:
            self._line.shrink(grant, made.load_bytes)
            self._load(job, made, grant)
        self._progress(job)

    def _load(self, job: LookupJob, made: Plan, grant: Grant) -> None:
        """Stage everything, see what that leaves of the plan, and only then begin."""
        batches: list[list[Load]] = []
        refused = 0
        for adapter, rows in enumerate(made.loads):
            keys = job.cells.keys(rows)
            if not keys:
                continue
            sizes = job.cells.sizes(rows, self._layout.cell_bytes_rows)
            staged = self.loads.stage(adapter, keys, sizes, grant)
            batches.append(staged.loads)
            refused += len(staged.refused)
            for load in staged.loads:
                self._join(job, load)
            if staged.resident:
                self._observe(job)
                refused += sum(map(job.lacks, staged.resident))
        if refused:
            self._replan(job)
        for batch in batches:
            self.loads.drop([load for load in batch if not load.readers])
            kept = [load for load in batch if load.readers]
            self.loads.submit(kept, job.cells.cell)
            self._offer(kept)

    def loads_ended(self, job: LookupJob, arrived: Sequence[ObjectKey], lost: Sequence[ObjectKey]) -> None:
        """Cells of this job were published and leased to it (`arrived`), or will not come (`lost`)."""
        for key in (*arrived, *lost):
            job.joined.pop(key, None)
        assert job.phase not in (Phase.ANSWERED, Phase.ENDED), "a reader that had left was given a lease"
        rows = job.cells.rows(arrived)
        job.held = union(job.held, rows)
        owner, loaded_bytes = job.owner, job.demand.bytes_of(rows)
        self._tracer.event("prefetch.loaded", owner.session, owner.generation, len(arrived), len(lost), loaded_bytes)
        if job.phase is Phase.LOADING:
            if lost and not job.replanned:
                self._replan(job)
            self._progress(job)

    def _replan(self, job: LookupJob) -> None:
        """A cell failed: leave the loads that cannot help any more. Once per job; no new load."""
        assert not job.replanned
        job.replanned = True
        self._replanned += 1
        coming = job.cells.rows(job.joined)
        self._leave_unneeded(job, plan(job.demand, present=job.held, loading=coming, found=(), budget_bytes=0))

    def _leave_unneeded(self, job: LookupJob, made: Plan) -> None:
        needed = set(job.cells.keys(made.joined))
        for key in [key for key in job.joined if key not in needed]:
            self._leave(job, key)

    def _progress(self, job: LookupJob) -> None:
        if job.phase is Phase.LOADING and not job.joined:
            self._answer(job)

    def _join(self, job: LookupJob, load: Load) -> None:
        if load.key not in job.joined:
            job.joined[load.key] = load
            self.loads.join(job, load)

    def _leave(self, job: LookupJob, key: ObjectKey) -> None:
        load = job.joined.pop(key, None)
        if load is not None:
            self.loads.leave(job, load)

    # Answering and ending

    def _deadline(self, job: LookupJob) -> None:
        self._deadlines += 1
        self._cut_short(job, "prefetch.deadline")

    def hurry(self, job: LookupJob) -> None:
        if job.state is LookupState.PENDING:
            self._hurried += 1
            self._cut_short(job, "prefetch.hurry")

    def _cut_short(self, job: LookupJob, label: str) -> None:
        assert job.phase is not Phase.LOOKING or job.lookups, "all stores have answered, and nothing was planned"
        assert job.phase is not Phase.LOADING or job.joined, "all its loads have ended, and it was not answered"
        self._tracer.event(label, job.owner.session, job.owner.generation, job.phase.value)
        self._answer(job)

    def _answer(self, job: LookupJob) -> None:
        """Fix the set of lengths that the leases serve; give back those that no servable length can use."""
        self._detach(job)
        job.phase = Phase.ANSWERED
        job.lengths = job.demand.fold(job.held)
        best = self._layout.best(job.lengths)
        self._ready += 1
        self._tracer.event("prefetch.ready", job.owner.session, job.owner.generation, best)
        job.finish(LookupState.READY)
        if any(job.held):
            job.timer = DeadlineTimer(self._loop, self._clock, job.lease_deadline_ns, lambda: self._expire(job))
        self._end_leases(job, tuple(row >> best << best for row in job.held))

    def settle(self, job: LookupJob, length: int) -> None:
        if job.state is not LookupState.READY:
            raise CallerError(f"a lookup that is {job.state.value} cannot be settled")
        if length < 0 or not job.lengths >> length & 1:
            raise CallerError(f"length {length} is not one of the answered lengths")
        if job.settled is not None and length not in (0, job.settled):
            raise CallerError(f"the lookup was settled at {job.settled} already")
        job.settled = length
        self._end_leases(job, minus(job.held, job.demand.needed(length)))

    def cancel(self, job: LookupJob, reason: str) -> None:
        if job.phase is Phase.ENDED:
            return
        self._detach(job)
        if job.state is LookupState.PENDING:
            self._cancelled += 1
            job.reason = reason
            self._tracer.event("prefetch.failed", job.owner.session, job.owner.generation, reason)
            job.finish(LookupState.FAILED)
        job.phase = Phase.ENDED
        self._end_leases(job, job.held)

    def _detach(self, job: LookupJob) -> None:
        """Give back all that a job holds besides leases: its place in line or grant, L2 locks, interest in loads."""
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None
        self._line.leave(job)
        found, job.found = job.found, []
        job.lookups = 0
        for pump, rows in zip(self._pumps, found, strict=False):
            pump.unlock(job.cells.keys(rows))
        for key in list(job.joined):
            self._leave(job, key)

    def _end_leases(self, job: LookupJob, rows: Rows) -> None:
        keys = job.cells.keys(rows) if any(rows) else ()
        if keys:
            self._l1.finish_read(job.owner, keys)
        self._note_ended(job, rows, keys)

    def _note_ended(self, job: LookupJob, rows: Rows, keys: Sequence[ObjectKey]) -> None:
        """The leases on `rows` are over; keep our record and the ledger in step. A job without leases is forgotten."""
        if keys:
            job.held = minus(job.held, rows)
            self.loads.unread.read(job.owner, keys)
        if job.phase in (Phase.ANSWERED, Phase.ENDED) and not any(job.held):
            job.phase = Phase.ENDED
            if job.timer is not None:
                job.timer.cancel()
                job.timer = None
            job.cells.forget()
            self._jobs.pop(job.owner, None)

    def finish_read(self, owner: Owner, keys: Sequence[ObjectKey]) -> list[Answer]:
        """A reader has its bytes: its leases on `keys` end."""
        answers = self._l1.finish_read(owner, keys)
        job = self._jobs.get(owner)
        if job is not None:
            rows = tuple(row & held for row, held in zip(job.cells.rows(keys), job.held, strict=True))
            self._note_ended(job, rows, job.cells.keys(rows))
        return answers

    def release_owner(self, owner: Owner) -> int:
        job = self._jobs.get(owner)
        count = 0
        if job is not None:
            count = job.leases
            self.cancel(job, "released")
        return count + self._l1.release_owner(owner)

    def _expire(self, job: LookupJob) -> None:
        """The lease deadline: whoever asked has vanished. Copies that still run are protected by their I/O holds."""
        job.timer = None
        self._expired += 1
        self._tracer.event("prefetch.expire", job.owner.session, job.owner.generation, job.leases)
        self._l1.expire(self._clock.now_ns())
        # Not `finish_read`: a reader that comes back late must still be told EXPIRED.
        job.phase = Phase.ENDED
        self._note_ended(job, job.held, job.cells.keys(job.held))

    def close(self) -> None:
        """Cancel everything; loads and late lookups drain through the pumps."""
        self._closed = True
        self._line.close()
        for job in list(self._jobs.values()):
            self.cancel(job, "closed")
        assert not self._jobs
        assert not self._line

    def statistics(self) -> PrefetchStatistics:
        jobs = self._jobs.values()
        return PrefetchStatistics(
            jobs=len(jobs),
            jobs_pending=sum(job.state is LookupState.PENDING for job in jobs),
            jobs_waiting=len(self._line),
            started=self._started,
            ready=self._ready,
            cancelled=self._cancelled,
            deadlines=self._deadlines,
            hurried=self._hurried,
            expired=self._expired,
            replanned=self._replanned,
            cells_asked=self._cells_asked,
            cells_l1=self._cells_l1,
            cells_found=self._cells_found,
            locks_held=sum(cells_in(rows) for job in jobs for rows in job.found),
            budget=self._budget.statistics(),
            loads=self.loads.statistics(),
        )

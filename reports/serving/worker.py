"""One worker: its queue, its steps, its loads.

Theory of operation
-------------------
The engine is scheduled as vLLM's: in each step decoding sequences advance by one token, and prompts fill up to
`step_tokens`, first come first served, long ones in pieces. A request is admitted when its prompt and output fit into
the GPU's memory (nobody is preempted later) and the batch has a place. When it is admitted the cache is asked, and the
admission decides. Then

    waiting --compute--> computing --prompt done--> decoding --output done--> ended
    waiting --load-----> loading --arrived--> ready --> computing
    waiting --split----> computing its front, while its back is loading; the later of both makes it ready

A ready request goes before those that wait, a loading one keeps its place in memory and holds nobody else up
(serving/loads.py). If no prompt is there to compute, a load may be stopped so that the rest of its prompt is there;
otherwise decode steps run until the first sequence ends (serving/gpu.py), and something that becomes ready in between
cuts the run at the next step's end.

Who holds: the worker, from `arrive` to `ended`. Who announces: `ended`. Who frees: its room, `_finish`; its leases,
serving/loads.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from kvcore.admission import Reason
from kvcore.meters import Backlog
from kvcore.reports.serving.admit import SPLIT, Admission
from kvcore.reports.serving.cache import Cache, Choice
from kvcore.reports.serving.gpu import Batch, Part
from kvcore.reports.serving.job import Job
from kvcore.reports.serving.link import After, Line
from kvcore.reports.serving.loads import STOPPED, Loads
from kvcore.reports.serving.setting import Setting


class Worker:
    """See the module text. `after(time, call)` calls back at a time; `ended(job)` is told once per job."""

    def __init__(
        self,
        setting: Setting,
        cache: Cache | None,
        lines: Sequence[Line],
        after: After,
        ended: Callable[[Job], None],
        deciding: Callable[[Job], None],
    ) -> None:
        self.busy_s = 0.0
        self._setting = setting
        self._cache = cache
        self._lines = lines
        self._after = after
        self._ended = ended
        self._deciding = deciding
        self._admission = None if cache is None else Admission(setting, cache, lines)
        self._loads = self._loads_of(after)
        self._batch = Batch(setting)
        self._room = setting.room_tokens
        self._waiting: deque[Job] = deque()
        self._ready: list[tuple[int, Job]] = []
        self._computing: deque[Job] = deque()
        self._open = 0  # admitted and not ended
        self._run = 0  # number of the step or run of steps that is under way
        self._running = False
        self._decode_from_s: float | None = None
        self.pending_tokens = 0  # to be computed, for the router

    def _loads_of(self, after: After) -> Loads | None:
        cache, admission = self._cache, self._admission
        if cache is None or admission is None:
            return None
        return Loads(self._setting, cache, self._lines, admission, after, self._become_ready)

    @property
    def steps(self) -> int:
        return self._batch.steps

    # Coming in

    def arrive(self, now_s: float, job: Job) -> None:
        """A request that fits into the GPU's memory, at the end of the queue."""
        assert job.prompt_tokens + job.output_tokens <= self._setting.room_tokens
        self.pending_tokens += job.prompt_tokens
        self._waiting.append(job)
        if self._admission is not None:
            self._admission.came(now_s)
            self._admission.backlog.add(job.prompt_tokens)
        self._wake(now_s)

    def _become_ready(self, now_s: float, job: Job) -> None:
        self._make_ready(job)
        self._wake(now_s)

    def _make_ready(self, job: Job) -> None:
        job.at = job.front + job.hit_tokens
        job.todo = job.prompt_tokens - job.at
        heappush(self._ready, (job.index, job))
        self._admission_of().backlog.add(job.todo, job.at)

    def _wake(self, now_s: float) -> None:
        """Something could be computed: begin, or end the run of decode steps early."""
        if not self._running:
            self._begin(now_s)
        elif self._decode_from_s is not None and (self._ready or self._fits()):
            self._cut(now_s)

    def _fits(self) -> bool:
        if not self._waiting or self._open >= self._setting.batch_max:
            return False
        head = self._waiting[0]
        return head.prompt_tokens + head.output_tokens <= self._room

    # Steps

    def _begin(self, now_s: float) -> None:
        """Begin the next step, or a run of decode steps; idle when there is nothing to do."""
        assert not self._running
        parts = self._parts(now_s)
        if not parts and self._stop_one(now_s):
            parts = self._parts(now_s)
        self._run += 1
        if parts:
            self._begin_mixed(now_s, parts)
        elif len(self._batch):
            self._decode_from_s = now_s
            self._begin_decode(now_s, self._batch.steps_to_end)
        self._running = bool(parts or len(self._batch))

    def _begin_mixed(self, now_s: float, parts: list[tuple[Job, Part]]) -> None:
        seconds = self._batch.mixed_s([part for _, part in parts], self._sm_share(now_s))
        self.busy_s += seconds
        tokens = sum([part.tokens for _, part in parts])
        pairs = sum([part.pairs for _, part in parts])

        def end(now_s: float) -> None:
            if self._admission is not None:
                self._admission.computed(now_s, tokens, pairs, seconds)
            self._end_mixed(now_s, [job for job, _ in parts], tokens)

        self._after(now_s + seconds, end)

    def _end_mixed(self, now_s: float, jobs: list[Job], tokens: int) -> None:
        self._running = False
        self.pending_tokens -= tokens
        self._finish(now_s, self._batch.advance(1))
        for job in jobs:
            if not job.todo:
                self._stage_done(now_s, job)
        if not self._running:
            self._begin(now_s)

    def _begin_decode(self, now_s: float, steps: int) -> None:
        run = self._run
        begin_s = self._decode_from_s
        assert begin_s is not None
        end_s = max(begin_s + self._batch.decode_s(steps, self._sm_share(begin_s)), now_s)

        def end(now_s: float) -> None:
            if run != self._run:
                return  # the run was cut
            self.busy_s += end_s - begin_s
            self._running = False
            self._decode_from_s = None
            self._finish(now_s, self._batch.advance(steps))
            self._begin(now_s)

        self._after(end_s, end)

    def _cut(self, now_s: float) -> None:
        """The run of decode steps ends with the step that is under way."""
        begin_s = self._decode_from_s
        assert begin_s is not None
        share = self._sm_share(begin_s)
        low, high = 1, self._batch.steps_to_end
        while low < high:
            middle = (low + high) // 2
            if begin_s + self._batch.decode_s(middle, share) >= now_s:
                high = middle
            else:
                low = middle + 1
        self._run += 1
        self._begin_decode(now_s, low)

    def _sm_share(self, now_s: float) -> float:
        if not self._lines or not self._lines[0].sm_share or self._lines[0].free_s <= now_s:
            return 0.0
        return self._lines[0].sm_share

    def _stop_one(self, now_s: float) -> bool:
        """Stop a load, if that pays, so that there is something to compute."""
        stopped = None if self._loads is None else self._loads.stop_one(now_s, self._batch)
        if stopped is None:
            return False
        stopped.job.decision = STOPPED
        self.pending_tokens += stopped.tokens
        if stopped.complete:
            self._make_ready(stopped.job)
        return stopped.complete

    # Admitting

    def _parts(self, now_s: float) -> list[tuple[Job, Part]]:
        """Prompts, or pieces of them, for one step."""
        parts: list[tuple[Job, Part]] = []
        left = max(self._setting.step_tokens - len(self._batch), 1)
        ahead = Backlog()
        while left > 0 and (job := self._next(now_s, ahead)) is not None:
            part = Part(min(left, job.todo), job.at)
            job.at += part.tokens
            job.todo -= part.tokens
            left -= part.tokens
            ahead.add(part.tokens, part.prefix)
            parts.append((job, part))
            if not job.todo:
                self._computing.popleft()
        return parts

    def _next(self, now_s: float, ahead: Backlog) -> Job | None:
        """The next request to compute, at the front of `_computing`."""
        while not self._computing:
            if self._ready:
                job = heappop(self._ready)[1]
                self._admission_of().backlog.remove(job.todo, job.at)
            elif self._fits():
                job = self._waiting.popleft()
                self._admit(now_s, job, ahead)
                if not job.todo:
                    continue
            else:
                return None
            self._computing.append(job)
        return self._computing[0]

    def _admit(self, now_s: float, job: Job, ahead: Backlog) -> None:
        """Take room for it and decide what it loads; `todo` is 0 where it has to wait for its load."""
        self._room -= job.prompt_tokens + job.output_tokens
        self._open += 1
        self._deciding(job)
        if self._cache is None:
            return
        admission = self._admission_of()
        admission.backlog.remove(job.prompt_tokens)
        cache, held = self._cache, job.held
        if held is None:  # shorter than a chunk
            job.decision = Reason.NOTHING.value
            return
        choices = cache.choices(held) if cache.find(held) else []
        job.found_tokens = choices[-1].offer.tokens if choices else 0
        choice, job.decision = admission.choose(now_s, held, choices, ahead, self._batch, now_s - job.arrival_s)
        while choice is not None and not cache.take(held, choice):
            choice = choices[0] if choice is not choices[0] and not choices[0].depth else None
            job.decision = "no room"
        if choice is None:
            cache.release(held)
        else:
            self._load(now_s, job, choice)

    def _load(self, now_s: float, job: Job, choice: Choice) -> None:
        """Begin its load; of a split, its front is computed meanwhile."""
        assert self._loads is not None
        if job.decision == SPLIT:
            kept = choice.plan.kept[0] | (choice.plan.loads[0][0] if choice.plan.loads else 0)
            for rows in choice.plan.loads[1:]:
                kept |= rows[0]
            job.front = ((kept & -kept).bit_length() - 1) * self._cache_of().chunk_tokens
        job.todo = job.front
        self.pending_tokens -= choice.offer.tokens - job.front
        self._loads.begin(now_s, job, choice)

    # Ending

    def _stage_done(self, now_s: float, job: Job) -> None:
        if job.at < job.prompt_tokens:
            assert job.at == job.front, "only the front of a split ends before the prompt does"
            if not job.loading:
                self._become_ready(now_s, job)
            return
        job.token_first_s = now_s
        if self._admission is not None:
            self._admission.first_token(now_s, job.index, now_s - job.arrival_s, self._batch.steps)
        if self._cache is not None and job.held is not None:
            self._cache.store(job.held, 0 if job.front else job.hit_tokens // self._cache.chunk_tokens)
        if job.output_tokens > 1:
            self._batch.join(job)
        else:
            self._finish(now_s, [job])

    def _finish(self, now_s: float, jobs: Sequence[Any]) -> None:
        for job in jobs:
            job.token_last_s = now_s
            if self._admission is not None:
                self._admission.last_token(now_s, job.index, self._batch.steps)
            self._room += job.prompt_tokens + job.output_tokens
            self._open -= 1
            self._ended(job)

    def _admission_of(self) -> Admission:
        assert self._admission is not None
        return self._admission

    def _cache_of(self) -> Cache:
        assert self._cache is not None
        return self._cache

"""What is on its way to one worker: its loads, haul by haul, and which of them is stopped.

Theory of operation
-------------------
A load is a few hauls, one after the other: each store's bytes into host memory, then everything into the GPU. While the
first of them is on its way, or waits for its line, the load may be stopped: the chunks that have arrived are kept, the
GPU computes the rest, and the line is free for the next one. The admission decides that whenever the GPU has no prompt
to compute (`stop_one`). Not stopped are a load whose last bytes come from host memory behind a store, which takes
little; one beside whose layers the GPU computes already; the back of a split; a piece that measures its line; and none
of a policy that always loads.

With `overlap` the rest of a prompt is computed while later layers are still on their way (reports/breakeven.py has the
law): the request is ready so early that the GPU never waits for a layer, if its rest is computed alone and in one step;
in company it takes longer, and the layers are there all the sooner.

Who holds: a request holds its leases from `find` to the end of its last haul. Who announces: the haul's end. Who
frees: `Cache.release`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.admission import Link, Offer, Reason
from kvcore.reports.prefill import prefill_terms
from kvcore.reports.serving.admit import Admission, OnItsWay
from kvcore.reports.serving.cache import Cache, Choice
from kvcore.reports.serving.gpu import Batch
from kvcore.reports.serving.job import Job
from kvcore.reports.serving.link import After, Haul, Line
from kvcore.reports.serving.setting import Policy, Setting

STOPPED = "loading stopped"


class Stopped(NamedTuple):
    """Of a load that was stopped: tokens that are computed after all; `complete`: nothing more is to be hauled."""

    job: Job
    tokens: int
    complete: bool


class Loads:
    """See the module text. `ready(now_s, job)`: it has what it loads and could be computed."""

    def __init__(
        self,
        setting: Setting,
        cache: Cache,
        lines: Sequence[Line],
        admission: Admission,
        after: After,
        ready: Callable[[float, Job], None],
    ) -> None:
        self._stops = setting.policy is not Policy.ALWAYS
        self._overlaps = setting.overlap
        self._terms = prefill_terms(setting.model, setting.host)
        self._layers = setting.model.layers
        self._cache = cache
        self._lines = lines
        self._admission = admission
        self._after = after
        self._ready = ready
        self._first: dict[int, Job] = {}  # whose first haul is on its way, or waits

    def begin(self, now_s: float, job: Job, choice: Choice) -> None:
        """Bring what the choice hauls; it has been taken."""
        job.loading = True
        job.hit_tokens = choice.offer.tokens - job.front
        job.choice = choice
        job.hauls = list(reversed(choice.offer.hauls))
        job.loaded_bytes = job.hauls[0][1]
        depth = job.hauls[-1][0]
        plain = not job.front and (depth or not self._overlaps)
        if self._stops and plain and job.decision != Reason.PROBE.value:
            self._first[job.index] = job
        self._haul(now_s, job)

    def _haul(self, now_s: float, job: Job) -> None:
        """The next haul: stores first, then from host memory to the GPU."""
        depth, size = job.hauls.pop()

        def began(haul: Haul) -> None:
            if not depth and self._overlaps and not job.front:
                self._overlap(haul, job)

        line = self._lines[depth]
        job.haul = line.haul(now_s, size, job.hit_tokens, began, lambda now_s: self._hauled(now_s, job, depth))

    def _overlap(self, haul: Haul, job: Job) -> None:
        """Ready before all layers are there (module text)."""
        rest_s = self._terms.seconds(job.prompt_tokens - job.hit_tokens, job.hit_tokens)
        wait_s = haul.end_s - haul.free_s
        first_s = haul.begin_s + wait_s + (haul.free_s - haul.begin_s) / self._layers
        ready_s = max(first_s, haul.end_s - rest_s * (1 - 1 / self._layers))
        job.loading = False
        self._after(min(ready_s, haul.end_s), lambda now_s: self._ready(now_s, job))

    def _hauled(self, now_s: float, job: Job, depth: int) -> None:
        held = job.held
        assert held is not None
        self._first.pop(job.index, None)
        if depth:
            self._cache.arrived(held, depth)
            self._haul(now_s, job)
            return
        self._cache.release(held)
        if job.loading:
            job.loading = False
            if not job.todo and job.at == job.front:  # a front that is still being computed makes it ready itself
                self._ready(now_s, job)

    # Stopping

    def stop_one(self, now_s: float, batch: Batch) -> Stopped | None:
        """Stop the load that it pays most to stop, if any; the GPU has no prompt to compute."""
        if not self._first:
            return None
        links = [line.measured(now_s) for line in self._lines]
        seen = [self._seen(now_s, job, links) for job in self._first.values() if self._stoppable(job)]
        best = self._admission.best_stop(now_s, seen, links, batch)
        return None if best is None else self._stop(now_s, self._first.pop(best.job_index), best)

    def _stoppable(self, job: Job) -> bool:
        assert job.choice is not None
        assert job.haul is not None
        return self._lines[job.choice.offer.hauls[0][0]].stoppable(job.haul)

    def _seen(self, now_s: float, job: Job, links: Sequence[Link]) -> OnItsWay:
        choice, haul, held = job.choice, job.haul, job.held
        assert choice is not None
        assert haul is not None
        assert held is not None
        (depth, size), *later = choice.offer.hauls
        line = self._lines[depth]
        share = min(line.arrived_share(now_s, haul), 1.0)
        left = Offer(choice.offer.tokens, ((depth, max(1, int(size * (1 - share)))), *later))
        part = self._cache.part(held, depth, share)
        waited_s, link = now_s - job.arrival_s, line.seen_by(now_s, haul, links[depth])
        return OnItsWay(job.index, depth, job.prompt_tokens, waited_s, share, left, part, link)

    def _stop(self, now_s: float, job: Job, seen: OnItsWay) -> Stopped:
        held, haul, part = job.held, job.haul, seen.part
        assert held is not None
        assert haul is not None
        size = int(haul.size * seen.share) if seen.depth else self._cache.bytes_of(held, part)
        more_tokens = job.hit_tokens - part.offer.tokens
        self._lines[seen.depth].stop(now_s, haul, size)
        self._cache.stop(held, seen.depth, seen.share)
        if part.offer.hauls:
            taken = self._cache.take(held, part)
            assert taken, "nothing is staged for what is in host memory"
            self.begin(now_s, job, part)
            return Stopped(job, more_tokens, False)
        self._cache.release(held)
        job.loading = False
        job.hit_tokens, job.loaded_bytes = part.offer.tokens, size
        return Stopped(job, more_tokens, True)

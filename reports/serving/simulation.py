"""Replay a trace through workers with the production cache: `simulate`.

Theory of operation
-------------------
An event is a time and a call; a heap orders them, ties in the order in which they were made. Arrivals come from the
trace, everything else from the workers (serving/worker.py). Nothing waits, nothing runs beside, so a plain loop does
what the simulation's own event loop (kvcore.sim) would, in a tenth of its time: coroutines pay where code under test
has them, and the parts of the core that decide here are pure.

What decides, and is the product's code: kvcore.l1 (with leases, room, allocator over kvcore.memory.VirtualArena),
kvcore.eviction (LRU, S3-FIFO), kvcore.groups and kvcore.planner, kvcore.admission. What is a model of its own: the
engine's steps, the lines, the router, and what a copy costs.

The run ends when every request has ended; its duration counts from the first arrival to the last token. A request that
does not fit into the GPUs' memory at all fails on arrival and is counted as failed.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from kvcore.errors import ConfigError
from kvcore.groups import CacheLayout
from kvcore.l1 import L1Cache
from kvcore.memory import VirtualArena
from kvcore.reports.serving.cache import Cache, Held, Keys
from kvcore.reports.serving.eviction import Future, policy_factory
from kvcore.reports.serving.job import Job
from kvcore.reports.serving.layout import TraceKeys, layout_of
from kvcore.reports.serving.link import Line
from kvcore.reports.serving.result import LinkUse, Record, ServingResult
from kvcore.reports.serving.router import Dispatcher, Presence
from kvcore.reports.serving.setting import CacheTier, Eviction, Policy, Router, Setting
from kvcore.reports.serving.worker import Worker
from kvcore.reports.slo import Ending
from kvcore.reports.traces.trace import Trace

NOTES = (
    "writing into the cache takes no time on any line, and requests keep their room in the GPU from admission to end",
    "a request is looked up when the engine admits it, and only whole chunks of prompts are cached",
)


def simulate(trace: Trace, setting: Setting) -> ServingResult:
    """Serve the whole trace. The same arguments give the same result on every machine."""
    return _Run(trace, setting).run()


class _Run:
    """One simulation. Events are (time, serial, call)."""

    def __init__(self, trace: Trace, setting: Setting) -> None:
        if not trace.requests:
            raise ConfigError(f"the trace {trace.name} holds no requests: there is nothing to serve")
        self._trace = trace
        self._setting = setting
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._ended: list[Job] = []
        self._failed: list[Job] = []
        self._l1s: list[L1Cache] = []
        self._lines: list[list[Line]] = [[] for _ in setting.tiers]
        cached = setting.policy is not Policy.NEVER
        self._layout = layout_of(setting.model, setting.host, trace.block_tokens)
        self._keys = TraceKeys(trace, self._layout, setting.model.name) if cached else None
        self._future = Future(trace) if cached and setting.eviction is Eviction.BELADY else None
        prefix = cached and setting.router is Router.PREFIX and setting.workers > 1
        self._presence = Presence() if prefix else None
        self._dispatcher = Dispatcher(setting.router, setting.workers, trace.block_tokens, self._presence)
        shared = [self._place(tier) if cached and tier.shared else None for tier in setting.tiers]
        self._workers = [self._worker(number, shared) for number in range(setting.workers)]

    # Making

    def _worker(self, number: int, shared: list[tuple[L1Cache, Line] | None]) -> Worker:
        if self._keys is None:
            return Worker(self._setting, None, (), self._after, self._ended.append, self._deciding)
        places = [
            known or self._place(tier, number if not at else None)
            for at, (known, tier) in enumerate(zip(shared, self._setting.tiers))
        ]
        caches = [cache for cache, _ in places]
        lines = [line for _, line in places]
        cache = Cache(self._layout, caches[0], caches[1:])
        return Worker(self._setting, cache, lines, self._after, self._ended.append, self._deciding)

    def _place(self, tier: CacheTier, l1_of: int | None = None) -> tuple[L1Cache, Line]:
        """A cache and the line it is loaded over. `l1_of`: it is this worker's host memory."""
        setting, first = self._setting, l1_of is not None
        observer = self._presence.of(l1_of) if self._presence is not None and l1_of is not None else None
        _check_capacity(tier, self._layout)
        cache = L1Cache(
            VirtualArena(tier.capacity_bytes), policy_factory(setting.eviction, self._future), observer=observer
        )
        tokens = setting.block_tokens if first else self._trace.block_tokens
        lookup_s = setting.lookup_s if first else 0.0
        line = Line(tier.tier, setting.model, setting.host, self._after, tokens, lookup_s)
        self._l1s.append(cache)
        self._lines[setting.tiers.index(tier)].append(line)
        return cache, line

    # Running

    def run(self) -> ServingResult:
        requests, load = self._trace.requests, self._setting.load
        events = self._events
        at = 0
        next_s = requests[0].arrival_s / load
        while events or at < len(requests):
            if at < len(requests) and (not events or next_s <= events[0][0]):
                self._arrive(next_s, at)
                at += 1
                next_s = requests[at].arrival_s / load if at < len(requests) else 0.0
            else:
                now_s, _, call = heappop(events)
                call(now_s)
        assert len(self._ended) + len(self._failed) == len(requests), "a request was lost"
        return self._result()

    def _after(self, time_s: float, call: Callable[[float], None]) -> None:
        self._serial += 1
        heappush(self._events, (time_s, self._serial, call))

    def _arrive(self, now_s: float, index: int) -> None:
        request = self._trace.requests[index]
        keys: Keys = self._keys.of(request) if self._keys is not None else [()]
        held = Held(str(index), keys, request.input_tokens) if keys[0] else None
        job = Job(index, request, now_s, held)
        if request.input_tokens + request.output_tokens > self._setting.room_tokens:
            self._failed.append(job)
            return
        pending = [worker.pending_tokens for worker in self._workers]
        job.worker = self._dispatcher.route(request.input_tokens, keys[0], pending)
        self._workers[job.worker].arrive(now_s, job)

    def _deciding(self, job: Job) -> None:
        if self._future is not None:
            self._future.at = max(self._future.at, job.index)

    # Telling

    def _result(self) -> ServingResult:
        begin_s = self._trace.requests[0].arrival_s / self._setting.load
        last_s = max((job.token_last_s or 0.0 for job in self._ended), default=begin_s)
        duration_s = max(last_s - begin_s, 1e-9)
        records = [self._record(job) for job in sorted(self._ended + self._failed, key=lambda job: job.index)]
        busy = sum(worker.busy_s for worker in self._workers) / duration_s / len(self._workers)
        return ServingResult(
            setting=self._setting,
            trace=self._trace.name,
            notes=(*self._trace.notes, *NOTES),
            records=tuple(records),
            duration_s=duration_s,
            gpu_busy=busy,
            links=tuple(_use(lines, duration_s) for lines in self._lines if lines),
            evictions=sum(cache.statistics().evictions for cache in self._l1s),
            steps=sum(worker.steps for worker in self._workers),
        )

    def _record(self, job: Job) -> Record:
        first_s, last_s = job.token_first_s, job.token_last_s
        ttft_s = e2e_s = tpot_s = None
        if first_s is not None and last_s is not None:
            fixed_s = self._setting.host.request_s - job.arrival_s
            ttft_s, e2e_s = first_s + fixed_s, last_s + fixed_s
            tpot_s = (last_s - first_s) / max(job.output_tokens - 1, 1)
        return Record(
            arrival_s=job.arrival_s,
            worker=job.worker,
            input_tokens=job.prompt_tokens,
            output_tokens=job.output_tokens,
            found_tokens=job.found_tokens,
            hit_tokens=job.hit_tokens,
            computed_tokens=job.prompt_tokens - job.hit_tokens if first_s is not None else 0,
            loaded_bytes=job.loaded_bytes,
            decision=job.decision,
            ending=Ending.FAILED if first_s is None else Ending.COMPLETED,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=e2e_s,
        )


def _use(lines: list[Line], duration_s: float) -> LinkUse:
    busy = sum(line.busy_s for line in lines) / duration_s / len(lines)
    return LinkUse(lines[0].name, sum(line.loads for line in lines), sum(line.loaded_bytes for line in lines), busy)


def _check_capacity(tier: CacheTier, layout: CacheLayout) -> None:
    chunk_bytes = sum(layout.cell_bytes_rows)
    if tier.capacity_bytes < chunk_bytes:
        raise ConfigError(
            f"{tier.tier.name} of {tier.capacity_bytes:,} bytes cannot hold one chunk of {layout.chunk_tokens} tokens "
            f"({chunk_bytes:,} bytes): give it more memory, or leave it out"
        )

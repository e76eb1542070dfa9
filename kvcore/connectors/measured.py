"""`LoadIfItPays`: the admission's decision (`kvcore.admission`) from what one scheduler side has measured.

Theory of operation
-------------------
Everything comes from the calls of the engine and from the workers' reports; no parameter of a model or a machine does.

    steps     `step_begins` .. `step_ended`, less what overlaps with the step before: seconds of a step against the
              tokens and the pairs of query and key of its prompts. A step that waited for loads of its own is no sample
    loads     timed by the workers, those that had the way for themselves: seconds against bytes, from the cache's
              memory into the engine's pages, with what the servers and the device need around it
    lookups   from the question that began one to the question that got its answer: seconds against the bytes that were
              found. What lies in a store is brought into the cache's memory during the lookup, so the rate of the
              stores is in it, and so is the engine's own pace of asking: a request pays for both
    queues    requests that wait, prompts that are being computed, sequences that decode, bytes that are being loaded;
              arrivals per second and busy shares
    objective where the operator has told one: how near the sequences that decode are to missing it

Three questions. `worth_asking` before the lookup: would loading be cheaper than computing, if everything were found and
it took as long as such lookups do? While it runs: is waiting on cheaper than computing what has not arrived yet, by the
share of its time that is left? `length`, when it is over: is loading what was found cheaper than computing it?
A lookup that is late is taken to last as long again as it is late (Lindy's law), so one that hangs in a slow store is
waited for until about when computing would have been the better choice, and costs at most about twice the better one.
Then it is hurried: `length` decides about what has arrived. Its seconds are no sample, as its end was not its own; how
long such lookups take by now is learnt from those that are waited for all the same (below).

A decision compares the whole found prefix with nothing. Pieces are loaded only to measure a way that nothing went over
for long (`kvcore.admission`): every PROBE_AFTER-th lookup that was not worth its wait is waited for all the same, and
what it finds is loaded.

Who holds: numbers, by request id from `waits` to `gone`. Times are the clock's, as float seconds.

Rejected: timing loads on this side (it sees ends at steps only, so on a busy engine every load looks as slow as a
step); measuring whatever the GPU does (decode steps tell nothing about prompts); one line for lookup and load (they are
decided at different moments, and what the lookup took is spent by then).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.admission import (
    NOTHING,
    Decision,
    Gpu,
    Limits,
    Line,
    Link,
    Offer,
    Prompt,
    Queue,
    Reason,
    decide,
    pairs,
    stop_gain_s,
)
from kvcore.connectors.tracker import Phase, RequestTracker
from kvcore.connectors.views import LoadTimes, ScheduledRequest
from kvcore.groups import CacheLayout, GroupKind
from kvcore.meters import Backlog, LineMeter, PrefillMeter, ShareMeter, TailMeter
from kvcore.objective import Decodes
from kvcore.ports import Clock

_NS_PER_S = 1e9
_STEPS_MAX = 64
"""Steps that have begun and are not known to have ended. More: somebody does not tell; all are forgotten."""
_LOOKUP, _LOAD = 0, 1
_EVER = 1 << 62
_SAMPLES_MIN = 4
_NO_WAIT = Link(Line(0.0, 0.0))


@dataclass(slots=True)
class _Step:
    """`tokens`, `pairs`: of its prompts. `firsts`: requests whose first token it brings."""

    begin_s: float
    tokens: int
    pairs: float
    firsts: list[str]
    sample: bool


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counters of decisions and of samples, and the rates they have given; None: not measured."""

    decided_load: int
    decided_compute: int
    lookups_unwanted: int  # not begun, or not waited for any longer
    steps_measured: int
    loads_measured: int
    lookups_measured: int
    prefill_token_s: float | None
    load_byte_s: float | None
    lookup_byte_s: float | None
    good_share: float | None  # of the last answers, by the objective; None: there is none


class _Way:
    """A meter that says nothing before it was told `_SAMPLES_MIN` times. The very first sample is a warm-up (threads,
    pages and connections are made) and is left out: one slow load must not close a way."""

    __slots__ = ("_meter", "_samples", "_warm")

    def __init__(self) -> None:
        self._meter = LineMeter()
        self._samples = 0
        self._warm = False

    def add(self, size: float, seconds: float) -> None:
        if not self._warm:
            self._warm = True
            return
        self._samples += 1
        self._meter.add(size, seconds)

    def begin_anew(self) -> None:
        """What was told so far is too old to count."""
        self._meter, self._samples = LineMeter(), 0

    @property
    def line(self) -> Line | None:
        return self._meter.line if self._samples >= _SAMPLES_MIN else None


class _Prompts:
    """Prompts that are still to be computed, by request (tokens, and the prefix they stand on), and their sum."""

    __slots__ = ("_parts", "work")

    def __init__(self) -> None:
        self._parts: dict[str, tuple[int, int]] = {}
        self.work = Backlog()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parts

    def put(self, request_id: str, tokens: int, prefix_tokens: int = 0) -> None:
        self.pop(request_id)
        self._parts[request_id] = (tokens, prefix_tokens)
        self.work.add(tokens, prefix_tokens)

    def pop(self, request_id: str) -> int | None:
        """Its tokens; None: it is not there."""
        part = self._parts.pop(request_id, None)
        if part is None:
            return None
        self.work.remove(*part)
        return part[0]


class LoadIfItPays:
    """See the module text. An `Admission`; one per scheduler side."""

    def __init__(self, layout: CacheLayout, clock: Clock, limits: Limits | None = None) -> None:
        self._layout = layout
        self._clock = clock
        self._limits = limits or Limits()
        self._recurrent = any(group.kind is GroupKind.RECURRENT for group in layout.groups)
        self._waiting = _Prompts()
        self._computing = _Prompts()
        self._came: dict[str, float] = {}  # until the first token
        self._decoding: dict[str, None] = {}
        self._decodes = None if self._limits.objective is None else Decodes(self._limits.objective)
        self._loading: dict[str, int] = {}  # bytes
        self._asked: dict[str, tuple[int, float]] = {}  # (generation, since when) of a pending lookup
        self._steps: deque[_Step] = deque()
        self._steps_ended = 0
        self._last_end_s = 0.0
        self._prefill, self._gpu_busy, self._gpu_rate = PrefillMeter(), ShareMeter(), ShareMeter()
        self._load, self._load_busy, self._load_rate = _Way(), ShareMeter(), ShareMeter()
        self._lookup, self._tail = _Way(), TailMeter()
        self._loads_refused = self._lookups_refused = 0  # in a row
        self._probing: dict[str, int] = {}  # generation whose lookup is waited for in any case
        self._counts: Counter[str] = Counter()

    def _now_s(self) -> float:
        return self._clock.now_ns() / _NS_PER_S

    # ------------------------------------------------------------------ requests

    def waits(self, request_id: str, tokens: int) -> None:
        if request_id in self._waiting:
            return
        self._waiting.put(request_id, tokens)
        now_s = self._now_s()
        if request_id not in self._came:
            self._came[request_id] = now_s
            self._gpu_rate.add(now_s, 1.0)

    def admitted(self, tracker: RequestTracker) -> None:
        assert tracker.phase in (Phase.LOADING, Phase.RUNNING), "it has its blocks"
        name, prefix = tracker.request_id, tracker.local_tokens
        tokens = self._waiting.pop(name) or len(tracker.tokens)
        self._asked.pop(name, None)
        if tracker.phase is Phase.LOADING:
            prefix += tracker.promised_tokens
            self._loading[name] = self._bytes(tracker.length, tracker.looked_up_tokens, tracker.local_tokens)
            self._load_rate.add(self._now_s(), 1.0)
        self._computing.put(name, max(tokens - prefix, 0), prefix)

    def loaded(self, request_id: str) -> None:
        self._loading.pop(request_id, None)

    def gone(self, request_id: str) -> None:
        self._waiting.pop(request_id)
        self._computing.pop(request_id)
        self._came.pop(request_id, None)
        self._decoding.pop(request_id, None)
        if self._decodes is not None:
            self._decodes.ended(request_id, self._now_s(), self._steps_ended)
        self._loading.pop(request_id, None)
        self._asked.pop(request_id, None)
        self._probing.pop(request_id, None)

    # ------------------------------------------------------------------ steps

    def step_begins(self, scheduled: Sequence[ScheduledRequest], loads: bool) -> None:
        step = _Step(self._now_s(), 0, 0.0, [], not loads)
        for each in scheduled:
            self._take_part(step, each)
        if len(self._steps) >= _STEPS_MAX:
            self._steps.clear()
        self._steps.append(step)

    def _take_part(self, step: _Step, part: ScheduledRequest) -> None:
        end, known = part.computed_tokens + part.scheduled_tokens, len(part.tokens)
        if part.request_id in self._decoding or part.scheduled_tokens < 1:
            return
        step.tokens += part.scheduled_tokens
        step.pairs += pairs(part.scheduled_tokens, part.computed_tokens)
        if end < known:
            self._computing.put(part.request_id, known - end, end)
            return
        self._computing.pop(part.request_id)
        self._decoding[part.request_id] = None
        step.firsts.append(part.request_id)

    def step_empty(self) -> None:
        self._steps.pop()

    def step_ended(self) -> None:
        if not self._steps:
            return
        now_s = self._now_s()
        step = self._steps.popleft()
        assert step.tokens > 0 or not step.firsts, "a first token comes from a prompt"
        seconds = now_s - max(step.begin_s, self._last_end_s)
        self._last_end_s = max(now_s, self._last_end_s)
        self._steps_ended += 1
        for name in step.firsts:
            if (came_s := self._came.pop(name, None)) is not None:
                self._first_token(name, now_s, max(now_s - came_s, 0.0))
        if step.tokens and step.sample and seconds > 0:
            self._counts["steps"] += 1
            self._prefill.add(step.tokens, step.pairs, seconds)
            self._gpu_busy.add(now_s, seconds)

    def _first_token(self, name: str, now_s: float, seconds: float) -> None:
        self._tail.add(seconds)
        if self._decodes is not None:
            self._decodes.began(name, now_s, seconds, self._steps_ended)

    # ------------------------------------------------------------------ loads and lookups

    def measured(self, loads: LoadTimes) -> None:
        if loads.count and loads.size:
            seconds = loads.ns / _NS_PER_S
            self._counts["loads"] += loads.count
            self._load.add(loads.size / loads.count, seconds / loads.count)
            self._load_busy.add(self._now_s(), seconds)

    def asks(self, tracker: RequestTracker) -> None:
        self._asked[tracker.request_id] = (tracker.generation, self._now_s())

    def _lookup_over(self, tracker: RequestTracker) -> None:
        generation, begin_s = self._asked.pop(tracker.request_id, (0, 0.0))
        size = self._bytes(tracker.length, tracker.looked_up_tokens, tracker.skip_chunks * self._layout.chunk_tokens)
        if generation == tracker.generation and size:
            self._counts["lookups"] += 1
            self._lookups_refused = 0
            self._lookup.add(size, max(self._now_s() - begin_s, 0.0))

    def _bytes(self, length: int, tokens: int, local_tokens: int) -> int:
        """On one rank, of what `length` chunks need beyond the engine's own."""
        rows = self._layout.unfold(length, tokens, local_tokens // self._layout.chunk_tokens)
        groups = range(len(self._layout.groups))
        return sum(self._layout.cell_bytes(group) * rows[group].bit_count() for group in groups)

    # ------------------------------------------------------------------ decisions

    def worth_asking(self, tracker: RequestTracker, tokens: int, local_tokens: int) -> bool:
        if self._probing.get(tracker.request_id) == tracker.generation:
            return True
        length = self._longest(tokens)
        generation, begin_s = self._asked.get(tracker.request_id, (None, 0.0))
        if generation == tracker.generation:
            worth = self._goes_on(tracker, length, tokens, local_tokens, self._now_s() - begin_s)
        else:
            worth = self._begins(tracker, length, tokens, local_tokens)
        if not worth:
            self._counts["unwanted"] += 1
            self._lookups_refused += 1
            self._asked.pop(tracker.request_id, None)
        return worth

    def _begins(self, tracker: RequestTracker, length: int, tokens: int, local_tokens: int) -> bool:
        line, size = self._lookup.line, self._bytes(length, tokens, local_tokens)
        wait = Link(None if line is None else Line(line.seconds(size), 0.0), idle_offers=self._lookups_refused)
        decision = self._decide_on(tracker, length, tokens, local_tokens, wait)
        if decision.reason is Reason.PROBE:
            self._probing[tracker.request_id] = tracker.generation
            self._lookups_refused = 0
        return decision.reason not in (Reason.COMPUTE, Reason.FLOOR)

    def _goes_on(self, tracker: RequestTracker, length: int, tokens: int, local_tokens: int, waited_s: float) -> bool:
        """Is it worth waiting on for a lookup that runs since then? What has arrived would be kept."""
        line, found = self._lookup.line, self._layout.usable_tokens(length, tokens) - local_tokens
        if line is None or found <= 0:
            return True
        size = self._bytes(length, tokens, local_tokens)
        left_s = abs(line.seconds(size) - waited_s)
        share = waited_s / (waited_s + left_s) if waited_s else 0.0
        prompt, gpu, links = self._prospect(tracker, tokens, local_tokens, Link(Line(left_s, 0.0)))
        going = Offer(found, ((_LOOKUP, 1), (_LOAD, size)))
        arrived = Offer(int(share * found), ((_LOAD, int(share * size)),))
        stopped = arrived if arrived.tokens >= max(self._limits.floor_tokens, 1) else NOTHING
        return stop_gain_s(prompt, going, stopped, gpu, links, self._limits) <= 0

    def _longest(self, tokens: int) -> int:
        """Chunks that a lookup could find: a whole prompt only where no state already contains its last token."""
        length = tokens // self._layout.chunk_tokens
        return length - (length * self._layout.chunk_tokens == tokens and self._recurrent)

    def length(self, tracker: RequestTracker, local_tokens: int) -> int:
        self._lookup_over(tracker)
        found = tracker.length
        decision = self._decide_on(tracker, found, tracker.looked_up_tokens, local_tokens, _NO_WAIT)
        if decision.reason is Reason.NOTHING:
            return found
        if decision.reason is Reason.PROBE:
            self._load.begin_anew()  # what it was, long ago, must not outvote what it is
        self._counts["load" if decision.tokens else "compute"] += 1
        self._loads_refused = 0 if decision.tokens else self._loads_refused + 1
        return self._nearest(tracker, decision.tokens + local_tokens, local_tokens) if decision.tokens else 0

    def _nearest(self, tracker: RequestTracker, wanted_tokens: int, local_tokens: int) -> int:
        """The greatest servable length within so many tokens; where there is none, the shortest that brings any."""
        shortest = 0
        for length in range(tracker.length, 0, -1):
            if not tracker.lengths >> length & 1:
                continue
            tokens = self._layout.usable_tokens(length, tracker.looked_up_tokens)
            if tokens <= local_tokens:
                break
            if tokens <= wanted_tokens:
                return length
            shortest = length
        assert shortest, "something that brings tokens was found"
        return shortest

    def _decide_on(self, tracker: RequestTracker, length: int, tokens: int, local_tokens: int, wait: Link) -> Decision:
        """Is it worth `wait` and a load to get `length` chunks?"""
        found = self._layout.usable_tokens(length, tokens) - local_tokens
        if found <= 0:
            return decide(Prompt(1), (), Gpu(None), (), self._limits)
        assert found < tokens - local_tokens, "at least one token is computed"
        offer = Offer(found, ((_LOOKUP, 1), (_LOAD, self._bytes(length, tokens, local_tokens))))
        prompt, gpu, links = self._prospect(tracker, tokens, local_tokens, wait)
        return decide(prompt, (offer,), gpu, links, self._limits)

    def _prospect(
        self, tracker: RequestTracker, tokens: int, local_tokens: int, wait: Link
    ) -> tuple[Prompt, Gpu, tuple[Link, Link]]:
        """What a decision is made on: the prompt, the GPU, and the ways of lookup and load."""
        now_s = self._now_s()
        came_s = self._came.get(tracker.request_id, now_s)
        prompt = Prompt(tokens - local_tokens, max(now_s - came_s, 0.0), local_tokens)
        return prompt, self._gpu(tracker, tokens, now_s), (wait, self._link(tracker, now_s))

    def _gpu(self, tracker: RequestTracker, tokens: int, now_s: float) -> Gpu:
        prefill = self._prefill.prefill
        if prefill is None:
            return Gpu(None)
        ahead_s = self._computing.work.seconds(prefill)
        waiting = self._waiting.work
        own_s = prefill.seconds(tokens) if tracker.request_id in self._waiting else 0.0
        queue = Queue(
            waiting=waiting.requests - (tracker.request_id in self._waiting),
            running=len(self._decoding),
            work_s=ahead_s + max(waiting.seconds(prefill) - own_s, 0.0),
            rate=self._gpu_rate.per_second(now_s),
            busy=self._gpu_busy.per_second(now_s),
        )
        if (decodes := self._decodes) is None:
            return Gpu(prefill, queue, ahead_s, self._tail.tail_s)
        slacks_s = decodes.slacks_s(now_s, self._steps_ended)
        return Gpu(prefill, queue, ahead_s, self._tail.tail_s, 1, slacks_s, decodes.good_share, decodes.limit_s)

    def _link(self, tracker: RequestTracker, now_s: float) -> Link:
        line = self._load.line
        probing = self._probing.get(tracker.request_id) == tracker.generation
        if line is None:
            return Link(None, hauls=len(self._loading))
        queue = Queue(
            work_s=line.byte_s * sum(self._loading.values()),
            rate=self._load_rate.per_second(now_s),
            busy=self._load_busy.per_second(now_s),
        )
        return Link(line, queue, len(self._loading), _EVER if probing else self._loads_refused)

    def statistics(self) -> AdmissionStatistics:
        counts, prefill = self._counts, self._prefill.prefill
        load, lookup = self._load.line, self._lookup.line
        return AdmissionStatistics(
            counts["load"],
            counts["compute"],
            counts["unwanted"],
            counts["steps"],
            counts["loads"],
            counts["lookups"],
            None if prefill is None else prefill.token_s,
            None if load is None else load.byte_s,
            None if lookup is None else lookup.byte_s,
            None if self._decodes is None else self._decodes.good_share,
        )

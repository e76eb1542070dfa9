"""The scheduler side of a connector, engine-neutral: what to promise, what to load, what to store.

Theory of operation
-------------------
What is known of one request, and which moves it may make, is the pure `RequestTracker`; this is the shell around it
that talks to the servers and fills the workers' plans.

    matched_tokens   1. hash the known tokens (prompt + generated), start a lookup, answer None
                     2. lookup fixed: the servable length that the admission promises -> tokens beyond the local prefix
    after_alloc      3. settle on that length (the rest of the leases goes back at once), plan the load
    build_meta       4. plan the stores of chunks that this step completes
    update_output    5. loads ended: the leases go back; good -> may be stored from; bad -> the verdict is forgotten
    preempted        6. end the generation: leases back, block ids forgotten, store position restarts
    finished         7. last stores, session ended; hold the blocks while workers may read them

The hit contract: 0 <= promised <= n - 1 - local. Asking has no effect that a second question sees: the answer is
computed from the generation's fixed set of lengths. A question in a later phase means that the engine gave up the
attempt (failed load), so it opens a new generation; after `load_failures_max` failed loads the request is computed
without the cache. Two exceptions: while an asynchronous load runs the answer is None (its blocks are being written),
and after one that ended well it is 0 (it is not loaded a second time).

How much of what was found is promised is the admission's to say (`admission.py`), once per generation; the rest goes
back at once. It may also find a lookup not worth its time: before it begins, then nothing is promised in this
generation; or while it runs, then it is hurried, and what has arrived by then is what was found. The answer is taken at
the engine's next question; if it is not there, nothing is promised. The engine, asked to compute, is not told why.

A lookup is made with the local prefix of that moment (`skip_chunks`): nothing the engine has is prefetched. If the
local prefix has shrunk, or the tokens have changed, when the answer is used, the lookup is made again.

Stores name only tokens that are computed when the step has run, never the slot of the token it samples. A request that
loads synchronously in a step stores nothing in that step, nor does one that was admitted in it and stands on blocks
that are being loaded, for another request or by another connector: the forward pass may run over a failed load, on this
rank or on another, and only the next `update_output` tells.

Request ids are the client's and may come back at once. Sessions and generations are ours and do not, and everything
that outlives a step is named by them - except the engine's own report that a load has ended. An id whose load still
runs when the request is aborted is therefore an *orphan*: until that report has come, a new request of that name is
computed without the cache, so that the old load's report cannot end the new one's.

Who holds: trackers hold no memory; leases are the servers', blocks the engine's. Who announces: the client (lookup),
`update_output` (loads), the workers' `sent` (stores of ended requests). Who frees: this class, by
`client.settle/release/end`, on every path, each generation exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from kvcore.connectors.admission import Admission, LoadAll
from kvcore.connectors.cells import blocks_of_tokens
from kvcore.connectors.plan import CellBlocks, EndedRequest, LoadPlan, StepMeta, StorePlan
from kvcore.connectors.tracker import Phase, RequestTracker
from kvcore.connectors.views import NULL_BLOCK, BlockTable, Finished, RequestView, ScheduledRequest, StepView
from kvcore.errors import CallerError
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher
from kvcore.lookup import NOTHING, LookupOutcome
from kvcore.runtime.confined import LoopConfined
from kvcore.service.client import SchedulerClient

_ID_CHARS_MAX = 128
"""Of a request id, in a session name: for people who read logs. The number behind it makes the name unique."""


@dataclass(frozen=True, slots=True)
class SchedulerConnectorConfig:
    """`session_prefix` keeps two engines on one server apart.

    `steps_end_with_reports` False: the adapter calls `step_ended` itself, because reports come late or not at all.
    """

    load_async: bool = False
    load_failures_max: int = 2
    session_prefix: str = ""
    steps_end_with_reports: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerConnectorStatistics:
    """Counters grow; `requests_open`, `loads_open` and `orphans` are of now. Tokens are counted once per admission."""

    requests: int
    requests_open: int
    lookups: int
    tokens_queried: int  # beyond the engine's own prefix, of admitted requests whose lookup had an answer
    tokens_hit: int  # of these, promised and taken
    tokens_refused: int  # found, and computed because the admission would rather have it so
    lookups_unwanted: int  # not begun, or given up, as not worth their time
    lookups_hurried: int  # not waited for any longer: what was there by then was taken, or they were given up
    loads_planned: int
    loads_open: int
    cells_load_planned: int
    cells_store_planned: int
    generations: int
    load_failures: int
    resumes_with_load: int
    orphans: int


class SchedulerConnector:
    """See the module text. Loop-confined; one per engine scheduler."""

    def __init__(
        self,
        layout: CacheLayout,
        hasher: ChunkHasher,
        client: SchedulerClient,
        config: SchedulerConnectorConfig | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._layout = layout
        self._hasher = hasher
        self._client = client
        self._config = config or SchedulerConnectorConfig()
        self.admission: Admission = admission if admission is not None else LoadAll()
        self._trackers: dict[str, RequestTracker] = {}
        self._unconfirmed: dict[str, RequestTracker] = {}  # with loads that not every rank has reported
        self._orphans: dict[str, None] = {}
        # for the next step
        self._loads: dict[str, LoadPlan] = {}
        self._stores: list[StorePlan] = []
        self._ended: list[EndedRequest] = []
        self._given_up: list[int] = []
        self._admitted: dict[str, None] = {}
        self._sessions = 0
        self._generation = 0
        self._counts: Counter[str] = Counter()
        self._confined = LoopConfined()

    # ------------------------------------------------------------------ asking

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        """See `kvcore.connectors.interface.SchedulerSide`. Never blocks; sends at most one lookup per generation."""
        self._confined.check()
        if local_tokens < 0:
            raise CallerError(f"{request.request_id}: local_tokens must not be negative: {local_tokens}")
        tracker = self._trackers.get(request.request_id) or self._new_tracker(request)
        if tracker.phase is Phase.LOADING and self._config.load_async:
            return None, False
        if tracker.has_delivered(local_tokens):
            return 0, False
        if not tracker.answers(len(request.tokens), local_tokens):
            self._new_generation(tracker)
        if not (request.reads_cache and self._worth_asking(tracker, len(request.tokens), local_tokens)):
            return 0, False
        self.admission.waits(request.request_id, len(request.tokens))
        if tracker.phase is Phase.IDLE:
            self._start_lookup(tracker, request, local_tokens)
        if tracker.phase is Phase.LOOKING:
            self._poll(tracker, local_tokens)
        if tracker.phase is Phase.LOOKING:
            return None, False
        tokens = tracker.promise(local_tokens)
        return tokens, tokens > 0 and self._config.load_async

    def _worth_asking(self, tracker: RequestTracker, tokens: int, local_tokens: int) -> bool:
        if tracker.load_failures >= self._config.load_failures_max or tracker.request_id in self._orphans:
            return False
        return self._layout.usable_tokens(tokens // self._layout.chunk_tokens, tokens) > local_tokens

    def _start_lookup(self, tracker: RequestTracker, request: RequestView, local_tokens: int) -> None:
        wanted = self.admission.worth_asking(tracker, len(request.tokens), local_tokens)
        tracker.look(request.tokens, local_tokens)
        if not wanted:
            tracker.leased = False  # no server was asked
            self._refuse_lookup(tracker)
            return
        self._hash(tracker)
        self._counts["lookups"] += 1
        self.admission.asks(tracker)
        self._client.start(
            tracker.session,
            tracker.generation,
            tracker.hashes[: len(tracker.tokens) // self._layout.chunk_tokens],
            prompt_tokens=tracker.looked_up_tokens,
            skip_chunks=tracker.skip_chunks,
            salt=tracker.cache_salt,
        )

    def _poll(self, tracker: RequestTracker, local_tokens: int) -> None:
        outcome = self._client.poll(tracker.session, tracker.generation)
        if outcome is None and tracker.hurried:
            self._refuse_lookup(tracker)  # a server that does not even tell what it has
            return
        if outcome is None and not self.admission.worth_asking(tracker, tracker.looked_up_tokens, local_tokens):
            outcome = self._hurry(tracker)
        if outcome is not None:
            tracker.fix(outcome.lengths)
            self._choose(tracker, local_tokens)

    def _hurry(self, tracker: RequestTracker) -> LookupOutcome | None:
        """Waiting does not pay any more; what has arrived may. The next question gets the answer, or gives it up."""
        tracker.hurried = True
        self._counts["lookups_hurried"] += 1
        self._client.hurry(tracker.session, tracker.generation)
        return self._client.poll(tracker.session, tracker.generation)

    def _choose(self, tracker: RequestTracker, local_tokens: int) -> None:
        """What was found and is not promised goes back at once: others may want the room."""
        found, length = tracker.length, self.admission.length(tracker, local_tokens)
        if length == found:
            return
        tracker.choose(length)
        self._counts["tokens_refused"] += (found - length) * self._layout.chunk_tokens
        if length:
            self._client.settle(tracker.session, tracker.generation, length)
        else:
            self._release(tracker)

    def _refuse_lookup(self, tracker: RequestTracker) -> None:
        """It is over, whatever it might have found."""
        tracker.fix(NOTHING)
        tracker.chosen = 0
        self._release(tracker)
        self._counts["lookups_unwanted"] += 1

    # ------------------------------------------------------------------ allocation

    def after_alloc(self, request: RequestView, blocks: BlockTable, external_tokens: int) -> None:
        """Take up the promise, or let it go. Raises `CallerError` if the engine takes what was not promised."""
        self._confined.check()
        request_id = request.request_id
        tracker = self._trackers.get(request_id)
        self._admitted[request_id] = None
        if tracker is None or tracker.phase in (Phase.LOADING, Phase.RUNNING):
            if external_tokens:
                raise CallerError(f"{request_id}: {external_tokens} tokens are to be loaded that nobody has asked for")
            return
        if tracker.phase is Phase.KNOWN:
            self._counts["tokens_queried"] += tracker.looked_up_tokens - tracker.local_tokens
        if external_tokens == 0:
            self._release(tracker)
            tracker.decline()
            self.admission.admitted(tracker)
            return
        if tracker.phase is not Phase.KNOWN or external_tokens != tracker.promised_tokens:
            raise CallerError(
                f"{request_id}: the engine takes {external_tokens} tokens, {tracker.promised_tokens} were promised"
            )
        self._client.settle(tracker.session, tracker.generation, tracker.length)
        self._plan_load(tracker, tracker.take_load(blocks))
        self.admission.admitted(tracker)

    def _plan_load(self, tracker: RequestTracker, cells: list[CellBlocks]) -> None:
        assert tracker.request_id not in self._loads, "one load per generation"
        self._unconfirmed[tracker.request_id] = tracker
        self._loads[tracker.request_id] = LoadPlan(
            tracker.request_id, tracker.session, tracker.generation, self._config.load_async, tuple(cells)
        )
        self._counts["tokens_hit"] += tracker.promised_tokens
        self._counts["loads_planned"] += 1
        self._counts["cells_load_planned"] += len(cells)
        self._counts["resumes_with_load"] += tracker.resumed

    # ------------------------------------------------------------------ the step

    def build_meta(self, step: StepView) -> StepMeta:
        """Plan this step's stores and hand over everything that was planned since the last step."""
        self._confined.check()
        loads = tuple(self._loads.values())
        loading = self._being_loaded(loads, step.scheduled)
        for scheduled in step.scheduled:
            self._take_step(scheduled, loading)
        self.admission.step_begins(step.scheduled, loads=any(not plan.load_async for plan in loads))
        meta = StepMeta(
            step.step,
            tuple(sorted(step.allocated)),
            loads,
            tuple(self._stores),
            tuple(self._ended),
            tuple(self._given_up),
        )
        self._loads, self._stores, self._ended, self._given_up, self._admitted = {}, [], [], [], {}
        return meta

    def _being_loaded(self, loads: Iterable[LoadPlan], scheduled: Iterable[ScheduledRequest]) -> frozenset[int]:
        """Blocks that this step's forward pass relies on, and of which only its report says whether it may."""
        ours = [cell.blocks for plan in loads if not plan.load_async for cell in plan.cells]
        others = [blocks_of_tokens(self._layout, each.blocks, each.brought) for each in scheduled if each.brought]
        return frozenset(chain.from_iterable([*ours, *others])) - {NULL_BLOCK}

    @property
    def idle(self) -> bool:
        """`build_meta` of a step without requests, and a report without content, would find nothing to do.

        All of it changes in the engine's calls alone, so the engine's thread may look while none of them runs.
        """
        planned = self._loads or self._stores or self._ended or self._given_up or self._admitted
        return not planned and not self._unconfirmed

    def _take_step(self, scheduled: ScheduledRequest, loading: frozenset[int]) -> None:
        request_id = scheduled.request_id
        tracker = self._trackers.get(request_id)
        if tracker is None:
            return
        if tracker.phase not in (Phase.LOADING, Phase.RUNNING):
            raise CallerError(f"{request_id} runs, but after_alloc() was not called for it")
        tracker.schedule(scheduled.computed_tokens, scheduled.scheduled_tokens, scheduled.tokens)
        if loading and request_id in self._admitted:
            tracker.watch(loading, scheduled.blocks)
        if not tracker.confirmed:
            self._unconfirmed[request_id] = tracker
        self._plan_stores(tracker, scheduled.blocks)

    def _plan_stores(self, tracker: RequestTracker, blocks: BlockTable) -> None:
        if tracker.chunks_due <= tracker.stored_chunks:
            return
        self._hash(tracker)
        cells = tracker.take_stores(blocks)
        if cells:
            self._stores.append(StorePlan(tracker.request_id, tracker.generation, tracker.cache_salt, tuple(cells)))
            self._counts["cells_store_planned"] += len(cells)

    def update_output(self, finished: Finished, error_blocks: frozenset[int]) -> None:
        """The workers' reports of one step, combined over ranks. Call it once per step, also when nothing is reported.

        Loads that end here: the asynchronous ones in `received`, and *all* synchronous ones. That holds because
        exactly one batch is in flight: every load handed over by `build_meta` belongs to the step whose output this
        is. An engine with overlapping batches must load asynchronously.
        """
        self._confined.check()
        if self._config.steps_end_with_reports:
            self.admission.step_ended()
        self.admission.measured(finished.loads)
        for tracker in list(self._unconfirmed.values()):
            tracker.note_errors(error_blocks)
            loading = tracker.phase is Phase.LOADING
            if loading and self._config.load_async and tracker.request_id not in finished.received:
                continue
            self._load_ended(tracker, tracker.request_id in finished.failed)
        for request_id in finished.received:
            self._orphans.pop(request_id, None)

    def _load_ended(self, tracker: RequestTracker, failed: bool) -> None:
        assert tracker.request_id not in self._loads, "a load ended that was not handed over"
        del self._unconfirmed[tracker.request_id]
        self.admission.loaded(tracker.request_id)
        self._release(tracker)  # what the load did not need: chunks that the engine had by then, parts of a failed one
        self._counts["load_failures"] += not tracker.end_load(failed)

    # ------------------------------------------------------------------ ends

    def preempted(self, request_id: str) -> None:
        """All blocks are lost; what a later step loads or stores belongs to a new generation."""
        self._confined.check()
        tracker = self._trackers.get(request_id)
        if tracker is not None:
            self.admission.gone(request_id)
            self._new_generation(tracker)

    def finished(self, request: RequestView, blocks: BlockTable) -> bool:
        """The last stores and the end of the session. True: workers may read the blocks until they report `sent`.

        Blocks of earlier generations are nobody's any more; the workers' fences protect what still reads them.
        What is stored is bounded by the steps that have run, not by `request.tokens`, whose last one has no KV.
        """
        self._confined.check()
        request_id = request.request_id
        tracker = self._trackers.pop(request_id, None)
        self.admission.gone(request_id)
        if tracker is None:
            return False
        if any(blocks):
            self._plan_stores(tracker, blocks)
        self._drop_load(tracker, hand_over=True)
        self._client.end(tracker.session)
        tracker.leased = False
        if tracker.stores_planned:
            self._ended.append(EndedRequest(request_id, tracker.generation))
        return tracker.stores_planned

    def _drop_load(self, tracker: RequestTracker, *, hand_over: bool) -> None:
        """The attempt ends while its load may be planned or running.

        An engine that takes back the blocks of an asynchronous load waits for its report first, so at the end of a
        request the load is handed over all the same: it finds no leases, and is reported.
        """
        self._unconfirmed.pop(tracker.request_id, None)
        if tracker.phase is not Phase.LOADING:
            return
        planned = self._loads.get(tracker.request_id)
        assert planned is None or planned.generation == tracker.generation
        if self._config.load_async and (planned is None or hand_over):
            self._orphans[tracker.request_id] = None
        elif planned is not None:
            del self._loads[tracker.request_id]

    def keys_changed(self) -> None:
        """The hasher makes other keys from here on. What was found under the old ones is given back, and asked anew.

        An attempt that holds blocks goes on, with KV of two lives: nothing more of it is stored.
        """
        self._confined.check()
        for tracker in self._trackers.values():
            tracker.outdated = True
            if tracker.phase not in (Phase.LOADING, Phase.RUNNING):
                self._new_generation(tracker)

    # ------------------------------------------------------------------ helpers

    def tracker(self, request_id: str) -> RequestTracker | None:
        """What is remembered of a request, to look at."""
        return self._trackers.get(request_id)

    def _new_tracker(self, request: RequestView) -> RequestTracker:
        self._sessions += 1
        self._counts["requests"] += 1
        session = f"{self._config.session_prefix}{request.request_id[:_ID_CHARS_MAX]}#{self._sessions}"
        tracker = RequestTracker(
            self._layout, request.request_id, session, self._take_generation(), request.cache_salt, request.extras
        )
        self._trackers[request.request_id] = tracker
        return tracker

    def _hash(self, tracker: RequestTracker) -> None:
        """Bring the hashes up to the known tokens. Tokens are only ever appended to."""
        if len(tracker.tokens) // self._layout.chunk_tokens > len(tracker.hashes):
            tracker.hashes = self._hasher.hash_tokens(tracker.tokens, known=tracker.hashes, extras=tracker.extras)

    def _take_generation(self) -> int:
        self._generation += 1
        self._counts["generations"] += 1
        return self._generation

    def _release(self, tracker: RequestTracker) -> None:
        if tracker.leased:
            tracker.leased = False
            self._client.release(tracker.session, tracker.generation)

    def _new_generation(self, tracker: RequestTracker) -> None:
        self._drop_load(tracker, hand_over=False)
        self._release(tracker)
        if tracker.stores_planned:
            self._given_up.append(tracker.generation)
        tracker.next_generation(self._take_generation())

    def statistics(self) -> SchedulerConnectorStatistics:
        now = {
            "requests_open": len(self._trackers),
            "loads_open": len(self._unconfirmed),
            "orphans": len(self._orphans),
        }
        names = SchedulerConnectorStatistics.__dataclass_fields__
        return SchedulerConnectorStatistics(**{name: now.get(name, self._counts[name]) for name in names})

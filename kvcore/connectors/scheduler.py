"""The scheduler side of a connector, engine-neutral: what to promise, what to load, what to store.

    matched_tokens   1. hash the known tokens (prompt + generated), start a lookup, answer None
                     2. lookup fixed: greatest servable length -> tokens beyond the local prefix
    after_alloc      3. settle on that length (the rest of the leases goes back at once), plan the load
    build_meta       4. plan the stores of chunks that this step completes
    update_output    5. loads ended: good -> may be stored from; bad -> the verdict is forgotten
    preempted        6. end the generation: leases back, block ids forgotten, store position restarts
    finished         7. last stores, session ended; hold the blocks while workers may read them

The hit contract: 0 <= promised <= n - 1 - local. Asking has no effect that a second question sees: the answer is
computed from the generation's fixed set of lengths. A question in a later phase means that the engine gave up the
attempt (failed load), so it opens a new generation; after `load_failures_max` failed loads the request is computed
without the cache.

A lookup is made with the local prefix of that moment (`skip_chunks`): nothing the engine has is prefetched. If the
local prefix has shrunk when the answer is used, the answer does not hold, and the lookup is made again.

Stores name only tokens that are computed when the step has run, never the slot of the token it samples. A request that
loads synchronously in a step stores nothing in that step: the forward pass may have run over a failed load, on this
rank or on another, and only the next `update_output` tells.

Who holds: trackers hold no memory; leases are the servers', blocks the engine's. Who frees: this class, by
`client.settle/release/end`, on every path, each generation exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.connectors.plan import LoadPlan, StepMeta, StorePlan
from kvcore.connectors.tracker import Phase, RequestTracker, load_cells, store_cells
from kvcore.connectors.views import BlockTable, Finished, RequestView, ScheduledRequest, StepView
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher
from kvcore.service.client import SchedulerClient


@dataclass(frozen=True, slots=True)
class SchedulerConnectorConfig:
    """`session_prefix` keeps two engines on one server apart."""

    load_async: bool = False
    load_failures_max: int = 2
    session_prefix: str = ""


@dataclass(frozen=True, slots=True)
class SchedulerConnectorStatistics:
    requests: int
    lookups: int
    loads_planned: int
    cells_load_planned: int
    cells_store_planned: int
    generations: int
    load_failures: int
    resumes_with_load: int


class SchedulerConnector:
    """See the module text. Loop-confined; one per engine scheduler."""

    def __init__(
        self,
        layout: CacheLayout,
        hasher: ChunkHasher,
        client: SchedulerClient,
        config: SchedulerConnectorConfig | None = None,
    ) -> None:
        self._layout = layout
        self._hasher = hasher
        self._client = client
        self._config = config or SchedulerConnectorConfig()
        self._trackers: dict[str, RequestTracker] = {}
        self._loads: dict[str, LoadPlan] = {}
        self._stores: list[StorePlan] = []
        self._ended: list[str] = []
        self._sessions = 0
        self._generation = 0
        self._counts: dict[str, int] = dict.fromkeys(SchedulerConnectorStatistics.__dataclass_fields__, 0)

    # ------------------------------------------------------------------ asking

    def matched_tokens(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        """See `kvcore.ladder.connector.SchedulerSide`."""
        assert local_tokens >= 0
        tracker = self._tracker(request)
        if tracker.phase in (Phase.LOADING, Phase.RUNNING):
            self._new_generation(tracker)  # the engine gave this attempt up without a preemption: its load failed
        if not self._worth_asking(tracker, local_tokens):
            return 0, False
        if tracker.phase is not Phase.IDLE and local_tokens // self._layout.chunk_tokens < tracker.skip_chunks:
            self._new_generation(tracker)  # the local prefix this lookup relied on is gone
        if tracker.phase is Phase.IDLE:
            self._start_lookup(tracker, local_tokens)
        if tracker.phase is Phase.LOOKING:
            self._poll(tracker)
        if tracker.phase is Phase.LOOKING:
            return None, False
        return self._promise(tracker, local_tokens)

    def _worth_asking(self, tracker: RequestTracker, local_tokens: int) -> bool:
        if tracker.load_failures >= self._config.load_failures_max:
            return False
        chunk = self._layout.chunk_tokens
        usable = self._layout.usable_tokens(len(tracker.tokens) // chunk, len(tracker.tokens))
        return usable > local_tokens

    def _start_lookup(self, tracker: RequestTracker, local_tokens: int) -> None:
        tracker.looked_up_tokens = len(tracker.tokens)
        tracker.skip_chunks = local_tokens // self._layout.chunk_tokens
        tracker.phase = Phase.LOOKING
        self._counts["lookups"] += 1
        self._client.start(
            tracker.session,
            tracker.generation,
            tracker.hashes[: len(tracker.tokens) // self._layout.chunk_tokens],
            prompt_tokens=tracker.looked_up_tokens,
            skip_chunks=tracker.skip_chunks,
            salt=tracker.cache_salt,
        )

    def _poll(self, tracker: RequestTracker) -> None:
        outcome = self._client.poll(tracker.session, tracker.generation)
        if outcome is None:
            return
        assert outcome.lengths & 1, "no prefix at all is always servable"
        tracker.lengths = outcome.lengths
        tracker.phase = Phase.KNOWN

    def _promise(self, tracker: RequestTracker, local_tokens: int) -> tuple[int, bool]:
        assert tracker.looked_up_tokens == len(tracker.tokens), "a waiting request does not grow"
        length = self._layout.best(tracker.lengths)
        tokens = self._layout.usable_tokens(length, tracker.looked_up_tokens)
        tracker.asked_local = local_tokens
        tracker.promised = max(0, tokens - local_tokens)
        assert tracker.promised <= len(tracker.tokens) - 1 - local_tokens or tracker.promised == 0
        return tracker.promised, tracker.promised > 0 and self._config.load_async

    # ------------------------------------------------------------------ allocation

    def after_alloc(self, request: RequestView, blocks: BlockTable, external_tokens: int) -> None:
        """Take up the promise, or let it go."""
        tracker = self._trackers[request.request_id]
        if tracker.phase in (Phase.LOADING, Phase.RUNNING):
            assert external_tokens == 0, "one load per generation"
            return
        length = self._layout.best(tracker.lengths)
        # What the engine had itself was not looked up, so the cache may lack it: start at 0, resident cells are
        # refused cheaply.
        tracker.stored_chunks = 0 if tracker.skip_chunks else length
        if external_tokens == 0:
            self._release(tracker)
            tracker.phase = Phase.RUNNING
            return
        assert tracker.phase is Phase.KNOWN
        assert external_tokens == tracker.promised, "the engine takes what was promised"
        self._client.settle(tracker.session, tracker.generation, length)
        self._plan_load(tracker, blocks, length)

    def _plan_load(self, tracker: RequestTracker, blocks: BlockTable, length: int) -> None:
        rows = self._layout.unfold(length, tracker.looked_up_tokens, tracker.asked_local // self._layout.chunk_tokens)
        needed = rows[: len(self._layout.groups)]  # the rule is the same on every rank
        cells = load_cells(self._layout, tracker.hashes, needed, blocks, tracker.asked_local)
        assert cells, "promised tokens need at least one cell"
        tracker.phase = Phase.LOADING
        tracker.confirmed = False
        tracker.load_blocks = {block: cell.chunk for cell in cells for block in cell.blocks if block}
        self._loads[tracker.request_id] = LoadPlan(
            tracker.request_id, tracker.session, tracker.generation, self._config.load_async, tuple(cells)
        )
        self._counts["loads_planned"] += 1
        self._counts["cells_load_planned"] += len(cells)
        self._counts["resumes_with_load"] += tracker.generation_count > 1

    # ------------------------------------------------------------------ the step

    def build_meta(self, step: StepView) -> StepMeta:
        """Plan this step's stores and hand over everything that was planned since the last step."""
        for scheduled in step.scheduled:
            self._plan_stores(scheduled)
        meta = StepMeta(
            step.step,
            tuple(sorted(step.allocated)),
            tuple(self._loads.values()),
            tuple(self._stores),
            tuple(self._ended),
        )
        self._loads, self._stores, self._ended = {}, [], []
        return meta

    def _plan_stores(self, scheduled: ScheduledRequest) -> None:
        tracker = self._trackers.get(scheduled.request_id)
        if tracker is None:
            return
        loading_now = scheduled.request_id in self._loads
        tracker.tokens = scheduled.tokens
        tracker.step_start = scheduled.computed_tokens
        tracker.computed_tokens = scheduled.computed_tokens + scheduled.scheduled_tokens
        if tracker.confirmed and not loading_now:
            self._store_completed(tracker, scheduled.blocks)

    def _store_completed(self, tracker: RequestTracker, blocks: BlockTable) -> None:
        """Plan every chunk that is computed and not yet stored in this generation."""
        end = tracker.computed_tokens // self._layout.chunk_tokens
        if end <= tracker.stored_chunks:
            return
        self._hash(tracker)
        cells = store_cells(
            self._layout,
            tracker.hashes,
            range(tracker.stored_chunks, end),
            blocks,
            (tracker.step_start, tracker.computed_tokens),
        )
        tracker.stored_chunks = end
        if cells:
            plan = StorePlan(tracker.request_id, tracker.generation, tracker.cache_salt, tuple(cells))
            self._stores.append(plan)
            tracker.stores_planned = True
            self._counts["cells_store_planned"] += len(cells)

    def update_output(self, finished: Finished, error_blocks: frozenset[int]) -> None:
        """Loads have ended: all of a step's synchronous ones, and the asynchronous ones in `received`."""
        for tracker in self._trackers.values():
            if tracker.phase is not Phase.LOADING:
                continue
            if self._config.load_async and tracker.request_id not in finished.received:
                continue
            bad = [chunk for block, chunk in tracker.load_blocks.items() if block in error_blocks]
            failed = tracker.request_id in finished.failed
            self._load_ended(tracker, min(bad) if bad else None, failed)

    def _load_ended(self, tracker: RequestTracker, bad_chunk: int | None, failed: bool) -> None:
        tracker.phase = Phase.RUNNING
        tracker.confirmed = True
        tracker.load_blocks = {}
        if bad_chunk is None and not failed:
            return
        self._counts["load_failures"] += 1
        tracker.load_failures += 1
        tracker.stored_chunks = 0 if bad_chunk is None else min(bad_chunk, tracker.stored_chunks)

    # ------------------------------------------------------------------ ends

    def preempted(self, request_id: str) -> None:
        """All blocks are lost; what a later step loads or stores belongs to a new generation."""
        tracker = self._trackers.get(request_id)
        if tracker is None:
            return
        self._loads.pop(request_id, None)
        self._new_generation(tracker)

    def finished(self, request_id: str, blocks: BlockTable) -> bool:
        """The last stores, the end of the session; True while workers may read the blocks."""
        tracker = self._trackers.pop(request_id, None)
        if tracker is None:
            return False
        if tracker.confirmed and tracker.phase is Phase.RUNNING and any(blocks):
            self._store_completed(tracker, blocks)
        self._client.end(tracker.session)
        if tracker.stores_planned:
            self._ended.append(request_id)
        return tracker.stores_planned

    # ------------------------------------------------------------------ helpers

    def tracker(self, request_id: str) -> RequestTracker | None:
        """What is remembered of a request, to look at."""
        return self._trackers.get(request_id)

    def _tracker(self, request: RequestView) -> RequestTracker:
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            self._sessions += 1
            self._counts["requests"] += 1
            session = f"{self._config.session_prefix}{request.request_id}#{self._sessions}"
            tracker = RequestTracker(request.request_id, session, request.cache_salt, extras=request.extras)
            tracker.next_generation(self._take_generation())
            self._trackers[request.request_id] = tracker
        if tracker.phase is Phase.IDLE:
            tracker.tokens = request.tokens
            self._hash(tracker)
        return tracker

    def _hash(self, tracker: RequestTracker) -> None:
        if len(tracker.tokens) // self._layout.chunk_tokens > len(tracker.hashes):
            tracker.hashes = self._hasher.hash_tokens(tracker.tokens, known=tracker.hashes, extras=tracker.extras)

    def _take_generation(self) -> int:
        self._generation += 1
        self._counts["generations"] += 1
        return self._generation

    def _release(self, tracker: RequestTracker) -> None:
        if tracker.phase is not Phase.IDLE:
            self._client.release(tracker.session, tracker.generation)

    def _new_generation(self, tracker: RequestTracker) -> None:
        self._release(tracker)
        tracker.next_generation(self._take_generation())

    def statistics(self) -> SchedulerConnectorStatistics:
        return SchedulerConnectorStatistics(**self._counts)

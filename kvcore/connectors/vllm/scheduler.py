"""The scheduler's half: vLLM's requests and outputs as the engine-neutral core sees them.

Theory of operation
-------------------
vLLM shows a connector its live `Request` (`on_new_request`) and the block tables of the requests that it schedules
(`kv_connector_block_state`). Both are the same for the two model runners, whose outputs name a resumed request in two
different ways; nothing here depends on how an output names it.

1. *Preemption* is not called out. A request whose `num_preemptions` has grown since we last saw it lost its blocks. It
   is looked at in every call that shows the request, because it may be preempted and asked for again inside one
   `schedule()` (`reset_prefix_cache`), and for every id in `preempted_req_ids`.
2. *Allocated blocks*: those of a table that were not in the request's last table, beyond the prefix that the engine
   shared from its own cache. vLLM frees blocks without a word, so a table is compared position by position, and a
   request that is asked for has none. A request that goes on running is told of by its new blocks alone, and its table
   is copied only when something is stored from it: tables are long, and most steps add nothing. The core is shown only
   the requests of a step that are new in it or complete a chunk.
3. *Tokens* are those known now: with overlapping batches the last ones are still being computed and have no ids.
4. *Reports*: vLLM leaves out `update_connector_output` when a step has nothing to report; the core counts steps. With
   one batch in flight a missing report is made up for at the next call. With several, loads are asynchronous and
   nothing waits for an empty report.
5. *Failed loads*: vLLM 0.32.0 leaves a request whose asynchronous load brought nothing in the queue of those that hold
   blocks, where its failed allocation stops the loaded ones behind it for ever, and keeps reserving blocks for it until
   it has been computed, which may leave none for anybody else's load (docs/findings). So such a request is *stranded*:
   "not known yet" once moves it to the ordinary queue, and until it runs no other load is begun.
6. *Answers grow old*: vLLM asks for the head of its queue in every step, however long that finds no room, and the
   leases behind an answer run out (`StorageConfig.lease_ns`, a minute). An old answer is given up and asked for anew: a
   load that fails costs a request its time, and an engine that loads synchronously for several groups its life.
7. *Other connectors* (MultiConnector) may load for a request that we were asked about as well, and we are told only
   that nothing of ours is taken. What has been computed before its first step, beyond the prefix of our question, was
   brought by them, and is not stored before that step's report. (With batches that overlap nobody is told in time: vLLM
   delivers what was computed over a failed synchronous load, too.)
8. *Not for the cache*: a request whose every token must be computed (`skip_reading_prefix_cache`) is stored and not
   looked up. A prompt of tokens and embeddings is neither: vLLM's hashes know the embeddings, and not which positions
   they stand for, so unlike prompts may have equal hashes.

Who holds: one `_Known` per request from its arrival to its end. Blocks stay vLLM's; True from `finished` keeps them for
the workers until these report `finished_sending`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from kvcore.connectors.plan import StepMeta
from kvcore.connectors.scheduler import SchedulerConnector
from kvcore.connectors.views import (
    NO_TOKENS,
    NULL_BLOCK,
    BlockTable,
    Finished,
    RequestView,
    ScheduledRequest,
    StepView,
)
from kvcore.connectors.vllm.hashes import EngineTokens
from kvcore.groups import CacheLayout
from kvcore.ports import Clock

ANSWER_NS_MAX = 30_000_000_000
"""Half of the time that leases last."""
RENEWALS_MAX = 2
"""Where a question is asked so seldom that no answer is young enough, the request is computed."""


@dataclass(slots=True)
class _Known:
    """One request of the engine. `table`: as last seen; empty when it holds no blocks."""

    request: Any
    preemptions: int = 0
    table: BlockTable = ()
    local_tokens: int = 0  # of the last question: these blocks are shared, all others new
    loading: bool = False  # an asynchronous load was begun and it has not run since
    resumed: bool = False  # its next step is the first after a preemption
    due_tokens: int = 0  # with fewer tokens computed, nothing of it can be stored
    asked_ns: int = 0  # when the question was first asked whose answer is not taken yet
    renewals: int = 0  # since the last promise
    asked: bool = False  # since its blocks were allocated


class SchedulerHalf:
    """Runs on the cache's loop. `overlapping`: the engine keeps several batches in flight."""

    def __init__(
        self, core: SchedulerConnector, layout: CacheLayout, clock: Clock, *, overlapping: bool, load_async: bool
    ) -> None:
        self._clock = clock
        self._load_async = load_async
        self._core = core
        self._layout = layout
        self._overlapping = overlapping
        self._known: dict[str, _Known] = {}
        self._stranded: dict[str, None] = {}
        self._allocated: dict[int, None] = {}
        self._declined: dict[str, None] = {}  # admitted for the next step without a load of ours
        self._report_due = False
        self._steps = 0

    # ------------------------------------------------------------------ requests

    def new_request(self, request: Any) -> None:
        self._known[request.request_id] = _Known(request, request.num_preemptions)
        self._core.admission.waits(request.request_id, len(request.all_token_ids))

    def step_ended(self) -> None:
        """vLLM has the output of a step. On the engine's thread, as `new_request`: no coroutine of ours is running."""
        self._core.admission.step_ended()

    async def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """See `kvcore.connectors.interface.SchedulerSide`. A request that is asked for holds no blocks."""
        self._catch_up_report()
        known = self._look_at(request)
        known.table = ()
        known.due_tokens = 0
        known.local_tokens = local_tokens
        known.asked = True
        if request.prompt_is_token_ids is not None:
            return 0, False
        if known.loading:
            known.loading = False
            self._stranded[request.request_id] = None
            return None, False
        if self._renew_if_old(known) > RENEWALS_MAX:
            return 0, False
        tokens, load_async = self._core.matched_tokens(_view(request), local_tokens)
        if tokens:
            known.renewals = 0
        if load_async and self._stranded.keys() - {request.request_id}:
            return None, False
        return tokens, load_async

    def _renew_if_old(self, known: _Known) -> int:
        now_ns = self._clock.now_ns()
        if not known.asked_ns:
            known.asked_ns = now_ns
        elif now_ns - known.asked_ns > ANSWER_NS_MAX:
            known.asked_ns = now_ns
            known.renewals += 1
            self._core.preempted(known.request.request_id)  # whatever was found for it, another attempt begins
        return known.renewals

    async def after_alloc(self, request: Any, table: BlockTable, external_tokens: int) -> None:
        self._catch_up_report()
        known = self._look_at(request)
        self._take_table(known, table)
        known.due_tokens = known.asked_ns = known.renewals = 0
        known.loading = external_tokens > 0 and self._load_async
        if known.asked and not external_tokens and not self._overlapping:
            self._declined[request.request_id] = None
        known.asked = False
        self._stranded.pop(request.request_id, None)
        self._core.after_alloc(_view(request), table, external_tokens)

    async def finished(self, request: Any, table: BlockTable) -> bool:
        known = self._known.pop(request.request_id, None)
        self._stranded.pop(request.request_id, None)
        if known is None:
            return False
        if request.num_preemptions > known.preemptions:
            self._core.preempted(request.request_id)
        return self._core.finished(_view(request), table)

    def _look_at(self, request: Any) -> _Known:
        known = self._known[request.request_id]
        if request.num_preemptions > known.preemptions:
            known.preemptions = request.num_preemptions
            known.table, known.resumed, known.due_tokens, known.asked_ns = (), True, 0, 0
            self._core.preempted(request.request_id)
        return known

    def _take_table(self, known: _Known, table: BlockTable) -> BlockTable:
        """Remember the table; returns what is new in it."""
        new = tuple(self._new_blocks(known, group, blocks) for group, blocks in enumerate(table))
        known.table = tuple(list(blocks) for blocks in table)
        self._allocated.update(dict.fromkeys(block for blocks in new for block in blocks))
        return new

    def _new_blocks(self, known: _Known, group: int, blocks: Sequence[int]) -> list[int]:
        if not known.table:
            return [block for block in blocks[self._shared(known, group) :] if block != NULL_BLOCK]
        last = known.table[group]
        assert len(blocks) >= len(last), "a table only grows while its request runs"
        changed = [block for block, old in zip(blocks, last, strict=False) if block not in (old, NULL_BLOCK)]
        return changed + [block for block in blocks[len(last) :] if block != NULL_BLOCK]

    def _shared(self, known: _Known, group: int) -> int:
        return known.local_tokens // self._layout.groups[group].block_tokens

    # ------------------------------------------------------------------ steps

    def quiet_step(self, output: Any) -> StepMeta | None:
        """The plan of a step in which nothing begins, ends, grows or completes a chunk; None: see `build_meta`.

        On the engine's thread, as `step_ended`: it reads what only the engine's calls change, and the way to the loop
        and back costs more than the rest of the hooks.
        """
        if self._allocated or output.preempted_req_ids or not self._core.idle:
            return None
        running = _running(output.scheduled_cached_reqs)
        for name, count in output.num_scheduled_tokens.items():
            if running.get(name, _NOT_RUNNING) is not None or not self._completes_nothing(name, count):
                return None
        self._core.admission.step_begins((), loads=False)
        if not output.total_num_scheduled_tokens:
            self._core.admission.step_empty()
        self._steps += 1
        return StepMeta(self._steps - 1, (), (), (), (), ())

    async def build_meta(self, output: Any) -> StepMeta:
        self._catch_up_report()
        preempted = self._preempted(output.preempted_req_ids or ())
        running = _running(output.scheduled_cached_reqs)
        tables = output.kv_connector_block_state
        scheduled = tuple(
            self._scheduled(name, count, tables, running)
            for name, count in output.num_scheduled_tokens.items()
            if not self._steady(name, count, running)
        )
        view = StepView(
            self._steps, scheduled, frozenset(self._allocated), preempted, tuple(sorted(output.finished_req_ids))
        )
        self._steps += 1
        self._allocated, self._declined = {}, {}
        self._report_due = not self._overlapping
        meta = self._core.build_meta(view)
        if not output.total_num_scheduled_tokens:
            self._core.admission.step_empty()
        for each in scheduled:
            self._note_due(each.request_id)
        return meta

    def _preempted(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        names = tuple(sorted(name for name in request_ids if name in self._known))
        for name in names:
            self._look_at(self._known[name].request)
        return names

    def _steady(self, request_id: str, count: int, running: Running) -> bool:
        """It goes on running and completes no chunk in this step: the core need not look at it."""
        if request_id not in running or not self._completes_nothing(request_id, count):
            return False
        new = running[request_id]
        if new is not None:
            self._grow(self._known[request_id], new)
        return True

    def _completes_nothing(self, request_id: str, count: int) -> bool:
        """Due 0: it is not known yet what would be due."""
        known = self._known[request_id]
        computed: int = known.request.num_computed_tokens
        return computed + count < known.due_tokens

    def _note_due(self, request_id: str) -> None:
        tracker = self._core.tracker(request_id)
        if tracker is not None and tracker.confirmed:
            self._known[request_id].due_tokens = (tracker.stored_chunks + 1) * self._layout.chunk_tokens

    def _scheduled(self, request_id: str, count: int, tables: Any, running: Running) -> ScheduledRequest:
        known = self._known[request_id]
        resumed, known.resumed = known.resumed, False
        table: Any
        if request_id in running and known.table and not resumed:
            table, new = LazyTable(tables, request_id), running[request_id]
            new_blocks = self._grow(known, new) if new is not None else ()
        else:
            table = tables.get_block_ids(request_id)
            new_blocks = self._take_table(known, table)
        request = known.request
        computed = request.num_computed_tokens
        brought = range(known.local_tokens, computed) if request_id in self._declined else NO_TOKENS
        return ScheduledRequest(request_id, computed, count, table, new_blocks, resumed, _tokens(request), brought)

    def _grow(self, known: _Known, new: BlockTable) -> BlockTable:
        """A running request has got these blocks."""
        for blocks, more in zip(known.table, new, strict=True):
            blocks.extend(more)
        self._allocated.update(dict.fromkeys(block for more in new for block in more if block != NULL_BLOCK))
        return new

    def report(self, finished: Finished, error_blocks: frozenset[int]) -> None:
        self._report_due = False
        self._core.update_output(finished, error_blocks)

    def _catch_up_report(self) -> None:
        if self._report_due:
            self.report(Finished(), frozenset())


Running = dict[str, BlockTable | None]
"""Requests that ran in an earlier step and go on: their new blocks, None where there are none."""
_NOT_RUNNING: BlockTable = ()


def _running(cached: Any) -> Running:
    found = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
    for request_id in cached.resumed_req_ids:
        found.pop(request_id, None)
    return found


class LazyTable(Sequence[list[int]]):
    """A request's block table, copied from the engine when somebody looks into it, in the step that it is of."""

    __slots__ = ("_request_id", "_table", "_tables")

    def __init__(self, tables: Any, request_id: str) -> None:
        self._tables = tables
        self._request_id = request_id
        self._table: BlockTable = ()

    def _resolved(self) -> BlockTable:
        if not self._table:
            self._table = self._tables.get_block_ids(self._request_id)
        return self._table

    def __len__(self) -> int:
        return len(self._resolved())

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | Sequence[list[int]]:
        return self._resolved()[index]


def _tokens(request: Any) -> EngineTokens:
    return EngineTokens(request.all_token_ids, request.block_hashes)


def _view(request: Any) -> RequestView:
    return RequestView(
        request.request_id,
        _tokens(request),
        request.num_prompt_tokens,
        request.cache_salt or "",
        reads_cache=not request.skip_reading_prefix_cache,
    )

"""`EngineMarks`: rare states of requests, seen through the engine's probe.

`EngineOracle` passes its hooks on. A request is *asking* from the first question to its admission, *admitted* until it
first attends to what it was promised, and over when it has finished or was aborted.

Who holds: the oracle, for one engine. What is remembered of a request goes with its end, but for its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcore.groups import CacheLayout, GroupKind
from kvcore.sim.sometimes import Sometimes, sometimes

PREEMPTED = sometimes("engine.preempted", "a running request lost its blocks", common=True)
PREEMPTED_STORING = sometimes("engine.preempted_storing", "a victim's stores were in flight", common=True)
PREEMPTED_STORING_LOADING = sometimes(
    "engine.preempted_storing_others_load", "a victim's stores were in flight and another request's load as well"
)
PREEMPTED_AGAIN = sometimes("engine.preempted_again", "a request was preempted that had been before", common=True)
RESUMED_LOADING = sometimes("engine.resumed_with_load", "a victim came back through a load", common=True)
RESUMED_AT_ONCE = sometimes("engine.resumed_at_once", "a victim came back in the step that preempted it")
RESUMED_STORING = sometimes("engine.resumed_storing", "a victim came back while its old stores still ran")
ABORTED_PENDING = sometimes("engine.aborted_pending", "a request was aborted while its lookup had no answer")
ABORTED_ANSWERED = sometimes("engine.aborted_answered", "a request was aborted after its answer, before its blocks")
ABORTED_LOADING = sometimes("engine.aborted_loading", "a request was aborted while its load ran")
ABORTED_LOADED = sometimes("engine.aborted_loaded", "a request was aborted after its load and before its first step")
ABORTED_RUNNING = sometimes("engine.aborted_running", "a request was aborted while it ran")
ABORTED_STORING = sometimes("engine.aborted_storing", "a request was aborted while its stores were in flight")
FINISHED_STORING = sometimes("engine.finished_storing", "a request ended while its stores were in flight", common=True)
ID_REUSED = sometimes("engine.id_reused", "a request came under the name of one that had ended", common=True)
ID_REUSED_STORING = sometimes("engine.id_reused_storing", "a name was reused while stores of its first bearer ran")
ASKED_PENDING = sometimes("engine.asked_pending", "the engine was told to ask again later", common=True)
ANSWER_FELL = sometimes("engine.answer_changed", "a request was promised less than at an earlier question")
LOADED_BEHIND_LOCAL = sometimes("engine.loaded_behind_local", "a load continued the engine's own prefix", common=True)
LOCAL_INSIDE_CHUNK = sometimes("engine.local_inside_chunk", "the own prefix ended inside a chunk that was loaded")
FULL_HIT = sometimes("engine.full_hit_minus_one", "everything but the last token was loaded", common=True)
RECURRENT_FALLBACK = sometimes(
    "engine.recurrent_fallback", "a recurrent model took an earlier snapshot because the prompt ends at the last"
)
ACROSS_HOLE = sometimes("lookup.window_across_hole", "a window row was served without its earlier cells")
LOAD_SHORT = sometimes("engine.load_failed_partly", "a load failed and left a valid prefix")
LOAD_LOST = sometimes("engine.load_failed_wholly", "a load failed and nothing of it was valid")
LOADS_TOGETHER = sometimes("engine.loads_together", "two requests' loads ran at the same time", common=True)


class EngineMarks:
    """See the module text. `stores_inflight(request)` counts store jobs; `loading` are admissions not yet used, with
    their (local, external) tokens."""

    def __init__(
        self,
        marks: Sometimes,
        layout: CacheLayout,
        now_ns: Callable[[], int],
        stores_inflight: Callable[[str], int],
        loading: Mapping[str, tuple[int, int]],
    ) -> None:
        self._hit = marks.hit
        self._now_ns = now_ns
        self._stores_inflight = stores_inflight
        self._loading = loading
        self._chunk_tokens = layout.chunk_tokens
        self._recurrent = any(group.kind is GroupKind.RECURRENT for group in layout.groups)
        self._answers: dict[str, int | None] = {}  # of requests that ask
        self._admitted: dict[str, None] = {}
        self._loaded: dict[str, None] = {}
        self._preempted_ns: dict[str, int] = {}
        self._over: dict[str, None] = {}

    def asked(self, request_id: str, answer: int | None) -> None:
        if request_id in self._over:
            self._reused(request_id)
        known = self._answers.get(request_id)
        if answer is None:
            self._hit(ASKED_PENDING)
        elif known is not None and answer < known:
            self._hit(ANSWER_FELL)
        self._answers[request_id] = answer

    def _reused(self, request_id: str) -> None:
        del self._over[request_id]
        self._hit(ID_REUSED)
        if self._stores_inflight(request_id):
            self._hit(ID_REUSED_STORING)

    def admitted(self, request_id: str, local_tokens: int, external_tokens: int, tokens: int) -> None:
        """`tokens`: all that it has; 0 where the watcher cannot know."""
        self._answers.pop(request_id, None)
        self._admitted[request_id] = None
        self._mark_resumption(request_id, external_tokens)
        if external_tokens:
            self._mark_load(local_tokens, external_tokens, tokens)
            if sum(bool(external) for _, external in self._loading.values()) > 1:
                self._hit(LOADS_TOGETHER)

    def _mark_resumption(self, request_id: str, external_tokens: int) -> None:
        preempted_ns = self._preempted_ns.get(request_id)
        if preempted_ns is None:
            return
        if external_tokens:
            self._hit(RESUMED_LOADING)
        if preempted_ns == self._now_ns():
            self._hit(RESUMED_AT_ONCE)
        if self._stores_inflight(request_id):
            self._hit(RESUMED_STORING)

    def _mark_load(self, local_tokens: int, external_tokens: int, tokens: int) -> None:
        if local_tokens:
            self._hit(LOADED_BEHIND_LOCAL)
        if local_tokens % self._chunk_tokens:
            self._hit(LOCAL_INSIDE_CHUNK)
        if not tokens:
            return
        missing = tokens - local_tokens - external_tokens
        if missing == 1 and not tokens % self._chunk_tokens:
            self._hit(FULL_HIT)
        if self._recurrent and missing == self._chunk_tokens and not tokens % self._chunk_tokens:
            self._hit(RECURRENT_FALLBACK)

    def load_ended(self, request_id: str, valid_tokens: int, promised_tokens: int) -> None:
        if valid_tokens == promised_tokens:
            self._loaded[request_id] = None
        else:
            self._hit(LOAD_SHORT if valid_tokens else LOAD_LOST)

    def preempted(self, request_id: str) -> None:
        self._hit(PREEMPTED)
        if request_id in self._preempted_ns:
            self._hit(PREEMPTED_AGAIN)
        self._preempted_ns[request_id] = self._now_ns()
        if self._stores_inflight(request_id):
            self._hit(PREEMPTED_STORING)
            if any(external and other != request_id for other, (_, external) in self._loading.items()):
                self._hit(PREEMPTED_STORING_LOADING)
        self._forget(request_id)

    def finished(self, request_id: str) -> None:
        if self._stores_inflight(request_id):
            self._hit(FINISHED_STORING)
        self._end(request_id)

    def aborted(self, request_id: str) -> None:
        if request_id in self._answers:
            self._hit(ABORTED_PENDING if self._answers[request_id] is None else ABORTED_ANSWERED)
        elif self._loading.get(request_id, (0, 0))[1]:
            self._hit(ABORTED_LOADED if request_id in self._loaded else ABORTED_LOADING)
        elif request_id in self._admitted:
            self._hit(ABORTED_RUNNING)
        if self._stores_inflight(request_id):
            self._hit(ABORTED_STORING)
        self._end(request_id)

    def engine_restarted(self) -> None:
        """All that was under way is over; what comes again under its name is not new."""
        for known in (self._answers, self._admitted, self._loaded, self._preempted_ns):
            known.clear()

    def _forget(self, request_id: str) -> None:
        self._admitted.pop(request_id, None)
        self._loaded.pop(request_id, None)

    def _end(self, request_id: str) -> None:
        self._forget(request_id)
        self._answers.pop(request_id, None)
        self._preempted_ns.pop(request_id, None)
        self._over[request_id] = None

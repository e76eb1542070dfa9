"""`TracedProbe`: the life of each request as trace events, beside the probe that judges it.

Without these a trace shows messages and copies but not why they were made. The calls of the inner loop (blocks, layers)
go straight to the inner probe and are not traced: there are thousands of them per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.ports import Tracer
from kvcore.sim.engine.probe import EngineProbe


class TracedProbe:
    """An `EngineProbe` that writes the life of each request into the trace and then asks `inner`.

    The event comes first, so that in a trace a finding stands behind the step that it is about.
    """

    def __init__(self, inner: EngineProbe, tracer: Tracer) -> None:
        self._inner = inner
        self._event = tracer.event
        self._answers: dict[str, tuple[int, int | None]] = {}  # the last one per request
        self.block_allocated = inner.block_allocated
        self.block_shared = inner.block_shared
        self.block_freed = inner.block_freed
        self.attends = inner.attends
        self.forward_writes = inner.forward_writes
        self.forward_reads = inner.forward_reads
        self.poisoned = inner.poisoned

    def asked(self, request_id: str, local_tokens: int, answer: int | None) -> None:
        """Only what is new: while a request waits, it is asked about in every step."""
        if self._answers.get(request_id) != (local_tokens, answer):
            self._answers[request_id] = (local_tokens, answer)
            self._event("request.asked", request_id, local_tokens, -1 if answer is None else answer)
        self._inner.asked(request_id, local_tokens, answer)

    def request_admitted(self, request_id: str, local_tokens: int, external_tokens: int) -> None:
        self._event("request.admitted", request_id, local_tokens, external_tokens)
        self._inner.request_admitted(request_id, local_tokens, external_tokens)

    def load_ended(self, request_id: str, valid_tokens: int, promised_tokens: int) -> None:
        self._event("request.loaded", request_id, valid_tokens, promised_tokens)
        self._inner.load_ended(request_id, valid_tokens, promised_tokens)

    def preempted(self, request_id: str) -> None:
        self._event("request.preempted", request_id)
        self._inner.preempted(request_id)

    def request_finished(self, request_id: str, tokens: Sequence[int]) -> None:
        self._event("request.finished", request_id, len(tokens))
        self._inner.request_finished(request_id, tokens)

    def request_aborted(self, request_id: str) -> None:
        self._event("request.aborted", request_id)
        self._inner.request_aborted(request_id)

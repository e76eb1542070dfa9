"""Deliberate bugs in the production code, planted by replacing one function for the length of a test.

Each is small, plausible and wrong, and has a reason from practice. These six show that the ladder can fail; the zoo
proper comes later. The first finding of the failed rung names its oracle in brackets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvcore.bitmap import ones
from kvcore.connectors.jobs import StoreJob
from kvcore.connectors.scheduler import SchedulerConnector
from kvcore.connectors.views import BlockTable, RequestView
from kvcore.connectors.worker import WorkerConnector, _view
from kvcore.groups import CacheLayout, GroupKind, _Rule
from kvcore.lookup import LookupOutcome, LookupState
from kvcore.service.client import StoreCell


@dataclass(frozen=True)
class Mutant:
    """One planted bug. `cell`: where it can matter; `oracles`: any of these may be the first to see it."""

    name: str
    reason: str
    cell: str
    oracles: tuple[str, ...]
    plant: Callable[[pytest.MonkeyPatch], None]


def publish_before_the_copy_has_ended(patch: pytest.MonkeyPatch) -> None:
    async def store(self: Any, job: StoreJob) -> None:
        plan = job.plan
        cells = [StoreCell(cell.group, cell.chunk_hash) for cell in plan.cells]
        grants = await self._client.reserve_store(job.tag, cells, plan.cache_salt)
        self._keep_usable(job, grants)
        if not job.cells:
            self._client.abort_store(job.tag)
            return
        granted = [index in job.cells for index in range(len(cells))]
        await self._client.commit_store(job.tag, granted)  # the copy has not even begun
        await self._copy(job, "store", lambda index: self._store_moves(plan.cells[index], _view(grants, index)))

    patch.setattr(WorkerConnector, "_store", store)


def preemption_without_the_fence(patch: pytest.MonkeyPatch) -> None:
    def fence(self: Any, meta: Any) -> None:
        self._meta = meta

    patch.setattr(WorkerConnector, "fence", fence)


def hit_counted_as_ones_in_the_matrix(patch: pytest.MonkeyPatch) -> None:
    def fold(self: CacheLayout, rows: Any, chunks: int, prompt_tokens: int, skip_chunks: int = 0) -> int:
        present = [(row | ones(min(skip_chunks, chunks))) & ones(chunks) for row in rows]
        return ones(min(row.bit_count() for row in present) + 1)

    patch.setattr(CacheLayout, "fold", fold)


def last_sampled_token_stored(patch: pytest.MonkeyPatch) -> None:
    original = SchedulerConnector.finished

    def finished(self: Any, request: RequestView, blocks: BlockTable) -> bool:
        tracker = self.tracker(request.request_id)
        if tracker is not None:
            tracker.tokens = request.tokens
            tracker.computed_tokens = len(request.tokens)  # the slot of the last one was never written
        return original(self, request, blocks)

    patch.setattr(SchedulerConnector, "finished", finished)


def minimum_over_servers(patch: pytest.MonkeyPatch) -> None:
    original = LookupState._fix

    def fix(self: Any, outcome: LookupOutcome) -> None:
        best = min(part.lengths.bit_length() - 1 for part in self._parts) if outcome.lengths > 1 else 0
        original(self, LookupOutcome(outcome.lengths | 1 << best, outcome.reason))

    patch.setattr(LookupState, "_fix", fix)


def full_hit_on_a_recurrent_row_kept(patch: pytest.MonkeyPatch) -> None:
    original = _Rule.serves_full_hit

    def serves_full_hit(self: _Rule, present: int, chunks: int) -> bool:
        if self.kind is GroupKind.RECURRENT:
            return bool(present >> (chunks - 1) & 1)
        return original(self, present, chunks)

    def unfold(self: CacheLayout, length: int, prompt_tokens: int, skip_chunks: int = 0) -> list[int]:
        whole = self._is_full_hit(length, prompt_tokens)
        beyond = ~ones(min(skip_chunks, length))
        masks = [rule.needed(length, whole and rule.kind is not GroupKind.RECURRENT) for rule, _ in self._rules]
        return [masks[position] & beyond for position in self._rule_of_row]

    patch.setattr(_Rule, "serves_full_hit", serves_full_hit)
    patch.setattr(CacheLayout, "unfold", unfold)


MUTANTS = (
    Mutant(
        "publish_before_the_copy_has_ended",
        "a reply is taken for the device event; readers see a half-filled object (R04, R29)",
        "full/r1/s1/sync",
        ("bytes",),
        publish_before_the_copy_has_ended,
    ),
    Mutant(
        "preemption_without_the_fence",
        "a store still reads blocks that already belong to somebody else (R01)",
        "full/r1/s1/sync",
        ("blocks", "bytes"),
        preemption_without_the_fence,
    ),
    Mutant(
        "hit_counted_as_ones_in_the_matrix",
        "presence is counted although a hole makes what follows useless (R13)",
        "full/r1/inproc/sync",
        ("prefix", "crash", "bytes"),
        hit_counted_as_ones_in_the_matrix,
    ),
    Mutant(
        "last_sampled_token_stored",
        "the request's length is taken for what was computed (R11)",
        "full/r1/inproc/sync",
        ("bytes",),
        last_sampled_token_stored,
    ),
    Mutant(
        "minimum_over_servers",
        "the least of the servers' best lengths, which a window row may not serve (R42)",
        "full+window/r1/s2/sync",
        ("prefix", "bytes", "crash"),
        minimum_over_servers,
    ),
    Mutant(
        "full_hit_on_a_recurrent_row_kept",
        "the snapshot already holds the token that is to be computed again (R07, R13)",
        "full+window+recurrent/r1/inproc/sync",
        ("prefix", "crash", "bytes"),
        full_hit_on_a_recurrent_row_kept,
    ),
)

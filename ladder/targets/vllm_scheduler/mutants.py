"""Bugs put into the connector of one engine, to show that the target finds them. Each is a well-known mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvcore.connectors.views import BlockTable, Finished, RequestView, ScheduledRequest, StepView
from kvcore.ports import Copy

SLOT_BYTES = 8
Spoil = Callable[[Any, Any], None]


def skipped_load(scheduler: Any, worker: Any) -> None:
    """Every third cell is reported as loaded and its bytes are not moved."""
    core, calls = worker._side.worker, [0]
    moves = core._load_moves

    def some(*arguments: Any) -> list[Copy]:
        calls[0] += 1
        return [] if calls[0] % 3 == 0 else list(moves(*arguments))

    core._load_moves = some


def shifted_by(slot_bytes: int) -> Spoil:
    """Blocks arrive with their tokens shifted by one slot."""

    def roll(source: memoryview) -> memoryview:
        data = bytes(source)
        return memoryview(data[-slot_bytes:] + data[:-slot_bytes])

    def shifted_load(scheduler: Any, worker: Any) -> None:
        core = worker._side.worker
        moves = core._load_moves
        core._load_moves = lambda *arguments: [replace(copy, source=roll(copy.source)) for copy in moves(*arguments)]

    return shifted_load


def no_fence(scheduler: Any, worker: Any) -> None:
    """Blocks are written while stores still read them."""
    worker._side.worker._give_way = lambda job, blocks: []


def stale_blocks_after_resume(scheduler: Any, worker: Any) -> None:
    """A resumed request is stored from the block table of its first life."""
    core, first = scheduler._side.scheduler, dict[str, BlockTable]()
    build_meta = core.build_meta

    resumed: dict[str, None] = {}

    def stale(scheduled: ScheduledRequest) -> ScheduledRequest:
        if scheduled.request_id not in resumed:
            return scheduled
        tables = zip(first[scheduled.request_id], scheduled.blocks, strict=True)
        return replace(scheduled, blocks=tuple(old[: len(new)] + new[len(old) :] for old, new in tables))

    def build(step: StepView) -> Any:
        back = [each.request_id for each in step.scheduled if each.resumed and each.request_id in first]
        resumed.update(dict.fromkeys(back))
        for each in step.scheduled:
            if each.request_id not in resumed:
                first[each.request_id] = tuple(map(list, each.blocks))  # a lazy table is of its step only
        return build_meta(replace(step, scheduled=tuple(map(stale, step.scheduled))))

    core.build_meta = build


def stores_uncomputed(scheduler: Any, worker: Any) -> None:
    """A block is stored as soon as it is allocated and its tokens are known, before they are computed."""
    core, half = scheduler._side.scheduler, scheduler._scheduler
    take_step = core._take_step
    block_tokens = half._layout.groups[0].block_tokens

    def early(scheduled: ScheduledRequest, loading: frozenset[int]) -> None:
        end = -(-(scheduled.computed_tokens + scheduled.scheduled_tokens) // block_tokens) * block_tokens
        end = min(end, len(scheduled.tokens))
        take_step(replace(scheduled, scheduled_tokens=max(0, end - scheduled.computed_tokens)), loading)

    core._take_step = early


def double_release_at_abort(scheduler: Any, worker: Any) -> None:
    """Blocks of an aborted request that were kept for its stores are given back twice."""
    half, again, aborted = worker._worker, dict[str, None](), dict[str, None]()
    take_reports, finish = half.take_reports, scheduler._scheduler.finished

    async def note(request: Any, table: BlockTable) -> bool:
        if request.status.name == "FINISHED_ABORTED":
            aborted[request.request_id] = None
        held: bool = await finish(request, table)
        return held

    async def twice(request_ids: Any) -> Finished:
        finished: Finished = await take_reports(request_ids)
        result = replace(finished, sent=finished.sent | frozenset(again))
        again.clear()
        again.update((name, None) for name in finished.sent if name in aborted)
        return result

    half.take_reports, scheduler._scheduler.finished = twice, note


def promise_over_the_end(scheduler: Any, worker: Any) -> None:
    """A full hit promises all n tokens, and nothing is left to compute the next token from."""
    half, core = scheduler._scheduler, scheduler._side.scheduler
    matched_tokens, after_alloc = half.matched_tokens, core.after_alloc

    async def one_more(request: Any, local_tokens: int) -> tuple[int | None, bool]:
        tokens, load_async = await matched_tokens(request, local_tokens)
        if tokens and local_tokens + tokens == request.num_tokens - 1:
            tokens += 1
        return tokens, load_async

    def taken(request: RequestView, blocks: BlockTable, external_tokens: int) -> None:
        tracker = core.tracker(request.request_id)
        promised = tracker.promised_tokens if tracker is not None else 0
        after_alloc(request, blocks, min(external_tokens, promised))

    half.matched_tokens, core.after_alloc = one_more, taken


def no_stranding(scheduler: Any, worker: Any) -> None:
    """Failed asynchronous loads are left to vLLM, which can then wait for ever (docs/findings)."""
    scheduler._scheduler._load_async = False


MUTANTS: dict[str, Spoil] = {
    "skipped-load": skipped_load,
    "shifted-load": shifted_by(SLOT_BYTES),
    "no-fence": no_fence,
    "stale-blocks": stale_blocks_after_resume,
    "uncomputed-stores": stores_uncomputed,
    "double-release": double_release_at_abort,
    "promise-over-n-1": promise_over_the_end,
    "no-stranding": no_stranding,
}

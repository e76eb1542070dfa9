"""Mutants of copies between the engine's blocks and the cache: their order, their fences, their end (groups A, B).

All are looked for with workers that copy; `pages` has those of servers that do.
"""

from __future__ import annotations

from functools import partial

from kvcore.ladder.zoo import mutant
from kvcore.ladder.zoo.mutant import Edit

_WORKER = "kvcore.connectors.worker:WorkerConnector"
_SCHEDULER = "kvcore.connectors.scheduler:SchedulerConnector"

_STORE_COPIES = """\
    moved = await self._copy(job, "store", lambda index: self._store_moves(plan.cells[index], _view(grants, index)))
    await self._client.commit_store(job.tag, [index in moved for index in range(len(cells))])
"""

bug = partial(mutant.bug, transfer="worker")
hard = partial(mutant.hard, transfer="worker")
safe = partial(mutant.safe, transfer="worker")

MUTANTS = (
    bug(
        "publish_before_the_copy_has_ended",
        "A",
        "a reply is taken for the device event; readers see a half-filled object (R04, R29)",
        "bytes",
        Edit(
            f"{_WORKER}._store",
            _STORE_COPIES,
            """\
    await self._client.commit_store(job.tag, [index in job.cells for index in range(len(cells))])
    moved = await self._copy(job, "store", lambda index: self._store_moves(plan.cells[index], _view(grants, index)))
""",
        ),
    ),
    bug(
        "preemption_without_the_fence",
        "A",
        "a store still reads blocks that already belong to somebody else (R01)",
        "blocks bytes",
        Edit(
            f"{_WORKER}.fence",
            "near = [job for job in self._jobs.values() if not job.blocks.isdisjoint(allocated)]",
            "near: list[Job] = []",
        ),
    ),
    bug(
        "fence_by_request",
        "A",
        "only stores of the preempted requests are fenced; blocks that left a window come back unseen (R01, R61)",
        "blocks bytes",
        Edit(
            f"{_WORKER}.fence",
            "if not job.blocks.isdisjoint(allocated)]",
            "if isinstance(job, StoreJob) and job.plan.generation in meta.given_up]",
        ),
    ),
    bug(
        "only_new_blocks_of_running_requests_are_fenced",
        "A",
        "blocks allocated for an asynchronous load are not in the batch, so nobody fences the stores of them (R61)",
        "blocks bytes",
        Edit(
            f"{_SCHEDULER}.build_meta",
            "tuple(sorted(step.allocated)),",
            "tuple(sorted({block for each in step.scheduled for ids in each.new_blocks for block in ids})),",
        ),
    ),
    bug(
        "begun_copies_are_not_waited_for",
        "A",
        "the fence drops what has not begun and forgets to wait for what has (R01)",
        "blocks bytes",
        Edit(f"{_WORKER}.fence", "    if not begun:\n        return None\n    self._counts", "    self._counts"),
        Edit(f"{_WORKER}.fence", "return self._wait_done(begun)", "return None"),
    ),
    bug(
        "load_that_found_nothing_is_never_reported",
        "A",
        "a load without a single grant, say of an aborted request, ends without a word (R02, R16)",
        "bytes liveness output",
        Edit(
            f"{_WORKER}._load",
            "    self._keep_usable(job, grants)\n",
            "    self._keep_usable(job, grants)\n    if not job.cells:\n        return\n",
        ),
    ),
    hard(
        "old_load_ends_the_new_request_of_that_name",
        "A",
        "an aborted request's load is not remembered, and its report ends the load of the next of that name (R02, R40)",
        "bytes output blocks crash",
        Edit(f"{_SCHEDULER}._drop_load", "self._orphans[tracker.request_id] = None", "pass"),
        note="no seed meets an abort in the load and the same id before its report: "
        "tests/sim/connector/test_connector_stores.py does",
    ),
    bug(
        "store_before_the_forward_pass",
        "B",
        "computed is the host's word; the store does not wait for the kernel that writes the block (R04)",
        "blocks bytes",
        Edit(f"{_WORKER}._submit", "after=(job.after,)", 'after=() if stream == "store" else (job.after,)'),
    ),
    safe(
        "load_before_the_last_reader",
        "B",
        "a load does not wait for what was submitted before it: zeroing and the block's last readers (R05)",
        "the engine, which ends a step and the zeroing of the blocks to be loaded before it calls for the next loads",
        Edit(f"{_WORKER}._submit", "after=(job.after,)", 'after=() if stream == "load" else (job.after,)'),
    ),
    bug(
        "first_layer_reads_too_early",
        "B",
        "layer 0 is run without waiting for the load, as if there were nothing before it (R62)",
        "bytes output crash",
        Edit(
            f"{_WORKER}.wait_load",
            "return self._wait_ended(pending) if pending else None",
            "return self._wait_ended(pending) if pending and layer else None",
        ),
    ),
    hard(
        "refused_copies_count_as_loaded",
        "E",
        "what the device did not take, or broke off, is good if only the lease was good (R16, R18)",
        "bytes output",
        Edit(f"{_WORKER}._load", "[index in moved and held[index] for", "[held[index] for"),
    ),
    bug(
        "failed_copies_are_committed",
        "E",
        "a store commits all cells that it was granted, copied or not (R18, R19)",
        "bytes",
        Edit(f"{_WORKER}._store", "[index in moved for index", "[index in moved or bool(moved) for index"),
    ),
    bug(
        "errors_of_asynchronous_loads_are_not_reported",
        "E",
        "the end of the load is reported, its bad blocks are not (R16)",
        "bytes output",
        Edit(
            f"{_WORKER}._report_load",
            "for block in cell.blocks if block != NULL_BLOCK)",
            "for block in cell.blocks if block != NULL_BLOCK and not plan.load_async)",
        ),
        Edit(
            f"{_WORKER}._report_load",
            "if bad and len(self._layout.groups) > 1:",
            "if bad and len(self._layout.groups) > 2:",
        ),
    ),
    bug(
        "only_rank_0_loads",
        "I",
        "the other ranks report a load without having copied anything (R42)",
        "bytes output",
        Edit(
            f"{_WORKER}._load_moves",
            "return self._pages.into(cell.group, cell.blocks, view)",
            "return self._pages.into(cell.group, cell.blocks, view) if self._rank == 0 else []",
        ),
    ),
    safe(
        "sent_is_reported_at_once",
        "A",
        "the engine takes an ended request's blocks back while a store still reads them (R02)",
        "the fence: whoever gets such a block next waits for the copy, whatever the engine was told",
        Edit(f"{_WORKER}.finished", "if self._ended else set()", "if not self._ended else set()"),
    ),
    safe(
        "lease_is_not_looked_at_after_the_load",
        "G",
        "a load counts although its lease ran out on the way (R30)",
        "the I/O hold: it keeps the bytes in place until the copy has ended, lease or no lease",
        Edit(f"{_WORKER}._load", "[index in moved and held[index] for", "[index in moved for"),
    ),
)

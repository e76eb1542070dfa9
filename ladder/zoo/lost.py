"""Mutants that answer everything right and lose hits, or room, or what keeps two names apart (groups F, J, K, L)."""

from __future__ import annotations

from kvcore.ladder.zoo.mutant import Edit, bug, hard

_ROOM = "kvcore.l1_room:Room"
_HASHER = "kvcore.keys:ChunkHasher"
_WORKER = "kvcore.connectors.worker:WorkerConnector"

MUTANTS = (
    bug(
        "items_are_left_out_of_the_hash",
        "J",
        "placeholders of different images are equal tokens, and the hash knows nothing else (R45)",
        "bytes",
        Edit(
            f"{_HASHER}.hash_tokens",
            "suffixes = self._extras_by_chunk(extras) if extras else {}",
            "suffixes: dict[int, bytes] = {}",
        ),
    ),
    bug(
        "scheduler_hashes_without_the_items",
        "J",
        "the hasher would tell images apart, and the connector does not hand them over (R45)",
        "bytes",
        Edit("kvcore.connectors.scheduler:SchedulerConnector._hash", ", extras=tracker.extras)", ")"),
    ),
    bug(
        "adapter_is_not_in_the_namespace",
        "J",
        "what was computed with one adapter is found under another one, or under none (R46)",
        "identity",
        Edit("kvcore.keys:Namespace._fields", '        "adapter": self.adapter,\n', ""),
    ),
    bug(
        "stored_without_the_tenant",
        "J",
        "the memory tier separates tenants in its lookups and not in its stores, so they never hit (R47)",
        "lost prefix",
        Edit(
            "kvcore.service.worker_operations:WorkerOperations._keys_to_store",
            "self._key(chunk_hash, request.rank, group, request.salt)",
            'self._key(chunk_hash, request.rank, group, "")',
        ),
    ),
    hard(
        "one_store_per_step",
        "L",
        "of the requests that have stores in one step the first is served; chunks are passed over for good (R14)",
        "lost",
        Edit(f"{_WORKER}.wait_save", "    for plan in meta.stores:\n", "    for plan in meta.stores[:1]:\n"),
        note="seldom do two requests after the faults store in one step; rung 2 sees it: tests/ladder/test_lost.py",
    ),
    bug(
        "lasting_writer_leaves_a_temporary_object",
        "F",
        "who writes what a prefetch has brought is told that it is there, and it goes with its readers (R65)",
        "lost",
        Edit("kvcore.l1:L1Cache._meet", "        slot.temporary = False\n", ""),
    ),
    bug(
        "one_more_is_evicted",
        "K",
        "eviction goes on when exactly enough is free (R57)",
        "lost",
        Edit(f"{_ROOM}._evict", "while freed < bytes_wanted and", "while freed <= bytes_wanted and"),
    ),
    bug(
        "everything_is_evicted_for_one",
        "K",
        "whoever finds no room empties the cache (R57)",
        "lost",
        Edit(f"{_ROOM}._obtain", "if not self.evict(extent * len(missing)):", "if not self.evict(self.bytes_used):"),
    ),
    hard(
        "full_tenant_evicts_others",
        "K",
        "a tenant at its limit makes room among everybody's objects (R47)",
        "lost quota",
        Edit(f"{_ROOM}._admit", "lambda: tenants.victim_of(salt)", "self.order.victim"),
    ),
    bug(
        "limit_of_a_tenant_is_a_wish",
        "K",
        "when nothing of a full tenant can be evicted, it gets the room all the same (R47)",
        "quota",
        Edit(f"{_ROOM}._admit", "return not ledger.excess(salt, extent)", "return True"),
    ),
    hard(
        "replies_to_a_store_are_shifted",
        "L",
        "the parts of a store are one list that shrinks while it is walked with their replies (R19)",
        "lost bytes",
        Edit(
            "kvcore.service.worker_client:WorkerClient.reserve_store",
            "_OpenStore(list(parts), [False] * len(cells))",
            "_OpenStore(parts, [False] * len(cells))",
        ),
        note="no seed of 200 meets a part that is over before another; rung 2 does with two servers that share chunks",
    ),
    bug(
        "settled_lookup_keeps_no_lease",
        "F",
        "naming the length gives everything back: each load fails and is computed instead (R24)",
        "lost",
        Edit(
            "kvcore.prefetch:PrefetchController.settle",
            "self._end_leases(job, minus(job.held, job.demand.needed(length)))",
            "self._end_leases(job, job.held)",
        ),
    ),
    bug(
        "lookups_that_were_answered_are_not_counted",
        "L",
        "lookups begin and never end, by the numbers (R60)",
        "counters",
        Edit("kvcore.prefetch:PrefetchController._answer", "    self._ready += 1\n", ""),
    ),
)

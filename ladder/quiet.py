"""`check_quiet`: in a world in which nothing goes wrong, nothing may fail, and nothing may be missing.

The climbs of target `sim` have room, time, a good network and whole stores. So at rest, after each pass with the cache:

1. No part counts a failure, a deadline that passed, a refusal or an expiry.
2. Whatever a request had computed when it ended is in the cache: the cell of each full chunk in the groups with full
   attention, on every rank, in L1 or in some L2. (Cells of windows and recurrent states are not kept everywhere.)
3. Every lasting object of L1 is in every L2 as well.
4. An L2 holds the records that its index names, and no others.

A cache that answers everything right and loses a part of its hits passes the other oracles, for a miss is never wrong.
Rule 1 also sees what is repaired before it can be seen in an output: a load that fails and is computed instead.

Nothing is held. Called at rest only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from kvcore.groups import GroupKind
from kvcore.keys import ObjectKey
from kvcore.l2.indexed import IndexedAdapter
from kvcore.l2.memory import MemoryBackend
from kvcore.ladder.server_stack import ServerStack
from kvcore.ladder.stack import CacheStack
from kvcore.sim.engine.request import RequestSpec
from kvcore.sim.oracles.findings import Findings

_NEVER: Mapping[str, tuple[str, ...]] = {
    "SchedulerConnectorStatistics": ("load_failures", "orphans"),
    "WorkerConnectorStatistics": ("loads_failed", "copies_refused"),
    "WorkerClientStatistics": ("batches_lost",),
    "ConnectionStatistics": ("timeouts", "resends", "replies_foreign"),
    "ServerStatistics": ("sessions_expired", "workers_reaped", "errors"),
    "PumpStatistics": ("refused", "deadlines", "late"),
    "PrefetchStatistics": ("deadlines", "expired"),
    "LoadStatistics": ("failed", "refused"),
    "WritebackStatistics": ("full", "failed", "retried", "deadlines"),
    "L1Statistics": ("expired_leases", "expired_writes", "no_space", "mismatches"),
}
"""By the name of the statistics: what stays 0."""


def check_quiet(
    stack: CacheStack, requests: Sequence[RequestSpec], hashes: Mapping[str, list[bytes]], findings: Findings
) -> None:
    """All four. `hashes`: of the chunks of each request's whole sequence."""
    for name, value in _failures(stack):
        findings.report("quiet", f"{name} is {value} where nothing can fail")
    check_kept(stack, requests, hashes, findings)
    for server in stack.servers:
        for text in _records(server):
            findings.report("lost", text)


def check_kept(
    stack: CacheStack, requests: Sequence[RequestSpec], hashes: Mapping[str, list[bytes]], findings: Findings
) -> None:
    """Rules 2 and 3 for what these requests have computed, where there was room and time for all of it."""
    chunks = frozenset(digest for spec in requests for digest in hashes[spec.request_id])
    for text in _lost(stack, requests, hashes):
        findings.report("lost", text)
    for server in stack.servers:
        for text in _tiers(server, chunks):
            findings.report("lost", text)


def _failures(stack: CacheStack) -> Iterator[tuple[str, Any]]:
    for component, state in stack.states():
        for part in (state, *_parts(state)):
            for name in _NEVER.get(type(part).__name__, ()):
                if value := getattr(part, name):
                    yield f"{component}: {name}", value


def _parts(state: Any) -> Iterator[Any]:
    """The statistics inside those of a storage."""
    for name in ("l1", "prefetch", "writeback"):
        if hasattr(state, name):
            yield getattr(state, name)
    yield from getattr(state, "adapters", ())
    if hasattr(state, "prefetch"):
        yield state.prefetch.loads


def _lost(stack: CacheStack, requests: Sequence[RequestSpec], hashes: Mapping[str, list[bytes]]) -> Iterator[str]:
    layout, model = stack.config.layout, stack.config.namespace.model_name
    full = [group for group, spec in enumerate(layout.groups) if spec.kind is GroupKind.FULL]
    there = [_all_keys(server) for server in stack.servers]
    for spec in requests:
        computed = len(spec.prompt) + spec.output_tokens - 1  # the last token that was sampled has no KV
        missing = [
            (chunk, group, rank)
            for chunk, digest in enumerate(hashes[spec.request_id][: computed // layout.chunk_tokens])
            for group in full
            for rank in range(layout.ranks)
            if ObjectKey(digest, model, rank, group, spec.cache_salt)
            not in there[stack.config.placement.server_of(rank, digest)]
        ]
        if missing:
            chunk, group, rank = missing[0]
            yield (
                f"{spec.request_id} had computed {len(missing)} cells that are nowhere in the cache, the first of"
                f" chunk {chunk}, group {group}, rank {rank}"
            )


def _all_keys(server: ServerStack) -> frozenset[ObjectKey]:
    return frozenset(server.l1.resident_keys()).union(*(adapter.keys() for adapter in server.adapters))


def _tiers(server: ServerStack, chunks: Collection[bytes]) -> Iterator[str]:
    lasting = [key for key in server.l1.resident_keys() if key.chunk_hash in chunks and not _is_temporary(server, key)]
    for adapter in server.adapters:
        held = frozenset(adapter.keys())
        absent = sum(key not in held for key in lasting)
        if absent:
            yield f"{adapter.name} lacks {absent} of {len(lasting)} lasting objects of L1"


def _records(server: ServerStack) -> Iterator[str]:
    for adapter in server.adapters:
        backend, held = _backend(adapter.bottom), adapter.keys()
        if isinstance(backend, MemoryBackend) and backend.records.keys() != frozenset(held):
            yield f"{adapter.name} has {len(backend.records)} records, its index names {len(held)}"


def _is_temporary(server: ServerStack, key: ObjectKey) -> bool:
    slot = server.l1.slot_of(key)
    return slot is not None and slot.temporary


def _backend(adapter: object) -> object:
    return adapter._backend if isinstance(adapter, IndexedAdapter) else None

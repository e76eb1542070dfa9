"""The short scenarios of the sweeps: a few requests in a small world, each about one thing that the cache does.

A sweep runs a scenario once per point, so it must be small: some hundred callbacks and a few milliseconds of CPU time.
Ties go first in, first out, except where a scenario says otherwise: what varies is the point of the fault alone. Delays
are short and the deadlines shorter than a swarm's, so that a lost message costs little virtual time.

Scenarios are values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig, Schedule

MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """A case without faults, and what it is about. `mark`: the sometimes mark that shows that it happens."""

    name: str
    about: str
    case: Case
    mark: str = ""


def _scenario(
    name: str, about: str, requests: tuple[CaseRequest, ...], mark: str = "", seed: int = 1, **config: Any
) -> Scenario:
    given = {
        "chunk_tokens": 8,
        "servers": 1,
        "num_blocks": 64,
        "fault_ns": 10_000 * MS,
        "lookup_timeout_ns": 20 * MS,
        "server_timeout_ns": 15 * MS,
        "linger_ns": 40 * MS,
        "request_timeout_ns": 20 * MS,
        "hello_interval_ns": 5 * MS,
        "resend_ns_max": 20 * MS,
        "lease_ns": 200 * MS,
        "store_deadline_ns": 100 * MS,
        "session_idle_ns": 400 * MS,
        "store_lease_ns": 300 * MS,
        **config,
    }
    second = (CaseRequest("second", (90, 91), 1, 1),)
    case = Case(seed, EpisodeConfig(**given), requests, second, schedule=Schedule("fifo"))
    return Scenario(name, about, case, mark)


def _one(name: str, *chunks: int, tail: int = 1, output: int = 1, at_us: int = 0, salt: str = "") -> CaseRequest:
    return CaseRequest(name, chunks, tail, output, at_us * 1000, salt)


_SCENARIOS = (
    _scenario(
        "store_and_load",
        "one request is stored and comes back from L1",
        (_one("a", 1, 2),),
        "engine.id_reused",
        prefix_cache=False,
    ),
    _scenario(
        "shared_prefix",
        "two requests with a common prefix load at the same time, asynchronously",
        (_one("a", 1, 2), _one("b", 1, 3, at_us=50)),
        "l1.shared_read",
        load_async=True,
    ),
    _scenario(
        "from_store",
        "L1 is dropped and the second pass loads from a memory store",
        (_one("a", 1, 2), _one("b", 1, 2, 3)),
        "prefetch.load_joined",
        between_passes="drop_l1",
        load_async=True,
        l2_latency_ns=(200_000, 400_000),
    ),
    _scenario(
        "from_files",
        "L1 is dropped and the second pass loads from files, which stay in L1",
        (_one("a", 1, 2), _one("b", 1, 3)),
        "prefetch.load_joined",
        l2=("file",),
        retain=True,
        between_passes="drop_l1",
    ),
    _scenario(
        "two_stores",
        "objects are written to two adapters, whose locks protect nothing and which evict",
        (_one("a", 1, 2, 3), _one("b", 4, 5)),
        "l2.evicted",
        l2_chunks=5,
        l2=("memory", "file"),
        between_passes="drop_l1",
        weak_locks=True,
    ),
    _scenario(
        "two_servers",
        "chunks lie on two servers, for two ranks",
        (_one("a", 1, 2, 3), _one("b", 1, 2, 4, at_us=50)),
        "lookup.servers_disagree",
        servers=2,
        ranks=2,
        load_async=True,
        prefix_cache=False,
    ),
    _scenario(
        "preempted",
        "blocks hardly suffice: victims lose theirs while their stores are in flight and come back through loads",
        (_one("a", 1, 2, output=9), _one("b", 3, 4, output=9), _one("c", 5, 6, output=9)),
        "engine.preempted_storing",
        num_blocks=16,
        page_ns=(200_000, 400_000),
        prefix_cache=False,
    ),
    _scenario(
        "window",
        "a window group, whose blocks come back while they are stored, and loads of its last chunks only",
        (_one("a", 1, 2, 3, 4, output=4), _one("b", 1, 2, 3, 5)),
        "worker.store_cancelled",
        groups="full+window",
        window_tokens=12,
        between_passes="drop_l1",
        prefix_cache=False,
    ),
    _scenario(
        "recurrent",
        "a recurrent group: a whole prompt found falls back to the snapshot before its last",
        (_one("a", 1, 2, 3, tail=0), _one("b", 1, 2, 4)),
        "engine.recurrent_fallback",
        groups="full+window+recurrent",
        max_batched_tokens=8,
        prefix_cache=False,
    ),
    _scenario(
        "small_memory",
        "L1 holds less than one pass stores: evictions, refusals and shorter hits",
        (_one("a", 1, 2, 3), _one("b", 4, 5, 6), _one("c", 1, 2, 7)),
        "l1.evicted",
        l1_chunks=4,
        prefix_cache=False,
    ),
    _scenario(
        "small_budget",
        "lookups wait for each other's bytes of the prefetch budget",
        (_one("a", 1, 2), _one("b", 3, 4), _one("c", 5, 6)),
        "prefetch.admission_waited",
        prefetch_budget_chunks=2,
        between_passes="drop_l1",
        prefix_cache=False,
        load_async=True,
    ),
    _scenario(
        "through_l1",
        "objects leave L1 as soon as the store has them, and are written for two tenants with quotas",
        (_one("a", 1, 2, salt="x"), _one("b", 1, 2, 3, salt="y")),
        "writeback.made_temporary",
        skip_l1=True,
        tenant_chunks=4,
        prefix_cache=False,
    ),
    _scenario(
        "inside_a_chunk",
        "the engine's own prefix ends inside a chunk, of which the rest is loaded",
        (_one("a", 1, 2, 3), _one("b", 4, 5, at_us=2000), _one("c", 1, 2, 3, at_us=4000)),
        "engine.local_inside_chunk",
        num_blocks=11,
    ),
    _scenario(
        "in_process",
        "engine and cache are one process, without a network",
        (_one("a", 1, 2), _one("b", 1, 3)),
        "l1.temporary_gone",
        servers=0,
        l2=("file",),
        between_passes="drop_l1",
    ),
)

SCENARIOS = {scenario.name: scenario for scenario in _SCENARIOS}

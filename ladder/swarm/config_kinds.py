"""The extremes of a configuration as fault kinds of plane "config": drawn, and seen to have mattered.

A tiny L1 that never evicted anything has changed nothing. So each kind says whether the case has it, and by which
counter of the run one sees that it took effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcore.ladder.swarm.case import EpisodeConfig
from kvcore.ladder.swarm.outcome import Outcome

MS = 1_000_000


@dataclass(frozen=True, slots=True)
class ConfigKind:
    """`has`: the case is of this kind; `seen`: it took effect in the run."""

    name: str
    about: str
    has: Callable[[EpisodeConfig], bool]
    seen: Callable[[Outcome], bool]


def _met(*marks: str) -> Callable[[Outcome], bool]:
    return lambda outcome: any(outcome.marks.get(mark) for mark in marks)


def _loaded(outcome: Outcome) -> bool:
    return outcome.loads_verified > 0


def _stored(outcome: Outcome) -> bool:
    return outcome.stores_verified > 0


CONFIG_KINDS = (
    ConfigKind(
        "config.tiny_l1",
        "an L1 of at most four chunks evicts or refuses",
        lambda config: config.l1_chunks <= 4,
        _met("l1.evicted", "l1.no_space"),
    ),
    ConfigKind(
        "config.small_l1",
        "an L1 that is smaller than the workload evicts or refuses",
        lambda config: 4 < config.l1_chunks <= 40,
        _met("l1.evicted", "l1.no_space"),
    ),
    ConfigKind(
        "config.tiny_l2",
        "an L2 of at most eight chunks evicts or is full",
        lambda config: bool(config.l2) and 0 < config.l2_chunks <= 8,
        _met("l2.evicted", "writeback.full"),
    ),
    ConfigKind("config.no_l2", "an L1 alone serves loads", lambda config: not config.l2, _loaded),
    ConfigKind(
        "config.two_tiers",
        "one plan loads from two adapters",
        lambda config: len(config.l2) > 1,
        _met("prefetch.two_adapters"),
    ),
    ConfigKind("config.quota", "a tenant has a limit", lambda config: config.tenant_chunks > 0, _stored),
    ConfigKind(
        "config.budget",
        "prefetch may hold few bytes at a time",
        lambda config: bool(config.l2) and 0 < config.prefetch_budget_chunks <= 4,
        _met("prefetch.admission_waited", "prefetch.admission_cut"),
    ),
    ConfigKind(
        "config.short_deadlines",
        "deadlines of milliseconds, some of which pass",
        lambda config: config.lookup_timeout_ns < 10 * MS,
        _met(
            "net.request_timeout",
            "l1.lease_expired",
            "l1.write_expired",
            "lookup.server_failed",
            "server.session_expired",
        ),
    ),
    ConfigKind(
        "config.tight_blocks",
        "the engine preempts for lack of blocks",
        lambda config: config.max_num_seqs > 2,
        _met("engine.preempted"),
    ),
    ConfigKind(
        "config.small_chunks", "chunks of four tokens are stored", lambda config: config.chunk_tokens == 4, _stored
    ),
    ConfigKind("config.windows", "a sliding window is loaded", lambda config: "window" in config.groups, _loaded),
    ConfigKind("config.recurrent", "a recurrent state is loaded", lambda config: "recurrent" in config.groups, _loaded),
    ConfigKind("config.ranks", "two ranks load", lambda config: config.ranks > 1, _loaded),
    ConfigKind("config.two_servers", "cells on two servers are loaded", lambda config: config.servers > 1, _loaded),
    ConfigKind("config.in_process", "a cache without a server loads", lambda config: config.servers == 0, _loaded),
    ConfigKind("config.weak_locks", "an L2 that protects nothing is read", lambda config: config.weak_locks, _loaded),
    ConfigKind("config.retain", "what is loaded from L2 stays in L1", lambda config: config.retain, _loaded),
    ConfigKind(
        "config.skip_l1", "what is in L2 leaves L1", lambda config: config.skip_l1, _met("writeback.made_temporary")
    ),
    ConfigKind("config.s3fifo", "S3-FIFO evicts", lambda config: config.policy == "s3fifo", _met("l1.evicted")),
    ConfigKind(
        "config.engine_hashes", "keys come from block hashes", lambda config: config.hash_mode == "engine", _stored
    ),
    ConfigKind(
        "config.server_copies",
        "servers copy from and to the workers' pages",
        lambda config: config.transfer == "server",
        _met("server.copied_in"),
    ),
    ConfigKind(
        "config.pages_fail",
        "blocks of a worker's pages cannot be copied",
        lambda config: config.pages_fail > 0,
        _met("server.copy_failed"),
    ),
    ConfigKind(
        "config.pays",
        "the admission promises what pays",
        lambda config: config.admission == "if-it-pays",
        _met("connector.refused", "connector.lookup_unwanted"),
    ),
    ConfigKind(
        "config.drawn_admission",
        "chance promises any part of what was found",
        lambda config: config.admission == "drawn",
        _met("connector.refused", "connector.lookup_unwanted"),
    ),
    ConfigKind(
        "config.cleared", "L1 is cleared while requests are served", lambda config: config.clear_ns > 0, _stored
    ),
    ConfigKind(
        "config.beyond_engine",
        "a hostile engine preempts",
        lambda config: config.beyond_engine,
        _met("engine.preempted"),
    ),
)


def config_kinds(config: EpisodeConfig, outcome: Outcome) -> tuple[dict[str, int], dict[str, int]]:
    """(drawn, took effect), in the form of the fault counters."""
    drawn = [kind for kind in CONFIG_KINDS if kind.has(config)]
    return {kind.name: 1 for kind in drawn}, {kind.name: 1 for kind in drawn if kind.seen(outcome)}

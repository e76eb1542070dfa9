"""Climbs where something is short: room in L1 and L2, budget, time. Every token and every byte, as on the matrix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvcore.keys import Namespace, ObjectKey
from kvcore.ladder.pressure import Climbed, climb_pressed, floors
from kvcore.ladder.result import Floors
from kvcore.ladder.stack import StackConfig
from kvcore.quota import Quota
from kvcore.service.client import SchedulerConfig
from kvcore.service.server import ServerConfig
from kvcore.service.worker_operations import WorkerOperations
from kvcore.storage import Storage, StorageConfig

pytestmark = pytest.mark.ladder

REQUESTS = 40
MS = 1_000_000
PREEMPTED = Floors(requests=REQUESTS, preemptions=1, stores_verified=1)
LOADED = Floors(requests=REQUESTS, loads_verified=1)


def few_chunks(config: StackConfig) -> StackConfig:
    """Room for few chunks everywhere, less than that for the small tenant, and least for prefetch."""
    cell = config.layout.cell_bytes(0)
    return replace(
        config,
        l1_bytes=60 * cell,
        policy="s3fifo",
        quota=Quota({"small": 8 * cell}, default_bytes=40 * cell),
        l2=("memory",),
        l2_bytes=400 * cell,
        l2_quota=Quota({"small": 60 * cell}),
        prefetch_budget_bytes=30 * cell,
    )


def tenants_climb() -> Climbed:
    demands = floors(REQUESTS, r3b=LOADED, r4=PREEMPTED)
    return climb_pressed("full/r1/s1/async", change=few_chunks, salts=("", "small", "large"), demands=demands)


def test_a_tiny_l1_with_tenants_and_quotas_evicts_and_changes_no_output() -> None:
    """Three tenants share prefixes and must not share chunks; one has a quota of a few chunks, L1 holds few more."""
    climbed = tenants_climb()
    assert climbed.problems == []
    assert climbed.total("l1", "evictions") > 100


def test_a_server_that_forgets_the_tenant_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    key, start = WorkerOperations._key, Storage.start_lookup

    def of_nobody(self: WorkerOperations, chunk: bytes, rank: int, group: int, salt: str) -> ObjectKey:
        return key(self, chunk, rank, group, "")

    monkeypatch.setattr(WorkerOperations, "_key", of_nobody)
    monkeypatch.setattr(
        Storage, "start_lookup", lambda self, *named, **more: start(self, *named, **{**more, "salt": ""})
    )
    assert any("[prefix]" in problem for problem in tenants_climb().problems)


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_tiny_l1_before_two_small_stores_changes_no_output(policy: str) -> None:
    """Hybrid layout, written through and out of L1 at once, half of a chunk column short at any time."""

    def change(config: StackConfig) -> StackConfig:
        row = sum(config.layout.cell_bytes_rows)
        return replace(
            config,
            l1_bytes=24 * row,
            policy=policy,
            skip_l1=policy == "lru",
            retain=policy == "s3fifo",
            l2=("memory", "file"),
            l2_bytes=120 * row,
            prefetch_budget_bytes=12 * row,
            storage=StorageConfig(writeback_bytes_inflight_max=4 * row, store_batch_objects_max=4),
        )

    demands = floors(REQUESTS, r3b=LOADED, r4=PREEMPTED)
    climbed = climb_pressed("full+window+recurrent/r1/inproc/async", change=change, demands=demands)
    assert climbed.problems == []
    assert climbed.total("l1", "evictions") > 10


def test_leases_run_out_and_deadlines_answer_before_a_slow_store() -> None:
    """Lookups wait for L2 no longer than it needs for a part of them; leases end while their loads still run."""

    def change(config: StackConfig) -> StackConfig:
        return replace(
            config,
            l2=("file",),
            storage=StorageConfig(lease_ns=MS // 2, lookup_deadline_ns=6 * MS, store_deadline_ns=20 * MS),
            lookup=SchedulerConfig(lookup_timeout_ns=12 * MS, server_timeout_ns=8 * MS, linger_ns=40 * MS),
            server=ServerConfig(session_idle_ns=30 * MS, store_lease_ns=30 * MS),
        )

    climbed = climb_pressed(
        "full+window/r2/s2/async",
        change=change,
        demands=floors(REQUESTS, r4=PREEMPTED),
        l2_latency_ns=(MS, 40 * MS),
        page_ns=(20_000, 400_000),
        load_page_ns=(20_000, 300_000),
    )
    assert climbed.problems == []
    assert sum(rung.counts.loads_verified for rung in climbed.rungs) > 0
    assert climbed.total("l1", "expired_leases") > 0
    assert climbed.total("l1", "expired_writes") > 0
    assert climbed.total("prefetch", "deadlines") > 0


def test_an_engine_of_another_model_is_refused_and_computes_everything_itself() -> None:
    def change(config: StackConfig) -> StackConfig:
        return replace(config, engine_namespace=replace(config.namespace, model_revision="another"))

    climbed = climb_pressed("full/r1/s1/sync", change=change, demands=floors(REQUESTS))
    assert climbed.problems == []
    assert [rung.counts.tokens_loaded for rung in climbed.rungs] == [0] * len(climbed.rungs)
    assert climbed.total("l1", "published") == 0


def test_chunks_hashed_by_the_engine_change_no_output() -> None:
    def change(config: StackConfig) -> StackConfig:
        known = config.namespace
        namespace = Namespace(
            known.model_name,
            layout=known.layout,
            chunk_tokens=known.chunk_tokens,
            hash_mode="engine",
            engine_algorithm="blake3",
        )
        return replace(config, namespace=namespace)

    demands = floors(REQUESTS, r3=Floors(requests=REQUESTS, hit_share=0.8), r4=PREEMPTED)
    climbed = climb_pressed("full+window/r1/s1/sync", change=change, demands=demands)
    assert climbed.problems == []

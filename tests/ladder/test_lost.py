"""What answers everything right and still loses hits, room or the names of things: the oracles that see it can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore.connectors.worker import WorkerConnector
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout
from kvcore.keys import ChunkHasher, Namespace, ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l1_room import Room
from kvcore.l2.index import Index
from kvcore.ladder.climb import load_workload
from kvcore.ladder.configure import configure
from kvcore.ladder.matrix import MatrixCell
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.swarm.draw import draw_case
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.targets.sim import climb_cell
from kvcore.leases import Owner
from kvcore.memory import PlainArena
from kvcore.ports import NullTracer
from kvcore.prefetch import PrefetchController
from kvcore.quota import Quota
from kvcore.service.worker_client import WorkerClient
from kvcore.service.worker_operations import WorkerOperations
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.identity import confused
from kvcore.sim.oracles.l1 import WatchedL1
from kvcore.writeback import WritebackController

pytestmark = pytest.mark.ladder

TWO_TIERS = "full+window+recurrent/r1/s2/async"
Plant = Callable[[pytest.MonkeyPatch], None]


def climb(*hot: str, cell: str = TWO_TIERS, requests: int = 40) -> list[str]:
    """The problems of the first rung that fails, cold and then `hot`."""
    options = LadderOptions(cells=(MatrixCell.parse(cell),), requests=requests, passes=("0", "2", *hot))
    workload = load_workload(None, 0, requests=requests, chunk_tokens=options.chunk_tokens)
    rungs = climb_cell(options.cells[0], options, workload, "").rungs
    return list(rungs[-1].problems)


def test_nothing_is_lost_or_named_alike_as_it_is() -> None:
    assert climb("3", "3b") == []


# ---- lost hits, in a world in which nothing goes wrong


def _one_store_per_step(patch: pytest.MonkeyPatch) -> None:
    original = WorkerConnector.wait_save
    begin = WorkerConnector._begin_store

    def first_only(self: Any, plan: Any) -> None:
        if plan is self._meta_seen.stores[0]:
            begin(self, plan)

    def wait_save(self: Any) -> None:
        self._meta_seen = self._meta
        original(self)

    patch.setattr(WorkerConnector, "_begin_store", first_only)
    patch.setattr(WorkerConnector, "wait_save", wait_save)


def _replies_shifted(patch: pytest.MonkeyPatch) -> None:
    """The parts of a store are one list, which loses those that are over while it is walked."""
    original = WorkerClient._take_store

    def take(self: Any, store: Any, part: Any, reply: Any, grants: Any) -> None:
        if part.server == 1 and not store.granted[0]:
            return
        original(self, store, part, reply, grants)

    patch.setattr(WorkerClient, "_take_store", take)


def _first_tier_only(patch: pytest.MonkeyPatch) -> None:
    original = WritebackController.published

    def published(self: Any, key: Any, slot: Any, temporary: bool) -> None:
        lanes, self._lanes = self._lanes, self._lanes[:1]
        original(self, key, slot, temporary)
        self._lanes = lanes

    patch.setattr(WritebackController, "published", published)


def _tenants_share_their_keys(patch: pytest.MonkeyPatch) -> None:
    original = WorkerOperations._key
    patch.setattr(
        WorkerOperations,
        "_key",
        lambda self, chunk_hash, rank, group, salt: original(self, chunk_hash, rank, group, ""),
    )


def _records_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Index, "keys", lambda self: list(self._entries)[1:])


LOSSES: dict[str, Plant] = {
    "one store per step": _one_store_per_step,
    "one server's reply is skipped": _replies_shifted,
    "only the first tier is written": _first_tier_only,
    "tenants are left out of what is stored": _tenants_share_their_keys,
    "a record that the index does not name": _records_stay,
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_climb_loses_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LOSSES[name](monkeypatch)
    found = climb()
    assert any("[lost]" in text for text in found), found


def test_a_load_that_fails_and_is_computed_instead_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that keeps none of its leases: every load fails, every token is right."""
    monkeypatch.setattr(PrefetchController, "settle", lambda self, job, length: self._end_leases(job, job.held))
    found = climb("3")
    assert any("[quiet]" in text for text in found), found


def test_a_share_that_is_low_in_every_run_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without faults lose as much, so a comparison with them says nothing."""
    original = WorkerConnector._begin_store
    monkeypatch.setattr(
        WorkerConnector, "_begin_store", lambda self, plan: None if self._stores_begun > 3 else original(self, plan)
    )
    cases = [draw_case(seed, planes=()) for seed in range(12)]
    assert any(finding.oracle == "lost" for case in cases for finding in run_case(case).findings)


# ---- names


def _layout() -> CacheLayout:
    cell = MatrixCell.parse("full+window/r1/s1/sync")
    return configure(cell, LadderOptions(cells=(cell,)))[0].layout


@pytest.mark.parametrize("field", ["adapter", "model_revision", "kv_dtype", "quantisation", "chunk_tokens"])
def test_a_field_that_is_left_out_of_the_namespace_is_seen(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = _layout()
    assert list(confused(Namespace("model"), layout)) == []
    original = Namespace._fields

    def without(self: Namespace) -> dict[str, str | int]:
        return {name: value for name, value in original(self).items() if name != field}

    monkeypatch.setattr(Namespace, "_fields", without)
    assert list(confused(Namespace("model"), layout)) == [
        f"two namespaces that differ in their {field} share all chunk hashes"
    ]


def test_a_window_that_is_left_out_of_the_fingerprint_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheLayout, "_digest", lambda self: str([g.bytes_per_block for g in self.groups]).encode() * 9)
    assert any("window_tokens" in text for text in confused(Namespace("model"), _layout()))


ITEMS_SEED = 13
"""Its prompts look alike and hold two different items."""


def test_items_behind_the_same_placeholders_are_told_apart() -> None:
    outcome = run_case(draw_case(ITEMS_SEED))
    assert outcome.findings == []
    assert outcome.marks["keys.items_apart"]


def test_items_that_are_left_out_of_the_hash_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkHasher, "_extras_by_chunk", lambda self, extras: {})
    assert [finding.oracle for finding in run_case(draw_case(ITEMS_SEED)).findings][:1] == ["bytes"]


# ---- room and readers, at the L1 itself

BLUE, RED = (ObjectKey(salt[:1].encode() * 32, "model", 0, 0, salt) for salt in ("blue", "red"))


class Watched:
    """A watched L1 of two objects per tenant."""

    def __init__(self, quota: Quota | None = None) -> None:
        self.findings = Findings(lambda: 0)
        self.l1 = WatchedL1("l1", _Believing(), self.findings, NullTracer(), PlainArena(256), LruPolicy, quota)  # type: ignore[arg-type]

    def store(self, *keys: ObjectKey, temporary: bool = False) -> None:
        self.l1.reserve_write("writer", keys, 64, temporary=temporary)
        self.l1.finish_write("writer", keys, temporary=temporary)

    @property
    def oracles(self) -> list[str]:
        return [line.partition("]")[0][1:] for line in self.findings.violations]


class _Believing:
    def check(self, key: ObjectKey, found: memoryview, where: str) -> bool:
        return True


def _more(salt: str, number: int) -> ObjectKey:
    return ObjectKey(bytes([number]) * 32, "model", 0, 0, salt)


def test_more_is_evicted_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.store(*(_more("", number) for number in range(4)))
    original = Room._evict
    monkeypatch.setattr(Room, "_evict", lambda self, wanted, victim: original(self, 3 * wanted, victim))
    watched.store(BLUE)
    assert "lost" in watched.oracles


def test_another_tenant_is_evicted_although_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(Quota(default_bytes=64))
    watched.store(RED)
    watched.store(BLUE)
    monkeypatch.setattr(Room, "_admit", lambda self, *_: bool(self.evict(64)))
    watched.store(_more("blue", 1))
    assert "lost" in watched.oracles


def test_a_tenant_has_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(Quota(default_bytes=64))
    monkeypatch.setattr(Room, "_admit", lambda self, *_: True)
    watched.store(BLUE)
    assert watched.oracles == []
    watched.store(_more("blue", 1))
    assert "quota" in watched.oracles


def test_an_object_is_deleted_under_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.store(BLUE)
    watched.l1.reserve_read(Owner("session", 1, "lookup"), [BLUE])
    assert watched.oracles == []
    slot = watched.l1.slot_of(BLUE)
    assert slot is not None
    slot.readers = 0
    watched.l1.delete([BLUE])
    assert "leases" in watched.oracles


def test_a_lasting_writer_leaves_a_temporary_object(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.l1.reserve_write("loader", [BLUE], 64, temporary=True)
    watched.l1.finish_write_and_reserve_read("loader", [BLUE], [Owner("session", 1, "lookup")], temporary=True)
    monkeypatch.setattr(L1Cache, "_meet", lambda self, slot, size, temporary, answer: answer)
    watched.l1.reserve_write("writer", [BLUE], 64)
    assert watched.oracles == ["lost"]

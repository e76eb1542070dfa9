"""Each oracle of the simulation can fail: the code under test is made wrong, and the oracle that is meant says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvcore.answers import Answer
from kvcore.connectors.scheduler import SchedulerConnector
from kvcore.connectors.worker import WorkerConnector
from kvcore.eviction import LruPolicy
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l1_staging import Staging
from kvcore.l2.indexed import IndexedAdapter
from kvcore.l2.pump import AdapterPump
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.ladder.sweeps.scenario import SCENARIOS
from kvcore.leases import Owner
from kvcore.loads import LoadTable
from kvcore.memory import PlainArena
from kvcore.ports import NullTracer
from kvcore.prefetch import PrefetchController
from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.oracles.l1 import WatchedL1
from kvcore.writeback import WritebackController

pytestmark = pytest.mark.ladder


def run(scenario: str, *faults: FaultEvent) -> Outcome:
    return run_case(msgspec.structs.replace(SCENARIOS[scenario].case, faults=faults))


def findings_of(outcome: Outcome, oracle: str) -> list[str]:
    return [finding.text for finding in outcome.findings if finding.oracle == oracle]


# ---- visibility and leases, at the L1 itself


class Believing:
    """Truth for tests that are not about bytes."""

    def check(self, key: ObjectKey, found: memoryview, where: str) -> bool:
        return True


KEY = ObjectKey(b"k" * 32, "model", 0)
READER = Owner("session", 1, "lookup")


class Watched:
    """A watched L1 and what was found in it."""

    def __init__(self) -> None:
        self.findings = Findings(lambda: 0)
        truth: Any = Believing()
        self.l1 = WatchedL1("l1", truth, self.findings, NullTracer(), PlainArena(1024), LruPolicy)

    def store(self, tag: str = "writer") -> None:
        self.l1.reserve_write(tag, [KEY], 64)
        self.l1.finish_write(tag, [KEY])

    @property
    def oracles(self) -> list[str]:
        return [line.partition("]")[0][1:] for line in self.findings.violations]


def test_a_copy_out_of_what_the_owner_has_not_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.store()
    watched.l1.reserve_read(READER, [KEY])
    watched.l1.hold_read("worker", READER, [KEY])
    assert watched.oracles == []
    monkeypatch.setattr(L1Cache, "hold_read", lambda self, holder, owner, keys: [self.slot_of(key) for key in keys])
    watched.l1.hold_read("worker", Owner("stranger", 1, "lookup"), [KEY])
    assert watched.oracles == ["visibility"]


def test_a_copy_into_what_is_published_already(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.store()
    monkeypatch.setattr(L1Cache, "hold_write", lambda self, holder, tag, keys: [self.slot_of(key) for key in keys])
    watched.l1.hold_write("worker", "writer", [KEY])
    assert watched.oracles == ["visibility"]


def test_a_publication_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.l1.reserve_write("writer", [KEY], 64)
    monkeypatch.setattr(L1Cache, "abort_write", lambda self, tag, keys: [Answer.ABORTED for _ in keys])
    watched.l1.abort_write("writer", [KEY])
    watched.l1.finish_write("writer", [KEY])
    assert watched.oracles == ["visibility"]


def test_a_publication_after_the_write_lease_had_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    monkeypatch.setattr(Staging, "expire", lambda self, now_ns: iter(()))
    watched.l1.reserve_write("writer", [KEY], 64, deadline_ns=10)
    watched.l1.expire(10)
    watched.l1.finish_write("writer", [KEY])
    assert watched.oracles == ["visibility"]


def test_memory_that_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.store()
    monkeypatch.setattr(L1Cache, "_forget", lambda self, slots: None)
    watched.l1.delete([KEY])
    watched.l1.check_at_rest()
    assert "memory" in watched.oracles


def test_sums_that_are_wrong_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.l1.reserve_write("writer", [KEY], 64)
    monkeypatch.setattr(L1Cache, "_show", lambda self, *arguments: self._counters.__setattr__("bytes_resident", 0))
    watched.l1.finish_write("writer", [KEY])
    assert watched.oracles == ["memory"]


# ---- plan


def test_what_failed_to_arrive_is_published_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = LoadTable._complete

    def believe(self: LoadTable, loads: Any, bits: int) -> None:
        complete(self, loads, (1 << len(loads)) - 1)

    monkeypatch.setattr(LoadTable, "_complete", believe)
    outcome = run("from_store", FaultEvent("l2.error_nth", target="server0.memory", nth=1, amount=3))
    assert outcome.fired["l2.error_nth"]
    assert any("whose load from server0.memory had failed" in text for text in findings_of(outcome, "visibility"))


def test_locks_that_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterPump, "unlock", lambda self, keys: None)
    assert any("are locked" in text for text in findings_of(run("from_store"), "plan"))


# ---- counters


def _count_twice(kind: type, method: str, *fields: str) -> Callable[[pytest.MonkeyPatch], None]:
    """`method` counts what it adds to `fields` a second time."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(kind, method)

        def twice(self: Any, *arguments: Any, **more: Any) -> Any:
            before = [getattr(self, name) for name in fields]
            answer = original(self, *arguments, **more)
            for name, value in zip(fields, before, strict=True):
                setattr(self, name, 2 * getattr(self, name) - value)
            return answer

        patch.setattr(kind, method, twice)

    return plant


def _whole_cells(patch: pytest.MonkeyPatch) -> None:
    """A load reports its cells' bytes twice."""
    original = WorkerConnector._report_load

    def report(self: Any, job: Any, good: Any) -> None:
        original(self, job, good)
        self._counts["bytes_loaded"] += sum(self._layout.cell_bytes(cell.group) for cell in job.plan.cells)

    patch.setattr(WorkerConnector, "_report_load", report)


def _hits_without_lookups(patch: pytest.MonkeyPatch) -> None:
    original = SchedulerConnector._plan_load

    def planned(self: Any, tracker: Any, cells: Any) -> None:
        original(self, tracker, cells)
        self._counts["tokens_hit"] += tracker.looked_up_tokens

    patch.setattr(SchedulerConnector, "_plan_load", planned)


def _forgotten_record(patch: pytest.MonkeyPatch) -> None:
    original = IndexedAdapter._complete_store

    def completed(self: Any, batch: Any) -> None:
        original(self, batch)
        self._counts.bytes_in += 1

    patch.setattr(IndexedAdapter, "_complete_store", completed)


WRONG_COUNTS = {
    "bytes written back": _count_twice(WritebackController, "_count", "_bytes_stored"),
    "objects written back": _count_twice(WritebackController, "_count", "_stored"),
    "bytes loaded from L2": _count_twice(LoadTable, "_account", "_bytes_loaded"),
    "cells loaded": _count_twice(LoadTable, "_account", "_loaded"),
    "lookups ended": _count_twice(PrefetchController, "_answer", "_ready"),
    "bytes loaded": _whole_cells,
    "tokens hit": _hits_without_lookups,
    "bytes_in": _forgotten_record,
}


@pytest.mark.parametrize("name", WRONG_COUNTS)
def test_a_counter_that_says_too_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG_COUNTS[name](monkeypatch)
    found = findings_of(run("from_store"), "counters")
    assert any(f": {name} is " in text for text in found), found


def test_a_retry_that_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FaultEvent("l2.error_nth", target="server0.memory", nth=1, amount=1)
    assert run("store_and_load", fault).findings == []
    _count_twice(WritebackController, "_back_off", "_retried")(monkeypatch)
    found = findings_of(run("store_and_load", fault), "counters")
    assert any("writebacks retried" in text for text in found), found


def test_a_load_into_part_of_a_cell_reports_the_bytes_that_moved() -> None:
    """A request whose own prefix ends inside a chunk loads only the rest of it; the whole cell was reported once."""
    outcome = run("inside_a_chunk")
    assert outcome.findings == []
    assert outcome.marks["engine.local_inside_chunk"] >= 1

"""`L2Counts`: a snapshot shows every count where it belongs, and each kind of defect once."""

from __future__ import annotations

import dataclasses

import pytest

from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.statistics import L2Counts, L2Statistics

STATE = {
    "objects": 1,
    "locked": 2,
    "bytes_used": 3,
    "bytes_reserved": 4,
    "bytes_capacity": 5,
    "work_inflight": 6,
}


def snapshot(counts: L2Counts) -> L2Statistics:
    return counts.snapshot(**STATE)


@pytest.mark.parametrize("defect", Defect)
def test_a_defect_is_counted_once_and_under_its_name(defect: Defect) -> None:
    counts = L2Counts()
    counts.defects[defect] += 7
    shown = snapshot(counts)
    assert getattr(shown, defect.value) == shown.defects == 7


def test_defects_of_different_kinds_add_up() -> None:
    counts = L2Counts()
    for defect in Defect:
        counts.defects[defect] += 3
    assert snapshot(counts).defects == 3 * len(Defect)


def test_a_snapshot_has_every_count_in_its_place() -> None:
    counts = L2Counts()
    running = [field.name for field in dataclasses.fields(counts) if field.name not in ("answers", "defects")]
    for number, name in enumerate(running, 100):
        setattr(counts, name, number)
    counts.lookups, counts.lookup_hits, counts.loads, counts.load_hits = 9, 9, 8, 7
    for number, answer in enumerate((StoreAnswer.STORED, StoreAnswer.PRESENT, StoreAnswer.FULL, StoreAnswer.RETRY)):
        counts.answers[answer] = number
    shown = dataclasses.asdict(snapshot(counts))
    assert {name: shown[name] for name in STATE} == STATE
    assert {name: shown[name] for name in running} == {name: getattr(counts, name) for name in running}
    assert [shown[name] for name in ("stored", "present", "full", "retry", "failed")] == [0, 1, 2, 3, 0]


def test_a_new_adapter_has_counted_nothing() -> None:
    shown = dataclasses.asdict(snapshot(L2Counts()))
    assert not any(value for name, value in shown.items() if name not in STATE)

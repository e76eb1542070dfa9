"""Which records of a slab store one vectored call moves."""

import pytest

from kvcore.keys import ObjectKey
from kvcore.l2.slab_entry import PAGE_BYTES
from kvcore.l2.slab_jobs import Job, Record, entry_neighbours, neighbours, whole_pages
from kvcore.l2.slab_space import Run

SLAB_PAGES = 64


def job(position, *runs, slots=(0, 1), payload_bytes=None):
    pages = sum(count for _, count in runs)
    payload = memoryview(bytes(pages * PAGE_BYTES if payload_bytes is None else payload_bytes))
    record = Record(len(payload), tuple(Run(*run) for run in runs), Run(*slots), position, b"header")
    return Job(position, ObjectKey(b"hash", "model", 0), payload, record)


@pytest.mark.parametrize(
    ("places", "groups"),
    [
        ([[(0, 2)], [(2, 2)], [(4, 1)]], [[0, 1, 2]]),
        ([[(0, 2)], [(3, 2)], [(5, 1)]], [[0], [1, 2]]),  # a gap
        ([[(4, 2)], [(2, 2)]], [[0], [1]]),  # backwards
        ([[(60, 4)], [(64, 4)]], [[0], [1]]),  # the next slab is another file
        ([[(0, 2)], [(2, 1), (9, 1)], [(3, 2)], [(5, 1)]], [[0], [1], [2, 3]]),  # in pieces: alone
        ([[(0, 9)], [(9, 3)], [(12, 3)], [(15, 3)]], [[0], [1, 2], [3]]),  # eight pages at most, unless it is one
    ],
)
def test_one_call_moves_records_that_lie_side_by_side_up_to_a_bound(places, groups):
    jobs = [job(position, *runs) for position, runs in enumerate(places)]
    found = [[each.position for each in group] for group in neighbours(jobs, SLAB_PAGES, 8 * PAGE_BYTES)]
    assert found == groups


def test_one_call_writes_entries_whose_slots_follow_each_other():
    slots = [(5, 1), (6, 2), (8, 1), (10, 1), (9, 1)]
    jobs = [job(position, (0, 1), slots=place) for position, place in enumerate(slots)]
    assert [[each.position for each in group] for group in entry_neighbours(jobs)] == [[0, 1, 2], [3], [4]]


def test_payloads_are_filled_up_to_whole_pages():
    group = [job(0, (0, 2), payload_bytes=PAGE_BYTES + 1), job(1, (2, 1)), job(2, (3, 1), payload_bytes=0)]
    parts = [len(part) for part in whole_pages(group, memoryview(bytes(PAGE_BYTES)))]
    assert parts == [PAGE_BYTES + 1, PAGE_BYTES - 1, PAGE_BYTES, 0, PAGE_BYTES]

"""The records of a slab store, and the jobs of one call: which of them one vectored call can move. Pure.

Jobs whose pages lie side by side go in one call, up to a bound on its bytes; so do entries whose slots do. One of each
is made per key in threads that compete for the interpreter, so they are tuples made without a Python frame.

Who holds: the backend its records, a call its jobs and, through them, the caller's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from kvcore.keys import ObjectKey
from kvcore.l2.slab_entry import PAGE_BYTES
from kvcore.l2.slab_space import Run


class Record(NamedTuple):
    """Where a payload and its entry lie, and the envelope header that judges it."""

    payload_bytes: int
    runs: tuple[Run, ...]
    slots: Run
    sequence: int
    header: bytes


class Job(NamedTuple):
    """One key of one call, with the place of its record."""

    position: int
    key: ObjectKey
    payload: memoryview
    record: Record


Grouping = Callable[[list[Job]], Iterator[list[Job]]]

# tuple.__new__ runs without a Python frame per key
make_run: Callable[[tuple[int, int]], Run] = partial(tuple.__new__, Run)
make_record: Callable[[tuple[int, tuple[Run, ...], Run, int, bytes]], Record] = partial(tuple.__new__, Record)
make_job: Callable[[tuple[int, ObjectKey, memoryview, Record]], Job] = partial(tuple.__new__, Job)


def neighbours(jobs: list[Job], slab_pages: int, bytes_max: int) -> Iterator[list[Job]]:
    """What one call can move. The first page of a slab has no neighbour: it lies in another file."""
    group: list[Job] = []
    following = pages = 0
    for job in jobs:
        runs = job.record.runs
        start, count = runs[0]
        pages += count
        if group and (start != following or len(runs) > 1 or pages * PAGE_BYTES > bytes_max or start % slab_pages == 0):
            yield group
            group, pages = [], count
        group.append(job)
        following = start + count if len(runs) == 1 else -1
    if group:
        yield group


def pieces(job: Job) -> Iterator[tuple[Run, memoryview]]:
    """What of the payload belongs into which run."""
    start = 0
    for run in job.record.runs:
        end = start + run.count * PAGE_BYTES
        yield run, job.payload[start:end]
        start = end


def whole_pages(group: list[Job], padding: memoryview) -> list[memoryview]:
    """The payloads of neighbours, each filled up to a whole page, so that one call moves all."""
    parts: list[memoryview] = []
    for _, _, payload, record in group:
        parts.append(payload)
        missing = record.runs[0].count * PAGE_BYTES - record.payload_bytes
        if missing:
            parts.append(padding[:missing])
    return parts


def entry_neighbours(jobs: list[Job]) -> Iterator[list[Job]]:
    """Jobs whose entries one call can write."""
    group: list[Job] = []
    following = -1
    for job in jobs:
        start, count = job.record.slots
        if group and start != following:
            yield group
            group = []
        group.append(job)
        following = start + count
    if group:
        yield group

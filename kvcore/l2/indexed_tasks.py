"""What an indexed adapter remembers of batches and their keys while blocking work of theirs runs.

Held by the piece of work that they belong to, and, stores that wait for another one, by their key's entry. A task is
complete, and announced, when `unanswered` is 0. Tuples, since one of each is made per key on the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer, TaskId
from kvcore.l2.index import Entry


@dataclass(slots=True, eq=False)
class StoreTask:
    task: TaskId
    answers: list[StoreAnswer | None]
    unanswered: int


@dataclass(slots=True, eq=False)
class LoadTask:
    task: TaskId
    unanswered: int
    bits: int = 0


class StoreItem(NamedTuple):
    """One key of one store batch that waits until the work on its key ends."""

    batch: StoreTask
    position: int
    key: ObjectKey
    payload: memoryview
    record_bytes: int


class Write(NamedTuple):
    """One key of one store batch that is being written."""

    batch: StoreTask
    position: int
    payload: memoryview
    entry: Entry
    victims: tuple[Entry, ...]


class Read(NamedTuple):
    batch: LoadTask
    position: int
    entry: Entry
    into: memoryview


# tuple.__new__ runs without a Python frame per key
make_write: Callable[[tuple[StoreTask, int, memoryview, Entry, tuple[Entry, ...]]], Write]
make_write = partial(tuple.__new__, Write)
make_read: Callable[[tuple[LoadTask, int, Entry, memoryview]], Read] = partial(tuple.__new__, Read)

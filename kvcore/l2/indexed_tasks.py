"""What an indexed adapter remembers of the keys of batches (`kvcore.l2.tasks`) while blocking work of theirs runs.

Held by the piece of work that they belong to, and, stores that wait for another one, by their key's entry. Tuples,
since one of each is made per key on the loop: they cost it least.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvcore.keys import ObjectKey
from kvcore.l2.index import Entry
from kvcore.l2.tasks import BitTask, StoreTask


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
    batch: BitTask
    position: int
    entry: Entry
    into: memoryview


# tuple.__new__ runs without a Python frame per key
make_write: Callable[[tuple[StoreTask, int, memoryview, Entry, tuple[Entry, ...]]], Write]
make_write = partial(tuple.__new__, Write)
make_read: Callable[[tuple[BitTask, int, Entry, memoryview]], Read] = partial(tuple.__new__, Read)

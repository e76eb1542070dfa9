"""What an adapter over a backend remembers of a batch while work of it runs, whichever way it keeps its books.

A task is complete, and announced, when `unanswered` is 0. Held by the pieces of work that answer its keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.l2.adapter import StoreAnswer, TaskId


@dataclass(slots=True, eq=False)
class StoreTask:
    task: TaskId
    answers: list[StoreAnswer | None]
    unanswered: int


@dataclass(slots=True, eq=False)
class BitTask:
    """A lookup or a load."""

    task: TaskId
    unanswered: int
    bits: int = 0

"""Which cells a worker has published: what KV events are made of. Nothing here knows vLLM.

`NotedStores` stands before a worker's client and passes every call on. It is there only when somebody wants events.

Who holds: the notes are held here from a commit's answer until `take`. Every cell that was to be stored comes out once,
as published or not: whoever keeps something for it can let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvcore.answers import Answer
from kvcore.service.client import StoreCell, WorkerClient


@dataclass(frozen=True, slots=True)
class Note:
    """One cell whose store has ended. `published`: this store made it visible."""

    group: int
    chunk_hash: bytes
    published: bool


class NotedStores:
    """A worker's client, and what has come of its stores since the last `take`. Used on the client's loop."""

    def __init__(self, client: WorkerClient) -> None:
        self._client = client
        self._open: dict[str, list[StoreCell]] = {}
        self._notes: list[Note] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def reserve_store(self, tag: str, cells: Sequence[StoreCell], salt: str = "") -> Any:
        self._open[tag] = list(cells)
        return await self._client.reserve_store(tag, cells, salt)

    async def commit_store(self, tag: str, ok: Sequence[bool]) -> list[Answer]:
        answers = await self._client.commit_store(tag, ok)
        self._end(tag, answers)
        return answers

    def abort_store(self, tag: str) -> None:
        self._client.abort_store(tag)
        self._end(tag, ())

    def _end(self, tag: str, answers: Sequence[Answer]) -> None:
        cells = self._open.pop(tag, [])
        published = [answer is Answer.PUBLISHED for answer in answers] or [False] * len(cells)
        self._notes += [Note(cell.group, cell.chunk_hash, done) for cell, done in zip(cells, published, strict=True)]

    def take(self) -> tuple[Note, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

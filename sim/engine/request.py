"""Requests: what comes in (`RequestSpec`) and what the scheduler knows of one (`Request`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique

import numpy as np
import numpy.typing as npt

from kvcore.connectors.views import NULL_BLOCK, RequestView
from kvcore.keys import Extra

PLACEHOLDER = 1
"""The token that stands where a multimodal item is."""


def shown(tokens: Sequence[int], items: Sequence[Extra]) -> tuple[int, ...]:
    """What an engine tells a connector: the model computes with the item, its prompt holds placeholders."""
    told = list(tokens)
    for offset, length, _ in items:
        told[offset : offset + length] = [PLACEHOLDER] * length
    return tuple(told)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request. It arrives `time_ns` after the run began and ends after `output_tokens` tokens.

    `items` lie in the prompt: what is computed with is in `prompt`, connectors see placeholders.
    """

    request_id: str
    prompt: tuple[int, ...]
    output_tokens: int
    time_ns: int = 0
    priority: int = 0
    cache_salt: str = ""
    items: tuple[Extra, ...] = ()


@unique
class Status(Enum):
    WAITING = "waiting"  # in the waiting queue, holds no blocks
    LOADING = "loading"  # an asynchronous load runs; holds its blocks, never a victim
    LOADED = "loaded"  # the load has ended well; waits for admission with its blocks
    RUNNING = "running"
    ENDED = "ended"  # finished or aborted; may still have blocks held for its connector


class GroupTable:
    """The block table of one request in one group, as a list (for connectors) and an array (for the forward pass)."""

    __slots__ = ("_array", "_nulls", "ids", "trimmed")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._nulls = 0
        self._array: npt.NDArray[np.int64] = np.zeros(16, dtype=np.int64)
        self.trimmed = 0  # entries below are null for good

    def extend(self, blocks: Sequence[int]) -> None:
        start, end = len(self.ids), len(self.ids) + len(blocks)
        if end > len(self._array):
            self._array = np.concatenate([self._array, np.zeros(end, dtype=np.int64)])
        self.ids.extend(blocks)
        self._nulls += list(blocks).count(NULL_BLOCK)
        self._array[start:end] = blocks

    def set_null(self, index: int) -> None:
        self._nulls += self.ids[index] != NULL_BLOCK
        self.ids[index] = NULL_BLOCK
        self._array[index] = NULL_BLOCK

    def clear(self) -> None:
        self.ids.clear()
        self._nulls = 0
        self.trimmed = 0

    @property
    def array(self) -> npt.NDArray[np.int64]:
        return self._array[: len(self.ids)]

    @property
    def held_count(self) -> int:
        return len(self.ids) - self._nulls

    def held(self) -> list[int]:
        """Real blocks, last first: the end of a sequence is the part of it that is reused least."""
        return [block for block in reversed(self.ids) if block != NULL_BLOCK]


class Request:
    """Mutable state of one request; owned by the scheduler."""

    def __init__(self, spec: RequestSpec, arrival: int, groups: int) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.arrival = arrival
        self.status = Status.WAITING
        self.tokens: list[int] = list(spec.prompt)
        self._token_array: npt.NDArray[np.uint32] = np.zeros(len(spec.prompt) + spec.output_tokens, dtype=np.uint32)
        self._token_array[: len(spec.prompt)] = spec.prompt
        self.computed = 0  # tokens whose KV is in the blocks and valid
        self.local = 0  # of these, found in the engine's own cache at the last admission
        self.external = 0  # of these, promised by the connector at the last admission
        self.tables = [GroupTable() for _ in range(groups)]
        self.names: list[list[int]] = [[] for _ in range(groups)]
        self.published = [0] * groups  # blocks of each group that have been offered to the prefix cache
        self.preemptions = 0
        self.resumed = False  # its next scheduled step is the first after a preemption
        self.tokens_computed_max = 0
        self.bad_blocks: dict[int, None] = {}  # reported while its asynchronous load runs
        self._view: RequestView | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.spec.prompt) :]

    @property
    def complete(self) -> bool:
        return len(self.tokens) - len(self.spec.prompt) >= self.spec.output_tokens

    @property
    def order(self) -> tuple[int, int]:
        return self.spec.priority, self.arrival

    def append(self, token: int) -> None:
        self._token_array[len(self.tokens)] = token
        self.tokens.append(token)
        self._view = None

    def token_slice(self, start: int, end: int) -> npt.NDArray[np.uint32]:
        return self._token_array[start:end]

    def token_bytes(self) -> bytes:
        return self._token_array[: len(self.tokens)].tobytes()

    def view(self) -> RequestView:
        """A value: later tokens do not appear in it."""
        if self._view is None:
            prompt_tokens = len(self.spec.prompt)
            items = self.spec.items
            tokens = shown(self.tokens, items) if items else tuple(self.tokens)
            self._view = RequestView(self.request_id, tokens, prompt_tokens, self.spec.cache_salt, items)
        return self._view

    def block_table(self) -> tuple[list[int], ...]:
        return tuple(list(table.ids) for table in self.tables)

    def holds_blocks(self) -> bool:
        return any(table.ids for table in self.tables)

"""Which worker gets a request. The prefix router knows what each worker has, and weighs it against the queues.

It listens to every worker's L1 as the product's index does (`kvcore.l1.L1Observer`: published, removed) and keeps, per
key, one bit per worker. The cost of a worker is the tokens that it would still have to compute: those pending there,
plus the prompt less the prefix that it holds. The least costly one is taken; of equals, the one that got a request
longest ago. So a long cached prefix attracts, and a long queue repels it in the same unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.bitmap import bits
from kvcore.keys import ObjectKey
from kvcore.memory import Slot
from kvcore.reports.serving.setting import Router


class Presence:
    """Which workers have which chunk; only the first group of a layout counts."""

    def __init__(self) -> None:
        self.workers: dict[bytes, int] = {}

    def of(self, worker: int) -> PresenceOf:
        return PresenceOf(self.workers, 1 << worker)


class PresenceOf:
    """One worker's L1 as an observer (kvcore.l1.L1Observer)."""

    def __init__(self, workers: dict[bytes, int], bit: int) -> None:
        self._workers = workers
        self._bit = bit

    def published(self, key: ObjectKey, slot: Slot, temporary: bool) -> None:
        if not key.object_group_id:
            self._workers[key.chunk_hash] = self._workers.get(key.chunk_hash, 0) | self._bit

    def removed(self, key: ObjectKey) -> None:
        if key.object_group_id:
            return
        left = self._workers[key.chunk_hash] & ~self._bit
        if left:
            self._workers[key.chunk_hash] = left
        else:
            del self._workers[key.chunk_hash]


class Dispatcher:
    """See the module text."""

    def __init__(self, kind: Router, workers: int, chunk_tokens: int, presence: Presence | None) -> None:
        self._kind = kind
        self._workers = workers
        self._chunk_tokens = chunk_tokens
        self._presence = presence
        self._turns = list(range(workers))

    def route(self, prompt_tokens: int, keys: Sequence[ObjectKey], pending: Sequence[int]) -> int:
        """The worker for a prompt; `pending`: tokens to be computed, per worker."""
        if self._workers == 1:
            return 0
        turns = self._turns
        if self._kind is Router.ROUND:
            chosen = turns[0]
        else:
            held = self._held(keys) if self._kind is Router.PREFIX else [0] * self._workers
            chosen = min(turns, key=lambda worker: pending[worker] - held[worker])
        turns.remove(chosen)
        turns.append(chosen)
        return chosen

    def _held(self, keys: Sequence[ObjectKey]) -> list[int]:
        """Tokens of the prompt's beginning that each worker has."""
        held = [0] * self._workers
        if self._presence is None:
            return held
        find = self._presence.workers.get
        have = (1 << self._workers) - 1
        for chunks, key in enumerate(keys):
            still = have & find(key.chunk_hash, 0)
            for worker in bits(have & ~still):
                held[worker] = chunks * self._chunk_tokens
            have = still
            if not have:
                return held
        for worker in bits(have):
            held[worker] = len(keys) * self._chunk_tokens
        return held

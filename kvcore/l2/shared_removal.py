"""Removing records of a shared store: asked for, evicted by the ledger, or found bad.

While a removal runs its key is REMOVING (`kvcore.l2.activity`): absent to lookups and loads; stores of it wait. Only
idle keys are deleted, and a broken one only when no read of ours uses it any more. What the store refuses stays in the
ledger; a surplus is evicted piece by piece, until it is gone or the store refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvcore.keys import ObjectKey
from kvcore.l2 import shared_work as work
from kvcore.l2.activity import REMOVING, Activities, Activity
from kvcore.l2.envelope import Defect
from kvcore.l2.ledger import Ledger
from kvcore.l2.runner import Runner
from kvcore.l2.shared_backend import SharedBackend
from kvcore.l2.statistics import L2Counts


class Remover:
    """`settle` is called for each key whose removal has ended. Held by the adapter, as is everything it is given."""

    def __init__(
        self,
        backend: SharedBackend,
        runner: Runner,
        ledger: Ledger,
        activities: Activities,
        counts: L2Counts,
        settle: Callable[[Activity], None],
    ) -> None:
        self._backend = backend
        self._runner = runner
        self._ledger = ledger
        self._activities = activities
        self._counts = counts
        self._settle = settle

    def delete(self, keys: list[ObjectKey]) -> None:
        """Keys with which nothing goes on, or nothing but that they are doomed."""
        for piece in work.cut(keys, [0] * len(keys), self._backend.batch_keys, 0):
            self._launch(piece, partial(self.ended, piece, evicted=False))

    def evict_surplus(self) -> None:
        """What a scan has found beyond capacity and quota."""
        keys = self._ledger.surplus(self._backend.batch_keys)
        if keys:
            self._launch(keys, partial(self._surplus_ended, keys))

    def discard(self, activity: Activity, defect: Defect) -> None:
        self._activities.begin(activity.key, REMOVING)
        run = partial(work.discard, self._backend, activity.key, defect)
        self._runner.submit_each(run, partial(self._discard_ended, activity), [activity])

    def ended(self, keys: Sequence[ObjectKey], errors: list[Exception | None], *, evicted: bool) -> None:
        """The deletion of these keys has ended; also that of the victims of a write."""
        for key, error in zip(keys, errors):
            activity = self._activities.get(key)
            assert activity is not None
            self._count(key, error, evicted)
            activity.doomed = False
            self._activities.end(activity)
            self._settle(activity)

    def _launch(self, keys: list[ObjectKey], ended: Callable[[list[Exception | None]], None]) -> None:
        for key in keys:
            self._activities.begin(key, REMOVING)
        self._runner.submit_each(partial(work.delete_all, self._backend, keys), ended, keys)

    def _surplus_ended(self, keys: list[ObjectKey], errors: list[Exception | None]) -> None:
        self.ended(keys, errors, evicted=True)
        if not any(errors):
            self.evict_surplus()

    def _count(self, key: ObjectKey, error: Exception | None, evicted: bool) -> None:
        record_bytes = self._ledger.bytes_of(key)
        if error is not None:
            self._counts.io_errors += 1
            self._ledger.kept(key)
        elif record_bytes is not None:
            self._counts.evictions += evicted
            self._counts.bytes_evicted += record_bytes if evicted else 0
            self._counts.deletes += not evicted
            self._ledger.forget(key)

    def _discard_ended(self, activity: Activity, errors: list[Exception | None]) -> None:
        """Whether something good is there now nobody has said; the next load will."""
        [error] = errors
        self._counts.io_errors += error is not None
        self._counts.deletes += error is None
        self._ledger.forget(activity.key)
        activity.broken = None
        self._activities.end(activity)
        self._settle(activity)

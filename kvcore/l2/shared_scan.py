"""Scans of a shared store into the ledger: in the background, page by page, one scan at a time.

A page is one piece of work; its records are merged on the loop, and then the next one is asked for. So a scan of a
million objects holds neither the loop nor an executor thread for long. What is being removed by us is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kvcore.l2 import shared_work as work
from kvcore.l2.activity import Activities
from kvcore.l2.ledger import Ledger
from kvcore.l2.runner import Runner
from kvcore.l2.shared_backend import SharedBackend, Stored
from kvcore.l2.statistics import L2Counts
from kvcore.ports import Clock

_NS_PER_S = 1_000_000_000


class Scanner:
    """`ended` is called after each scan, well ended or not. Held by the adapter, as is everything it is given."""

    def __init__(
        self,
        backend: SharedBackend,
        runner: Runner,
        ledger: Ledger,
        activities: Activities,
        counts: L2Counts,
        clock: Clock,
        ended: Callable[[], None],
    ) -> None:
        self.scans = 0  # that have ended
        self.store_capacity_bytes: int | None = None  # as the store has said at the end of the last one
        self._running = False
        self._failed = False
        self._backend = backend
        self._runner = runner
        self._ledger = ledger
        self._activities = activities
        self._counts = counts
        self._clock = clock
        self._ended = ended

    def begin(self) -> None:
        self._running = True
        self._ledger.begin_scan()
        self._next_page(self._backend.scan())

    def begin_if_due(self) -> None:
        """After writes. A scan that has failed is due again: its store answers now."""
        if self._ledger.wants_scan or (self._failed and not self._running):
            self.begin()

    def _next_page(self, scan: Iterator[Stored]) -> None:
        run, ended = partial(work.next_page, self._backend, scan), partial(self._page_ended, scan)
        self._runner.submit(run, ended, work.no_page)

    def _page_ended(self, scan: Iterator[Stored], page: work.Page) -> None:
        for stored in page.records:
            self._seen(stored)
        self._counts.io_errors += page.error is not None
        if not page.last:
            self._next_page(scan)
            return
        self._ledger.end_scan(complete=page.error is None)
        self._running, self._failed = False, page.error is not None
        self.scans += 1
        if page.usage is not None:
            self.store_capacity_bytes = page.usage.bytes_capacity
        self._ended()

    def _seen(self, stored: Stored) -> None:
        if stored.removed is not None:
            self._counts.defects[stored.removed] += 1
        if stored.key is None or self._activities.is_leaving(stored.key):
            return
        used_ns = 0 if stored.age_s is None else self._clock.now_ns() - int(stored.age_s * _NS_PER_S)
        self._ledger.seen(stored.key, stored.record_bytes, used_ns)
        self._counts.recovered += self.scans == 0

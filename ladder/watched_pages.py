"""`WatchedPages`: the shared pages of workers as servers of the simulation reach them, counted and made to fail.

A port of the page desk like a device of the worker: what passes here has really been moved, so the servers' counters
can be compared with it. `fails` is asked for every block; a block that fails is one that the segment does not have any
more, and no byte of it moves. A block that is touched when the server has closed the pages is a finding: a descriptor
that was closed may be another file's by then.

Who holds: the run holds it, the engine its memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvcore.service.page_shares import LocalPages, PageRegistry
from kvcore.sim.oracles.findings import Findings


class WatchedPages(PageRegistry):
    """`bytes_moved` by direction: "store" out of the pages, "load" into them."""

    def __init__(self, fails: Callable[[], bool], findings: Findings) -> None:
        super().__init__()
        self.fails = fails
        self.findings = findings
        self.bytes_moved: Counter[str] = Counter()

    def open(self, name: str, size: int) -> LocalPages:
        return _Watched(self, super().open(name, size))


class _Watched(LocalPages):
    """One worker's."""

    def __init__(self, owner: WatchedPages, pages: LocalPages) -> None:
        super().__init__(pages.buffer)
        self._owner = owner
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def read(self, offset: int, into: memoryview) -> bool:
        return self._moved("store", len(into)) and super().read(offset, into)

    def write(self, offset: int, data: memoryview) -> bool:
        return self._moved("load", len(data)) and super().write(offset, data)

    def _moved(self, direction: str, size: int) -> bool:
        if self._closed:
            self._owner.findings.report("pages", "a server copies from or to pages that it has closed")
        if self._owner.fails():
            return False
        self._owner.bytes_moved[direction] += size
        return True

"""`SlabBackend`: room is given to one record at a time, and the files are closed once, when the last work has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import slab
from kvcore.l2.slab import SlabBackend, SlabOptions
from kvcore.l2.slab_recovery import Recovered
from kvcore.l2.slab_space import Run

PAGES = 16


class Files:
    """Remembers which pages were written, and that it was closed; steps wherever real files would wait."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.seed = 1
        self.pages: list[int] = []
        self.closed = 0

    def open(self) -> None: ...

    def write_pages(self, page: int, parts: Any) -> None:
        self.step("write pages")
        assert not self.closed, "work goes on in a directory that is somebody else's by now"
        self.pages.append(page)

    def write_slots(self, slot: int, data: bytes) -> None:
        self.step("write slots")

    def close(self) -> None:
        self.closed += 1


def writing(threads: SimpleNamespace) -> Any:
    def scenario(run: Any) -> Any:
        files = Files(threads.step)
        backend = SlabBackend(SlabOptions("unused", PAGES * 4096, PAGES * 4096), "ab")
        backend._files = files  # type: ignore[assignment]
        backend.open()

        def work(number: int) -> None:
            key = ObjectKey(bytes([number]) * 32, "model", 0)
            try:
                backend.write(key, memoryview(b"payload"))
            except StoreError:
                assert backend._closed

        run.spawn(lambda: work(1), "one")
        run.spawn(lambda: work(2), "another")
        run.spawn(backend.close, "loop")

        def good() -> bool:
            backend.check()
            return files.closed == 1 and len(set(files.pages)) == len(files.pages) == len(backend._records)

        return good

    return scenario


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Recovered([], [Run(0, PAGES)], [Run(0, slab.INDEX_REGION_SLOTS)], slab.INDEX_REGION_SLOTS, {})
    monkeypatch.setattr(slab, "recover", lambda files, pages, region: empty)


def test_no_page_is_given_twice_and_the_files_are_closed_once(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(writing(threads), bound=1) > 50


def test_giving_room_without_the_lock_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab.threading, "Lock", threads.NoLock)
    broken(writing(threads), bound=1)

"""`FileBackend`: the directory is given back once, when the last piece of work has ended after `close`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import StoreError
from kvcore.l2.file import FileBackend
from kvcore.runtime import calls


class Directory:
    """A `Files` port whose lock is watched."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.working: list[str] = []
        self.unlocked: list[str] = []

    def lock(self) -> bool:
        return True

    def scan(self) -> list[tuple[str, int]]:
        return []

    def write(self, name: str, parts: Any) -> None: ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, name: str) -> None: ...

    def unlock(self) -> None:
        assert not self.working, "the directory was given back while work runs in it"
        self.unlocked.append("unlocked")

    def work(self) -> None:
        self.working.append("work")
        self.step("input and output")
        assert not self.unlocked, "work runs in a directory that is somebody else's by now"
        self.working.pop()


def closing(threads: SimpleNamespace) -> Any:
    def scenario(run: Any) -> Any:
        directory = Directory(threads.step)
        backend = FileBackend(directory, "token")  # type: ignore[arg-type]
        backend.open()

        def work() -> None:
            try:
                with backend._work():
                    directory.work()
            except StoreError:
                assert backend._gate is not None
                assert backend._gate._closed

        run.spawn(work, "one")
        run.spawn(work, "another")
        run.spawn(backend.close, "loop")
        return lambda: len(directory.unlocked) == 1 and not directory.working

    return scenario


def test_the_directory_is_given_back_once_and_after_the_work(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(closing(threads)) > 50


def test_counting_work_without_the_lock_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls.threading, "Lock", threads.NoLock)
    broken(closing(threads))

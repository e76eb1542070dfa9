"""The stage of the thread tests: the production runtime on `scheduler.py`, with a model of the loop around it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcore.l2 import file, slab
from kvcore.operations import http
from kvcore.runtime import calls, copy, executor, loop_thread, notice, streams

_MODULES = (notice, executor, copy, streams, loop_thread, calls, file, slab, http)


def _load() -> ModuleType:
    path = Path(__file__).with_name("scheduler.py")
    specification = importlib.util.spec_from_file_location("kvcore_thread_scheduler", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


_scheduler = _load()


class Wakeup:
    """`kvcore.runtime.notice._Wakeup`: an event descriptor. Readable from `set` to `clear`.

    Reading it when it is not readable fails, as the real one does. Any use after `close` is misuse: by then the number
    may be another file's. It is its own `read_fd`.
    """

    def __init__(self) -> None:
        self.read_fd = self
        self.readable = False
        self.closed = False

    def set(self) -> None:
        self._use("write the descriptor")
        self.readable = True

    def clear(self) -> None:
        self._use("read the descriptor")
        if not self.readable:
            raise BlockingIOError("nothing to read")
        self.readable = False

    def close(self) -> None:
        self._use("close the descriptor")
        self.closed = True

    def _use(self, what: str) -> None:
        _scheduler.step(what)
        assert not self.closed, f"{what} that is closed"


class Loop:
    """The little of an event loop that the runtime uses. `turn` is one turn of it, in the thread that calls."""

    def __init__(self) -> None:
        self.reader: tuple[Wakeup, Callable[[], None]] | None = None
        self.errors: list[dict[str, Any]] = []

    def add_reader(self, wakeup: Wakeup, callback: Callable[[], None]) -> None:
        self.reader = (wakeup, callback)

    def remove_reader(self, wakeup: Wakeup) -> None:
        assert self.reader is not None
        assert self.reader[0] is wakeup
        self.reader = None

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def turn(self) -> None:
        """Sleep until something is ready, then handle it. A wakeup that is lost leaves it asleep: a deadlock."""
        assert self.reader is not None
        wakeup, callback = self.reader
        _scheduler.step("sleep", lambda: not wakeup.readable)
        callback()

    def turn_until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.turn()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scheduler's names, and `Loop`; while this is used, the runtime is made of the scheduler's parts."""
    parts = _scheduler
    monkeypatch.setattr(notice, "_EventfdWakeup", Wakeup)
    monkeypatch.setattr(notice, "_PipeWakeup", Wakeup)
    for module in _MODULES:
        if hasattr(module, "threading"):
            named = {name: getattr(parts, name) for name in ("Lock", "Event", "Thread")}
            real = {name: getattr(module.threading, name) for name in ("get_ident", "current_thread")}
            monkeypatch.setattr(module, "threading", SimpleNamespace(**named, **real))
        if hasattr(module, "SimpleQueue"):
            monkeypatch.setattr(module, "SimpleQueue", parts.Queue)
    return SimpleNamespace(
        Loop=Loop, Lock=parts.Lock, NoLock=parts.NoLock, TryLock=parts.TryLock, Event=parts.Event, step=parts.step
    )


Scenario = Callable[[Any], Callable[[], object]]


@pytest.fixture
def explore(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Explore a scenario; the scheduler's report. Traced: the runtime, and the test's own file."""
    files = [str(module.__file__) for module in _MODULES] + [str(request.path)]

    def run(scenario: Scenario, bound: int | None = 2, traced: list[str] | None = None) -> Any:
        return _scheduler.explore(scenario, files if traced is None else traced, bound)

    return run


@pytest.fixture
def proven(explore: Callable[..., Any]) -> Callable[..., int]:
    """Every order of the scenario is good; how many there were. One order alone would prove nothing."""

    def run(scenario: Scenario, bound: int | None = 2, traced: list[str] | None = None) -> int:
        report = explore(scenario, bound, traced)
        assert report.failure == "", "\n".join([report.failure, *report.steps[-60:]])
        assert report.runs > 1, "these threads never met"
        return int(report.runs)

    return run


@pytest.fixture
def broken(explore: Callable[..., Any]) -> Callable[..., str]:
    """The planted bug of the scenario is found; what was said of it."""

    def run(scenario: Scenario, bound: int | None = 2, traced: list[str] | None = None) -> str:
        report = explore(scenario, bound, traced)
        assert report.failure, f"the planted bug was not found in {report.runs} orders"
        return str(report.failure)

    return run

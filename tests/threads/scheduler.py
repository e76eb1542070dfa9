"""A deterministic scheduler of real threads: runs a scenario in every order of its steps, up to a bound of preemptions.

Theory of operation
-------------------
One thread runs at a time. Before each *step* that another thread can see, the running thread asks the scheduler, which
goes on with it or with another one that is able to run. Steps are:

* what the parts do that stand in for locks, events, queues, threads (below): these can also *wait*;
* in the traced files, at the granularity of bytecodes: loads and stores of shared attributes, of items, and calls of
  methods that change a container. An attribute is shared if it is assigned outside of `__init__` anywhere in the traced
  files, or is a container that is changed. Everything between two steps is seen by its own thread only, so an order of
  steps stands for all orders of bytecodes that differ in nothing else.

A run is determined by its choices. The first run always goes on with the running thread; each next one repeats the
last one's choices up to the last that has an alternative left, takes that, and goes on by default. So all
orders come up, each once. A *preemption* is a switch away from a thread that could go on; `bound` limits how many of
them a run has (most known bugs need one or two), None: no limit.

Nobody able to run while somebody waits is a deadlock: a lost wakeup shows as one. It fails the scenario, as does an
exception in a thread, and a check that does not hold in the end.

Rejected: frontrun 0.7. Its partial order reduction finds no counterexample where one thread empties a list and then,
under a lock, lowers a flag, and another fills the list and raises the flag under that lock (`test_scheduler.py` has
this scenario): it misses what we are after, a lost wakeup.

Who holds: a `Run` its threads; all have ended when `go` returns. Who announces: `Report`.
"""

from __future__ import annotations

import ast
import dis
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_STEPS_MAX = 20_000  # of one run; more is a thread that turns in a circle
_RUNS_MAX = 200_000
_HANGS_AFTER_S = 120.0  # a step that waits for something the scheduler does not know of

_MUTATORS = frozenset({"append", "appendleft", "add", "clear", "discard", "extend", "insert", "pop", "popleft"})
_MUTATORS |= {"popitem", "put", "remove", "setdefault", "sort", "update"}
_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_ITEMS = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "BINARY_SUBSCR"})


class Aborted(BaseException):
    """Thrown into the threads of a run that has failed already."""


@dataclass(frozen=True)
class Report:
    """`failure` is empty when every order was good; else what went wrong in the first bad one, and its steps."""

    runs: int
    failure: str
    steps: tuple[str, ...] = ()


class Task:
    """One thread of a run. `waits()` is true while it cannot go on."""

    def __init__(self, number: int, name: str, body: Callable[[], None]) -> None:
        self.name = name or f"thread{number}"
        self.body = body
        self.turn = threading.Semaphore(0)
        self.parked = threading.Semaphore(0)
        self.at_a_step = False
        self.waits: Callable[[], bool] | None = None
        self.ended = False

    @property
    def able(self) -> bool:
        return not self.ended and (self.waits is None or not self.waits())


class Run:
    """One order: repeats the choices of `prefix`, then goes on by default."""

    current: Run | None = None

    def __init__(self, prefix: list[int], bound: int | None, files: frozenset[str], shared: frozenset[str]) -> None:
        self.choices: list[tuple[int, int]] = []  # (how many there were, which was taken)
        self.failure = ""
        self.steps: list[str] = []
        self._prefix = prefix
        self._left = bound
        self._files = files
        self._shared = shared
        self._tasks: list[Task] = []
        self._threads: list[threading.Thread] = []
        self._mine = threading.local()
        self._aborting = False
        self._choosing = False
        self._all_ended = threading.Semaphore(0)

    # --- for the scenario and the parts ----------------------------------------------------------------------------

    def spawn(self, body: Callable[[], None], name: str = "") -> Task:
        """One more thread. It has come to its first step when this returns; what is before that, nobody sees."""
        task = Task(len(self._tasks), name, body)
        self._tasks.append(task)
        thread = threading.Thread(target=self._live, args=(task,), name=task.name, daemon=True)
        self._threads.append(thread)
        thread.start()
        task.parked.acquire()
        return task

    def step(self, label: str, waits: Callable[[], bool] | None = None) -> None:
        """The running thread is about to do something that others see, once `waits()` is false."""
        me: Task | None = getattr(self._mine, "task", None)
        if self._choosing:  # a condition that somebody waits for is being looked at
            return
        if me is None:  # the scenario itself, before and after its threads
            assert waits is None or not waits(), f"{label} would wait for ever"
            return
        if self._aborting:
            raise Aborted
        self.steps.append(f"{me.name}: {label}")
        if len(self.steps) > _STEPS_MAX:
            self._fail("a thread turns in a circle")
        me.waits = waits
        if not me.at_a_step:
            self._park(me)
            return
        chosen = self._choose(me)
        if chosen is not me:
            chosen.turn.release()
            me.turn.acquire()
            if self._aborting:
                raise Aborted
        me.waits = None

    def _park(self, me: Task) -> None:
        me.at_a_step = True
        me.parked.release()
        me.turn.acquire()
        if self._aborting:
            raise Aborted
        me.waits = None

    def go(self) -> None:
        """Run all threads to their ends."""
        if all(task.ended for task in self._tasks):
            return
        self._pass_on()
        if not self._all_ended.acquire(timeout=_HANGS_AFTER_S):
            self.failure = self.failure or "a thread waits for something that the scheduler does not know of"
            self._abort()
        for thread in self._threads:
            thread.join(_HANGS_AFTER_S)

    # --- choosing --------------------------------------------------------------------------------------------------

    def _choose(self, me: Task | None) -> Task:
        self._choosing = True
        able = [task for task in self._tasks if task.able]
        self._choosing = False
        if not able:
            self._fail("deadlock: " + ", ".join(f"{task.name} waits" for task in self._tasks if not task.ended))
        if me is None or me not in able:
            return able[self._take(len(able))]
        options = [me, *(task for task in able if task is not me)] if self._left != 0 else [me]
        chosen = options[self._take(len(options))]
        if chosen is not me and self._left is not None:
            self._left -= 1
        return chosen

    def _take(self, count: int) -> int:
        if count == 1:
            return 0
        position = len(self.choices)
        taken = self._prefix[position] if position < len(self._prefix) else 0
        assert taken < count, "the scenario is not deterministic"
        self.choices.append((count, taken))
        return taken

    def _fail(self, text: str) -> None:
        self.failure = self.failure or text
        self._abort()
        raise Aborted

    def _abort(self) -> None:
        self._aborting = True
        for task in self._tasks:
            task.turn.release()

    # --- in the threads --------------------------------------------------------------------------------------------

    def _live(self, task: Task) -> None:
        self._mine.task = task
        try:
            self._traced(task.body)
        except Aborted:
            pass
        except BaseException:
            self.failure = self.failure or f"{task.name} raised\n{traceback.format_exc()}"
        self._end(task)

    def _traced(self, body: Callable[[], None]) -> None:
        sys.settrace(self._enter)
        try:
            body()
        finally:
            sys.settrace(None)

    def _end(self, task: Task) -> None:
        task.ended = True
        if not task.at_a_step:
            task.parked.release()
        elif all(each.ended for each in self._tasks):
            self._all_ended.release()
        elif not self._aborting:
            self._pass_on()

    def _pass_on(self) -> None:
        with suppress(Aborted):
            self._choose(None).turn.release()

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in self._files:
            return None
        offsets = steps_in(frame.f_code, self._shared)
        if not offsets:
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True

        def local(frame: FrameType, event: str, arg: object) -> Any:
            if event == "opcode" and frame.f_lasti in offsets:
                self.step(f"{frame.f_code.co_name}:{frame.f_lineno} {offsets[frame.f_lasti]}")
            return local

        return local


def explore(
    scenario: Callable[[Run], Callable[[], object]],
    traced: Iterable[str],
    bound: int | None = 2,
    runs_max: int = _RUNS_MAX,
) -> Report:
    """Play `scenario` in every order. It spawns its threads and answers the check for the end.

    `traced`: the files whose code is looked into. The check fails by answering False or by an exception.
    """
    files = frozenset(traced)
    shared = frozenset().union(*(shared_names(name) for name in files))
    prefix: list[int] | None = []
    runs = 0
    while prefix is not None:
        assert runs < runs_max, f"more than {runs_max} orders: make the scenario smaller, or bound it"
        run = Run.current = Run(prefix, bound, files, shared)
        runs += 1
        check = scenario(run)
        run.go()
        failure = run.failure or _failed(check)
        Run.current = None
        if failure:
            return Report(runs, failure, tuple(run.steps))
        prefix = _next(run.choices)
    return Report(runs, "")


def _failed(check: Callable[[], object]) -> str:
    try:
        return "the check in the end does not hold" if check() is False else ""
    except AssertionError as error:
        return f"the check in the end does not hold: {error}"


def _next(choices: list[tuple[int, int]]) -> list[int] | None:
    while choices and choices[-1][1] + 1 == choices[-1][0]:
        choices.pop()
    return [taken for _, taken in choices[:-1]] + [choices[-1][1] + 1] if choices else None


# --- what a step is ------------------------------------------------------------------------------------------------


@cache
def steps_in(code: CodeType, shared: frozenset[str]) -> dict[int, str]:
    """Offsets of the instructions of `code` that others can see, with a text."""
    return {
        instruction.offset: f"{instruction.opname} {instruction.argrepr}".strip()
        for instruction in dis.get_instructions(code)
        if instruction.opname in _STORES | _ITEMS
        or (instruction.opname in _LOADS and _name(instruction.argval) in shared | _MUTATORS)
    }


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


@cache
def shared_names(file: str) -> frozenset[str]:
    """Attributes that code of this file assigns after construction, or whose container it changes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            found |= {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store | ast.Del)
            }
        found |= set(_changed(node))
    return frozenset(found)


def _changed(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Attribute) and node.attr in _MUTATORS and isinstance(node.value, ast.Attribute):
        yield node.value.attr
    changes = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    if changes and isinstance(node.value, ast.Attribute):
        yield node.value.attr


# --- parts to stand in for those of `threading` and `queue` --------------------------------------------------------


def step(label: str, waits: Callable[[], bool] | None = None) -> None:
    """A step of the run that is going on."""
    assert Run.current is not None, "this part works inside of `explore` only"
    Run.current.step(label, waits)


class Lock:
    """`threading.Lock` as far as `with` goes."""

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        step("acquire a lock", lambda: self._held)
        assert not self._held
        self._held = True

    def __exit__(self, *_: object) -> None:
        assert self._held
        self._held = False


class TryLock(Lock):
    """A lock that somebody takes only if it is free. He sees when it is given back, so that is a step, too."""

    def acquire(self, blocking: bool) -> bool:
        assert not blocking, "`with` waits"
        step("try a lock")
        free = not self._held
        self._held = True
        return free

    def release(self) -> None:
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        step("give a lock back")
        super().__exit__()


class NoLock:
    """A lock that somebody has taken out."""

    def acquire(self, blocking: bool) -> bool:
        return True

    def release(self) -> None:
        return None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class Event:
    """`threading.Event`; a wait has no time-out."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        step("set an event")
        self._set = True

    def clear(self) -> None:
        step("clear an event")
        self._set = False

    def is_set(self) -> bool:
        step("look at an event")
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        step("wait for an event", lambda: not self._set)
        return True


class Queue:
    """`queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        step("put into a queue")
        self._items.append(item)

    def get(self) -> Any:
        step("get from a queue", lambda: not self._items)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        step("get from a queue")
        return self._items.popleft()

    def qsize(self) -> int:
        step("count a queue")
        return len(self._items)


class Thread:
    """`threading.Thread`: its body becomes a thread of the run when it is started."""

    def __init__(
        self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", daemon: bool = False
    ) -> None:
        assert daemon, "a thread that hangs must not keep the process from ending"
        self.name = name
        self._body = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        assert Run.current is not None
        self._task = Run.current.spawn(self._body, self.name)

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None
        step("join a thread", lambda: not task.ended)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

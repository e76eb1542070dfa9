"""The deadlock report: who waits for what when nothing is left to run.

SimPy ends silently when everything waits. The loop does not: it raises `DeadlockError` with one line per pending task
of every live process, in the order in which the tasks were made:

    name, process, the innermost line of our own code, asyncio's wait (`Event.wait`, `Queue.get`, ...) or the label of
    the future, and the tasks it waits for.

A ring of tasks that wait for each other is named. Behind the tasks come the lines of whoever knows more: which request
waits for which cell, lease or bytes (`SimLoop.explanations`).

What a task waits for is read from the task and from the local variables of asyncio's own frames (TaskGroup, wait,
gather); that is for reading only, nothing decides on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kvcore.sim.tasks import SimFuture, SimTask

_NOT_OURS = ("asyncio", "kvcore.sim.loop", "kvcore.sim.tasks", "contextlib", "types")
_DEPTH_MAX = 200


class DeadlockError(RuntimeError):
    """Nothing is left to run while the main task waits."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What one pending task is doing."""

    sequence: int
    name: str
    process: str
    where: str  # file:function:line of the innermost frame that is ours
    what: str  # asyncio's own wait, or the label of the future
    tasks: tuple[int, ...]  # sequence numbers of pending tasks it waits for

    def line(self, names: Mapping[int, str]) -> str:
        text = f"{self.name} [{self.process}] at {self.where}"
        if self.what:
            text += f" waits for {self.what}"
        if self.tasks:
            text += " <- " + ", ".join(names.get(number, f"task {number}") for number in self.tasks)
        return text


def _frames(coro: Any) -> list[FrameType]:
    """The frames of a suspended coroutine, outermost first."""
    frames: list[FrameType] = []
    while coro is not None and len(frames) < _DEPTH_MAX:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(coro, f"{kind}_frame", None)
            if frame is not None:
                frames.append(frame)
                coro = getattr(coro, "gi_yieldfrom" if kind == "gi" else f"{kind}_await", None)
                break
        else:
            break
    return frames


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return not any(module == name or module.startswith(name + ".") for name in _NOT_OURS)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}:{frame.f_lineno}"


def _pending_tasks(candidates: Iterable[Any]) -> tuple[int, ...]:
    tasks = [task for task in candidates if isinstance(task, SimTask) and not task.done()]
    return tuple(sorted(task.sequence for task in tasks))


def _awaited_tasks(waiter: Any, frames: list[FrameType]) -> tuple[int, ...]:
    """Tasks that this one waits for: directly, in a gather, in a TaskGroup, in asyncio.wait."""
    if isinstance(waiter, SimTask):
        return _pending_tasks([waiter])
    children = getattr(waiter, "_children", None)
    if children is not None:
        return _pending_tasks(children)
    for frame in reversed(frames):
        if _is_ours(frame):
            break
        group = frame.f_locals.get("self")
        if isinstance(group, asyncio.TaskGroup):
            return _pending_tasks(getattr(group, "_tasks", ()))
        if frame.f_code.co_name == "_wait":
            return _pending_tasks(frame.f_locals.get("fs", ()))
    return ()


def _what(waiter: Any, frames: list[FrameType]) -> str:
    label = waiter.label if isinstance(waiter, SimFuture) else ""
    if label:
        return label
    theirs = [frame for frame in frames if not _is_ours(frame)]
    if theirs and frames and theirs[-1] is frames[-1]:
        return theirs[-1].f_code.co_qualname
    return ""


def describe(task: SimTask[Any]) -> Wait:
    """What `task` is doing now."""
    frames = _frames(task.get_coro())
    ours = [frame for frame in frames if _is_ours(frame)]
    waiter = getattr(task, "_fut_waiter", None)
    return Wait(
        task.sequence,
        task.get_name(),
        str(task.incarnation) if task.incarnation is not None else "no process",
        _place(ours[-1]) if ours else (_place(frames[-1]) if frames else "not started"),
        _what(waiter, frames),
        _awaited_tasks(waiter, frames),
    )


def _ring(waits: Mapping[int, Wait]) -> list[int]:
    """The first ring of tasks that wait for each other, in waiting order; empty when there is none."""
    done: set[int] = set()
    for start in waits:
        path: list[int] = []
        number = start
        while number in waits and number not in done:
            if number in path:
                return path[path.index(number) :]
            path.append(number)
            following = waits[number].tasks
            number = following[0] if following else -1
        done.update(path)
    return []


def report(pending: Iterable[SimTask[Any]], header: str, explanations: Iterable[str] = ()) -> str:
    """The text of a `DeadlockError` over all pending tasks; those of crashed processes are only counted."""
    tasks = sorted(pending, key=lambda task: task.sequence)
    living = [task for task in tasks if task.incarnation is None or task.incarnation.alive]
    waits = {task.sequence: describe(task) for task in living}
    names = {number: wait.name for number, wait in waits.items()}
    lines = [header, *("  " + wait.line(names) for wait in waits.values())]
    ring = _ring(waits)
    if ring:
        lines.append("  ring: " + " -> ".join(names[number] for number in [*ring, ring[0]]))
    if len(tasks) > len(living):
        lines.append(f"  and {len(tasks) - len(living)} task(s) of crashed processes")
    lines += ["  " + line for line in explanations]
    return "\n".join(lines)

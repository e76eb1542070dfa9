"""`Owner`: which life of which process a callback or a piece of work belongs to.

A process that crashes runs nothing more: no `finally`, no completion, no copy. Ports therefore keep with everything
they will do later the life (`Incarnation`) that asked for it: a restarted process has the same name and must not
receive what its former life was waiting for. Code that runs outside any process (the world itself) never dies.

Callbacks run in the context in which they were registered, whoever causes them. That context carries the life, so the
loop drops them when it has ended.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TypeVar

from kvcore.sim.process import CURRENT, DeadProcessError, Incarnation, SimProcess, check_alive

T = TypeVar("T")


class Owner:
    """The present life of `process`, or of whoever is running now."""

    __slots__ = ("_context", "life")

    def __init__(self, process: SimProcess | None = None) -> None:
        self.life: Incarnation | None = process.life if process is not None else CURRENT.get()
        self._context = process.context() if process is not None else contextvars.copy_context()

    @property
    def alive(self) -> bool:
        return self.life is None or self.life.alive

    def check(self) -> None:
        """Ports refuse the calls of a dead process, and calls to what a dead process owned."""
        check_alive()
        if not self.alive:
            raise DeadProcessError(f"a port of {self.life} was called, which has crashed")

    def context(self) -> contextvars.Context:
        """A fresh copy: a context that is being run cannot be entered again."""
        return self._context.copy()

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Call `function` in the owner's context. What it schedules belongs to the owner."""
        return self.context().run(function, *args)

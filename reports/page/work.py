"""Long work in named steps, with progress, that an interrupt ends without losing what is done.

`Work.run` carries out the steps in order and gives the results of those that ended. Ctrl-C ends the step in which it
comes and all that follow; their names are in `missing` from then on, and a second `run` of the same work does nothing
but name its steps too. The report is then written with what there is.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Say = Callable[[str], None]
Progress = Callable[[int, int], None]


def say_on_stderr(line: str) -> None:
    """Progress. Where nobody can hear it any more (a terminal that has gone) the work goes on."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class Work:
    """See the module text. One per report."""

    def __init__(self, say: Say = say_on_stderr) -> None:
        self._say = say
        self._began_s = time.monotonic()
        self.missing: list[str] = []
        self.interrupted = False

    def run(self, steps: Iterable[tuple[str, Callable[[], Result]]]) -> dict[str, Result]:
        """Results by name of step; the names differ."""
        done: dict[str, Result] = {}
        todo = list(steps)
        try:
            for number, (name, step) in enumerate(() if self.interrupted else todo, 1):
                self._say(f"[{time.monotonic() - self._began_s:5.1f} s] {number}/{len(todo)} {name}")
                done[name] = step()
        except KeyboardInterrupt:  # wherever it comes, between two steps too
            self._interrupt()
        self.missing += [name for name, _ in todo if name not in done]
        return done

    def run_together(self, names: Sequence[str], run: Callable[[Progress], Sequence[Result]]) -> dict[str, Result]:
        """`run` carries out all steps side by side and calls its argument after each. It gives the results of the first
        ones, in order: of all of them, unless it was interrupted."""
        if self.interrupted:
            self.missing += names
            return {}

        def say(done: int, of: int) -> None:
            self._say(f"[{time.monotonic() - self._began_s:5.1f} s] {done}/{of} {names[done - 1]}: done")

        results = run(say)
        if len(results) < len(names):
            self._interrupt()
            self.missing += names[len(results) :]
        return dict(zip(names, results, strict=False))

    def _interrupt(self) -> None:
        self.interrupted = True
        self._say("interrupted: writing what is done (once more to end without a report)")

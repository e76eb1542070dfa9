"""Seconds of a piece of work, without the time in which a neighbour had the core.

Theory of operation
-------------------
On a machine with neighbours the clock measures them: a request of 2 ms takes 2 or 10, and which of the two is a
matter of luck and of length, because a long request is interrupted more often. No law of prefix length predicts that.
What a request costs is asked here, so a time is put together from three that the system keeps:

    clock      from begin to end
    ready      how long threads of ours stood ready while others ran (Linux: /proc/self/task/*/schedstat, second field)
    processor  what all our threads together computed

    seconds = min(clock, max(processor, clock - ready))

1. Nobody else is there: ready is 0, and this is the clock's time, with every wait for a disk or a network in it.
2. The work is computing alone, in one thread or in several that wait for each other (the interpreter's lock sees to
   that): neighbours or not, this is the processor's time.
3. Neighbours and a store that waits: `ready` counts a thread's wait when it ends, though some of it was before we
   began, so up to that much of a true wait is lost. Never more than to the processor's time.

What neighbours do to our caches and to the clock rate stays in: whoever compares two things must time them in turns.

Where the system keeps no such books the clock's time is all there is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Timed:
    """`seconds` without the neighbours, `clock_s` with them."""

    seconds: float
    clock_s: float


def timed(work: Callable[[], object]) -> Timed:
    """Run it once."""
    ready_s, processor_s, clock_s = _ready_s(), time.process_time(), time.perf_counter()
    work()
    clock_s = time.perf_counter() - clock_s
    processor_s = time.process_time() - processor_s
    return Timed(without_neighbours(clock_s, processor_s, _ready_s() - ready_s), clock_s)


def without_neighbours(clock_s: float, processor_s: float, ready_s: float) -> float:
    """The formula of the module text."""
    return min(clock_s, max(processor_s, clock_s - ready_s))


def _ready_s() -> float:
    """So far, of all threads that live; 0 where nobody counts."""
    try:
        threads = os.listdir(_THREADS)
    except OSError:
        return 0.0
    return sum(_ready_ns(thread) for thread in threads) / _NS_PER_S


def _ready_ns(thread: str) -> int:
    try:
        return int((_THREADS / thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError):  # it ended meanwhile, or a kernel without this table
        return 0

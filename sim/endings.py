"""The two ends of a run: what asyncio and the collector are told, and how a finished world is cleared away without a
sound."""

from __future__ import annotations

import asyncio
import gc
import sys
from asyncio import events as asyncio_events
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from kvcore.sim.tasks import SimTask

_DISPOSE_ATTEMPTS_MAX = 50
_RUNS_PER_FULL_COLLECTION = 8


def dispose(task: SimTask[Any]) -> None:
    """Close the coroutine of a task that will never run again. What its `finally` blocks raise is of no interest."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coro: Any = task.get_coro()
    for _ in range(_DISPOSE_ATTEMPTS_MAX):
        try:
            task.context.run(coro.close)
        except RuntimeError as error:
            if "ignored GeneratorExit" not in str(error):
                return
        except Exception:
            return
        else:
            return


@contextmanager
def garbage_collected_at_the_ends() -> Generator[None, None, None]:
    """No collection inside; fixed ones at the ends.

    What existed before is set aside (`gc.freeze`), so the collection at the end looks only at what was made inside,
    in microseconds. A full one takes tens of milliseconds in a process that has loaded a test runner; it comes at the
    beginning of every eighth run, or a swarm, which does nothing between its runs, would never free its old worlds.
    No run can tell: nothing that was garbage before it began can be seen from inside.
    """
    if not gc.isenabled():  # inside another run, or the caller wants none
        yield
        return
    gc.disable()
    if gc.get_stats()[-1]["collections"] % _RUNS_PER_FULL_COLLECTION == 0:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


@contextmanager
def running_mark(
    loop: asyncio.AbstractEventLoop, generator_dropped: Callable[[Any], None]
) -> Generator[None, None, None]:
    """`loop` is the one that runs in this thread; what was marked before is so again afterwards."""
    outer_loop = asyncio_events._get_running_loop()
    outer_hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=generator_dropped)
    asyncio_events._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio_events._set_running_loop(outer_loop)
        sys.set_asyncgen_hooks(*outer_hooks)

"""Which event loop a process of ours runs on: uvloop where it is installed, else asyncio's own.

Who holds: `run`, for the length of the work. Nothing to announce; the loop is closed when the work has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end on a fresh loop."""
    factory = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)

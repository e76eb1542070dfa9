"""Bugs put into kvcore's connector on the real engine: the ladder must find each of them, by tokens or by KV bytes.

Two of them show only where a store is still reading when its blocks are written again. On a CPU a store of a tiny model
is over before that; `slow_stores` gives the engine a device that takes its time. Without a bug it changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.ladder.targets.vllm_scheduler.mutants import (
    Spoil,
    no_fence,
    shifted_by,
    skipped_load,
    stale_blocks_after_resume,
)
from kvcore.ports import Copy, CopyTicket, DeviceEvent
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.runtime.streams import Job

STORE_SECONDS = 0.05
TOKEN_BYTES = 32 * 4
"""One head of one token of the tiny models."""


class SlowStores:
    """A copy engine whose stores take `STORE_SECONDS` each, one after the other. Used from its loop."""

    def __init__(self, inner: ThreadCopyEngine) -> None:
        self._inner = inner

    def compute_event(self) -> DeviceEvent:
        return self._inner.compute_event()

    def submit(self, copies: Sequence[Copy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> CopyTicket:
        if stream == "store":
            self._inner._enqueue(Job(self._inner, (_take_time,)), stream, ())
        return self._inner.submit(copies, stream=stream, after=after)

    def close(self) -> None:
        self._inner.close()


def _take_time() -> None:
    threading.Event().wait(STORE_SECONDS)  # the time is what this device is about


async def _slowed(core: Any) -> None:
    core._device = SlowStores(core._device)


def slow_stores(scheduler: Any, worker: Any) -> None:
    """No bug: stores that outlive preemptions."""
    worker._run(_slowed(worker._side.worker))


def _with_slow_stores(spoil: Spoil) -> Spoil:
    def both(scheduler: Any, worker: Any) -> None:
        slow_stores(scheduler, worker)
        spoil(scheduler, worker)

    return both


MUTANTS: dict[str, Callable[[Any, Any], None]] = {
    "skipped-load": skipped_load,
    "shifted-load": shifted_by(TOKEN_BYTES),
    "no-fence": _with_slow_stores(no_fence),
    "stale-blocks": _with_slow_stores(stale_blocks_after_resume),
}

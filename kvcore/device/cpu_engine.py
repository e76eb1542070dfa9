"""`CpuCopyEngine`: ordered queues played by threads, plain copies by numpy, paged ones by the kernels.

Streams, events, cancelling and failing are `kvcore.runtime.streams`'s; a `PagedCopy` is checked at `submit`, on the
loop thread, so that a block id out of range is an exception at the call and not an error of the batch.

Who holds, announces, frees: as in `kvcore.runtime.streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcore.device.movers import Mover, cpu_mover
from kvcore.device.paged import PagedCopy, checked
from kvcore.ports import Copy
from kvcore.runtime.copy import ThreadCopyEngine


class CpuCopyEngine(ThreadCopyEngine):
    """`kvcore.ports.CopyEngine` that also takes `PagedCopy`s. `mover`: default, the fastest that works here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mover: Mover | None = None, name: str = "kvcore-copy") -> None:
        super().__init__(loop, name)
        self.mover = mover or cpu_mover()

    def _part(self, copy: Copy | PagedCopy) -> Callable[[], None]:
        if isinstance(copy, Copy):
            return super()._part(copy)
        ready = checked(copy)
        return lambda: self.mover.move(ready)

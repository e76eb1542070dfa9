"""`CpuCopyEngine`: ordered queues played by threads, plain copies by numpy, paged ones by the kernels.

Streams, events, cancelling and failing are `kvcore.runtime.streams`'s; a `PagedCopy` is checked at `submit`, on the
loop thread, so that a block id out of range is an exception at the call and not an error of the batch.

Who holds, announces, frees: as in `kvcore.runtime.streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvcore.device.movers import Mover, cpu_mover
from kvcore.device.paged import PagedCopy, checked
from kvcore.ports import Copy, DeviceEvent
from kvcore.runtime.copy import Move, ThreadCopyEngine
from kvcore.runtime.streams import Job


class CpuCopyEngine(ThreadCopyEngine):
    """`kvcore.ports.CopyEngine` that also takes `PagedCopy`s. `mover`: default, the fastest that works here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, mover: Mover | None = None, name: str = "kvcore-copy") -> None:
        super().__init__(loop, name)
        self.mover = mover or cpu_mover()

    def submit(self, copies: Sequence[Copy | PagedCopy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> Job:
        self._check_open()
        job = Job(self, tuple(self._part(copy) for copy in copies))
        self._enqueue(job, stream, after)
        return job

    def _part(self, copy: Copy | PagedCopy) -> Callable[[], None]:
        if isinstance(copy, Copy):
            return Move(copy)
        ready = checked(copy)
        return lambda: self.mover.move(ready)

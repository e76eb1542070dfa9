"""Copy engines that leave out one link of the event order, to be caught on an emulated device (`emulated_cuda.py`).

Each is `CudaCopyEngine` but for one step of core.md 9; held, announced and freed as that one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.device.cuda_engine import CudaCopyEngine
from kvcore.runtime.streams import Job


class ProducerIsNotWaitedFor(CudaCopyEngine):
    """A copy begins whether or not the work that writes its pages has ended."""

    def submit(self, copies: Any, *, stream: str, after: Sequence[Any] = ()) -> Job:
        return super().submit(copies, stream=stream)


class DoneWhenQueued(CudaCopyEngine):
    """A copy is called done, and would be published, when the device has only been told of it."""

    def _carry_out(self, stream: Any, copies: Any) -> None:
        for copy in copies:
            self._runtime.queue(stream, copy)

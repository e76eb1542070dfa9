"""`CudaCopyEngine`: transfer streams beside an engine's compute stream; "done" is what the device says, nothing less.

Theory of operation
-------------------
Each stream name has one CUDA stream and one thread (`kvcore.runtime.streams`). A batch goes through

    queued --its events are done, it is the head--> begun: its copies are put on the CUDA stream, an event behind them
        --that event is done--> done

1. *Producer.* `compute_event` records an event on the compute stream. A thread of its own waits for it on the device
   (`synchronize` blocks the thread, not the interpreter), so its completion opens the gate of the batches behind it at
   once, without polling. A batch begins, and no byte of it moves, before the forward pass that wrote the KV has ended.
2. *Completion.* The stream's thread waits for the batch's own event in the same way. Only then is the ticket done,
   and only a done ticket lets the worker publish, report, or let the engine write the blocks.
3. *Fence.* Until a batch has begun, `cancel` wins and its copies are never queued. Once it has begun it cannot be taken
   back: the fence waits for its ticket.
4. *Failure.* A copy that the driver refuses ends the batch; what was queued before it is waited for first, because a
   done ticket promises that no byte moves any more. A device that has failed fails everything behind it.

Batches of one stream are queued one by one, each when the last is over: the price is one thread wake-up between two
batches, which `scripts/gpu_check.sh` measures; what it buys is that `cancel` can win until the very end.

Rejected: letting the transfer stream wait for the producer on the device (cudaStreamWaitEvent) with everything queued
ahead: nothing queued can be cancelled, so a preemption would wait for copies of KV that nobody wants; polling `query`
from the loop (5 ms late, or a busy loop); host callbacks on the stream (they may not call CUDA, and one thread of the
driver runs them all).

Who holds, announces, frees: as in `kvcore.runtime.streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvcore.device.cuda_runtime import CudaRuntime
from kvcore.device.paged import CheckedCopy, PagedCopy, checked
from kvcore.errors import CallerError
from kvcore.ports import Copy, DeviceEvent
from kvcore.runtime.copy import matched_arrays
from kvcore.runtime.streams import Job, StreamEngine

_COMPUTE_EVENTS = "compute-events"


class CudaCopyEngine(StreamEngine):
    """`kvcore.ports.CopyEngine` for KV on a CUDA device. Used from the loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runtime: CudaRuntime, name: str = "kvcore-cuda") -> None:
        super().__init__(loop, name)
        self._runtime = runtime
        self._cuda_streams: dict[str, Any] = {}

    def compute_event(self) -> DeviceEvent:
        """An event behind everything that is on the compute stream now."""
        self._check_open()
        event = self._runtime.record(self._runtime.compute)
        job = Job(self, (partial(self._runtime.synchronize, event),))
        if self._over(event):
            job._shut_gate(())
            job._pass()
        else:
            self._enqueue(job, _COMPUTE_EVENTS, ())
        return job

    def submit(self, copies: Sequence[Copy | PagedCopy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> Job:
        """Raises CallerError for a batch that cannot be; nothing is queued then."""
        self._check_open()
        ready = tuple(_ready(copy) for copy in copies)
        job = Job(self, (partial(self._carry_out, self._cuda_stream(stream), ready),))
        self._enqueue(job, stream, after)
        return job

    def _over(self, event: Any) -> bool:
        """A device that has failed says so when it is waited for."""
        try:
            return self._runtime.finished(event)
        except Exception:
            return True

    def _cuda_stream(self, name: str) -> Any:
        stream = self._cuda_streams.get(name)
        if stream is None:
            stream = self._cuda_streams[name] = self._runtime.new_stream()
        return stream

    def _carry_out(self, stream: Any, copies: Sequence[Copy | CheckedCopy]) -> None:
        """In the stream's thread. Returns, or raises, when no byte of the batch moves any more."""
        kept = []  # a copy's tables and workspace must outlive it, not only its submission
        try:
            for copy in copies:
                kept.append(self._runtime.queue(stream, copy))
        finally:
            self._runtime.synchronize(self._runtime.record(stream))
            kept.clear()


def _ready(copy: Copy | PagedCopy) -> Copy | CheckedCopy:
    """What will be queued; CallerError for buffers that do not fit. Tensors on the device have no host view."""
    if isinstance(copy, PagedCopy):
        return checked(copy)
    if not (hasattr(copy.source, "is_cuda") or hasattr(copy.target, "is_cuda")):
        matched_arrays(copy)
    elif _size_bytes(copy.source) != _size_bytes(copy.target):
        raise CallerError(f"copy {copy.label!r}: {_size_bytes(copy.source)} bytes into {_size_bytes(copy.target)}")
    return copy


def _size_bytes(buffer: Any) -> int:
    return int(buffer.nbytes) if hasattr(buffer, "nbytes") else len(buffer)

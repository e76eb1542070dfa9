"""`ThreadCopyEngine`: device streams played by threads (`streams.py`), copies by numpy. The compute stream is one of
them.

`submit` checks every pair of buffers on the loop thread (sizes, shapes, writability), so that misuse is an exception at
the call and not an error of the batch. Copies of a batch move in the order given.

The compute stream that has failed once computes nothing more, as on a device. An exception of compute work has nobody
who must look at it, so it also goes to the loop's exception handler.

Who holds, announces, frees: as in `kvcore.runtime.streams`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import CallerError
from kvcore.ports import Copy, DeviceEvent
from kvcore.runtime.streams import BehindFailure, CopyCancelled, Job, StreamEngine

Array = npt.NDArray[Any]

COMPUTE_STREAM = "compute"


def matched_arrays(copy: Copy) -> tuple[Array, Array]:
    """(source, target) of `copy` as two arrays of one shape and dtype, without copying a byte.

    Equal shapes may be strided in any way; otherwise one side must be contiguous and takes the shape of the other.
    """
    source, target = _as_array(copy.source), _as_array(copy.target)
    if not target.flags.writeable:
        raise CallerError(f"copy {copy.label!r}: the target is read-only")
    if source.nbytes != target.nbytes:
        raise CallerError(f"copy {copy.label!r}: {source.nbytes} bytes into a target of {target.nbytes}")
    if source.shape == target.shape and source.dtype == target.dtype:
        return source, target
    if target.flags.c_contiguous:
        return source, _reshaped(target, source)
    if source.flags.c_contiguous:
        return _reshaped(source, target), target
    raise CallerError(f"copy {copy.label!r}: shapes {source.shape} and {target.shape} differ and neither is contiguous")


def _as_array(buffer: Any) -> Array:
    if isinstance(buffer, np.ndarray):
        return buffer
    try:
        return np.frombuffer(buffer, dtype=np.uint8)
    except (ValueError, TypeError, BufferError) as error:
        raise CallerError(f"not a contiguous buffer of bytes: {error}") from error


def _reshaped(flat: Array, like: Array) -> Array:
    return flat.reshape(-1).view(np.uint8).view(like.dtype).reshape(like.shape)


class Move:
    """One copy whose buffers have been checked."""

    __slots__ = ("_source", "_target")

    def __init__(self, copy: Copy) -> None:
        self._source, self._target = matched_arrays(copy)

    def __call__(self) -> None:
        np.copyto(self._target, self._source)


class ThreadCopyEngine(StreamEngine):
    """`kvcore.ports.CopyEngine` on host memory. Used from the loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str = "kvcore-copy") -> None:
        super().__init__(loop, name)
        self._last_compute = Job(self, ())
        self._last_compute._shut_gate(())
        self._last_compute._pass()  # an idle compute stream: its last job is done

    def compute_event(self) -> DeviceEvent:
        self._check_open()
        return self._last_compute

    def run_compute(
        self, fn: Callable[[], None], duration_ns: int = 0, *, after: Sequence[DeviceEvent] = ()
    ) -> DeviceEvent:
        """Queue `fn` on the compute stream (its thread runs it). Real work takes what it takes: no `duration_ns`."""
        self._check_open()
        job = Job(self, (fn,))
        self._enqueue(job, COMPUTE_STREAM, (*after, self._last_compute))
        self._last_compute = job
        job.on_done(lambda: self._report(job))
        return job

    def submit(self, copies: Sequence[Copy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> Job:
        """Raises CallerError for a batch that cannot be; nothing is queued then."""
        self._check_open()
        job = Job(self, tuple(map(self._part, copies)))
        self._enqueue(job, stream, after)
        return job

    def _part(self, copy: Copy) -> Callable[[], None]:
        """One copy, checked and ready to be carried out in the stream's thread."""
        return Move(copy)

    def _report(self, job: Job) -> None:
        if job.error is not None and not isinstance(job.error, CopyCancelled | BehindFailure):
            self._loop.call_exception_handler({"message": "compute work raised", "exception": job.error})

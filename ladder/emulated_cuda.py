"""A CUDA device played by one thread of the host: `kvcore.device.cuda_engine` is proven on it, without a GPU.

Theory of operation
-------------------
Like the driver, it takes work at once and does it later: streams are FIFO inside, and between them the thread picks any
stream whose head can go, by a seeded draw, one operation at a time. A copy moves one `piece` after the other, each an
operation of its own, so two streams really interleave inside a batch: a batch that reads pages too early, or whose
"done" comes too early, shows wrong bytes.

    queue / record --FIFO per stream, drawn between streams--> done

An operation that raises has failed its stream, as a kernel that faults has: nothing behind it runs, and every event
behind it ends with that error. (A real device fails all its streams; here one is enough for the rules, and the others
show that they are not concerned.)

`hold` keeps a stream from going on until `release`: that is how a test says "the forward pass is not over yet".

Who holds: buffers belong to whoever queued them. Who announces: events. `close` ends the thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.device.movers import Mover, cpu_mover
from kvcore.device.paged import CheckedCopy
from kvcore.ports import Copy
from kvcore.runtime.copy import matched_arrays
from kvcore.sim.streams import RandomStream

_PIECE_BYTES = 64


class EmulatedEvent:
    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def reach(self, error: BaseException | None = None) -> None:
        self.error = error
        self.reached.set()


@dataclass(frozen=True, slots=True)
class _Operation:
    """`run` begins when `ready` says so. `event`: what it completes, if it is a recorded event."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    event: EmulatedEvent | None = None


class EmulatedStream:
    """A queue of operations. `held`: none begins. `running`: one does now. Guarded by the device's lock."""

    def __init__(self) -> None:
        self.operations: deque[_Operation] = deque()
        self.held = False
        self.running = False
        self.error: BaseException | None = None

    @property
    def able(self) -> bool:
        return bool(self.operations) and not self.held and self.operations[0].ready()


class EmulatedCuda:
    """`kvcore.device.cuda_runtime.CudaRuntime`. `refuse`: what the driver says to a copy at once, None: nothing."""

    def __init__(
        self, seed: int = 0, refuse: Callable[[Any], Exception | None] = lambda copy: None, mover: Mover | None = None
    ) -> None:
        self._random = RandomStream(seed, "emulated-cuda")
        self._refuse = refuse
        self._mover = mover or cpu_mover()
        self._work = threading.Condition()
        self._streams: list[EmulatedStream] = []
        self._closed = False
        self.compute = self.new_stream()
        threading.Thread(target=self._run, name="emulated-cuda", daemon=True).start()

    def new_stream(self) -> EmulatedStream:
        stream = EmulatedStream()
        with self._work:
            self._streams.append(stream)
        return stream

    def record(self, stream: EmulatedStream) -> EmulatedEvent:
        event = EmulatedEvent()
        with self._work:
            if stream.error is not None or not (stream.operations or stream.running):
                event.reach(stream.error)  # nothing lies before it
            else:
                self._put(stream, _Operation(event.reach, event=event))
        return event

    def finished(self, event: EmulatedEvent) -> bool:
        return event.reached.is_set()

    def synchronize(self, event: EmulatedEvent) -> None:
        event.reached.wait()
        if event.error is not None:
            raise event.error

    def queue(self, stream: EmulatedStream, copy: Copy | CheckedCopy) -> Any:
        refusal = self._refuse(copy)
        if refusal is not None:
            raise refusal
        for operation in self._operations(copy):
            self.compute_on(stream, operation)
        return None

    def compute_on(
        self, stream: EmulatedStream, operation: Callable[[], None], ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Queue any work; nothing on a stream that has failed. `ready` is asked before it begins; who makes it true
        calls `kick`."""
        with self._work:
            if stream.error is None:
                self._put(stream, _Operation(operation, ready))

    def hold(self, stream: EmulatedStream) -> None:
        with self._work:
            stream.held = True

    def release(self, stream: EmulatedStream) -> None:
        with self._work:
            stream.held = False
            self._work.notify()

    def kick(self) -> None:
        with self._work:
            self._work.notify()

    def close(self) -> None:
        with self._work:
            self._closed = True
            self._work.notify()

    def _operations(self, copy: Copy | CheckedCopy) -> list[Callable[[], None]]:
        if isinstance(copy, CheckedCopy):
            return [lambda: self._mover.move(copy)]
        source, target = matched_arrays(copy)
        if not (source.flags.c_contiguous and target.flags.c_contiguous):
            return [lambda: np.copyto(target, source)]
        flat, into = source.reshape(-1), target.reshape(-1)
        step = max(1, _PIECE_BYTES // max(1, flat.itemsize))
        pieces = range(0, len(flat), step)
        return [lambda at=at: np.copyto(into[at : at + step], flat[at : at + step]) for at in pieces]  # type: ignore[misc]

    def _put(self, stream: EmulatedStream, operation: _Operation) -> None:
        stream.operations.append(operation)
        self._work.notify()

    def _run(self) -> None:
        with self._work:
            while not self._closed:
                able = [stream for stream in self._streams if stream.able]
                if able:
                    self._step(self._random.pick(able))
                else:
                    self._work.wait()

    def _step(self, stream: EmulatedStream) -> None:
        """One operation, outside the lock: queueing goes on meanwhile, as beside a real device."""
        operation = stream.operations.popleft()
        stream.running = True
        self._work.release()
        try:
            operation.run()
        except BaseException as error:
            stream.error = error
        finally:
            self._work.acquire()
            stream.running = False
        if stream.error is not None:
            self._fail(stream, stream.error)

    def _fail(self, stream: EmulatedStream, error: BaseException) -> None:
        """Nothing behind a failure runs; the events that stand behind it end now."""
        while stream.operations:
            event = stream.operations.popleft().event
            if event is not None:
                event.reach(error)

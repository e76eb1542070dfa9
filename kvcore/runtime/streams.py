"""Streams played by threads: FIFO inside, unordered between, ordered by events. The base of the copy engines.

Theory of operation
-------------------
Each stream name gets one thread and one FIFO queue, created at its first use. What is queued is a `Job`. Its states:

    queued --all `after` events done, it is the head of its stream--> begun --last part ran or one failed--> done
    queued --cancel, or close of the engine, or something it waits for has failed--> done, with an error

1. The stream thread takes the head, waits at its *gate* until every event in `after` is done or the job is cancelled,
   and then tries to begin it. Beginning and cancelling exclude each other under the job's lock: exactly one
   of them wins. A cancelled job opens its gate, so it does not hold up the stream behind it.
2. Parts of a job run in the order given. The first failure ends the job: its error is the ticket's error, the rest is
   not run.
   Nothing moves behind a failure: a job whose event has ended with an error ends with one too. Else the pages of a
   forward pass that was never finished would be stored under the name of a good one.
3. `done` is set in the thread that ends the job, right after the last byte, so it never lags behind the bytes.
   Callbacks and waits go through one queue and one notice to the loop, never from inside the call that registered them.

A job that failed or was cancelled is told by `error` alone; `wait` returns either way.

`close` cancels what has not begun and delivers nothing more; a running job finishes in its daemon thread, and its
`done` tells when. Nothing waits for it.

Rejected: one pool of threads (streams would not be FIFO); completing jobs on the loop thread (the loop could be
late, and a fence that reads `done` would wait for bytes that have long stopped moving).

Who holds, announces, frees: what a job touches stays its submitter's, and the job keeps it referenced until it is done;
the thread that ends it announces done; the submitter may reuse the buffers from then on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

from kvcore.errors import CallerError, KvcoreError
from kvcore.ports import DeviceEvent
from kvcore.runtime.confined import LoopConfined
from kvcore.runtime.notice import EventfdNotice


class CopyCancelled(KvcoreError):
    """The error of a ticket that was cancelled before it had begun: an outcome, nobody's mistake."""


class BehindFailure(KvcoreError):
    """The error of a job that was not run because something that it waits for has failed; `__cause__` is that error."""


class Job:
    """A ticket and a device event in one: `kvcore.ports.CopyTicket` and `kvcore.ports.DeviceEvent`."""

    __slots__ = (
        "_begun",
        "_callbacks",
        "_done",
        "_engine",
        "_error",
        "_events",
        "_gate",
        "_gates_shut",
        "_lock",
        "_parts",
    )

    def __init__(self, engine: StreamEngine, parts: Sequence[Callable[[], object]]) -> None:
        self._engine = engine
        self._parts = parts
        self._lock = threading.Lock()
        self._gate = threading.Event()
        self._gates_shut = 0
        self._events: Sequence[Job] = ()
        self._begun = False
        self._done = False
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []  # run in the thread that completes the job: they only post

    @property
    def done(self) -> bool:
        return self._done

    @property
    def error(self) -> BaseException | None:
        return self._error if self._done else None

    def cancel(self) -> bool:
        """True: no byte has moved and none will."""
        with self._lock:
            if self._begun or self._done:
                return False
            self._complete(CopyCancelled("cancelled before it had begun"))
        return True

    def on_done(self, callback: Callable[[], None]) -> None:
        self._when_done(lambda: self._engine._post(callback))

    async def wait(self) -> None:
        if self._done:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_done(lambda: None if future.done() else future.set_result(None))
        await future

    # ---- below: called by the engine and its stream threads. Callbacks run under the job's lock, which keeps them in
    # ---- the order of their registration; they only post, or open the gate of a job that was submitted later.

    def _when_done(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._done:
                callback()
            else:
                self._callbacks.append(callback)

    def _shut_gate(self, events: Sequence[Job]) -> None:
        """The stream may pass when all `events` are done. The extra one keeps the gate shut while we are counting."""
        self._gates_shut = len(events) + 1
        self._events = events
        for event in events:
            assert event is not self
            event._when_done(self._one_event_done)
        self._one_event_done()

    def _one_event_done(self) -> None:
        with self._lock:
            self._gates_shut -= 1
            assert self._gates_shut >= 0
            if self._gates_shut == 0:
                self._gate.set()

    def _pass(self) -> None:
        """Body of the stream thread for this job."""
        self._gate.wait()
        with self._lock:
            if self._done:  # cancelled
                return
            assert not self._begun, "a job is the head of its stream only once"
            self._begun = True
        error = _failure_of(self._events) or _run_parts(self._parts)
        with self._lock:
            assert not self._done, "cancel must not win after the job has begun"
            self._complete(error)

    def _complete(self, error: BaseException | None) -> None:
        self._error = error  # before `done`: who sees done may read the error
        self._done = True
        self._parts = self._events = ()
        self._gate.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def _failure_of(events: Sequence[Job]) -> BehindFailure | None:
    """All of them are done. None: all in good order."""
    for event in events:
        assert event.done, "the gate was opened too early"
        if event.error is not None:
            failure = BehindFailure(f"what this waits for has failed: {event.error!r}")
            failure.__cause__ = event.error
            return failure
    return None


def _run_parts(parts: Sequence[Callable[[], object]]) -> BaseException | None:
    try:
        for part in parts:
            part()
    except BaseException as error:
        return error
    return None


class StreamEngine:
    """See the module text. Used from the loop thread; subclasses say what a job does and what the compute stream is."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._loop = loop
        self._name = name
        self._streams: dict[str, SimpleQueue[Job | None]] = {}
        self._unfinished: dict[Job, None] = {}
        self._posts: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closed = False
        self._confined = LoopConfined()
        self._notice = EventfdNotice(loop)
        self._notice.subscribe(self._drain)

    def close(self) -> None:
        if self._closed:
            return
        self._confined.check()
        self._closed = True
        for job in list(self._unfinished):
            job.cancel()
        for queue in self._streams.values():
            queue.put(None)
        self._notice.close()

    def _check_open(self) -> None:
        self._confined.check()
        if self._closed:
            raise CallerError("call on a closed copy engine")

    def _enqueue(self, job: Job, stream: str, after: Sequence[DeviceEvent]) -> None:
        events = [self._own_event(event) for event in after]
        self._unfinished[job] = None
        job.on_done(lambda: self._forget(job))
        job._shut_gate(events)
        self._stream(stream).put(job)

    def _own_event(self, event: DeviceEvent) -> Job:
        if not isinstance(event, Job) or event._engine is not self:
            raise CallerError(f"an event of another device: {type(event).__name__}")
        return event

    def _stream(self, name: str) -> SimpleQueue[Job | None]:
        queue = self._streams.get(name)
        if queue is None:
            queue = self._streams[name] = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), name=f"{self._name}-{name}", daemon=True).start()
        return queue

    def _forget(self, job: Job) -> None:
        del self._unfinished[job]

    def _post(self, callback: Callable[[], None]) -> None:
        """From any thread: run `callback` on the loop thread, in the order of the posts."""
        self._posts.put(callback)
        with suppress(CallerError):  # closed meanwhile: nothing is delivered any more
            self._notice.signal()

    def _drain(self) -> None:
        for _ in range(self._posts.qsize()):
            if self._closed:
                return
            self._run(self._posts.get_nowait())

    def _run(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            self._loop.call_exception_handler({"message": "callback of a copy engine raised", "exception": error})
        except BaseException:
            if not self._closed:
                self._notice.signal()
            raise


def _serve(queue: SimpleQueue[Job | None]) -> None:
    """Body of a stream thread. Holds no reference to the engine."""
    while (job := queue.get()) is not None:
        job._pass()
        del job

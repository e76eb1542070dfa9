"""Ports: what the core needs from the outside world.

Everything that touches time, threads, the network, disks or devices goes through one of these
protocols. Each has a real implementation in `kvcore`, a simulated one in `kvcore.sim`, and one
conformance suite under tests/conformance/ that both pass. Nothing here knows which world it is in.

Rules that hold for every port:

* Calls are made on the loop thread and return at once. Whatever takes time is announced later
  through a callback that runs on the loop thread.
* One connection, one stream, one notice, the posts of one executor: each delivers in the order
  things happened in it. Between two of them there is no order.
* A callback is never run from inside the call that registered or caused it.
* After `close()` a port delivers nothing more and further calls raise `CallerError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NewType, Protocol, TypeVar

T = TypeVar("T")

TimeNs = NewType("TimeNs", int)
"""Monotonic nanoseconds of one process."""


class Clock(Protocol):
    """Monotonic time and randomness for names (never for decisions)."""

    def now_ns(self) -> int: ...

    def token(self, nbytes: int) -> str:
        """`nbytes` of randomness as hexadecimal text, for unique names."""
        ...


class Notice(Protocol):
    """A level-triggered "something is ready" between any thread and the loop.

    Held by the object that owns the results (an adapter, an executor); `signal` may be called from
    any thread and any number of signals before the delivery coalesce into one; the subscriber then
    drains everything. Freed by `close`, which its holder calls.
    """

    def signal(self) -> None: ...

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Set the one subscriber. A signal that came earlier is delivered to it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How a piece of blocking work ended: exactly one of value and error counts."""

    value: T | None
    error: BaseException | None

    @property
    def ok(self) -> bool:
        return self.error is None


class Executor(Protocol):
    """Runs blocking work off the loop thread and posts the outcome back.

    `work` runs in some thread, must touch no loop-confined state, and its `Outcome` is handed to
    `deliver` on the loop thread, in the order in which pieces of work ended. `cost_bytes` is how
    much the work moves (the simulation turns it into time; threads ignore it).
    After `close` no outcome is delivered; work that has begun runs to its end and its result is dropped.
    """

    def submit(self, work: Callable[[], T], deliver: Callable[[Outcome[T]], None], cost_bytes: int = 0) -> None: ...

    def close(self) -> None: ...


class ClientTransport(Protocol):
    """One client's ordered connection to one server. Messages may be lost, never changed."""

    def send(self, payload: bytes) -> bool:
        """Queue one message. False: it was not accepted (not connected, or the queue is full)."""
        ...

    def receive(self, callback: Callable[[bytes], None]) -> None: ...

    def close(self) -> None: ...


class ServerTransport(Protocol):
    """The server's side: many peers, each with an opaque identity, each ordered on its own."""

    def send(self, peer: bytes, payload: bytes) -> bool: ...

    def receive(self, callback: Callable[[bytes, bytes], None]) -> None: ...

    def close(self) -> None: ...


class DeviceEvent(Protocol):
    """A point in a device stream. `done` turns true when everything before it has completed.

    Where that ended with an error, nothing that waits for this point is carried out; it ends with an error too.
    """

    @property
    def done(self) -> bool: ...

    def wait(self) -> Awaitable[None]: ...


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous piece to move: `target[:] = source[:]` (equal sizes, both writable buffers)."""

    source: Any  # numpy array or memoryview
    target: Any
    label: str = ""
    block_id: int = -1  # the engine block that is read or written; -1: none


class CopyTicket(Protocol):
    """One submitted batch. Held by the submitter, announced by the device event, freed when done.

    `done` is true once no byte of the batch will be read or written any more. `error` then tells
    whether all bytes arrived. `cancel` succeeds (True) only while the batch has not begun; from then on
    it never touches memory and is done with an error.
    """

    @property
    def done(self) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def cancel(self) -> bool: ...

    def wait(self) -> Awaitable[None]:
        """Return when done; never raises the batch's own error."""
        ...

    def on_done(self, callback: Callable[[], None]) -> None: ...


class CopyEngine(Protocol):
    """Streams that are FIFO inside and unordered between; events order them."""

    def compute_event(self) -> DeviceEvent:
        """An event behind everything the engine has submitted to its compute stream so far."""
        ...

    def submit(self, copies: Sequence[Copy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> CopyTicket: ...

    def close(self) -> None: ...


class Tracer(Protocol):
    """Receives labelled events. Labels are fixed strings; fields are strings, integers or bytes."""

    def event(self, label: str, *fields: str | int | bytes) -> None: ...


class NullTracer:
    """The production default: forgets everything."""

    def event(self, label: str, *fields: str | int | bytes) -> None:
        return None


class Files(Protocol):
    """The file operations that the file adapter needs, below one root directory. All blocking.

    Names are relative, with at most one `/`. Errors are `OSError`s as the operating system gives them.
    """

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Create `name` exclusively (0600), write all parts, flush to disk if configured."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Atomically put `source` in the place of `target`."""
        ...

    def read(self, name: str, into: Sequence[memoryview]) -> int:
        """Fill the buffers from the start of `name`; the number of bytes read (short: the file is shorter).

        One byte more than the buffers hold is asked for, so a longer file shows: the answer is then
        larger than the buffers.
        """
        ...

    def unlink(self, name: str) -> None: ...

    def scan(self) -> list[tuple[str, int]]:
        """(name, size in bytes) of every regular file, sorted by name."""
        ...

    def lock(self) -> bool:
        """Take the directory for this process. False: somebody else holds it."""
        ...

    def unlock(self) -> None: ...

    def mkdir(self, name: str) -> None: ...

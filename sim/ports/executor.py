"""The simulated executor: blocking work that takes virtual time and happens at one instant.

Theory of operation
-------------------
`workers` model threads that take pieces of work first in, first out. A piece occupies its worker for a drawn latency
plus `cost_bytes` over the bandwidth, plus what `hooks` add; at the end of that time

1. nothing happens at all if the process that submitted it has died: work that a crash interrupts is lost;
2. `before(index)`, if set, and the hooks are asked: each may raise (the work is not run, the exception is its outcome)
   or name a `WorkFault`; the first that does decides;
3. the work runs, in its submitter's context, as one atomic step;
4. the outcome is posted to a channel, which keeps the order in which pieces ended.

A hook may also *park* a piece when it begins: it keeps its worker and does not end before `release`.

Running at the *end* is the hostile choice: until then every deadline, cancel and close has its chance to come first.
Work that must be torn in the middle (a file half written) is the business of the simulated files.

Who holds, announces, frees: as for the real executor. A parked piece is freed by whoever parked it. A piece of work
whose submitter has died is freed at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, TypeVar

from kvcore.errors import CallerError
from kvcore.ports import Outcome
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.owner import Owner

T = TypeVar("T")


@unique
class WorkFault(Enum):
    SKIP = "skip"  # the work is not run and its outcome never comes; the worker goes on
    HANG = "hang"  # the work is not run and its worker is lost for good
    FAIL_AFTER = "fail_after"  # the work is run, and its submitter is told of a timeout


PARKED = -1
"""What `WorkHook.begins` answers for a piece that shall not end by itself."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a hook is told of a piece: its number, the name of the function that blocks, the bytes it moves."""

    index: int
    name: str
    cost_bytes: int


class WorkHook:
    """Somebody who meddles with blocking work. The methods here do nothing; override one."""

    def begins(self, work: Work) -> int:
        """Nanoseconds that the piece takes longer, or PARKED."""
        return 0

    def ends(self, work: Work) -> WorkFault | None:
        """Asked before the piece runs. May raise: the work is not run and this is its outcome."""
        return None


@dataclass(frozen=True, slots=True)
class _Piece:
    index: int
    work: Callable[[], Any]
    deliver: Callable[[Outcome[Any]], None]
    cost_bytes: int
    owner: Owner

    @property
    def described(self) -> Work:
        function = getattr(self.work, "func", self.work)  # a partial names what it calls
        return Work(self.index, getattr(function, "__name__", ""), self.cost_bytes)


@dataclass(slots=True)
class _Parked:
    piece: _Piece
    hooks: int  # that have parked it and not let it go
    error: Exception | None = None


class SimExecutor:
    """`kvcore.ports.Executor` in virtual time. `stream` names the random stream that latencies are drawn from."""

    def __init__(
        self,
        loop: SimLoop,
        stream: str = "storage",
        *,
        workers: int = 2,
        latency_ns: tuple[int, int] = (10_000, 200_000),
        bytes_per_us: int = 2_000,
        name: str = "executor",
    ) -> None:
        if workers < 1:
            raise CallerError(f"an executor needs at least one worker, not {workers}")
        if bytes_per_us < 1:
            raise CallerError(f"a bandwidth of {bytes_per_us} bytes per microsecond moves nothing")
        self.before: Callable[[int], WorkFault | None] | None = None
        self.hooks: list[WorkHook] = []
        self.latency_ns = latency_ns
        self.bytes_per_us = bytes_per_us
        self._loop = loop
        self._name = name
        self._random = loop.streams[stream]
        self._maker = Owner()
        self._channel = loop.channel(f"{name}.outcomes")
        self._waiting: deque[_Piece] = deque()
        self._parked: dict[int, _Parked] = {}
        self._workers_free = workers
        self._submitted = 0
        self._closed = False

    def submit(self, work: Callable[[], T], deliver: Callable[[Outcome[T]], None], cost_bytes: int = 0) -> None:
        owner = Owner()
        owner.check()
        if self._closed:
            raise CallerError("submit on a closed executor")
        self._waiting.append(_Piece(self._submitted, work, deliver, cost_bytes, owner))
        self._submitted += 1
        self._begin_waiting()

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()

    def release(self, index: int, error: Exception | None = None) -> None:
        """A hook that has parked this piece lets it go. When all have, it ends soon; if one of them gave an `error`, it
        is not run and this is its outcome."""
        parked = self._parked[index]
        parked.hooks -= 1
        parked.error = parked.error or error
        if parked.hooks:
            return
        del self._parked[index]
        if parked.error is None:
            self._loop.call_soon(self._end, parked.piece, context=self._maker.context())
        else:
            self._loop.call_soon(self._lose, parked.piece, parked.error, context=self._maker.context())

    def _begin_waiting(self) -> None:
        while self._waiting and self._workers_free:
            self._workers_free -= 1
            self._begin(self._waiting.popleft())

    def _begin(self, piece: _Piece) -> None:
        duration_ns = self._random.random_ns(*self.latency_ns) + piece.cost_bytes * 1000 // self.bytes_per_us
        if self.hooks:
            more_ns = [hook.begins(piece.described) for hook in tuple(self.hooks)]
            if PARKED in more_ns:
                self._parked[piece.index] = _Parked(piece, more_ns.count(PARKED))
                return
            duration_ns += sum(more_ns)
        # In the maker's context: the time passes whether or not the submitter lives to see its end.
        self._loop.call_later_ns(duration_ns, self._end, piece, context=self._maker.context())

    def _end(self, piece: _Piece) -> None:
        if self._run(piece):
            self._worker_freed()

    def _lose(self, piece: _Piece, error: Exception) -> None:
        if piece.owner.alive:
            self._post(piece, Outcome(None, error))
        self._worker_freed()

    def _worker_freed(self) -> None:
        self._workers_free += 1
        self._begin_waiting()

    def _run(self, piece: _Piece) -> bool:
        """False: the worker is lost."""
        if not piece.owner.alive:
            return True
        try:
            fault = self._fault_of(piece)
        except Exception as error:
            self._post(piece, Outcome(None, error))
            return True
        if fault is not None:
            self._loop.trace.event("executor.fault", self._name, piece.index, fault.value)
        if fault in (WorkFault.SKIP, WorkFault.HANG):
            return fault is WorkFault.SKIP
        outcome = _outcome_of(piece)
        if fault is WorkFault.FAIL_AFTER:
            outcome = Outcome(None, TimeoutError("the work took too long; whether it was done is not known"))
        self._post(piece, outcome)
        return True

    def _fault_of(self, piece: _Piece) -> WorkFault | None:
        fault = self.before(piece.index) if self.before is not None else None
        for hook in tuple(self.hooks):
            fault = fault or hook.ends(piece.described)
        return fault

    def _post(self, piece: _Piece, outcome: Outcome[Any]) -> None:
        self._loop.trace.event("executor.end", self._name, piece.index, int(outcome.ok))
        self._channel.post(self._deliver, piece, outcome, context=piece.owner.context())

    def _deliver(self, piece: _Piece, outcome: Outcome[Any]) -> None:
        if not self._closed:
            piece.deliver(outcome)


def _outcome_of(piece: _Piece) -> Outcome[Any]:
    try:
        return Outcome(piece.owner.call(piece.work), None)
    except BaseException as error:
        return Outcome(None, error)

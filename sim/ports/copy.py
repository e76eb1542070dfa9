"""The simulated device: streams that are FIFO inside and unordered between, copies that move page by page.

Theory of operation
-------------------
A stream is a queue of jobs: copy batches, and on the compute stream pieces of compute work. Its head begins when every
event in `after` is done, in a step of its own (so that a cancel right after `submit` always wins). From then on

    begun --page time--> page 0 moves --page time--> page 1 moves ... last page --tail time--> done

each page (one `Copy`) moves all its bytes at one instant, and each instant is drawn for itself. A block that is
reused while a batch still reads it really yields the bytes of its new owner, and a load that was not fenced really
overwrites them. Compute work runs at the end of its duration. A cancelled head gives way to the next at once.

The process that owns the device may die: then nothing moves any more, no ticket ends and no callback runs, in the same
way as a driver tears down the context of a killed process.

What goes wrong is in `rules` (`device_rules.py`): a submission refused at once, a page that fails, times that grow, a
stream that stands still while the others run.

For the oracles: `on_begin`, `on_read`, `on_write` and `on_end` are called at the very moment; `inflight_reads` and
`inflight_writes` tell which blocks unfinished tickets still name. Which side of a copy is the engine's block is seen
from the memory: `register_pages` says where the paged KV lies. A ticket counts until it is *done*, also for pages that
have moved already: nobody but us can know that they have.

Rejected: moving a whole batch at once (hides every reuse race), drawing one duration per batch (pages of two streams
would never interleave).

Who holds, announces, frees: as in `kvcore.runtime.streams`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, unique
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import CallerError
from kvcore.ports import Copy, DeviceEvent
from kvcore.runtime.copy import COMPUTE_STREAM, matched_arrays
from kvcore.runtime.streams import BehindFailure, CopyCancelled
from kvcore.sim.channel import Channel
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.device_rules import DeviceRules
from kvcore.sim.ports.owner import Owner
from kvcore.sim.process import SimProcess, runs_while_stopped

Array = npt.NDArray[Any]


@unique
class JobState(Enum):
    QUEUED = "queued"
    BEGUN = "begun"
    DONE = "done"


class SimTicket:
    """A copy batch or a piece of compute work: a ticket and a device event in one."""

    __slots__ = (
        "_callbacks", "_dependents", "_engine", "_error", "after", "arrays", "before", "copies", "fn", "fn_ns",
        "number", "state", "stream",
    )  # fmt: skip

    def __init__(self, engine: SimCopyEngine, number: int, stream: _Stream, after: Sequence[SimTicket]) -> None:
        self._engine = engine
        self.number = number
        self.stream = stream
        self.after = after
        self.before: SimTicket | None = None  # of compute work: the piece before it
        self.copies: Sequence[Copy] = ()
        self.arrays: Sequence[tuple[Array, Array]] = ()
        self.fn: Callable[[], None] | None = None
        self.fn_ns = 0
        self.state = JobState.QUEUED
        self._error: BaseException | None = None
        self._callbacks: list[tuple[Owner, Callable[[], None]]] = []
        self._dependents: dict[_Stream, None] = {}

    @property
    def done(self) -> bool:
        return self.state is JobState.DONE

    @property
    def error(self) -> BaseException | None:
        return self._error

    def cancel(self) -> bool:
        """True: no byte has moved and none will."""
        return self._engine._cancel(self)

    def on_done(self, callback: Callable[[], None]) -> None:
        entry = (Owner(), callback)
        if self.done:
            self._engine._post(self.stream, *entry)
        else:
            self._callbacks.append(entry)

    async def wait(self) -> None:
        if self.done:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_done(lambda: None if future.done() else future.set_result(None))
        await future


class _Stream:
    """Jobs in order; the head is the one that may run."""

    __slots__ = ("channel", "jobs", "name")

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.jobs: deque[SimTicket] = deque()
        self.channel = channel


class SimCopyEngine:
    """`kvcore.ports.CopyEngine` in virtual time. `owner`: the process whose device it is, or just a name for the trace.

    `page_ns` is the range of one page's time (`page_ns_of[stream]` where a stream has its own), `tail_ns` that from
    the last page to done. `fault(copy)` may answer an exception: then this page does not move and the batch ends with
    it. `rules` are those of this device's name, if the world has any.
    """

    def __init__(
        self,
        loop: SimLoop,
        owner: SimProcess | str,
        *,
        page_ns: tuple[int, int] = (200, 4_000),
        tail_ns: tuple[int, int] = (0, 0),
        stream: str = "device",
        rules: DeviceRules | None = None,
    ) -> None:
        self.rules = DeviceRules() if rules is None else rules
        self.bytes_moved: Counter[str] = Counter()  # by stream, of the batches that ended without an error
        self.on_begin: Callable[[SimTicket], None] | None = None
        self.on_end: Callable[[SimTicket], None] | None = None
        self.on_read: Callable[[Copy], None] | None = None
        self.on_write: Callable[[Copy], None] | None = None
        self.fault: Callable[[Copy], BaseException | None] | None = None
        self.page_ns = page_ns
        self.page_ns_of: dict[str, tuple[int, int]] = {}
        self.tail_ns = tail_ns
        self._loop = loop
        self._name = owner if isinstance(owner, str) else owner.name
        self._owner = Owner(None if isinstance(owner, str) else owner)
        self._random = loop.streams[stream]
        self._pages: tuple[Array, ...] = ()
        self._streams: dict[str, _Stream] = {}
        self._tickets = 0
        self._closed = False
        self._reads: dict[int, dict[SimTicket, None]] = {}
        self._writes: dict[int, dict[SimTicket, None]] = {}
        self._last_compute = SimTicket(self, -1, self._stream(COMPUTE_STREAM), ())
        self._last_compute.state = JobState.DONE  # an idle compute stream: its last job is done

    # ---- the port

    def compute_event(self) -> DeviceEvent:
        self._check_open()
        return self._last_compute

    def run_compute(
        self, fn: Callable[[], None], duration_ns: int = 0, *, after: Sequence[DeviceEvent] = ()
    ) -> DeviceEvent:
        """Queue `fn` on the compute stream; it runs at the end of its `duration_ns`."""
        ticket = self._new_ticket(COMPUTE_STREAM, after)
        ticket.before = self._last_compute
        ticket.fn, ticket.fn_ns = fn, duration_ns
        self._last_compute = ticket
        self._enqueue(ticket)
        return ticket

    def submit(self, copies: Sequence[Copy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> SimTicket:
        arrays = [matched_arrays(copy) for copy in copies]
        self._check_open()
        refused = self.rules.refusal(stream, copies)
        if refused is not None:
            self._loop.trace.event("copy.refuse", self._name, stream, len(copies))
            raise refused
        ticket = self._new_ticket(stream, after)
        ticket.copies, ticket.arrays = tuple(copies), arrays
        self._count_inflight(ticket)
        self._enqueue(ticket)
        return ticket

    def close(self) -> None:
        if self._closed:
            return
        for stream in self._streams.values():
            for ticket in list(stream.jobs):
                self._cancel(ticket)
        self._closed = True

    # ---- for the oracles

    def register_pages(self, pages: Sequence[Array]) -> None:
        """Where the engine's paged KV lies (one array per group)."""
        self._pages = tuple(pages)

    def overwritten(self, blocks: Collection[int]) -> int | None:
        """A block among `blocks` that a copy still reads, if they were written now.

        A copy that still waits for an event is ordered behind the work of that event, so it reads what is written now.
        """
        if self._reads.keys().isdisjoint(blocks):
            return None
        return next((block for block in blocks if any(map(_ordered, self._reads.get(block, ())))), None)

    def torn(self, blocks: Collection[int]) -> int | None:
        """A block among `blocks` that an unfinished copy still writes."""
        if self._writes.keys().isdisjoint(blocks):
            return None
        return next((block for block in blocks if block in self._writes), None)

    def given_away(self, block: int) -> None:
        """The engine gives the block to somebody else; tell the rules if a copy still reads it."""
        if block in self._reads and self._owner.alive:
            self.rules.reused(block)

    def inflight_reads(self) -> dict[int, list[SimTicket]]:
        """Per engine block: the unfinished tickets that read it, in the order of their submission."""
        return self._inflight(self._reads)

    def inflight_writes(self) -> dict[int, list[SimTicket]]:
        """Per engine block: the unfinished tickets that write it."""
        return self._inflight(self._writes)

    def _inflight(self, blocks: Mapping[int, Mapping[SimTicket, None]]) -> dict[int, list[SimTicket]]:
        if not self._owner.alive:  # nothing of a dead process moves
            return {}
        return {block: list(tickets) for block, tickets in blocks.items()}

    def _count_inflight(self, ticket: SimTicket) -> None:
        for copy, (source, target) in zip(ticket.copies, ticket.arrays, strict=True):
            if copy.block_id < 0:
                continue
            if not self._pages:
                raise CallerError("a copy names an engine block; call register_pages first")
            if self._is_paged(source):
                self._reads.setdefault(copy.block_id, {})[ticket] = None
            if self._is_paged(target):
                self._writes.setdefault(copy.block_id, {})[ticket] = None

    def _is_paged(self, array: Array) -> bool:
        return any(np.may_share_memory(array, pages) for pages in self._pages)

    def _discount_inflight(self, ticket: SimTicket) -> None:
        for blocks in (self._reads, self._writes):
            for copy in ticket.copies:
                tickets = blocks.get(copy.block_id)
                if tickets is not None:
                    tickets.pop(ticket, None)
                    if not tickets:
                        del blocks[copy.block_id]

    # ---- streams

    def _check_open(self) -> None:
        self._owner.check()
        if self._closed:
            raise CallerError("call on a closed copy engine")

    def _new_ticket(self, stream: str, after: Sequence[DeviceEvent]) -> SimTicket:
        self._check_open()
        ticket = SimTicket(self, self._tickets, self._stream(stream), [_own_event(event) for event in after])
        self._tickets += 1
        return ticket

    def _stream(self, name: str) -> _Stream:
        stream = self._streams.get(name)
        if stream is None:
            channel = self._loop.channel(f"copy.{self._name}.{name}")
            stream = self._streams[name] = _Stream(name, channel)
        return stream

    def _enqueue(self, ticket: SimTicket) -> None:
        self._trace("copy.submit", ticket, len(ticket.copies))
        for event in ticket.after:
            if not event.done:
                event._dependents[ticket.stream] = None
        ticket.stream.jobs.append(ticket)
        self._wake(ticket.stream)

    def _wake(self, stream: _Stream) -> None:
        """Look at the stream's head in a step of its own."""
        self._later(0, self._look, stream)

    def _later(self, delay_ns: int, step: Callable[..., None], *args: Any) -> None:
        # In the owner's context: the loop drops the steps of a dead process.
        self._loop.call_later_ns(delay_ns, step, *args, context=self._owner.context())

    @runs_while_stopped
    def _look(self, stream: _Stream) -> None:
        while stream.jobs and stream.jobs[0].done:
            stream.jobs.popleft()
        if not stream.jobs:
            return
        head = stream.jobs[0]
        if head.state is JobState.QUEUED and all(event.done for event in head.after):
            self._begin(head)

    def _begin(self, ticket: SimTicket) -> None:
        ticket.state = JobState.BEGUN
        self._trace("copy.begin", ticket)
        if self.on_begin is not None:
            self.on_begin(ticket)
        if (failed := _failure_before(ticket)) is not None:
            self._end(ticket, BehindFailure(f"what this waits for has failed: {failed!r}"))
            return
        if ticket.fn is not None:
            self._go_on(ticket, ticket.fn_ns, True, self._compute, ticket)
        else:
            self._next_page(ticket, 0)

    def _next_page(self, ticket: SimTicket, index: int) -> None:
        if index < len(ticket.copies):
            page_ns = self.page_ns_of.get(ticket.stream.name, self.page_ns)
            self._go_on(ticket, self._random.random_ns(*page_ns), False, self._page, ticket, index)
        else:
            self._go_on(ticket, self._random.random_ns(*self.tail_ns), True, self._end, ticket, None)

    def _go_on(self, ticket: SimTicket, delay_ns: int, last: bool, step: Callable[..., None], *args: Any) -> None:
        """The next step of a ticket that has begun; `last`: its end."""
        if self.rules.on_time:
            self._later(delay_ns, step, *args)
            return
        name = ticket.stream.name
        delay_ns += self.rules.delay_ns(name, last)
        if not self.rules.hold(name, lambda: self._later(delay_ns, step, *args)):
            self._later(delay_ns, step, *args)

    @runs_while_stopped
    def _page(self, ticket: SimTicket, index: int) -> None:
        assert self._owner.alive
        assert ticket.state is JobState.BEGUN
        copy = ticket.copies[index]
        error = self.fault(copy) if self.fault is not None else None
        error = error or self.rules.failure(ticket.stream.name, copy)
        if error is None:
            error = self._move(copy, *ticket.arrays[index])
        if error is not None:
            self._end(ticket, error)
            return
        self._next_page(ticket, index + 1)

    def _move(self, copy: Copy, source: Array, target: Array) -> BaseException | None:
        if self.on_read is not None:
            self.on_read(copy)
        try:
            np.copyto(target, source)
        except Exception as error:
            return error
        if self.on_write is not None:
            self.on_write(copy)
        return None

    @runs_while_stopped
    def _compute(self, ticket: SimTicket) -> None:
        assert self._owner.alive
        assert ticket.fn is not None
        try:
            ticket.fn()
        except Exception as error:
            self._loop.call_exception_handler({"message": "compute work raised", "exception": error})
            self._end(ticket, error)
        else:
            self._end(ticket, None)

    def _cancel(self, ticket: SimTicket) -> bool:
        self._owner.check()
        if ticket.state is not JobState.QUEUED:
            return False
        self._trace("copy.cancel", ticket)
        self._complete(ticket, CopyCancelled("cancelled before it had begun"))
        return True

    @runs_while_stopped
    def _end(self, ticket: SimTicket, error: BaseException | None) -> None:
        assert self._owner.alive
        assert ticket.state is JobState.BEGUN
        assert ticket.stream.jobs[0] is ticket
        self._trace("copy.end", ticket, int(error is None))
        if error is not None:
            self._trace("copy.fail", ticket)
        self._complete(ticket, error)
        if self.on_end is not None:
            self.on_end(ticket)

    def _complete(self, ticket: SimTicket, error: BaseException | None) -> None:
        ticket.state, ticket._error = JobState.DONE, error
        if error is None and ticket.arrays:
            self.bytes_moved[ticket.stream.name] += sum(target.nbytes for _, target in ticket.arrays)
        self._discount_inflight(ticket)
        ticket.arrays, ticket.fn = (), None
        callbacks, ticket._callbacks = ticket._callbacks, []
        for owner, callback in callbacks:
            self._post(ticket.stream, owner, callback)
        self._wake(ticket.stream)
        for stream in ticket._dependents:
            self._wake(stream)

    def _post(self, stream: _Stream, owner: Owner, callback: Callable[[], None]) -> None:
        stream.channel.post(self._deliver, callback, context=owner.context())

    def _deliver(self, callback: Callable[[], None]) -> None:
        if not self._closed and self._owner.alive:
            callback()

    def _trace(self, label: str, ticket: SimTicket, *fields: int) -> None:
        self._loop.trace.event(label, self._name, ticket.stream.name, ticket.number, *fields)


def _failure_before(ticket: SimTicket) -> BaseException | None:
    """Of what this ticket waits for, or of the compute work before it: nothing is carried out behind a failure."""
    events = [*ticket.after, ticket.before] if ticket.before is not None else ticket.after
    ticket.before = None
    return next((event.error for event in events if event.error is not None), None)


def _ordered(ticket: SimTicket) -> bool:
    """Everything that the ticket waits for has happened."""
    return all(event.done for event in ticket.after)


def _own_event(event: DeviceEvent) -> SimTicket:
    if not isinstance(event, SimTicket):
        raise CallerError(f"an event of another device: {type(event).__name__}")
    return event

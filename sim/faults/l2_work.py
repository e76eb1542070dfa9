"""L2 faults of blocking work: what happens to one piece in the executor.

Work is done at the end of its time, so a piece that is late, or hangs and is let go later, reads and writes the buffers
at that later moment: whoever has reused them is seen.
"""

from __future__ import annotations

from kvcore.sim.faults.kind import MS, End, Kind
from kvcore.sim.faults.l2_attach import by_count, either, everywhere, for_a_while, hooked
from kvcore.sim.faults.l2_site import L2Site
from kvcore.sim.faults.trigger import Trigger
from kvcore.sim.ports.executor import PARKED, Work, WorkFault, WorkHook
from kvcore.sim.streams import RandomStream


class _Slow(WorkHook):
    def __init__(self, trigger: Trigger, stream: RandomStream) -> None:
        self._trigger = trigger
        self._stream = stream

    def begins(self, work: Work) -> int:
        if not self._trigger.hits():
            return 0
        return self._stream.tail_ns(1, max(1, self._trigger.event.amount))


class _Late(WorkHook):
    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    def begins(self, work: Work) -> int:
        return self._trigger.event.amount if self._trigger.hits() else 0


class _Park(WorkHook):
    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self.parked: list[int] = []

    def begins(self, work: Work) -> int:
        if not self._trigger.hits():
            return 0
        self.parked.append(work.index)
        return PARKED


class _Fail(WorkHook):
    """`done`: the work is done and said to have failed; otherwise it is not done."""

    def __init__(self, trigger: Trigger, done: bool) -> None:
        self._trigger = trigger
        self._done = done

    def ends(self, work: Work) -> WorkFault | None:
        if not self._trigger.hits():
            return None
        if self._done:
            return WorkFault.FAIL_AFTER
        raise TimeoutError("no answer from the store; nothing was done")


def _slow_tail(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.executor.hooks, _Slow(trigger, stream))


def _late(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.executor.hooks, _Late(trigger))


def _hang(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return _parking(site, trigger, None)


def _worker_lost(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return _parking(site, trigger, TimeoutError("the thread that did this is gone"))


def _parking(site: L2Site, trigger: Trigger, error: Exception | None) -> End:
    hook = _Park(trigger)
    take_out = hooked(site.executor.hooks, hook)

    def end() -> None:
        take_out()
        for index in hook.parked:
            site.executor.release(index, error)

    return end


def _timeout_unknown(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.executor.hooks, _Fail(trigger, done=True))


def _work_lost(site: L2Site, trigger: Trigger, stream: RandomStream) -> End:
    return hooked(site.executor.hooks, _Fail(trigger, done=False))


WORK_KINDS = (
    Kind(
        "l2.slow_tail",
        "each piece of work takes up to `amount` ns longer, most of them little",
        for_a_while("l2.slow_tail", amount=(1 * MS, 40 * MS)),
        everywhere(_slow_tail),
    ),
    Kind(
        "l2.hang",
        "work that begins does not end before the fault does; then it is done",
        either(for_a_while("l2.hang"), by_count("l2.hang")),
        everywhere(_hang),
    ),
    Kind(
        "l2.worker_lost",
        "a piece of work takes its worker along; both come back, without its having been done, when the fault ends",
        by_count("l2.worker_lost"),
        everywhere(_worker_lost),
    ),
    Kind(
        "l2.late_completion",
        "a piece of work is done and answered `amount` ns later, after its caller's deadline",
        by_count("l2.late_completion", amount=(5 * MS, 400 * MS)),
        everywhere(_late),
    ),
    Kind(
        "l2.timeout_unknown",
        "a piece of work is done and reported as timed out",
        either(for_a_while("l2.timeout_unknown"), by_count("l2.timeout_unknown")),
        everywhere(_timeout_unknown),
    ),
    Kind(
        "l2.work_lost",
        "a piece of work is reported as timed out and was not done",
        either(for_a_while("l2.work_lost"), by_count("l2.work_lost")),
        everywhere(_work_lost),
    ),
)

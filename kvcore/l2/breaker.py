"""The circuit breaker: a store that fails is left alone for a while, and then asked by one call first.

States (`TRANSITIONS` is the machine; `docs/stores.md` draws it from there)
--------------------------------------------------------------------------
    CLOSED      all calls pass. `failures` bad ones in a row, with no good one between: OPEN
    OPEN        no call passes; each is refused at once. After `open_ns`: HALF_OPEN, at the next call
    HALF_OPEN   one call passes, the probe; while it runs the others are refused. Good: CLOSED. Bad: OPEN again.
                Neither: the next call is the probe

What is good, bad or neither
----------------------------
An adapter answers every failure of its store with missing bits, as it answers a miss, so bits alone decide nothing:

* bad: the store's failures have grown (`failures_seen`: errors of its calls, calls that were late), or the call was
  refused with an exception, or every key of a store was answered RETRY or FAILED;
* good: something came over from the store or went into it: a loaded key, a STORED key, and, where lookups ask the
  store (`remote_lookups`), an answered lookup;
* neither: everything that the adapter may have answered from its own index. Such answers say nothing about the
  store. Counted as good they would keep a breaker from ever opening (public report R56).

A probe that is not answered within `open_ns` is bad: a store that hangs does not keep the breaker half-open.
Unlocks and deletions always pass: locks must be given back.

A good lookup forgives bad lookups and nothing else; bytes that came over or went in forgive everything. Otherwise a
store that answers every lookup and fails every load would never have `failures` in a row, and each request would wait.

Rejected: a failure *rate* over a window (a store that is down is asked too often before the rate shows it, and one
flaky key in a thousand opens it never, which is right but needs no window); growing pauses (the store shall be
used soon after it is back; a probe every `open_ns` costs one call).

Who holds: locks and buffers of a refused call stay with the caller, it was never taken. Who announces, who frees: as
`kvcore.l2.wrapped`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique

from kvcore.errors import CallerError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer, TaskId
from kvcore.l2.wrapped import CountingAdapter, FailuresSeen, WrappedAdapter
from kvcore.ports import Clock

LOOKUP = "lookup"
_NS_PER_S = 1_000_000_000
_BAD_ANSWERS = frozenset({StoreAnswer.RETRY, StoreAnswer.FAILED})


@unique
class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@unique
class BreakerEvent(Enum):
    LIMIT_REACHED = "limit_reached"  # the last failure of the row
    COOLED_DOWN = "cooled_down"
    PROBE_GOOD = "probe_good"
    PROBE_BAD = "probe_bad"


TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.LIMIT_REACHED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.COOLED_DOWN): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBE_GOOD): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.PROBE_BAD): BreakerState.OPEN,
}


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    failures: int = 3
    open_ns: int = 5 * _NS_PER_S

    def __post_init__(self) -> None:
        if self.failures < 1 or self.open_ns < 1:
            raise CallerError("a breaker opens after at least one failure, for at least a nanosecond")


@dataclass(frozen=True, slots=True)
class BreakerStatistics:
    state: BreakerState
    refused: int
    opened: int
    closed: int
    probes: int


class Breaker:
    """The machine alone: told the time, asked before each call, told how calls ended. Knows no adapter."""

    def __init__(self, options: BreakerOptions) -> None:
        self.options = options
        self.state = BreakerState.CLOSED
        self._bad_in_a_row: Counter[str] = Counter()  # by kind of call
        self._opened_ns = 0
        self._probing_since_ns: int | None = None
        self._refused = 0
        self._opened = 0
        self._closed = 0
        self._probes = 0

    @property
    def probing(self) -> bool:
        return self._probing_since_ns is not None

    def lets_pass(self, now_ns: int) -> bool:
        """May a call be made now? In HALF_OPEN a yes makes that call the probe; say how it ended."""
        assert not self.probing or self.state is BreakerState.HALF_OPEN
        self._expire_probe(now_ns)
        if self.state is BreakerState.OPEN and now_ns - self._opened_ns >= self.options.open_ns:
            self._step(BreakerEvent.COOLED_DOWN)
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.HALF_OPEN and not self.probing:
            self._probing_since_ns = now_ns
            self._probes += 1
            return True
        self._refused += 1
        return False

    def good(self, kind: str = "") -> None:
        """`kind` "lookup": only lookups are known to work."""
        if kind == LOOKUP:
            del self._bad_in_a_row[LOOKUP]
        else:
            self._bad_in_a_row.clear()
        if self.state is BreakerState.HALF_OPEN:
            self._probing_since_ns = None
            self._bad_in_a_row.clear()
            self._step(BreakerEvent.PROBE_GOOD)
            self._closed += 1

    def bad(self, now_ns: int, kind: str = "") -> None:
        self._bad_in_a_row[kind] += 1
        if self.state is BreakerState.HALF_OPEN:
            self._open(BreakerEvent.PROBE_BAD, now_ns)
        elif self.state is BreakerState.CLOSED and self._bad_in_a_row[kind] >= self.options.failures:
            self._open(BreakerEvent.LIMIT_REACHED, now_ns)

    def neither(self) -> None:
        """The probe has said nothing about the store: the next call is the probe."""
        self._probing_since_ns = None

    def statistics(self) -> BreakerStatistics:
        return BreakerStatistics(self.state, self._refused, self._opened, self._closed, self._probes)

    def _expire_probe(self, now_ns: int) -> None:
        if self._probing_since_ns is not None and now_ns - self._probing_since_ns >= self.options.open_ns:
            self.bad(now_ns)

    def _open(self, event: BreakerEvent, now_ns: int) -> None:
        assert self._bad_in_a_row
        self._probing_since_ns = None
        self._opened_ns = now_ns
        self._step(event)
        self._opened += 1

    def _step(self, event: BreakerEvent) -> None:
        assert (self.state, event) in TRANSITIONS, f"{event} while {self.state}"
        self.state = TRANSITIONS[self.state, event]


class BreakerAdapter(WrappedAdapter):
    """`inner` behind a breaker. `remote_lookups`: a lookup of `inner` asks the store and not an index of its own."""

    def __init__(
        self,
        inner: CountingAdapter,
        clock: Clock,
        options: BreakerOptions,
        *,
        failures_seen: FailuresSeen,
        remote_lookups: bool,
    ) -> None:
        super().__init__(inner)
        self.breaker = Breaker(options)
        self._clock = clock
        self._failures_seen = failures_seen
        self._remote_lookups = remote_lookups
        self._failures_known = failures_seen()
        self._probe: tuple[str, TaskId] | None = None

    def submit_store(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        probe = self._ask()
        return self._passed("store", self._guarded(lambda: self.inner.submit_store(keys, buffers)), probe)

    def submit_lookup_and_lock(self, keys: Sequence[ObjectKey]) -> TaskId:
        probe = self._ask()
        return self._passed(LOOKUP, self._guarded(lambda: self.inner.submit_lookup_and_lock(keys)), probe)

    def submit_load(self, keys: Sequence[ObjectKey], buffers: Sequence[memoryview]) -> TaskId:
        probe = self._ask()
        return self._passed("load", self._guarded(lambda: self.inner.submit_load(keys, buffers)), probe)

    def pop_completed_stores(self) -> dict[TaskId, list[StoreAnswer]]:
        done = self.inner.pop_completed_stores()
        for task, answers in done.items():
            bad = bool(answers) and _BAD_ANSWERS.issuperset(answers)
            self._judge("store", task, good=StoreAnswer.STORED in answers, bad=bad)
        return done

    def take_lookup(self, task: TaskId) -> int | None:
        bits = self.inner.take_lookup(task)
        if bits is not None:
            self._judge(LOOKUP, task, good=self._remote_lookups)
        return bits

    def take_load(self, task: TaskId) -> int | None:
        bits = self.inner.take_load(task)
        if bits is not None:
            self._judge("load", task, good=bits != 0, mixed=bits != 0)
        return bits

    # -- inside

    def _ask(self) -> bool:
        """Raise StoreError when the call is refused. True: it is the probe."""
        if self._failures_grew():
            self.breaker.bad(self._clock.now_ns())
        if not self.breaker.lets_pass(self._clock.now_ns()):
            raise StoreError(
                f"the store {self.name} has failed {self.breaker.options.failures} times in a row; it is tried again "
                f"every {self.breaker.options.open_ns / _NS_PER_S:g} s"
            )
        return self.breaker.probing

    def _guarded(self, submit: Callable[[], TaskId]) -> TaskId:
        try:
            return submit()
        except CallerError:
            self.breaker.neither()
            raise
        except Exception:
            self.breaker.bad(self._clock.now_ns())
            raise

    def _passed(self, kind: str, task: TaskId, probe: bool) -> TaskId:
        if probe:
            self._probe = (kind, task)
        return task

    def _judge(self, kind: str, task: TaskId, *, good: bool, bad: bool = False, mixed: bool = False) -> None:
        """Good beats bad only where bytes have come over: some keys failed, and the store serves all the same."""
        assert not (good and bad and kind != "store"), "only a store can be told both"
        bad = self._failures_grew() or bad
        probe = self._probe == (kind, task)
        if self.breaker.state is not BreakerState.CLOSED and not probe:
            return  # an answer from before it opened: the probe decides
        if probe:
            self._probe = None
        if bad and not mixed:
            self.breaker.bad(self._clock.now_ns(), kind)
        elif good:
            self.breaker.good(kind)
        elif probe:
            self.breaker.neither()

    def _failures_grew(self) -> bool:
        known, self._failures_known = self._failures_known, self._failures_seen()
        return self._failures_known > known

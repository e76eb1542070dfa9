"""What the guards around one store have seen: breaker, deadlines, retries. Read at the moment of asking.

`guard_statistics` walks from the outermost wrapper to the adapter. A guard that is not there counts nothing, and a
store without a breaker is always "closed". Plain values only: /status shows them as they are. Nothing is held here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvcore.l2.breaker import BreakerAdapter, BreakerState
from kvcore.l2.deadline import DeadlineAdapter
from kvcore.l2.retry import RetryAdapter
from kvcore.l2.wrapped import CountingAdapter, WrappedAdapter


@dataclass(frozen=True, slots=True)
class GuardStatistics:
    """`lookups_late`: answered "nothing" at their deadline. `work_late`: pieces of work while their store hung."""

    breaker_state: str = BreakerState.CLOSED.value
    breaker_opened: int = 0
    breaker_refused: int = 0
    breaker_probes: int = 0
    lookups_late: int = 0
    work_late: int = 0
    keys_retried: int = 0


def guard_statistics(adapter: CountingAdapter) -> GuardStatistics:
    found = GuardStatistics()
    while isinstance(adapter, WrappedAdapter):
        if isinstance(adapter, BreakerAdapter):
            found = _with_breaker(found, adapter)
        elif isinstance(adapter, RetryAdapter):
            found = replace(found, keys_retried=adapter.retried)
        elif isinstance(adapter, DeadlineAdapter):
            found = replace(found, lookups_late=adapter.late, work_late=adapter.work_late)
        adapter = adapter.inner
    return found


def _with_breaker(found: GuardStatistics, adapter: BreakerAdapter) -> GuardStatistics:
    seen = adapter.breaker.statistics()
    return replace(
        found,
        breaker_state=seen.state.value,
        breaker_opened=seen.opened,
        breaker_refused=seen.refused,
        breaker_probes=seen.probes,
    )

"""What vLLM's log and metrics are told about the cache: how much counters have grown since the last time.

The way of these figures from the workers to the scheduler is also that of the loads' times to the admission
(`loads_of`), which may be in another process.
"""

# mypy: disable-error-code="import-not-found, misc"
from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvcore.connectors.views import NO_LOADS, LoadTimes
from kvcore.connectors.worker import WorkerConnectorStatistics

COUNTERS = ("cells_stored", "bytes_stored", "cells_loaded", "bytes_loaded", "loads_failed", "fences_waited")

TIMED = ("loads_timed", "bytes_timed", "loads_ns")


def loads_of(stats: Any) -> LoadTimes:
    """The timed loads in what workers have told; `stats` may be None."""
    data = getattr(stats, "data", {})
    return LoadTimes(*(data.get(name, 0) for name in TIMED))


class KvcoreStats(KVConnectorStats):
    """`data`: the counters of `COUNTERS` and `TIMED` that have grown, and by how much."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KvcoreStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class StatsReader:
    """Takes readings; one per worker."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = dict.fromkeys(COUNTERS, 0)

    def take(self, now: WorkerConnectorStatistics, loads: LoadTimes = NO_LOADS) -> KvcoreStats | None:
        """What has grown since the last reading, and the loads that were timed; None if nothing has."""
        grown = {name: getattr(now, name) - self._last[name] for name in COUNTERS}
        self._last = {name: getattr(now, name) for name in COUNTERS}
        grown |= dict(zip(TIMED, (loads.count, loads.size, loads.ns), strict=True))
        stats = KvcoreStats(data={name: value for name, value in grown.items() if value})
        return None if stats.is_empty() else stats

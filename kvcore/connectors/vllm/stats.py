"""What vLLM's log and metrics are told about the cache: how much counters have grown since the last time.

    StatsReader     takes readings of one half's counters; a half is a scheduler's or a worker's
    KvcoreStats     what one reading has found; vLLM adds those of all halves up, prints them, and hands them on
    KvcoreMetrics   the same as counters of vLLM's `/metrics`: `vllm:kvcore_<name>_total`

The way of these figures from the workers to the scheduler is also that of the loads' times to the admission
(`loads_of`), which may be in another process.

Inside a `MultiConnector` vLLM wants `KvcoreMetrics` of every connector that has something to tell, and ends without.
"""

# mypy: disable-error-code="import-not-found, misc"
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvcore.connectors.scheduler import SchedulerConnector
from kvcore.connectors.views import NO_LOADS, LoadTimes
from kvcore.connectors.worker import WorkerConnector

SCHEDULER_COUNTERS = {
    "lookups": "Lookups begun",
    "tokens_queried": "Tokens beyond vLLM's own prefix, of requests whose lookup had an answer",
    "tokens_hit": "Tokens of these that were promised and taken",
    "tokens_refused": "Tokens found and computed all the same, because the admission expects that to be faster",
    "lookups_unwanted": "Lookups not begun, or given up, because the admission expects computing to be faster",
    "lookups_hurried": "Lookups not waited for to their end, because the admission expects computing to be faster",
    "load_failures": "Loads after which a request had to compute",
}
WORKER_COUNTERS = {
    "cells_stored": "Cells stored",
    "bytes_stored": "Bytes stored",
    "cells_loaded": "Cells loaded",
    "bytes_loaded": "Bytes loaded",
    "loads_failed": "Loads of which at least one cell could not be had",
    "fences_waited": "Times that blocks were wanted while a copy still used them",
}
_COUNTERS = SCHEDULER_COUNTERS | WORKER_COUNTERS

TIMED = ("loads_timed", "bytes_timed", "loads_ns")


def loads_of(stats: Any) -> LoadTimes:
    """The timed loads in what workers have told; `stats` may be None."""
    data = getattr(stats, "data", {})
    return LoadTimes(*(data.get(name, 0) for name in TIMED))


class KvcoreStats(KVConnectorStats):
    """`data`: the counters, and those of `TIMED`, that have grown, and by how much."""

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
    """Takes readings of `names` in what `read` gives; one per half."""

    def __init__(self, read: Callable[[], object], names: Iterable[str]) -> None:
        self._read = read
        self._last: dict[str, int] = dict.fromkeys(names, 0)

    def take(self, loads: LoadTimes = NO_LOADS) -> KvcoreStats | None:
        """What has grown since the last reading, and the loads that were timed; None if nothing has."""
        now, grown = self._read(), {}
        for name, last in self._last.items():
            value = getattr(now, name)
            if value != last:
                grown[name] = value - last
                self._last[name] = value
        if loads.count:
            grown |= dict(zip(TIMED, (loads.count, loads.size, loads.ns), strict=True))
        return KvcoreStats(data=grown) if grown else None


def reader_of(half: SchedulerConnector | WorkerConnector) -> StatsReader:
    """Reads the counters of this half."""
    names = SCHEDULER_COUNTERS if isinstance(half, SchedulerConnector) else WORKER_COUNTERS
    return StatsReader(half.statistics, names)


class KvcoreMetrics(KVConnectorPromMetrics):
    """Lives in vLLM's front end, as long as that. One counter per name and engine, there from the start."""

    def __init__(
        self, vllm_config: Any, metric_types: dict[Any, Any], labels: list[str], engines: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labels, engines)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvcore_{name}", documentation=f"{text}.", labelnames=labels), engines
            )
            for name, text in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            if grown := transfer_stats_data.get(name):
                counters[engine_idx].inc(grown)

"""The engine's side of the cache, by re-export."""

from __future__ import annotations

from kvcore.lookup import LookupOutcome, Pace
from kvcore.service.connection import Connection, ConnectionConfig, ConnectionState, ConnectionStatistics
from kvcore.service.identity import identity_of
from kvcore.service.region import Region
from kvcore.service.scheduler_client import SchedulerClient, SchedulerClientStatistics, SchedulerConfig
from kvcore.service.worker_cells import LoadCell, PageCell, StoreCell
from kvcore.service.worker_client import Grant, Segment, WorkerClient, WorkerClientStatistics

__all__ = [
    "Connection",
    "ConnectionConfig",
    "ConnectionState",
    "ConnectionStatistics",
    "Grant",
    "LoadCell",
    "LookupOutcome",
    "Pace",
    "PageCell",
    "Region",
    "SchedulerClient",
    "SchedulerClientStatistics",
    "SchedulerConfig",
    "Segment",
    "StoreCell",
    "WorkerClient",
    "WorkerClientStatistics",
    "identity_of",
]

"""The preemption ladder: does the cache change any output?

The names below are imported when they are first used: pytest loads the plugin of this package in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.ladder.connector import Connector, ConnectorConfig, SchedulerSide, WorkerSide

__all__ = ["Connector", "ConnectorConfig", "SchedulerSide", "WorkerSide"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvcore.ladder' has no attribute {name!r}")
    from kvcore.ladder import connector

    return getattr(connector, name)

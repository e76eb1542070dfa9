"""The preemption ladder: does the cache change any output?"""

from kvcore.ladder.connector import Connector, ConnectorConfig, SchedulerSide, WorkerSide

__all__ = ["Connector", "ConnectorConfig", "SchedulerSide", "WorkerSide"]

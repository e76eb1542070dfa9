"""`Connector`: the interface the rungs drive. Defined in `kvcore.connectors.interface`, named here for users of the
ladder."""

from kvcore.connectors.interface import Connector, ConnectorConfig, Pages, SchedulerSide, WorkerSide

__all__ = ["Connector", "ConnectorConfig", "Pages", "SchedulerSide", "WorkerSide"]

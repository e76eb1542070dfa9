"""The simulated engine: continuous batching over paged KV, with preemption, chunked prefill and a connector."""

from kvcore.sim.engine.config import EngineConfig, EngineStats, Policy
from kvcore.sim.engine.device import POISON, ComputeDevice, PagedMemory
from kvcore.sim.engine.engine import Engine, StepTime, default_step_time
from kvcore.sim.engine.probe import EngineProbe, NullProbe
from kvcore.sim.engine.request import RequestSpec

__all__ = [
    "POISON",
    "ComputeDevice",
    "Engine",
    "EngineConfig",
    "EngineProbe",
    "EngineStats",
    "NullProbe",
    "PagedMemory",
    "Policy",
    "RequestSpec",
    "StepTime",
    "default_step_time",
]

"""Serve a trace in simulation, with the production cache deciding: `simulate` and `sweep` (serving/simulation.py)."""

from kvcore.reports.serving.result import LinkUse, Record, ServingResult
from kvcore.reports.serving.setting import CacheTier, Eviction, Policy, Router, Setting
from kvcore.reports.serving.simulation import simulate
from kvcore.reports.serving.sweep import Cell, Sweep, sweep

__all__ = [
    "CacheTier",
    "Cell",
    "Eviction",
    "LinkUse",
    "Policy",
    "Record",
    "Router",
    "ServingResult",
    "Setting",
    "Sweep",
    "simulate",
    "sweep",
]

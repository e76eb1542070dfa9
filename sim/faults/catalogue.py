"""`CATALOGUE`: every kind of fault, by name. One module per plane holds its kinds as `KINDS`.

The planes and their faults are those of the table in the simulation's contract; the configuration's own extremes
(tiny capacities, odd sizes, short leases) are drawn with the configuration and are not events.
"""

from __future__ import annotations

from kvcore.sim.faults import clock, device, engine, l1, l2, process, schedule, transport
from kvcore.sim.faults.kind import Kind

PLANES: dict[str, tuple[Kind, ...]] = {
    "schedule": schedule.KINDS,
    "clock": clock.KINDS,
    "engine": engine.KINDS,
    "transport": transport.KINDS,
    "l1": l1.KINDS,
    "l2": l2.KINDS,
    "device": device.KINDS,
    "process": process.KINDS,
}


def _collect() -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    for plane, kinds in PLANES.items():
        for kind in kinds:
            assert kind.plane == plane, f"{kind.name} is in the module of plane {plane}"
            assert kind.name not in found, f"{kind.name} is there twice"
            found[kind.name] = kind
    return found


CATALOGUE: dict[str, Kind] = _collect()


def kinds_of(plane: str) -> tuple[Kind, ...]:
    """The kinds of one plane, in the order of its module."""
    return PLANES[plane]

"""The sometimes marks of this project, one module per place from which they are hit.

* `l1`: hit by `WatchedL1`, which sees every call to L1 and its answers.
* `engine`: hit by `EngineOracle`, which sees what the engine does to its requests.
* `events`: hit by a subscriber of the trace.
* `counters`: hit by reading the components' own statistics, once, at the end of their life.

Importing this package registers all of them.
"""

from kvcore.sim.marks import counters, engine, events, l1
from kvcore.sim.sometimes import Mark, registered

__all__ = ["all_marks", "counters", "engine", "events", "l1"]


def all_marks() -> dict[str, Mark]:
    """Every mark by name, sorted."""
    return registered()

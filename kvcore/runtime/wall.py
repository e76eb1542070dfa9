"""The machine's calendar clock: only to compare with the dates that a store puts on its objects.

It may step, and another machine's may differ by minutes. So it decides nothing but the order in which old objects go;
deadlines and leases run on `kvcore.ports.Clock`.
"""

from __future__ import annotations

import time


def wall_s() -> float:
    """Seconds since the epoch."""
    return time.time()

"""SimPy's Environment with integer nanoseconds and seeded ties.

SimPy serves events of equal time and priority first in, first out, which hides races. `schedule` is its public place
to say otherwise: the priority it is given becomes (priority class, tie key), one integer, where the class is SimPy's
own (urgent before normal) and the key is drawn from a stream.

A key that is drawn uniformly at insertion would let an unlucky event starve behind events that keep arriving at the
same instant. So an event that is scheduled *for now* gets a base that grows with every event scheduled for this
instant: whoever waits is overtaken a bounded number of times.

This concerns events of SimPy's own (processes, resources, timeouts of simulated hardware). The loop's entries never
tie here: the loop takes what is due into its list of ready entries and picks uniformly among them.
"""

from __future__ import annotations

from typing import Any

import simpy
from simpy.events import NORMAL, EventPriority

from kvcore.errors import CallerError
from kvcore.sim.streams import RandomStream

_KEY_BITS = 16
_BASE_STEP = 1 << (_KEY_BITS - 2)  # an event for "now" is overtaken by about four later ones at most, on average fewer
_CLASS_SHIFT = 80


class SimEnvironment(simpy.Environment):
    """Integer time in ns; ties of SimPy events are broken by `ties`, or first in, first out when that is None."""

    def __init__(self, initial_time_ns: int = 0, ties: RandomStream | None = None) -> None:
        super().__init__(initial_time_ns)
        self._ties = ties
        self._instant_ns = initial_time_ns
        self._base = 0

    def schedule(self, event: Any, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        if not isinstance(delay, int):
            raise CallerError(f"simulated time is counted in whole nanoseconds; a delay of {delay!r} is not one")
        if self._ties is None:
            super().schedule(event, priority, delay)
            return
        key = self._next_base() if delay == 0 else 0
        key += self._ties.getrandbits(_KEY_BITS)
        super().schedule(event, EventPriority((priority << _CLASS_SHIFT) + key), delay)

    def _next_base(self) -> int:
        if self.now != self._instant_ns:
            self._instant_ns = int(self.now)
            self._base = 0
        self._base += _BASE_STEP
        return self._base

"""`Admission`: how much of what was found a scheduler side promises. The port between the connector and a policy.

    always        everything that was found (the default)
    if-it-pays    what is cheaper to load than to compute, by what this system has measured (`measured.py`)

Always is the default because it is what an engine's operator expects of a cache, it needs no measurements, and the same
requests give the same decisions every time. If-it-pays decides by times, which differ between two runs; it is for
systems whose link or store may be slower than their GPU, and somebody must want it.

A policy is told what happens to requests and steps, and asked twice per generation at most:

    worth_asking   before the lookup, and again at each question while it is pending; False: the request is computed,
                   or, once the lookup runs, what has arrived by now is all that it will have found
    length         once, when the lookup has been answered: the member of the set of lengths that is promised

Both answers are kept by the tracker for the generation, so the engine is told the same however often it asks. What was
found and is not promised is given back at once.

Who holds: a policy holds numbers only. Every request it was told of by `waits` leaves it by `gone`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from kvcore.connectors.tracker import RequestTracker
from kvcore.connectors.views import LoadTimes, ScheduledRequest

AdmissionMode = Literal["always", "if-it-pays"]
MODES: tuple[str, ...] = get_args(AdmissionMode)


class Admission(Protocol):
    """See the module text. Called on the scheduler side's loop."""

    def waits(self, request_id: str, tokens: int) -> None:
        """A request waits to be admitted. Told again: no effect."""
        ...

    def worth_asking(self, tracker: RequestTracker, tokens: int, local_tokens: int) -> bool:
        """Is a lookup for `tokens` tokens worth beginning, or, where one is pending, worth waiting for?

        After a False for a pending one it is not asked again in this generation; `length` may be.
        """
        ...

    def asks(self, tracker: RequestTracker) -> None:
        """Its lookup begins."""
        ...

    def length(self, tracker: RequestTracker, local_tokens: int) -> int:
        """The lookup is answered (`tracker.lengths`): how many chunks to promise. 0, or a member of the set."""
        ...

    def admitted(self, tracker: RequestTracker) -> None:
        """The engine has given it blocks; `tracker.phase` tells whether it loads."""
        ...

    def loaded(self, request_id: str) -> None:
        """Its load has ended, well or not."""
        ...

    def gone(self, request_id: str) -> None:
        """It was preempted, or is over. A second time: no effect."""
        ...

    def step_begins(self, scheduled: Sequence[ScheduledRequest], loads: bool) -> None:
        """A step was put together; `loads`: it waits for loads of its own."""
        ...

    def step_empty(self) -> None:
        """The step that was just put together runs nothing, and nobody will tell its end."""
        ...

    def step_ended(self) -> None:
        """The oldest step that has begun ends now. None has begun: no effect."""
        ...

    def measured(self, loads: LoadTimes) -> None:
        """Workers have timed loads."""
        ...


class LoadAll:
    """Policy always: remembers nothing."""

    def waits(self, request_id: str, tokens: int) -> None:
        return None

    def worth_asking(self, tracker: RequestTracker, tokens: int, local_tokens: int) -> bool:
        return True

    def asks(self, tracker: RequestTracker) -> None:
        return None

    def length(self, tracker: RequestTracker, local_tokens: int) -> int:
        return tracker.length

    def admitted(self, tracker: RequestTracker) -> None:
        return None

    def loaded(self, request_id: str) -> None:
        return None

    def gone(self, request_id: str) -> None:
        return None

    def step_begins(self, scheduled: Sequence[ScheduledRequest], loads: bool) -> None:
        return None

    def step_empty(self) -> None:
        return None

    def step_ended(self) -> None:
        return None

    def measured(self, loads: LoadTimes) -> None:
        return None

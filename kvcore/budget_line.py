"""Lookups in line for bytes of the prefetch budget, and the turn of the loop in which they get them. Shell.

Theory of operation
-------------------
`kvcore.budget` says who may run; this says when that is asked, and who it is. A grant is held at once, or its lookup
stands in line:

    ask --it fits, nobody waits--> held --leave, or shrink to 0--> gone
        `--else--> in line --its turn--> held, and `admitted(job)`
                       `--leave--> gone

Every change that frees bytes, or lowers what somebody in line asks for, schedules one turn (`freed`), however many
changes there are before it comes. Nobody is admitted inside the call that freed the bytes: that one is in the middle of
a job of its own.

Who holds a grant: its lookup, in `LookupJob.grant`, until it has planned. Who announces: `admitted`. Who frees: `leave`
and `shrink`; after the plan the loads (`kvcore.loads`), which call `freed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcore.budget import ByteBudget, Grant
from kvcore.lookup_job import LookupJob


class BudgetLine:
    """See the module text. `admitted(job)` is told who has got its turn."""

    def __init__(self, budget: ByteBudget, admitted: Callable[[LookupJob], None]) -> None:
        self._budget = budget
        self._admitted = admitted
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Grant, LookupJob] = {}
        self._turn: asyncio.Handle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def jobs(self) -> list[LookupJob]:
        """Those in line, first come first."""
        return list(self._waiting.values())

    def ask(self, job: LookupJob, bytes_wanted: int) -> bool:
        """Give the job its grant. False: it stands in line."""
        job.grant = self._budget.request(bytes_wanted)
        if job.grant.waiting:
            self._waiting[job.grant] = job
        return not job.grant.waiting

    def lower(self, job: LookupJob, bytes_wanted: int) -> None:
        """One in line asks for less."""
        assert job.grant is not None
        self._budget.revise(job.grant, bytes_wanted)
        self.freed()

    def shrink(self, grant: Grant, keep_bytes: int) -> None:
        """A plan has been made that needs no more than this."""
        self._budget.shrink(grant, keep_bytes)
        self.freed()

    def leave(self, job: LookupJob) -> None:
        """The job's place in line, or its grant, goes back, where it has one."""
        grant, job.grant = job.grant, None
        if grant is not None and grant.waiting:
            del self._waiting[grant]
            self._budget.withdraw(grant)
        elif grant is not None:
            self._budget.shrink(grant, 0)
        self.freed()

    def freed(self) -> None:
        """Bytes may have become free: whoever is first in line is looked at soon."""
        if self._waiting and self._turn is None and not self._closed:
            self._turn = self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        self._turn = None
        for grant in self._budget.admit():
            self._admitted(self._waiting.pop(grant))

    def close(self) -> None:
        """Nobody is admitted any more; those in line have still to leave."""
        self._closed = True
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

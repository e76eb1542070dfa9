"""Simulated proof of death: whoever watches a process learns of its end after a drawn time, and never before it.

A process is named by its life, "worker0#1". What is announced belongs to the watcher: it runs in the watcher's context,
waits while the watcher is stopped and dies with it. A process that has died already is proven dead as well, later.

Who holds: the watches are this object's. Who announces: the crash, after `proof_ns`. Who frees: the announcement,
`forget`, or the watcher's own death.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.owner import Owner
from kvcore.sim.process import SimProcess


class SimDeaths:
    """`kvcore.service.server.Deaths` in virtual time; of the process that makes it. `processes`: by name."""

    def __init__(
        self,
        loop: SimLoop,
        processes: Mapping[str, SimProcess],
        *,
        proof_ns: tuple[int, int] = (20_000, 4_000_000),
        stream: str = "deaths",
    ) -> None:
        self._loop = loop
        self._processes = processes
        self._proof_ns = proof_ns
        self._random = loop.streams[stream]
        self._owner = Owner()
        self._watches: dict[str, object] = {}  # by key: what stands for the present watch

    def watch(self, key: str, process: str, died: Callable[[], object]) -> bool:
        """Call `died` when that life has ended. False: there is no such process. Replaces a watch of the same key."""
        name, _, number = process.partition("#")
        if name not in self._processes:
            return False
        watched, token = self._processes[name], object()
        self._watches[key] = token
        if watched.alive and str(watched.incarnation) == number:
            watched.on_crash(lambda: self._ended(key, token, died))
        else:
            self._ended(key, token, died)
        return True

    def forget(self, key: str) -> None:
        """No call for this key any more."""
        self._watches.pop(key, None)

    def _ended(self, key: str, token: object, died: Callable[[], object]) -> None:
        delay_ns = self._random.random_ns(*self._proof_ns)
        self._loop.call_later_ns(delay_ns, self._prove, key, token, died, context=self._owner.context())

    def _prove(self, key: str, token: object, died: Callable[[], object]) -> None:
        if self._watches.get(key) is token:
            del self._watches[key]
            self._loop.trace.event("deaths.proven", key)
            died()

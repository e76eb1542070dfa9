"""`StackMarks`: the sometimes marks of one run of a `CacheStack`, all but those that its oracles hit by themselves.

It subscribes to the trace, reads every part's statistics when a process dies and at the end (`finish`), and looks at
what was under way at a death, and at who waits for a load when it ends. A part that dies takes its counters along, so
the marks from counters are the most that any one reading has shown; they are never counted twice.

Who holds: the run. Nothing of the stack is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvcore.connectors.worker import WorkerConnectorStatistics
from kvcore.ladder.server_stack import ServerStack
from kvcore.ladder.stack import CacheStack
from kvcore.service.client import SchedulerClientStatistics
from kvcore.service.connection import ConnectionStatistics
from kvcore.service.server import ServerStatistics
from kvcore.sim.marks.counters import read
from kvcore.sim.marks.events import EventMarks
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.sometimes import Mark, sometimes
from kvcore.sim.trace import Trace, TraceEvent

DIED_SERVING = sometimes("process.server_died_serving", "a server died with lookups open", common=True)
DIED_STORED_INTO = sometimes("process.server_died_storing", "a server died while workers wrote into its memory")
DIED_READ_FROM = sometimes("process.server_died_reading", "a server died while workers read its memory")
DIED_ASKED = sometimes("process.server_died_asked", "a process died while requests had no reply", common=True)
DIED_COPYING = sometimes("process.worker_died_copying", "a worker died with stores or loads under way")
DIED_COPIED = sometimes(
    "process.worker_died_copied", "a worker died while a server copied its pages", common=True, seeds=1_000
)
DIED_COPIER = sometimes(
    "process.server_died_copying", "a server died while it copied a worker's pages", common=True, seeds=1_000
)
DIED_LEASING = sometimes("process.scheduler_died_leasing", "the scheduler died with sessions open", common=True)
REAPED = sometimes("worker.reaped", "a worker was silent for too long with something open")
OUTLIVED = sometimes("prefetch.load_outlived_first", "a load went on for another when who began it had left")
UNWANTED = sometimes("prefetch.load_unwanted", "a load ended when nobody waited for it any more")


class StackMarks:
    """See the module text. Made when the stack has been built; `finish` once, when the run is over."""

    def __init__(self, stack: CacheStack, findings: Findings, trace: Trace) -> None:
        self._stack = stack
        self._marks = findings.sometimes
        self._most: dict[Mark, int] = {}
        self._first: dict[tuple[object, object], object] = {}  # (adapter, task) -> who began the load
        self.events = EventMarks(findings.sometimes, trace)
        trace.subscribe(self._died, "process.crash")
        trace.subscribe(self._load_began, "l2.load")
        trace.subscribe(self._load_ended, "l2.loaded")

    def finish(self) -> None:
        """Read every part that is there now."""
        self._read([state for _, state in self._stack.states()])
        for mark, count in self._most.items():
            self._marks.hit(mark, count)
        self._most.clear()

    def _read(self, states: Iterable[object]) -> None:
        seen: dict[Mark, int] = {}
        for state in states:
            read(state, seen)
        for server in self._stack.servers:
            if server.server._desk.reaped:
                seen[REAPED] = seen.get(REAPED, 0) + server.server._desk.reaped
            for adapter in server.adapters:
                read(adapter.own_statistics(), seen)
        for mark, count in seen.items():
            self._most[mark] = max(count, self._most.get(mark, 0))

    # ---- deaths

    def _died(self, event: TraceEvent) -> None:
        """The parts of the process are still there, and as they were when it died."""
        states = list(self._stack.states())
        self._read([state for _, state in states])
        process = str(event.fields[0])
        for name, state in states:
            for mark in self._under_way(process, name, state):
                self._marks.hit(mark)

    @staticmethod
    def _under_way(process: str, name: str, state: object) -> Iterator[Mark]:
        if isinstance(state, ServerStatistics) and process in (name, "engine"):
            if state.lookups_open:
                yield DIED_SERVING
            if state.stores_open:
                yield DIED_STORED_INTO
            if state.reads_open:
                yield DIED_READ_FROM
            if _copies(state):
                yield DIED_COPIER
        elif isinstance(state, ServerStatistics) and process.startswith("worker"):
            if _copies(state):
                yield DIED_COPIED
        elif isinstance(state, WorkerConnectorStatistics) and process in (name, "engine"):
            if state.jobs_inflight:
                yield DIED_COPYING
        elif isinstance(state, SchedulerClientStatistics) and process in (name, "engine"):
            if state.sessions:
                yield DIED_LEASING
        elif isinstance(state, ConnectionStatistics) and state.outstanding:
            yield DIED_ASKED

    # ---- loads

    def _server_of(self, adapter: object) -> ServerStack:
        name = str(adapter).partition(".")[0]
        return next(server for server in self._stack.servers if server.name == name)

    def _readers(self, adapter: object, task: Any) -> list[object]:
        """Who waits for the cells of an open load task, in the order of their coming."""
        server = self._server_of(adapter)
        keys = next(each for each in server.adapters if each.name == adapter).keys_loading(task)
        in_flight = server.storage._prefetch.loads.in_flight  # looked at, never changed
        return list(dict.fromkeys(reader for key in keys if key in in_flight for reader in in_flight[key].readers))

    def _load_began(self, event: TraceEvent) -> None:
        adapter, task, _ = event.fields
        readers = self._readers(adapter, task)
        if readers:
            self._first[adapter, task] = readers[0]

    def _load_ended(self, event: TraceEvent) -> None:
        adapter, task, _ = event.fields
        first = self._first.pop((adapter, task), None)
        readers = self._readers(adapter, task)
        if not readers:
            self._marks.hit(UNWANTED)
        elif first not in readers:
            self._marks.hit(OUTLIVED)


def _copies(server: ServerStatistics) -> bool:
    return server.pages is not None and server.pages.transfers_open > 0

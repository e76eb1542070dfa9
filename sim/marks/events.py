"""`EventMarks`: rare states that only the order of events shows, from a subscription of the trace.

Only labels that are rare in a run are subscribed to; what happens in every step is watched where it happens.

An event of a server is told apart by the process whose code is running: the trace calls its subscribers there.

Who holds: the trace holds the subscriber for the run. What is remembered of a lookup is overwritten by the next one of
its session on that server.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcore.sim.process import CURRENT
from kvcore.sim.sometimes import Mark, Sometimes, sometimes
from kvcore.sim.trace import Trace, TraceEvent

DEADLINE_WAITING = sometimes("prefetch.deadline_waiting", "a lookup's deadline came while it waited for the budget")
DEADLINE_LOOKING = sometimes("prefetch.deadline_looking", "the deadline came before all adapters answered")
DEADLINE_LOADING = sometimes("prefetch.deadline_loading", "a lookup's deadline came while its loads ran")
DEADLINE_SERVED = sometimes(
    "prefetch.deadline_served", "a lookup got a hit at its deadline from what was there by then"
)
HURRIED_SERVED = sometimes("prefetch.hurried_served", "a lookup got a hit from what was there when it was hurried")
REFOLD_SHORTER = sometimes("prefetch.refold_shorter", "after a partial load a shorter prefix was served", common=True)
REFOLD_NOTHING = sometimes("prefetch.refold_nothing", "after a partial load nothing could be served", common=True)
DISAGREE = sometimes("lookup.servers_disagree", "two servers could serve different lengths of one prompt", common=True)
TWO_SOURCES = sometimes("prefetch.two_adapters", "one plan loaded from two adapters")
LOADED_PARTLY = sometimes("l2.load_partly", "a load brought some of its cells and not the others", common=True)
WRITEBACK_LATE = sometimes("writeback.late", "a store to L2 ended after it had been given up")
COPY_CANCELLED = sometimes("device.copy_cancelled", "a copy was cancelled before it had begun", common=True)
COPY_FAILED = sometimes("device.copy_failed", "a copy failed on the device")
MESSAGE_LOST = sometimes("net.message_lost", "a message was lost on its way", common=True)
CUT = sometimes("net.cut", "a connection was cut", common=True)
FILE_ERROR = sometimes("files.error", "an operation of the file system failed")
POWER_LOST = sometimes("files.power_lost", "unflushed files were torn by a power failure")
WORK_UNKNOWN = sometimes("l2.work_unknown", "blocking work was done and reported as timed out")
SERVER_DIED = sometimes("process.server_died", "a server died", common=True)
SCHEDULER_DIED = sometimes("process.scheduler_died", "the scheduler died", common=True)
ITEMS_APART = sometimes(
    "keys.items_apart", "prompts that look alike differ in a multimodal item", common=True, seeds=500
)
WORKER_DIED = sometimes("process.worker_died", "a worker died", common=True)
ALL_DIED = sometimes("process.all_died", "the one process of an in-process cache died")
DIED_RECOVERING = sometimes(
    "process.died_recovering", "a process died within 10 ms of a start of it or another one", common=True
)
DIED_TWICE = sometimes("process.died_twice", "the same process died a second time", common=True)

_RECOVERY_NS = 10_000_000
_BY_PHASE: dict[str, Mark] = {
    "waiting": DEADLINE_WAITING,
    "looking": DEADLINE_LOOKING,
    "loading": DEADLINE_LOADING,
}
_BY_PROCESS = {"server": SERVER_DIED, "scheduler": SCHEDULER_DIED, "worker": WORKER_DIED, "engine": ALL_DIED}

_Job = tuple[str, object, object]
"""(server, session, generation)"""


class EventMarks:
    """See the module text. Subscribes when it is made."""

    def __init__(self, marks: Sometimes, trace: Trace) -> None:
        self._hit = marks.hit
        self._planned: dict[_Job, object] = {}  # chunks of plans that load
        self._early: dict[_Job, Mark] = {}  # answered before all was there: what it means if that was a hit
        self._lengths: dict[object, dict[str, object]] = {}  # session -> server -> chunks
        self._loads: dict[tuple[object, object], object] = {}  # cells of an open load task
        self._last_load: tuple[int, str, object] = (-1, "", "")  # (time, server, adapter)
        self._started_ns: int | None = None
        for label, watcher in self._watchers().items():
            trace.subscribe(watcher, label)

    def _watchers(self) -> dict[str, Callable[[TraceEvent], None]]:
        return {
            "prefetch.plan": self._plan,
            "prefetch.deadline": self._deadline,
            "prefetch.hurry": self._hurry,
            "prefetch.ready": self._ready,
            "writeback.late": lambda event: self._hit(WRITEBACK_LATE),
            "l2.load": self._load,
            "l2.loaded": self._loaded,
            "copy.cancel": lambda event: self._hit(COPY_CANCELLED),
            "copy.fail": lambda event: self._hit(COPY_FAILED),
            "net.lose": lambda event: self._hit(MESSAGE_LOST),
            "net.cut": lambda event: self._hit(CUT),
            "files.error": lambda event: self._hit(FILE_ERROR),
            "files.crash": lambda event: self._hit(POWER_LOST, int(event.fields[0])),
            "executor.fault": lambda event: self._hit(WORK_UNKNOWN, int(event.fields[2] == "fail_after")),
            "process.crash": self._crash,
            "process.start": self._start,
        }

    # ---- lookups

    def _plan(self, event: TraceEvent) -> None:
        session, generation, chunks, load_bytes = event.fields
        if load_bytes:
            self._planned[_process(), session, generation] = chunks

    def _deadline(self, event: TraceEvent) -> None:
        session, generation, phase = event.fields
        self._hit(_BY_PHASE[str(phase)])
        self._early[_process(), session, generation] = DEADLINE_SERVED

    def _hurry(self, event: TraceEvent) -> None:
        session, generation, _ = event.fields
        self._early[_process(), session, generation] = HURRIED_SERVED

    def _ready(self, event: TraceEvent) -> None:
        session, generation, chunks = event.fields
        job = (_process(), session, generation)
        planned = self._planned.pop(job, 0)
        if planned != chunks and planned:
            self._hit(REFOLD_SHORTER if chunks else REFOLD_NOTHING)
        if job in self._early:
            self._hit(self._early.pop(job), int(bool(chunks)))
        self._compare(session, job[0], chunks)

    def _compare(self, session: object, server: str, chunks: object) -> None:
        answers = self._lengths.setdefault(session, {})
        if server in answers:
            answers.clear()  # a new lookup
        elif any(other != chunks for other in answers.values()):
            self._hit(DISAGREE)
        answers[server] = chunks

    # ---- stores

    def _load(self, event: TraceEvent) -> None:
        adapter, task, cells = event.fields
        self._loads[adapter, task] = cells
        load = (event.time_ns, _process(), adapter)
        if load[:2] == self._last_load[:2] and adapter != self._last_load[2]:
            self._hit(TWO_SOURCES)
        self._last_load = load

    def _loaded(self, event: TraceEvent) -> None:
        adapter, task, arrived = event.fields
        cells = self._loads.pop((adapter, task), arrived)
        self._hit(LOADED_PARTLY, int(bool(arrived) and arrived != cells))

    # ---- processes

    def _crash(self, event: TraceEvent) -> None:
        name, incarnation = str(event.fields[0]), event.fields[1]
        self._hit(_BY_PROCESS[name.rstrip("0123456789")])
        self._hit(DIED_TWICE, int(bool(incarnation)))
        if self._started_ns is not None and event.time_ns - self._started_ns < _RECOVERY_NS:
            self._hit(DIED_RECOVERING)

    def _start(self, event: TraceEvent) -> None:
        self._started_ns = event.time_ns


def _process() -> str:
    """Whose code is running."""
    life = CURRENT.get()
    return "" if life is None else life.process.name

"""Recording a run for people: trace events with the process they happened in, and what of them is worth drawing.

Theory of operation
-------------------
    1.  A `Recorder` subscribes to a run's trace. A subscriber is called inside the code that made the event, so the
        current process is known there and is written down beside the event. At the first finding it also asks
        `state`, if it was given one, for the state of all components: later would be too late.
    2.  `draw` turns steps into `Mark`s: a message is one arrow at the time of its delivery (or of its loss), work at a
        store or a device is an arrow there and one back, everything else is a note at its lane. What repeats without
        meaning - polls that were answered "pending", page copies of the compute stream, file operations that went
        well - is left out; the text of the trace still has it.
    3.  `cut` leaves what matters around the violation: every fault and crash before it, what the request was doing that
        the finding names, and the steps right before it. Where something was left out, a `gap` says how many.

A lane is a component: `engine` (or `scheduler`), `worker0`, `device0`, `server0`, `server0.file`. `lanes_of` puts them
into the order in which data flows.

Held by whoever draws; a recorder keeps all steps of its run until it is dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvcore.sim.process import CURRENT
from kvcore.sim.trace import Field, Trace, TraceEvent

OUTSIDE = "engine"
"""The lane of what happens outside all simulated processes."""

_QUIET = ("pick", "reference", "net.send", "executor.end", "copy.submit")
_FILES_LOUD = ("files.error", "files.crash")
_POLLS = ("query ", "pending ", "ping ")
_LANE_RANK = ("world", "engine", "scheduler", "worker", "device", "server")
_BEFORE = 36
_AFTER = 6
_ABOUT = 24


class Step(NamedTuple):
    """One trace event, and the process whose code made it."""

    time_ns: int
    process: str
    label: str
    fields: tuple[Field, ...]

    def line(self) -> str:
        """As in a trace file: time, process, label, fields."""
        time_ns, _, rest = TraceEvent(self.time_ns, self.label, self.fields).line().partition(" ")
        return f"{time_ns} {self.process} {rest}"

    @property
    def what(self) -> tuple[Field, ...]:
        """All but the time."""
        return (self.process, self.label, *self.fields)


class Recorder:
    """Keeps the steps of one run. `state` is asked once, at step `at` or, without it, at the first finding; `states` is
    its answer."""

    def __init__(self, trace: Trace, state: Callable[[], list[str]] | None = None, at: int | None = None) -> None:
        self.steps: list[Step] = []
        self.states: list[str] = []
        self.state = state
        self._at = at
        trace.subscribe(self._record)

    def _record(self, event: TraceEvent) -> None:
        incarnation = CURRENT.get()
        process = OUTSIDE if incarnation is None else incarnation.process.name
        self.steps.append(Step(event.time_ns, process, event.label, event.fields))
        if self.state is not None and self._is_now(event):
            state, self.state = self.state, None
            self.states = state()

    def _is_now(self, event: TraceEvent) -> bool:
        return event.label == "finding" if self._at is None else len(self.steps) > self._at


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing to draw. `kind`: message, reply, lost, work, note, fault, crash, violation or gap."""

    index: int  # of the step that it was drawn from
    time_ns: int
    source: str
    target: str  # the source again for what happens in one place
    text: str
    kind: str = "note"


def draw(steps: Sequence[Step]) -> list[Mark]:
    """What of these steps is worth drawing, in order."""
    marks: list[Mark] = []
    for index, step in enumerate(steps):
        if step.label.startswith(_QUIET):
            continue
        drawn = _PLANES.get(step.label.partition(".")[0], _other)(step, [_text(field) for field in step.fields])
        if drawn is None:
            continue
        mark = Mark(index, step.time_ns, *drawn)
        if marks and _follows(marks[-1], mark):
            mark = replace(mark, text=f"{marks.pop().text}, {mark.text.partition(' copy ')[2]}")
        marks.append(mark)
    return marks


def _follows(before: Mark, mark: Mark) -> bool:
    """The next copy of a stream begins where the one before has ended."""
    if (before.time_ns, before.source, before.target) != (mark.time_ns, mark.target, mark.source):
        return False
    return " copy " in before.text and before.text.partition(" copy ")[0] == mark.text.partition(" copy ")[0]


Drawn = tuple[str, str, str, str] | None
"""Source, target, text and kind of a mark."""


def _text(field: Field) -> str:
    return field.hex()[:12] if isinstance(field, bytes) else str(field)


def _note(lane: str, text: str, kind: str = "note") -> Drawn:
    return lane, lane, text.rstrip(), kind


def _net(step: Step, fields: list[str]) -> Drawn:
    name, _, server = fields[0].partition(">")
    if step.label not in ("net.deliver", "net.lose"):
        return _note(name, f"{step.label} {' '.join(fields)}", "fault")
    _, direction, size, _, says = fields
    says = says or f"{size} bytes"
    if says.startswith(_POLLS) and step.label == "net.deliver":
        return None
    source, target = (name, server) if direction == "up" else (server, name)
    if step.label == "net.lose":
        return source, target, f"lost: {says}", "lost"
    return source, target, says, "message" if direction == "up" else "reply"


def _l1(step: Step, fields: list[str]) -> Drawn:
    server, who, *answers = fields
    if step.label == "l1.release":
        return _note(server, f"{step.label} {' '.join(fields[1:])}") if answers[-1] != "0" else None
    said = ", ".join(f"{count} {answer}" for answer, count in Counter(answers).items())
    return _note(server, f"{step.label} {who}: {said}") if said else None


def _l2(step: Step, fields: list[str]) -> Drawn:
    store, task, *rest = fields
    server = store.partition(".")[0]
    what = step.label.partition(".")[2]
    if what in ("store", "lookup", "load"):
        return server, store, f"{what} {task}: {' '.join(rest)} keys", "work"
    return store, server, f"{what} {task}: {' '.join(rest)}", "reply"


def _copy(step: Step, fields: list[str]) -> Drawn:
    device, stream, number, *rest = fields
    if stream == "compute":
        return None
    worker = device.replace("device", "worker")
    what = step.label.partition(".")[2]
    if what == "begin":
        return worker, device, f"{stream} copy {number} begins", "work"
    ended = "fails" if what == "end" and rest == ["0"] else f"{what}s"
    return device, worker, f"{stream} copy {number} {ended}", "reply"


_REQUESTS = {
    "asked": "{0} own tokens, promised {1}",
    "admitted": "{0} own tokens, {1} loaded",
    "loaded": "{0} of {1} tokens valid",
    "finished": "{0} tokens",
}


def _request(step: Step, fields: list[str]) -> Drawn:
    request_id, *rest = fields
    what = step.label.partition(".")[2]
    if what == "asked" and rest[-1] == "-1":
        return None
    detail = _REQUESTS[what].format(*rest) if what in _REQUESTS else " ".join(rest)
    return _note(step.process, f"{request_id} {what}" + (f": {detail}" if detail else ""))


def _process(step: Step, fields: list[str]) -> Drawn:
    name, incarnation = fields[:2]
    return _note(name, f"{name}: {step.label.partition('.')[2]} (life {incarnation})", "crash")


def _fault(step: Step, fields: list[str]) -> Drawn:
    target = fields[1] if len(fields) > 1 else ""
    lane = target.rpartition(">")[0] or target
    text = f"fault {step.label.partition('.')[2]}: {' '.join(fields)}"
    return _note(lane if _is_lane(lane) else "world", text, "fault")


def _executor(step: Step, fields: list[str]) -> Drawn:
    return _note(fields[0], f"{step.label} {' '.join(fields[1:])}", "fault")


def _files(step: Step, fields: list[str]) -> Drawn:
    if step.label not in _FILES_LOUD:
        return None
    return _note(step.process, f"{step.label} {' '.join(fields)}", "fault")


def _finding(step: Step, fields: list[str]) -> Drawn:
    oracle, text = fields
    return _note(step.process, f"[{oracle}] {text}", "violation")


def _other(step: Step, fields: list[str]) -> Drawn:
    return _note(step.process, f"{step.label} {' '.join(fields)}")


_PLANES: dict[str, Callable[[Step, list[str]], Drawn]] = {
    "copy": _copy,
    "executor": _executor,
    "fault": _fault,
    "files": _files,
    "finding": _finding,
    "l1": _l1,
    "l2": _l2,
    "net": _net,
    "process": _process,
    "request": _request,
}


def _is_lane(name: str) -> bool:
    return name.startswith(_LANE_RANK)


def lanes_of(marks: Iterable[Mark]) -> list[str]:
    """Every lane that is used, in the order in which data flows."""
    used = dict.fromkeys(lane for mark in marks if mark.kind != "gap" for lane in (mark.source, mark.target))
    return sorted(used, key=_lane_order)


def _lane_order(lane: str) -> tuple[int, str]:
    for rank, prefix in enumerate(_LANE_RANK):
        if lane.startswith(prefix):
            return rank, lane
    return len(_LANE_RANK), lane


def violation_in(marks: Sequence[Mark]) -> int:
    """The position of the first violation; that of the last mark when there is none."""
    return next((at for at, mark in enumerate(marks) if mark.kind == "violation"), max(0, len(marks) - 1))


def cut(marks: Sequence[Mark], before: int = _BEFORE, after: int = _AFTER, about: int = _ABOUT) -> list[Mark]:
    """The marks around the first violation that explain it, with gaps where others were left out."""
    if not marks:
        return []
    at = violation_in(marks)
    keep = set(range(max(0, at - before), min(len(marks), at + after + 1)))
    keep.update(index for index, mark in enumerate(marks[:at]) if mark.kind in ("fault", "crash"))
    named = [index for index, mark in enumerate(marks[:at]) if _subjects(marks[at].text) & _subjects(mark.text)]
    keep.update(named[-about:] if about else ())
    return _with_gaps(marks, sorted(keep))


def _subjects(text: str) -> set[str]:
    """Words of a text that look like the name of a request or of a session. Components are in every second step."""
    return {word for word in re.findall(r"\b[a-z]+[-_]?\d+\b", text) if not _is_lane(word)}


def _with_gaps(marks: Sequence[Mark], keep: Sequence[int]) -> list[Mark]:
    chosen: list[Mark] = []
    expected = 0
    for index in keep:
        if index > expected:
            mark = marks[index]
            chosen.append(Mark(mark.index, mark.time_ns, "", "", f"... {index - expected} steps ...", "gap"))
        chosen.append(marks[index])
        expected = index + 1
    return chosen

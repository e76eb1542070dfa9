"""A run for ui.perfetto.dev: the JSON trace event format.

Requests, L2 work and messages overlap, so they are async spans (`b`/`e` with an id); copies of one stream do not and
are complete slices (`X`). Faults, crashes and findings are instants. A component is a process of the picture, a copy
stream a thread of it. Times are microseconds of virtual time. A span that the run never ended ends with the run and is
named "(never ended)".

Format: "Trace Event Format", Google, 2016 (the document that the Chromium project publishes).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.sim.charts.steps import Step, draw

Event = dict[str, Any]

_ENDS = {"stored": "store", "found": "lookup", "loaded": "load"}
_INSTANTS = ("violation", "fault", "crash")


class _Writer:
    """Collects events; numbers components and streams in the order in which they are first named."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, str], int] = {}
        self._open: dict[tuple[str, ...], tuple[int, str, str]] = {}  # -> begin, lane, name
        self._ids = 0

    def pid(self, lane: str) -> int:
        if lane not in self._pids:
            self._pids[lane] = len(self._pids) + 1
            self._name("process_name", self._pids[lane], 0, lane)
        return self._pids[lane]

    def tid(self, lane: str, thread: str) -> int:
        key = (lane, thread)
        if key not in self._tids:
            self._tids[key] = len(self._tids) + 1
            self._name("thread_name", self.pid(lane), self._tids[key], thread)
        return self._tids[key]

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})

    def instant(self, lane: str, name: str, category: str, time_ns: int) -> None:
        event = {"ph": "i", "s": "g", "name": name, "cat": category, "ts": time_ns / 1000}
        self.events.append(event | {"pid": self.pid(lane), "tid": self.tid(lane, "events")})

    def begin(self, key: tuple[str, ...], lane: str, name: str, time_ns: int) -> None:
        if key in self._open:
            self.end(key, time_ns)
        self._open[key] = (time_ns, lane, name)

    def end(self, key: tuple[str, ...], time_ns: int, said: str = "") -> None:
        found = self._open.pop(key, None)
        if found is None:
            return
        begin_ns, lane, name = found
        if key[0] == "copy":
            slice_ = {"ph": "X", "name": name, "cat": key[0], "ts": begin_ns / 1000, "args": {"end": said}}
            where = {"dur": (time_ns - begin_ns) / 1000, "pid": self.pid(lane), "tid": self.tid(lane, key[2])}
            self.events.append(slice_ | where)
            return
        self._ids += 1
        both = {"name": name, "cat": key[0], "id": str(self._ids), "pid": self.pid(lane), "tid": self.tid(lane, key[0])}
        self.events.append(both | {"ph": "b", "ts": begin_ns / 1000, "args": {"end": said}})
        self.events.append(both | {"ph": "e", "ts": time_ns / 1000})

    def end_all(self, time_ns: int) -> None:
        for key, (begin_ns, lane, name) in list(self._open.items()):
            self._open[key] = (begin_ns, lane, f"{name} (never ended)")
            self.end(key, time_ns)


def events_of(steps: Sequence[Step]) -> list[Event]:
    """All events of the picture."""
    writer = _Writer()
    for step in steps:
        _span(writer, step)
    for mark in draw(steps):
        if mark.kind in _INSTANTS:
            writer.instant(mark.target, mark.text, mark.kind, mark.time_ns)
    writer.end_all(steps[-1].time_ns if steps else 0)
    return writer.events


def render(steps: Sequence[Step]) -> str:
    """The whole file."""
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events_of(steps)}, separators=(",", ":"))


def _span(writer: _Writer, step: Step) -> None:
    plane, _, what = step.label.partition(".")
    fields = [str(field) for field in step.fields]
    if plane == "copy":
        _copy(writer, step.time_ns, what, fields)
    elif plane == "l2":
        _store(writer, step.time_ns, what, fields)
    elif plane == "request":
        _request(writer, step, what, fields)
    elif plane == "net" and len(fields) > 3:
        _message(writer, step.time_ns, what, fields)
    elif plane == "fault" and what in ("begin", "end"):
        _fault(writer, step.time_ns, what, fields)


def _copy(writer: _Writer, time_ns: int, what: str, fields: list[str]) -> None:
    device, stream, number, *rest = fields
    if what == "begin":
        writer.begin(("copy", device, stream, number), device, f"{stream} {number}", time_ns)
    elif what in ("end", "cancel"):
        writer.end(("copy", device, stream, number), time_ns, "failed" if rest == ["0"] else what)


def _store(writer: _Writer, time_ns: int, what: str, fields: list[str]) -> None:
    store, task, *rest = fields
    if what in _ENDS:
        writer.end(("l2", store, _ENDS[what], task), time_ns, " ".join(rest))
    elif what in _ENDS.values():
        writer.begin(("l2", store, what, task), store, f"{what} {task} ({' '.join(rest)} keys)", time_ns)


def _request(writer: _Writer, step: Step, what: str, fields: list[str]) -> None:
    key = ("request", fields[0])
    if what == "admitted":
        writer.begin(key, step.process, f"{fields[0]} ({fields[2]} tokens loaded)", step.time_ns)
    elif what in ("preempted", "finished", "aborted"):
        writer.end(key, step.time_ns, what)


def _message(writer: _Writer, time_ns: int, what: str, fields: list[str]) -> None:
    client, direction, _, digest, name = (*fields, "")[:5]
    key = ("message", client, direction, digest)
    if what == "send":
        writer.begin(key, client, name or direction, time_ns)
    else:
        writer.end(key, time_ns, "lost" if what == "lose" else "delivered")


def _fault(writer: _Writer, time_ns: int, what: str, fields: list[str]) -> None:
    key = ("fault", *fields[:2])
    (writer.begin(key, "faults", " ".join(_short(fields)), time_ns) if what == "begin" else writer.end(key, time_ns))


def _short(fields: Iterable[str]) -> list[str]:
    return [field for field in fields if field not in ("", "0")]

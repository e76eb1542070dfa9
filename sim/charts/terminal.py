"""A sequence chart for a terminal: lanes on the left, what happened on the right, never wider than the terminal.

    time us  engine   worker0  server0
    105.250  |        o------->|        store w0.3 #4
    130.000  |        |        *        l1.reserve w0.3: 2 reserved
    188.125  ######################     VIOLATED
             # [bytes] published in server0 by w0.3: the bytes of ...

Almost half of the width is the text's. If the lanes' names do not fit into the rest they are abbreviated and explained
above the chart: w0 for worker0, s0.f for server0.file. Text that is too long is cut, except that of the violation,
which is wrapped. Plain ASCII: it is read in CI logs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from kvcore.sim.charts.steps import Mark, lanes_of

WIDTH_MIN = 60
_TEXT_MIN = 30
_TEXT_PERCENT = 45
_LANE_MIN = 3
_VIOLATION_LINES_MAX = 8
_SIGNS = {"note": "*", "fault": "!", "crash": "X"}


def render(marks: Sequence[Mark], width: int = 100) -> str:
    """The chart; `marks` are drawn as they are, `steps.cut` chooses."""
    chart = _Chart(lanes_of(marks), max((mark.time_ns for mark in marks), default=0), max(width, WIDTH_MIN))
    lines = chart.header()
    for mark in marks:
        lines += chart.rows(mark)
    return "\n".join(lines) + "\n"


class _Chart:
    """The columns of one chart: `margin` for the time, `step` for each lane, `room` for the text."""

    def __init__(self, lanes: Sequence[str], time_ns_max: int, width: int) -> None:
        self.lanes = lanes
        self.width = width
        self.margin = max(len(_time(time_ns_max)), len("time us")) + 2
        longest = max((len(lane) for lane in lanes), default=0) + 2
        text_min = max(_TEXT_MIN, width * _TEXT_PERCENT // 100)
        self.step = max(_LANE_MIN, min(longest, (width - self.margin - text_min) // max(1, len(lanes))))
        self.room = max(1, width - self.margin - self.step * len(lanes))

    def header(self) -> list[str]:
        """The names of the lanes, and above them what the short ones stand for."""
        names, legend = list(self.lanes), list[str]()
        for shorten in (_abbreviation, None):
            if all(len(name) < self.step for name in names):
                break
            names = [shorten(lane) if shorten else str(at) for at, lane in enumerate(self.lanes, start=1)]
            pairs = ", ".join(f"{name} {lane}" for name, lane in zip(names, self.lanes, strict=True))
            legend = textwrap.wrap(pairs, self.width)
        title = "time us".rjust(self.margin - 2) + "  " + "".join(name.ljust(self.step) for name in names)
        return [*legend, title.rstrip()]

    def rows(self, mark: Mark) -> list[str]:
        if mark.kind == "gap":
            return [" " * self.margin + self._empty(":") + _clip(mark.text, self.room)]
        time = _time(mark.time_ns).rjust(self.margin - 2) + "  "
        if mark.kind == "violation":
            return self._violation(mark, time)
        return [time + self._picture(mark) + _clip(mark.text, self.room)]

    def _violation(self, mark: Mark, time: str) -> list[str]:
        bar = "#" * max(1, self.step * len(self.lanes) - 1)
        texts = textwrap.wrap(mark.text, self.width - self.margin - 2)
        if len(texts) > _VIOLATION_LINES_MAX:
            texts = [*texts[:_VIOLATION_LINES_MAX], "..."]
        return [time + bar + " VIOLATED", *(" " * self.margin + "# " + text for text in texts)]

    def _empty(self, sign: str = "|") -> str:
        return (sign + " " * (self.step - 1)) * len(self.lanes)

    def _picture(self, mark: Mark) -> str:
        cells = list(self._empty())
        start, end = self.lanes.index(mark.source) * self.step, self.lanes.index(mark.target) * self.step
        if start == end:
            cells[start] = _SIGNS.get(mark.kind, "*")
            return "".join(cells)
        line = "." if mark.kind == "reply" else "-"
        for position in range(min(start, end) + 1, max(start, end)):
            cells[position] = line if cells[position] != "|" else "+"
        cells[start] = "o"
        cells[end - 1 if end > start else end + 1] = "x" if mark.kind == "lost" else ">" if end > start else "<"
        return "".join(cells)


def _time(time_ns: int) -> str:
    return f"{time_ns / 1000:.3f}"


def _abbreviation(lane: str) -> str:
    """First letter and number of each part: server0.file is s0.f."""
    return ".".join(re.sub(r"^([a-z])[a-z]*", r"\1", part) for part in lane.split("."))


def _clip(text: str, room: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= room else line[: max(0, room - 3)] + "..."

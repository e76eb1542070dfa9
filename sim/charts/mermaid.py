"""A sequence diagram in Mermaid's language: one lane per component, the violated step marked.

Mermaid reads `;` and `#` as its own, and participants' names may not hold every character; both are replaced. Colours
are Mermaid's own `rect`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcore.sim.charts.steps import Mark, lanes_of

_ARROWS = {"message": "->>", "work": "->>", "reply": "-->>", "lost": "-x"}
_TEXT_MAX = 110


def render(marks: Sequence[Mark], title: str = "") -> str:
    """The text of the diagram. `marks` are drawn as they are; `steps.cut` chooses."""
    lanes = lanes_of(marks)
    names = {lane: _participant(lane) for lane in lanes}
    lines = ["sequenceDiagram"]
    if title:
        lines = ["---", f"title: {_text(title)}", "---", *lines]
    lines += [f"    participant {names[lane]} as {lane}" for lane in lanes]
    everywhere = names[lanes[0]] if len(lanes) == 1 else f"{names[lanes[0]]},{names[lanes[-1]]}" if lanes else ""
    for mark in marks:
        lines += [f"    {line}" for line in _lines(mark, names, everywhere)]
    return "\n".join(lines) + "\n"


def _participant(lane: str) -> str:
    return re.sub(r"\W", "_", lane) + "_"  # the underscore keeps words like `end` from being keywords


def _text(text: str) -> str:
    short = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    return "".join({"#": "#35;", ";": "#59;", "\n": " ", "<": "#lt;", ">": "#gt;"}.get(char, char) for char in short)


def _lines(mark: Mark, names: dict[str, str], everywhere: str) -> list[str]:
    text = _text(mark.text)
    if mark.kind == "gap":
        return [f"Note over {everywhere}: {text}"]
    at = f"{mark.time_ns / 1000:.1f} us"
    if mark.kind == "violation":
        return ["rect rgb(255, 205, 205)", f"Note over {everywhere}: VIOLATED at {at} {text}", "end"]
    if mark.kind in _ARROWS and mark.source != mark.target:
        return [f"{names[mark.source]}{_ARROWS[mark.kind]}{names[mark.target]}: {text}"]
    note = f"Note over {names[mark.target]}: {text}"
    return ["rect rgb(255, 240, 200)", note, "end"] if mark.kind in ("fault", "crash") else [note]

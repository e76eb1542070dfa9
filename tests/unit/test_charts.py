"""Charts of a run: what is drawn, what is left out, and that each picture is well formed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import pytest

from kvcore.service.protocol import PROTOCOL_VERSION, Ack, Header, Query, pack
from kvcore.sim.charts import mermaid, perfetto, terminal
from kvcore.sim.charts.states import state_line
from kvcore.sim.charts.steps import Recorder, Step, cut, draw, lanes_of, violation_in
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.frames import name_of
from kvcore.sim.trace import Field, Trace


def step(time_us: int, process: str, label: str, *fields: Field) -> Step:
    return Step(time_us * 1000, process, label, fields)


STORY = [
    step(0, "scheduler", "request.admitted", "r1", 0, 16),
    step(1, "scheduler", "net.send", "scheduler>server0", "up", 90, 11, "lookup r1 #7"),
    step(5, "server0", "net.deliver", "scheduler>server0", "up", 90, 11, "lookup r1 #7"),
    step(5, "server0", "l1.read", "server0", "r1#1", "reserved", "unknown", "unknown"),
    step(6, "server0", "l2.lookup", "server0.file", 3, 2),
    step(7, "scheduler", "net.deliver", "scheduler>server0", "down", 40, 12, "pending #8"),
    step(9, "server0", "l2.found", "server0.file", 3, 2),
    step(9, "engine", "fault.begin", "transport.partition", "worker0>server0", 0, 0, 3),
    step(10, "worker0", "net.send", "worker0>server0", "up", 91, 13, "store a; b #1"),
    step(11, "engine", "net.lose", "worker0>server0", "up", 91, 13, "store a; b #1"),
    step(12, "worker0", "copy.begin", "device0", "store", 4),
    step(15, "worker0", "copy.end", "device0", "store", 4, 1),
    step(15, "worker0", "copy.begin", "device0", "store", 5),
    step(16, "engine", "process.crash", "server0", 0),
    step(17, "worker0", "copy.begin", "device0", "compute", 6),
    step(18, "engine", "finding", "bytes", "r1 attends to wrong KV <here>"),
    step(19, "scheduler", "request.preempted", "r1"),
]


def test_messages_are_arrows_work_goes_there_and_back_and_noise_is_left_out() -> None:
    marks = draw(STORY)
    said = [(mark.kind, mark.source, mark.target, mark.text) for mark in marks]
    assert ("message", "scheduler", "server0", "lookup r1 #7") in said
    assert ("work", "server0", "server0.file", "lookup 3: 2 keys") in said
    assert ("reply", "server0.file", "server0", "found 3: 2") in said
    assert ("lost", "worker0", "server0", "lost: store a; b #1") in said
    assert ("note", "server0", "server0", "l1.read r1#1: 1 reserved, 2 unknown") in said
    assert not any("pending" in mark.text or "compute" in mark.text for mark in marks)
    assert lanes_of(marks) == ["engine", "scheduler", "worker0", "device0", "server0", "server0.file"]


def test_copies_that_follow_each_other_on_a_stream_are_one_arrow() -> None:
    assert [mark.text for mark in draw(STORY) if "copy" in mark.text] == [
        "store copy 4 begins",
        "store copy 4 ends, 5 begins",
    ]


def test_a_cut_keeps_the_violation_its_neighbours_the_faults_and_what_the_request_did() -> None:
    idle = [step(100 + index, "scheduler", "request.finished", f"x{index}", 1) for index in range(200)]
    late = [step(400 + index, "server0", "l1.read", "server0", "y", "reserved") for index in range(100)]
    finding = step(900, "engine", "finding", "output", "r1 differs")
    marks = draw([*STORY[:14], *idle, *late, finding, *late])
    chosen = cut(marks, before=10, after=3)
    texts = [mark.text for mark in chosen]
    assert chosen[violation_in(chosen)].text == "[output] r1 differs"
    assert any("transport.partition" in text for text in texts)
    assert "server0: crash (life 0)" in texts
    assert "r1 admitted: 0 own tokens, 16 loaded" in texts
    assert not any(text.startswith("x") for text in texts)
    left_out = sum(int(mark.text.split()[1]) for mark in chosen if mark.kind == "gap")
    drawn = sum(mark.kind != "gap" for mark in chosen)
    assert left_out + drawn + (len(marks) - 1 - marks.index(chosen[-1])) == len(marks)


def test_nothing_is_drawn_of_nothing() -> None:
    assert cut(draw([])) == []
    assert mermaid.render([]) == "sequenceDiagram\n"
    assert "time us" in terminal.render([])
    assert json.loads(perfetto.render([]))["traceEvents"] == []


def test_mermaid_declares_every_lane_and_holds_no_character_of_its_own_language_in_a_text() -> None:
    lines = mermaid.render(draw(STORY), "a title").splitlines()
    assert lines[:4] == ["---", "title: a title", "---", "sequenceDiagram"]
    declared = {line.split()[1] for line in lines if line.strip().startswith("participant")}
    assert len(declared) == 6
    for line in lines[4:]:
        head, colon, text = line.strip().partition(": ")
        for arrow in ("-->>", "->>", "-x"):
            if arrow in head:
                assert set(head.split(arrow)) <= declared
                break
        if colon:
            assert ";" not in text.replace("#35;", "").replace("#59;", "").replace("#lt;", "").replace("#gt;", "")
            assert "<" not in text
    assert sum(line.strip().startswith("rect") for line in lines) == sum(line.strip() == "end" for line in lines) == 3
    assert any("VIOLATED" in line and "bytes" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_chart_is_never_wider_than_the_terminal(width: int) -> None:
    long = [*STORY, step(30, "engine", "finding", "bytes", "words " * 60)]
    lines = terminal.render(draw(long), width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("VIOLATED" in line for line in lines)
    arrow = next(line for line in lines if "lookup r1 #7" in line)
    assert "o" in arrow
    assert ">" in arrow
    assert any("x" in line.partition("lost:")[0] for line in lines if "lost:" in line)


@pytest.mark.parametrize(
    ("width", "names"), [(80, ["e", "s", "w0", "d0", "s0", "s0.f"]), (60, ["1", "2", "3", "4", "5", "6"])]
)
def test_a_narrow_terminal_shortens_the_names_of_lanes_and_explains_them(width: int, names: list[str]) -> None:
    lines = terminal.render(draw(STORY), width).splitlines()
    at = next(index for index, line in enumerate(lines) if "time us" in line)
    assert lines[at].split()[2:] == names
    assert f"{names[-1]} server0.file" in " ".join(lines[:at])


def test_times_of_any_length_leave_the_lanes_in_line() -> None:
    late = [each._replace(time_ns=each.time_ns + 70_000_000_000) for each in STORY]
    lines = [line for line in terminal.render(draw(late), 100).splitlines() if "#" not in line and " us " not in line]
    assert max(map(len, lines)) <= 100
    assert len({line.index("|") for line in lines if "|" in line and "o" not in line.split()[1]}) <= 2


def test_perfetto_spans_begin_and_end_and_what_never_ended_says_so() -> None:
    events = json.loads(perfetto.render(STORY))["traceEvents"]
    phases = Counter(event["ph"] for event in events)
    assert phases["b"] == phases["e"] > 0
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    for event in events:
        if event["ph"] == "e":
            assert event["ts"] >= begun[event["id"]]["ts"]
            assert event["cat"] == begun[event["id"]]["cat"]
    copies = [event for event in events if event["ph"] == "X"]
    first = copies[0]
    assert (first["cat"], first["name"], first["ts"], first["dur"]) == ("copy", "store 4", 12.0, 3.0)
    assert any(event["name"] == "store 5 (never ended)" for event in copies)
    named = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {event["pid"] for event in events} <= named
    instants = [event["name"] for event in events if event["ph"] == "i"]
    assert any("[bytes]" in name for name in instants)
    request = next(event for event in begun.values() if event["cat"] == "request")
    assert (request["name"], request["ts"]) == ("r1 (16 tokens loaded)", 0.0)


def test_a_recorder_knows_the_process_of_each_event_and_asks_for_states_at_the_first_finding() -> None:
    trace = Trace()
    recorder = Recorder(trace, state=lambda: [f"after {len(recorder.steps)} steps"])
    with SimLoop(1, trace=trace) as loop:
        process = loop.process("server0")
        process.run(trace.event, "l1.read", "server0", "r1", "reserved")
        trace.event("finding", "bytes", "one")
        trace.event("finding", "bytes", "two")
    assert [each.process for each in recorder.steps] == ["server0", "engine", "engine"]
    assert recorder.states == ["after 2 steps"]
    assert recorder.steps[0].line() == "0 server0 l1.read server0 r1 reserved"


def test_recording_a_run_does_not_change_its_hash() -> None:
    hashes = []
    for watch in (False, True):
        trace = Trace()
        if watch:
            Recorder(trace)
        trace.event("finding", "bytes", "one")
        hashes.append(trace.hash)
    assert hashes[0] == hashes[1]


def test_a_frame_is_named_by_its_operation_its_subject_and_its_number() -> None:
    header = Header(PROTOCOL_VERSION, 17, 5, 6)
    assert name_of(pack(header, Query("r3", 1, 1))) == "query r3 #17"
    assert name_of(pack(header, Ack())) == "ack #17"
    assert name_of(pack(header, Query("r3", 1, 1))[:-4]) == "? #17"
    assert name_of(b"no frame") == "?"


@dataclass(frozen=True)
class Inner:
    leases: int = 0
    state: str = "ready"


@dataclass(frozen=True)
class Outer:
    bytes_used: int = 12
    idle: bool = False
    inner: Inner = field(default_factory=Inner)
    several: tuple[Inner, ...] = (Inner(3, ""),)
    by_name: dict[str, int] = field(default_factory=lambda: {"a": 1, "b": 0})


def test_a_state_line_names_what_is_not_nothing() -> None:
    assert state_line("x", Outer()) == "x: bytes_used=12 inner.state=ready several.0.leases=3 by_name.a=1"
    assert state_line("y", Inner(0, ""), {}) == "y: nothing"
    assert state_line("z", "up, life 2") == "z: up, life 2"

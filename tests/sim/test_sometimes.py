"""Sometimes marks: named once, counted per run, and the list is what it says it is."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.ladder import stack_marks
from kvcore.memory import PlainArena
from kvcore.sim import marks
from kvcore.sim.marks.l1 import LOSER_DISCARDED, LOSER_LEASED, L1Marks
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.sometimes import Sometimes, registered, report, sometimes, unseen
from kvcore.sim.trace import Trace


def test_a_name_is_given_once_and_has_a_plane_and_a_sentence() -> None:
    with pytest.raises(CallerError, match=r"there is a mark 'l1\.loser_discarded' already"):
        sometimes("l1.loser_discarded", "again")
    for name, about in (("discarded", "no plane"), (".what", "no plane"), ("l1.", "nothing"), ("l1.nothing", " ")):
        with pytest.raises(CallerError, match=r"plane\.what"):
            sometimes(name, about)
    assert "l1.nothing" not in registered()


def test_there_are_at_least_sixty_each_said_in_one_sentence() -> None:
    known = marks.all_marks()
    assert len(known) >= 60
    assert stack_marks.DIED_SERVING.name in known
    assert len({mark.about for mark in known.values()}) == len(known)
    assert 20 <= sum(mark.common for mark in known.values()) < len(known)
    for name, mark in known.items():
        assert name == mark.name
        assert not mark.about.endswith(".")


def test_the_list_is_the_same_in_another_process() -> None:
    code = "from kvcore.ladder import stack_marks; from kvcore.sim import marks; print(*marks.all_marks())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == list(marks.all_marks())


def test_hits_are_counted_per_run() -> None:
    first, second = Sometimes(), Sometimes()
    first.hit(LOSER_LEASED)
    first.hit(LOSER_DISCARDED, 2)
    first.hit(LOSER_DISCARDED, 0)
    assert first.counts == {"l1.loser_discarded": 2, "l1.loser_leased_resident": 1}
    assert second.counts == {}
    assert Findings(lambda: 0).sometimes.counts == {}


def test_a_swarm_is_told_which_common_marks_it_has_not_seen() -> None:
    counts = {"l1.loser_discarded": 3, "l1.loser_leased_resident": 1}
    assert unseen(counts, [LOSER_DISCARDED, LOSER_LEASED]) == []
    assert unseen({}, [LOSER_DISCARDED, LOSER_LEASED]) == ["l1.loser_discarded"]
    assert unseen({}, [LOSER_DISCARDED, LOSER_LEASED], common=False) == [
        "l1.loser_discarded",
        "l1.loser_leased_resident",
    ]
    rarer = replace(LOSER_DISCARDED, seeds=500)
    assert [unseen({}, [rarer], seeds=seeds) for seeds in (200, 499, 500)] == [[], [], ["l1.loser_discarded"]]
    told = report(counts)
    assert (told["hit"], told["total"]) == (2, len(registered()))
    assert told["unseen"] == unseen(counts)


def test_a_mark_is_hit_by_the_state_and_by_no_other() -> None:
    run = Sometimes()
    watcher = L1Marks(run)
    arena = PlainArena(1024)
    first = arena.allocate(64)
    assert first is not None
    watcher.finished([Answer.PUBLISHED], leased=True)
    watcher.reserved([Answer.RESERVED], [first])
    assert run.counts == {}
    watcher.finished([Answer.PUBLISHED, Answer.DISCARDED], leased=False)
    assert run.counts == {"l1.loser_discarded": 1}
    watcher.refused(evicted=0, size=100, largest_free=64, bytes_free=200)
    assert run.counts.keys() == {
        "l1.loser_discarded",
        "l1.no_space",
        "l1.no_space_all_pinned",
        "l1.no_space_fragmented",
    }


def test_bytes_that_drained_are_seen_when_they_are_given_out_again() -> None:
    run = Sometimes()
    watcher = L1Marks(run)
    arena = PlainArena(64)
    drained = arena.allocate(64)
    assert drained is not None
    arena.free(drained)
    watcher.unheld([drained])
    watcher.reserved([Answer.RESERVED], [arena.allocate(64)])
    assert run.counts == {"l1.drained": 1, "l1.drained_reused": 1}


def test_events_that_nobody_wants_reach_nobody_and_those_of_a_label_keep_their_order() -> None:
    trace, heard = Trace(), []
    trace.subscribe(lambda event: heard.append(("first", event.label)), "a", "b")
    trace.subscribe(lambda event: heard.append(("all", event.label)))
    trace.subscribe(lambda event: heard.append(("last", event.label)), "b", "c")
    for label in "abcd":
        trace.event(label)
    assert heard == [
        ("first", "a"),
        ("all", "a"),
        ("first", "b"),
        ("all", "b"),
        ("last", "b"),
        ("all", "c"),
        ("last", "c"),
        ("all", "d"),
    ]

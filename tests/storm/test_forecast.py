"""The forecast, and what a storm must have done before it counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kvcore.ladder.storm.forecast import BY_NAME, DECK, KINDS, ROUND_SECONDS, SHORT_DECK, Event, Forecast
from kvcore.ladder.storm.record import MUST_HAPPEN, Happened, Record
from kvcore.ladder.storm.remains import Usage, processes_left, usage_of
from kvcore.ladder.storm.tap import MOMENTS, Open


def test_a_seed_is_a_forecast_and_another_one_another() -> None:
    first, again, other = (Forecast(seed) for seed in (1, 1, 2))
    rounds = [first.round() for _ in range(10)]
    assert rounds == [again.round() for _ in range(10)]
    assert rounds != [other.round() for _ in range(10)]


def test_every_kind_comes_in_one_deck_and_one_more_round() -> None:
    for deck in (DECK, SHORT_DECK):
        for seed in range(20):
            forecast = Forecast(seed, deck)
            came = {event.kind for _ in range(len(deck) // 6 + 2) for event in forecast.round()}
            assert came == set(deck)


def test_a_round_ends_one_engine_at_most_and_its_events_are_in_order() -> None:
    for seed in range(20):
        forecast = Forecast(seed)
        for _ in range(10):
            events = forecast.round()
            assert events
            assert sum(BY_NAME[event.kind].engine_dies for event in events) <= 1
            assert [event.at_s for event in events] == sorted(event.at_s for event in events)
            assert all(event.at_s < ROUND_SECONDS for event in events)


def test_a_server_is_killed_while_it_loads_and_while_it_stores() -> None:
    forecast = Forecast(3)
    events = [event for _ in range(4) for event in forecast.round() if event.kind == "server.kill"]
    assert {event.moment for event in events[:2]} == {"loading", "storing"}


def test_the_kinds_name_moments_there_are() -> None:
    assert {moment for kind in KINDS for moment in kind.moments} <= set(MOMENTS)
    assert set(SHORT_DECK) < set(DECK) == set(BY_NAME)


def event(kind: str) -> Event:
    return Event(kind, 0.0, "any", 0, 0.0, 1)


def test_a_storm_that_has_hit_nothing_has_proven_nothing() -> None:
    record = Record()
    assert record.unmet((*SHORT_DECK, *MUST_HAPPEN)) == [*SHORT_DECK, *MUST_HAPPEN]
    record.event(Happened(event("server.kill"), 1.0, True, Open()))
    record.event(Happened(event("link.cut"), 2.0, True, Open()))
    assert record.unmet(("server.kill", "link.cut")) == []
    assert set(record.unmet(MUST_HAPPEN)) >= {"kills while storing", "kills while loading", "breaks while talking"}


def test_a_kill_counts_for_what_was_under_way() -> None:
    record = Record()
    record.event(Happened(event("worker.kill"), 1.0, True, Open(stores=2, reads=1)))
    record.event(Happened(event("link.half"), 2.0, True, Open(unanswered=1)))
    record.event(Happened(event("scheduler.freeze"), 2.0, True, Open(stores=2, reads=1)))
    assert (record.counts["kills while storing"], record.counts["kills while loading"]) == (1, 1)
    assert record.counts["breaks while talking"] == 1


def test_descriptors_and_threads_that_grow_are_named() -> None:
    before = usage_of(os.getpid())
    with open(os.devnull):
        assert usage_of(os.getpid()).growth_since(before) == f"1 more {os.devnull}"
    assert usage_of(os.getpid()).growth_since(before) == ""
    more = Usage(before.descriptors, before.threads + 5)
    assert more.growth_since(before, 4) == "5 more threads"
    assert more.growth_since(before, 5) == ""


def test_a_process_that_still_runs_is_found(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('up', flush=True); input()", str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert len(processes_left([], tmp_path)) == 1
        assert len(processes_left([process.pid], tmp_path / "nobody")) == 1
    finally:
        process.kill()
        process.communicate()
    assert processes_left([process.pid], tmp_path) == []

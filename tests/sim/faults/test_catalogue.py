"""The catalogue covers the table of the simulation's contract, and whatever it draws is written down completely."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from kvcore.sim.faults.catalogue import CATALOGUE, PLANES, kinds_of
from kvcore.sim.faults.kind import FaultEvent, Shape
from kvcore.sim.streams import RandomStream

SHAPES = {
    "two servers": Shape(
        servers=2,
        ranks=2,
        l2=("memory", "file"),
        clients=tuple(f"{who}>server{n}" for who in ("scheduler", "worker0", "worker1") for n in (0, 1)),
        request_ids=("r0", "r1", "r2"),
        groups=("full", "window"),
    ),
    "in-process": Shape(in_process=True, l2=("memory",), request_ids=("r0",)),
    "no L2": Shape(clients=("scheduler>server0", "worker0>server0"), request_ids=("r0",)),
}
# The faults of the table, plane by plane, and the kinds of mine that are each of them.
TABLE = {
    "schedule": {"seeded ties": "ties", "priority change points": "priority", "one task starved": "starve"},
    "clock": {
        "timeouts shrunk up to 600x": "short_timeouts",
        "wall clock stepping": "step",
        "clocks at another rate": "drift",
        "coarse timers": "coarse_timers",
    },
    "transport": {
        "delay tail": "delay_tail",
        "duplicate": "duplicate",
        "reorder": "reorder",
        "clog": "clog",
        "asymmetric partition": "partition",
        "peer restart": "peer_restart",
        "truncated frames": "truncate",
        "oversized frames": "oversize",
        "late replies of an old generation": "late_reply",
        "send refused": "refuse_send",
        "blocked sends": "blocked",
        "the n-th send": "fail_send",
    },
    "device": {
        "completion delayed": "late_completion",
        "streams reordered": "stalled_stream",
        "copy failed": "fail_copy",
        "source reused while read": "slow_store",
        "submit refused synchronously": "refuse_submit",
    },
}


def test_every_plane_has_kinds() -> None:
    assert [plane for plane, kinds in PLANES.items() if not kinds] == []
    assert sum(len(kinds_of(plane)) for plane in PLANES) == len(CATALOGUE)


@pytest.mark.parametrize("plane", TABLE)
def test_every_fault_of_the_table_is_a_kind_of_its_own(plane: str) -> None:
    wanted = [f"{plane}.{what}" for what in TABLE[plane].values()]
    assert len(set(wanted)) == len(wanted)
    assert sorted(kind.name for kind in kinds_of(plane)) == sorted(wanted)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", CATALOGUE)
def test_what_is_drawn_survives_json_and_belongs_to_its_kind(name: str, shape: Shape) -> None:
    for seed in range(40):
        events = CATALOGUE[name].draw(RandomStream(seed, name), shape)
        assert all(event.kind == name for event in events)
        assert all(event.at_ns >= 0 and event.nth >= 0 for event in events)
        assert all(event.until_ns == 0 or event.until_ns > event.at_ns for event in events)
        assert msgspec.json.decode(msgspec.json.encode(events), type=list[FaultEvent]) == events
        assert events == CATALOGUE[name].draw(RandomStream(seed, name), shape)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_kind_is_drawn_for_some_configuration(name: str) -> None:
    drawn = [CATALOGUE[name].draw(RandomStream(seed, name), shape) for seed in range(40) for shape in SHAPES.values()]
    assert any(drawn)


@pytest.mark.parametrize("name", [kind.name for kind in kinds_of("transport")])
def test_there_is_no_network_fault_in_process(name: str) -> None:
    assert not any(CATALOGUE[name].draw(RandomStream(seed, name), SHAPES["in-process"]) for seed in range(40))


@pytest.mark.parametrize("name", ["transport.partition", "transport.clog", "device.stalled_stream", "schedule.starve"])
def test_between_two_events_of_a_kind_there_is_time_to_repair(name: str) -> None:
    pairs = 0
    for seed in range(200):
        events = CATALOGUE[name].draw(RandomStream(seed, name), SHAPES["two servers"])
        for before, after in pairwise(events):
            assert after.at_ns - before.until_ns >= 1_000_000
            pairs += 1
        assert all(event.lasts_ns >= 250_000 for event in events)
    assert pairs > 50


def test_an_event_is_one_line_that_says_all_of_it() -> None:
    event = FaultEvent("transport.partition", 1_500_000, 4_000_000, "worker1>server0", 0, 2)
    assert str(event) == "transport.partition worker1>server0 at 1.5 ms until 4 ms amount 2"
    assert str(FaultEvent("device.fail_copy", nth=3)) == "device.fail_copy at 0 ms nth 3"


def test_an_unknown_field_of_an_event_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"kind": "transport.clog", "severity": 3}', type=FaultEvent)

"""Each kind of plane L1, in a small world: it takes effect, nothing wrong comes of it, and the room comes back."""

from __future__ import annotations

from functools import lru_cache

import pytest

from kvcore.eviction import LruPolicy
from kvcore.keys import ObjectKey
from kvcore.l1 import L1Cache
from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.memory import VirtualArena
from kvcore.sim.faults.catalogue import kinds_of
from kvcore.sim.faults.kind import FaultEvent, Shape
from kvcore.sim.faults.l1 import TightRoom
from kvcore.sim.streams import RandomStream
from kvcore.sim.trace import Trace, TraceEvent

MS = 1_000_000
KINDS = {kind.name: kind for kind in kinds_of("l1")}
AMOUNTS = {"l1.fragmentation": 900, "l1.tiny": 100}
CHUNKS = ((1, 2, 3), (1, 2, 4), (1, 5), (6, 7, 8, 9), (6, 7, 10))
FIRST = tuple(CaseRequest(f"r{index}", chunks, 1, 3, index * 300_000) for index, chunks in enumerate(CHUNKS))
SECOND = tuple(CaseRequest(f"s{index}", (1000, 1001 + index), 1, 2, index * 300_000) for index in range(2))
L2 = {"with L2": ("memory",), "without L2": ()}


def small_case(*events: FaultEvent, l2: tuple[str, ...], servers: int = 1) -> Case:
    """An L1 of eight chunks, for prompts of ten."""
    config = EpisodeConfig(
        groups="full+window", servers=servers, l2=l2, l1_chunks=8, prefix_cache=False, fault_ns=200 * MS
    )
    return Case(7, config, FIRST, SECOND, events)


def run(case: Case) -> tuple[Outcome, list[TraceEvent]]:
    trace = Trace()
    seen: list[TraceEvent] = []
    trace.subscribe(lambda event: seen.append(event) if not event.label.startswith("fault.") else None)
    return run_case(case, trace=trace), seen


@lru_cache
def calm(l2: tuple[str, ...], servers: int) -> tuple[Outcome, list[TraceEvent]]:
    return run(small_case(l2=l2, servers=servers))


@pytest.mark.parametrize("span", [(0, 0), (2 * MS, 8 * MS)], ids=["throughout", "a while"])
@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("l2", L2.values(), ids=L2)
@pytest.mark.parametrize("kind", KINDS)
def test_it_fires_changes_the_run_and_no_output(
    kind: str, l2: tuple[str, ...], servers: int, span: tuple[int, int]
) -> None:
    event = FaultEvent(kind, *span, "server0", 0, AMOUNTS.get(kind, 0))
    outcome, seen = run(small_case(event, l2=l2, servers=servers))
    without, calm_seen = calm(l2, servers)
    assert outcome.findings == []
    assert outcome.fired[kind] > 0
    assert seen != calm_seen
    assert outcome.tokens_compared == without.tokens_compared > 0
    assert outcome.hit_share >= without.hit_share - 0.05, "the room has not come back"


def test_any_allocation_may_find_no_room() -> None:
    allocations = 0
    for nth in range(1, 21):
        event = FaultEvent("l1.no_space_nth", 0, 0, "server0", nth)
        outcome, seen = run(small_case(event, l2=("memory",)))
        assert outcome.findings == []
        assert outcome.fired == {"l1.no_space_nth": 1}
        allocations += any("no_space" in each.fields for each in seen if each.label == "l1.reserve")
    assert allocations == 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_restarts_has_lost_the_foreign_claims_too(kind: str) -> None:
    fault = FaultEvent(kind, 0, 0, "server0", 0, AMOUNTS.get(kind, 0))
    restart = FaultEvent("process.server_restart", 3 * MS, 4 * MS, "server0")
    outcome, _ = run(small_case(fault, restart, l2=("memory",)))
    assert outcome.findings == []
    assert outcome.fired["process.server_restart"] > 0


def test_a_tight_room_refuses_single_keys_and_keeps_the_others_in_their_places() -> None:
    l1 = L1Cache(VirtualArena(64 * 16), LruPolicy)
    room = TightRoom(l1._room)
    l1._room = room
    keys = [ObjectKey(bytes([number]) * 32, "m", 0) for number in range(4)]
    asked = iter((False, True, False, True))
    room.refusals.append(lambda: next(asked, False))
    answers, slots = l1.reserve_write("tag", keys, [64, 128, 64, 64])
    assert [answer.value for answer in answers] == ["reserved", "no_space", "reserved", "no_space"]
    assert [slot and slot.key for slot in slots] == [keys[0], None, keys[2], None]
    l1.abort_write("tag", keys)
    l1.check()
    assert l1.statistics().bytes_used == 0


def test_what_is_drawn_names_servers_that_exist() -> None:
    shape = Shape(servers=2)
    for name, kind in KINDS.items():
        stream = RandomStream(1, name)
        events = [event for _ in range(40) for event in kind.draw(stream, shape)]
        assert {event.target for event in events} == set(shape.server_names)
        assert {event.kind for event in events} == {name}
        assert all(event.until_ns == 0 or event.lasts_ns >= MS for event in events)
        assert any(event.amount for event in events) == (name in AMOUNTS)

"""Each kind of plane L2, in a small world, on both backends: it takes effect, nothing wrong comes of it, and what was
broken is whole again afterwards."""

from __future__ import annotations

from functools import lru_cache

import pytest

from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.sim.faults.catalogue import kinds_of
from kvcore.sim.faults.kind import FaultEvent, Shape
from kvcore.sim.faults.l2_calls import OPERATIONS
from kvcore.sim.streams import RandomStream
from kvcore.sim.trace import Trace, TraceEvent

MS = 1_000_000
KINDS = {kind.name: kind for kind in kinds_of("l2")}
AMOUNTS = {
    "l2.slow_tail": 5 * MS,
    "l2.late_completion": 50 * MS,
    "l2.late_lookup": 50 * MS,
    "l2.partial_batch": 500,
}
NTH = {"l2.duplicate_completion": 6}  # the first are lookups, of which the trace shows only what they bring
CHUNKS = ((1, 2, 3), (1, 2, 4), (1, 5), (6, 7, 8, 9), (6, 7, 10))
FIRST = tuple(CaseRequest(f"r{index}", chunks, 1, 3, index * 300_000) for index, chunks in enumerate(CHUNKS))
SECOND = tuple(CaseRequest(f"s{index}", (1000, 1001 + index), 1, 2, index * 300_000) for index in range(2))


def small_case(*events: FaultEvent, l2: str = "memory", l2_chunks: int = 0) -> Case:
    """Prompts that share prefixes, cold; then L1 is emptied, and they come again out of L2."""
    config = EpisodeConfig(
        groups="full+window",
        servers=1,
        l2=(l2,),
        l1_chunks=64,
        l2_chunks=l2_chunks,
        prefix_cache=False,
        between_passes="drop_l1",
        fault_ns=200 * MS,
    )
    return Case(7, config, FIRST, SECOND, events)


def event_of(kind: str, l2: str, nth: int) -> FaultEvent:
    return FaultEvent(kind, 0, 0, f"server0.{l2}", nth and NTH.get(kind, nth), AMOUNTS.get(kind, 0))


def run(case: Case) -> tuple[Outcome, list[TraceEvent]]:
    """The outcome, and what happened in the world besides the faults' own events."""
    trace = Trace()
    seen: list[TraceEvent] = []
    trace.subscribe(lambda event: seen.append(event) if not event.label.startswith("fault.") else None)
    return run_case(case, trace=trace), seen


@lru_cache
def calm(l2: str, l2_chunks: int) -> tuple[Outcome, list[TraceEvent]]:
    return run(small_case(l2=l2, l2_chunks=l2_chunks))


@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("l2", ["memory", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_fires_changes_the_run_and_no_output(kind: str, l2: str, nth: int) -> None:
    room = 12 if kind == "l2.unlink_fails" else 0  # where everything has room nothing is ever removed
    outcome, seen = run(small_case(event_of(kind, l2, nth), l2=l2, l2_chunks=room))
    without, calm_seen = calm(l2, room)
    assert outcome.findings == []
    assert outcome.fired[kind] == 1 if nth and kind != "l2.partial_batch" else outcome.fired[kind] > 0
    assert seen != calm_seen
    assert outcome.tokens_compared == without.tokens_compared > 0
    assert outcome.loads_verified > 0
    assert outcome.hit_share >= without.hit_share - 0.05, "what was broken has not become whole"


@pytest.mark.parametrize("l2", ["memory", "file"])
@pytest.mark.parametrize("operation", OPERATIONS[1:5])
def test_the_nth_call_of_each_operation_fails_for_every_n(operation: str, l2: str) -> None:
    fired = 0
    for nth in range(1, 6):
        event = FaultEvent("l2.error_nth", 0, 0, f"server0.{l2}", nth, OPERATIONS.index(operation))
        outcome, _ = run(small_case(event, l2=l2))
        assert outcome.findings == []
        fired += bool(outcome.fired.get("l2.error_nth"))
    assert fired >= 4


@pytest.mark.parametrize("l2", ["memory", "file"])
def test_a_deletion_that_fails_keeps_its_room_until_it_succeeds(l2: str) -> None:
    event = FaultEvent("l2.error_nth", 0, 0, f"server0.{l2}", 1, OPERATIONS.index("delete"))
    outcome, _ = run(small_case(event, l2=l2, l2_chunks=12))
    assert outcome.findings == []
    assert outcome.fired == {"l2.error_nth": 1}


@pytest.mark.parametrize("kind", ["l2.lookup_hang", "l2.full", "l2.read_only"])
def test_a_fault_that_ends_in_the_middle_of_the_run_is_over(kind: str) -> None:
    """It ends before the second pass, which then finds what has been stored after it."""
    loads = []
    for until_ns in (3 * MS, 0):
        outcome, _ = run(small_case(FaultEvent(kind, 0, until_ns, "server0.file"), l2="file"))
        assert outcome.findings == []
        assert outcome.fired[kind] > 0
        loads.append(outcome.loads_verified)
    assert loads[0] > loads[1]


@pytest.mark.parametrize("kind", ["l2.hang", "l2.lookup_hang", "l2.full", "l2.read_only", "l2.slow_tail", "l2.empty"])
def test_a_server_that_restarts_under_the_fault_is_well_again(kind: str) -> None:
    fault = FaultEvent(kind, 0, 0, "server0.file", 0, AMOUNTS.get(kind, 0))
    restart = FaultEvent("process.server_restart", 5 * MS, 6 * MS, "server0")
    outcome, _ = run(small_case(fault, restart, l2="file"))
    assert outcome.findings == []
    assert outcome.fired[kind] > 0
    assert outcome.fired["process.server_restart"] > 0


def test_three_losses_at_one_lookup_lose_three_locks() -> None:
    """Each lock is lost once and its unlock is met once; otherwise a lock stays for good, or another's is taken."""
    losses = [FaultEvent("l2.lock_lost", at_ns, 0, "server0.memory", 1) for at_ns in (0, 100_000, 200_000)]
    outcome, _ = run(small_case(*losses))
    assert outcome.findings == []
    assert outcome.fired == {"l2.lock_lost": 3}


def test_two_hangs_of_one_piece_of_work_hold_it_until_both_end() -> None:
    hangs = [FaultEvent("l2.hang", 0, until_ns, "server0.file", 1) for until_ns in (5 * MS, 9 * MS)]
    outcome, _ = run(small_case(*hangs, FaultEvent("l2.worker_lost", 0, 0, "server0.file", 1), l2="file"))
    assert outcome.findings == []
    assert outcome.fired == {"l2.hang": 2, "l2.worker_lost": 1}


def test_an_event_without_a_target_meets_every_store() -> None:
    case = small_case(FaultEvent("l2.refused", 0, 0, "", 0))
    case = Case(
        case.seed, EpisodeConfig(servers=2, l2=("memory", "file"), fault_ns=200 * MS), FIRST, SECOND, case.faults
    )
    outcome, seen = run(case)
    assert outcome.findings == []
    assert not [event for event in seen[: len(seen) // 4] if event.label == "l2.store"], "all stores were refused"


def test_what_is_drawn_names_adapters_that_exist_and_nothing_where_there_is_none() -> None:
    shape = Shape(servers=2, l2=("memory", "file"))
    for name, kind in KINDS.items():
        stream = RandomStream(1, name)
        assert kind.draw(stream, Shape(l2=())) == []
        events = [event for _ in range(40) for event in kind.draw(stream, shape)]
        assert {event.target for event in events} == set(shape.adapters)
        for event in events:
            assert event.kind == name
            assert 0 <= event.at_ns <= shape.horizon_ns + 400 * MS
            assert event.until_ns == 0 or event.lasts_ns >= MS, "too short to matter"


def test_kinds_that_need_it_draw_an_amount() -> None:
    for name in (*AMOUNTS, "l2.error_nth"):
        stream = RandomStream(2, name)
        drawn = [event.amount for _ in range(40) for event in KINDS[name].draw(stream, Shape(l2=("file",)))]
        assert min(drawn) > 0
        assert max(drawn) > min(drawn)

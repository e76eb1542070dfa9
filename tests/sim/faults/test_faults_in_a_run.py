"""Planes schedule, clock, transport and device in a whole run: each kind takes effect, and no output changes."""

from __future__ import annotations

from functools import lru_cache

import pytest

from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig, Schedule
from kvcore.ladder.swarm.episode import run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.service.limits import MESSAGE_BYTES_MAX
from kvcore.service.protocol import ServerLimits
from kvcore.sim.faults.kind import FaultEvent
from kvcore.sim.trace import Trace, TraceEvent

MS = 1_000_000
CHUNKS = ((1, 2, 3), (1, 2, 4), (1, 5), (6, 7, 8, 9), (6, 7, 10))
FIRST = tuple(CaseRequest(f"r{index}", chunks, 1, 6) for index, chunks in enumerate(CHUNKS))
SECOND = tuple(CaseRequest(f"s{index}", (1000, 1001 + index), 1, 2, index * 300_000) for index in range(2))
SCHEDULER, WORKER = "scheduler>server0", "worker0>server1"
EVENTS = [
    FaultEvent("schedule.ties", 0, 20 * MS),
    FaultEvent("schedule.priority", 0, 20 * MS, amount=12),
    FaultEvent("schedule.starve", 0, 20 * MS, "server0", amount=2_000),
    FaultEvent("schedule.starve", 0, 20 * MS, nth=20, amount=2_000),
    FaultEvent("clock.step", 2 * MS, target="server0", amount=100_000 * MS),
    FaultEvent("clock.step", 2 * MS, target="scheduler", amount=100_000 * MS),
    FaultEvent("clock.drift", 0, 0, "server0", amount=1_000),
    FaultEvent("clock.drift", 0, 0, "scheduler", amount=-200),
    FaultEvent("clock.coarse_timers", 0, 0, "scheduler", amount=3 * MS),
    FaultEvent("transport.delay_tail", amount=8 * MS),
    FaultEvent("transport.reorder", 0, 0, SCHEDULER, amount=MS),
    FaultEvent("transport.clog", MS, 6 * MS, WORKER),
    FaultEvent("transport.late_reply", 0, 0, SCHEDULER, 2, 200 * MS),
    FaultEvent("transport.duplicate", amount=500),
    FaultEvent("transport.partition", MS, 9 * MS, "server0", amount=1),
    FaultEvent("transport.partition", MS, 9 * MS, WORKER, amount=2),
    FaultEvent("transport.refuse_send", MS, 6 * MS, SCHEDULER, amount=3),
    FaultEvent("transport.blocked", MS, 9 * MS, SCHEDULER, amount=2),
    FaultEvent("transport.fail_send", 0, 0, WORKER, 3, 0),
    FaultEvent("transport.fail_send", 0, 0, WORKER, 4, 1),
    FaultEvent("transport.peer_restart", 2 * MS, 0, SCHEDULER, 0, 3 * MS),
    FaultEvent("transport.peer_restart", 0, 0, WORKER, 6, 3 * MS),
    FaultEvent("transport.truncate", 0, 0, WORKER, 7, 600),
    FaultEvent("transport.oversize", 0, 0, WORKER, 7, 64),
    FaultEvent("transport.oversize", 0, 0, WORKER, 7, ServerLimits().frame_bytes_max + 1),
    FaultEvent("transport.oversize", 0, 0, WORKER, 7, MESSAGE_BYTES_MAX + 1),
    FaultEvent("device.late_completion", 0, 0, "device0", amount=6 * MS),
    FaultEvent("device.stalled_stream", MS, 9 * MS, "device0.store"),
    FaultEvent("device.stalled_stream", 0, 30 * MS, "device0.load"),
    FaultEvent("device.fail_copy", 0, 0, "device0.store", 5),
    FaultEvent("device.fail_copy", 0, 0, "device0.load"),
    FaultEvent("device.slow_store", 0, 60 * MS, amount=5 * MS),
    FaultEvent("device.refuse_submit", 0, 0, "device0.store", 2),
    FaultEvent("device.refuse_submit", 0, 0, "device0.load", 1),
]


HANG = FaultEvent("l2.lookup_hang", target="server0.memory")
"""Without it no deadline of a healthy run is ever near, and a clock may say what it likes."""


def small_case(*events: FaultEvent, schedule: str = "random") -> Case:
    """Few blocks, so that requests preempt each other; what was stored is loaded in the second pass."""
    config = EpisodeConfig(
        groups="full+window", servers=2, num_blocks=24, prefix_cache=False, load_async=True, fault_ns=60 * MS
    )
    return Case(11, config, FIRST, SECOND, events, Schedule(schedule))


def run(case: Case) -> tuple[Outcome, list[TraceEvent]]:
    trace = Trace()
    seen: list[TraceEvent] = []
    trace.subscribe(lambda event: seen.append(event) if not event.label.startswith("fault.") else None)
    return run_case(case, trace=trace), seen


@lru_cache
def calm(*others: FaultEvent, schedule: str = "random") -> tuple[Outcome, list[TraceEvent]]:
    return run(small_case(*others, schedule=schedule))


def test_the_run_without_faults_stores_loads_and_preempts() -> None:
    outcome, seen = calm()
    assert outcome.findings == []
    assert outcome.loads_verified > 0
    assert any(event.label == "request.preempted" for event in seen)


@pytest.mark.parametrize("event", EVENTS, ids=str)
def test_it_fires_and_no_output_changes(event: FaultEvent) -> None:
    others = (HANG,) if event.kind.startswith("clock.") else ()
    schedule = "fifo" if event.kind == "schedule.ties" else "random"
    outcome, seen = run(small_case(*others, event, schedule=schedule))
    assert outcome.findings == []
    assert outcome.fired.get(event.kind, 0) > 0
    assert seen != calm(*others, schedule=schedule)[1]


def test_a_run_with_faults_is_the_same_run_again() -> None:
    case = small_case(*EVENTS[::3])
    outcomes = [run_case(Case.from_json(case.to_json())) for _ in range(2)]
    assert outcomes[0].trace_hash == outcomes[1].trace_hash
    assert outcomes[0].fired == outcomes[1].fired

"""Faults that come from the engine: each waits for its opportunity, fires once, changes the run and no answer."""

from __future__ import annotations

import pytest

from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig
from kvcore.ladder.swarm.episode import Episode, run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.sim.faults.engine import KINDS
from kvcore.sim.faults.kind import FaultEvent, Kind, Shape
from kvcore.sim.streams import RandomStream

MS = 1_000_000
ALWAYS = {"servers": 1, "load_async": True}
IN_PROCESS = {"servers": 0, "load_async": True}


def case_of(*events: FaultEvent, seed: int = 3, **changes: object) -> Case:
    """Long prompts with shared beginnings, slow copies, and an own prefix cache that is off: many loads and stores."""
    settings = {"l2": ("memory",), "prefix_cache": False, "fault_ns": 80 * MS, "load_page_ns": (50_000, 400_000)}
    config = EpisodeConfig(**(settings | changes))  # type: ignore[arg-type]
    requests = tuple(CaseRequest(f"r{i}", (1, 2, 3, 10 + i), 3, 4, i * MS // 2) for i in range(5))
    return Case(seed, config, requests, (CaseRequest("s0", (100, 101), 3, 2),), tuple(events))


def lived(case: Case) -> tuple[Outcome, Episode]:
    episodes: list[Episode] = []
    outcome = run_case(case, watch=episodes.append)
    assert outcome.verdict == "pass", outcome.findings
    return outcome, episodes[0]


@pytest.mark.parametrize("changes", [ALWAYS, IN_PROCESS], ids=["server", "in-process"])
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_fault_fires_once_changes_the_run_and_no_answer(kind: Kind, nth: int, changes: dict[str, object]) -> None:
    target = "r2" if kind.name in ("engine.abort", "engine.reuse_after_abort", "engine.reuse_after_finish") else ""
    if kind.name == "engine.crash_with_leases":
        target = "scheduler"
    event = FaultEvent(kind.name, target=target, nth=nth, amount=2)
    outcome, _ = lived(case_of(event, **changes))
    quiet, _ = lived(case_of(**changes))
    assert outcome.fired == {kind.name: 1}
    assert outcome.trace_hash != quiet.trace_hash


def test_a_given_up_request_is_not_served_again_by_the_next_life() -> None:
    events = [
        FaultEvent("engine.abort", MS, target="r1"),
        FaultEvent("process.scheduler_kill", 3 * MS, target="scheduler"),
    ]
    outcome, episode = lived(case_of(*events, **ALWAYS))
    quiet, _ = lived(case_of(**ALWAYS))
    assert episode.host.lives == 1
    assert outcome.tokens_compared == quiet.tokens_compared - 4


def test_an_id_that_is_used_again_is_answered_also_when_the_engine_dies_in_between() -> None:
    events = [
        FaultEvent("engine.reuse_after_abort", MS, target="r1"),
        FaultEvent("engine.reuse_after_finish", MS, target="r0"),
        FaultEvent("engine.crash_with_leases", 3 * MS, target="scheduler"),
    ]
    outcome, episode = lived(case_of(*events, **ALWAYS))
    quiet, _ = lived(case_of(**ALWAYS))
    assert episode.host.lives == 1
    assert outcome.fired["engine.reuse_after_abort"] == 1
    assert outcome.tokens_compared == quiet.tokens_compared


def test_an_opportunity_that_never_comes_fires_nothing() -> None:
    events = [
        FaultEvent("engine.abort", target="stranger"),
        FaultEvent("engine.abort_loading"),
        FaultEvent("engine.preempt", nth=100_000, amount=1),
    ]
    outcome, _ = lived(case_of(*events, servers=1, load_async=False))
    assert outcome.fired == {}
    assert outcome.enabled == {"engine.abort": 1, "engine.abort_loading": 1, "engine.preempt": 1}


def test_the_engine_comes_back_with_the_other_half_running_on_for_a_while() -> None:
    """A worker dies: its scheduler and the other worker live on until somebody notices; then all of them are new."""
    event = FaultEvent("process.worker_kill", 3 * MS, target="worker1")
    _, episode = lived(case_of(event, servers=2, ranks=2, load_async=True))
    names = {process.name: process.incarnation for process in episode.world.processes}
    assert names == {"scheduler": 1, "worker0": 1, "worker1": 1, "server0": 0, "server1": 0}
    assert [episode.stack.worker_id(rank) for rank in range(2)] == ["worker0.1", "worker1.1"]
    for server in episode.stack.servers:
        assert server.server.statistics().stores_open == 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_events_are_drawn_for_what_the_configuration_has(kind: Kind) -> None:
    shape = Shape(servers=1, ranks=1, request_ids=("r0", "r1"), load_async=True)
    nothing = Shape(servers=1, ranks=1, request_ids=(), load_async=False)
    events = [event for seed in range(30) for event in kind.draw(RandomStream(seed, "test"), shape)]
    assert len(events) >= 30
    assert {event.target for event in events} <= {"", "r0", "r1", "scheduler"}
    assert all(0 <= event.at_ns <= shape.horizon_ns for event in events)
    if kind.name in ("engine.abort", "engine.abort_loading", "engine.reuse_after_finish"):
        assert kind.draw(RandomStream(0, "test"), nothing) == []

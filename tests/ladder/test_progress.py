"""The progress watch over a whole world: a cache that answers nothing is found, and who waits for it is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcore.budget import ByteBudget
from kvcore.errors import InternalError
from kvcore.ladder.stack_progress import reading, waits, watch_progress
from kvcore.ladder.swarm.episode import Episode, run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.ladder.sweeps.scenario import SCENARIOS
from kvcore.lookup_job import LookupJob
from kvcore.prefetch import PrefetchController
from kvcore.sim.faults.kind import FaultEvent

pytestmark = pytest.mark.ladder

SECOND = 1_000_000_000


def run_watched(scenario: str, *faults: FaultEvent, **changes: Any) -> Outcome:
    """Run it under a watch of two virtual seconds, which ends the run when nothing gets done."""

    def watch(episode: Episode) -> None:
        loop = episode.world.loop

        def stuck(report: str) -> None:
            loop.fail(InternalError("stuck"))

        watch = watch_progress(loop, episode.findings, episode.stack, lambda: episode.engine, 2 * SECOND, stuck)
        watch.start()

    case = SCENARIOS[scenario].case
    config = msgspec.structs.replace(case.config, **changes)
    return run_case(msgspec.structs.replace(case, config=config, faults=faults), watch=watch)


def test_a_lookup_that_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that never come, and a budget that admits nobody: the engine asks for ever."""
    monkeypatch.setattr(PrefetchController, "_deadline", lambda self, job: None)
    monkeypatch.setattr(ByteBudget, "_fits", lambda self, grant: False)
    long = 50 * SECOND
    outcome = run_watched("from_store", lookup_timeout_ns=long, server_timeout_ns=long)
    text = next(finding.text for finding in outcome.findings if finding.oracle == "liveness")
    assert text.startswith("no progress for 2")
    assert "request a: generation 1 of session a#1 is looking, leases may be held" in text
    assert "bytes of the budget" in text
    assert "serving" in text


def test_a_healthy_world_is_not_accused() -> None:
    for scenario in ("from_store", "preempted", "in_process"):
        assert run_watched(scenario).findings == []


def test_a_message_that_is_lost_is_only_waited_for() -> None:
    outcome = run_watched("two_servers", FaultEvent("transport.fail_send", target="worker0>server0", nth=3, amount=1))
    assert outcome.fired
    assert outcome.findings == []


def test_the_reading_moves_with_the_work_and_the_waits_name_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[object] = []
    lines: list[str] = []
    original = LookupJob.loads_ended

    def look(self: LookupJob, *arguments: Any) -> None:
        readings.append(reading(episodes[0].stack, lambda: episodes[0].engine))
        lines.extend(waits(episodes[0].stack, lambda: episodes[0].engine))
        original(self, *arguments)

    monkeypatch.setattr(LookupJob, "loads_ended", look)
    episodes: list[Episode] = []
    outcome = run_case(SCENARIOS["from_store"].case, watch=episodes.append)
    assert outcome.findings == []
    assert len(set(readings)) > 1
    assert any("waits for cell 0/0/" in line for line in lines)
    assert any(line.startswith("engine: step ") for line in lines)

"""A livelock is found and named; patience and a deadlock are not mistaken for one."""

from __future__ import annotations

import asyncio

import pytest

from kvcore.sim.deadlock import DeadlockError
from kvcore.sim.loop import SimLoop
from kvcore.sim.oracles.findings import Findings
from kvcore.sim.progress import ProgressWatch

SECOND = 1_000_000_000
LIMIT_NS = 8 * SECOND


class Work:
    """Somebody polls for `done`; `steps` counts what really gets done."""

    def __init__(self) -> None:
        self.steps = 0
        self.polls = 0

    async def poll(self, enough: int) -> None:
        while self.steps < enough:
            self.polls += 1
            await asyncio.sleep(0.01)

    async def work_slowly(self, steps: int, pause_s: float) -> None:
        for _ in range(steps):
            await asyncio.sleep(pause_s)
            self.steps += 1


def test_a_poll_that_never_gets_an_answer_is_reported_with_who_waits() -> None:
    work = Work()
    with SimLoop(1) as loop:
        findings = Findings(loop.now_ns)
        loop.explanations.append(lambda: ["request r1 waits for cell 0/3"])
        watch = ProgressWatch(loop, findings, LIMIT_NS, lambda: work.steps, on_stuck=lambda text: loop.stop())
        watch.start()
        with pytest.raises(RuntimeError, match="stopped"):
            loop.run_until_complete(loop.create_task(work.poll(1), name="poller"))
        assert LIMIT_NS <= loop.now_ns() <= LIMIT_NS + LIMIT_NS // 4
    (text,) = findings.take()
    assert watch.stuck
    assert text.startswith("[liveness] at 8000000000 ns: no progress for 8000000000 ns")
    assert "poller [no process] at " in text
    assert "Work.poll" in text
    assert "request r1 waits for cell 0/3" in text
    assert work.polls > 500


def test_slow_work_is_not_reported() -> None:
    work = Work()
    with SimLoop(2) as loop:
        findings = Findings(loop.now_ns)
        watch = ProgressWatch(loop, findings, LIMIT_NS, lambda: work.steps)

        async def both() -> None:
            watch.start()
            async with asyncio.TaskGroup() as group:
                group.create_task(work.work_slowly(10, 5.9))
                group.create_task(work.poll(10))
            watch.stop()
            await asyncio.sleep(30)  # nothing is expected any more

        loop.run_until_complete(both())
        assert loop.now_ns() > 80 * SECOND
    assert findings.take() == []
    assert not watch.stuck


def test_work_that_begins_late_starts_the_count_anew() -> None:
    work = Work()
    with SimLoop(3) as loop:
        findings = Findings(loop.now_ns)
        watch = ProgressWatch(loop, findings, LIMIT_NS, lambda: work.steps, on_stuck=lambda text: loop.stop())
        watch.start()
        loop.create_task(work.work_slowly(3, 4.0))
        with pytest.raises(RuntimeError, match="stopped"):
            loop.run_until_complete(work.poll(4))
        assert 20 * SECOND <= loop.now_ns() <= 24 * SECOND
    assert len(findings.take()) == 1


def test_a_watch_does_not_keep_a_deadlock_from_being_found() -> None:
    with SimLoop(4) as loop:
        findings = Findings(loop.now_ns)
        watch = ProgressWatch(loop, findings, LIMIT_NS, lambda: 0)
        loop.explanations.append(lambda: ["nobody holds the key"])

        async def wait() -> None:
            watch.start()
            cancelled = asyncio.get_running_loop().call_later(100, print)
            cancelled.cancel()
            await asyncio.get_running_loop().create_future()

        with pytest.raises(DeadlockError, match="nobody holds the key"):
            loop.run_until_complete(wait())
    assert findings.take() == []

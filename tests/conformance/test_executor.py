"""What every `Executor` promises."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvcore.errors import CallerError
from kvcore.runtime.executor import ThreadExecutor
from kvcore.sim.ports.executor import SimExecutor, WorkFault


@pytest.fixture(params=["threads", "sim-1", "sim-2", "sim-3"])
def port(request):
    return request.param


@pytest.fixture
def new_executor(port):
    def make(workers=1):
        loop = asyncio.get_running_loop()
        if port.startswith("sim"):
            return SimExecutor(loop, "storage", workers=workers, latency_ns=(1_000, 50_000), bytes_per_us=1_000)
        return ThreadExecutor(loop, workers)

    return make


@pytest.fixture
def hang_first(port):
    """Makes the first work of an executor hang; call the answer with the executor before anything is submitted."""
    release = threading.Event()

    def arrange(executor):
        if isinstance(executor, SimExecutor):
            executor.before = lambda index: WorkFault.HANG if index == 0 else None
        return release.wait

    yield arrange
    release.set()


def test_outcomes_come_in_the_order_in_which_the_work_ended(world, inbox, new_executor):
    async def scenario():
        box, ended, executor = inbox(), [], new_executor(workers=3)
        for number in range(50):
            executor.submit(lambda number=number: ended.append(number) or number, box.put, cost_bytes=number * 1000)
        outcomes = await box.first(50)
        assert [outcome.value for outcome in outcomes] == ended
        assert sorted(ended) == list(range(50))
        executor.close()

    world.run(scenario)


def test_one_worker_does_its_work_first_in_first_out(world, inbox, new_executor):
    async def scenario():
        box, executor = inbox(), new_executor(workers=1)
        for number in range(50):
            executor.submit(lambda number=number: number, box.put)
        assert [outcome.value for outcome in await box.first(50)] == list(range(50))
        executor.close()

    world.run(scenario)


@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_whatever_the_work_raises_is_its_outcome_and_the_worker_goes_on(world, inbox, new_executor, error):
    async def scenario():
        box, executor = inbox(), new_executor()

        def fail():
            raise error

        executor.submit(fail, box.put)
        executor.submit(lambda: "next", box.put)
        failed, following = await box.first(2)
        assert failed.error is error
        assert not failed.ok
        assert following.ok
        assert following.value == "next"
        executor.close()

    world.run(scenario)


def test_work_runs_and_is_delivered_after_the_call_that_submitted_it(world, inbox, new_executor):
    async def scenario():
        box, executor = inbox(), new_executor()

        def submit_next(outcome):
            box.put(outcome.value)
            if outcome.value < 3:
                executor.submit(lambda: outcome.value + 1, submit_next)
                assert len(box.items) == outcome.value + 1, "delivered inside the call"

        executor.submit(lambda: 0, submit_next)
        assert box.items == []
        assert await box.first(4) == [0, 1, 2, 3]
        executor.close()

    world.run(scenario)


def test_a_deliver_that_raises_keeps_nobody_elses_outcome_back(world, inbox, new_executor):
    async def scenario():
        box, executor = inbox(), new_executor()

        def broken(outcome):
            raise LookupError(outcome.value)

        executor.submit(lambda: 1, broken)
        executor.submit(lambda: 2, box.put)
        executor.submit(lambda: 3, box.put)
        assert [outcome.value for outcome in await box.first(2)] == [2, 3]
        executor.close()

    world.run(scenario)
    (error,) = world.loop_errors
    assert isinstance(error, LookupError)
    world.loop_errors.clear()


def test_hung_work_takes_one_worker_and_close_does_not_wait_for_it(world, inbox, new_executor, hang_first):
    async def scenario():
        hung, box, executor = inbox(), inbox(), new_executor(workers=2)
        executor.submit(hang_first(executor), hung.put)
        for number in range(5):
            executor.submit(lambda number=number: number, box.put)
        assert [outcome.value for outcome in await box.first(5)] == list(range(5))
        executor.close()
        await _work_of_another_executor(inbox, new_executor)
        assert hung.items == []

    world.run(scenario)


def test_nothing_is_delivered_after_close_and_work_that_waits_is_dropped(world, inbox, new_executor, hang_first):
    async def scenario():
        box, executor, ran = inbox(), new_executor(workers=1), []
        executor.submit(hang_first(executor), box.put)
        for number in range(5):
            executor.submit(lambda number=number: ran.append(number), box.put)
        executor.close()
        await _work_of_another_executor(inbox, new_executor)
        assert box.items == []
        assert ran == []

    world.run(scenario)


def test_a_deliver_that_closes_the_executor_is_the_last(world, inbox, new_executor):
    async def scenario():
        box, executor = inbox(), new_executor()

        def close(outcome):
            executor.close()
            box.put(outcome)

        executor.submit(lambda: 1, close)
        for _ in range(5):
            executor.submit(lambda: 2, box.put)
        await box.first(1)
        await _work_of_another_executor(inbox, new_executor)
        assert [outcome.value for outcome in box.items] == [1]

    world.run(scenario)


def test_submitting_to_a_closed_executor_is_the_callers_mistake_but_closing_twice_is_not(world, new_executor):
    async def scenario():
        executor = new_executor()
        executor.close()
        executor.close()
        with pytest.raises(CallerError):
            executor.submit(lambda: None, lambda outcome: None)

    world.run(scenario)


def test_an_executor_without_workers_is_refused(world, new_executor):
    async def scenario():
        with pytest.raises(CallerError):
            new_executor(workers=0)

    world.run(scenario)


async def _work_of_another_executor(inbox, new_executor, pieces=10):
    """Gives a delivery that must not come the time in which it would have come."""
    box, executor = inbox(), new_executor()
    for piece in range(pieces):
        executor.submit(lambda: None, box.put)
        await box.first(piece + 1)
    executor.close()

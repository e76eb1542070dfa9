"""SimLoop does what asyncio promises, on a clock of whole nanoseconds, and fails loudly where it cannot."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest

from kvcore.errors import CallerError
from kvcore.sim import livelock
from kvcore.sim.deadlock import DeadlockError
from kvcore.sim.livelock import LivelockError
from kvcore.sim.loop import SimLoop
from kvcore.sim.process import DeadProcessError, check_alive
from kvcore.sim.schedule import FifoTies, RandomTies, RecordingTies, ReplayTies
from kvcore.sim.trace import Trace

MS = 1_000_000
S = 1_000_000_000


@pytest.fixture
def loop() -> Generator[SimLoop, None, None]:
    with SimLoop(1) as made:
        yield made


# Time


def test_time_moves_only_when_nothing_is_left_to_do_and_lands_on_the_nanosecond(loop: SimLoop) -> None:
    seen: list[tuple[str, int]] = []

    async def main() -> None:
        loop.call_later_ns(3, lambda: seen.append(("three", loop.now_ns())))
        loop.call_later(0.5, lambda: seen.append(("half", loop.now_ns())))
        loop.call_at(0.25, lambda: seen.append(("quarter", loop.now_ns())))
        loop.call_at_ns(1, lambda: seen.append(("one", loop.now_ns())))
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert seen == [("one", 1), ("three", 3), ("quarter", S // 4), ("half", S // 2)]
    assert loop.now_ns() == S
    assert loop.time() == 1.0


def test_every_nanosecond_survives_the_way_through_seconds() -> None:
    for now_ns in (1, 999_999_999, 1_000_000_001, 86_400 * S + 7, 40 * 86_400 * S + 123_456_789):
        with SimLoop(1, start_ns=now_ns) as loop:
            handle = loop.call_at(loop.time(), lambda: None)
            assert handle.when_ns == now_ns


def test_a_cancelled_timer_never_fires(loop: SimLoop) -> None:
    fired: list[str] = []

    async def main() -> None:
        handle = loop.call_later(0.1, fired.append, "no")
        loop.call_later(0.1, fired.append, "yes")
        handle.cancel()
        assert handle.cancelled()
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert fired == ["yes"]


def test_timers_that_are_due_now_tie_with_what_is_ready_already() -> None:
    orders = set()
    for seed in range(20):
        with SimLoop(seed) as loop:
            order: list[str] = []
            loop.call_later_ns(5, lambda o=order, p=loop: [p.call_soon(o.append, "soon") for _ in "12"])
            loop.call_later_ns(5, order.append, "timer")
            loop.run_until_idle()
            orders.add(tuple(order))
    assert orders == {("soon", "soon", "timer"), ("soon", "timer", "soon"), ("timer", "soon", "soon")}


# asyncio's own tools


async def _tour(log: list[str]) -> str:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(asyncio.sleep(0.2, "a"))
        second = group.create_task(asyncio.sleep(0.1, "b"))
    log.append(first.result() + second.result())
    event, lock, queue = asyncio.Event(), asyncio.Lock(), asyncio.Queue[int](1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await event.wait()
    log.append("timeout")

    async def produce() -> None:
        for number in range(3):
            async with lock:
                await queue.put(number)
        event.set()

    producer = asyncio.create_task(produce())
    log.append(str([await queue.get() for _ in range(3)]))
    await event.wait()
    await producer
    inner = asyncio.create_task(asyncio.sleep(5, "kept"))
    outer = asyncio.ensure_future(asyncio.shield(inner))
    await asyncio.sleep(0)
    outer.cancel()
    log.append(await inner)
    log.append(str(await asyncio.gather(asyncio.sleep(0.3, 1), asyncio.sleep(0.1, 2))))
    done, pending = await asyncio.wait([asyncio.ensure_future(asyncio.sleep(n, n)) for n in (1, 2)], timeout=1.5)
    log.append(f"{len(done)} done {len(pending)} pending")
    for task in pending:
        task.cancel()
    return "end"


@pytest.mark.parametrize("schedule", ["random", "fifo", "priority"])
@pytest.mark.parametrize("seed", range(5))
def test_tasks_timeouts_events_locks_queues_groups_gather_and_shield_work(seed: int, schedule: str) -> None:
    with SimLoop(seed, schedule=schedule, change_points=3) as loop:
        log: list[str] = []
        assert loop.run_until_complete(_tour(log)) == "end"
    assert log == ["ab", "timeout", "[0, 1, 2]", "kept", "[1, 2]", "1 done 1 pending"]


def test_asynchronous_generators_that_are_dropped_are_closed(loop: SimLoop) -> None:
    log: list[str] = []

    async def numbers() -> Any:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0.1)
            log.append("closed")

    async def main() -> None:
        generator = numbers()
        await anext(generator)
        del generator
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert log == ["closed"]


def test_task_names_do_not_depend_on_earlier_runs() -> None:
    def names() -> list[str]:
        with SimLoop(1) as loop:

            async def main() -> list[str]:
                tasks = [asyncio.create_task(asyncio.sleep(0)) for _ in range(3)]
                await asyncio.gather(*tasks)
                return [task.get_name() for task in tasks]

            return loop.run_until_complete(main())

    assert names() == names() == ["task-2", "task-3", "task-4"]


# Failures


def test_an_exception_in_a_callback_fails_the_run(loop: SimLoop) -> None:
    def broken() -> None:
        raise ZeroDivisionError("in a callback")

    async def main() -> None:
        loop.call_later(0.1, broken)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError, match="in a callback"):
        loop.run_until_complete(main())
    assert loop.now_ns() == 100 * MS


def test_an_exception_handler_that_was_set_is_told_instead(loop: SimLoop) -> None:
    told: list[str] = []

    def broken() -> None:
        raise ZeroDivisionError("told")

    async def main() -> None:
        loop.set_exception_handler(lambda _loop, context: told.append(str(context["exception"])))
        loop.call_soon(broken)
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert told == ["told"]


def test_a_failed_task_that_nobody_awaits_fails_the_run(loop: SimLoop) -> None:
    async def broken() -> None:
        raise LookupError("nobody looked")

    async def main() -> None:
        keep = asyncio.create_task(broken())
        await asyncio.sleep(0.1)
        del keep
        await asyncio.sleep(1)

    with pytest.raises(LookupError, match="nobody looked"):
        loop.run_until_complete(main())


def test_the_first_failure_counts(loop: SimLoop) -> None:
    async def main() -> None:
        loop.fail(ValueError("first"))
        loop.fail(ValueError("second"))

    with pytest.raises(ValueError, match="first"):
        loop.run_until_complete(main())


def test_code_that_runs_on_and_on_at_one_instant_is_reported(loop: SimLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livelock, "CALLBACKS_AT_ONE_INSTANT_MAX", 10_000)

    async def poll() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(LivelockError, match="time stands still"):
        loop.run_until_complete(poll())


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda loop: loop.run_in_executor(None, print), "Executor port"),
        (lambda loop: loop.add_reader(0, print), "Files port"),
        (lambda loop: loop.create_connection(None, "h", 1), "Transport ports"),
        (lambda loop: loop.sock_recv(None, 1), "Transport ports"),
        (lambda loop: loop.subprocess_exec(None, "true"), r"SimLoop\.process"),
        (lambda loop: loop.add_signal_handler(2, print), r"SimProcess\.crash"),
        (lambda loop: loop.getaddrinfo("h", 1), "Transport ports"),
    ],
)
def test_the_outside_world_is_refused_with_advice(loop: SimLoop, call: Callable[[Any], Any], advice: str) -> None:
    with pytest.raises(CallerError, match=advice):
        call(loop)


def test_to_thread_names_the_executor_port(loop: SimLoop) -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(CallerError, match="Executor port"):
        loop.run_until_complete(main())


def test_another_thread_may_not_post_to_the_loop() -> None:
    with SimLoop(1, fenced=False) as loop:
        refusals: list[str] = []

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except CallerError as error:
                refusals.append(str(error))

        async def main() -> None:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
            loop.call_soon_threadsafe(refusals.append, "own thread")
            await asyncio.sleep(1)

        loop.run_until_complete(main())
    assert len(refusals) == 2
    assert "Executor port" in refusals[0]


# Deadlock


async def _wait_for_label(loop: SimLoop) -> None:
    future = loop.create_future()
    future.label = "reply to LOOKUP"
    await future


def test_a_deadlock_names_every_pending_task_and_what_it_waits_for(loop: SimLoop) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_wait_for_label(loop), name="client")
            group.create_task(asyncio.Event().wait(), name="eventful")
            group.create_task(asyncio.Queue[int]().get(), name="queued")

    with pytest.raises(DeadlockError) as caught:
        loop.run_until_complete(loop.create_task(main(), name="scenario"))
    lines = {line.split()[0]: line for line in str(caught.value).splitlines()[1:]}
    assert "nothing is left to run while scenario waits" in str(caught.value)
    assert lines["scenario"].endswith("<- client, eventful, queued")
    assert "test_simloop.py:_wait_for_label:" in lines["client"]
    assert lines["client"].endswith("waits for reply to LOOKUP")
    assert "waits for Event.wait" in lines["eventful"]
    assert "waits for Queue.get" in lines["queued"]


def test_a_ring_of_tasks_is_named(loop: SimLoop) -> None:
    async def main() -> None:
        tasks: dict[str, asyncio.Task[None]] = {}

        async def wait_for_task(name: str) -> None:
            await asyncio.sleep(0.1)
            await tasks[name]

        tasks["a"] = asyncio.create_task(wait_for_task("b"), name="a")
        tasks["b"] = asyncio.create_task(wait_for_task("a"), name="b")
        await asyncio.gather(*tasks.values())

    with pytest.raises(DeadlockError) as caught:
        loop.run_until_complete(loop.create_task(main(), name="main"))
    text = str(caught.value)
    assert "ring: a -> b -> a" in text
    assert "main [no process]" in text
    assert "<- a, b" in text


def test_a_deadlock_report_leaves_out_the_tasks_of_crashed_processes(loop: SimLoop) -> None:
    server = loop.process("server")

    async def main() -> None:
        server.spawn(asyncio.Event().wait(), "serve")
        loop.process("client").spawn(asyncio.Event().wait(), "ask")
        await asyncio.sleep(0.1)
        server.crash()
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError) as caught:
        loop.run_until_complete(main())
    assert "ask [client#0]" in str(caught.value)
    assert "serve" not in str(caught.value)
    assert "1 task(s) of crashed processes" in str(caught.value)


# Ending


def test_closing_disposes_of_waiting_tasks_without_a_sound() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop = SimLoop(1)

        async def stubborn() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(asyncio.Event().wait())
                    await asyncio.Event().wait()
            finally:
                await asyncio.sleep(1)

        async def main() -> None:
            for _ in range(3):
                loop.process(f"p{_}").spawn(stubborn(), "stubborn")
            await asyncio.sleep(1)
            loop.create_task(asyncio.sleep(3), name="never started")

        loop.run_until_complete(main())
        loop.close()
        loop.close()
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_a_closed_loop_refuses_work(loop: SimLoop) -> None:
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)
    with pytest.raises(RuntimeError, match="closed"):
        loop.create_task(asyncio.sleep(1))


def test_garbage_is_not_collected_while_the_loop_steps(loop: SimLoop) -> None:
    async def main() -> bool:
        return gc.isenabled()

    assert gc.isenabled()
    assert loop.run_until_complete(main()) is False
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_simulation_runs_inside_a_callback_of_another_loop(loop: SimLoop) -> None:
    async def inner() -> int:
        await asyncio.sleep(7)
        return asyncio.get_running_loop().now_ns()  # type: ignore[attr-defined, no-any-return]

    async def outer() -> int:
        with SimLoop(2) as other:
            elapsed = other.run_until_complete(inner())
        await asyncio.sleep(1)
        assert asyncio.get_running_loop() is loop
        return elapsed

    assert loop.run_until_complete(outer()) == 7 * S


# SimPy


def test_simpy_processes_share_the_clock(loop: SimLoop) -> None:
    log: list[tuple[str, int]] = []

    def disk() -> Any:
        yield loop.env.timeout(250)
        log.append(("disk", loop.now_ns()))
        done.set_result("read")

    done = loop.create_future()
    loop.env.process(disk())

    async def main() -> None:
        log.append((await done, loop.now_ns()))

    loop.run_until_complete(main())
    assert log == [("disk", 250), ("read", 250)]


def test_simpy_events_of_one_time_tie_at_random_and_fifo_keeps_them() -> None:
    def order(seed: int, schedule: str) -> tuple[int, ...]:
        with SimLoop(seed, schedule=schedule) as loop:
            log: list[int] = []
            for number in range(3):
                loop.env.timeout(10, number).callbacks.append(lambda event: log.append(event.value))  # type: ignore
            loop.run_until_idle()
            return tuple(log)

    assert len({order(seed, "random") for seed in range(60)}) == 6
    assert {order(seed, "fifo") for seed in range(5)} == {(0, 1, 2)}


def test_a_simpy_process_that_keeps_rescheduling_for_now_starves_nobody(loop: SimLoop) -> None:
    overtakings = 0
    waiting = True

    def victim(_event: Any) -> None:
        nonlocal waiting
        waiting = False

    def again(_event: Any) -> None:
        nonlocal overtakings
        if waiting:
            overtakings += 1
            loop.env.timeout(0).callbacks.append(again)  # type: ignore

    worst = 0
    for _ in range(100):
        overtakings, waiting = 0, True
        loop.env.timeout(0).callbacks.append(victim)  # type: ignore
        loop.env.timeout(0).callbacks.append(again)  # type: ignore
        loop.run_until_idle()
        loop.env.timeout(1)
        loop.run_until_idle()
        worst = max(worst, overtakings)
    assert 1 <= worst <= 8


def test_simulated_time_is_whole_nanoseconds(loop: SimLoop) -> None:
    with pytest.raises(CallerError, match="whole nanoseconds"):
        loop.env.timeout(0.5)


# Schedules


def _order(loop: SimLoop) -> list[int]:
    log: list[int] = []

    async def step(number: int) -> None:
        for _ in range(2):
            await asyncio.sleep(0)
            log.append(number)

    async def main() -> None:
        await asyncio.gather(*(step(number) for number in range(4)))

    loop.run_until_complete(main())
    return log


def test_fifo_is_what_asyncio_does() -> None:
    with SimLoop(1, schedule="fifo") as loop:
        assert _order(loop) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_priorities_run_one_task_to_its_end_and_change_points_split_it() -> None:
    def orders(change_points: int) -> set[tuple[int, ...]]:
        found = set()
        for seed in range(60):
            with SimLoop(seed, schedule="priority", change_points=change_points) as loop:
                found.add(tuple(_order(loop)))
        return found

    plain = orders(0)
    assert all(order[k] == order[k + 1] for order in plain for k in (0, 2, 4, 6))
    assert len(plain) > 10
    assert orders(5) - plain


def test_tasks_that_poll_together_do_not_starve_the_others_in_priority_mode() -> None:
    for seed in range(10):
        with SimLoop(seed, schedule="priority") as loop:
            flags: list[bool] = []

            async def poll(flags: list[bool] = flags) -> None:
                while not flags:
                    await asyncio.sleep(0)

            async def set_flag(flags: list[bool] = flags) -> None:
                flags.append(True)

            async def main(loop: SimLoop = loop) -> None:
                await asyncio.gather(poll(), poll(), set_flag())

            loop.run_until_complete(main())
            assert loop.callbacks_run < 30_000


def test_a_recorded_schedule_replays_as_fifo_except_where_it_differed() -> None:
    with SimLoop(5) as loop:
        recorder = RecordingTies(RandomTies(loop.streams["recorded"]))
    with SimLoop(5, schedule=recorder) as loop:
        first = _order(loop)
    assert recorder.exceptions
    with SimLoop(99, schedule=ReplayTies(recorder.exceptions)) as loop:
        assert _order(loop) == first
    with SimLoop(5, schedule=ReplayTies({})) as loop, SimLoop(5, schedule=FifoTies()) as other:
        assert _order(loop) == _order(other) != first


# Processes


def test_a_process_runs_in_its_own_context_and_restarts_as_a_new_incarnation(loop: SimLoop) -> None:
    setting = contextvars.ContextVar("setting", default="outside")
    seen: list[Any] = []

    async def work() -> None:
        process = loop.current_process()
        assert process is not None
        seen.append((process.name, process.incarnation, setting.get()))
        setting.set("inside")
        loop.call_soon(lambda: seen.append((loop.current_process() is process, setting.get())))
        await asyncio.sleep(0.1)

    async def main() -> None:
        setting.set("main")
        server = loop.process("server")
        await server.spawn(work(), "work")
        server.crash()
        assert not server.alive
        server.crash()
        with pytest.raises(CallerError, match="is down"):
            server.spawn(work(), "too late")
        server.restart()
        with pytest.raises(CallerError, match="is up"):
            server.restart()
        await server.spawn(work(), "work")
        assert loop.current_process() is None

    loop.run_until_complete(main())
    assert seen == [("server", 0, "outside"), (True, "inside"), ("server", 1, "outside"), (True, "inside")]


def test_process_names_are_unique(loop: SimLoop) -> None:
    loop.process("server")
    with pytest.raises(CallerError, match="already"):
        loop.process("server")


def test_an_exception_that_leaves_a_process_fails_the_run(loop: SimLoop) -> None:
    async def broken() -> None:
        await asyncio.sleep(0.1)
        raise KeyError("in a process")

    async def main() -> None:
        keep = loop.process("server").spawn(broken(), "broken")
        await asyncio.sleep(1)
        del keep

    with pytest.raises(KeyError, match="in a process"):
        loop.run_until_complete(main())
    assert loop.now_ns() == 100 * MS


def test_a_process_task_that_may_fail_hands_its_error_to_whoever_awaits_it(loop: SimLoop) -> None:
    async def broken() -> None:
        raise KeyError("expected")

    async def main() -> None:
        with pytest.raises(KeyError, match="expected"):
            await loop.process("server").spawn(broken(), "broken", may_fail=True)

    loop.run_until_complete(main())


def test_crash_soon_lets_the_running_callback_end_and_nothing_after_it(loop: SimLoop) -> None:
    log: list[str] = []
    server = loop.process("server")

    async def work() -> None:
        with pytest.raises(CallerError, match="crash_soon"):
            server.crash()
        loop.call_soon(log.append, "a callback of the dead")
        server.crash_soon()
        log.append("to the next await")
        await asyncio.sleep(0)
        log.append("after it")

    async def main() -> None:
        server.on_crash(lambda: log.append("on_crash"))
        server.spawn(work(), "work")
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    assert log == ["to the next await", "on_crash"]


def test_code_of_a_dead_process_is_told_so_by_the_ports_when_it_is_cleared_away() -> None:
    log: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                check_alive()
            except DeadProcessError as error:
                log.append(str(error))

    async def main(loop: SimLoop) -> None:
        loop.process("server").spawn(work(), "work")
        await asyncio.sleep(1)

    with SimLoop(1) as loop:
        loop.run_until_complete(main(loop))
        before = loop.trace.hash
        assert log == []
    assert log == ["server#0 has crashed"]
    assert loop.trace.hash == before


# Trace


def test_events_carry_time_label_and_fields_to_subscribers(loop: SimLoop) -> None:
    everything: list[str] = []
    some: list[str] = []
    loop.trace.subscribe(lambda event: everything.append(event.line()))
    loop.trace.subscribe(lambda event: some.append(event.label), "l1.publish", "l1.evict")

    async def main() -> None:
        loop.trace.event("l1.publish", "key one", 3, b"\x01\xff")
        await asyncio.sleep(1e-6)
        loop.trace.event("l2.write", 1 << 70)

    loop.run_until_complete(main())
    assert everything == ['0 l1.publish "key one" 3 0x01ff', f"1000 l2.write {1 << 70}"]
    assert some == ["l1.publish"]


def test_an_oracle_ends_the_run_even_when_the_watched_code_swallows_everything(loop: SimLoop) -> None:
    def oracle(_event: object) -> None:
        raise AssertionError("torn bytes")

    loop.trace.subscribe(oracle)

    async def main() -> None:
        try:
            loop.trace.event("l1.publish")
        except BaseException:
            raise RuntimeError("the oracle's error reached the code under test") from None
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="torn bytes"):
        loop.run_until_complete(main())


def test_different_fields_hash_differently() -> None:
    def hash_of(*fields: Any) -> str:
        trace = Trace()
        trace.event("x", *fields)
        return trace.hash

    variants: list[tuple[Any, ...]] = [
        (), ("",), ("", ""), ("a", "b"), ("ab",), (b"ab",), (1,), ("1",), (1, 2), (12,), (-1,),
        (2**63,), (2**64 - 1,), (2**64,), (-(2**63) - 1,), (2**200,), (-(2**200),), (b"",), (0,),
    ]  # fmt: skip
    assert len({hash_of(*fields) for fields in variants}) == len(variants)


def test_looking_at_the_hash_changes_nothing() -> None:
    def run(looks: bool) -> str:
        with SimLoop(1) as loop:

            async def main() -> None:
                for number in range(50):
                    await asyncio.sleep(0)
                    if number % 7 == 0:
                        loop.trace.event("tick", number)
                    if looks:
                        assert loop.trace.hash

            loop.run_until_complete(main())
            return loop.trace.hash

    assert run(looks=True) == run(looks=False)


def test_a_field_that_is_not_plain_is_refused(loop: SimLoop) -> None:
    with pytest.raises(TypeError):
        loop.trace.event("x", object())  # type: ignore[arg-type]


def test_picks_can_be_kept_with_the_names_of_what_ran() -> None:
    trace = Trace(keep_picks=True)
    with SimLoop(1, trace=trace) as loop:
        loop.run_until_complete(loop.create_task(asyncio.sleep(1), name="sleeper"))
    assert [event.fields[1] for event in trace.events if event.label == "pick"] == [
        "sleeper", "_set_result_unless_cancelled", "sleeper", "SimLoop._main_done",
    ]  # fmt: skip

"""One named test per trap: what asyncio, SimPy and Python do that would make a simulation lie."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import CallerError
from kvcore.sim.fence import Fence, FenceError
from kvcore.sim.loop import SimLoop
from kvcore.sim.streams import RandomStream, Streams

ROOT = Path(__file__).resolve().parents[2]


# Sets ordered by address


def _junk(repeat: int) -> list[object]:
    """Something that moves later objects to other addresses."""
    return [object() for _ in range(repeat * 37 % 101)] + [bytearray(repeat * 13 % 257)]


async def _cancel_a_group(log: list[str]) -> None:
    async def child(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            log.append(name)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(child(f"c{number}"))
            await asyncio.sleep(0.1)
            raise KeyError("cancel the rest")
    except* KeyError:
        pass


async def _iterate(log: list[str]) -> None:
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(asyncio.sleep(0.1, f"t{number}")) for number in range(8)]
    futures = [loop.create_future() for _ in range(8)]
    names = {future: f"f{number}" for number, future in enumerate(futures)}
    loop.call_later(0.1, lambda: [future.set_result(None) for future in futures])
    log.extend(task.get_name() for task in asyncio.all_tasks())
    done, _ = await asyncio.wait([*tasks, *futures])
    log.extend(names[item] if item in names else item.get_name() for item in done)  # type: ignore[index, union-attr]
    again = [asyncio.create_task(asyncio.sleep(0.1, f"a{number}")) for number in range(8)]
    for next_one in asyncio.as_completed(again):
        log.append(await next_one)
    await _cancel_a_group(log)


def _orders(loop_class: type[SimLoop], seed: int, repeats: int) -> set[tuple[str, ...]]:
    orders = set()
    kept = []
    for repeat in range(repeats):
        kept.append(_junk(repeat))
        log: list[str] = []
        with loop_class(seed) as loop:
            loop.run_until_complete(_iterate(log))
        orders.add(tuple(log))
    return orders


def test_groups_wait_as_completed_and_all_tasks_keep_one_order_over_100_repeats() -> None:
    assert len(_orders(SimLoop, 3, 100)) == 1


class _AddressLoop(SimLoop):
    """What asyncio does: tasks and futures that hash as their address."""

    def create_future(self) -> Any:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None, **options: Any) -> Any:
        return asyncio.Task(coro, loop=self, name=name, context=context)


def test_without_numbered_hashes_the_order_changes_from_repeat_to_repeat() -> None:
    async def cancel_order() -> tuple[str, ...]:
        log: list[str] = []
        await _cancel_a_group(log)
        return tuple(log)

    def orders(loop_class: type[SimLoop]) -> int:
        kept, found = [], set()
        for repeat in range(40):
            kept.append(_junk(repeat))
            with loop_class(3) as loop:
                found.add(loop.run_until_complete(cancel_order()))
        return len(found)

    assert orders(_AddressLoop) > 1
    assert orders(SimLoop) == 1


# Crashes


def test_a_crash_runs_neither_finally_nor_except_and_no_timer_of_the_dead() -> None:
    log: list[str] = []
    with SimLoop(1) as loop:
        server = loop.process("server")

        async def guarded(name: str) -> None:
            try:
                async with asyncio.timeout(0.5):
                    await asyncio.sleep(10)
            except BaseException:
                log.append(f"{name}: except")
                raise
            finally:
                log.append(f"{name}: finally")

        async def group() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(guarded("inner"))
                loop.call_later(0.2, log.append, "timer")
                await guarded("outer")

        async def main() -> None:
            server.spawn(group(), "group")
            await asyncio.sleep(0.1)
            loop.call_soon(log.append, "alive")
            server.crash()
            await asyncio.sleep(20)

        loop.run_until_complete(main())
        assert log == ["alive"]


def test_a_future_that_the_dead_waited_for_wakes_only_the_living() -> None:
    log: list[str] = []
    with SimLoop(1) as loop:

        async def wait(name: str, future: asyncio.Future[str]) -> None:
            log.append(f"{name} got {await future}")

        async def main() -> None:
            future = loop.create_future()
            server = loop.process("server")
            server.spawn(wait("dead", future), "wait")
            loop.process("client").spawn(wait("living", future), "wait")
            await asyncio.sleep(0.1)
            future.set_result("it")
            server.crash()
            await asyncio.sleep(0.1)

        loop.run_until_complete(main())
    assert log == ["living got it"]


def test_an_unread_exception_of_a_dead_process_does_not_fail_the_run() -> None:
    with SimLoop(1) as loop:

        async def broken() -> None:
            raise KeyError("nobody will read this")

        async def parent() -> None:
            child = asyncio.create_task(broken())
            await asyncio.sleep(1)
            await child

        async def main() -> None:
            server = loop.process("server")
            server.spawn(parent(), "parent")
            await asyncio.sleep(0.5)
            server.crash()
            await asyncio.sleep(5)

        loop.run_until_complete(main())


# Order that is promised, and order that is not


def test_callbacks_of_one_future_keep_their_order_and_those_of_two_do_not() -> None:
    interleavings = set()
    for seed in range(60):
        log: list[str] = []
        with SimLoop(seed) as loop:

            async def main(loop: SimLoop = loop, log: list[str] = log) -> None:
                first, second = loop.create_future(), loop.create_future()
                for number in range(3):
                    first.add_done_callback(lambda _f, n=number: log.append(f"a{n}"))  # type: ignore[misc]
                    second.add_done_callback(lambda _f, n=number: log.append(f"b{n}"))  # type: ignore[misc]
                first.set_result(None)
                second.set_result(None)
                first.add_done_callback(lambda _f: log.append("a3"))
                await asyncio.sleep(1)

            loop.run_until_complete(main())
        assert [name for name in log if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
        assert [name for name in log if name[0] == "b"] == ["b0", "b1", "b2"]
        interleavings.add(tuple(log))
    assert len(interleavings) > 10


def test_a_callback_added_while_another_one_runs_comes_after_those_that_wait() -> None:
    for seed in range(20):
        log: list[str] = []
        with SimLoop(seed) as loop:

            async def main(loop: SimLoop = loop, log: list[str] = log) -> None:
                future = loop.create_future()

                def first(_f: object) -> None:
                    log.append("first")
                    future.add_done_callback(lambda _f: log.append("third"))

                future.add_done_callback(first)
                future.add_done_callback(lambda _f: log.append("second"))
                future.set_result(None)
                await asyncio.sleep(1)

            loop.run_until_complete(main())
        assert log == ["first", "second", "third"]


def test_call_soon_is_not_first_in_first_out() -> None:
    orders = set()
    for seed in range(40):
        log: list[int] = []
        with SimLoop(seed) as loop:
            for number in range(3):
                loop.call_soon(log.append, number)
            loop.run_until_idle()
        orders.add(tuple(log))
    assert len(orders) == 6


def test_a_channel_delivers_in_order_whatever_the_delays_and_ties() -> None:
    interleavings = set()
    for seed in range(30):
        log: list[tuple[str, int, int]] = []
        with SimLoop(seed) as loop:
            delays = loop.streams["test"]
            channels = {label: loop.channel(label) for label in ("a", "b")}

            def deliver(label: str, number: int, due_ns: int, loop: SimLoop = loop, log: Any = log) -> None:
                log.append((label, number, loop.now_ns() - due_ns))

            for number in range(20):
                for label, channel in channels.items():
                    delay_ns = delays.randint(0, 3)
                    channel.post(deliver, label, number, delay_ns, delay_ns=delay_ns)
            loop.run_until_idle()
        for label in ("a", "b"):
            assert [number for name, number, _ in log if name == label] == list(range(20))
        assert all(late_ns >= 0 for _, _, late_ns in log)
        interleavings.add(tuple(name for name, _, _ in log))
    assert len(interleavings) > 25


def test_a_later_post_never_overtakes_an_earlier_one_with_a_longer_delay() -> None:
    log: list[tuple[str, int]] = []
    with SimLoop(1) as loop:
        channel = loop.channel("connection")
        channel.post(lambda: log.append(("slow", loop.now_ns())), delay_ns=100)
        channel.post(lambda: log.append(("quick", loop.now_ns())), delay_ns=1)
        channel.post_at(500, lambda: log.append(("at", loop.now_ns())))
        assert len(channel) == 3
        loop.run_until_idle()
        channel.post_at(3, lambda: log.append(("past", loop.now_ns())))
        loop.run_until_idle()
    assert log == [("slow", 100), ("quick", 100), ("at", 500), ("past", 500)]


def test_a_cancelled_or_dead_delivery_does_not_hold_up_its_channel() -> None:
    log: list[str] = []
    with SimLoop(1) as loop:
        channel = loop.channel("connection")
        server = loop.process("server")
        channel.post(log.append, "to the dead", delay_ns=5, context=server.context())
        channel.post(log.append, "cancelled", delay_ns=5).cancel()
        channel.post(log.append, "delivered", delay_ns=5)
        server.crash()
        loop.run_until_idle()
        assert len(channel) == 0
    assert log == ["delivered"]


def test_a_message_outlives_its_sender() -> None:
    log: list[str] = []
    with SimLoop(1) as loop:
        sender, receiver = loop.process("sender"), loop.process("receiver")
        channel = loop.channel("connection")
        sender.run(lambda: channel.post(log.append, "sent", delay_ns=5, context=receiver.context()))
        sender.run(lambda: channel.post(log.append, "own", delay_ns=5))
        sender.crash()
        loop.run_until_idle()
    assert log == ["sent"]


# Picking


def test_the_pick_is_uniform_and_starves_nobody() -> None:
    tasks, rounds = 8, 8_000
    picks: list[int] = []
    with SimLoop(11) as loop:

        def spin(number: int) -> None:
            picks.append(number)
            if len(picks) < rounds:
                loop.call_soon(spin, number)

        for number in range(tasks):
            loop.call_soon(spin, number)
        loop.run_until_idle()
    expected = len(picks) / tasks
    chi_square = sum((picks.count(number) - expected) ** 2 / expected for number in range(tasks))
    assert chi_square < 24.3  # 7 degrees of freedom: exceeded by chance once in a thousand seeds
    waits = [0] * tasks
    longest = 0
    for pick in picks:
        waits = [waited + 1 for waited in waits]
        longest = max(longest, waits[pick])
        waits[pick] = 0
    assert longest < 120  # a uniform pick waits that long with a chance of 1 in 1,000 over the whole run


def _calls_of_wait_for(path: Path) -> list[int]:
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "wait_for":
            if isinstance(node.value, ast.Name) and node.value.id in {"asyncio", "tasks"}:
                lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in {"asyncio", "asyncio.tasks"}:
            lines.extend(node.lineno for alias in node.names if alias.name == "wait_for")
    return lines


def test_wait_for_which_swallowed_cancels_is_used_nowhere(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text("import asyncio\nfrom asyncio import wait_for\nx = asyncio.wait_for\n")
    assert _calls_of_wait_for(sample) == [2, 3]
    sources = [path for folder in ("kvcore", "sim", "ladder") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 10
    assert {str(path): _calls_of_wait_for(path) for path in sources if _calls_of_wait_for(path)} == {}


# The fence


def _run_fenced(function: Callable[[], object]) -> None:
    async def main() -> None:
        function()

    with SimLoop(1) as loop:
        loop.run_until_complete(main())


DOORS: dict[str, Callable[[], object]] = {
    "time.time": lambda: time.time(),
    "time.time_ns": lambda: time.time_ns(),
    "time.monotonic": lambda: time.monotonic(),
    "time.perf_counter": lambda: time.perf_counter(),
    "time.sleep": lambda: time.sleep(0),
    "random.random": lambda: random.random(),
    "random.randint": lambda: random.randint(1, 2),
    "random.shuffle": lambda: random.shuffle([1]),
    "SystemRandom.random": lambda: random.SystemRandom().random(),
    "os.urandom": lambda: os.urandom(1),
    "uuid.uuid1": lambda: uuid.uuid1(),
    "uuid.uuid4": lambda: uuid.uuid4(),
    "secrets.token_hex": lambda: secrets.token_hex(),
    "Thread.start": lambda: threading.Thread(target=print).start(),
    "socket.__init__": lambda: socket.socket(),
    "Popen.__init__": lambda: subprocess.Popen(["true"]),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the Popen that was never made
def test_the_fence_names_the_caller_at_every_door(door: str) -> None:
    with pytest.raises(FenceError, match=r"test_simloop_traps\.<lambda> \(.*test_simloop_traps\.py:\d+\)") as caught:
        _run_fenced(DOORS[door])
    assert str(caught.value).split(" was called")[0].replace("_socket", "socket").endswith(door)


def test_the_fence_lets_logging_pass(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _run_fenced(lambda: logging.getLogger("kvcore.test").info("a line with a time stamp"))
    assert caplog.messages == ["a line with a time stamp"]
    assert caplog.records[0].created > 0


def test_a_violation_that_is_swallowed_ends_the_run_all_the_same() -> None:
    def swallow() -> None:
        try:
            time.time()
        except Exception:
            pass

    with pytest.raises(FenceError, match="swallow"):
        _run_fenced(swallow)


def test_the_fence_is_up_only_while_the_loop_steps_and_puts_everything_back() -> None:
    def doors() -> list[object]:
        return [
            time.time, time.sleep, random.random, os.urandom, uuid.uuid4, secrets.token_hex,
            vars(threading.Thread)["start"], vars(socket.socket)["__init__"], vars(subprocess.Popen)["__init__"],
            vars(random.SystemRandom)["random"],
        ]  # fmt: skip

    before = doors()
    with SimLoop(1) as loop:
        assert time.time() > 0
        loop.run_until_complete(asyncio.sleep(1))
        assert doors() == before
        with pytest.raises(FenceError):
            loop.run_until_complete(_read_clock())
        assert doors() == before
        with loop.fence():
            with Fence():
                assert doors() != before
            with pytest.raises(FenceError):
                time.time()
        assert doors() == before


async def _read_clock() -> None:
    time.time()


def test_a_clock_that_kvcore_imported_by_name_is_fenced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("kvcore.imported_by_name")
    exec("from time import monotonic\ndef read(): return monotonic()", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(FenceError, match=r"time\.monotonic was called in a simulated run by kvcore\.imported_by_name"):
        _run_fenced(module.read)
    assert module.read() > 0
    assert module.monotonic is time.monotonic


def test_threads_that_are_not_the_loop_pass_the_fence() -> None:
    go, times = threading.Event(), []

    def other() -> None:
        go.wait(10)
        times.append(time.monotonic())

    thread = threading.Thread(target=other)
    thread.start()
    with Fence():
        go.set()
        thread.join()
    assert len(times) == 1


def test_without_the_fence_the_real_clock_is_read_and_nobody_notices() -> None:
    with SimLoop(1, fenced=False) as loop:
        loop.run_until_complete(_read_clock())


# Draws

EXPECTED_INDEXES = [138, 979, 922, 960, 837, 970]
EXPECTED_INTEGERS = [671977310583, 636575998930, 285889867123]
EXPECTED_SHUFFLE = [0, 1, 4, 9, 3, 5, 6, 2, 7, 8]
EXPECTED_CHANCES = "0101000110001110"
EXPECTED_TOKEN = "332d30768537"
EXPECTED_NEGATIVE_SEED = "0xc77703eefd306c41"
EXPECTED_LARGE_SEED = "0xca5f46af4528660a"


def test_draws_are_the_same_on_every_python() -> None:
    streams = Streams(7)
    items = list(range(10))
    streams["workload"].shuffle(items)
    chances = streams["faults"]
    assert [streams["schedule"].sample_index(1000) for _ in range(6)] == EXPECTED_INDEXES
    assert [streams["network"].randint(10, 10**12) for _ in range(3)] == EXPECTED_INTEGERS
    assert items == EXPECTED_SHUFFLE
    assert "".join(str(int(chances.chance(1, 3))) for _ in range(16)) == EXPECTED_CHANCES
    assert streams["names"].token_bytes(6).hex() == EXPECTED_TOKEN
    assert hex(Streams(-1)["x"].getrandbits(64)) == EXPECTED_NEGATIVE_SEED
    assert hex(Streams(2**70)["x"].getrandbits(64)) == EXPECTED_LARGE_SEED


def test_a_new_stream_changes_no_draw_of_an_old_one() -> None:
    def draws(extra: bool) -> list[int]:
        streams = Streams(5)
        result = []
        for number in range(20):
            if extra:
                streams[f"new {number}"].getrandbits(64)
            result.append(streams["old"].getrandbits(64))
        return result

    assert draws(extra=True) == draws(extra=False)


def test_helpers_stay_inside_their_bounds_and_reach_both_ends() -> None:
    stream = RandomStream(1, "bounds")
    assert {stream.randint(-2, 2) for _ in range(200)} == {-2, -1, 0, 1, 2}
    assert {stream.pick("abc") for _ in range(100)} == {"a", "b", "c"}
    assert {stream.sample_index(1) for _ in range(5)} == {0}
    assert [stream.chance(0, 5), stream.chance(5, 5)] == [False, True]
    drawn = [stream.tail_ns(10, 1000) for _ in range(2000)]
    assert min(drawn) == 10
    assert 900 < max(drawn) <= 1000
    assert sum(value < 50 for value in drawn) > 800
    assert {stream.random_ns(1, 2) for _ in range(50)} == {1, 2}


def test_blocking_work_in_a_thread_is_refused_by_name() -> None:
    async def main() -> None:
        asyncio.get_running_loop().run_in_executor(None, print)

    with SimLoop(1) as loop, pytest.raises(CallerError, match="run_in_executor"):
        loop.run_until_complete(main())

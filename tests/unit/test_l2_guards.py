"""Breaker, deadline and retry: each alone, told the time or in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from kvcore.errors import CallerError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.breaker import (
    TRANSITIONS,
    Breaker,
    BreakerAdapter,
    BreakerEvent,
    BreakerOptions,
    BreakerState,
    BreakerStatistics,
)
from kvcore.l2.deadline import DeadlineAdapter, DeadlineExecutor
from kvcore.l2.memory import MemoryBackend, memory_adapter
from kvcore.l2.retry import RetryAdapter, RetryOptions
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.clock import SimClock
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.notice import SimNotice

S = 1_000_000_000
MS = 1_000_000
OPTIONS = BreakerOptions(failures=3, open_ns=5 * S)
KEYS = [ObjectKey(bytes([number]) * 32, "m", 0) for number in range(3)]
PAYLOADS = [bytes([number]) * 50 for number in range(3)]


# --- the breaker's machine


def opened() -> Breaker:
    breaker = Breaker(OPTIONS)
    for _ in range(3):
        assert breaker.lets_pass(0)
        breaker.bad(0)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_a_good_call_between_bad_ones_keeps_it_closed() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(10):
        breaker.bad(0)
        breaker.bad(0)
        breaker.good()
    assert breaker.state is BreakerState.CLOSED


def test_good_lookups_do_not_hide_that_every_load_fails() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(2):
        breaker.bad(0, "load")
        breaker.good("lookup")
    assert breaker.state is BreakerState.CLOSED
    breaker.bad(0, "load")
    assert breaker.state is BreakerState.OPEN


def test_bytes_that_come_over_forgive_everything_and_a_good_lookup_forgives_lookups() -> None:
    breaker = Breaker(OPTIONS)
    for _ in range(10):
        for kind in ("load", "store", "lookup", ""):
            breaker.bad(0, kind)
            breaker.bad(0, kind)
        breaker.good("load")
        breaker.bad(0, "lookup")
        breaker.bad(0, "lookup")
        breaker.good("lookup")
    assert breaker.state is BreakerState.CLOSED


def test_an_open_breaker_refuses_until_it_has_cooled_down_and_then_lets_one_pass() -> None:
    breaker = opened()
    assert not breaker.lets_pass(5 * S - 1)
    assert breaker.lets_pass(5 * S)
    assert [breaker.lets_pass(5 * S) for _ in range(3)] == [False] * 3
    assert breaker.statistics().refused == 4


def test_a_good_probe_closes_it_and_a_bad_one_opens_it_for_as_long_again() -> None:
    breaker = opened()
    assert breaker.lets_pass(5 * S)
    breaker.bad(5 * S)
    assert not breaker.lets_pass(10 * S - 1)
    assert breaker.lets_pass(10 * S)
    breaker.good()
    assert breaker.state is BreakerState.CLOSED
    assert all(breaker.lets_pass(10 * S) for _ in range(5))


def test_a_probe_that_says_nothing_makes_the_next_call_the_probe() -> None:
    breaker = opened()
    assert breaker.lets_pass(5 * S)
    breaker.neither()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.lets_pass(5 * S)
    assert not breaker.lets_pass(5 * S)


def test_a_probe_that_hangs_is_bad_after_the_same_time() -> None:
    breaker = opened()
    assert breaker.lets_pass(5 * S)
    assert not breaker.lets_pass(10 * S - 1)
    assert breaker.state is BreakerState.HALF_OPEN, "it is waited for until then"
    assert not breaker.lets_pass(10 * S)
    assert breaker.state is BreakerState.OPEN
    assert breaker.lets_pass(15 * S)


def test_what_a_breaker_did_is_counted_once() -> None:
    breaker = opened()
    assert breaker.lets_pass(5 * S)
    breaker.bad(5 * S)
    assert breaker.lets_pass(10 * S)
    breaker.good()
    assert breaker.statistics() == BreakerStatistics(BreakerState.CLOSED, refused=0, opened=2, closed=1, probes=2)


def test_a_breaker_that_is_told_nothing_opens_after_a_few_failures_for_seconds() -> None:
    """As docs/stores.md has it."""
    assert BreakerOptions() == BreakerOptions(failures=3, open_ns=5 * S)


def test_the_table_names_every_state_and_every_event() -> None:
    assert {state for state, _ in TRANSITIONS} == set(BreakerState)
    assert {event for _, event in TRANSITIONS} == set(BreakerEvent)


@pytest.mark.parametrize("make", [lambda: BreakerOptions(0), lambda: BreakerOptions(1, 0), lambda: RetryOptions(0)])
def test_options_that_mean_nothing_are_refused(make) -> None:
    with pytest.raises(CallerError):
        make()


# --- deadline and retry, in virtual time


class Rig:
    def __init__(self, seed: int = 0, workers: int = 2) -> None:
        self.loop = SimLoop(seed)
        self.clock = SimClock(self.loop)
        self.executor = SimExecutor(self.loop, workers=workers, latency_ns=(MS, MS))
        self.medium = MemoryBackend()

    def notice(self) -> SimNotice:
        return SimNotice(self.loop)

    def adapter(self, executor=None):
        return memory_adapter("m", executor=executor or self.executor, notice_factory=self.notice, backend=self.medium)

    def run(self, scenario) -> None:
        try:
            self.loop.run_until_complete(scenario())
        finally:
            self.loop.close()

    async def pause(self, time_ns: int) -> None:
        done = self.loop.create_future()
        self.loop.call_later_ns(time_ns, done.set_result, None)
        await done


class SlowLookups:
    """An inner adapter whose lookups are answered only when the test says so; the rest is the real one's."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.held = True

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def take_lookup(self, task):
        return None if self.held else self.inner.take_lookup(task)


async def stored(adapter) -> None:
    done = asyncio.Event()
    adapter.store_notice.subscribe(done.set)
    adapter.submit_store(KEYS, [memoryview(data) for data in PAYLOADS])
    await done.wait()
    adapter.pop_completed_stores()


class RefusedStores:
    """An inner adapter whose stores are answered with what the test says, as by a store that is full of errors."""

    def __init__(self, inner, answer: StoreAnswer) -> None:
        self.inner = inner
        self.answer = answer

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def pop_completed_stores(self):
        done = self.inner.pop_completed_stores()
        return {task: [self.answer for _ in answers] for task, answers in done.items()}


def behind_breaker(rig: Rig, inner) -> BreakerAdapter:
    """No failure is ever counted by the store itself: answers alone decide."""
    return BreakerAdapter(inner, rig.clock, OPTIONS, failures_seen=lambda: 0, remote_lookups=False)


@pytest.mark.parametrize(
    ("answer", "opens"),
    [(StoreAnswer.RETRY, True), (StoreAnswer.FAILED, True), (StoreAnswer.FULL, False), (StoreAnswer.PRESENT, False)],
)
def test_stores_that_fail_as_a_whole_open_the_breaker_and_others_do_not(answer: StoreAnswer, opens: bool) -> None:
    rig = Rig()

    async def scenario() -> None:
        adapter = behind_breaker(rig, RefusedStores(rig.adapter(), answer))
        for _ in range(OPTIONS.failures):
            await stored(adapter)
        assert (adapter.breaker.state is BreakerState.OPEN) == opens
        if opens:
            with pytest.raises(StoreError, match=r"has failed 3 times in a row; it is tried again every 5 s$"):
                adapter.submit_store(KEYS, [memoryview(data) for data in PAYLOADS])

    rig.run(scenario)


def test_a_store_that_goes_in_closes_the_breaker() -> None:
    rig = Rig()

    async def scenario() -> None:
        inner = RefusedStores(rig.adapter(), StoreAnswer.RETRY)
        adapter = behind_breaker(rig, inner)
        for _ in range(OPTIONS.failures):
            await stored(adapter)
        await rig.pause(OPTIONS.open_ns)
        inner.answer = StoreAnswer.STORED
        await stored(adapter)
        assert adapter.breaker.state is BreakerState.CLOSED

    rig.run(scenario)


def test_a_lookup_is_answered_at_its_deadline_and_its_locks_come_back_when_it_is_done() -> None:
    rig = Rig()

    async def scenario() -> None:
        slow = SlowLookups(rig.adapter())
        adapter = DeadlineAdapter(slow, rig.notice, 2 * S)
        await stored(adapter)
        news = asyncio.Event()
        adapter.lookup_notice.subscribe(news.set)
        task = adapter.submit_lookup_and_lock(KEYS)
        assert adapter.take_lookup(task) is None
        await rig.pause(2 * S - MS)
        assert adapter.take_lookup(task) is None
        news.clear()
        await news.wait()
        assert rig.clock.now_ns() >= 2 * S
        assert adapter.take_lookup(task) == 0
        assert adapter.take_lookup(task) is None
        assert adapter.late == 1
        assert adapter.usage().locked == 3, "the store has locked them all the same"
        slow.held = False
        slow.inner.lookup_notice.signal()
        await rig.pause(MS)
        assert adapter.usage().locked == 0
        adapter.close()

    rig.run(scenario)


def test_a_lookup_in_time_is_passed_on_and_its_deadline_means_nothing_more() -> None:
    rig = Rig()

    async def scenario() -> None:
        adapter = DeadlineAdapter(rig.adapter(), rig.notice, 2 * S)
        await stored(adapter)
        task = adapter.submit_lookup_and_lock(KEYS)
        assert adapter.take_lookup(task) == 0b111
        await rig.pause(5 * S)
        assert adapter.take_lookup(task) is None
        assert (adapter.late, adapter.usage().locked) == (0, 3)
        adapter.close()

    rig.run(scenario)


def test_work_that_waits_behind_a_store_that_hangs_ends_at_the_deadline_and_never_runs() -> None:
    rig = Rig(workers=1)
    ran: list[str] = []
    ended: list[tuple[str, object]] = []

    async def scenario() -> None:
        executor = DeadlineExecutor(rig.executor, 2 * S)
        rig.executor.latency_ns = (60 * S, 60 * S)
        for name in ("hangs", "waits"):
            executor.submit(
                lambda name=name: ran.append(name), lambda outcome, name=name: ended.append((name, outcome))
            )
        await rig.pause(2 * S + MS)
        assert executor.late == 2
        [*names] = [name for name, outcome in ended if isinstance(outcome.error, TimeoutError)]
        assert "waits" in names
        await rig.pause(200 * S)
        assert "waits" not in ran
        assert len(ended) == 2, "each is delivered once"

    rig.run(scenario)


def test_a_long_queue_of_a_store_that_works_is_not_late() -> None:
    rig = Rig(workers=1)
    ended: list[bool] = []

    async def scenario() -> None:
        executor = DeadlineExecutor(rig.executor, 2 * S)
        rig.executor.latency_ns = (S, S)
        for _ in range(20):
            executor.submit(lambda: None, lambda outcome: ended.append(outcome.ok))
        await rig.pause(25 * S)
        assert (ended, executor.late) == ([True] * 20, 0)

    rig.run(scenario)


def test_a_closed_deadline_executor_delivers_nothing() -> None:
    rig = Rig()
    ended: list[object] = []

    async def scenario() -> None:
        executor = DeadlineExecutor(rig.executor, 2 * S)
        executor.submit(lambda: None, ended.append)
        executor.close()
        await rig.pause(10 * S)
        assert ended == []

    rig.run(scenario)


class FlakyLoads:
    """An inner adapter whose next loads and lookups miss some keys, as after errors of the store."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.lose: list[int] = []  # bits to clear, one entry per coming answer
        self.failures = 0
        self.loads = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def submit_load(self, keys, buffers):
        self.loads += 1
        return self.inner.submit_load(keys, buffers)

    def take_load(self, task):
        bits = self.inner.take_load(task)
        if bits is None or not self.lose:
            return bits
        self.failures += 1
        return bits & ~self.lose.pop(0)


async def load(adapter, keys):
    buffers = [bytearray(50) for _ in keys]
    news = asyncio.Event()
    adapter.load_notice.subscribe(news.set)
    task = adapter.submit_load(keys, [memoryview(buffer) for buffer in buffers])
    while (bits := adapter.take_load(task)) is None:
        await news.wait()
        news.clear()
    return bits, buffers


@pytest.mark.parametrize(
    ("lose", "loads", "bits"), [([0b010], 2, 0b111), ([0b111, 0b011], 3, 0b111), ([7, 7, 7], 3, 0)]
)
def test_keys_whose_load_failed_are_asked_again_into_their_own_buffers(lose, loads, bits) -> None:
    rig = Rig()

    async def scenario() -> None:
        flaky = FlakyLoads(rig.adapter())
        options = RetryOptions(attempts_max=3, pause_ns=10 * MS)
        adapter = RetryAdapter(flaky, rig.clock, options, failures_seen=lambda: flaky.failures)
        await stored(adapter)
        flaky.lose = list(lose)
        began_ns = rig.clock.now_ns()
        found, buffers = await load(adapter, KEYS)
        assert (found, flaky.loads) == (bits, loads)
        assert [bytes(buffer) for i, buffer in enumerate(buffers) if found >> i & 1] == PAYLOADS[: found.bit_count()]
        assert rig.clock.now_ns() - began_ns >= (loads - 1) * 5 * MS, "with a pause"
        assert adapter._loads == {}
        adapter.close()

    rig.run(scenario)


def test_a_plain_miss_is_not_asked_again() -> None:
    rig = Rig()

    async def scenario() -> None:
        flaky = FlakyLoads(rig.adapter())
        adapter = RetryAdapter(flaky, rig.clock, RetryOptions(), failures_seen=lambda: flaky.failures)
        assert (await load(adapter, KEYS))[0] == 0
        assert flaky.loads == 1
        adapter.close()

    rig.run(scenario)


def test_a_close_during_the_pause_ends_the_task_without_a_word() -> None:
    rig = Rig()

    async def scenario() -> None:
        flaky = FlakyLoads(rig.adapter())
        adapter = RetryAdapter(flaky, rig.clock, RetryOptions(2, S), failures_seen=lambda: flaky.failures)
        await stored(adapter)
        flaky.lose = [0b111]
        task = adapter.submit_load(KEYS, [memoryview(bytearray(50)) for _ in KEYS])
        await rig.pause(100 * MS)
        assert adapter.take_load(task) is None, "in its pause"
        adapter.close()
        await rig.pause(10 * S)
        assert flaky.loads == 1

    rig.run(scenario)

"""Public report R56: a circuit breaker that opens and closes again, in front of a store that refuses or hangs.

The whole production stack around a store that other processes use (adapter, deadline, retry, breaker), under the
production storage layer, in virtual time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import L2Usage, LockKind, LockStrength, StoreAnswer
from kvcore.l2.breaker import BreakerAdapter, BreakerOptions, BreakerState
from kvcore.l2.deadline import DeadlineAdapter, DeadlineExecutor
from kvcore.l2.envelope import Defect
from kvcore.l2.memory import MemoryBackend, memory_adapter
from kvcore.l2.retry import RetryAdapter, RetryOptions
from kvcore.l2.shared import SharedAdapter
from kvcore.l2.shared_backend import Stored
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.notice import SimNotice
from kvcore.sim.unreliable import RecordHook, UnreliableBackend
from kvcore.storage import Storage

MS = 1_000_000
S = 1_000_000_000
DEADLINE_NS = 2 * S
OPEN_NS = 5 * S
FAILURES = 3
CHUNKS = 3


class RemoteStore:
    """A shared store over `MemoryBackend`'s records, as it looks over a network: `down` refuses every call at once."""

    lock_strength = LockStrength(LockKind.NONE)
    batch_keys = 16
    batch_bytes = 1 << 20

    def __init__(self) -> None:
        self.down = False
        self.calls = 0
        self._inner = MemoryBackend()
        self._inner.open()
        self.record_bytes = self._inner.record_bytes

    def open(self) -> None:
        self._call()

    def find(self, keys: Sequence[ObjectKey]) -> list[bool | Exception]:
        self._call()
        return [key in self._inner.records for key in keys]

    def write(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[StoreAnswer | Exception]:
        self._call()
        for key, payload in orders:
            self._inner.write(key, payload)
        return [StoreAnswer.STORED for _ in orders]

    def read(self, orders: Sequence[tuple[ObjectKey, memoryview]]) -> list[Defect | Exception | None]:
        self._call()
        return [self._inner.read(key, into) for key, into in orders]

    def discard(self, key: ObjectKey, defect: Defect) -> None:
        self.delete([key])

    def delete(self, keys: Sequence[ObjectKey]) -> list[Exception | None]:
        self._call()
        for key in keys:
            self._inner.delete(key)
        return [None for _ in keys]

    def scan(self) -> Iterator[Stored]:
        return iter(())

    def usage(self) -> L2Usage:
        return L2Usage(0, None, len(self._inner.records), 0)

    def close(self) -> None:
        return None

    def _call(self) -> None:
        self.calls += 1
        if self.down:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "not there")


def stack(rig: Any, backend: RemoteStore) -> BreakerAdapter:
    """As `kvcore.l2.open` builds it for a guarded store."""
    rig.executor = SimExecutor(rig.loop, "test.remote", latency_ns=(MS, 3 * MS))
    timed = DeadlineExecutor(rig.executor, DEADLINE_NS)

    def notice() -> SimNotice:
        return SimNotice(rig.loop)

    bottom = SharedAdapter("remote", backend, timed, notice, rig.clock)

    def failures_seen() -> int:
        return bottom.statistics().io_errors + timed.late

    deadline = DeadlineAdapter(bottom, notice, DEADLINE_NS)
    again = RetryAdapter(deadline, rig.clock, RetryOptions(), failures_seen=failures_seen)
    options = BreakerOptions(FAILURES, OPEN_NS)
    return BreakerAdapter(again, rig.clock, options, failures_seen=failures_seen, remote_lookups=True)


def use(rig: Any, adapter: Any) -> None:
    """The rig's storage, over an adapter that could only be made while the loop runs."""
    rig.adapters = [adapter]
    rig.storage = Storage(
        layout=rig.layout, model_name="m", l1=rig.l1, adapters=[adapter], clock=rig.clock, config=rig.config
    )


def refuse(rig: Any, backend: RemoteStore) -> None:
    backend.down = True


def hang(rig: Any, backend: RemoteStore) -> None:
    rig.executor.latency_ns = (40 * S, 41 * S)


def heal(rig: Any, backend: RemoteStore) -> None:
    backend.down = False
    rig.executor.latency_ns = (MS, 3 * MS)


async def ask(rig: Any) -> tuple[int, int]:
    """One request for what is stored: (how long the hit is, what it cost in virtual time)."""
    rig.storage.drop_l1()
    began_ns = rig.clock.now_ns()
    job = rig.start(CHUNKS, timeout_ns=10 * S)
    await job.wait()
    length, cost_ns = rig.best(job), rig.clock.now_ns() - began_ns
    if length:
        rig.read(job, length)
    else:
        rig.storage.release_owner(job.owner)
    return length, cost_ns


async def until(rig: Any, time_ns: int) -> None:
    await rig.pause(max(1, time_ns - rig.clock.now_ns()))


@pytest.mark.parametrize("trouble", [refuse, hang])
@pytest.mark.parametrize("seed", range(4))
def test_a_breaker_opens_when_the_store_is_lost_and_closes_when_it_is_back(
    rig_of: Any, trouble: Callable[[Any, RemoteStore], None], seed: int
) -> None:
    """R56: L2 down from second 10 to 60, a request every second. Calls soon cost nothing; it is used again after 60."""
    rig = rig_of(seed, adapters=())
    backend = RemoteStore()

    async def scenario(rig: Any) -> None:
        adapter = stack(rig, backend)
        use(rig, adapter)
        rig.store(rig.keys(CHUNKS))
        assert await rig.storage.drain()
        for second in range(1, 10):
            await until(rig, second * S)
            assert (await ask(rig))[0] == CHUNKS
        await until(rig, 10 * S)
        trouble(rig, backend)
        costs_ns = [await lost_request(rig, second) for second in range(10, 60)]
        dear = [cost for cost in costs_ns if cost > MS]
        probes = 1 + 50 * S // OPEN_NS
        assert FAILURES <= len(dear) <= 2 * FAILURES + probes, "only what opened it, and the probes, cost anything"
        assert max(costs_ns) <= DEADLINE_NS + DEADLINE_NS // 2, "and that is bounded by the deadline and one retry"
        assert adapter.breaker.statistics().refused >= 20
        await until(rig, 60 * S)
        heal(rig, backend)
        await until(rig, 60 * S + 2 * OPEN_NS + 45 * S * (trouble is hang))  # what hangs ends in its own time
        assert (await ask(rig))[0] == CHUNKS, "in use again"
        assert (await ask(rig))[0] == CHUNKS
        assert adapter.breaker.state is BreakerState.CLOSED

    async def lost_request(rig: Any, second: int) -> int:
        await until(rig, second * S)
        length, cost_ns = await ask(rig)
        assert length == 0
        return cost_ns

    rig.run(scenario)


def test_only_one_probe_at_a_time_goes_to_a_store_that_may_be_back(rig_of: Any) -> None:
    """R56: no storm of waiting requests when the breaker is half-open."""
    rig = rig_of(0, adapters=())
    backend = RemoteStore()

    async def scenario(rig: Any) -> None:
        adapter = stack(rig, backend)
        use(rig, adapter)
        rig.store(rig.keys(CHUNKS))
        assert await rig.storage.drain()
        backend.down = True
        while adapter.breaker.state is not BreakerState.OPEN:
            await ask(rig)
        await rig.pause(OPEN_NS)
        rig.storage.drop_l1()
        before = backend.calls
        jobs = [rig.start(CHUNKS, prompt=f"p{number}") for number in range(50)]
        for job in jobs:
            await job.wait()
            rig.storage.release_owner(job.owner)
        assert backend.calls - before <= RetryOptions().attempts_max, "one probe, with its own retry"
        assert adapter.breaker.statistics().probes == 1
        assert adapter.breaker.state is BreakerState.OPEN

    rig.run(scenario)


class _ReadsFail(RecordHook):
    def before(self, operation: str, key: ObjectKey) -> None:
        if operation in ("read", "write"):
            raise OSError(errno.EIO, "lost")


def test_answers_from_an_index_do_not_keep_a_breaker_from_opening(rig_of: Any) -> None:
    """S49; R56: each lookup succeeds, from the index in memory, and every load fails: it opens all the same."""
    rig = rig_of(0, adapters=())

    async def scenario(rig: Any) -> None:
        executor = SimExecutor(rig.loop, "test.local")
        backend = UnreliableBackend(MemoryBackend())
        inner = memory_adapter("local", executor=executor, notice_factory=lambda: SimNotice(rig.loop), backend=backend)
        adapter = BreakerAdapter(
            inner,
            rig.clock,
            BreakerOptions(FAILURES, OPEN_NS),
            failures_seen=lambda: inner.statistics().io_errors,
            remote_lookups=False,
        )
        use(rig, adapter)
        for number in range(FAILURES):
            rig.store(rig.keys(1, prompt=f"p{number}"))
        assert await rig.storage.drain()
        backend.hooks.append(_ReadsFail())
        for number in range(FAILURES):
            assert adapter.breaker.state is BreakerState.CLOSED
            rig.storage.drop_l1()
            job = rig.start(1, prompt=f"p{number}")
            await job.wait()
            assert rig.best(job) == 0
            rig.storage.release_owner(job.owner)
            assert inner.statistics().lookup_hits == number + 1, "the index said yes"
        with pytest.raises(StoreError):
            adapter.submit_lookup_and_lock([])
        assert adapter.breaker.state is BreakerState.OPEN
        backend.hooks.clear()
        await rig.pause(OPEN_NS)

    rig.run(scenario)

"""Faults on purpose: every kind fires, and what is served under it is right or a miss."""

from __future__ import annotations

import pytest

from kvcore.errors import ConfigError, KvcoreError
from kvcore.keys import ObjectKey
from kvcore.l2.faults import CALL_FAULTS, KINDS, OPERATION_FAULTS, RECORD_FAULTS, WORK_FAULTS, FaultPlan
from kvcore.l2.faulty import FaultyAdapter, FaultyExecutor, faulty_backend
from kvcore.l2.indexed import IndexedAdapter
from kvcore.l2.memory import MemoryBackend
from kvcore.l2.open import parse_store
from kvcore.sim.faults.l2 import KINDS as SIMULATED
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.notice import SimNotice

ROUNDS = 12
LENGTH = 200


def payload(number: int) -> bytes:
    return bytes((number * 7 + position) % 251 for position in range(LENGTH))


async def use(adapter, loop) -> tuple[int, int, int]:
    """Store, look up and load again and again: (loads asked for, loads that came, refusals). Wrong bytes fail."""
    asked = came = refused = 0
    for step in range(ROUNDS):
        numbers = [step % 4, (step + 1) % 4, (step + 2) % 4]
        keys = [ObjectKey(bytes([number]) * 32, "model", 0, 0, "salt") for number in numbers]
        try:
            adapter.submit_store(keys, [memoryview(payload(number)) for number in numbers])
            await pause(loop)
            adapter.pop_completed_stores()
            lookup = adapter.submit_lookup_and_lock(keys)
            await pause(loop)
            bits = adapter.take_lookup(lookup) or 0
            buffers = [bytearray(LENGTH) for _ in keys]
            task = adapter.submit_load(keys, [memoryview(buffer) for buffer in buffers])
            await pause(loop)
            found = adapter.take_load(task) or 0
        except KvcoreError:
            refused += 1
            continue
        adapter.submit_unlock([key for position, key in enumerate(keys) if bits >> position & 1])
        asked += len(keys)
        came += found.bit_count()
        for position, number in enumerate(numbers):
            assert not found >> position & 1 or buffers[position] == payload(number), "wrong bytes were served"
        adapter.delete(keys[:1])
    return asked, came, refused


async def pause(loop) -> None:
    """Long enough for what is only slow, and for what hangs as well."""
    done = loop.create_future()
    loop.call_later_ns(60_000_000_000, done.set_result, None)
    await done


def run(plan: FaultPlan) -> tuple[int, int, int]:
    loop = SimLoop(3)
    executor = SimExecutor(loop)

    async def scenario():
        backend = faulty_backend(MemoryBackend(), plan)
        inner = IndexedAdapter("m", backend, FaultyExecutor(executor, plan), lambda: SimNotice(loop), None)
        adapter = FaultyAdapter(inner, plan)
        for notice in (adapter.store_notice, adapter.lookup_notice, adapter.load_notice):
            notice.subscribe(lambda: None)
        result = await use(adapter, loop)
        adapter.close()
        inner.check()
        return result

    try:
        return loop.run_until_complete(scenario())
    finally:
        loop.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_fires_and_never_serves_a_wrong_byte(kind) -> None:
    plan = FaultPlan.parse([f"{kind}:4"], seed=1)
    asked, came, refused = run(plan)
    assert plan.fired[kind] > 0, "a fault that never fires proves nothing"
    assert came > 0, "between faults the store serves"
    harmless = {"l2.slow_tail", "l2.late_completion", "l2.hang", "l2.late_lookup", "l2.lookup_hang", "l2.unlink_fails"}
    harmless |= {"l2.duplicate_completion"}
    assert came < asked or refused or kind in harmless


def test_without_faults_everything_comes() -> None:
    plan = FaultPlan.parse([], seed=1)
    assert run(plan) == (ROUNDS * 3, ROUNDS * 3, 0)


@pytest.mark.parametrize("kind", RECORD_FAULTS)
def test_a_damaged_record_is_never_served(kind) -> None:
    """Every write is damaged: nothing at all may come back."""
    plan = FaultPlan.parse([kind], seed=5)
    assert run(plan)[1] == 0
    assert plan.fired[kind] >= ROUNDS


def test_the_same_seed_strikes_at_the_same_calls() -> None:
    def strikes(seed: int) -> list[bool]:
        plan = FaultPlan.parse(["l2.full:3"], seed)
        return [plan.strikes("l2.full") for _ in range(60)]

    assert strikes(1) == strikes(1)
    assert strikes(1) != strikes(2)
    assert 10 <= sum(strikes(1)) <= 30


def test_the_kinds_are_those_of_the_simulation() -> None:
    assert set(KINDS) == {kind.name for kind in SIMULATED}
    assert len(KINDS) == len(CALL_FAULTS) + len(WORK_FAULTS) + len(OPERATION_FAULTS) + len(RECORD_FAULTS)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("fault=l2.full:2", "unsafe_faults=true"),
        ("fault=l2.ful:2&unsafe_faults=true", "'l2.full'"),
        ("fault=l2.full:0&unsafe_faults=true", "every time"),
        ("fault=l2.hang:1:30&unsafe_faults=true", "duration"),
    ],
)
def test_faults_are_refused_unless_they_are_meant(options, text) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_store(f"memory:?{options}")


def test_several_faults_may_be_given() -> None:
    spec = parse_store("memory:?fault=l2.full:2,l2.hang:5:3s&fault=l2.refused:7&unsafe_faults=true")
    assert spec.common.fault == ("l2.full:2", "l2.hang:5:3s", "l2.refused:7")

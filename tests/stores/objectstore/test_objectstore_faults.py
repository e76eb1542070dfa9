"""What a request sees when S3 misbehaves: a cold answer or a shorter hit, in bounded time, and the store again later.

A real server, a real client and a real network in between; the proxy does the harm. Each scenario runs under
`BOUND_S`, far below what the client's own defaults (10 retries, 30 s each) would take.

Where the harm is a hang the client is impatient (`impatient`), and what comes after it is tried more than once: with
such a time-out a busy machine is a fault of its own. Where the harm ends a connection, nothing waits for time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.checks.bed import Client
from kvcore.l2.objectstore import open_backend
from kvcore.l2.shared import SharedAdapter
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice

STORED, PRESENT, RETRY = StoreAnswer.STORED, StoreAnswer.PRESENT, StoreAnswer.RETRY
MIB = 1024 * 1024
TIMEOUT_S = 0.5
BOUND_S = 60.0


def key(number):
    return ObjectKey(number.to_bytes(32, "big"), "org/model", 0, 0, "")


def payload(number, size=MIB):
    return bytes([number % 251]) * (size - 8) + number.to_bytes(8, "big")


@asynccontextmanager
async def opened(options, there=True):
    """An adapter as a server has it; at the end nothing is left running or locked. `there`: the server is, too."""
    loop = asyncio.get_running_loop()
    executor = ThreadExecutor(loop, 4)
    adapter = SharedAdapter(
        "objects", open_backend(options), executor, lambda: EventfdNotice(loop), SystemClock(), None, None
    )
    client = Client(adapter, executor)
    try:
        while there and not adapter.opened:
            await client.found([])  # each batch starts an attempt to open
            await client.at_rest()
        await client.at_rest()  # the first scan has ended
        yield client
        await client.at_rest()
        adapter.check()
        assert adapter.usage().locked == 0
        assert adapter.work_inflight == 0
    finally:
        client.close()
        executor.close()


def run(scenario):
    async def bounded():
        async with asyncio.timeout(BOUND_S):
            await scenario()

    asyncio.run(bounded())


@pytest.fixture
def link(proxy, seaweed):
    return proxy(seaweed.port)


@pytest.fixture
def through(options, link):
    """The options of an adapter that reaches the server through the proxy."""
    return dataclasses.replace(options, endpoint=f"http://127.0.0.1:{link.port}")


@pytest.fixture
def impatient(through):
    return dataclasses.replace(through, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)


@pytest.fixture
def filled(options, backends):
    """Three good objects, written past the proxy."""
    store = backends(options)
    orders = [(key(n), memoryview(payload(n))) for n in range(3)]
    assert store.write(orders) == [STORED] * 3
    return store


async def works(client, number):
    """The store is used again: a new object goes in and comes out."""
    while (await client.store([key(number)], [payload(number)]))[0] not in (STORED, PRESENT):
        await client.at_rest()  # a server that was stopped needs a moment; each try has a deadline of its own
    await serves(client, [number])


async def serves(client, numbers):
    """In the end, that is within the scenario's bound, the whole objects come."""
    keys, sizes = [key(number) for number in numbers], [MIB] * len(numbers)
    bits = 0
    while bits != (1 << len(keys)) - 1:
        bits, buffers = await client.load(keys, sizes)
    assert [bytes(buffer) for buffer in buffers] == [payload(number) for number in numbers]


@pytest.mark.parametrize("harm", ["refuse", "blackhole"])
def test_a_server_that_is_not_reached_is_a_miss_and_is_used_again(harm, link, impatient, filled):
    async def scenario():
        async with opened(impatient) as client:
            setattr(link, harm, True)
            link.cut()
            errors = client.adapter.statistics().io_errors
            assert await client.found([key(0), key(1)]) == 0
            assert (await client.load([key(0)], [MIB]))[0] == 0
            assert await client.store([key(7)], [payload(7)]) == [RETRY]
            assert client.adapter.statistics().io_errors - errors == 4
            link.heal()
            await serves(client, [0])
            await works(client, 7)

    run(scenario)


@pytest.mark.parametrize("harm", ["reset_after", "end_after"])
def test_a_body_that_breaks_off_is_a_miss_and_the_object_stays(harm, link, through, filled):
    async def scenario():
        async with opened(through) as client:
            setattr(link, harm, MIB // 2)
            assert (await client.load([key(0)], [MIB]))[0] == 0
            statistics = client.adapter.statistics()
            assert (statistics.io_errors, statistics.defects, statistics.deletes) == (1, 0, 0)
            bits, buffers = await client.load([key(0)], [MIB])
            assert (bits, bytes(buffers[0])) == (1, payload(0))

    run(scenario)


def test_a_byte_flipped_on_the_way_is_never_served_and_costs_no_object(link, through, filled):
    async def scenario():
        async with opened(through) as client:
            link.flip_at = MIB // 2
            assert (await client.load([key(0)], [MIB]))[0] == 0
            await client.at_rest()
            assert client.adapter.statistics().flipped == 1
            bits, buffers = await client.load([key(0)], [MIB])
            assert (bits, bytes(buffers[0])) == (1, payload(0))

    run(scenario)


def test_a_slow_link_is_a_shorter_hit_and_gives_up_in_time(link, impatient, filled):
    async def scenario():
        async with opened(impatient) as client:
            errors = client.adapter.statistics().io_errors
            link.rate_bytes_per_s = 256 * 1024  # a body takes four seconds, the deadline is half a second
            assert (await client.load([key(0), key(1)], [MIB] * 2))[0] == 0
            assert client.adapter.statistics().io_errors - errors == 2
            link.heal()
            await serves(client, [0, 1])

    run(scenario)


def test_latency_below_the_deadline_only_delays(link, through, filled):
    async def scenario():
        async with opened(through) as client:
            link.latency_s = 0.05
            assert await client.found([key(0), key(1), key(9)]) == 3
            assert client.adapter.statistics().io_errors == 0

    run(scenario)


def test_a_put_that_times_out_leaves_the_buffer_to_its_owner(link, impatient, options, backends):
    """The client may go on reading a body that it has given up; `write` returns when it has let go."""
    store = in_the_end(lambda: backends(impatient))
    link.rate_bytes_per_s = 256 * 1024
    buffer = bytearray(payload(1, 4 * MIB))
    with memoryview(buffer) as view:
        (answer,) = store.write([(key(1), view)])
    assert isinstance(answer, Exception)
    buffer.append(0)  # BufferError while anybody holds it
    link.heal()
    assert backends(options).find([key(1)]) == [False]


def in_the_end(attempt):
    end_s = time.monotonic() + BOUND_S
    while time.monotonic() < end_s:
        with suppress(OSError, StoreError):
            return attempt()
    return attempt()


def test_a_server_stopped_for_longer_than_the_deadline_is_a_miss(impatient, filled, seaweed, stand_still):
    async def scenario():
        async with opened(impatient) as client:
            stand_still(seaweed.process.pid)
            try:
                assert await client.found([key(0)]) == 0
                assert (await client.load([key(0)], [MIB]))[0] == 0
                assert await client.store([key(8)], [payload(8)]) == [RETRY]
            finally:
                seaweed.process.send_signal(signal.SIGCONT)
            await works(client, 8)

    run(scenario)


def test_two_writers_of_one_key_leave_one_whole_record(options, backends):
    stores = [backends(options) for _ in range(2)]
    payloads = [bytes([n]) * MIB for n in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        for number in range(6):
            orders = [[(key(number), memoryview(one))] for one in payloads]
            answers = list(pool.map(lambda store, order: store.write(order)[0], stores, orders))
            assert STORED in answers
            into = bytearray(MIB)
            assert stores[0].read([(key(number), memoryview(into))]) == [None]
            assert bytes(into) in payloads


def test_a_server_killed_and_started_again_is_used_again(options, filled, seaweed):
    async def scenario():
        async with opened(dataclasses.replace(options, timeout_s=2.0)) as client:
            seaweed.kill()
            assert await client.found([key(0)]) == 0
            assert await client.store([key(8)], [payload(8)]) == [RETRY]
            await asyncio.to_thread(seaweed.start)
            await works(client, 8)
            await serves(client, [0])

    run(scenario)


def test_a_server_that_is_away_at_the_start_is_used_when_it_comes(link, through, filled):
    async def scenario():
        link.refuse = True
        async with opened(through, there=False) as client:
            assert await client.found([key(0)]) == 0
            link.heal()
            while await client.found([key(0)]) == 0:
                await client.at_rest()  # each batch starts an attempt to open
            await works(client, 9)

    run(scenario)

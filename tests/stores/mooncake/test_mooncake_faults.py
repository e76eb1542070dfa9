"""What a request sees when Mooncake's master or a node goes away: a cold answer, in time, and the store again later.

Real processes are killed, stopped and started. Each scenario runs under `BOUND_S`, which is for a busy machine and
guards against waits without an end. The client is impatient (2 and 3 s), so what must go well is tried more than once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.checks.bed import Client
from kvcore.l2.deadline import DeadlineAdapter
from kvcore.l2.mooncake import open_backend
from kvcore.l2.shared import SharedAdapter
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice

STORED, PRESENT = StoreAnswer.STORED, StoreAnswer.PRESENT
MIB = 1024 * 1024
BOUND_S = 90.0
DEADLINE_NS = 300_000_000


def key(number):
    return ObjectKey(number.to_bytes(32, "big"), "org/model", 0, 0, "")


def payload(number, size=MIB):
    return bytes([number % 251]) * (size - 8) + number.to_bytes(8, "big")


@asynccontextmanager
async def opened(options):
    """An adapter behind a deadline, as a server has it; at the end nothing is left running or locked."""
    loop = asyncio.get_running_loop()
    executor = ThreadExecutor(loop, 3)
    shared = SharedAdapter(
        "mooncake", open_backend(options), executor, lambda: EventfdNotice(loop), SystemClock(), None, None
    )
    client = Client(DeadlineAdapter(shared, lambda: EventfdNotice(loop), DEADLINE_NS), executor)
    try:
        await client.at_rest()  # the first scan has ended
        yield client
        await client.at_rest()
        shared.check()
        assert shared.usage().locked == 0
    finally:
        client.close()
        executor.close()


def run(scenario):
    async def bounded():
        async with asyncio.timeout(BOUND_S):
            await scenario()

    asyncio.run(bounded())


async def put(client, keys, payloads):
    """All of them are there; a busy machine may need a second try."""
    while not set(await client.store(keys, payloads)) <= {STORED, PRESENT}:
        await client.at_rest()


async def works(client, first):
    """The store is used again: within the bound a new object goes in and comes out."""
    number = first
    bits = 0
    while bits == 0:
        number += 1
        if await client.store([key(number)], [payload(number)]) == [STORED]:
            bits, buffers = await client.load([key(number)], [MIB])
        await client.at_rest()
    assert bytes(buffers[0]) == payload(number)


def test_a_restarted_master_costs_its_objects_and_nothing_else(cluster):
    async def scenario():
        cluster.start()
        async with opened(cluster.options()) as client:
            await put(client, [key(0), key(1)], [payload(0), payload(1)])
            errors = client.adapter.statistics().io_errors
            cluster.kill_master()
            assert await client.found([key(0), key(1)]) == 0  # the connection breaks: at once
            late = client.adapter.late
            assert await client.found([key(0), key(1)]) == 0
            assert client.adapter.late == late + 1  # from now on a call takes four seconds; the deadline answers before
            await client.at_rest()
            assert client.adapter.statistics().io_errors - errors == 4
            cluster.start_master()
            await works(client, 10)
            assert await client.found([key(0), key(1)]) == 0
            assert (await client.load([key(0)], [MIB]))[0] == 0

    run(scenario)


def test_a_lost_node_costs_its_objects_and_the_others_are_served(cluster):
    async def scenario():
        # A lease that ends while the call waits for the lost node: the others are asked for a second time.
        cluster.start(nodes=2, lease_ms=1000)
        async with opened(cluster.options(lease_s=1.0)) as client:
            keys, size = [key(n) for n in range(24)], 4096  # small: the second call takes no time
            await put(client, keys, [payload(n, size) for n in range(24)])
            cluster.kill_node(cluster.nodes[0])
            bits = 0
            while bits == 0:  # on a busy machine the second call may be late as well
                errors = client.adapter.statistics().io_errors
                bits, buffers = await client.load(keys, [size] * 24)
            assert bits < 2**24 - 1  # some were on each node
            assert all(bytes(buffers[n]) == payload(n, size) for n in range(24) if bits >> n & 1)
            statistics = client.adapter.statistics()
            assert statistics.io_errors + statistics.missing - errors >= 24 - bits.bit_count()
            assert (statistics.flipped, statistics.foreign, statistics.deletes) == (0, 0, 0)
            await works(client, 100)

    run(scenario)


def test_the_last_node_lost_is_a_miss_and_a_new_one_is_used(cluster):
    async def scenario():
        cluster.start()
        async with opened(cluster.options()) as client:
            await put(client, [key(0)], [payload(0)])
            cluster.kill_node(cluster.nodes[0])
            assert (await client.load([key(0)], [MIB]))[0] == 0
            assert await client.store([key(1)], [payload(1)]) != [STORED]
            cluster.start_node()
            await works(client, 10)

    run(scenario)


def test_a_hanging_node_is_given_up_and_never_writes_into_the_buffer_later(cluster, connect):
    """A late byte would land in memory that belongs to another object by then."""
    cluster.start(client_ttl_s=60)
    store = connect(cluster.options())
    size, count = 16 * MIB, 2
    region = np.zeros(2 * count * size, np.uint8)
    store.register_region(region.data)
    views = [region.data[n * size : (n + 1) * size] for n in range(2 * count)]
    for n in range(count):
        views[n][:] = payload(n, size)
    while not set(store.write([(key(n), views[n]) for n in range(count)])) <= {STORED, PRESENT}:
        pass  # each call has the client's own bound
    orders = [(key(n), views[count + n]) for n in range(count)]
    node, untouched = cluster.nodes[0], np.frombuffer(b"\xee" * size, np.uint8)
    for pages in (0, 100):  # stopped before, and in the middle of the transfer
        region[count * size :] = 0xEE
        ended = threading.Event()
        stopper = threading.Thread(target=_stop_after, args=(cluster, region[count * size :], pages, ended))
        stopper.start()
        if pages == 0:
            stopper.join()
        results = store.read(orders)
        ended.set()
        stopper.join()
        region[count * size :] = 0xEE
        node.send_signal(signal.SIGCONT)
        assert [one for one in results if one is not None and not isinstance(one, StoreError)] == []
        _wait_until_served(store, key(0), size)
        assert all(np.array_equal(np.frombuffer(views[count + n], np.uint8), untouched) for n in range(count))


def _stop_after(cluster, region, pages, ended):
    """Stop the node when so many pages of the region have been written (0: at once), or the read was faster."""
    step = 64 * 1024
    while np.count_nonzero(region[::step] != 0xEE) < pages and not ended.is_set():
        pass
    cluster.pause(cluster.nodes[0])


def _wait_until_served(store, k, size):
    """The node is back: whatever it had still to send has been sent before this answer."""
    for _ in range(100):
        if store.read([(k, memoryview(bytearray(size)))]) == [None]:
            return
    raise AssertionError("the node is not used again")


def test_a_hanging_master_is_given_up(cluster, connect):
    cluster.start()
    store = connect(cluster.options())
    cluster.pause(cluster.master)
    assert all(isinstance(answer, StoreError) for answer in store.find([key(0), key(1)]))
    cluster.master.send_signal(signal.SIGCONT)
    for _ in range(100):
        if store.find([key(0)]) == [False]:
            return
    pytest.fail("the master is not used again")


def test_closing_with_a_call_under_way_lets_it_end_first(cluster, connect):
    cluster.start()
    store = connect(cluster.options())
    orders = [(key(0), memoryview(bytearray(payload(0))))]
    assert store.write(orders)[0] in (STORED, PRESENT)
    cluster.pause(cluster.nodes[0])
    results = []

    def read():
        try:
            results.extend(store.read(orders))
        except StoreError as error:  # closed in the middle
            results.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    client = store._client
    while not client._gate.inside and reader.is_alive():
        pass
    store.close()
    assert results == []  # it did not wait
    reader.join(BOUND_S)
    assert len(results) == 1
    assert isinstance(results[0], StoreError)
    with pytest.raises(StoreError):
        store.find([key(0)])

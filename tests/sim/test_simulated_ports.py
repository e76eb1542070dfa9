"""What only the simulated ports do: crashes, faults, times, and what the oracles see."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.errors import CallerError
from kvcore.ports import Copy
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.ports.executor import SimExecutor, WorkFault
from kvcore.sim.ports.network import SimNetwork
from kvcore.sim.ports.notice import SimNotice
from kvcore.sim.trace import Trace

SEEDS = range(20)
MS = 1_000_000


@pytest.fixture
def loop():
    with SimLoop(7) as loop:
        yield loop


# ---- notice


def test_a_notice_dies_with_its_subscriber_and_a_new_life_may_subscribe(loop):
    process, seen = loop.process("server"), []
    notice = SimNotice(loop)
    process.run(notice.subscribe, lambda: seen.append("first life"))
    notice.signal()
    process.crash()
    loop.run_until_idle()
    process.restart()
    process.run(notice.subscribe, lambda: seen.append("second life"))
    notice.signal()
    loop.run_until_idle()
    assert seen == ["second life"]


# ---- executor


def test_work_that_a_crash_interrupts_is_neither_run_nor_delivered_and_others_go_on(loop):
    process, ran, delivered = loop.process("server"), [], []
    executor = SimExecutor(loop, workers=1)
    process.run(executor.submit, lambda: ran.append("victim"), delivered.append)
    executor.submit(lambda: ran.append("other"), delivered.append)
    process.crash()
    process.restart()
    loop.run_until_idle()
    assert ran == ["other"]
    assert len(delivered) == 1


def test_an_outcome_that_is_on_its_way_at_a_crash_is_lost(loop):
    process, ran, delivered = loop.process("server"), [], []
    executor = SimExecutor(loop, workers=1)

    def work():
        ran.append(loop.current_process().name)
        loop.after_callback(process.crash)

    process.run(executor.submit, work, delivered.append)
    loop.run_until_idle()
    assert ran == ["server"]
    assert delivered == []


def test_work_takes_its_latency_and_the_time_of_its_bytes(loop):
    times = []
    executor = SimExecutor(loop, workers=1, latency_ns=(5_000, 5_000), bytes_per_us=100)
    executor.submit(lambda: times.append(loop.now_ns()), lambda outcome: None, cost_bytes=1_000)
    executor.submit(lambda: times.append(loop.now_ns()), lambda outcome: None)
    loop.run_until_idle()
    assert times == [15_000, 20_000]


def test_faults_of_work(loop):
    ran, outcomes = [], {}

    def before(index):
        if index == 0:
            raise OSError("disk on fire")
        return {1: WorkFault.SKIP, 2: WorkFault.FAIL_AFTER, 4: WorkFault.HANG}.get(index)

    executor = SimExecutor(loop, workers=1)
    executor.before = before
    for index in range(6):
        executor.submit(
            lambda index=index: ran.append(index), lambda outcome, index=index: outcomes.update({index: outcome})
        )
    loop.run_until_idle()
    assert ran == [2, 3]
    assert {index: type(outcome.error) for index, outcome in outcomes.items()} == {
        0: OSError,
        2: TimeoutError,
        3: type(None),
    }


# ---- copy engine


class Device:
    """Pages of 8 bytes, an arena, and an engine between them."""

    def __init__(self, loop, owner="device", **settings):
        self.pages = np.arange(1, 33, dtype=np.uint64)
        self.arena = np.zeros(32, np.uint64)
        self.engine = SimCopyEngine(loop, owner, **settings)
        self.engine.register_pages([self.pages])

    def store(self, blocks, **options):
        copies = [Copy(self.pages[b : b + 1], self.arena[b : b + 1], "store", b) for b in blocks]
        return self.engine.submit(copies, stream="store", **options)

    def load(self, blocks, **options):
        copies = [Copy(self.arena[b : b + 1], self.pages[b : b + 1], "load", b) for b in blocks]
        return self.engine.submit(copies, stream="load", **options)


def test_a_block_that_is_reused_during_a_store_yields_the_bytes_of_its_new_owner():
    torn = 0
    for seed in SEEDS:
        with SimLoop(seed) as loop:
            device = Device(loop, page_ns=(1_000, 1_000))
            device.store(range(8))
            loop.call_later_ns(4_500, device.pages.fill, 99)
            loop.run_until_idle()
            assert device.arena[:8].tolist() == [1, 2, 3, 4, 99, 99, 99, 99]
            torn += 1
    assert torn == len(SEEDS)


def test_pages_of_two_streams_interleave_as_the_seed_has_it():
    orders = set()
    for seed in SEEDS:
        with SimLoop(seed) as loop:
            device, order = Device(loop), []
            device.engine.on_write = lambda copy, order=order: order.append((copy.label, copy.block_id))
            device.store(range(4))
            device.load(range(10, 14))
            loop.run_until_idle()
            assert [block for label, block in order if label == "store"] == [0, 1, 2, 3]
            assert [block for label, block in order if label == "load"] == [10, 11, 12, 13]
            orders.add(tuple(order))
    assert len(orders) > len(SEEDS) // 2


def test_the_oracles_see_which_blocks_unfinished_tickets_read_and_write(loop):
    device, seen = Device(loop), []
    store, load = device.store([1, 2]), device.load([2, 3])
    assert device.engine.inflight_reads() == {1: [store], 2: [store]}
    assert device.engine.inflight_writes() == {2: [load], 3: [load]}
    second = device.store([2])
    assert device.engine.inflight_reads()[2] == [store, second]
    assert second.cancel()
    assert device.engine.inflight_reads()[2] == [store]
    device.engine.on_begin = lambda ticket: seen.append(("begin", ticket))
    device.engine.on_read = lambda copy: seen.append(("read", copy.block_id))
    device.engine.on_end = lambda ticket: seen.append(("end", ticket))
    loop.run_until_idle()
    assert [entry for entry in seen if entry[1] in (store, 1)] == [("begin", store), ("read", 1), ("end", store)]
    assert device.engine.inflight_reads() == {}
    assert device.engine.inflight_writes() == {}


def test_a_block_counts_as_read_until_the_ticket_is_done(loop):
    device, reads_left = Device(loop, tail_ns=(5 * MS, 5 * MS)), []
    store = device.store([1, 2])
    loop.call_later_ns(4 * MS, lambda: reads_left.append((store.done, sorted(device.engine.inflight_reads()))))
    loop.run_until_idle()
    assert reads_left == [(False, [1, 2])]
    assert store.done


def test_a_block_without_registered_pages_is_a_mistake(loop):
    engine = SimCopyEngine(loop, "device")
    with pytest.raises(CallerError, match="register_pages"):
        engine.submit([Copy(bytearray(8), bytearray(8), "store", 3)], stream="store")


def test_a_batch_in_the_middle_cannot_be_cancelled(loop):
    device, answers = Device(loop, page_ns=(1_000, 1_000)), []
    store = device.store(range(4))
    loop.call_later_ns(2_500, lambda: answers.append(store.cancel()))
    loop.run_until_idle()
    assert answers == [False]
    assert store.error is None
    assert device.arena[:4].tolist() == [1, 2, 3, 4]


def test_a_copy_that_the_fault_hook_fails_does_not_move(loop):
    device = Device(loop)
    device.engine.fault = lambda copy: OSError("ECC") if copy.block_id == 2 else None
    store, following = device.store(range(4)), device.store([7])
    loop.run_until_idle()
    assert isinstance(store.error, OSError)
    assert device.arena[:4].tolist() == [1, 2, 0, 0]
    assert following.error is None


def test_compute_work_happens_at_the_end_of_its_time(loop):
    device, times = Device(loop), []
    device.engine.run_compute(lambda: times.append(loop.now_ns()), 3_000)
    device.engine.run_compute(lambda: times.append(loop.now_ns()), 4_000)
    loop.run_until_idle()
    assert times == [3_000, 7_000]


def test_a_crash_stops_the_device_between_two_pages(loop):
    process, called = loop.process("worker"), []
    device = Device(loop, process, page_ns=(1_000, 1_000))
    store = process.run(device.store, range(8))
    process.run(store.on_done, lambda: called.append("done"))
    loop.call_later_ns(3_500, process.crash)
    loop.run_until_idle()
    assert device.arena[:8].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert called == []
    assert not store.done
    assert device.engine.inflight_reads() == {}


# ---- network


class Link:
    """A server and clients in processes of their own, with everything that was received."""

    def __init__(self, loop, clients=("a",), **settings):
        self.loop = loop
        self.network = SimNetwork(loop, **settings)
        self.server_process = loop.process("server")
        self.at_server, self.at_client, self.processes_seen = [], [], set()
        self.listen()
        self.processes = {name: loop.process(name) for name in clients}
        self.clients = {name: self.processes[name].run(self.network.connect, "cache", name) for name in clients}
        for name, client in self.clients.items():
            self.processes[name].run(client.receive, lambda payload, name=name: self.on_client(name, payload))

    def listen(self):
        self.server = self.server_process.run(self.network.listen, "cache")
        self.server_process.run(self.server.receive, self.on_server)

    def on_server(self, peer, payload):
        self.processes_seen.add(("server", self.loop.current_process().name))
        self.at_server.append((peer, payload))
        self.server.send(peer, payload)

    def on_client(self, name, payload):
        self.processes_seen.add((name, self.loop.current_process().name))
        self.at_client.append(payload)

    def send(self, *payloads, client="a"):
        return [self.processes[client].run(self.clients[client].send, payload) for payload in payloads]

    def payloads(self):
        return [payload for _, payload in self.at_server]


def test_messages_are_handled_in_the_receivers_process(loop):
    link = Link(loop, clients=("a", "b"))
    link.send(b"1")
    link.send(b"2", client="b")
    loop.run_until_idle()
    assert link.processes_seen == {("server", "server"), ("a", "a"), ("b", "b")}


def test_two_connections_have_no_order_between_them():
    orders = set()
    for seed in SEEDS:
        with SimLoop(seed) as loop:
            link = Link(loop, clients=("a", "b"))
            for number in range(3):
                link.send(b"a%d" % number)
                link.send(b"b%d" % number, client="b")
            loop.run_until_idle()
            orders.add(tuple(link.payloads()))
            assert [payload for payload in link.payloads() if payload[:1] == b"a"] == [b"a0", b"a1", b"a2"]
    assert len(orders) > 5


def test_a_cut_loses_what_is_in_flight_and_the_client_comes_back_as_a_new_peer(loop):
    link = Link(loop, reconnect_ns=1 * MS)
    link.send(b"before")
    loop.run_until_idle()
    link.send(b"in flight")
    link.network.cut("a")
    assert link.send(b"too early") == [False]
    loop.run_until_idle()
    loop.call_later_ns(1 * MS, lambda: link.send(b"after"))
    loop.run_until_idle()
    assert link.payloads() == [b"before", b"after"]
    assert link.at_server[0][0] != link.at_server[1][0]
    assert link.network.messages_lost == 1


def test_a_reply_to_a_peer_that_was_cut_is_not_accepted(loop):
    link = Link(loop)
    link.send(b"x")
    loop.run_until_idle()
    ((peer, _),) = link.at_server
    link.network.cut("a")
    assert link.server_process.run(link.server.send, peer, b"late") is False


@pytest.mark.parametrize(("to_server", "to_client"), [(True, True), (True, False), (False, True)])
def test_a_partition_swallows_messages_in_its_directions_until_it_heals(loop, to_server, to_client):
    link = Link(loop)
    link.send(b"1")
    loop.run_until_idle()
    link.network.partition("a", to_server=to_server, to_client=to_client)
    assert link.send(b"2") == [True]
    loop.run_until_idle()
    link.network.heal("a")
    link.send(b"3")
    loop.run_until_idle()
    assert link.payloads() == ([b"1", b"3"] if to_server else [b"1", b"2", b"3"])
    assert link.at_client == [b"1", b"3"]


def test_a_clogged_connection_is_slow_and_loses_nothing(loop):
    link = Link(loop, clients=("a", "b"))
    link.network.clog("a", 50 * MS)
    link.send(b"slow")
    link.send(b"fast", client="b")
    loop.run_until_idle()
    assert link.payloads() == [b"fast", b"slow"]
    assert loop.now_ns() > 100 * MS


def test_a_meddler_drops_repeats_and_tears(loop):
    link = Link(loop)
    tampered = {b"drop": [], b"twice": [b"twice", b"twice"], b"torn": [b"to"]}
    link.network.meddle = lambda client, to_server, payload: tampered.get(payload, [payload]) if to_server else []
    link.send(b"drop", b"twice", b"torn", b"plain")
    loop.run_until_idle()
    assert link.payloads() == [b"twice", b"twice", b"to", b"plain"]
    assert link.at_client == []


def test_a_dead_server_takes_nothing_and_its_next_life_is_found(loop):
    link = Link(loop)
    link.send(b"1")
    loop.run_until_idle()
    link.send(b"lost with the server")
    link.server_process.crash()
    assert link.send(b"nobody listens") == [False]
    loop.run_until_idle()
    link.server_process.restart()
    link.listen()
    assert link.send(b"2") == [True]
    loop.run_until_idle()
    assert link.payloads() == [b"1", b"2"]
    assert link.at_client == [b"1", b"2"]


def test_of_what_a_client_sent_before_its_crash_a_beginning_arrives():
    arrived = set()
    for seed in range(60):
        with SimLoop(seed) as loop:
            link = Link(loop)
            link.send(b"0", b"1", b"2", b"3")
            link.processes["a"].crash()
            loop.run_until_idle()
            assert link.payloads() == [b"0", b"1", b"2", b"3"][: len(link.payloads())]
            assert link.at_client == []
            arrived.add(len(link.payloads()))
    assert {0, 1, 2} <= arrived


def test_an_address_and_a_name_belong_to_one_living_process(loop):
    link = Link(loop)
    with pytest.raises(CallerError):
        link.network.listen("cache")
    with pytest.raises(CallerError):
        link.network.connect("cache", "a")
    link.processes["a"].crash()
    link.network.connect("cache", "a")


# ---- all together


def trace_of(seed):
    with SimLoop(seed, trace=Trace(keep=True)) as loop:
        link, device, executor = Link(loop, clients=("a", "b")), Device(loop), SimExecutor(loop)
        for number in range(10):
            link.send(b"%d" % number)
            link.send(b"%d" % number, client="b")
            device.store([number])
            executor.submit(lambda: device.load([20]), lambda outcome: None)
        loop.run_until_idle()
        return loop.trace.hash, {event.label for event in loop.trace.events}


def test_the_same_seed_gives_the_same_trace_and_another_one_another():
    hashes = {seed: trace_of(seed)[0] for seed in SEEDS}
    assert {seed: trace_of(seed)[0] for seed in SEEDS} == hashes
    assert len(set(hashes.values())) == len(SEEDS)
    expected = {"net.send", "net.deliver", "copy.submit", "copy.begin", "copy.end", "executor.end"}
    assert expected <= trace_of(0)[1]

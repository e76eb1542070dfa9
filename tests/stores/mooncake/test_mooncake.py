"""The Mooncake backend on a real master and a real store node, in a network namespace of their own."""

from __future__ import annotations

import dataclasses
import http.server
import socket
import threading

import numpy as np
import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.adapter import LockKind, LockStrength, StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.mooncake import MooncakeBackend, MooncakeOptions, open_backend
from kvcore.l2.mooncake_client import MooncakeClient, pointer
from kvcore.l2.objectstore_names import object_name

STORED, PRESENT, FULL = StoreAnswer.STORED, StoreAnswer.PRESENT, StoreAnswer.FULL
KIB, MIB = 1024, 1024 * 1024


def key(number, model="org/model", salt=""):
    return ObjectKey(number.to_bytes(32, "big"), model, 0, 0, salt)


def payload(number, size=64 * KIB):
    return bytes([number % 251]) * (size - 8) + number.to_bytes(8, "big")


@pytest.fixture(scope="module")
def client(shared_cluster, namespace):
    """The native client of all tests that do not end it: ending one takes a second."""
    namespace.enter()
    try:
        client = MooncakeClient(shared_cluster.options())
    finally:
        namespace.leave()
    yield client
    client.close()


@pytest.fixture
def store(shared_cluster, client, inside, request):
    """A backend on the shared cluster, with a prefix of its own."""
    backend = MooncakeBackend(shared_cluster.options(prefix=f"t{abs(hash(request.node.nodeid))}"))
    backend._client = client
    return backend


def write(store, keys, payloads):
    return store.write([(k, memoryview(p)) for k, p in zip(keys, payloads, strict=True)])


def read(store, keys, sizes):
    buffers = [bytearray(b"\xee" * size) for size in sizes]
    return store.read([(k, memoryview(b)) for k, b in zip(keys, buffers, strict=True)]), buffers


def put_raw(store, k, data):
    """Any bytes under the key's name, past the envelope."""
    name = store._name(k)
    store._client.remove(name)
    with store._client.frame(len(data)) as frame:
        frame[:] = np.frombuffer(data, np.uint8)
        assert store._client.put([name], [[frame.__array_interface__["data"][0]]], [[len(data)]]) == [0]


# --- records -----------------------------------------------------------------------------------------------------


def test_what_was_written_is_found_and_read_back(store):
    keys = [key(n) for n in range(10)] + [key(10, salt="s" * 4000)]
    payloads = [payload(n, 3000 + n) for n in range(10)] + [payload(10, 2 * MIB)]
    assert store.find(keys) == [False] * 11
    assert write(store, keys, payloads) == [STORED] * 11
    assert store.find([*keys, key(99)]) == [True] * 11 + [False]
    results, buffers = read(store, [*keys, key(99)], [len(p) for p in payloads] + [10])
    assert results == [None] * 11 + [Defect.MISSING]
    assert [bytes(buffer) for buffer in buffers[:-1]] == payloads
    assert bytes(buffers[-1]) == b"\xee" * 10


def test_one_key_is_read_into_two_buffers_at_once(store):
    write(store, [key(1)], [payload(1)])
    results, buffers = read(store, [key(1), key(1)], [64 * KIB] * 2)
    assert results == [None, None]
    assert [bytes(buffer) for buffer in buffers] == [payload(1)] * 2


def test_an_object_that_is_there_is_present_and_keeps_its_bytes(store):
    assert write(store, [key(1), key(2)], [payload(1), payload(2)]) == [STORED] * 2
    assert write(store, [key(3), key(1), key(4)], [payload(n) for n in (3, 9, 4)]) == [STORED, PRESENT, STORED]
    results, buffers = read(store, [key(1)], [64 * KIB])
    assert (results, bytes(buffers[0])) == ([None], payload(1))


def test_an_object_of_another_length_is_replaced(store):
    write(store, [key(1)], [payload(1, 1000)])
    for wrong in (999, 1001, 5000):
        assert read(store, [key(1)], [wrong])[0] == [Defect.OTHER_SIZE]
    assert write(store, [key(1)], [payload(1, 2000)]) == [STORED]
    assert read(store, [key(1)], [2000])[0] == [None]


def test_registered_memory_is_used_as_it_lies_and_other_memory_is_staged(store):
    store._client._frames.clear()  # the next ones are made here
    owned = sum(map(len, store._client._owned))
    region = np.zeros(8 * MIB, np.uint8)
    store.register_region(region.data)
    views = [region.data[n * MIB : (n + 1) * MIB] for n in range(8)]
    for n in range(4):
        views[n][:] = payload(n, MIB)
    assert store.write([(key(n), views[n]) for n in range(4)]) == [STORED] * 4
    assert store.read([(key(n), views[4 + n]) for n in range(4)]) == [None] * 4
    assert [bytes(views[4 + n]) for n in range(4)] == [payload(n, MIB) for n in range(4)]
    assert sum(map(len, store._client._owned)) - owned < MIB  # headers alone went through frames
    read(store, [key(0)], [MIB])
    assert sum(map(len, store._client._owned)) - owned > MIB


def test_a_region_is_held_until_the_native_client_has_ended(shared_cluster, inside):
    memory = bytearray(4 * MIB)
    backend = MooncakeBackend(shared_cluster.options(prefix="held"))
    backend.register_region(memoryview(memory))
    backend.open()
    client = backend._client
    assert client.is_registered(pointer(memoryview(memory)), len(memory))
    with client._gate.call():
        backend.close()
        with pytest.raises(BufferError):
            memory.append(0)  # a native call may still move bytes
    for thread in threading.enumerate():
        if thread.name == "kvcore-mooncake-end":
            thread.join(60)
    memory.append(0)
    assert not client.is_registered(pointer(memoryview(memory)), 1)


def test_a_buffer_that_reaches_over_the_end_of_a_region_is_staged(store):
    memory = np.zeros(2 * MIB, np.uint8)
    store.register_region(memory.data[:MIB])
    client, inside = store._client, memory.data[: 64 * KIB]
    assert client.is_registered(pointer(inside), len(inside))
    assert not client.is_registered(pointer(memory.data) + MIB - 10, 20)
    view = memory.data[MIB - 10 : MIB - 10 + 64 * KIB]
    view[:] = payload(1)
    assert store.write([(key(1), view)]) == [STORED]
    view[:] = b"\0" * len(view)
    assert store.read([(key(1), view)]) == [None]
    assert bytes(view) == payload(1)


def test_delete_removes_what_is_leased_and_is_content_with_what_is_not_there(store):
    keys = [key(n) for n in range(5)]
    write(store, keys, [payload(n) for n in range(5)])
    assert store.find(keys) == [True] * 5  # everything has a lease now
    assert store.delete([*keys[:3], key(99)]) == [None] * 4
    assert store.find(keys) == [False] * 3 + [True] * 2


def test_a_scan_names_keys_and_sizes_of_this_prefix_alone(store, shared_cluster):
    other = MooncakeBackend(shared_cluster.options(prefix=store._options.prefix + "x"))
    other._client = store._client
    write(other, [key(7)], [payload(7)])
    keys = [key(n) for n in range(40)] + [key(40, salt="s" * 4000)]
    write(store, keys, [payload(n, 1000 + n) for n in range(41)])
    found = {stored.name: stored for stored in store.scan()}
    assert {stored.key for stored in found.values()} == {*keys[:40], None}
    sizes = {object_name(k): store.record_bytes(k, 1000 + n) for n, k in enumerate(keys)}
    assert {name: stored.record_bytes for name, stored in found.items()} == sizes


def test_a_scan_gives_no_lease(cluster, connect):
    """Otherwise looking through the store would keep everything in it from being evicted."""
    cluster.start(lease_ms=60_000)
    store = connect(cluster.options(lease_s=60.0))
    write(store, [key(1)], [payload(1)])
    assert len(list(store.scan())) == 1
    assert store._client._native.remove(store._name(key(1))) == 0  # -706 with a lease


def test_usage_is_the_cluster_s(store):
    write(store, [key(1)], [payload(1, MIB)])
    usage = store.usage()
    assert usage.bytes_capacity == 256 * MIB
    assert MIB <= usage.bytes_used <= 256 * MIB
    assert usage.objects >= 1


def test_the_lock_is_a_lease_of_the_stated_length():
    backend = MooncakeBackend(MooncakeOptions(lease_s=3.0))
    assert backend.lock_strength == LockStrength(LockKind.LEASE, 3.0)


def test_what_was_found_outlives_an_eviction_storm(cluster, connect):
    cluster.start_master(lease_ms=60_000)
    cluster.start_node(64 * MIB)
    store = connect(cluster.options(lease_s=60.0))
    keys = [key(n) for n in range(8)]
    write(store, keys, [payload(n, MIB) for n in range(8)])
    assert store.find(keys) == [True] * 8
    answers = [write(store, [key(100 + n)], [payload(n, MIB)])[0] for n in range(150)]
    assert {answer for answer in answers if not isinstance(answer, StoreError)} <= {STORED, FULL}  # it is impatient
    for _ in range(10):
        results, buffers = read(store, keys, [MIB] * 8)
        if not any(isinstance(result, StoreError) for result in results):
            break
    assert results == [None] * 8
    assert [bytes(buffer) for buffer in buffers] == [payload(n, MIB) for n in range(8)]
    others = [key(100 + n) for n in range(150)]
    assert store.find(others).count(True) < answers.count(STORED)  # the storm did evict


def test_a_pool_full_of_leased_objects_is_full_and_not_an_error(cluster, connect):
    cluster.start_master(lease_ms=60_000)
    cluster.start_node(32 * MIB)
    store = connect(cluster.options(lease_s=60.0))
    for n in range(24):
        write(store, [key(n)], [payload(n, MIB)])
        store.find([key(n)])
    answers = [write(store, [key(100 + n)], [payload(n, MIB)])[0] for n in range(16)]
    assert FULL in answers
    assert {answer for answer in answers if not isinstance(answer, StoreError)} <= {STORED, FULL}  # it is impatient


# --- records that went bad ----------------------------------------------------------------------------------------


def record(k, body):
    return envelope.encode_header(k, body) + body


GOOD = record(key(1), payload(1, 3000))
BAD = {
    Defect.SHORT: GOOD[:20],
    Defect.TORN: GOOD[:-1],
    Defect.LONG: GOOD + b"x",
    Defect.FOREIGN: record(key(2), payload(2, 3000)),
    Defect.STALE_VERSION: GOOD[:8] + b"\x63" + GOOD[9:],
    Defect.FLIPPED: GOOD[:-100] + bytes([GOOD[-100] ^ 1]) + GOOD[-99:],
    Defect.OTHER_SIZE: record(key(1), payload(1, 2999)),
}


@pytest.mark.parametrize("defect", BAD, ids=lambda defect: defect.value)
def test_a_bad_object_is_recognised_discarded_and_written_anew(store, defect):
    put_raw(store, key(1), BAD[defect])
    assert read(store, [key(1)], [3000])[0] == [defect]
    if defect is not Defect.OTHER_SIZE:
        store.discard(key(1), defect)
        assert store.find([key(1)]) == [False]
    assert write(store, [key(1)], [payload(1, 3000)]) == [STORED]
    assert read(store, [key(1)], [3000])[0] == [None]


def test_a_discard_spares_the_record_that_came_in_the_bad_one_s_place(store):
    put_raw(store, key(1), BAD[Defect.FLIPPED])
    assert read(store, [key(1)], [3000])[0] == [Defect.FLIPPED]
    put_raw(store, key(1), GOOD)
    store.discard(key(1), Defect.FLIPPED)
    assert read(store, [key(1)], [3000])[0] == [None]


def test_a_bad_record_does_not_spoil_its_neighbours(store):
    write(store, [key(0), key(2)], [payload(0, 3000), payload(2, 3000)])
    put_raw(store, key(1), BAD[Defect.TORN])
    results, buffers = read(store, [key(0), key(1), key(2)], [3000] * 3)
    assert results == [None, Defect.TORN, None]
    assert [bytes(buffers[0]), bytes(buffers[2])] == [payload(0, 3000), payload(2, 3000)]


# --- opening and closing ------------------------------------------------------------------------------------------


def test_a_master_that_is_not_there_is_no_configuration_error(inside):
    backend = open_backend(MooncakeOptions(master="127.0.0.1:21099"))
    with pytest.raises(OSError):
        backend.open()
    with pytest.raises(StoreError, match="not open"):
        backend.find([key(1)])


def test_a_port_that_does_not_speak_mooncake_is_given_up(inside):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        backend = open_backend(MooncakeOptions(master=f"127.0.0.1:{deaf.getsockname()[1]}", rpc_timeout_s=1.5))
        with pytest.raises(StoreError):
            backend.open()


GARBAGE = [
    b"\xff\xfe",
    b"[]",
    b"7",
    b'{"data": []}',
    b'{"data": {"x": 1}}',
    b'{"data": {"x": {"ok": 1, "values": [1]}}}',
]


@pytest.mark.parametrize("sizes", [*GARBAGE, b"{}", b""])
def test_an_http_side_that_answers_garbage_is_a_store_in_trouble(sizes):
    """Names and bytes that are no text, or JSON of another shape, ended a scan with whatever Python says to it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"kvcore/x kvcore/\xff kvcore/a&b?\n" if "get_all_keys" in self.path else sizes
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            return None

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        backend = open_backend(MooncakeOptions(admin=f"127.0.0.1:{server.server_port}", prefix="kvcore"))
        try:
            with pytest.raises(StoreError, match="unknown"):
                list(backend.scan())
            assert backend.usage().objects == 0
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": "carrier-pigeon"},
        {"master": "nowhere"},
        {"master": "host:0"},
        {"admin": "host"},
        {"prefix": "a/b"},
        {"prefix": "a&b"},
        {"lease_s": 0.0},
        {"transfer_timeout_s": 0.5},
        {"replicas": 0},
        {"local_buffer_bytes": 0},
    ],
)
def test_options_that_can_never_work_are_refused_without_io(change):
    with pytest.raises(ConfigError):
        open_backend(dataclasses.replace(MooncakeOptions(), **change))


def test_a_closed_store_raises_and_can_be_closed_again(shared_cluster, connect):
    store = connect(shared_cluster.options())
    store.close()
    store.close()
    with pytest.raises(StoreError):
        store.find([key(1)])
    with pytest.raises(StoreError):
        store.open()


def test_without_the_master_s_http_side_scan_and_usage_are_empty(store, shared_cluster):
    write(store, [key(1)], [payload(1)])
    silent = MooncakeBackend(shared_cluster.options(prefix=store._options.prefix, admin="off"))
    silent._client = store._client
    assert silent.find([key(1)]) == [True]
    assert list(silent.scan()) == []
    assert silent.usage().objects == 0

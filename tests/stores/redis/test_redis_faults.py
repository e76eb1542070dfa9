"""Real faults between the Redis store and its server.

Expected each time: an answer within a bound, fewer hits, no wrong byte, the error counted, nothing leaked (the fixture
`session` looks), and the store used again when it is back. The bound is what the options promise: two exchanges at
most, each a connection and an answer, and the time of the bytes.
`SLACK_S` is for a busy machine; what it guards against is a wait without an end.
"""

from __future__ import annotations

import re
import socket
import threading
import time

import pytest

from kvcore.errors import StoreError
from kvcore.l2.envelope import Defect
from kvcore.l2.redis import RedisOptions, open_backend

TIMEOUT_S = 0.3
SHORT = {"timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S}
PATIENT = {"timeout_s": 20.0, "connect_timeout_s": 20.0}  # for faults that end a connection: nothing waits for time
SLACK_S = 20.0
BOUND_S = 2 * (TIMEOUT_S + TIMEOUT_S) + SLACK_S
SIZE = 1 << 20
PATIENCE_S = 60.0


@pytest.fixture
def stage(valkey, proxy, session, many):
    """(server, proxy in front of it, adapter with three objects stored and one not yet)."""

    def build(size=SIZE, **options):
        server = valkey()
        front = proxy(server.port)
        store = session(port=front.port, **{**SHORT, **options})
        keys, payloads = many(4, size)
        assert attempts(lambda: store.store(keys[:3], payloads[:3]), lambda answers: "retry" not in answers)
        store.at_rest()  # the fault shall not meet a scan: one that was late begins again after the first store
        return server, front, store, keys, payloads

    return build


def nothing_works(store, keys, payloads):
    """Every kind of request is answered in time, with a miss."""
    errors = store.adapter.statistics().io_errors
    for answer, expected in (
        (lambda: store.lookup(keys), 0),
        (lambda: store.load(keys, [SIZE] * 4)[0], 0),
        (lambda: store.store(keys[3:], payloads[3:]), ["retry"]),
    ):
        assert answer() == expected
        assert store.seconds < BOUND_S
    assert store.adapter.statistics().io_errors > errors


def attempts(ask, good):
    """Whether an answer is good in the end: with such a short time-out a busy machine needs more than one attempt."""
    end_s = time.monotonic() + PATIENCE_S
    while not good(ask()):
        if time.monotonic() > end_s:
            return False
    return True


def everything_works(store, keys, payloads):
    assert attempts(lambda: set(store.store(keys, payloads)), lambda answers: answers <= {"stored", "present"})
    sizes = [len(payload) for payload in payloads]
    assert attempts(lambda: store.load(keys, sizes), lambda answer: answer == (0b1111, payloads))
    assert attempts(lambda: locked(store, keys), lambda bits: bits == 0b1111)


def locked(store, keys):
    """The bits of a lookup, whose locks are given back."""
    bits = store.lookup(keys)
    store.unlock([key for position, key in enumerate(keys) if bits >> position & 1])
    return bits


def test_a_refused_connection(stage):
    _, front, store, keys, payloads = stage()
    front.refuse = True
    front.cut()
    nothing_works(store, keys, payloads)
    front.heal()
    everything_works(store, keys, payloads)


def test_a_dead_server_and_one_that_comes_back_empty(stage):
    server, _, store, keys, payloads = stage()
    server.kill()
    nothing_works(store, keys, payloads)
    server.start()
    assert attempts(lambda: (store.lookup(keys), store.adapter.usage().objects), lambda seen: seen == (0, 0))
    everything_works(store, keys, payloads)


def test_a_restart_between_two_requests_costs_none(stage):
    """S56: a connection that the server has closed is no connection."""
    server, _, store, keys, payloads = stage(**PATIENT)
    errors = store.adapter.statistics().io_errors
    server.restart()
    assert store.store(keys, payloads) == ["stored"] * 4
    assert store.adapter.statistics().io_errors == errors


def test_a_server_that_was_never_there_is_used_when_it_comes(valkey, session, many):
    server = valkey()
    server.kill()
    store = session(port=server.port, **SHORT)
    keys, payloads = many(4, SIZE)
    assert not store.adapter.opened
    assert store.lookup(keys) == 0
    assert store.seconds < BOUND_S
    server.start()
    while not store.adapter.opened:
        store.lookup([])  # whatever is asked tries again
        store.at_rest()
    everything_works(store, keys, payloads)


@pytest.mark.parametrize("fault", ["reset_after", "end_after"])
@pytest.mark.parametrize("after", [0, 5, 100, SIZE // 2, SIZE + 20])
def test_a_connection_that_ends_in_mid_answer_is_taken_up_again(stage, fault, after):
    _, front, store, keys, payloads = stage(**PATIENT)
    setattr(front, fault, after)
    bits, buffers = store.load(keys[:3], [SIZE] * 3)
    assert (bits, buffers) == (0b111, payloads[:3])  # our second try was on a fresh connection
    everything_works(store, keys, payloads)


def test_a_connection_that_always_ends_in_mid_answer_is_a_shorter_hit(stage):
    _, front, store, keys, payloads = stage(threads=1)
    front.reset_each = SIZE + SIZE // 2
    bits, buffers = store.load(keys[:3], [SIZE] * 3)
    assert store.seconds < BOUND_S
    front.heal()
    assert bits & bits + 1 == 0  # what had come whole before the end counts
    assert buffers == payloads[: bits.bit_count()]
    assert bits != 0b111
    everything_works(store, keys, payloads)


def test_a_server_killed_in_mid_value(stage):
    size = 8 * SIZE  # three of them are more than the sockets on the way can hold
    server, front, store, keys, payloads = stage(size=size, timeout_s=2.0)
    front.rate_bytes_per_s = SIZE  # so slow that no value is whole before the server is dead
    ended = threading.Event()

    def kill():
        _moved(front, ended)
        server.kill()
        front.heal()  # what was on the way comes, and then the end

    killer = threading.Thread(target=kill)
    killer.start()
    bits, buffers = store.load(keys[:3], [size] * 3)
    ended.set()
    killer.join()
    assert store.seconds < BOUND_S + 2 * (2.0 + 2 * size / (16 * SIZE))
    assert bits != 0b111
    assert buffers == [payload for position, payload in enumerate(payloads[:3]) if bits >> position & 1]
    front.heal()
    server.start()
    everything_works(store, keys, payloads)


def _moved(front, ended):
    """Wait until bytes have come from the server, or nobody waits for any more."""
    start = front.bytes_from_server
    while front.bytes_from_server == start and not ended.is_set():
        front.moved.clear()
        front.moved.wait(0.01)


def test_a_server_that_stands_still_for_longer_than_the_deadline(stage):
    server, _, store, keys, payloads = stage()
    server.stop()
    nothing_works(store, keys, payloads)
    server.go_on()
    everything_works(store, keys, payloads)


def test_a_blackhole(stage):
    _, front, store, keys, payloads = stage()
    front.blackhole = True
    nothing_works(store, keys, payloads)
    front.heal()
    everything_works(store, keys, payloads)


def test_a_blackhole_that_opens_in_mid_value(stage):
    _, front, store, keys, payloads = stage(threads=1)
    front.rate_bytes_per_s = 2 * SIZE  # so slow that no value is whole before the hole is open, or the time is up
    ended = threading.Event()
    opener = threading.Thread(target=lambda: (_moved(front, ended), setattr(front, "blackhole", True)))
    opener.start()
    bits, buffers = store.load(keys[:3], [SIZE] * 3)
    ended.set()
    opener.join()
    assert store.seconds < BOUND_S
    assert bits != 0b111
    assert buffers == payloads[: bits.bit_count()]
    front.heal()
    everything_works(store, keys, payloads)


def test_a_slow_link_is_waited_for_as_long_as_it_keeps_the_lowest_rate(stage):
    """Half a second for a value, longer than the time-out; the lowest rate would allow twenty."""
    size = SIZE // 16
    _, front, store, keys, payloads = stage(size=size, rate_bytes_per_s_min=size // 20)
    front.rate_bytes_per_s = 2 * size
    assert attempts(lambda: store.load(keys[:1], [size]), lambda answer: answer == (1, payloads[:1]))
    assert store.seconds > TIMEOUT_S


def test_a_link_that_is_slower_is_given_up(stage):
    _, front, store, keys, payloads = stage(rate_bytes_per_s_min=64 * SIZE)
    front.rate_bytes_per_s = SIZE // 4
    bits, _ = store.load(keys[:3], [SIZE] * 3)
    assert bits == 0
    assert store.seconds < BOUND_S
    front.cut()
    front.heal()
    everything_works(store, keys, payloads)


def test_latency_below_the_deadline_costs_only_time(stage):
    _, front, store, keys, payloads = stage()
    front.latency_s = TIMEOUT_S / 6
    everything_works(store, keys, payloads)


@pytest.mark.parametrize("at", [0, 1, 3, 9, 30, 80, 200, SIZE // 2, SIZE + 120, 2 * SIZE])
def test_a_byte_flipped_on_the_way_never_gets_through(stage, at):
    """In the length, the line end, the header, the key, the payload: at worst a miss, and the record stays."""
    _, front, store, keys, payloads = stage(threads=1)
    front.flip_at = at
    bits, buffers = store.load(keys[:3], [SIZE] * 3)
    assert store.seconds < BOUND_S
    assert bits != 0b111
    assert buffers == [payload for position, payload in enumerate(payloads[:3]) if bits >> position & 1]
    store.at_rest()  # the discard looks again, and finds a good record
    assert attempts(lambda: store.load(keys[:3], [SIZE] * 3), lambda answer: answer == (0b111, payloads[:3]))
    everything_works(store, keys, payloads)


def test_a_value_that_was_flipped_in_the_store_is_removed(stage):
    server, _, store, keys, payloads = stage(**PATIENT)
    name = next(stored.name for stored in store.backend.scan() if stored.key == keys[1])
    server.say("SETRANGE", name, str(SIZE // 2), "X")
    assert store.load(keys[:3], [SIZE] * 3) == (0b101, [payloads[0], payloads[2]])
    store.at_rest()
    assert server.say("EXISTS", name) == b":0\r\n"
    assert store.adapter.statistics().flipped == 1


def test_a_server_that_does_not_speak_the_protocol(opened):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve(text):
            client, _ = listener.accept()
            with client:
                client.recv(1000)
                client.sendall(text)

        for text in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"*9999999999\r\n", b"$abc\r\n", b":\xff\r\n", b"x" * 10_000,
                     b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n"):  # fmt: skip
            thread = threading.Thread(target=serve, args=(text,))
            thread.start()
            with pytest.raises((StoreError, OSError)):
                opened(port=port, timeout_s=TIMEOUT_S)
            thread.join()


@pytest.mark.parametrize("length", [2**40, 2**63, 10**30, -1])
def test_a_length_that_no_value_has_is_not_believed(length, key):
    """It became a wait of weeks, a number that no clock takes, or the accounting of a scan."""
    answers = {b"SCAN": b"*2\r\n$1\r\n0\r\n*1\r\n$1\r\nx\r\n", b"OBJECT": b":1\r\n", b"GETRANGE": b"$1\r\nx\r\n"}
    answers[b"STRLEN"] = b":%d\r\n" % length

    def serve():
        for _ in range(2):
            client, _ = listener.accept()
            with client:
                while said := client.recv(65536):
                    words = re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)", said)
                    if b"GET" in words:
                        break  # rather than let a believer wait
                    client.sendall(b"".join(answers.get(word, b"+OK\r\n") for word in words))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        backend = open_backend(RedisOptions(port=listener.getsockname()[1], **PATIENT))
        with pytest.raises(StoreError, match="unexpected"):
            backend.discard(key(1), Defect.FLIPPED)
        assert list(backend.scan()) == []
        backend.close()
        thread.join()


def test_two_processes_writing_the_same_keys_leave_whole_records(valkey, opened, many):
    server = valkey()
    first, second = opened(port=server.port), opened(port=server.port)
    keys, payloads = many(16, 200_000)
    others = [bytes([255 - payload[0]]) * len(payload) for payload in payloads]
    answers = []

    def write(backend, values):
        answers.extend(backend.write([(key, memoryview(value)) for key, value in zip(keys, values)]))

    threads = [threading.Thread(target=write, args=arguments) for arguments in ((first, payloads), (second, others))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.value for answer in answers} <= {"stored", "present"}
    buffers = [bytearray(200_000) for _ in keys]
    assert first.read([(key, memoryview(buffer)) for key, buffer in zip(keys, buffers)]) == [None] * 16
    assert all(buffer in (payload, other) for buffer, payload, other in zip(buffers, payloads, others))

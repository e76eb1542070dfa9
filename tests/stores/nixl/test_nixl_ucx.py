"""The NIXL pool over UCX's shared memory: a real pool process, real agents, bytes between processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey, encode_key
from kvcore.l2 import envelope
from kvcore.l2 import nixl_pool_wire as wire
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.nixl_ucx import UcxOptions, _Link, open_backend

STORED, PRESENT, FULL, RETRY = StoreAnswer.STORED, StoreAnswer.PRESENT, StoreAnswer.FULL, StoreAnswer.RETRY
KIB, MIB = 1024, 1024 * 1024


def key(number, salt=""):
    return ObjectKey(number.to_bytes(32, "big"), "org/model", 0, 0, salt)


def payload(number, size=64 * KIB):
    return bytes([number % 251]) * (size - 8) + number.to_bytes(8, "big")


def write(store, numbers, size=64 * KIB):
    return store.write([(key(n), memoryview(payload(n, size))) for n in numbers])


def read(store, numbers, size=64 * KIB):
    """Results, and what came for the good ones."""
    buffers = [bytearray(b"\xee" * size) for _ in numbers]
    results = store.read([(key(n), memoryview(b)) for n, b in zip(numbers, buffers)])
    return results, [buffer for result, buffer in zip(results, buffers) if result is None]


def options(pool):
    return UcxOptions(pool.path, timeout_s=60.0)  # the machine is shared


@pytest.fixture(scope="module")
def store(shared_pool):
    """One backend for the tests that do it no harm: an agent takes seconds to come up."""
    backend = open_backend(options(shared_pool))
    backend.open()
    yield backend
    backend.close()


@pytest.fixture
def empty(store):
    store.delete([stored.key for stored in store.scan()])
    return store


@pytest.fixture
def link(shared_pool):
    made = _Link(options(shared_pool))
    yield made
    made.sock.close()


def test_what_was_written_is_found_and_read_back_and_gone_when_deleted(empty):
    assert write(empty, range(20)) == [STORED] * 20
    assert write(empty, range(20)) == [PRESENT] * 20
    assert empty.find([key(0), key(99), key(19)]) == [True, False, True]
    assert read(empty, range(20)) == ([None] * 20, [payload(n) for n in range(20)])
    assert {stored.key for stored in empty.scan()} == {key(n) for n in range(20)}
    assert empty.usage().bytes_used == 20 * empty.record_bytes(key(0), 64 * KIB)
    assert empty.delete([key(0), key(99)]) == [None, None]
    assert read(empty, [0, 1]) == ([Defect.MISSING, None], [payload(1)])


_WRITER = """
import sys
from kvcore.keys import ObjectKey
from kvcore.l2.nixl_ucx import UcxOptions, open_backend
backend = open_backend(UcxOptions(sys.argv[1], timeout_s=60.0))
backend.open()
key = ObjectKey((5).to_bytes(32, "big"), "org/model", 0, 0, "")
print(backend.write([(key, memoryview(bytes(range(256)) * 1000))])[0].value, flush=True)
sys.stdin.read()
"""


def test_what_another_process_wrote_is_read_here_also_when_that_one_was_killed(empty, shared_pool):
    words = [sys.executable, "-c", _WRITER, shared_pool.path]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline().strip() == "stored"
        writer.kill()
    assert read(empty, [5], 256_000) == ([None], [bytes(range(256)) * 1000])


def test_a_region_is_read_into_and_written_from_without_a_copy_and_let_go_at_the_end(shared_pool):
    memory = bytearray(4 * MIB)
    backend = open_backend(options(shared_pool))
    backend.register_region(memoryview(memory))
    backend.open()
    source, target = memoryview(memory)[: 2 * MIB], memoryview(memory)[2 * MIB :]
    source[:] = payload(3, 2 * MIB)
    backend.delete([key(3)])
    assert backend.write([(key(3), source)]) == [STORED]
    assert backend.read([(key(3), target)]) == [None]
    assert target == source
    assert max(len(frame) for frame in backend._mover._frames) < MIB  # headers alone were staged
    source.release()
    target.release()
    backend.close()
    memory.append(0)  # BufferError while anybody holds it


def test_a_bad_record_is_recognised_and_removed_and_a_newer_one_is_not(empty, link):
    size = envelope.record_bytes(key(1), 1000)
    [place] = link.ask(wire.Reserve([(encode_key(key(1)), size)]), wire.Places).places
    link.ask(wire.Commit([(place.number, True)]), wire.Done)  # and nothing was written there
    assert write(empty, [1], 1000) == [PRESENT]
    [defect], _ = read(empty, [1], 1000)
    assert isinstance(defect, Defect)
    empty.delete([key(1)])
    assert write(empty, [1], 1000) == [STORED]
    empty.discard(key(1), defect)
    assert read(empty, [1], 1000) == ([None], [payload(1, 1000)])


def test_a_record_of_another_length_is_told_from_a_torn_one_and_replaced(empty):
    write(empty, [1], 1000)
    assert read(empty, [1], 2000)[0] == [Defect.OTHER_SIZE]
    assert read(empty, [1], 500)[0] == [Defect.OTHER_SIZE]
    assert write(empty, [1], 2000) == [STORED]
    assert read(empty, [1], 2000) == ([None], [payload(1, 2000)])


def test_a_writer_that_dies_in_the_middle_gives_its_room_back(empty, shared_pool):
    name = encode_key(key(7))
    dead = _Link(options(shared_pool))
    dead.ask(wire.Reserve([(name, 60 * MIB)]), wire.Places)
    assert write(empty, [7]) == [RETRY]
    assert write(empty, [8], 8 * MIB) == [FULL]
    dead.sock.close()
    while write(empty, [8], 8 * MIB) == [FULL]:
        pass  # the pool learns of it by itself
    assert write(empty, [7]) == [STORED]


def test_a_pool_that_is_lost_is_an_error_and_the_next_one_is_used(pool_of):
    pool = pool_of()
    backend = open_backend(options(pool))
    backend.open()
    assert write(backend, [1]) == [STORED]
    pool.kill()
    with pytest.raises((OSError, StoreError)):
        read(backend, [1])
    pool.start()
    assert read(backend, [1])[0] == [Defect.MISSING]
    assert write(backend, [1]) == [STORED]
    assert read(backend, [1]) == ([None], [payload(1)])
    backend.close()
    with _Link(options(pool)).sock:  # somebody is still there
        assert pool.end() == 0
    assert not os.path.exists(pool.path)


def test_a_second_pool_on_a_socket_is_refused_and_nobody_there_is_no_configuration_error(shared_pool, tmp_path):
    words = [sys.executable, "-m", "kvcore.cli", "store", "pool", shared_pool.path, "--memory", "1MiB"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 2
    assert "another process listens there" in result.stderr
    with pytest.raises(OSError):
        open_backend(UcxOptions(str(tmp_path / "nobody.sock"))).open()
    with pytest.raises(ConfigError):
        UcxOptions("/s", timeout_s=0)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, (5).to_bytes(4, "little") + b"hello", b"\0\0\0\0", b"\x10"], ids=repr
)
def test_somebody_who_says_something_unknown_is_shown_out_and_the_others_are_served(empty, shared_pool, garbage):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(60)
        stranger.connect(shared_pool.path)
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):  # so does an end with unread bytes look
            assert stranger.recv(1) == b""
    assert write(empty, [1]) == [STORED]


@pytest.mark.parametrize("ask", [wire.Reserve([(b"name", -1)]), wire.Reserve([(b"name", 0)]), wire.List(True, -1)])
def test_somebody_who_asks_for_nonsense_is_shown_out_and_gives_his_room_back(empty, link, ask):
    link.ask(wire.Reserve([(encode_key(key(7)), 60 * MIB)]), wire.Places)
    with pytest.raises(ConnectionError):
        link.ask(ask, wire.Done)
    assert write(empty, [8], 8 * MIB) == [STORED]


def test_somebody_who_breaks_off_in_the_middle_holds_nobody_up(empty, link):
    link.sock.sendall(wire.frame(wire.Find([b"name"]))[:-1])
    assert write(empty, [1]) == [STORED]
    link.sock.sendall(wire.frame(wire.Find([b"name"]))[-1:])
    assert wire.receive_answer(link.sock) == wire.Lengths([None])


def test_readers_and_writers_at_once_get_whole_records_or_misses(empty):
    """Several threads of one process, more records than the pool holds, every record with its own bytes."""
    size, wrong = MIB, []

    def user(first):
        for step in range(6):
            numbers = [(first + step * 7 + offset) % 90 for offset in range(10)]
            write(empty, numbers, size)
            results, buffers = read(empty, numbers, size)
            good = [payload(n, size) for n, result in zip(numbers, results) if result is None]
            wrong.extend(result for result in results if result not in (None, Defect.MISSING))
            wrong.extend(n for n, (one, other) in enumerate(zip(buffers, good)) if one != other)

    threads = [threading.Thread(target=user, args=(first,)) for first in (0, 30, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert empty.usage().bytes_used <= empty.usage().bytes_capacity == 64 * MIB

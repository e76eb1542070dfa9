"""The NIXL backend on real files, through the POSIX plugin of the nixl-cu12 wheel."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvcore.errors import ConfigError
from kvcore.keys import ObjectKey
from kvcore.l2 import fs
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.nixl import NixlOptions, open_backend

STORED, PRESENT, FULL = StoreAnswer.STORED, StoreAnswer.PRESENT, StoreAnswer.FULL
KIB, MIB = 1024, 1024 * 1024
ENGINES = ["", "aio", "uring", "posix_aio"]


def key(number, salt=""):
    return ObjectKey(number.to_bytes(32, "big"), "org/model", 0, 0, salt)


def payload(number, size=64 * KIB):
    return bytes([number % 251]) * (size - 8) + number.to_bytes(8, "big")


@pytest.fixture(params=ENGINES, ids=lambda engine: engine or "default")
def store(request, needs, tmp_path):
    needs("nixl_cu12")
    backend = open_backend(NixlOptions(str(tmp_path / "objects"), request.param))
    backend.open()
    yield backend
    backend.close()


@pytest.fixture
def default_store(needs, tmp_path):
    needs("nixl_cu12")
    backend = open_backend(NixlOptions(str(tmp_path / "objects")))
    backend.open()
    yield backend
    backend.close()


def write(store, keys, payloads):
    return store.write([(k, memoryview(p)) for k, p in zip(keys, payloads, strict=True)])


def read(store, keys, sizes):
    buffers = [bytearray(b"\xee" * size) for size in sizes]
    return store.read([(k, memoryview(b)) for k, b in zip(keys, buffers, strict=True)]), buffers


def test_what_was_written_is_found_and_read_back(store):
    keys = [key(n) for n in range(5)] + [key(5, salt="s" * 4000)]
    payloads = [payload(n, 3000 + n) for n in range(5)] + [payload(5, 2 * MIB)]
    assert write(store, keys, payloads) == [STORED] * 6
    assert write(store, keys[:1], payloads[:1]) == [PRESENT]
    assert store.find([*keys, key(99)]) == [True] * 6 + [False]
    results, buffers = read(store, [*keys, key(99)], [len(p) for p in payloads] + [10])
    assert results == [None] * 6 + [Defect.MISSING]
    assert [bytes(buffer) for buffer in buffers[:-1]] == payloads
    assert {stored.key for stored in store.scan()} == set(keys)


def test_registered_memory_is_used_as_it_lies(store):
    region = np.zeros(4 * MIB, np.uint8)
    store.register_region(region.data)
    views = [region.data[n * MIB : (n + 1) * MIB] for n in range(4)]
    views[0][:], views[1][:] = payload(0, MIB), payload(1, MIB)
    assert store.write([(key(n), views[n]) for n in range(2)]) == [STORED] * 2
    assert store.read([(key(n), views[2 + n]) for n in range(2)]) == [None] * 2
    assert [bytes(views[2]), bytes(views[3])] == [payload(0, MIB), payload(1, MIB)]
    assert max(len(frame) for agent in store._idle for frame in agent._frames) < MIB  # headers alone


def test_the_directory_is_that_of_the_fs_store(default_store, tmp_path):
    write(default_store, [key(1)], [payload(1)])
    plain = fs.open_backend(fs.FsOptions(str(tmp_path / "objects")))
    plain.open()
    results, buffers = read(plain, [key(1)], [64 * KIB])
    assert (results, bytes(buffers[0])) == ([None], payload(1))
    write(plain, [key(2)], [payload(2)])
    assert read(default_store, [key(2)], [64 * KIB])[0] == [None]


@pytest.mark.parametrize(
    ("defect", "change"),
    [
        (Defect.SHORT, lambda data: data[:20]),
        (Defect.TORN, lambda data: data[:-1]),
        (Defect.LONG, lambda data: data + b"x"),
        (Defect.FLIPPED, lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]),
        (Defect.STALE_VERSION, lambda data: data[:8] + b"\x63" + data[9:]),
    ],
    ids=lambda value: value.value if isinstance(value, Defect) else "",
)
def test_a_bad_file_is_recognised_discarded_and_written_anew(default_store, defect, change):
    write(default_store, [key(1)], [payload(1)])
    with open(default_store._path(key(1)), "r+b") as file:
        data = change(file.read())
        file.seek(0)
        file.truncate()
        file.write(data)
    assert read(default_store, [key(1)], [64 * KIB])[0] == [defect]
    default_store.discard(key(1), defect)
    assert default_store.find([key(1)]) == [False]
    assert write(default_store, [key(1)], [payload(1)]) == [STORED]
    assert read(default_store, [key(1)], [64 * KIB])[0] == [None]


def test_a_buffer_of_another_length_is_refused_and_the_record_kept(default_store):
    write(default_store, [key(1)], [payload(1)])
    for wrong in (64 * KIB - 1, 64 * KIB + 1):
        assert read(default_store, [key(1)], [wrong])[0] == [Defect.OTHER_SIZE]
    assert read(default_store, [key(1)], [64 * KIB])[0] == [None]


def test_threads_at_once_do_not_mix_their_bytes(store):
    def one(number):
        keys = [key(100 * number + n) for n in range(8)]
        payloads = [payload(100 * number + n, 100 * KIB) for n in range(8)]
        write(store, keys, payloads)
        results, buffers = read(store, keys, [100 * KIB] * 8)
        return results == [None] * 8 and [bytes(buffer) for buffer in buffers] == payloads

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(8))) == [True] * 8


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_full_disk_is_full_and_leaves_nothing(needs, tmp_path):
    needs("nixl_cu12")
    small = tmp_path / "small"
    small.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(small).encode(), b"tmpfs", 0, b"size=4m") != 0:
        pytest.skip(f"no mount here: {errno.errorcode.get(ctypes.get_errno())}")
    try:
        store = open_backend(NixlOptions(str(small / "objects")))
        store.open()
        answers = [write(store, [key(n)], [payload(n, MIB)])[0] for n in range(6)]
        assert answers[:3] == [STORED] * 3
        assert set(answers[3:]) == {FULL}
        assert read(store, [key(0)], [MIB])[0] == [None]
        assert not [name for _, _, names in os.walk(small) for name in names if name.startswith(".tmp")]
        store.delete([key(0), key(1)])
        assert write(store, [key(9)], [payload(9, MIB)]) == [STORED]
    finally:
        libc.umount2(str(small).encode(), 2)


def test_options_that_can_never_work_are_refused():
    for options in (NixlOptions("/"), NixlOptions("relative"), NixlOptions("/tmp/x", engine="steam")):
        with pytest.raises(ConfigError):
            open_backend(options)


def test_the_package_changes_nothing_about_the_process_s_logging(default_store):
    assert logging.raiseExceptions
    assert logging.getLogger("nixl").level >= logging.WARNING

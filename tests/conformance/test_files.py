"""What every `Files` port promises."""

from __future__ import annotations

import errno

import pytest

from kvcore.errors import CallerError
from kvcore.runtime.files import OsFiles
from kvcore.sim.ports.files import SimFiles


@pytest.fixture(params=["os", "os-fsync", "memory"])
def open_files(request, tmp_path):
    """Opens the same directory anew at each call."""
    memory = SimFiles()

    def make():
        return memory if request.param == "memory" else OsFiles(tmp_path / "root", fsync=request.param == "os-fsync")

    return make


@pytest.fixture
def files(open_files):
    made = open_files()
    assert made.lock()
    yield made
    made.unlock()


def read(files, name, *sizes):
    buffers = [bytearray(size) for size in sizes]
    return files.read(name, [memoryview(buffer) for buffer in buffers]), buffers


def error_of(call, *arguments):
    with pytest.raises(OSError) as caught:
        call(*arguments)
    return caught.value.errno


def test_parts_are_written_one_after_the_other(files):
    files.write("a", [b"one", memoryview(b"two"), b"", b"three"])
    assert read(files, "a", 11) == (11, [b"onetwothree"])


def test_a_read_fills_its_buffers_in_order(files):
    files.write("a", [b"0123456789"])
    assert read(files, "a", 3, 0, 7) == (10, [b"012", b"", b"3456789"])


def test_a_shorter_file_gives_fewer_bytes_and_leaves_the_rest_of_the_buffers(files):
    files.write("a", [b"0123"])
    assert read(files, "a", 3, 3) == (4, [b"012", b"3\0\0"])


def test_a_longer_file_shows_by_one_byte_more(files):
    files.write("a", [b"0123456789"])
    assert read(files, "a", 4, 4)[0] == 9


def test_an_empty_file_is_a_file(files):
    files.write("a", [])
    assert read(files, "a", 4)[0] == 0
    assert files.scan() == [("a", 0)]


def test_a_write_never_replaces(files):
    files.write("a", [b"first"])
    assert error_of(files.write, "a", [b"second"]) == errno.EEXIST
    assert read(files, "a", 5)[1] == [b"first"]


def test_a_rename_replaces(files):
    files.write("a", [b"old"])
    files.write("b", [b"new!"])
    files.rename("b", "a")
    assert files.scan() == [("a", 4)]


def test_what_is_not_there_is_said_so(files):
    assert error_of(read, files, "a", 1) == errno.ENOENT
    assert error_of(files.unlink, "a") == errno.ENOENT
    assert error_of(files.rename, "a", "b") == errno.ENOENT
    assert error_of(files.write, "no/a", [b""]) == errno.ENOENT


def test_a_directory_is_made_once_and_holds_files(files):
    files.mkdir("d")
    assert error_of(files.mkdir, "d") == errno.EEXIST
    files.write("d/a", [b"xyz"])
    files.write("z", [b""])
    files.write("b", [b"1"])
    assert files.scan() == [("b", 1), ("d/a", 3), ("z", 0)]
    files.rename("d/a", "a")
    files.unlink("b")
    assert files.scan() == [("a", 3), ("z", 0)]


@pytest.mark.parametrize("name", ["../a", "d/../a", "d/e/f"])
def test_names_stay_below_the_root(files, name):
    with pytest.raises(CallerError):
        files.unlink(name)


def test_one_holder_at_a_time(files, open_files):
    other = open_files()
    assert not other.lock()
    files.unlock()
    assert other.lock()
    other.unlock()


def test_a_large_file_comes_back_whole(files):
    data = bytes(range(256)) * 20_000
    files.write("big", [data[:1000], memoryview(data)[1000:]])
    assert read(files, "big", 64, len(data) - 64) == (len(data), [data[:64], data[64:]])

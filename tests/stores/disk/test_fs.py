"""The fs store: a directory that processes share. Most tests use the backend itself, step by step."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.l2 import fs
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.envelope import Defect, encode_header, record_bytes
from kvcore.l2.fs import FsOptions, record_name
from kvcore.quota import Quota

SIZE = 5_000
STORED, PRESENT = StoreAnswer.STORED, StoreAnswer.PRESENT
AN_HOUR_S = 3_600


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def backend(directory):
    """`backend()`: one more process's view of the directory."""

    def make(**options):
        made = fs.open_backend(FsOptions(str(directory), **options))
        made.open()
        return made

    return make


def put(backend, key, content, *numbers, size=SIZE):
    return backend.write([(key(number), memoryview(content(number, size))) for number in numbers])


def got(backend, key, number, size=SIZE):
    """The bytes, the defect, or the error."""
    buffer = bytearray(size)
    return backend.read([(key(number), memoryview(buffer))])[0] or bytes(buffer)


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def path_of(directory, key):
    return directory / record_name(key)


# -- one process, several processes


@pytest.mark.parametrize("fsync", [False, True])
def test_what_one_process_writes_every_other_one_reads(backend, key, content, fsync):
    one, other = backend(fsync=fsync), backend()
    assert put(one, key, content, 1, 2) == [STORED, STORED]
    assert other.find([key(1), key(2), key(3)]) == [True, True, False]
    assert [got(other, key, number) for number in (1, 2, 3)] == [content(1, SIZE), content(2, SIZE), Defect.MISSING]
    assert other.delete([key(1), key(3)]) == [None, None]
    assert one.find([key(1), key(2)]) == [False, True]


def test_a_record_that_is_there_is_not_written_again(backend, directory, key, content):
    one, other = backend(), backend()
    put(one, key, content, 1)
    before = path_of(directory, key(1)).stat().st_ino
    assert put(other, key, content, 1) == [PRESENT]
    assert path_of(directory, key(1)).stat().st_ino == before
    assert put(other, key, content, 1, size=SIZE + 1) == [STORED]  # another length: replaced
    assert got(one, key, 1, SIZE + 1) == content(1, SIZE + 1)


def test_files_and_directories_are_private(backend, directory, key, content):
    put(backend(), key, content, 1)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in [directory, *directory.rglob("*")]}
    assert modes == {0o700, 0o600}


def test_processes_that_write_one_key_at_once_leave_one_whole_record(directory, backend, key, content):
    """Four real processes, 50 rounds each; who deletes in between makes sure that there is something to write."""
    script = """
import sys
from kvcore.keys import ObjectKey
from kvcore.l2 import fs
made = fs.open_backend(fs.FsOptions(sys.argv[1]))
made.open()
key, payload = ObjectKey((1).to_bytes(32, "big"), "model", 0), sys.stdin.buffer.read()
for turn in range(50):
    answer, = made.write([(key, memoryview(payload))])
    assert not isinstance(answer, Exception), answer
    buffer = bytearray(len(payload))
    found, = made.read([(key, memoryview(buffer))])
    assert found is None and buffer == payload or found is not None and found.value == "missing", found
    if turn % 2:
        made.delete([key])
made.write([(key, memoryview(payload))])
"""
    backend()
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(directory)], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    for process in processes:
        process.stdin.write(content(1, 300_000))
        process.stdin.close()
    for process in processes:
        errors = process.stderr.read()
        process.stderr.close()
        assert process.wait() == 0, errors.decode()
    assert files(directory) == sorted(["kvcore-fs.json", record_name(key(1))])
    assert got(backend(), key, 1, 300_000) == content(1, 300_000)


def test_a_file_replaced_during_the_read_does_not_mix(backend, key, content, monkeypatch):
    """The reader has opened the old file when the new one takes its name; it gets the old bytes, all of them."""
    one, other = backend(), backend()
    put(one, key, content, 1)
    read_at = fs.read_at

    def replace_first(fd, into, offset):
        other.delete([key(1)])
        assert other.write([(key(1), memoryview(content(2, SIZE)))]) == [STORED]
        return read_at(fd, into, offset)

    monkeypatch.setattr(fs, "read_at", replace_first)
    assert got(one, key, 1) == content(1, SIZE)
    monkeypatch.undo()
    assert got(one, key, 1) == content(2, SIZE)


def test_a_file_that_another_machine_replaces_during_the_read_is_opened_again(backend, key, content, monkeypatch):
    """S37: over NFS the open file is then no file any more, and its name stands for a whole record."""
    one, other = backend(), backend()
    put(one, key, content, 1)
    read_at = fs.read_at

    def stale_once(fd, into, offset):
        monkeypatch.undo()
        other.delete([key(1)])
        assert other.write([(key(1), memoryview(content(1, SIZE)))]) == [STORED]
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(fs, "read_at", stale_once)
    assert got(one, key, 1) == content(1, SIZE)
    assert fs.read_at is read_at


def test_a_file_changed_in_place_during_the_read_is_found(backend, directory, key, content, monkeypatch):
    made = backend()
    put(made, key, content, 1)
    read_at = fs.read_at

    def change_behind(fd, into, offset):
        count = read_at(fd, into, offset)
        into[1][100] ^= 1  # the read took some bytes before and some after the change
        return count

    monkeypatch.setattr(fs, "read_at", change_behind)
    assert got(made, key, 1) is Defect.FLIPPED


# -- damage


def damage(kind, path, key, content):
    data = path.read_bytes()
    if kind == "truncated":
        os.truncate(path, len(data) - 1)
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "longer":
        path.write_bytes(data + b"x")
    elif kind == "flipped payload":
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif kind == "flipped header":
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    elif kind == "record of another key":
        payload = memoryview(content(2, SIZE))
        path.write_bytes(encode_header(key(2), payload) + payload)
    elif kind == "not ours":
        path.write_bytes(b"somebody's letters" * 500)


DAMAGE = {
    "truncated": Defect.TORN,
    "empty": Defect.SHORT,
    "longer": Defect.LONG,
    "flipped payload": Defect.FLIPPED,
    "flipped header": Defect.FLIPPED,
    "record of another key": Defect.FOREIGN,
    "not ours": Defect.FOREIGN,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_a_counted_miss_and_removed(stores, directory, key, content, kind):
    session = stores("fs")
    session.store((key(1), content(1, SIZE)), (key(2), content(2, SIZE)))
    session.rest()  # the scan of the start has passed: it would remove the damaged record before the load meets it
    damage(kind, path_of(directory, key(1)), key, content)
    assert session.load((key(1), SIZE), (key(2), SIZE)) == [None, content(2, SIZE)]
    session.rest()
    assert getattr(session.statistics, DAMAGE[kind].value) == 1
    assert not path_of(directory, key(1)).exists()
    assert session.store((key(1), content(1, SIZE))) == ["stored"]
    assert session.load((key(1), SIZE)) == [content(1, SIZE)]


@pytest.mark.parametrize("kind", ["truncated", "empty", "longer", "flipped header"])
def test_a_store_over_a_damaged_record_replaces_it(backend, directory, key, content, kind):
    made = backend()
    put(made, key, content, 1)
    damage(kind, path_of(directory, key(1)), key, content)
    assert put(made, key, content, 1) == [STORED]
    assert got(made, key, 1) == content(1, SIZE)


def test_discarding_never_removes_a_newer_record(backend, directory, key, content):
    reader, writer = backend(), backend()
    put(writer, key, content, 1)
    damage("flipped payload", path_of(directory, key(1)), key, content)
    assert got(reader, key, 1) is Defect.FLIPPED
    writer.delete([key(1)])
    put(writer, key, content, 1)
    reader.discard(key(1), Defect.FLIPPED)
    assert got(writer, key, 1) == content(1, SIZE)


def test_a_newer_record_that_comes_between_the_look_and_the_removal_is_put_back(
    backend, directory, key, content, monkeypatch
):
    reader, writer = backend(), backend()
    put(writer, key, content, 1)
    damage("flipped payload", path_of(directory, key(1)), key, content)
    assert got(reader, key, 1) is Defect.FLIPPED
    rename = os.rename

    def too_late(source, target):
        monkeypatch.undo()
        writer.delete([key(1)])
        put(writer, key, content, 1)
        rename(source, target)

    monkeypatch.setattr(fs.os, "rename", too_late)
    reader.discard(key(1), Defect.FLIPPED)
    assert got(writer, key, 1) == content(1, SIZE)
    assert files(directory) == sorted(["kvcore-fs.json", record_name(key(1))])


def test_a_record_that_is_a_link_is_not_followed(backend, directory, key, content, tmp_path):
    made = backend()
    put(made, key, content, 1)
    path = path_of(directory, key(1))
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    error = got(made, key, 1)
    assert isinstance(error, OSError)
    assert error.errno == errno.ELOOP


def test_a_directory_that_somebody_has_emptied_takes_the_next_record(backend, directory, key, content):
    made = backend()
    put(made, key, content, 1)
    shutil.rmtree(path_of(directory, key(1)).parent)
    assert got(made, key, 1) is Defect.MISSING
    assert put(made, key, content, 1) == [STORED]


# -- scan


def test_a_scan_lists_whole_records_and_cleans_up_what_nobody_will(backend, directory, key, content):
    made = backend()
    put(made, key, content, *range(1, 7))
    damage("truncated", path_of(directory, key(2)), key, content)
    damage("flipped header", path_of(directory, key(3)), key, content)
    damage("not ours", path_of(directory, key(4)), key, content)
    shutil.move(path_of(directory, key(5)), path_of(directory, key(5)).with_name(record_name(key(5))[:2] + "5.kv"))
    fresh, old = directory / "00" / ".tmp-ab-1", directory / ".tmp-ab-2"
    fresh.parent.mkdir(exist_ok=True)
    for path in (fresh, old):
        path.write_bytes(b"half")
    os.utime(old, (old.stat().st_mtime - AN_HOUR_S - 60,) * 2)
    found = list(made.scan())
    assert {stored.key: stored.record_bytes for stored in found if stored.key} == {
        key(1): record_bytes(key(1), SIZE),
        key(6): record_bytes(key(6), SIZE),
    }
    assert [stored.removed for stored in found if stored.name == record_name(key(2))] == [Defect.TORN]
    assert [stored.removed for stored in found if stored.name == record_name(key(3))] == [Defect.FLIPPED]
    assert sorted(stored.name for stored in found if stored.key is None and stored.removed is None) == sorted(
        [record_name(key(4)), f"{record_name(key(5))[:2]}/{record_name(key(5))[:2]}5.kv"]
    )
    assert all(stored.age_s is not None and 0 <= stored.age_s < 60 for stored in found)
    assert fresh.exists()
    assert not old.exists()
    assert not path_of(directory, key(2)).exists()
    assert not path_of(directory, key(3)).exists()
    assert made.usage().objects == 4


def test_what_a_scan_removes_is_counted_by_kind(stores, directory, key, content):
    before = stores("fs")
    before.store(*((key(number), content(number, SIZE)) for number in range(1, 4)))
    before.rest()  # its own scan would remove and count what is damaged next
    damage("truncated", path_of(directory, key(1)), key, content)
    damage("longer", path_of(directory, key(2)), key, content)
    session = stores("fs")
    session.rest()
    assert (session.statistics.torn, session.statistics.long) == (1, 1)
    assert session.statistics.objects == 1


def test_eviction_and_quotas_go_by_bytes_and_survive_a_restart(stores, key, content):
    record = record_bytes(key(1, "large"), SIZE)
    quota = Quota({"small": 3 * record})
    session = stores("fs", capacity_bytes=8 * record, quota=quota)
    session.rest()
    for number in range(5):
        assert session.store((key(number, "small"), content(number, SIZE))) == ["stored"]
        assert session.store((key(number, "large"), content(number, SIZE))) == ["stored"]
    session.rest()
    assert session.adapter.usage().bytes_used == 8 * record
    session.close()
    session = stores("fs", capacity_bytes=8 * record, quota=quota)
    session.rest()
    assert session.adapter.usage().bytes_used == 8 * record, "the ledger knows what the last process has left"
    assert session.store((key(9, "small"), content(9, SIZE))) == ["stored"]
    session.rest()
    assert session.lookup(*(key(n, "small") for n in (2, 3, 4, 9))).count(True) == 3
    assert session.store((key(9, "large"), content(9, SIZE))) == ["stored"]
    session.rest()
    on_disk = sum(path.stat().st_size for path in session.directory.glob("??/*.kv"))
    assert on_disk == session.adapter.usage().bytes_used == 8 * record


def test_what_is_locked_is_not_evicted(stores, key, content):
    record = record_bytes(key(1), SIZE)
    session = stores("fs", capacity_bytes=2 * record)
    session.rest()
    assert session.store((key(1), content(1, SIZE)), (key(2), content(2, SIZE))) == ["stored", "stored"]
    assert session.lookup(key(1)) == [True]
    assert session.store((key(3), content(3, SIZE))) == ["stored"]
    session.rest()
    assert session.load((key(1), SIZE), (key(2), SIZE)) == [content(1, SIZE), None]
    assert session.lookup(key(3)) == [True]
    assert session.store((key(4), content(4, SIZE))) == ["full"]
    session.unlock(key(1), key(3))
    assert session.store((key(4), content(4, SIZE))) == ["stored"]


# -- whose directory it is


@pytest.mark.parametrize(("name", "text"), [("notes.txt", "not ours"), ("kvcore-l2.json", "one process")])
def test_a_directory_with_something_else_is_refused_and_left_alone(backend, directory, name, text):
    directory.mkdir()
    (directory / name).write_text("mine")
    with pytest.raises(ConfigError, match=text):
        backend()
    assert files(directory) == [name]


def test_a_directory_of_another_version_is_refused(backend, directory):
    backend()
    (directory / "kvcore-fs.json").write_text('{"format": "kvcore-fs", "version": 9}\n')
    with pytest.raises(ConfigError, match="another format"):
        backend()


def test_a_path_that_is_no_directory_is_refused(backend, directory):
    directory.write_text("a file")
    with pytest.raises(ConfigError, match="not a directory"):
        backend()


def test_a_missing_parent_is_an_error_that_may_pass(tmp_path):
    """The file system is perhaps not mounted yet: nothing is made in its place."""
    made = fs.open_backend(FsOptions(str(tmp_path / "mnt" / "kv")))
    with pytest.raises(FileNotFoundError):
        made.open()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mnt").mkdir()
    made.open()


def test_a_closed_backend_says_so(backend, key):
    made = backend()
    made.close()
    with pytest.raises(StoreError, match="closed"):
        made.find([key(1)])


def test_it_is_not_opened_before_it_is_asked(directory):
    fs.open_backend(FsOptions(str(directory)))
    assert not Path(directory).exists()

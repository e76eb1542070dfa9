"""The file adapter against everything a disk does to it. All on `SimFiles`, without a loop, step by step."""

from __future__ import annotations

import errno
import json
import os
import random

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.envelope import encode_header, header_bytes, record_bytes
from kvcore.l2.file import MARKER, MARKER_NAME, FileBackend, file_adapter, record_name
from kvcore.ports import Outcome
from kvcore.runtime.files import OsFiles
from kvcore.sim.ports.files import SimCrash, SimFiles

STORED, FULL = StoreAnswer.STORED, StoreAnswer.FULL
RETRY, FAILED = StoreAnswer.RETRY, StoreAnswer.FAILED

SIZE = 100


class StepExecutor:
    """Runs work when told to. `unknown` pieces are run (or not) and then reported as timed out."""

    def __init__(self):
        self.pieces = []
        self.unknown = []

    def submit(self, work, deliver, cost_bytes=0):
        self.pieces.append((work, deliver))

    def run(self):
        while self.pieces:
            work, deliver = self.pieces.pop(0)
            fate = self.unknown.pop(0) if self.unknown else "known"
            value = None if fate == "lost" else work()
            deliver(Outcome(value, None) if fate == "known" else Outcome(None, TimeoutError("nobody knows")))

    def close(self):
        pass


class SilentNotice:
    def signal(self):
        pass

    def subscribe(self, callback):
        pass

    def close(self):
        pass


class CountingClock:
    """Tokens that differ from one process to the next."""

    tokens = 0

    def now_ns(self):
        return 0

    def token(self, nbytes):
        CountingClock.tokens += 1
        return CountingClock.tokens.to_bytes(nbytes, "big").hex()


class Disk:
    """A directory and the adapter of the process that uses it now."""

    def __init__(self, files=None, capacity_bytes=None):
        self.files = SimFiles() if files is None else files
        self.capacity_bytes = capacity_bytes
        self.open()

    def open(self):
        self.executor = StepExecutor()
        self.adapter = file_adapter(
            "tested",
            self.files,
            executor=self.executor,
            notice_factory=SilentNotice,
            clock=CountingClock(),
            capacity_bytes=self.capacity_bytes,
        )

    def reopen(self):
        if self.files.dead:
            self.files.restart()
        else:
            self.adapter.close()
        self.open()

    def put(self, number, size=SIZE):
        return self.put_all([number], size)[0]

    def put_all(self, numbers, size=SIZE):
        data = [memoryview(payload(number, size)) for number in numbers]
        task = self.adapter.submit_store([key(number) for number in numbers], data)
        self.executor.run()
        return self.adapter.pop_completed_stores()[task]

    def get(self, number, size=SIZE):
        """The payload, or None for a miss."""
        buffer = bytearray(size)
        task = self.adapter.submit_load([key(number)], [memoryview(buffer)])
        self.executor.run()
        return bytes(buffer) if self.adapter.take_load(task) else None

    def has(self, *numbers):
        """As a lookup says it, without keeping the locks."""
        task = self.adapter.submit_lookup_and_lock([key(number) for number in numbers])
        bits = self.adapter.take_lookup(task)
        found = [number for position, number in enumerate(numbers) if bits >> position & 1]
        self.adapter.submit_unlock([key(number) for number in found])
        self.executor.run()
        return found

    def delete(self, *numbers):
        self.adapter.delete([key(number) for number in numbers])
        self.executor.run()

    @property
    def statistics(self):
        return self.adapter.statistics()

    def check(self):
        """At rest the accounting is the directory, and the directory is within the capacity."""
        self.adapter.check()
        sizes = {name: len(self.files.data(name)) for name in self.files.names if name != MARKER_NAME}
        assert self.adapter.usage().bytes_used == sum(sizes.values())
        assert sorted(sizes) == sorted(map(record_name, self.adapter.keys()))
        if self.capacity_bytes is not None:
            assert sum(sizes.values()) <= self.capacity_bytes


def key(number):
    return ObjectKey(bytes([number]) * 32, "model", 0)


def payload(number, size=SIZE):
    return bytes((number * 31 + position) % 251 for position in range(size))


def name_of(number):
    return record_name(key(number))


def room_for(count):
    return count * record_bytes(key(0), SIZE)


# --- crashes -------------------------------------------------------------------------------------------------------


def busy_life(disk):
    """Puts with evictions, a replacement, a deletion: every file operation there is. Yields what is there by now."""
    stored = {}
    for number in range(6):
        assert disk.put(number) is STORED
        stored[number] = SIZE
        yield {kept: stored[kept] for kept in disk_keys(disk)}
    assert disk.put(5, 60) is STORED
    stored[5] = 60
    yield {kept: stored[kept] for kept in disk_keys(disk)}
    disk.delete(4)
    disk.put_all([7, 8])
    stored |= {7: SIZE, 8: SIZE}
    yield {kept: stored[kept] for kept in disk_keys(disk)}


def disk_keys(disk):
    return [name[0] for name, *_ in map(tuple, disk.adapter.keys())]


def operations_of_a_busy_life():
    disk = Disk(capacity_bytes=room_for(3))
    before = disk.files.operations
    for _ in busy_life(disk):
        pass
    return disk.files.operations - before


OPERATIONS = operations_of_a_busy_life()


def test_the_busy_life_uses_every_operation():
    assert OPERATIONS > 25


@pytest.mark.parametrize("torn", [False, True], ids=["process", "power"])
@pytest.mark.parametrize("fsync", [False, True], ids=["cached", "fsync"])
@pytest.mark.parametrize("n", range(OPERATIONS))
def test_a_crash_between_any_two_file_operations_costs_at_most_what_was_not_flushed(n, torn, fsync):
    disk = Disk(SimFiles(fsync=fsync), capacity_bytes=room_for(3))
    disk.files.crash_after(n, torn=torn)
    promised = {}
    with pytest.raises(SimCrash):
        for promised in busy_life(disk):  # noqa: B007 - the last state reached is what was promised
            pass
    disk.reopen()
    disk.check()
    assert not [name for name in disk.files.names if ".tmp-" in name]
    sizes = {number: size for number, size in promised.items() if disk.has(number)}
    for number, size in sizes.items():
        found = disk.get(number, size)
        assert found == payload(number, size) or (number == 5 and found is None)
    if fsync or not torn:
        # Only what the interrupted call itself was about to evict, replace or delete may be missing.
        assert len(promised) - len(sizes) <= 3
    for number in range(20, 23):
        assert disk.put(number) is STORED
        assert disk.get(number) == payload(number)
    disk.check()


@pytest.mark.parametrize("fsync", [False, True])
def test_what_was_stored_before_a_crash_is_there_after_it(fsync):
    """S21."""

    disk = Disk(SimFiles(fsync=fsync))
    assert disk.put_all(range(5)) == [STORED] * 5
    disk.files.kill(torn=fsync)
    disk.reopen()
    assert [disk.get(number) for number in range(5)] == [payload(number) for number in range(5)]


def test_a_power_failure_without_fsync_tears_records_and_none_of_them_is_served():
    disk = Disk()
    disk.put_all(range(5))
    disk.files.kill(torn=True)
    disk.reopen()
    assert disk.statistics.torn + disk.statistics.short == 5
    assert disk.has(*range(5)) == []
    disk.check()
    assert disk.put_all(range(5)) == [STORED] * 5


@pytest.mark.parametrize("n", range(12))
def test_a_crash_during_recovery_is_recovered_from(n):
    disk = Disk()
    disk.put_all(range(4))
    disk.files.truncate(name_of(1), 70)
    disk.files.put(name_of(2)[:3] + ".tmp-ab-1", b"half")
    disk.files.kill()
    disk.files.restart()
    disk.files.crash_after(n)
    try:
        disk.open()
    except SimCrash:
        disk.reopen()
    disk.check()
    assert disk.has(*range(4)) == [0, 2, 3]


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize("torn", [False, True])
def test_a_crash_in_the_very_first_start_leaves_a_directory_that_can_be_used(n, torn):
    files = SimFiles()
    files.crash_after(n, torn=torn)
    with pytest.raises(SimCrash):
        Disk(files).put(0)
    files.restart()
    disk = Disk(files)
    disk.check()
    assert files.data(MARKER_NAME) == MARKER
    assert disk.put(1) is STORED


# --- errors of the disk --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("n", range(1, 4))
def test_a_failed_put_leaves_usage_and_directory_unchanged(n, number):
    """R52: a failed put must not move the counters."""
    disk = Disk()
    disk.put(0)
    used, names = disk.adapter.usage(), disk.files.names
    disk.files.fail_op(n, number)
    assert disk.put(1) is {errno.EIO: RETRY, errno.ENOSPC: FULL, errno.EROFS: FAILED}[number]
    assert disk.adapter.usage() == used
    assert disk.files.names == names
    assert disk.has(0, 1) == [0]
    assert disk.put(1) is STORED
    disk.check()


def test_a_disk_that_is_full_says_full_and_serves_on():
    """R53: a full disk is an answer, and room that comes back is used."""
    disk = Disk(SimFiles(capacity_bytes=len(MARKER) * 2 + room_for(2)))
    assert disk.put_all(range(4)) == [STORED, STORED, FULL, FULL]
    disk.check()
    assert [disk.get(number) for number in range(2)] == [payload(0), payload(1)]
    disk.delete(0)
    assert disk.put(3) is STORED
    disk.check()


def test_one_failure_in_a_batch_is_one_keys_failure():
    """R19: a store batch fails in its middle; visible is what is complete and accounted, also after a restart."""
    disk = Disk()
    disk.files.fail_op(2, errno.EIO, "write")
    assert disk.put_all([1, 2, 3]) == [STORED, RETRY, STORED]
    for _ in range(2):
        assert disk.has(1, 2, 3) == [1, 3]
        assert [disk.get(number) for number in (1, 2, 3)] == [payload(1), None, payload(3)]
        assert not [name for name in disk.files.names if ".tmp-" in name]
        disk.check()
        disk.reopen()


def test_a_failed_write_that_cannot_be_cleaned_up_stays_accounted_until_it_is():
    disk = Disk()
    disk.files.fail_op(1, errno.EIO, "write")
    for n in (1, 2, 3, 4):
        disk.files.fail_op(n, errno.EIO, "unlink")
    assert disk.put(0) is RETRY
    assert disk.adapter.usage().bytes_used == room_for(1)
    assert disk.has(0) == []
    assert disk.get(0) is None
    assert disk.put(0) is STORED
    assert disk.get(0) == payload(0)
    disk.check()


def test_a_rename_whose_flush_fails_leaves_nothing_behind():
    class LateFailure(SimFiles):
        def rename(self, source, target):
            super().rename(source, target)
            if not target.endswith(".json"):
                raise OSError(errno.EIO, "the directory could not be flushed")

    disk = Disk(LateFailure())
    assert disk.put(0) is RETRY
    disk.check()
    assert disk.has(0) == []


def test_a_victim_that_cannot_be_deleted_keeps_the_store_within_its_capacity():
    disk = Disk(capacity_bytes=room_for(1))
    disk.put(0)
    disk.files.fail_op(1, errno.EIO, "unlink")
    assert disk.put(1) is RETRY
    assert disk.has(0, 1) == []
    assert disk.adapter.usage().bytes_used == room_for(1) == disk.files.bytes_stored - len(MARKER)
    assert disk.put(1) is STORED
    disk.check()


def test_a_deletion_that_fails_is_tried_again():
    disk = Disk()
    disk.put(0)
    disk.files.fail_op(1, errno.EIO, "unlink")
    disk.delete(0)
    disk.check()
    assert disk.files.errors_raised == 1
    assert disk.adapter.usage().objects == 0


def test_a_deletion_that_keeps_failing_stays_invisible_and_accounted():
    disk = Disk()
    disk.put(0)
    for n in (1, 2, 3):
        disk.files.fail_op(n, errno.EIO, "unlink")
    disk.delete(0)
    assert disk.has(0) == []
    assert disk.get(0) is None
    assert disk.adapter.usage().bytes_used == room_for(1)
    assert disk.put(0) is STORED
    assert disk.get(0) == payload(0)
    disk.check()


def test_a_store_that_somebody_has_emptied_takes_the_next_record_at_once():
    """The sub-directory is made again. A "try later" loses the object if L1 evicts it before then (swarm: L2 wiped)."""
    disk = Disk()
    disk.put(0)
    disk.delete(0)
    disk.files.wipe()
    assert disk.put(0) is STORED
    assert disk.get(0) == payload(0)
    disk.check()


def test_a_sub_directory_that_cannot_be_made_again_costs_one_attempt():
    disk = Disk()
    disk.put(0)
    disk.delete(0)
    disk.files.wipe()
    disk.files.fail_op(1, errno.EIO, "mkdir")
    assert disk.put(0) is RETRY
    assert disk.put(0) is STORED
    disk.check()


def test_a_read_error_is_a_miss_and_the_record_goes():
    """S22; R17: a load that failed must not leave a lookup that goes on saying yes."""
    disk = Disk()
    disk.put(0)
    disk.files.fail_op(1, errno.EIO, "read")
    assert disk.get(0) is None
    assert disk.has(0) == []
    assert disk.statistics.unreadable == 1
    disk.check()


def test_a_shortage_of_our_own_is_a_miss_and_the_record_stays():
    disk = Disk()
    disk.put(0)
    disk.files.fail_op(1, errno.EMFILE, "read")
    assert disk.get(0) is None
    assert disk.get(0) == payload(0)


@pytest.mark.parametrize("fate", ["lost", "done"])
def test_a_write_whose_outcome_nobody_knows_is_undone(fate):
    disk = Disk(capacity_bytes=room_for(2))
    disk.put_all([0, 1])
    disk.executor.unknown = [fate]
    assert disk.put(2) is FAILED
    assert disk.has(0, 1, 2) == [1]
    disk.check()
    assert disk.put(2) is STORED
    assert disk.get(2) == payload(2)
    disk.check()


@pytest.mark.parametrize("fate", ["lost", "done"])
def test_a_replacement_whose_outcome_nobody_knows_is_undone(fate):
    disk = Disk(capacity_bytes=room_for(2))
    disk.put(0, 60)
    disk.executor.unknown = [fate]
    assert disk.put(0) is FAILED
    disk.check()
    assert disk.put(0) is STORED
    assert disk.get(0) == payload(0)


@pytest.mark.parametrize("fate", ["lost", "done"])
def test_a_deletion_whose_outcome_nobody_knows_is_done_again(fate):
    disk = Disk()
    disk.put(0)
    disk.executor.unknown = [fate]
    disk.delete(0)
    disk.check()
    assert disk.adapter.keys() == []


def test_a_read_whose_outcome_nobody_knows_is_a_miss():
    disk = Disk()
    disk.put(0)
    disk.executor.unknown = ["done"]
    assert disk.get(0) is None
    assert disk.get(0) == payload(0)


# --- damage --------------------------------------------------------------------------------------------------------


def stale(disk, number):
    record = bytearray(disk.files.data(name_of(number)))
    record[8] += 1
    disk.files.put(name_of(number), bytes(record))


DAMAGES = {
    "torn": lambda disk: disk.files.truncate(name_of(0), len(disk.files.data(name_of(0))) - 1),
    "short": lambda disk: disk.files.truncate(name_of(0), 20),
    "long": lambda disk: disk.files.append(name_of(0), b"more"),
    "foreign": lambda disk: disk.files.put(name_of(0), disk.files.data(name_of(1))),
    "stale_version": lambda disk: stale(disk, 0),
    "flipped": lambda disk: disk.files.flip_bit(name_of(0), 8 * 65 + 3),
    "missing": lambda disk: disk.files.vanish(name_of(0)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_record_is_a_miss_counted_by_its_kind_and_cleaned_up(kind):
    """R17, R54: the entry and its bytes are one thing; either is gone, both are a miss and then stored anew."""
    disk = Disk()
    disk.put_all([0, 1])
    DAMAGES[kind](disk)
    assert disk.has(0) == [0]
    assert disk.get(0) is None
    assert getattr(disk.statistics, kind) == disk.statistics.defects == 1
    assert disk.has(0, 1) == [1]
    disk.check()
    assert disk.put(0) is STORED
    assert disk.get(0) == payload(0)
    disk.check()


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "missing"])
def test_a_damaged_record_met_at_start_is_counted_and_removed(kind):
    disk = Disk()
    disk.put_all([0, 1])
    DAMAGES[kind](disk)
    disk.reopen()
    assert getattr(disk.statistics, kind) == disk.statistics.defects == 1
    assert disk.has(0, 1) == [1]
    disk.check()


def test_a_flipped_bit_in_the_payload_passes_the_start_and_not_the_load():
    disk = Disk()
    disk.put(0)
    disk.files.flip_bit(name_of(0), 8 * header_bytes(key(0)) + 99)
    disk.reopen()
    assert disk.has(0) == [0]
    assert disk.get(0) is None
    assert disk.has(0) == []


def test_two_records_swapped_on_disk_are_both_refused():
    disk = Disk()
    disk.put_all([0, 1])
    disk.files.swap(name_of(0), name_of(1))
    assert [disk.get(0), disk.get(1)] == [None, None]
    assert disk.statistics.foreign == 2
    disk.check()


def test_cleaning_a_bad_record_up_never_touches_a_newer_one():
    """A load meets a bad record; before its cleaning up has run, the key is stored again."""
    disk = Disk()
    disk.put(0)
    disk.files.flip_bit(name_of(0), 8 * 65)
    load = disk.adapter.submit_load([key(0)], [memoryview(bytearray(SIZE))])
    work, deliver = disk.executor.pieces.pop()
    deliver(Outcome(work(), None))
    assert disk.adapter.take_load(load) == 0
    store = disk.adapter.submit_store([key(0)], [memoryview(payload(0))])
    disk.executor.run()
    assert disk.adapter.pop_completed_stores() == {store: [STORED]}
    assert disk.get(0) == payload(0)
    disk.check()


def test_a_bad_record_that_others_have_locked_is_answered_without_another_read_and_goes_with_their_lock():
    disk = Disk()
    disk.put(0)
    task = disk.adapter.submit_lookup_and_lock([key(0)])
    assert disk.adapter.take_lookup(task) == 1
    disk.files.flip_bit(name_of(0), 8 * 65)
    assert disk.get(0) is None
    operations = disk.files.operations
    assert disk.get(0) is None
    assert disk.files.operations == operations
    assert disk.statistics.flipped == 1
    assert disk.put(0) is RETRY
    disk.adapter.submit_unlock([key(0)])
    disk.executor.run()
    assert disk.put(0) is STORED
    disk.check()


@pytest.mark.parametrize("seed", range(60))
def test_accounting_survives_any_mixture_of_work_and_faults(seed):
    """R52: used = sum of resident = bytes on disk <= budget, after any sequence; and never a wrong byte."""
    chance = random.Random(seed)
    disk = Disk(capacity_bytes=room_for(4) + 50)
    for _ in range(60):
        if chance.random() < 0.25:
            disk.files.fail_op(chance.randint(1, 3), chance.choice([errno.EIO, errno.ENOSPC]))
        if chance.random() < 0.1:
            disk.executor.unknown = [chance.choice(["lost", "done"])]
        number, size = chance.randrange(7), chance.choice([SIZE, SIZE, 50])
        action = chance.choice(["put", "put", "get", "delete", "damage", "restart"])
        if action == "put":
            disk.put(number, size)
        elif action == "get":
            assert disk.get(number, size) in (None, payload(number, size))
        elif action == "delete":
            disk.delete(number)
        elif action == "damage" and name_of(number) in disk.files.names:
            disk.files.flip_bit(name_of(number), chance.randrange(8 * 120))
        elif action == "restart":
            disk.files.kill(torn=chance.random() < 0.3)
            disk.reopen()
        disk.adapter.check()
        assert disk.files.bytes_stored - len(MARKER) <= disk.adapter.usage().bytes_used <= disk.capacity_bytes
    disk.files.kill()
    disk.reopen()
    disk.check()


# --- identity and names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_hash": b"\xff" * 32},
        {"model_name": "model2"},
        {"kv_rank": 1},
        {"object_group_id": 1},
        {"cache_salt": "t2"},
    ],
)
def test_a_second_run_with_one_field_changed_misses(change):
    """R47: dtype, weights, adapter (all in the chunk hash through its namespace), model, rank or tenant differ."""
    disk = Disk()
    disk.put(0)
    disk.reopen()
    task = disk.adapter.submit_lookup_and_lock([key(0)._replace(**change), key(0)])
    assert disk.adapter.take_lookup(task) == 0b10


def test_file_names_are_bounded_for_every_legal_key(tmp_path):
    """R49: a 128 character salt and a long model path must not make a name the file system refuses."""
    files = OsFiles(tmp_path / "store")
    adapter_key = ObjectKey(b"h" * 32, "/very/long/" + "path/" * 700, 7, 3, "s" * 128)
    backend = FileBackend(files, "ab")
    backend.open()
    backend.write(adapter_key, memoryview(b"payload"))
    names = [name for name, _ in files.scan()]
    assert max(len(part) for name in names for part in name.split("/")) <= 255
    buffer = bytearray(7)
    assert backend.read(adapter_key, memoryview(buffer)) is None
    assert buffer == b"payload"
    backend.close()
    again = FileBackend(files, "cd")
    assert [record.key for record in again.open().records] == [adapter_key]
    again.close()


def test_files_and_directories_are_private(tmp_path):
    files = OsFiles(tmp_path / "store")
    backend = FileBackend(files, "ab")
    backend.open()
    backend.write(key(1), memoryview(b"x"))
    backend.close()
    for root, directories, names in os.walk(tmp_path / "store"):
        assert all(os.stat(os.path.join(root, name)).st_mode & 0o777 == 0o600 for name in names)
        assert all(os.stat(os.path.join(root, name)).st_mode & 0o777 == 0o700 for name in directories)
    assert os.stat(tmp_path / "store").st_mode & 0o777 == 0o700


# --- refusals ------------------------------------------------------------------------------------------------------


def refused(files):
    """Opening is refused with one line, writes nothing and leaves no lock; returns the line."""
    before = {name: files.data(name) for name in files.names}
    with pytest.raises(ConfigError) as caught:
        Disk(files)
    assert {name: files.data(name) for name in files.names} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["notes.txt", "aa/notes.txt", "deep/er/file", "aa/bb.kv", ".tmp-notes", "aa/.tmp-xyz"])
def test_a_directory_with_somebody_elses_files_is_refused(name):
    files = SimFiles()
    files.put(name, b"precious")
    assert name in refused(files)
    files.vanish(name)
    assert Disk(files).put(0) is STORED


def test_a_directory_of_another_format_version_is_refused():
    disk = Disk()
    disk.put(0)
    disk.adapter.close()
    disk.files.put(MARKER_NAME, json.dumps({"format": "kvcore-l2", "version": 2}).encode())
    assert "another format" in refused(disk.files)


@pytest.mark.parametrize("text", [b"{}", b"something else entirely", MARKER + b"x", MARKER * 200])
def test_a_marker_that_is_not_ours_is_refused(text):
    files = SimFiles()
    files.put(MARKER_NAME, text)
    assert "another format" in refused(files)


def test_a_directory_that_cannot_be_written_is_refused():
    files = SimFiles()
    files.writable = False
    assert "not writable" in refused(files)
    files.writable = True
    disk = Disk(files)
    disk.put(0)
    disk.adapter.close()
    files.writable = False
    assert "not writable" in refused(files)


def test_a_directory_that_is_held_is_refused_until_it_is_given_back():
    disk = Disk()
    assert "held by another process" in refused(disk.files)
    disk.put(0)
    disk.adapter.close()
    assert Disk(disk.files).has(0) == [0]


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="cannot be locked"):
        FileBackend(OsFiles(tmp_path / "file"), "ab").open()
    assert (tmp_path / "file").read_text() == "precious"


def test_a_symbolic_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"x" * 200)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="not ours"):
        FileBackend(OsFiles(tmp_path / "store"), "ab").open()
    assert target.read_bytes() == b"x" * 200


def test_a_closed_directory_is_given_back_when_the_last_work_has_ended():
    """Close does not wait, and the next process does not come in while a write may still touch the directory."""
    files = SimFiles()
    backend = FileBackend(files, "ab")
    backend.open()
    seen = []

    original = files.write

    def write(name, parts):
        backend.close()
        seen.append(files.lock())
        original(name, parts)

    files.write = write
    backend.write(key(0), memoryview(b"x"))
    assert seen == [False]
    assert files.lock()
    with pytest.raises(StoreError):
        backend.write(key(1), memoryview(b"x"))


def test_foreign_records_under_our_names_are_not_adopted():
    """A well-formed record whose name does not follow from its key is removed, not served under either."""
    files = SimFiles()
    files.put(name_of(1), encode_header(key(0), payload(0)) + payload(0))
    disk = Disk(files)
    assert disk.has(0, 1) == []
    assert disk.statistics.foreign == 1
    disk.check()

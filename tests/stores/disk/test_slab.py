"""The slab store: what it keeps over a restart, what it does with damage, and how it uses its room."""

from __future__ import annotations

import errno
import json
import os

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.l2 import envelope, slab
from kvcore.l2.backend import LeftoverError
from kvcore.l2.envelope import Defect
from kvcore.l2.slab import SlabOptions
from kvcore.l2.slab_entry import PAGE_BYTES, SLOT_BYTES, Run, encode_entry
from kvcore.quota import Quota

SIZE = 10_000  # three pages
PAGES = 3
RECORD = PAGES * PAGE_BYTES + SLOT_BYTES


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def backend(directory):
    """`backend(...)`: an open `SlabBackend`, and its scan as `found`."""
    opened = []

    def make(capacity_bytes=1 << 20, slab_bytes=256 * 1024):
        for before in opened:
            before.close()
        made = slab.open_backend(SlabOptions(str(directory), capacity_bytes, slab_bytes))
        made.found = made.open()
        opened.append(made)
        return made

    yield make
    for made in opened:
        made.close()


def put(backend, key, content, *numbers, size=SIZE):
    for number in numbers:
        backend.write(key(number), memoryview(content(number, size)))


def got(backend, key, number, size=SIZE):
    """The bytes, or the defect."""
    buffer = bytearray(size)
    return backend.read(key(number), memoryview(buffer)) or bytes(buffer)


def change(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


# -- restart


def test_a_restart_finds_every_record_in_the_order_of_writing(backend, key, content):
    made = backend()
    put(made, key, content, 5, 3, 9)
    put(made, key, content, 3)  # again: it is the youngest now
    made = backend()
    assert [found.key for found in made.found.records] == [key(5), key(9), key(3)]
    assert [found.record_bytes for found in made.found.records] == [RECORD] * 3
    assert made.found.defects == {}
    assert [got(made, key, number) for number in (5, 3, 9)] == [content(number, SIZE) for number in (5, 3, 9)]
    made.check()


def test_what_was_deleted_does_not_come_back(backend, key, content):
    made = backend()
    put(made, key, content, 1, 2)
    made.delete(key(1))
    made.delete(key(7))  # was never there
    made = backend()
    assert [found.key for found in made.found.records] == [key(2)]
    made.check()


def test_keys_of_any_length_and_payloads_of_any_length_come_back(backend, key, content):
    made = backend()
    sizes = [0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 200_000]
    keys = [key(number, "s" * (number * 800)) for number in range(len(sizes))]
    for number, size in enumerate(sizes):
        made.write(keys[number], memoryview(content(number, size)))
    made = backend()
    for number, size in enumerate(sizes):
        buffer = bytearray(size)
        assert made.read(keys[number], memoryview(buffer)) is None
        assert buffer == content(number, size)
    assert {found.key: found.record_bytes for found in made.found.records} == {
        made_key: made.record_bytes(made_key, size) for made_key, size in zip(keys, sizes)
    }
    made.check()


def test_a_smaller_capacity_drops_what_lies_beyond_it_and_gives_the_disk_back(backend, directory, key, content):
    made = backend()
    put(made, key, content, *range(80))
    made = backend(capacity_bytes=300 * 1024)
    kept = [found.key for found in made.found.records]
    assert 0 < len(kept) < 80
    assert kept == [key(number) for number in range(len(kept))]
    assert made.found.defects == {}
    assert sum(path.stat().st_size for path in directory.glob("slab-*")) == 300 * 1024
    assert backend(capacity_bytes=1 << 20).found.records == made.found.records


def test_eviction_and_quotas_go_by_bytes_and_survive_a_restart(stores, key, content):
    quota = Quota({"small": 3 * RECORD})
    capacity_bytes = 8 * RECORD
    session = stores("slab", capacity_bytes=capacity_bytes, quota=quota)
    for number in range(5):
        assert session.store((key(number, "small"), content(number, SIZE))) == ["stored"]
    for number in range(4):
        assert session.store((key(number, "large"), content(number, SIZE))) == ["stored"]
    assert session.adapter.usage().bytes_used == 7 * RECORD
    session.close()
    session = stores("slab", capacity_bytes=capacity_bytes, quota=quota)
    assert session.adapter.keys() == [*(key(n, "small") for n in (2, 3, 4)), *(key(n, "large") for n in range(4))]
    assert session.store((key(7, "small"), content(7, SIZE))) == ["stored"]  # over its quota: its own oldest goes
    assert session.lookup(key(2, "small"), key(3, "small"), key(0, "large")) == [False, True, True]
    for number in range(4, 7):  # over the capacity: the oldest that nobody has locked goes
        assert session.store((key(number, "large"), content(number, SIZE))) == ["stored"]
    assert session.lookup(key(3, "small"), key(4, "small"), key(0, "large")) == [True, False, True]
    session.close()
    session = stores("slab", capacity_bytes=4 * RECORD, quota=Quota({"small": RECORD}))
    assert session.adapter.usage().bytes_used <= 4 * RECORD
    kept = session.adapter.keys()
    assert [key.cache_salt for key in kept].count("small") <= 1
    session.adapter.check()
    session.rest()
    session.backend.check()


# -- room


def test_room_in_pieces_is_used_up_to_the_last_page(backend, key, content):
    made = backend(capacity_bytes=256 * 1024, slab_bytes=64 * 1024)  # 4 slabs of 16 pages
    put(made, key, content, *range(64), size=PAGE_BYTES)
    with pytest.raises(OSError, match="no room") as error:
        put(made, key, content, 99, size=1)
    assert error.value.errno == errno.ENOSPC
    for number in range(0, 64, 2):
        made.delete(key(number))
    put(made, key, content, 100, size=32 * PAGE_BYTES)  # 32 pages in 32 places
    made.check()
    made = backend(capacity_bytes=256 * 1024, slab_bytes=64 * 1024)
    assert got(made, key, 100, 32 * PAGE_BYTES) == content(100, 32 * PAGE_BYTES)
    assert len(made.found.records) == 33
    made.delete(key(100))
    put(made, key, content, *range(0, 64, 2), size=PAGE_BYTES)
    assert all(got(made, key, number, PAGE_BYTES) == content(number, PAGE_BYTES) for number in range(64))
    made.check()


def test_many_records_in_one_call_answer_one_by_one(backend, key, content):
    made = backend(capacity_bytes=256 * 1024, slab_bytes=64 * 1024)
    orders = [(key(number), memoryview(content(number, SIZE))) for number in range(25)]  # 5 in each slab
    results = made.write_many(orders)
    assert [type(result) for result in results] == [type(None)] * 21 + [OSError] * 4
    made.delete(key(4))
    buffers = [bytearray(SIZE) for _ in range(25)]
    buffers[6] = bytearray(7)
    results = made.read_many([(key(number), memoryview(buffer)) for number, buffer in enumerate(buffers)])
    assert results[4] is Defect.MISSING
    assert results[6] is Defect.OTHER_SIZE
    assert all(buffers[n] == content(n, SIZE) for n in range(21) if n not in (4, 6))
    assert results[21:] == [Defect.MISSING] * 4
    made.check()


def test_records_on_both_sides_of_the_end_of_a_slab_are_moved_by_two_calls(backend, key, content):
    """Found by `test_kill.py`: their pages are neighbours in number, and lie in two files."""
    made = backend(capacity_bytes=256 * 1024, slab_bytes=64 * 1024)
    size = 4 * PAGE_BYTES  # four of them fill a slab exactly
    assert made.write_many([(key(n), memoryview(content(n, size))) for n in range(16)]) == [None] * 16
    assert sorted(record.runs[0].start for record in made._records.values()) == list(range(0, 64, 4))
    assert [got(made, key, number, size) for number in range(16)] == [content(number, size) for number in range(16)]
    buffers = [bytearray(size) for _ in range(16)]
    assert made.read_many([(key(n), memoryview(buffer)) for n, buffer in enumerate(buffers)]) == [None] * 16
    assert buffers == [content(number, size) for number in range(16)]


def test_one_damaged_record_of_many_is_one_miss(backend, directory, key, content):
    made = backend()
    assert made.write_many([(key(n), memoryview(content(n, SIZE))) for n in range(8)]) == [None] * 8
    change(directory / "slab-00000.kvs", 3 * PAGES * PAGE_BYTES + 5, b"?")
    buffers = [bytearray(SIZE) for _ in range(8)]
    results = made.read_many([(key(number), memoryview(buffer)) for number, buffer in enumerate(buffers)])
    assert results == [None] * 3 + [Defect.FLIPPED] + [None] * 4


def test_a_record_is_replaced_by_one_of_another_length(backend, key, content):
    made = backend()
    put(made, key, content, 1)
    put(made, key, content, 1, size=50_000)
    assert got(made, key, 1, 50_000) == content(1, 50_000)
    made.check()
    assert len(backend().found.records) == 1


# -- damage


@pytest.mark.parametrize("offset", [0, 9, 13, 17, 25, 33, 37, 45, 60, 104, 130, 150])
def test_a_flipped_byte_in_an_entry_costs_that_record_at_most(backend, directory, key, content, offset):
    made = backend()
    put(made, key, content, 1, 2, 3)
    original = (directory / "index.kvs").read_bytes()[SLOT_BYTES + offset]
    change(directory / "index.kvs", SLOT_BYTES + offset, bytes([original ^ 0x10]))
    made = backend()
    assert [found.key for found in made.found.records] == [key(1), key(3)]
    assert sum(made.found.defects.values()) == 1
    assert got(made, key, 2) is Defect.MISSING
    made.check()
    made = backend()
    assert made.found.defects == {}, "what was bad has been erased"
    assert got(made, key, 3) == content(3, SIZE)


def test_a_flipped_bit_in_a_payload_passes_the_start_and_not_the_load(stores, directory, key, content):
    session = stores("slab")
    session.store((key(1), content(1, SIZE)), (key(2), content(2, SIZE)))
    session.close()
    change(directory / "slab-00000.kvs", 77, bytes([content(1, SIZE)[77] ^ 1]))
    session = stores("slab")
    assert session.lookup(key(1), key(2)) == [True, True]
    assert session.load((key(1), SIZE), (key(2), SIZE)) == [None, content(2, SIZE)]
    session.unlock(key(1), key(2))
    session.rest()
    assert session.statistics.flipped == 1
    assert session.adapter.usage().objects == 1
    assert session.store((key(1), content(1, SIZE))) == ["stored"]
    assert session.load((key(1), SIZE)) == [content(1, SIZE)]
    session.backend.check()


def test_a_truncated_slab_costs_the_records_beyond_its_end(backend, directory, key, content):
    made = backend()
    put(made, key, content, 1, 2, 3)
    made.close()
    os.truncate(directory / "slab-00000.kvs", 2 * PAGES * PAGE_BYTES)
    made = backend()
    assert [found.key for found in made.found.records] == [key(1), key(2)]
    assert made.found.defects == {Defect.TORN: 1}
    assert got(made, key, 2) == content(2, SIZE)
    made.check()


def test_a_slab_truncated_while_it_is_used_is_torn_records(backend, directory, key, content):
    made = backend()
    put(made, key, content, 1, 2)
    os.truncate(directory / "slab-00000.kvs", PAGES * PAGE_BYTES + 100)
    assert got(made, key, 1) == content(1, SIZE)
    assert got(made, key, 2) is Defect.TORN


def test_an_index_cut_in_the_middle_of_an_entry_keeps_what_is_whole(backend, directory, key, content):
    made = backend()
    put(made, key, content, 1, 2)
    made.close()
    os.truncate(directory / "index.kvs", SLOT_BYTES + 100)
    made = backend()
    assert [found.key for found in made.found.records] == [key(1)]
    assert sum(made.found.defects.values()) == 1


def test_of_two_entries_that_claim_one_page_the_later_one_stays(backend, directory, key, content):
    """A power failure can leave that: the deletion of the first did not reach the disk, its successor did."""
    made = backend(capacity_bytes=256 * 1024)
    put(made, key, content, 1)
    stale = (directory / "index.kvs").read_bytes()[:SLOT_BYTES]
    made.delete(key(1))
    put(made, key, content, 2)
    made.close()
    change(directory / "index.kvs", 5 * SLOT_BYTES, stale)
    made = backend(capacity_bytes=256 * 1024)
    assert [found.key for found in made.found.records] == [key(2)]
    assert made.found.defects == {Defect.TORN: 1}
    assert got(made, key, 2) == content(2, SIZE)
    made.check()


def test_an_entry_that_a_tenant_has_written_into_its_salt_is_no_entry(backend, key, content):
    """Without the store's seed nobody can make one; with the wrong one it is only a strange name."""
    made = backend()
    put(made, key, content, 1)
    header = envelope.encode_header(key(9), memoryview(content(1, SIZE)))
    forged = encode_entry(header, (Run(0, PAGES),), 1 << 40, 12345)
    salt = "x" * (SLOT_BYTES * 2) + forged.decode("latin-1")
    made.write(key(2, salt[:1500]), memoryview(content(2, SIZE)))
    made = backend()
    assert {found.key for found in made.found.records} == {key(1), key(2, salt[:1500])}


# -- whose directory it is


@pytest.mark.parametrize("name", ["notes.txt", "slab-1.kvs", "ab/cd.kv", "kvcore-l2.json"])
def test_a_directory_with_something_else_is_refused_and_left_alone(backend, directory, name):
    (directory / name).parent.mkdir(parents=True)
    (directory / name).write_text("mine")
    with pytest.raises(ConfigError, match="not ours"):
        backend()
    assert [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()] == [name]


@pytest.mark.parametrize("marker", ["", "{}", "[]", '{"format": "kvcore-slab", "version": 1, "slab_bytes": 262144}'])
def test_a_damaged_marker_is_refused(backend, directory, marker):
    backend().close()
    (directory / "kvcore-slab.json").write_text(marker)
    with pytest.raises(ConfigError, match="damaged"):
        backend()


@pytest.mark.parametrize(
    ("field", "value", "text"), [("version", 2, "another format"), ("slab_bytes", 65536, "slabs of")]
)
def test_a_store_of_another_make_is_refused(backend, directory, field, value, text):
    backend().close()
    marker = json.loads((directory / "kvcore-slab.json").read_text())
    (directory / "kvcore-slab.json").write_text(json.dumps({**marker, field: value}))
    with pytest.raises(ConfigError, match=text):
        backend()


def test_without_its_marker_a_store_starts_empty(backend, directory, key, content):
    made = backend()
    put(made, key, content, 1)
    made.close()
    (directory / "kvcore-slab.json").unlink()
    assert backend().found.records == ()


def test_a_directory_that_is_held_is_refused_until_it_is_given_back(directory):
    options = SlabOptions(str(directory), 1 << 20, 1 << 20)
    first, second = slab.open_backend(options), slab.open_backend(options)
    first.open()
    with pytest.raises(ConfigError, match="held by another process"):
        second.open()
    first.close()
    second.open()
    second.close()


def test_nothing_works_after_close(backend, key, content):
    made = backend()
    made.close()
    with pytest.raises(StoreError, match="closed"):
        put(made, key, content, 1)


@pytest.mark.parametrize(
    ("capacity_bytes", "slab_bytes"), [(0, 1 << 20), (PAGE_BYTES << 33, 1 << 30), (1 << 20, 4096), (1 << 20, 100_000)]
)
def test_sizes_that_cannot_work_are_refused_before_anything_is_touched(directory, capacity_bytes, slab_bytes):
    with pytest.raises(ConfigError):
        slab.open_backend(SlabOptions(str(directory), capacity_bytes, slab_bytes))
    assert not directory.exists()


# -- errors of single calls


class Failing:
    """Stands between a backend and its files: the calls numbered in `fail` raise EIO."""

    def __init__(self, files, name, fail):
        self.files, self.name, self.fail, self.calls = files, name, fail, 0

    def __getattr__(self, name):
        if name != self.name:
            return getattr(self.files, name)
        self.calls += 1
        if self.calls in self.fail:
            return self._raise
        return getattr(self.files, name)

    def _raise(self, *arguments):
        raise OSError(errno.EIO, "input/output error")


@pytest.mark.parametrize("name", ["write_pages", "write_slots"])
def test_a_write_that_fails_gives_its_room_back_and_is_not_seen(backend, key, content, name):
    made = backend()
    put(made, key, content, 1)
    made._files = Failing(made._files, name, {1})
    with pytest.raises(OSError, match="input/output"):
        put(made, key, content, 2)
    made.check()
    assert got(made, key, 2) is Defect.MISSING
    put(made, key, content, 2)
    assert got(made, key, 2) == content(2, SIZE)
    made._files = made._files.files
    assert len(backend().found.records) == 2


@pytest.mark.parametrize("name", ["write_pages", "write_slots"])
def test_a_call_for_many_that_fails_is_tried_one_by_one(backend, key, content, name):
    made = backend()
    made._files = Failing(made._files, name, {1, 3})  # the one for all, and the second one's own
    results = made.write_many([(key(number), memoryview(content(number, SIZE))) for number in range(4)])
    assert [result is None for result in results] == [True, False, True, True]
    made.check()
    made._files = made._files.files
    assert [found.key for found in backend().found.records] == [key(0), key(2), key(3)]


def test_a_failed_write_that_cannot_be_erased_stays_accounted_until_it_is(backend, key, content):
    made = backend()
    made._files = Failing(made._files, "write_slots", {1, 2, 3})
    with pytest.raises(LeftoverError):
        put(made, key, content, 1)
    with pytest.raises(OSError, match="input/output"):
        made.delete(key(1))
    made.check()
    made.delete(key(1))
    made.check()
    assert sum(run.count for run in made._pages) == (1 << 20) // PAGE_BYTES
    made._files = made._files.files


def test_a_read_error_is_that_keys_error(backend, key, content):
    made = backend()
    put(made, key, content, 1, 2, 3)
    made._files = Failing(made._files, "read_pages", {1, 3})
    buffers = [bytearray(SIZE) for _ in range(3)]
    results = made.read_many([(key(number + 1), memoryview(buffer)) for number, buffer in enumerate(buffers)])
    assert [type(result) for result in results] == [type(None), OSError, type(None)]
    made._files = made._files.files

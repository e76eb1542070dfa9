"""Disks that really fail: full, read-only, with errors of input and output, slow. See `Mounts` in `conftest.py`.

Whatever happens, the answer is a miss or a store that was not done, it is counted, nothing is left behind, and the
store is used again when the fault is over.
"""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from kvcore.errors import ConfigError
from kvcore.l2.fs import record_name

SIZE = 60_000
KINDS = ["file", "fs", "slab"]


def leftovers(session):
    """Temporary files, and what the accounting says too much or too little."""
    session.rest()
    temporary = [path.name for path in session.directory.rglob(".tmp-*")]
    if session.kind == "slab":
        session.adapter.check()
        session.backend.check()
        return temporary
    on_disk = sum(path.stat().st_size for path in session.directory.glob("??/*.kv"))
    return temporary + [on_disk - session.adapter.usage().bytes_used] * (on_disk != session.adapter.usage().bytes_used)


# -- full


@pytest.mark.parametrize("kind", ["file", "fs"])
def test_a_full_disk_says_full_keeps_what_it_has_and_takes_more_when_there_is_room(kind, stores, mounts, key, content):
    session = stores(kind, mounts.tmpfs("1m") / "store")
    session.rest()
    stored = 0
    while (answer := session.store((key(stored), content(stored, SIZE)))) == ["stored"]:
        stored += 1
    assert answer == ["full"]
    assert 8 < stored < 18
    assert leftovers(session) == []
    items = [(key(number), SIZE) for number in range(stored + 1)]
    assert session.load(*items) == [content(number, SIZE) for number in range(stored)] + [None]
    session.delete(key(0), key(1))
    assert session.store((key(stored), content(stored, SIZE))) == ["stored"]
    assert session.load(items[-1]) == [content(stored, SIZE)]
    assert leftovers(session) == []
    assert session.statistics.full == 1


def test_a_slab_store_that_does_not_fit_refuses_to_start_and_takes_nothing(stores, mounts):
    place = mounts.tmpfs("2m") / "store"
    with pytest.raises(ConfigError, match="no room for 4194304 bytes"):
        stores("slab", place, capacity_bytes=4 << 20)
    assert sum(path.stat().st_blocks for path in place.glob("*.kvs")) == 0
    stores("slab", place, capacity_bytes=1 << 20).close()


def test_a_slab_store_goes_on_when_others_have_filled_the_disk(stores, mounts, key, content):
    mount = mounts.tmpfs("2m")
    session = stores("slab", mount / "store", capacity_bytes=1 << 20)
    with open(mount / "others", "wb", buffering=0) as file:
        while file.write(bytes(1 << 20)) == 1 << 20:
            pass
    assert shutil.disk_usage(mount).free == 0
    for number in range(40):  # more than fit: the oldest are evicted
        assert session.store((key(number), content(number, SIZE))) == ["stored"]
    assert session.load((key(39), SIZE), (key(0), SIZE)) == [content(39, SIZE), None]
    assert leftovers(session) == []


# -- read-only


@pytest.mark.parametrize("kind", ["file", "slab"])
def test_a_store_of_one_process_refuses_a_read_only_disk(kind, stores, mounts, tmp_path, key, content):
    session = stores(kind)
    session.store((key(1), content(1, SIZE)))
    session.close()
    with pytest.raises(ConfigError, match="Read-only file system"):
        stores(kind, mounts.read_only(tmp_path / "store"))
    assert stores(kind).load((key(1), SIZE)) == [content(1, SIZE)]


def test_a_shared_directory_can_be_read_where_it_cannot_be_written(stores, mounts, tmp_path, key, content):
    stores("fs").store((key(1), content(1, SIZE)))
    reader = stores("fs", mounts.read_only(tmp_path / "store"))
    reader.rest()
    assert reader.lookup(key(1), key(2)) == [True, False]
    assert reader.load((key(1), SIZE)) == [content(1, SIZE)]
    assert reader.store((key(1), content(1, SIZE)), (key(2), content(2, SIZE))) == ["present", "failed"]
    reader.unlock(key(1))
    reader.delete(key(1))
    assert reader.statistics.io_errors == 1
    assert reader.load((key(1), SIZE)) == [content(1, SIZE)]


# -- errors of input and output


@pytest.fixture
def faulty(stores, mounts, tmp_path):
    """`faulty(kind, **options)`: (session, layer): a store on a disk that does as it is told."""

    def make(kind, **options):
        (tmp_path / "disk").mkdir()
        layer = mounts.layer(tmp_path / "disk")
        session = stores(kind, layer.path / "store", capacity_bytes=1 << 20, **options)
        session.rest()
        return session, layer

    return make


@pytest.mark.parametrize(
    ("kind", "operation"),
    [("file", "write"), ("fs", "write"), ("slab", "write"), ("file", "rename"), ("fs", "rename")],
)
def test_an_error_while_writing_leaves_nothing_behind(kind, operation, faulty, key, content):
    session, layer = faulty(kind)
    assert session.store((key(1), content(1, SIZE))) == ["stored"]
    layer.tell(f"{operation} EIO")
    assert session.store((key(2), content(2, SIZE)), (key(3), content(3, SIZE))) == ["retry", "retry"]
    session.rest()
    layer.tell("")
    assert session.statistics.io_errors >= 2
    assert session.lookup(key(1), key(2), key(3)) == [True, False, False]
    session.unlock(key(1))
    assert session.store((key(2), content(2, SIZE)), (key(3), content(3, SIZE))) == ["stored", "stored"]
    items = [(key(number), SIZE) for number in (1, 2, 3)]
    assert session.load(*items) == [content(number, SIZE) for number in (1, 2, 3)]
    assert leftovers(session) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_flush_that_fails_is_a_store_that_was_not_done(kind, faulty, key, content):
    session, layer = faulty(kind, fsync=True)
    layer.tell("fsync EIO")
    assert session.store((key(2), content(2, SIZE))) == ["retry"]
    layer.tell("")
    session.rest()
    assert session.store((key(2), content(2, SIZE))) == ["stored"]
    assert session.load((key(2), SIZE)) == [content(2, SIZE)]
    assert leftovers(session) == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_while_reading_is_a_counted_miss(kind, faulty, key, content):
    session, layer = faulty(kind)
    assert session.store((key(1), content(1, SIZE)), (key(2), content(2, SIZE))) == ["stored", "stored"]
    layer.tell("read EIO")
    assert session.load((key(1), SIZE), (key(2), SIZE)) == [None, None]
    layer.tell("")
    session.rest()
    assert session.statistics.io_errors == 2
    session.store((key(1), content(1, SIZE)), (key(2), content(2, SIZE)))
    assert session.load((key(1), SIZE), (key(2), SIZE)) == [content(1, SIZE), content(2, SIZE)]
    assert leftovers(session) == []


@pytest.mark.parametrize("kind", ["file", "fs"])
def test_one_record_that_cannot_be_read_costs_the_others_nothing_at_the_next_start(kind, faulty, stores, key, content):
    """S36: a bad block under one of them. A store of one process clears it away; of a shared directory it is left."""
    session, layer = faulty(kind)
    assert session.store(*((key(number), content(number, SIZE)) for number in range(10))) == ["stored"] * 10
    session.close()
    layer.tell(f"read EIO /store/{record_name(key(7))}")
    again = stores(kind, layer.path / "store", capacity_bytes=1 << 20)
    again.rest()
    others = [number for number in range(10) if number != 7]
    assert set(again.adapter.keys()) == {key(number) for number in others}
    assert again.load(*((key(number), SIZE) for number in others)) == [content(number, SIZE) for number in others]
    assert again.load((key(7), SIZE)) == [None]
    again.rest()
    layer.tell("")
    if kind == "file":
        assert again.statistics.defects == 1
        assert leftovers(again) == []
    assert again.store((key(7), content(7, SIZE)))[0] in ("stored", "present")
    assert again.load((key(7), SIZE)) == [content(7, SIZE)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_deletion_that_fails_stays_invisible_or_comes_back_and_is_done_later(kind, faulty, key, content):
    session, layer = faulty(kind)
    assert session.store((key(1), content(1, SIZE))) == ["stored"]
    layer.tell("write EIO" if kind == "slab" else "unlink EIO")
    session.delete(key(1))
    assert session.statistics.io_errors >= 1
    layer.tell("")
    session.delete(key(1))
    assert session.lookup(key(1)) == [False]
    assert session.adapter.usage().bytes_used == 0
    assert leftovers(session) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_disk_holds_up_nobody_who_does_not_need_it(kind, faulty, key, content):
    """While reads take their time, present keys are found, and closing does not wait."""
    session, layer = faulty(kind)
    assert session.store((key(1), content(1, SIZE))) == ["stored"]
    layer.tell("read delay 60")  # until it is told otherwise
    buffer = bytearray(SIZE)
    task = session.adapter.submit_load([key(1)], [memoryview(buffer)])
    assert session.lookup(key(1), key(2)) == [True, False]
    assert session.adapter.take_load(task) is None, "the load has not come back before the lookup"
    session.unlock(key(1))
    layer.tell("")
    assert session.until(lambda: session.adapter.take_load(task)) == 1
    assert buffer == content(1, SIZE)
    layer.tell("read delay 60")
    session.adapter.submit_load([key(1)], [memoryview(buffer)])
    session.close()
    assert session.adapter.work_inflight > 0, "close has not waited for it"
    layer.tell("")


def test_the_layer_itself_passes_everything_on(mounts, tmp_path):
    """Otherwise the tests above would fail for the wrong reason, or pass for it."""
    (tmp_path / "disk").mkdir()
    layer = mounts.layer(tmp_path / "disk")
    (layer.path / "a").write_bytes(b"hello")
    os.rename(layer.path / "a", layer.path / "b")
    assert (tmp_path / "disk" / "b").read_bytes() == b"hello"
    layer.tell("read EIO")
    with pytest.raises(OSError) as error:
        (layer.path / "b").read_bytes()
    assert error.value.errno == errno.EIO
    layer.tell("")
    assert (layer.path / "b").read_bytes() == b"hello"

"""The object store backend on a real S3 server, and on obstore's directory and memory stores."""

from __future__ import annotations

import dataclasses
import traceback

import pytest

from kvcore.errors import ConfigError, StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.envelope import Defect
from kvcore.l2.objectstore import ObjectStoreOptions, open_backend
from kvcore.l2.objectstore_client import ObjectClient
from kvcore.l2.objectstore_names import MARKER_NAME, key_of_name, object_name

STORED, PRESENT, RETRY = StoreAnswer.STORED, StoreAnswer.PRESENT, StoreAnswer.RETRY
KIB = 1024


def key(number, model="org/model", salt=""):
    return ObjectKey(number.to_bytes(32, "big"), model, 0, 0, salt)


def payload(number, size=64 * KIB):
    return bytes([number % 251]) * (size - 8) + number.to_bytes(8, "big")


@pytest.fixture(params=["s3", "file", "memory"])
def place(request, tmp_path):
    """The options of one store of each kind that can be run here."""
    if request.param == "s3":
        return request.getfixturevalue("options")
    return ObjectStoreOptions(kind=request.param, bucket=str(tmp_path / "objects"), prefix="a/b")


@pytest.fixture
def store(place, backends):
    return backends(place)


def write(store, keys, payloads):
    return store.write([(k, memoryview(p)) for k, p in zip(keys, payloads, strict=True)])


def read(store, keys, sizes):
    buffers = [bytearray(b"\xee" * size) for size in sizes]
    return store.read([(k, memoryview(b)) for k, b in zip(keys, buffers, strict=True)]), buffers


def path_of(place, k):
    return f"{place.prefix}/{object_name(k)}"


def raw_client(place, store):
    return store._client if place.kind == "memory" else ObjectClient(place)


# --- names -------------------------------------------------------------------------------------------------------


def test_a_name_gives_its_key_back_and_is_safe_everywhere():
    hostile = [
        key(1, model="../../etc/passwd"),
        key(2, salt="tenant/../x?y=z&\n"),
        key(3, model="Ünï\udcffcode"),
        key(4),
    ]
    for one in hostile:
        name = object_name(one)
        assert key_of_name(name) == one
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789/.")
        assert max(map(len, name.split("/"))) <= 255


def test_a_long_key_has_a_bounded_name_that_does_not_tell_it():
    long = key(1, salt="s" * 4000)
    assert len(object_name(long)) < 255
    assert key_of_name(object_name(long)) is None


def test_a_name_that_claims_a_key_of_another_place_is_not_believed():
    name = object_name(key(1))
    other = ("00" if name[:2] != "00" else "01") + name[2:]
    assert key_of_name(other) is None
    for wrong in ("", "kvcore-l2.json", "aa/k.kv", "aa/kaaaa.kv", name + "x", name.upper()):
        assert key_of_name(wrong) is None


# --- records -----------------------------------------------------------------------------------------------------


def test_what_was_written_is_found_and_read_back(store):
    keys = [key(n) for n in range(10)] + [key(10, salt="s" * 4000)]
    payloads = [payload(n, 3000 + n) for n in range(10)] + [payload(10, 2 * KIB * KIB)]
    assert store.find(keys) == [False] * 11
    assert write(store, keys, payloads) == [STORED] * 11
    assert store.find([*keys, key(99)]) == [True] * 11 + [False]
    results, buffers = read(store, [*keys, key(99)], [len(p) for p in payloads] + [10])
    assert results == [None] * 11 + [Defect.MISSING]
    assert [bytes(buffer) for buffer in buffers[:-1]] == payloads
    assert bytes(buffers[-1]) == b"\xee" * 10


def test_an_object_that_is_there_is_present_and_keeps_its_bytes(store):
    assert write(store, [key(1)], [payload(1)]) == [STORED]
    assert write(store, [key(1)], [payload(2)]) == [PRESENT]
    results, buffers = read(store, [key(1)], [64 * KIB])
    assert (results, bytes(buffers[0])) == ([None], payload(1))


def test_an_object_of_another_length_is_replaced(store):
    write(store, [key(1)], [payload(1, 1000)])
    assert read(store, [key(1)], [2000])[0] == [Defect.OTHER_SIZE]
    assert write(store, [key(1)], [payload(1, 2000)]) == [STORED]
    assert read(store, [key(1)], [2000])[0] == [None]


def test_a_change_of_the_caller_s_buffer_after_the_write_changes_nothing_stored(store):
    buffer = bytearray(payload(1))
    store.write([(key(1), memoryview(buffer))])
    buffer[:] = b"\0" * len(buffer)
    results, buffers = read(store, [key(1)], [64 * KIB])
    assert (results, bytes(buffers[0])) == ([None], payload(1))


def test_nobody_holds_the_caller_s_buffer_when_write_returns(store):
    buffer = bytearray(payload(1, 2 * KIB * KIB))
    with memoryview(buffer) as view:
        store.write([(key(1), view)])
    buffer.append(1)  # BufferError while anybody holds a view


def test_delete_removes_what_is_there_and_is_content_with_what_is_not(store):
    keys = [key(n) for n in range(5)]
    write(store, keys, [payload(n) for n in range(5)])
    assert store.delete([*keys[:3], key(99)]) == [None] * 4
    assert store.find(keys) == [False] * 3 + [True] * 2
    assert store.delete([key(99)]) == [None]


def test_a_scan_names_keys_sizes_and_ages_and_leaves_the_marker_out(store, place):
    keys = [key(1), key(2, salt="tenant"), key(3, salt="s" * 4000)]
    write(store, keys, [payload(n, 1000 * n) for n in (1, 2, 3)])
    raw_client(place, store).put(f"{place.prefix}/rubbish.kv", [b"not a record"], create=False)
    found = {stored.key: stored for stored in store.scan() if stored.key is not None}
    assert set(found) == set(keys)
    assert [found[k].record_bytes for k in keys] == [store.record_bytes(k, 1000 * n) for k, n in zip(keys, (1, 2, 3))]
    assert all(0 <= stored.age_s < 3600 for stored in found.values())
    assert [stored.name for stored in store.scan() if stored.key is None] == ["rubbish.kv"]


def test_a_prefix_hides_what_lies_beside_it(store, place, backends):
    if place.kind == "memory":
        beside = backends(dataclasses.replace(place, prefix=place.prefix + "x"), store._client)
    else:
        beside = backends(dataclasses.replace(place, prefix=place.prefix + "x"))
    write(beside, [key(1)], [payload(1)])
    assert store.find([key(1)]) == [False]
    assert list(store.scan()) == []


def test_a_restarted_process_finds_everything_again(store, place, backends):
    write(store, [key(1)], [payload(1)])
    client = store._client if place.kind == "memory" else None
    store.close()
    again = backends(place, client)
    results, buffers = read(again, [key(1)], [64 * KIB])
    assert (results, bytes(buffers[0])) == ([None], payload(1))
    assert [stored.key for stored in again.scan()] == [key(1)]


def test_a_closed_store_raises_and_reads_nothing(store):
    store.close()
    with pytest.raises(StoreError):
        read(store, [key(1)], [10])
    store.close()


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
def test_a_bad_object_is_recognised_discarded_and_written_anew(store, place, defect):
    raw_client(place, store).put(path_of(place, key(1)), [BAD[defect]], create=False)
    assert read(store, [key(1)], [3000])[0] == [defect]
    store.discard(key(1), defect)
    assert store.find([key(1)]) == [False]
    assert write(store, [key(1)], [payload(1, 3000)]) == [STORED]
    assert read(store, [key(1)], [3000])[0] == [None]


def test_an_empty_object_is_no_record(store, place):
    raw_client(place, store).put(path_of(place, key(1)), [b""], create=False)
    assert store.find([key(1)]) == [False]
    assert read(store, [key(1)], [3000])[0] == [Defect.SHORT]


@pytest.mark.parametrize("defect", [Defect.FLIPPED, Defect.TORN], ids=lambda defect: defect.value)
def test_a_discard_spares_the_record_that_came_in_the_bad_one_s_place(store, place, defect):
    client = raw_client(place, store)
    client.put(path_of(place, key(1)), [BAD[defect]], create=False)
    assert read(store, [key(1)], [3000])[0] == [defect]
    client.put(path_of(place, key(1)), [GOOD], create=False)
    store.discard(key(1), defect)
    assert read(store, [key(1)], [3000])[0] == [None]


# --- opening ------------------------------------------------------------------------------------------------------


def test_a_missing_bucket_is_told_apart_from_a_miss_at_open(options):
    with pytest.raises(ConfigError, match="no bucket 'kvcore-absent'"):
        open_backend(dataclasses.replace(options, bucket="kvcore-absent")).open()


def test_a_bucket_that_goes_away_later_is_an_error_and_not_a_miss(options, seaweed):
    absent = ObjectClient(dataclasses.replace(options, bucket="kvcore-absent"))
    with pytest.raises(StoreError, match="NoSuchBucket"):
        absent.get("x", [])
    assert ObjectClient(options).get("x", []) is None


def test_a_wrong_secret_is_refused_at_open_and_never_shown(options):
    wrong = dataclasses.replace(options, secret_access_key="a-very-wrong-secret")
    with pytest.raises(ConfigError, match="refuses us") as caught:
        open_backend(wrong).open()
    assert "a-very-wrong-secret" not in "".join(traceback.format_exception(caught.value)) + repr(wrong)


def test_a_reader_without_the_right_to_write_serves_hits(options, backends):
    store = backends(options)
    write(store, [key(1)], [payload(1)])
    reader = backends(dataclasses.replace(options, access_key_id="reader", secret_access_key="reader-secret"))
    assert read(reader, [key(1)], [64 * KIB])[0] == [None]
    (answer,) = write(reader, [key(2)], [payload(2)])
    assert isinstance(answer, StoreError)


def test_a_prefix_of_another_format_is_refused(place, store, backends):
    raw_client(place, store).put(f"{place.prefix}/{MARKER_NAME}", [b'{"format":"something else"}'], create=False)
    with pytest.raises(ConfigError, match="another format"):
        backends(place, store._client if place.kind == "memory" else None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "ftp"}, "one of"),
        ({"bucket": ""}, "needs a bucket"),
        ({"endpoint": "http://user:secret@host"}, "no user and password"),
        ({"timeout_s": 0.0}, "above 0"),
        ({"requests_parallel": 0}, "at least 1"),
        ({"prefix": "a//b"}, "prefix"),
        ({"prefix": "../b"}, "prefix"),
        ({"prefix": "/a"}, "prefix"),
    ],
)
def test_options_that_can_never_work_are_refused_without_io(change, text):
    options = dataclasses.replace(ObjectStoreOptions(bucket="b", endpoint="http://127.0.0.1:1"), **change)
    with pytest.raises(ConfigError, match=text) as caught:
        open_backend(options)
    assert "secret" not in str(caught.value).replace("secret_access_key", "")


def test_secrets_are_not_in_the_repr_of_the_options():
    options = ObjectStoreOptions(bucket="b", secret_access_key="hush-hush", session_token="hush-token")
    assert "hush" not in repr(options)


def test_the_memory_store_does_not_keep_the_caller_s_buffer_as_the_object(backends):
    """obstore's own would, for a body of one part: what the caller writes there later would be the object."""
    store = backends(ObjectStoreOptions(kind="memory"))
    buffer, into = bytearray(b"before"), bytearray(6)
    store._client.put("object", [memoryview(buffer)], create=False)
    buffer[:] = b"after!"
    store._client.get("object", [memoryview(into)])
    assert into == b"before"

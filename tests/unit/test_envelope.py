"""The envelope: no damaged record passes, and each kind of damage has its name."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcore.keys import ObjectKey, encode_key
from kvcore.l2 import envelope
from kvcore.l2.envelope import Defect, Header, check_record, encode_header, parse_header

KEY = ObjectKey(bytes(range(32)), "model", 3, 1, "tenant")
OTHER = ObjectKey(bytes(range(1, 33)), "model", 3, 1, "tenant")
PAYLOAD = bytes(range(40))


def record_of(key=KEY, payload=PAYLOAD):
    return encode_header(key, payload) + payload


def judge(record, key=KEY, room=40):
    """Read a record as a store does (one byte more than asked for shows a longer one) and check it."""
    head_bytes = envelope.header_bytes(key)
    head = bytearray(record[:head_bytes]).ljust(head_bytes, b"\0")
    payload = bytearray(record[head_bytes : head_bytes + room]).ljust(room, b"\0")
    bytes_read = min(len(record), head_bytes + room + 1)
    return check_record(key, bytes(head), memoryview(payload), bytes_read)


def test_an_intact_record_has_no_defect():
    assert judge(record_of()) is None


def test_a_record_is_as_long_as_announced():
    assert len(record_of()) == envelope.record_bytes(KEY, len(PAYLOAD))
    assert len(encode_header(KEY, b"")) == envelope.header_bytes(KEY)


def test_every_single_flipped_bit_is_found():
    record = record_of()
    for bit in range(8 * len(record)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        expected = Defect.FOREIGN if bit < 64 else Defect.STALE_VERSION if bit < 96 else Defect.FLIPPED
        assert judge(bytes(damaged)) is expected, f"bit {bit}"


def test_every_truncation_is_found():
    record = record_of()
    for length in range(len(record)):
        assert judge(record[:length]) is (Defect.SHORT if length < 64 else Defect.TORN), f"{length} bytes"


@pytest.mark.parametrize("extra", [1, 2, 1000])
def test_bytes_behind_a_record_are_found(extra):
    assert judge(record_of() + bytes(extra)) is Defect.LONG


def test_the_record_of_another_key_is_foreign():
    """S23."""

    assert judge(record_of(OTHER)) is Defect.FOREIGN
    assert judge(record_of(OTHER._replace(model_name="a longer name"))) is Defect.FOREIGN
    assert judge(record_of(OTHER._replace(cache_salt=""))) is Defect.FOREIGN


def test_a_header_does_not_vouch_for_another_payload_of_the_same_size():
    assert judge(encode_header(KEY, PAYLOAD) + PAYLOAD[::-1]) is Defect.FLIPPED


def test_the_payload_of_another_key_under_our_header_is_found():
    swapped = bytearray(record_of())
    swapped[-len(PAYLOAD) :] = record_of(OTHER, bytes(40))[-len(PAYLOAD) :]
    assert judge(bytes(swapped)) is Defect.FLIPPED


@pytest.mark.parametrize("room", [0, 1, 2, 20, 38, 39, 41, 4000])
def test_an_intact_record_of_another_size_is_named_so(room):
    assert judge(record_of(), room=room) is Defect.OTHER_SIZE


def test_a_torn_record_is_torn_whatever_the_buffer():
    assert judge(record_of()[:-1], room=100) is Defect.TORN
    assert judge(record_of()[:-20], room=30) is Defect.TORN
    assert judge(record_of() + b"x", room=100) is Defect.LONG


def test_another_format_version_is_stale_before_anything_else_is_believed():
    record = bytearray(record_of())
    record[8:10] = (envelope.FORMAT_VERSION + 1).to_bytes(2, "little")
    assert judge(bytes(record)) is Defect.STALE_VERSION
    record[40:] = bytes(len(record) - 40)
    assert judge(bytes(record)) is Defect.STALE_VERSION


def resealed(**fields):
    """The header of a record with other numbers in it, under a header check that passes."""
    names = ("magic", "version", "flags", "length", "payload", "key", "reserved", "key_check")
    head = encode_header(KEY, PAYLOAD)
    values = dict(zip(names, struct.unpack_from("<8sHHIQIIQ", head)), **fields)
    checked = struct.pack("<8sHHIQIIQ", *values.values()) + head[40:56]
    return checked + struct.pack("<Q", xxhash.xxh3_64_intdigest(checked)) + head[64:]


def test_a_header_whose_numbers_contradict_each_other_is_not_believed_although_its_check_passes():
    length = len(encode_header(KEY, PAYLOAD))
    assert isinstance(parse_header(resealed()), Header)
    for fields in (
        {"length": length - 1},
        {"length": length + 1},
        {"length": length + 64},
        {"key": length - 128},
        {"key": length - 64 + 1},
        {"reserved": 1},
        {"length": 64 * 1025, "key": 64 * 1024},
    ):
        assert parse_header(resealed(**fields)) is Defect.FLIPPED, fields
    assert parse_header(resealed(flags=1)) is Defect.STALE_VERSION
    assert isinstance(parse_header(resealed(length=64 * 1024, key=64 * 1023)), Header), "the longest that is believed"


def test_a_record_whose_key_has_another_length_is_foreign_although_the_key_check_agrees():
    key_bytes = len(encode_key(KEY))
    for other in (key_bytes - 1, key_bytes + 1):
        assert judge(resealed(key=other) + PAYLOAD) is Defect.FOREIGN


@pytest.mark.parametrize("data", [b"", b"x" * 10, b"x" * 64, bytes(64), bytes(4096)])
def test_rubbish_is_no_record(data):
    assert judge(data) is (Defect.SHORT if len(data) < 64 else Defect.FOREIGN)


@given(st.binary(max_size=300))
def test_no_random_bytes_pass(data):
    assert judge(data) is not None
    assert judge(envelope.MAGIC + data) is not None


@given(st.binary(max_size=200), st.integers(0, 10_000), st.binary(min_size=1, max_size=8))
def test_no_overwritten_stretch_passes(payload, position, stretch):
    record = record_of(KEY, payload)
    position %= len(record)
    damaged = bytearray(record)
    damaged[position : position + len(stretch)] = stretch[: len(record) - position]
    verdict = judge(bytes(damaged), room=len(payload))
    assert (verdict is None) == (bytes(damaged) == record)


def test_the_header_alone_tells_key_and_sizes():
    head = encode_header(KEY, PAYLOAD)
    header = parse_header(head)
    assert isinstance(header, Header)
    assert (header.header_bytes, header.payload_bytes) == (len(head), 40)
    assert envelope.key_of(header, head) == encode_key(KEY)
    assert envelope.key_of(header, head[:-1]) is Defect.TORN
    assert envelope.key_of(header, head[:64] + b"\xff" + head[65:]) is Defect.FLIPPED


def test_the_checksum_covers_the_key_that_was_asked_for(monkeypatch):
    """So a record of another key does not pass even if its key is never compared."""
    assert judge(record_of(OTHER)) is Defect.FOREIGN
    monkeypatch.setattr(envelope, "_key_defect", lambda *_: None)
    assert judge(record_of(OTHER)) is Defect.FLIPPED


def test_payloads_begin_at_a_multiple_of_64_whatever_the_key():
    for name in ("", "m", "m" * 63, "m" * 4000):
        head = encode_header(ObjectKey(b"\x01" * 32, name, 0), PAYLOAD)
        assert len(head) % 64 == 0
        assert len(head) - 64 - len(encode_key(ObjectKey(b"\x01" * 32, name, 0))) < 64


def test_a_record_of_version_1_is_stale():
    """Its header ended with the key."""
    encoded = encode_key(KEY)
    fields = struct.pack(
        "<8sHHIQIIQ", envelope.MAGIC, 1, 0, 64 + len(encoded), 40, len(encoded), 0, xxhash.xxh3_64_intdigest(encoded)
    )
    checked = fields + xxhash.xxh3_128_digest(fields + encoded + PAYLOAD)
    record = checked + struct.pack("<Q", xxhash.xxh3_64_intdigest(checked)) + encoded + PAYLOAD
    assert judge(record) is Defect.STALE_VERSION


def test_the_format_does_not_change_by_accident():
    """A record written by version 2, byte for byte."""
    record = record_of(ObjectKey(b"\x01" * 32, "m", 0), b"payload")
    assert record[:12].hex() == "4b56434f52454c32" + "0200" + "0000"
    assert int.from_bytes(record[12:16], "little") == envelope.header_bytes(ObjectKey(b"\x01" * 32, "m", 0))
    assert int.from_bytes(record[16:24], "little") == 7
    assert record[56:64].hex() + record[-7:].hex() == "c731e2992227ff1e" + b"payload".hex()

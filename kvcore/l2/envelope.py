"""The envelope: what stands before the payload in every L2 record, and how a record is judged.

A record is read back from a place that others can write, that loses power, runs full and rots. So nothing
of it is believed before it has been checked, and every way of being wrong has a name (`Defect`): the adapter
answers "miss", counts the kind and cleans the record up.

Layout (little endian), format version 2:

    offset  bytes  field
         0      8  magic
         8      2  format version
        10      2  flags (none defined: any bit set is another format)
        12      4  header length: this fixed part, the key and the padding
        16      8  payload length
        24      4  key length
        28      4  reserved, zero
        32      8  key check: xxh3_64 of the key bytes
        40     16  checksum: xxh3_128 of bytes 0..39, the key, the padding, the payload
        56      8  fields check: xxh3_64 of bytes 0..55
        64      n  the full key (`kvcore.keys.encode_key`)
      64+n      p  padding: zeros, up to the next multiple of 64
    64+n+p      m  payload

With the padding payloads begin at a multiple of 64 in a file, and the system copies them faster: a `preadv` of 2 MiB
takes a quarter less CPU time than at an odd place, one of 64 KiB a fifth. Version 1 had none; its records are
STALE_VERSION, misses that are written anew.

Checking a record whose key is known (`check_record`):

 1. Fewer than 64 bytes: SHORT. Wrong magic: FOREIGN. Other version or an unknown flag: STALE_VERSION.
 2. The fields check fails, or the fields contradict each other: FLIPPED. From here on the lengths are true.
 3. The key check is not that of the key asked for: FOREIGN (a misdirected or colliding record). It is, and
    the key bytes differ all the same: FLIPPED.
 4. The file ends before the record does: TORN. It goes on behind it: LONG.
 5. The payload is not as long as the caller's buffer: OTHER_SIZE. The record is intact, but not what is wanted.
 6. The checksum over fields, key and payload fails: FLIPPED.

A record is good exactly when its header is the one that `encode_header` makes of the key and the payload that was read.
So this is compared first, and the steps are for the others: they only say what is wrong.

The payload is read straight into the caller's buffer and checked there; when step 6 fails the buffer holds
rubbish and the caller is told that its content is undefined.

Rejected: one checksum for everything (a scan would have to read every payload to trust a header); a checksum
of the payload alone (a payload under another header of the same size would pass); CRC32 (too weak for the
number of records a store sees in its life); a seed (a record must be readable by every later process).
The checksums find accidents. They do not stop somebody who can write the store.

Who holds the memory: the caller, throughout. Nothing here keeps a view. Nothing here knows time, files or threads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum, unique
from typing import NamedTuple

import xxhash

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey, decode_key, encode_key

MAGIC = b"KVCOREL2"
FORMAT_VERSION = 2
FIXED_BYTES = 64
HEADER_BYTES_MAX = 64 * 1024
"""Longer headers are not believed: no legal key comes near."""

_FIELDS = struct.Struct("<8sHHIQIIQ")
_PAYLOAD_LENGTH = struct.Struct("<Q")
_PAYLOAD_LENGTH_AT = 16
_ALIGNMENT_BYTES = 64
_FIELDS_BYTES = 40
_CHECKED_BYTES = 56
_CHECK = struct.Struct("<Q")
_PADDING = bytes(_ALIGNMENT_BYTES)

assert _FIELDS.size == _FIELDS_BYTES
assert _CHECKED_BYTES + _CHECK.size == FIXED_BYTES
assert FIXED_BYTES % _ALIGNMENT_BYTES == 0


@unique
class Defect(Enum):
    """Why a record is not what was asked for. Every one of them is a miss."""

    SHORT = "short"  # too short for a header
    TORN = "torn"  # the end of the record is missing
    LONG = "long"  # there are bytes behind the record
    FOREIGN = "foreign"  # not our format, or the record of another key
    STALE_VERSION = "stale_version"  # another format version
    FLIPPED = "flipped"  # a checksum fails
    OTHER_SIZE = "other_size"  # intact, with another payload length than the caller's buffer
    MISSING = "missing"  # the index knew it and the store does not
    UNREADABLE = "unreadable"  # the store answered the read with an error


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header whose own check has passed."""

    header_bytes: int
    key_bytes: int
    payload_bytes: int
    key_check: int
    checksum: bytes

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes


class Template(NamedTuple):
    """What the headers of a key's records have in common. Worth keeping: it costs more than the rest of a header."""

    before_length: bytes
    after_length: bytes
    padded_key: bytes

    @property
    def header_bytes(self) -> int:
        return FIXED_BYTES + len(self.padded_key)


def template_of(key: ObjectKey) -> Template:
    fields, padded_key = _fields(key, 0)
    after = fields[_PAYLOAD_LENGTH_AT + _PAYLOAD_LENGTH.size :]
    return Template(fields[:_PAYLOAD_LENGTH_AT], after, padded_key)


def header_bytes(key: ObjectKey) -> int:
    """How long the header of this key's record is."""
    return _padded(FIXED_BYTES + len(encode_key(key)))


def record_bytes(key: ObjectKey, payload_bytes: int) -> int:
    """How long the whole record is: what the key occupies in a store."""
    assert payload_bytes >= 0
    return header_bytes(key) + payload_bytes


def encode_header(key: ObjectKey, payload: memoryview | bytes) -> bytes:
    """The header to put before `payload` (contiguous bytes)."""
    fields, padded_key = _fields(key, len(payload))
    return _sealed(fields, padded_key, payload)


def header_by(template: Template, payload: memoryview | bytes) -> bytes:
    """`encode_header` of a key whose template is at hand."""
    before, after, padded_key = template
    return _sealed(before + _PAYLOAD_LENGTH.pack(len(payload)) + after, padded_key, payload)


def parse_header(head: memoryview | bytes) -> Header | Defect:
    """Judge the first bytes of a record by themselves (steps 1 and 2). The key is not compared."""
    if len(head) < FIXED_BYTES:
        return Defect.SHORT
    fixed = bytes(head[:FIXED_BYTES])
    magic, version, flags, length, payload_bytes, key_bytes, reserved, key_check = _FIELDS.unpack_from(fixed)
    if magic != MAGIC:
        return Defect.FOREIGN
    if version != FORMAT_VERSION or flags != 0:
        return Defect.STALE_VERSION
    if _CHECK.unpack_from(fixed, _CHECKED_BYTES)[0] != xxhash.xxh3_64_intdigest(fixed[:_CHECKED_BYTES]):
        return Defect.FLIPPED
    if length != _padded(FIXED_BYTES + key_bytes) or length > HEADER_BYTES_MAX or reserved != 0:
        return Defect.FLIPPED
    return Header(length, key_bytes, payload_bytes, key_check, fixed[_FIELDS_BYTES:_CHECKED_BYTES])


def check_record(key: ObjectKey, head: memoryview | bytes, payload: memoryview, bytes_read: int) -> Defect | None:
    """Judge a record that was read into `head` (`header_bytes(key)` long) and then `payload`.

    `bytes_read` is what `Files.read` answers: less than the buffers hold when the record is shorter, more when
    it is longer. None: the payload is the key's payload.
    """
    if bytes_read == len(head) + len(payload) and encode_header(key, payload) == head:
        return None
    header = parse_header(head[: min(bytes_read, len(head))])
    if isinstance(header, Defect):
        return header
    encoded = encode_key(key)
    assert len(head) == _padded(FIXED_BYTES + len(encoded))
    return (
        _key_defect(header, head, encoded, bytes_read)
        or _length_defect(header, len(payload), bytes_read)
        or _payload_defect(header, head, encoded, payload)
    )


def check_record_by(
    template: Template, key: ObjectKey, head: memoryview | bytes, payload: memoryview, bytes_read: int
) -> Defect | None:
    """`check_record` of a key whose template is at hand."""
    if bytes_read == len(head) + len(payload) and header_by(template, payload) == head:
        return None
    return check_record(key, head, payload, bytes_read)


def payload_matches(header: bytes, payload: memoryview) -> bool:
    """Step 6 alone, against a header that `encode_header` has made and its holder has kept safe since."""
    return _checksum(header[:_FIELDS_BYTES], header[FIXED_BYTES:], payload) == header[_FIELDS_BYTES:_CHECKED_BYTES]


def key_of(header: Header, head: memoryview | bytes) -> bytes | Defect:
    """The encoded key behind the fixed part, once it agrees with the header's key check."""
    if len(head) < header.header_bytes:
        return Defect.TORN
    encoded = bytes(head[FIXED_BYTES : FIXED_BYTES + header.key_bytes])
    if xxhash.xxh3_64_intdigest(encoded) != header.key_check:
        return Defect.FLIPPED
    return encoded


def object_key_of(header: Header, head: memoryview | bytes) -> ObjectKey | Defect:
    """The key behind the fixed part, if `encode_key` can have made it. Its place in a store is not checked here."""
    encoded = key_of(header, head)
    if isinstance(encoded, Defect):
        return encoded
    try:
        key = decode_key(encoded)
    except StoreError:
        return Defect.FOREIGN
    return key if encode_key(key) == encoded else Defect.FOREIGN


def _fields(key: ObjectKey, payload_bytes: int) -> tuple[bytes, bytes]:
    """The header's fields, and the key that follows its checks."""
    encoded = encode_key(key)
    padded_key = _with_padding(encoded)
    length = FIXED_BYTES + len(padded_key)
    assert length <= HEADER_BYTES_MAX, "the key length limit is enforced where keys are made"
    check = xxhash.xxh3_64_intdigest(encoded)
    return _FIELDS.pack(MAGIC, FORMAT_VERSION, 0, length, payload_bytes, len(encoded), 0, check), padded_key


def _sealed(fields: bytes, padded_key: bytes, payload: memoryview | bytes) -> bytes:
    checked = fields + _checksum(fields, padded_key, payload)
    assert len(checked) == _CHECKED_BYTES
    return checked + _CHECK.pack(xxhash.xxh3_64_intdigest(checked)) + padded_key


def _key_defect(header: Header, head: memoryview | bytes, encoded: bytes, bytes_read: int) -> Defect | None:
    if header.key_bytes != len(encoded) or header.key_check != xxhash.xxh3_64_intdigest(encoded):
        return Defect.FOREIGN
    if bytes_read < header.header_bytes:
        return Defect.TORN
    return None if bytes(head[FIXED_BYTES:]) == _with_padding(encoded) else Defect.FLIPPED


def _length_defect(header: Header, room_bytes: int, bytes_read: int) -> Defect | None:
    if bytes_read < header.record_bytes and bytes_read <= header.header_bytes + room_bytes:
        return Defect.TORN  # the whole file was seen and it ends too early
    if header.payload_bytes == room_bytes:
        return None if bytes_read == header.record_bytes else Defect.LONG
    if header.payload_bytes < room_bytes and bytes_read > header.record_bytes:
        return Defect.LONG
    return Defect.OTHER_SIZE


def _payload_defect(header: Header, head: memoryview | bytes, encoded: bytes, payload: memoryview) -> Defect | None:
    assert len(payload) == header.payload_bytes
    found = _checksum(bytes(head[:_FIELDS_BYTES]), _with_padding(encoded), payload)
    return None if found == header.checksum else Defect.FLIPPED


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _with_padding(encoded: bytes) -> bytes:
    return encoded + _PADDING[: -len(encoded) % _ALIGNMENT_BYTES]  # the fixed part is a multiple itself


def _checksum(fields: bytes, padded_key: bytes, payload: memoryview | bytes) -> bytes:
    state = xxhash.xxh3_128(fields + padded_key)
    state.update(payload)
    return state.digest()

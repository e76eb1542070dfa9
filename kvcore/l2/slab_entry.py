"""One entry of a slab store's index: where a record's payload lies, and the record's envelope. Pure.

An entry occupies whole slots of `SLOT_BYTES`, one behind the other. Layout (little endian):

    offset  bytes  field
         0      8  magic
         8      4  entry length, without the padding to a whole slot
        12      4  number of runs
        16      8  sequence number: later entries of a store have greater ones
        24      8  entry check: xxh3_64, seeded with the store's own random number, of bytes 0..23 and all that follows
        32    8*r  runs of pages: first page, number of pages, as uint32
      32+8*r    n  the header of `kvcore.l2.envelope`: lengths, full key, checksum of the payload

A slot of zeros is free. The seed keeps entries apart that an earlier store has left in the same blocks of the disk, and
those that somebody writes into a name or a payload: nobody outside the directory knows it. It is no secret against
those who can read the directory.

An entry is written in one piece behind its payload, and erased in one piece before its room is used again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import starmap

import xxhash

from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.envelope import Defect, Header
from kvcore.l2.slab_space import Run

MAGIC = b"KVSLABE1"
SLOT_BYTES = 256
PAGE_BYTES = 4096

_HEAD = struct.Struct("<8sIIQQ")
_CHECKED = struct.Struct("<8sIIQ")
_CHECK = struct.Struct("<Q")
_RUN = struct.Struct("<II")
_CHECK_AT = _CHECKED.size
_HEAD_BYTES = _HEAD.size
ENTRY_BYTES_MORE = _HEAD.size + _RUN.size
"""What an entry of one run holds besides its header."""

_ZEROS = bytes(SLOT_BYTES)
ENTRY_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    key: ObjectKey
    payload_bytes: int
    runs: tuple[Run, ...]
    sequence: int
    header: bytes


def pages_for(payload_bytes: int) -> int:
    """Whole pages; an empty payload has one too, so that every record has a place of its own."""
    return max(1, -(-payload_bytes // PAGE_BYTES))


def slots_for(header_bytes: int, runs: int = 1) -> int:
    return -(-(_HEAD.size + _RUN.size * runs + header_bytes) // SLOT_BYTES)


def encode_entry(header: bytes, runs: tuple[Run, ...], sequence: int, seed: int) -> bytes:
    """The entry, padded to whole slots."""
    body = _RUN.pack(*runs[0]) + header if len(runs) == 1 else b"".join([*starmap(_RUN.pack, runs), header])
    length = _HEAD_BYTES + len(body)
    checked = _CHECKED.pack(MAGIC, length, len(runs), sequence)
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(checked + body, seed))
    return b"".join((checked, check, body, _ZEROS[: -length % SLOT_BYTES]))


def entry_slots(start: memoryview) -> int | Defect:
    """How many slots the entry claims that begins here; the claim is not checked yet."""
    magic, length, _, _, _ = _HEAD.unpack_from(start)
    if magic != MAGIC:
        return Defect.FOREIGN
    if not _HEAD.size + envelope.FIXED_BYTES <= length <= ENTRY_BYTES_MAX:
        return Defect.FLIPPED
    return -(-int(length) // SLOT_BYTES)


def decode_entry(data: memoryview, seed: int) -> Entry | Defect:
    """Judge the entry that `entry_slots` found, from all its slots."""
    _, length, run_count, sequence, check = _HEAD.unpack_from(data)
    if len(data) < length:
        return Defect.TORN
    entry = bytes(data[:length])
    if check != xxhash.xxh3_64_intdigest(entry[:_CHECK_AT] + entry[_HEAD.size :], seed):
        return Defect.FLIPPED
    header_at = _HEAD.size + _RUN.size * run_count
    runs = tuple(Run(*pair) for pair in _RUN.iter_unpack(entry[_HEAD.size : header_at]))
    header = envelope.parse_header(entry[header_at:])
    if isinstance(header, Defect):
        return header
    return _entry(header, entry[header_at:], runs, sequence)


def _entry(header: Header, encoded_header: bytes, runs: tuple[Run, ...], sequence: int) -> Entry | Defect:
    key = envelope.object_key_of(header, encoded_header)
    if isinstance(key, Defect):
        return key
    if len(encoded_header) != header.header_bytes:
        return Defect.FOREIGN
    if sum(run.count for run in runs) != pages_for(header.payload_bytes) or not all(run.count for run in runs):
        return Defect.FLIPPED
    return Entry(key, header.payload_bytes, runs, sequence, encoded_header)

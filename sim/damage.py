"""What can be wrong with a stored record: pure functions from the bytes of one to the bytes of a bad one.

Each answer is something that a disk or a store has been seen to give back, and each must be met as a clean miss. The
payload of a record keeps its length wherever that makes the damage harder to see.

Nothing is held, nothing is drawn: `place` numbers say where, and are reduced to what fits.
"""

from __future__ import annotations

from kvcore.keys import ObjectKey
from kvcore.l2 import envelope

_VERSION_OFFSET = 8


def flip_header(key: ObjectKey, record: bytes, place: int) -> bytes:
    """One bit of the header, its key included, is another one. An empty file stays what it is."""
    room = 8 * min(envelope.header_bytes(key), len(record))
    return _flip(record, place % room) if room > 0 else record


def flip_payload(key: ObjectKey, record: bytes, place: int) -> bytes:
    """One bit of the payload is another one. A record without a payload stays what it is."""
    start = 8 * envelope.header_bytes(key)
    room = 8 * len(record) - start
    return _flip(record, start + place % room) if room > 0 else record


def tear(key: ObjectKey, record: bytes, place: int) -> bytes:
    """The end of the record is missing; perhaps all of it."""
    return record[: place % max(1, len(record))]


def zero_tail(key: ObjectKey, record: bytes, place: int) -> bytes:
    """The record has its length, but its end never reached the disk."""
    end = place % max(1, len(record))
    return record[:end] + bytes(len(record) - end)


def older_format(key: ObjectKey, record: bytes, place: int) -> bytes:
    """The record as an earlier version of the format would have it."""
    version = (envelope.FORMAT_VERSION - 1).to_bytes(2, "little")
    return record[:_VERSION_OFFSET] + version + record[_VERSION_OFFSET + 2 :]


def older_record(key: ObjectKey, record: bytes, place: int) -> bytes:
    """An intact record of the same key from a time when its objects were shorter."""
    payload = _payload(key, record)
    return _record(key, payload[: len(payload) - 1 - place % len(payload)]) if payload else record


def of_model(key: ObjectKey, record: bytes, place: int) -> bytes:
    """The record that another model has under this name."""
    return _record(key._replace(model_name=_other(key.model_name)), _shifted(_payload(key, record)))


def of_salt(key: ObjectKey, record: bytes, place: int) -> bytes:
    """The record that another tenant has under this name."""
    return _record(key._replace(cache_salt=_other(key.cache_salt)), _shifted(_payload(key, record)))


def _flip(record: bytes, bit: int) -> bytes:
    changed = bytearray(record)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def _payload(key: ObjectKey, record: bytes) -> bytes:
    return record[envelope.header_bytes(key) :]


def _record(key: ObjectKey, payload: bytes) -> bytes:
    return envelope.encode_header(key, payload) + payload


def _other(name: str) -> str:
    """Another name of the same length, so that the records are as long as ours."""
    return name[:-1] + ("a" if name[-1:] != "a" else "b") if name else "b"


def _shifted(payload: bytes) -> bytes:
    """Other bytes: whoever takes them for the right ones is seen."""
    return bytes((value + 1) % 256 for value in payload)

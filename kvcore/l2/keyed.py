"""The keyed envelope: only who has the key can write a record that is believed.

The usual envelope finds accidents. Whoever can write the store can write a well-formed record and serve wrong KV to a
model. With `key_file=PATH` each payload carries a keyed BLAKE3 over the whole object key and the payload; what does not
agree is a miss (FOREIGN) and is removed. Contents are not hidden: this is authentication, not encryption.

    offset  size
     0       4   magic "KVCK"
     4       4   version, little-endian
     8       8   which key: derived from the key, so that another key is told from a forgery in a dump
    16      32   BLAKE3, keyed: over the length of the encoded object key, the encoded object key and the payload

A replayed record of the same key is the same KV, and a record of another key does not agree, so no counter is needed.
All processes that share a store share the key file. Records made without it, or with another key, are misses; give a
new key a new prefix or directory if the old records shall stay.

The key file holds at least 32 bytes and must be readable by its owner alone. Two keys are derived from it, one for
records and one for the name, so the file may serve other purposes too.

Who holds: this object the derived keys, for as long as the store is open. They appear in no text.
"""

from __future__ import annotations

import hmac
import os
import stat
import struct
from collections.abc import Sequence

from blake3 import blake3

from kvcore.errors import ConfigError
from kvcore.keys import ObjectKey, encode_key
from kvcore.l2.envelope import Defect

FRAME_BYTES = 48
_HEAD = struct.Struct("<4sI8s")
_LENGTH = struct.Struct("<I")
_MAGIC = b"KVCK"
_VERSION = 1
_SECRET_BYTES_MIN = 32
_SECRET_BYTES_MAX = 1 << 20


class KeyedCodec:
    """`kvcore.l2.coded.Codec`; see the module text."""

    frame_bytes = FRAME_BYTES

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _SECRET_BYTES_MIN:
            raise ConfigError(f"the key for records holds {len(secret)} bytes; {_SECRET_BYTES_MIN} are the least")
        self._key = blake3(secret, derive_key_context="kvcore record authentication v1").digest()
        name = blake3(secret, derive_key_context="kvcore record key name v1").digest(length=8)
        self._head = _HEAD.pack(_MAGIC, _VERSION, name)

    @classmethod
    def from_file(cls, path: str) -> KeyedCodec:
        """ConfigError: it cannot be read, others can read it, or it is too short."""
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                secret = file.read(_SECRET_BYTES_MAX)
        except OSError as error:
            raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"the key file {path} can be read or written by others; chmod 600 makes it yours alone")
        return cls(secret)

    def __repr__(self) -> str:
        return "KeyedCodec(***)"

    def bytes_max(self, key: ObjectKey, payload_bytes: int) -> int:
        return FRAME_BYTES + payload_bytes

    def lengths(self, key: ObjectKey, payload_bytes: int) -> Sequence[int]:
        return [FRAME_BYTES + payload_bytes]

    def payload_bytes(self, stored_bytes: int, frame: memoryview) -> int | None:
        return None if stored_bytes < FRAME_BYTES else stored_bytes - FRAME_BYTES

    def encode(self, key: ObjectKey, payload: memoryview) -> bytes | bytearray:
        return b"".join([self._head, self._mark(key, payload), payload])

    def decode(self, key: ObjectKey, stored: memoryview, into: memoryview) -> Defect | None:
        if len(stored) < FRAME_BYTES:
            return Defect.SHORT
        payload = stored[FRAME_BYTES:]
        if len(payload) != len(into):
            return Defect.OTHER_SIZE
        if stored[: _HEAD.size] != self._head:
            return Defect.FOREIGN
        if not hmac.compare_digest(stored[_HEAD.size : FRAME_BYTES], self._mark(key, payload)):
            return Defect.FOREIGN
        into[:] = payload
        return None

    def _mark(self, key: ObjectKey, payload: memoryview) -> bytes:
        encoded = encode_key(key)
        state = blake3(_LENGTH.pack(len(encoded)) + encoded, key=self._key)
        state.update(payload)
        return state.digest()

"""Codecs that make payloads smaller: `zstd`, which gives every byte back, and `fp8`, which does not.

Frame, little-endian, 32 bytes, in front of the body:

    offset  size
     0       4   magic "KVCZ"
     4       1   version
     5       1   method: 0 as it was, 1 zstd, 2 zstd of separated byte planes, 3 fp8
     6       2   zero
     8       8   payload length
    16       8   body length, without padding
    24       8   XXH3-64 of bytes 0 to 24

zstd. KV in a 2-byte type hardly compresses as it is: the mantissa bytes are noise. With all high bytes first and all
low bytes after them, signs and exponents compress by themselves. What does not get smaller is stored as it was. The
body is padded to a whole number of eighths of the payload, so that a reader, who knows the payload's length, has eight
lengths to try instead of thousands; the last one that fitted a payload of this length is tried first.

fp8. bfloat16 values become float8_e4m3 with one float32 scale per 128 values, the greatest magnitude of the group at
the top of the range: 33/64 of the bytes. *This changes the values*, like a cache that was quantised; the engine's
answers may change with it. NaN stays NaN, infinities become the greatest value. A payload that is no whole number of
groups is stored as it was. Needs torch.

Hostile input: a frame is believed only if it agrees with the caller's length; a body is never expanded beyond it.

Who holds: nobody; compressors are kept per thread.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from kvcore.errors import ConfigError
from kvcore.keys import ObjectKey
from kvcore.l2.envelope import Defect

FRAME_BYTES = 32
_FRAME = struct.Struct("<4sBBHQQQ")
_CHECKED_BYTES = 24
_MAGIC = b"KVCZ"
_VERSION = 1
_AS_IT_WAS, _ZSTD, _ZSTD_PLANES, _FP8 = range(4)
_PARTS = 8
_ZSTD_LEVEL = 1  # the fastest: a store's link is faster than the higher ones

_GROUP_VALUES = 128
_GROUP_BYTES = 2 * _GROUP_VALUES
_GROUP_STORED_BYTES = _GROUP_VALUES + 4
_FP8_MAX = 448.0  # the greatest float8_e4m3fn

assert _FRAME.size == FRAME_BYTES


def _frame(method: int, payload_bytes: int, body_bytes: int) -> bytes:
    fields = _FRAME.pack(_MAGIC, _VERSION, method, 0, payload_bytes, body_bytes, 0)[:_CHECKED_BYTES]
    return fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


def _parse(frame: memoryview) -> tuple[int, int, int] | Defect:
    """(method, payload length, body length) of a frame whose check has passed."""
    if len(frame) < FRAME_BYTES:
        return Defect.SHORT
    magic, version, method, zero, payload_bytes, body_bytes, check = _FRAME.unpack_from(frame)
    if magic != _MAGIC:
        return Defect.FOREIGN
    if version != _VERSION or zero != 0:
        return Defect.STALE_VERSION
    return (method, payload_bytes, body_bytes) if check == _check_of(frame) else Defect.FLIPPED


def _check_of(frame: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(frame[:_CHECKED_BYTES])


class _Framed:
    """What both codecs share."""

    frame_bytes = FRAME_BYTES

    def bytes_max(self, key: ObjectKey, payload_bytes: int) -> int:
        return FRAME_BYTES + payload_bytes

    def payload_bytes(self, stored_bytes: int, frame: memoryview) -> int | None:
        parsed = _parse(frame)
        return None if isinstance(parsed, Defect) or stored_bytes < FRAME_BYTES else parsed[1]

    def decode(self, key: ObjectKey, stored: memoryview, into: memoryview) -> Defect | None:
        parsed = _parse(stored)
        if isinstance(parsed, Defect):
            return parsed
        method, payload_bytes, body_bytes = parsed
        if payload_bytes != len(into):
            return Defect.OTHER_SIZE
        if FRAME_BYTES + body_bytes > len(stored):
            return Defect.FLIPPED
        body = stored[FRAME_BYTES : FRAME_BYTES + body_bytes]
        return self._unpack(method, body, into)

    def _unpack(self, method: int, body: memoryview, into: memoryview) -> Defect | None:
        if method != _AS_IT_WAS or len(body) != len(into):
            return Defect.FLIPPED
        into[:] = body
        return None


class _Compressors(threading.local):
    """One pair per thread: they are not made for two at once."""

    def __init__(self, zstandard: Any) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


class ZstdCodec(_Framed):
    """See the module text. ConfigError when the library is not installed."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise ConfigError("compress=zstd needs the zstandard library: pip install 'kvcore[compress]'") from None
        self._error = zstandard.ZstdError
        self._per_thread = _Compressors(zstandard)
        self._last_parts: dict[int, int] = {}  # payload length -> parts of the last one; any thread may write it

    def lengths(self, key: ObjectKey, payload_bytes: int) -> Sequence[int]:
        last = self._last_parts.get(payload_bytes, _PARTS)
        order = sorted(range(1, _PARTS + 1), key=lambda parts: abs(parts - last))
        return list(dict.fromkeys(FRAME_BYTES + _part_bytes(payload_bytes, parts) for parts in order))

    def encode(self, key: ObjectKey, payload: memoryview) -> bytes | bytearray:
        planes = len(payload) > 0 and len(payload) % 2 == 0
        body: bytes | memoryview = self._per_thread.compressor.compress(_separated(payload) if planes else payload)
        method = _ZSTD_PLANES if planes else _ZSTD
        parts = next(parts for parts in range(1, _PARTS + 1) if parts == _PARTS or len(body) <= _room(payload, parts))
        if parts == _PARTS:
            method, body = _AS_IT_WAS, payload
        self._last_parts[len(payload)] = parts
        encoded = bytearray(FRAME_BYTES + _part_bytes(len(payload), parts))
        encoded[:FRAME_BYTES] = _frame(method, len(payload), len(body))
        encoded[FRAME_BYTES : FRAME_BYTES + len(body)] = body
        return encoded

    def decode(self, key: ObjectKey, stored: memoryview, into: memoryview) -> Defect | None:
        defect = super().decode(key, stored, into)
        if defect is None and into:
            body_bytes = len(stored) - FRAME_BYTES
            self._last_parts[len(into)] = min(_PARTS, -(-body_bytes * _PARTS // len(into)))
        return defect

    def _unpack(self, method: int, body: memoryview, into: memoryview) -> Defect | None:
        if method not in (_ZSTD, _ZSTD_PLANES):
            return super()._unpack(method, body, into)
        planes = method == _ZSTD_PLANES
        if planes and (not into or len(into) % 2):
            return Defect.FLIPPED
        target = memoryview(bytearray(len(into))) if planes else into
        if not self._expand(body, target):
            return Defect.FLIPPED
        if planes:
            _join(target, into)
        return None

    def _expand(self, body: memoryview, target: memoryview) -> bool:
        """Fill `target` exactly; anything longer or shorter is not what was stored."""
        try:
            with self._per_thread.decompressor.stream_reader(body) as reader:
                return _fill(reader, target) and not reader.read(1)
        except self._error:
            return False


def _fill(reader: Any, target: memoryview) -> bool:
    done = 0
    while done < len(target):
        count = reader.readinto(target[done:])
        if not count:
            return False
        done += count
    return True


def _part_bytes(payload_bytes: int, parts: int) -> int:
    return min(payload_bytes, parts * -(-payload_bytes // _PARTS))


def _room(payload: memoryview, parts: int) -> int:
    return _part_bytes(len(payload), parts)


def _separated(payload: memoryview) -> memoryview:
    """All first bytes of the 2-byte values, then all second ones."""
    return np.ascontiguousarray(np.frombuffer(payload, np.uint8).reshape(-1, 2).T).data.cast("B")


def _join(planes: memoryview, into: memoryview) -> None:
    np.frombuffer(into, np.uint8).reshape(-1, 2)[:] = np.frombuffer(planes, np.uint8).reshape(2, -1).T


class Fp8Codec(_Framed):
    """See the module text. ConfigError when torch is not installed."""

    def __init__(self) -> None:
        try:
            import torch
        except ImportError:
            raise ConfigError("compress=fp8 needs torch: pip install 'kvcore[torch]'") from None
        self._torch = torch

    def lengths(self, key: ObjectKey, payload_bytes: int) -> Sequence[int]:
        return [FRAME_BYTES + (_fp8_bytes(payload_bytes) or payload_bytes)]

    def encode(self, key: ObjectKey, payload: memoryview) -> bytes | bytearray:
        body_bytes = _fp8_bytes(len(payload))
        if not body_bytes:
            return b"".join([_frame(_AS_IT_WAS, len(payload), len(payload)), payload])
        encoded = bytearray(FRAME_BYTES + body_bytes)
        encoded[:FRAME_BYTES] = _frame(_FP8, len(payload), body_bytes)
        self._quantise(payload, memoryview(encoded)[FRAME_BYTES:])
        return encoded

    def _unpack(self, method: int, body: memoryview, into: memoryview) -> Defect | None:
        if method != _FP8:
            return super()._unpack(method, body, into)
        if len(body) != _fp8_bytes(len(into)):
            return Defect.FLIPPED
        self._restore(body, into)
        return None

    def _quantise(self, payload: memoryview, body: memoryview) -> None:
        torch = self._torch
        source = torch.from_numpy(np.frombuffer(payload, np.int16).copy()).view(torch.bfloat16)
        groups = source.to(torch.float32).nan_to_num(nan=float("nan"), posinf=_TOP, neginf=-_TOP)
        groups = groups.reshape(-1, _GROUP_VALUES)
        peak = groups.abs().nan_to_num(nan=0.0).amax(dim=1, keepdim=True)
        scales = torch.where(peak > 0, peak / _FP8_MAX, torch.ones_like(peak))
        values = (groups / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        split = 4 * len(scales)
        np.frombuffer(body[:split], np.float32)[:] = scales.reshape(-1).numpy()
        np.frombuffer(body[split:], np.uint8)[:] = values.reshape(-1).numpy()

    def _restore(self, body: memoryview, into: memoryview) -> None:
        torch = self._torch
        split = 4 * (len(into) // _GROUP_BYTES)
        scales = torch.from_numpy(np.frombuffer(body[:split], np.float32).copy()).reshape(-1, 1)
        values = torch.from_numpy(np.frombuffer(body[split:], np.uint8).copy()).view(torch.float8_e4m3fn)
        restored = values.to(torch.float32).reshape(-1, _GROUP_VALUES) * scales
        np.frombuffer(into, np.int16)[:] = restored.to(torch.bfloat16).reshape(-1).view(torch.int16).numpy()


_TOP = 3.0e38  # below the greatest bfloat16, so that nothing overflows on the way back


def _fp8_bytes(payload_bytes: int) -> int:
    """0: it is no whole number of groups and stays as it was."""
    groups, rest = divmod(payload_bytes, _GROUP_BYTES)
    return 0 if rest else groups * _GROUP_STORED_BYTES

"""What belongs under which key. Loaded by path: by the fixtures of `conftest.py` and by `churn.py`."""

from __future__ import annotations

from kvcore.keys import ObjectKey


def key(number, salt=""):
    return ObjectKey(number.to_bytes(32, "big"), "model", 0, 0, salt)


def content(number, size):
    """Bytes that differ from place to place and from key to key, so that nothing can be mistaken for anything else."""
    words = b"".join((number << 32 | word).to_bytes(8, "little") for word in range(size // 8 + 1))
    return words[:size]

"""How the object of a key is named in an object store, and how a listing is read back.

    <prefix>/<2 hex digits>/k<base32 of the whole key>.kv      keys of up to `NAMED_KEY_BYTES_MAX` bytes: nearly all
    <prefix>/<2 hex digits>/<key text>.kv                      longer ones (`kvcore.keys.key_text`)
    <prefix>/kvcore-l2.json                                    the marker

The two digits begin the key's digest and spread the objects over the store's partitions. With the key in the name a
listing of 1,000 objects says in one request which keys they hold; with a digest alone each header has to be read.
The alphabet is a-z and 2-7 in one case, so file systems that fold case do no harm, and a segment stays below the 255
bytes that they allow. A name is a claim: what an object holds is known when its header has been checked.

Rejected: the key in metadata (listings do not show it); base64 (needs two cases). A tenant's salt can be read in the
name, as it can in every record's header: salts are names, not secrets.

Nothing here does I/O; names are plain values.
"""

from __future__ import annotations

import base64
import re

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey, decode_key, encode_key, key_text

MARKER_NAME = "kvcore-l2.json"
NAMED_KEY_BYTES_MAX = 140  # 224 letters: with "k" and ".kv" below 255

_NAMED = re.compile(r"[0-9a-f]{2}/k([a-z2-7]+)\.kv", re.ASCII)
_DIGESTED = re.compile(r"([0-9a-f]{2})/\1[A-Za-z0-9_-]+\.kv", re.ASCII)


def object_name(key: ObjectKey) -> str:
    """Where the record of `key` lies below the prefix. Equal for equal keys, different for different ones."""
    text = key_text(key)
    encoded = encode_key(key)
    if len(encoded) > NAMED_KEY_BYTES_MAX:
        return f"{text[:2]}/{text}.kv"
    return f"{text[:2]}/k{base64.b32encode(encoded).decode().rstrip('=').lower()}.kv"


def key_of_name(name: str) -> ObjectKey | None:
    """The key that the name claims. None: the name does not say, or it is not one of ours."""
    match = _NAMED.fullmatch(name)
    if match is None:
        return None
    letters = match[1].upper()
    try:
        key = decode_key(base64.b32decode(letters + "=" * (-len(letters) % 8)))
        return key if object_name(key) == name else None
    except (ValueError, StoreError):  # binascii.Error is a ValueError, and so is what a key beyond its limits raises
        return None


def needs_header(name: str) -> bool:
    """Whether the object may be a record whose key only its header can tell."""
    return _DIGESTED.fullmatch(name) is not None


def joined(prefix: str, name: str) -> str:
    """The whole path in the store."""
    return f"{prefix}/{name}" if prefix else name


def below(prefix: str, path: str) -> str:
    """The inverse of `joined`; a path from elsewhere comes back as it is."""
    return path[len(prefix) + 1 :] if prefix and path.startswith(prefix + "/") else path

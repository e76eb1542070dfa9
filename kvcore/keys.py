"""Identity: which bytes belong under which name.

Theory of operation
-------------------
A *chunk* is `chunk_tokens` consecutive tokens; a trailing partial chunk has no key. KV of a chunk depends on every
token before it and on everything else that shapes the bytes. So:

1. A `Namespace` holds everything besides the tokens: model name and revision, KV dtype, layout fingerprint,
   quantisation, adapter, chunk size, hash mode and, for hashes taken from the engine, its algorithm and seed. Its
   digest is BLAKE3 (derive-key mode, context naming the version) over the fields, each as name, type and value with
   lengths in front: an adapter "S" and a revision "S" cannot be mistaken for each other.
2. h[-1] = namespace digest;  h[i] = BLAKE3(message of chunk i, key = h[i-1]).  The previous hash goes in as the *key*
   of the keyed mode and not as a prefix, so that 1,024 bytes of tokens stay one BLAKE3 chunk.
3. The message is the tokens as little-endian uint32, exactly 4 * chunk_tokens bytes, followed by the extras that
   begin in this chunk: (offset in the chunk, length, id length) as uint32 and the id, in sorted order. The token part
   has a fixed length (the chunk size is in the namespace) and every extra carries its own, so the encoding is
   injective; a chunk without extras costs nothing. The chain carries an extra on to all later chunks.
4. Mode "engine" hashes nothing twice: the message is the engine's block size and the hash of the chunk's last block.
5. `hash_tokens` returns the hashes of all full chunks. `known` hashes are taken over as the first ones.

Token lists are checked while they are converted. `array` refuses floats, None and numbers outside [0, 2**32) at C
speed; a bool passes it as 0 or 1, so only places that hold 0 or 1 are looked at again.

An `ObjectKey` names one cell. Its text form (`key_text`) is BLAKE3 over the whole encoded key plus a readable hint, so
any bytes in a model name or salt are harmless in file, Redis and object names. Two keys with one text would need a
collision of 256 bits; a record still carries `encode_key(key)`, and the reader compares.

Rejected: Python's `hash` (differs per process); prefixing h[i-1] to the message (a second BLAKE3 chunk for a 32-byte
tail); numpy for lists (truncates floats silently, three times slower than `array`); escaped names as key text (grow
beyond the 255 bytes that file systems allow).

Nothing here knows the time, and nothing is held: keys and namespaces are plain immutable values.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvcore.errors import CallerError, ConfigError, StoreError

HASH_VERSION = 1
"""Part of every namespace. Raise it whenever the same tokens would give other hashes."""

HASH_BYTES = 32
TOKEN_LIMIT = 2**32
CHUNK_HASH_BYTES_MAX = 255
NAME_BYTES_MAX = 4096
"""Limit of a model name and of a salt, in UTF-8 bytes."""

KEY_TEXT_CHARS_MAX = 200
_HINT_CHARS_MAX = 48

Extra: TypeAlias = tuple[int, int, bytes]
"""(offset_tokens, length_tokens, content_id) of something that stands behind placeholder tokens, e.g. an image."""

Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.uint32]
HashMode = Literal["tokens", "engine"]

_NO_TOKENS = (str, bytes, bytearray, memoryview)  # sequences, and of small numbers at that, but surely not tokens
_BOOLS = frozenset({bool, np.bool})

_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<q")
_EXTRA_HEAD = struct.Struct("<III")
_KEY_HEAD = struct.Struct("<BBIIHH")  # version, hash bytes, rank, group, model bytes, salt bytes
_KEY_VERSION = 1
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")

# Engine algorithms whose start value or whole result differs per process unless a seed is set.
_RANDOM_PER_PROCESS = ("xxh", "builtin", "python")


class ObjectKey(NamedTuple):
    """The name of one cell: a chunk of one object group on one rank, for one tenant."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


# tuple.__new__ runs without a Python frame per key: a third cheaper than calling the class
_make_key: Callable[[tuple[bytes, str, int, int, str]], ObjectKey] = partial(tuple.__new__, ObjectKey)


def digest_fields(purpose: str, fields: Mapping[str, str | int]) -> bytes:
    """32 bytes over named, typed, length-prefixed values; no two different inputs encode alike."""
    parts: list[bytes] = [_LENGTH.pack(len(fields))]
    for name, value in fields.items():
        parts.append(_sized(name.encode()))
        parts.append(_typed(name, value))
    return blake3(b"".join(parts), derive_key_context=f"kvcore {purpose} v{HASH_VERSION}").digest()


def _typed(name: str, value: str | int) -> bytes:
    if type(value) is str:
        return b"s" + _sized(_utf8(value))
    if type(value) is int and -(2**63) <= value < 2**63:
        return b"i" + _NUMBER.pack(value)
    raise ConfigError(f"{name} must be text or a 64-bit whole number, not {value!r}")


def _sized(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _utf8(text: str) -> bytes:
    # surrogatepass: names from the command line may hold lone surrogates; they encode injectively and never fail
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides the tokens that changes the stored bytes. Two namespaces share no chunk hash.

    `layout` is `CacheLayout.fingerprint`; `adapter` a LoRA id. With `hash_mode="engine"` the engine's block hashes are
    the source, and `engine_algorithm` and `engine_seed` say how they were made.
    """

    model_name: str
    model_revision: str = ""
    kv_dtype: str = ""
    layout: str = ""
    quantisation: str = ""
    adapter: str = ""
    chunk_tokens: int = 256
    hash_mode: HashMode = "tokens"
    engine_algorithm: str = ""
    engine_seed: str = ""
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.hash_mode not in ("tokens", "engine"):
            raise ConfigError(f"hash_mode must be 'tokens' or 'engine', not {self.hash_mode!r}")
        if type(self.chunk_tokens) is not int or self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be a whole number of at least 1, not {self.chunk_tokens!r}")
        digest = digest_fields("namespace", self._fields())
        assert len(digest) == HASH_BYTES
        object.__setattr__(self, "digest", digest)

    def _fields(self) -> dict[str, str | int]:
        return {
            "hash_version": HASH_VERSION,
            "model_name": self.model_name,
            "model_revision": self.model_revision,
            "kv_dtype": self.kv_dtype,
            "layout": self.layout,
            "quantisation": self.quantisation,
            "adapter": self.adapter,
            "chunk_tokens": self.chunk_tokens,
            "hash_mode": self.hash_mode,
            "engine_algorithm": self.engine_algorithm,
            "engine_seed": self.engine_seed,
        }

    def check_persistent(self) -> None:
        """Raise ConfigError when these hashes mean nothing to the next process; stores that outlive one call this."""
        if self.hash_mode != "engine":
            return
        if not self.engine_algorithm:
            raise ConfigError(
                "the engine's hash algorithm is not named, so its hashes cannot be trusted after a restart; "
                "set engine_algorithm, or use hash_mode 'tokens'"
            )
        if self.engine_algorithm.lower().startswith(_RANDOM_PER_PROCESS) and not self.engine_seed:
            raise ConfigError(
                f"engine hash {self.engine_algorithm!r} without a seed differs in every process, so a store that "
                "outlives the process would never hit; set PYTHONHASHSEED for the engine and pass it as engine_seed, "
                "or use hash_mode 'tokens'"
            )


class ChunkHasher:
    """Hashes the chunks of requests of one namespace. Holds no state between calls: one may serve everybody."""

    __slots__ = ("_digest", "chunk_tokens", "namespace")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.chunk_tokens = namespace.chunk_tokens
        self._digest = namespace.digest

    def hash_tokens(self, tokens: Tokens, *, known: Sequence[bytes] = (), extras: Sequence[Extra] = ()) -> list[bytes]:
        """Hashes of all full chunks of `tokens`; a trailing partial chunk is ignored.

        `known`: hashes of the first chunks from an earlier call with the same tokens and extras; not computed again.
        `extras`: enter with the first chunk they touch, in any order.
        """
        self._require_mode("tokens")
        _require_row(tokens)
        chunks = len(tokens) // self.chunk_tokens
        hashes = self._begin(known, chunks)
        suffixes = self._extras_by_chunk(extras) if extras else {}
        if len(hashes) == chunks:
            return hashes
        data = _token_bytes(tokens, len(hashes) * self.chunk_tokens, chunks * self.chunk_tokens)
        self._extend(hashes, data, suffixes)
        assert len(hashes) == chunks
        return hashes

    def hash_blocks(
        self, block_hashes: Sequence[bytes], block_tokens: int, *, known: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Hashes of all full chunks from the engine's chained block hashes, by the last block of each chunk."""
        self._require_mode("engine")
        if type(block_tokens) is not int or block_tokens < 1 or self.chunk_tokens % block_tokens:
            raise CallerError(
                f"a chunk of {self.chunk_tokens} tokens is no whole number of engine blocks of {block_tokens!r} tokens"
            )
        step = self.chunk_tokens // block_tokens
        hashes = self._begin(known, len(block_hashes) // step)
        head = _LENGTH.pack(block_tokens)
        previous = hashes[-1] if hashes else self._digest
        for block_hash in block_hashes[(len(hashes) + 1) * step - 1 :: step]:
            previous = blake3(head + _block_hash_bytes(block_hash), key=previous).digest()
            hashes.append(previous)
        return hashes

    def _require_mode(self, mode: HashMode) -> None:
        if self.namespace.hash_mode != mode:
            raise CallerError(f"this namespace hashes by {self.namespace.hash_mode!r}, the call was made for {mode!r}")

    def _begin(self, known: Sequence[bytes], chunks: int) -> list[bytes]:
        """A fresh list that begins with the known hashes, which continue the chain."""
        if len(known) > chunks:
            raise CallerError(f"{len(known)} chunk hashes are given as known, but there are only {chunks} full chunks")
        if known and (type(known[-1]) is not bytes or len(known[-1]) != HASH_BYTES):
            raise CallerError(f"a known chunk hash must be {HASH_BYTES} bytes, not {known[-1]!r}")
        return list(known)

    def _extend(self, hashes: list[bytes], data: memoryview, suffixes: Mapping[int, bytes]) -> None:
        """Continue the chain over `data`, whole chunks of encoded tokens."""
        size = 4 * self.chunk_tokens
        assert len(data) % size == 0
        previous = hashes[-1] if hashes else self._digest
        for start in range(0, len(data), size):
            message: bytes | memoryview = data[start : start + size]
            if suffixes:
                message = bytes(message) + suffixes.get(len(hashes), b"")
            previous = blake3(message, key=previous).digest()
            hashes.append(previous)

    def _extras_by_chunk(self, extras: Sequence[Extra]) -> dict[int, bytes]:
        """The encoded extras of every chunk in which one begins."""
        suffixes: dict[int, bytes] = {}
        for offset, length, content_id in sorted(map(_checked_extra, extras)):
            chunk, inside = divmod(offset, self.chunk_tokens)
            encoded = _EXTRA_HEAD.pack(inside, length, len(content_id)) + content_id
            suffixes[chunk] = suffixes.get(chunk, b"") + encoded
        return suffixes


def _block_hash_bytes(block_hash: bytes) -> bytes:
    if type(block_hash) is not bytes or not block_hash:
        raise CallerError(f"an engine block hash must be non-empty bytes, not {block_hash!r}")
    return block_hash


def _checked_extra(extra: Extra) -> Extra:
    offset, length, content_id = extra
    if type(offset) is not int or not 0 <= offset < TOKEN_LIMIT:
        raise CallerError(f"the offset of an extra must be a token position, not {offset!r}")
    if type(length) is not int or not 1 <= length < TOKEN_LIMIT:
        raise CallerError(f"the length of an extra must be at least one token, not {length!r}")
    if not isinstance(content_id, bytes) or not content_id:
        raise CallerError(f"the content id of an extra must be non-empty bytes, not {content_id!r}")
    return offset, length, bytes(content_id)


def _require_row(tokens: Tokens) -> None:
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise CallerError(f"a token array must be one row of whole numbers, not {tokens.ndim}-d {tokens.dtype}")
    elif isinstance(tokens, _NO_TOKENS) or not isinstance(tokens, Sequence | array):
        raise CallerError(f"tokens must be a sequence of whole numbers, not {type(tokens).__name__}")


def _token_bytes(tokens: Tokens, start: int, stop: int) -> memoryview:
    """Tokens [start, stop) as little-endian uint32, checked."""
    if isinstance(tokens, np.ndarray):
        return _array_bytes(tokens, start, stop)
    part = (tokens if isinstance(tokens, list) else list(tokens))[start:stop]
    packed = array("I")
    assert packed.itemsize == 4
    try:
        packed.fromlist(part)
    except (TypeError, OverflowError, ValueError):
        raise _bad_token(part, start) from None
    _refuse_bools(part, np.frombuffer(packed, dtype=np.uint32), start)
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _refuse_bools(part: list[int], values: npt.NDArray[np.uint32], start: int) -> None:
    # True and False convert to 1 and 0, and so do older numpy's own: only there can one hide
    suspects = np.flatnonzero(values <= 1)
    if len(suspects) and not _BOOLS.isdisjoint(map(type, map(part.__getitem__, suspects.tolist()))):
        raise _bad_token(part, start)


def _bad_token(part: Iterable[object], start: int) -> CallerError:
    """Names the first offender; called only when there is one."""
    for position, token in enumerate(part, start):
        if isinstance(token, int | np.integer) and type(token) is not bool and 0 <= token < TOKEN_LIMIT:
            continue
        return CallerError(f"token {position} is {token!r}; tokens are whole numbers in [0, 2**32)")
    return CallerError("tokens must be whole numbers in [0, 2**32)")


def _array_bytes(tokens: npt.NDArray[np.integer], start: int, stop: int) -> memoryview:
    part = tokens[start:stop]
    if tokens.dtype != np.uint32 and len(part) and (int(part.min()) < 0 or int(part.max()) >= TOKEN_LIMIT):
        raise _bad_token(part.tolist(), start)
    return np.ascontiguousarray(part, dtype="<u4").data.cast("B")


def object_keys(
    hashes: Sequence[bytes], model_name: str, kv_rank: int, object_group_id: int = 0, cache_salt: str = ""
) -> list[ObjectKey]:
    """The keys of many chunks of one row, in order."""
    assert kv_rank >= 0
    assert object_group_id >= 0
    fields = zip(hashes, repeat(model_name), repeat(kv_rank), repeat(object_group_id), repeat(cache_salt))
    return list(map(_make_key, fields))


def encode_key(key: ObjectKey) -> bytes:
    """The whole key as bytes; injective, the same on every machine. Raises CallerError beyond the limits."""
    model = _name_bytes("model_name", key.model_name)
    salt = _name_bytes("cache_salt", key.cache_salt)
    if not isinstance(key.chunk_hash, bytes) or len(key.chunk_hash) > CHUNK_HASH_BYTES_MAX:
        raise CallerError(f"chunk_hash must be at most {CHUNK_HASH_BYTES_MAX} bytes, not {key.chunk_hash!r}")
    try:
        head = _KEY_HEAD.pack(
            _KEY_VERSION, len(key.chunk_hash), key.kv_rank, key.object_group_id, len(model), len(salt)
        )
    except struct.error as error:
        raise CallerError(f"kv_rank and object_group_id must be in [0, 2**32): {key!r}") from error
    return head + key.chunk_hash + model + salt


def _name_bytes(name: str, text: str) -> bytes:
    data = _utf8(text)
    if len(data) > NAME_BYTES_MAX:
        raise CallerError(f"{name} holds {len(data)} bytes, the limit is {NAME_BYTES_MAX}")
    return data


def decode_key(data: bytes | bytearray | memoryview) -> ObjectKey:
    """The inverse of `encode_key`. Raises StoreError for anything that `encode_key` cannot have made."""
    data = bytes(data)
    if len(data) < _KEY_HEAD.size:
        raise StoreError(f"a key record of {len(data)} bytes is too short")
    version, hash_bytes, rank, group, model_bytes, salt_bytes = _KEY_HEAD.unpack_from(data)
    if version != _KEY_VERSION:
        raise StoreError(f"a key record has version {version}, this is version {_KEY_VERSION}")
    model_at = _KEY_HEAD.size + hash_bytes
    salt_at = model_at + model_bytes
    if len(data) != salt_at + salt_bytes or max(model_bytes, salt_bytes) > NAME_BYTES_MAX:
        raise StoreError(f"the lengths in a key record do not add up to its {len(data)} bytes")
    try:
        model = data[model_at:salt_at].decode("utf-8", "surrogatepass")
        salt = data[salt_at:].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise StoreError("a key record holds a name that is not UTF-8") from error
    return ObjectKey(data[_KEY_HEAD.size : model_at], model, rank, group, salt)


def key_text(key: ObjectKey) -> str:
    """A name for stores: digest of the whole key, then a hint for people. Letters, digits, '-' and '_' only.

    At most KEY_TEXT_CHARS_MAX characters, begins with a hexadecimal digit, holds no dot (so a store may add a suffix of
    its own), equal for equal keys. Upper case occurs only in the hint: file systems that fold case do no harm.
    """
    digest = blake3(encode_key(key), derive_key_context="kvcore key text v1").hexdigest()
    hint = _UNSAFE.sub("_", key.model_name[-_HINT_CHARS_MAX:]).strip("_") or "model"
    text = f"{digest}-r{key.kv_rank}-g{key.object_group_id}-{hint}"
    assert len(text) <= KEY_TEXT_CHARS_MAX
    return text

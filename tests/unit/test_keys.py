"""Identity. Scenarios named R44-R50 are the public reports of this field with the same numbers."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from array import array
from dataclasses import fields, replace
from importlib.resources import files
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore.errors import CallerError, ConfigError, StoreError
from kvcore.keys import (
    HASH_VERSION,
    KEY_TEXT_CHARS_MAX,
    NAME_BYTES_MAX,
    ChunkHasher,
    Namespace,
    ObjectKey,
    decode_key,
    digest_fields,
    encode_key,
    key_text,
    object_keys,
)

SMALL = Namespace("m", chunk_tokens=4)
ENGINE = Namespace("m", chunk_tokens=4, hash_mode="engine", engine_algorithm="sha256", engine_seed="0")
NAMES = st.text(st.characters(exclude_categories=[]), max_size=40)
KEYS = st.builds(ObjectKey, st.binary(max_size=64), NAMES, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), NAMES)


def vector_text() -> str:
    return (files("kvcore") / "data" / "key_vectors.json").read_text()


def vectors() -> Any:
    return json.loads(vector_text())


def hashes(tokens: Any, *, namespace: Namespace = SMALL, **options: Any) -> list[bytes]:
    return ChunkHasher(namespace).hash_tokens(tokens, **options)


# --- the same key in every process (R44)


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_r44_a_fresh_interpreter_with_another_hash_seed_makes_the_shipped_vectors(hash_seed: str) -> None:
    script = Path(__file__).with_name("make_key_vectors.py")
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    made = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert made.stdout == vector_text()


def length_prefixed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def documented_namespace_digest(namespace: Namespace) -> bytes:
    """The format as the module text tells it, written a second time."""
    encoded = struct.pack("<I", len(fields(namespace)))  # the digest is no field of its own, the version is
    values: list[tuple[str, str | int]] = [("hash_version", HASH_VERSION)]
    values += [(item.name, getattr(namespace, item.name)) for item in fields(namespace) if item.name != "digest"]
    for name, value in values:
        encoded += length_prefixed(name.encode())
        if isinstance(value, int):
            encoded += b"i" + struct.pack("<q", value)
        else:
            encoded += b"s" + length_prefixed(value.encode())
    return blake3(encoded, derive_key_context="kvcore namespace v1").digest()


def documented_token_hashes(namespace: Namespace, tokens: list[int], extras: list[tuple[int, int, bytes]]) -> list[str]:
    size, previous, result = namespace.chunk_tokens, documented_namespace_digest(namespace), []
    for start in range(0, len(tokens) - size + 1, size):
        message = b"".join(struct.pack("<I", token) for token in tokens[start : start + size])
        for offset, length, content_id in sorted(extras):
            if start <= offset < start + size:
                message += struct.pack("<III", offset - start, length, len(content_id)) + content_id
        previous = blake3(message, key=previous).digest()
        result.append(previous.hex())
    return result


def test_the_shipped_namespace_vectors_follow_the_documented_format() -> None:
    assert vectors()["hash_version"] == HASH_VERSION
    for vector in vectors()["namespaces"]:
        namespace = Namespace(**vector["fields"])
        assert documented_namespace_digest(namespace).hex() == vector["digest"], vector["name"]
        assert namespace.digest.hex() == vector["digest"], vector["name"]


def test_the_shipped_token_vectors_follow_the_documented_format() -> None:
    named = {vector["name"]: Namespace(**vector["fields"]) for vector in vectors()["namespaces"]}
    for vector in vectors()["tokens"]:
        extras = [(offset, length, bytes.fromhex(text)) for offset, length, text in vector["extras"]]
        namespace, tokens = named[vector["namespace"]], vector["tokens"]
        assert documented_token_hashes(namespace, tokens, extras) == vector["hashes"]
        assert [made.hex() for made in hashes(tokens, namespace=namespace, extras=extras)] == vector["hashes"]


def test_the_shipped_engine_vectors_follow_the_documented_format() -> None:
    (fields_of_engine,) = [each["fields"] for each in vectors()["namespaces"] if each["name"] == "engine"]
    for vector in vectors()["engine"]:
        step = fields_of_engine["chunk_tokens"] // vector["block_tokens"]
        previous, expected = documented_namespace_digest(Namespace(**fields_of_engine)), []
        for block in vector["blocks"][step - 1 :: step]:
            message = struct.pack("<I", vector["block_tokens"]) + bytes.fromhex(block)
            previous = blake3(message, key=previous).digest()
            expected.append(previous.hex())
        assert expected == vector["hashes"]
        assert expected


def test_the_shipped_key_vectors_decode_to_their_keys() -> None:
    for vector in vectors()["keys"]:
        chunk_hash, *rest = vector["key"]
        key = ObjectKey(bytes.fromhex(chunk_hash), *rest)
        assert decode_key(bytes.fromhex(vector["encoded"])) == key
        assert key_text(key) == vector["text"]


# --- chunks and the chain


def test_a_trailing_partial_chunk_has_no_hash() -> None:
    assert [len(hashes(list(range(count)))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("changed", range(12))
def test_one_changed_token_changes_its_chunk_and_every_later_one(changed: int) -> None:
    tokens = list(range(100, 112))
    other = [*tokens]
    other[changed] += 1
    same = [one == two for one, two in zip(hashes(tokens), hashes(other))]
    assert same == [chunk < changed // 4 for chunk in range(3)]


def test_equal_chunks_at_different_places_have_different_hashes() -> None:
    assert len(set(hashes([7] * 400))) == 100


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.data())
def test_known_hashes_are_continued_and_not_computed_again(tokens: list[int], data: st.DataObject) -> None:
    full = hashes(tokens)
    count = data.draw(st.integers(0, len(full)))
    assert hashes(tokens, known=full[:count]) == full
    # the tokens of known chunks are not even looked at
    assert hashes([0] * (count * 4) + tokens[count * 4 :], known=full[:count]) == full


def test_the_list_of_known_hashes_is_not_changed() -> None:
    known = hashes([1, 2, 3, 4])
    assert len(hashes([1, 2, 3, 4, 5, 6, 7, 8], known=known)) == 2
    assert len(known) == 1


@pytest.mark.parametrize("known", [[b"x" * 32, b"y" * 32], [b"short"], [bytearray(32)], [b"x" * 33]])
def test_known_hashes_that_cannot_belong_to_the_tokens_are_refused(known: Any) -> None:
    with pytest.raises(CallerError, match="must be 32 bytes, not bytearray"):
        hashes(range(12), known=[b"x" * 32, bytearray(32)])
    with pytest.raises(CallerError):
        hashes([1, 2, 3, 4], known=known)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_every_container_of_the_same_tokens_gives_the_same_hashes(tokens: list[int]) -> None:
    expected = hashes(tokens)
    strided = np.repeat(np.array(tokens, dtype=np.uint32), 2)[::2]
    containers = [tuple(tokens), array("I", tokens), strided, list(map(np.int64, tokens))]
    containers += [np.array(tokens, dtype=kind) for kind in (np.uint32, np.int32, np.int64, np.uint64, ">u4")]
    for container in containers:
        assert hashes(container) == expected


@pytest.mark.filterwarnings("ignore:In future, it will be an error:DeprecationWarning")  # older numpy, of its own True
@pytest.mark.parametrize("bad", [-1, 2**32, True, False, 1.0, None, "1", np.True_, np.float32(1), 2**70, -(2**70)])
@pytest.mark.parametrize("container", [list, tuple])
def test_what_is_no_token_is_refused_with_its_place(bad: Any, container: Any) -> None:
    with pytest.raises(CallerError, match="token 6 is"):
        hashes(container([1, 2, 3, 4, 5, 0, bad, 8]))
    with pytest.raises(CallerError, match="token 6 is"):
        hashes(container([1, 2, 3, 4, 5, 0, bad, 8]), known=[b"k" * 32])


@pytest.mark.parametrize(
    "bad",
    [
        np.ones(8, dtype=bool),
        np.ones(8, dtype=np.float32),
        np.ones((2, 4), dtype=np.uint32),
        np.full(8, -1, dtype=np.int64),
        np.full(8, -1, dtype=np.int32),
        np.full(8, -1, dtype=np.int8),
        np.full(8, 2**32, dtype=np.uint64),
        np.full(8, 1, dtype=object),
        {1, 2, 3, 4},
        dict.fromkeys(range(4)),
        b"12345678",
        bytearray(8),
        memoryview(bytes(8)),
        "12345678",
    ],
)
def test_what_is_no_row_of_tokens_is_refused(bad: Any) -> None:
    with pytest.raises(CallerError, match="token"):
        hashes(bad)


# --- the namespace (R46, R47, R50)

OTHER_VALUES: dict[str, Any] = {
    "model_name": "other",
    "model_revision": "v2",
    "kv_dtype": "fp8",
    "layout": "ffff",
    "quantisation": "awq",
    "adapter": "lora",
    "chunk_tokens": 2,
    "hash_mode": "engine",
    "engine_algorithm": "sha256",
    "engine_seed": "1",
}


@pytest.mark.parametrize("field_name", OTHER_VALUES)
def test_r46_r47_r50_one_changed_field_of_the_namespace_is_a_miss(field_name: str) -> None:
    other = replace(SMALL, **{field_name: OTHER_VALUES[field_name]})
    assert other.digest != SMALL.digest
    if other.hash_mode == "tokens":
        assert not set(hashes([1] * 8, namespace=other)) & set(hashes([1] * 8))


def test_every_field_of_the_namespace_has_such_a_test() -> None:
    assert {item.name for item in fields(Namespace)} - {"digest"} == set(OTHER_VALUES)


def test_r46_the_same_text_in_another_field_is_another_namespace() -> None:
    texts = [
        name for name, value in OTHER_VALUES.items() if type(value) is str and name not in ("model_name", "hash_mode")
    ]
    digests = {replace(SMALL, **{name: "S"}).digest for name in texts}
    assert len(digests) == len(texts) == 7


def test_r46_neighbouring_fields_cannot_slide_into_each_other() -> None:
    assert Namespace("ab", "c").digest != Namespace("a", "bc").digest
    assert Namespace("a", "1").digest != Namespace("a", "", "1").digest
    assert digest_fields("p", {"a": 1}) != digest_fields("p", {"a": "1"})
    assert digest_fields("p", {"a": "x"}) != digest_fields("q", {"a": "x"})


def test_a_namespace_takes_any_text_and_pickles() -> None:
    namespace = Namespace("\udcff\x00", adapter="é")
    assert namespace.digest != Namespace("\udcfe\x00", adapter="é").digest
    assert pickle.loads(pickle.dumps(namespace)).digest == namespace.digest


@pytest.mark.parametrize(
    "arguments",
    [
        {"chunk_tokens": 0},
        {"chunk_tokens": True},
        {"chunk_tokens": 2.0},
        {"hash_mode": "both"},
        {"adapter": None},
        {"adapter": 3.5},
    ],
)
def test_a_namespace_of_wrong_values_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Namespace("m", **arguments)


# --- extras (R45)


def test_r45_media_ids_that_agree_in_the_low_16_bits_differ_from_their_first_chunk_on() -> None:
    prompt, low = [9] * 20, b"\x34\x12"
    one = hashes(prompt, extras=[(6, 8, low + b"\x00" * 30)])
    two = hashes(prompt, extras=[(6, 8, low + b"\x01" * 30)])
    assert [a == b for a, b in zip(one, two)] == [True, False, False, False, False]
    assert one[0] == hashes(prompt)[0]


def test_r45_the_same_image_at_another_offset_is_another_prompt() -> None:
    prompt = [9] * 12
    made = [hashes(prompt, extras=[(offset, 3, b"image")])[-1] for offset in range(12)]
    assert len({*made, hashes(prompt)[-1]}) == 13


def test_r45_the_same_image_with_another_length_is_another_prompt() -> None:
    assert hashes([9] * 12, extras=[(2, 3, b"i")]) != hashes([9] * 12, extras=[(2, 4, b"i")])


def test_the_order_in_which_extras_are_named_does_not_matter() -> None:
    extras = [(1, 2, b"b"), (1, 2, b"a"), (8, 1, b"c"), (5, 5, b"d")]
    assert hashes([9] * 12, extras=extras) == hashes([9] * 12, extras=extras[::-1])


def test_an_extra_in_the_partial_chunk_waits_for_that_chunk() -> None:
    extras = [(5, 6, b"image")]
    first = hashes([9] * 7, extras=extras)
    assert first == hashes([9] * 7)
    assert hashes([9] * 9, extras=extras) == first + hashes([9] * 9, extras=extras, known=first)[1:]
    assert hashes([9] * 9, extras=extras)[1] != hashes([9] * 9)[1]


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.binary(min_size=1)), max_size=4))
def test_known_hashes_continue_a_chain_with_extras(count: int, extras: list[tuple[int, int, bytes]]) -> None:
    full = hashes([9] * 20, extras=extras)
    assert hashes([9] * 20, extras=extras, known=full[:count]) == full


EXTRAS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.binary(min_size=1, max_size=14)), max_size=3)
TOKENS = st.lists(st.integers(0, 3), min_size=4, max_size=4)


@given(TOKENS, EXTRAS, TOKENS, EXTRAS)
@example(  # one id that looks like another extra
    [0] * 4, [(0, 1, b"a"), (1, 1, b"b")], [0] * 4, [(0, 1, b"a" + struct.pack("<III", 1, 1, 1) + b"b")]
)
def test_tokens_and_extras_encode_injectively(one: Any, one_extras: Any, two: Any, two_extras: Any) -> None:
    same = (one, sorted(one_extras)) == (two, sorted(two_extras))
    assert (hashes(one, extras=one_extras) == hashes(two, extras=two_extras)) == same


@pytest.mark.parametrize(
    "extra",
    [(-1, 1, b"i"), (0, 0, b"i"), (0, 1, b""), (0, 1, "i"), (0, 2**32, b"i"), (2**32, 1, b"i"), (True, 1, b"i")],
)
def test_an_extra_that_names_nothing_is_refused(extra: Any) -> None:
    with pytest.raises(CallerError):
        hashes([1, 2, 3, 4], extras=[extra])


# --- the engine's own hashes


def test_engine_mode_takes_the_last_block_of_each_chunk() -> None:
    """S41: the hash of a chunk is that of the block that ends it."""
    blocks = [bytes([number]) * 32 for number in range(9)]
    full = ChunkHasher(ENGINE).hash_blocks(blocks, 2)
    assert len(full) == 4
    inner_changed = [blocks[0], blocks[1], b"other" * 8, *blocks[3:]]
    assert ChunkHasher(ENGINE).hash_blocks(inner_changed, 2) == full
    last_changed = [*blocks[:3], b"other" * 8, *blocks[4:]]
    assert [a == b for a, b in zip(ChunkHasher(ENGINE).hash_blocks(last_changed, 2), full)] == [
        True,
        False,
        False,
        False,
    ]


def test_more_known_hashes_than_full_chunks_cannot_belong_to_the_engines_blocks() -> None:
    hasher = ChunkHasher(ENGINE)
    assert hasher.hash_blocks([b"x"] * 3, 2, known=[b"k" * 32]) == [b"k" * 32]
    with pytest.raises(CallerError, match="only 1 full chunks"):
        hasher.hash_blocks([b"x"] * 3, 2, known=[b"k" * 32] * 2)


@given(st.integers(0, 30), st.sampled_from([1, 2, 4]), st.data())
def test_known_hashes_continue_a_chain_of_engine_hashes(count: int, block_tokens: int, data: st.DataObject) -> None:
    blocks = [bytes([number]) * 8 for number in range(count)]
    full = ChunkHasher(ENGINE).hash_blocks(blocks, block_tokens)
    assert len(full) == count * block_tokens // 4
    known = full[: data.draw(st.integers(0, len(full)))]
    assert ChunkHasher(ENGINE).hash_blocks(blocks, block_tokens, known=known) == full


def test_engine_hashes_of_another_block_size_are_other_keys() -> None:
    blocks = [b"b" * 32] * 4
    assert not set(ChunkHasher(ENGINE).hash_blocks(blocks, 4)) & set(ChunkHasher(ENGINE).hash_blocks(blocks, 2))


@pytest.mark.parametrize("block_tokens", [0, -1, 3, 8, True, 2.0])
def test_blocks_that_do_not_fill_a_chunk_are_refused(block_tokens: Any) -> None:
    with pytest.raises(CallerError, match="blocks"):
        ChunkHasher(ENGINE).hash_blocks([b"x"] * 8, block_tokens)


@pytest.mark.parametrize("block_hash", [b"", "text", 17, None])
def test_what_is_no_block_hash_is_refused(block_hash: Any) -> None:
    with pytest.raises(CallerError, match="block hash"):
        ChunkHasher(ENGINE).hash_blocks([block_hash] * 4, 1)


def test_one_namespace_has_one_source_of_hashes() -> None:
    with pytest.raises(CallerError, match="engine"):
        ChunkHasher(ENGINE).hash_tokens([1, 2, 3, 4])
    with pytest.raises(CallerError, match="tokens"):
        ChunkHasher(SMALL).hash_blocks([b"x"], 4)


@pytest.mark.parametrize("algorithm", ["xxhash", "XXH3", "xxhash_cbor", "builtin", ""])
def test_r44_hashes_that_die_with_the_process_are_refused_by_stores_that_outlive_it(algorithm: str) -> None:
    namespace = replace(ENGINE, engine_algorithm=algorithm, engine_seed="")
    with pytest.raises(ConfigError, match="engine"):
        namespace.check_persistent()


@pytest.mark.parametrize("namespace", [SMALL, ENGINE, replace(ENGINE, engine_algorithm="xxhash")])
def test_hashes_that_every_process_makes_alike_are_accepted(namespace: Namespace) -> None:
    namespace.check_persistent()
    assert len(namespace.digest) == 32


# --- keys, their bytes and their text


def test_object_keys_are_the_keys_one_would_build_by_hand() -> None:
    made = object_keys([b"a", b"b"], "m", 3, 2, "salt")
    assert made == [ObjectKey(b"a", "m", 3, 2, "salt"), ObjectKey(b"b", "m", 3, 2, "salt")]
    assert all(type(key) is ObjectKey for key in made)
    assert object_keys([b"a"], "m", 0) == [ObjectKey(b"a", "m", 0, 0, "")]
    assert object_keys([], "m", 0) == []


@given(KEYS)
def test_a_key_survives_its_encoding(key: ObjectKey) -> None:
    assert decode_key(encode_key(key)) == key
    assert decode_key(memoryview(encode_key(key))) == key


@given(KEYS, KEYS)
@example(ObjectKey(b"h", "ab", 0, 0, "c"), ObjectKey(b"h", "a", 0, 0, "bc"))
@example(ObjectKey(b"h", "a", 0), ObjectKey(b"ha", "", 0))
def test_different_keys_have_different_bytes_and_texts(one: ObjectKey, two: ObjectKey) -> None:
    assert (encode_key(one) == encode_key(two)) == (one == two)
    assert (key_text(one) == key_text(two)) == (one == two)


@given(st.binary(max_size=80))
def test_bytes_that_are_no_key_are_a_store_error_and_never_another_key(data: bytes) -> None:
    try:
        key = decode_key(data)
    except StoreError:
        return
    assert encode_key(key) == data


@given(KEYS, st.data())
def test_a_short_long_or_flipped_record_is_never_taken_for_the_same_key(key: ObjectKey, data: st.DataObject) -> None:
    encoded = encode_key(key)
    position = data.draw(st.integers(0, len(encoded) - 1))
    flipped = bytearray(encoded)
    flipped[position] ^= data.draw(st.integers(1, 255))
    for broken in (encoded[:position], encoded + b"\x00"):
        with pytest.raises(StoreError):
            decode_key(broken)
    try:
        assert decode_key(flipped) != key
    except StoreError:
        assert bytes(flipped) != encoded


@pytest.mark.parametrize(
    "key",
    [
        ObjectKey(b"h", "m" * (NAME_BYTES_MAX + 1), 0),
        ObjectKey(b"h", "m", 0, 0, "é" * (NAME_BYTES_MAX // 2 + 1)),
        ObjectKey(b"h" * 256, "m", 0),
        ObjectKey(b"h", "m", -1),
        ObjectKey(b"h", "m", 0, 2**32),
    ],
)
def test_a_key_beyond_the_limits_is_refused(key: ObjectKey) -> None:
    with pytest.raises(CallerError):
        encode_key(key)
    with pytest.raises(CallerError):
        key_text(key)


def test_numbers_of_64_bits_can_be_digested_and_longer_ones_are_refused() -> None:
    digests = {digest_fields("test", {"n": number}) for number in (-(2**63), 2**63 - 1, 0, -1, 1)}
    assert len(digests) == 5
    for number in (2**63, -(2**63) - 1):
        with pytest.raises(ConfigError, match="n must be text or a 64-bit whole number"):
            digest_fields("test", {"n": number})


@pytest.mark.parametrize(
    "key",
    [
        ObjectKey(b"h" * 255, "m" * NAME_BYTES_MAX, 2**32 - 1, 2**32 - 1, "é" * (NAME_BYTES_MAX // 2)),
        ObjectKey(b"", "", 0, 0, ""),
    ],
)
def test_a_key_at_the_limits_is_a_key_like_any_other(key: ObjectKey) -> None:
    assert decode_key(encode_key(key)) == key
    assert len(key_text(key)) <= KEY_TEXT_CHARS_MAX


def test_a_key_record_that_names_a_longer_salt_than_is_legal_is_refused() -> None:
    longest = encode_key(ObjectKey(b"h", "m", 0, 0, "s" * NAME_BYTES_MAX))
    forged = longest[:12] + (NAME_BYTES_MAX + 1).to_bytes(2, "little") + longest[14:] + b"s"
    with pytest.raises(StoreError, match="do not add up"):
        decode_key(forged)


@given(KEYS)
def test_r49_key_text_is_short_and_harmless_for_every_legal_key(key: ObjectKey) -> None:
    text = key_text(key)
    assert 64 <= len(text) <= KEY_TEXT_CHARS_MAX
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


def test_r49_a_long_salt_and_a_long_path_make_a_file_that_can_be_written(tmp_path: Path) -> None:
    key = ObjectKey(b"\xff" * 32, "/models/" + "deep/" * 400 + "model", 2**32 - 1, 2**32 - 1, "s" * 128)
    path = tmp_path / f"{key_text(key)}.tmp"
    path.write_bytes(b"payload")
    assert path.read_bytes() == b"payload"


def test_r46_r47_every_field_of_the_key_is_in_its_text() -> None:
    base = ObjectKey(b"h" * 32, "m", 0, 0, "")
    others = [
        base._replace(chunk_hash=b"i" * 32),
        base._replace(model_name="M"),
        base._replace(kv_rank=1),
        base._replace(object_group_id=1),
        base._replace(cache_salt="m"),
    ]
    texts = [key_text(key) for key in (base, *others)]
    assert all(one != two for one, two in combinations(texts, 2))
    # the digest in front differs by itself, also where the hint is the same
    assert len({text[:64] for text in texts}) == len(texts)


def test_hashes_of_a_growing_conversation_are_extended_turn_by_turn() -> None:
    conversation = list(range(50))
    turns = [hashes(conversation[:length]) for length in (5, 17, 30, 50)]
    for shorter, longer in pairwise(turns):
        assert longer[: len(shorter)] == shorter

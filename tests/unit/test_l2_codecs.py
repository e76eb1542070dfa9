"""What is done to payloads on their way into a store: compression, key marks. And what a liar gets."""

from __future__ import annotations

import os

import numpy as np
import pytest
from blake3 import blake3

from kvcore.errors import ConfigError
from kvcore.keys import ObjectKey
from kvcore.l2.coded import coded
from kvcore.l2.compress import FRAME_BYTES, Fp8Codec, ZstdCodec
from kvcore.l2.envelope import Defect
from kvcore.l2.keyed import KeyedCodec
from kvcore.l2.memory import MemoryBackend

KEY = ObjectKey(b"k" * 32, "model", 0)
OTHER = ObjectKey(b"o" * 32, "model", 0)
SECRET = b"0123456789abcdef0123456789abcdef"
LENGTHS = [0, 1, 2, 7, 8, 9, 255, 256, 4096, 100_001]


def noise(length: int) -> bytes:
    return blake3(b"noise").digest(length=length)


def text(length: int) -> bytes:
    return (b"the same words again and again, " * (length // 32 + 1))[:length]


def kv(values: int) -> bytes:
    """bfloat16 of a normal distribution, as KV is."""
    floats = np.random.default_rng(7).standard_normal(values).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def round_trip(codec, data: bytes) -> tuple[Defect | None, bytes, int]:
    encoded = bytes(codec.encode(KEY, memoryview(data)))
    assert len(encoded) in codec.lengths(KEY, len(data))
    assert len(encoded) <= codec.bytes_max(KEY, len(data))
    assert codec.payload_bytes(len(encoded), memoryview(encoded)[: codec.frame_bytes]) == len(data)
    into = bytearray(len(data))
    return codec.decode(KEY, memoryview(encoded), memoryview(into)), bytes(into), len(encoded)


@pytest.fixture
def zstd():
    pytest.importorskip("zstandard", exc_type=ImportError)
    return ZstdCodec()


# --- zstd


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("make", [noise, text])
def test_zstd_gives_every_byte_back(zstd, make, length) -> None:
    assert round_trip(zstd, make(length))[:2] == (None, make(length))


def test_zstd_makes_text_small_and_noise_hardly_larger(zstd) -> None:
    assert round_trip(zstd, text(80_000))[2] == FRAME_BYTES + 10_000, "an eighth is the least"
    assert round_trip(zstd, noise(80_000))[2] == FRAME_BYTES + 80_000


def test_zstd_makes_kv_of_a_two_byte_type_smaller(zstd) -> None:
    data = kv(64 * 1024)
    defect, back, size = round_trip(zstd, data)
    assert (defect, back) == (None, data)
    assert size <= FRAME_BYTES + len(data) * 7 // 8


def test_the_length_that_fitted_last_is_tried_first(zstd) -> None:
    encoded = zstd.encode(KEY, memoryview(text(80_000)))
    assert zstd.lengths(KEY, 80_000)[0] == len(encoded)
    reader = ZstdCodec()
    assert reader.lengths(KEY, 80_000)[0] == FRAME_BYTES + 80_000, "it knows nothing yet"
    reader.decode(KEY, memoryview(encoded), memoryview(bytearray(80_000)))
    assert reader.lengths(KEY, 80_000)[0] == len(encoded)


@pytest.mark.parametrize("at", [0, 4, 5, 6, 8, 16, 24, 31, 40])
def test_a_changed_byte_is_a_defect_or_changes_nothing_that_is_served(zstd, at) -> None:
    data = text(4096)
    encoded = bytearray(zstd.encode(KEY, memoryview(data)))
    encoded[at] ^= 0x41
    into = bytearray(4096)
    defect = zstd.decode(KEY, memoryview(encoded), memoryview(into))
    assert defect is not None or at >= FRAME_BYTES, "the frame has a check; the body's is the envelope's business"


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33])
def test_a_record_that_is_cut_off_is_a_defect(zstd, length) -> None:
    encoded = bytes(zstd.encode(KEY, memoryview(text(4096))))[:length]
    assert zstd.decode(KEY, memoryview(encoded), memoryview(bytearray(4096))) is not None


def test_a_body_that_expands_beyond_the_payload_is_not_expanded(zstd) -> None:
    import zstandard

    from kvcore.l2 import compress

    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    stored = compress._frame(compress._ZSTD, 100, len(bomb)) + bomb
    into = bytearray(100)
    assert zstd.decode(KEY, memoryview(stored), memoryview(into)) is Defect.FLIPPED


# --- fp8


def test_fp8_halves_bfloat16_and_stays_near_the_values() -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    data = kv(128 * 64)
    defect, back, size = round_trip(Fp8Codec(), data)
    assert defect is None
    assert size == FRAME_BYTES + 64 * 132
    given, got = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16 for raw in (data, back))
    given, got = given.view(np.float32), got.view(np.float32)
    peak = np.abs(given).reshape(-1, 128).max(axis=1, keepdims=True)
    error = np.abs(given - got).reshape(-1, 128)
    assert (error <= np.maximum(np.abs(given).reshape(-1, 128) / 15, peak / 448)).all(), "three bits of mantissa"


def test_fp8_keeps_zeros_nan_and_infinities_in_their_places() -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    values = np.zeros(256, np.float32)
    values[5], values[6], values[130] = np.nan, np.inf, -np.inf
    data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    defect, back, _ = round_trip(Fp8Codec(), data)
    got = (np.frombuffer(back, np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert defect is None
    assert np.isnan(got[5])
    assert got[6] > 1e38
    assert got[130] < -1e38
    assert not got[[0, 1, 4, 7, 100, 129, 131]].any()


@pytest.mark.parametrize("length", [0, 2, 255, 257])
def test_fp8_leaves_what_is_no_whole_group_as_it_was(length) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    assert round_trip(Fp8Codec(), noise(length))[:2] == (None, noise(length))


# --- key marks


@pytest.mark.parametrize("length", LENGTHS)
def test_a_marked_payload_comes_back(length) -> None:
    assert round_trip(KeyedCodec(SECRET), noise(length))[:2] == (None, noise(length))


def test_a_record_of_another_key_another_secret_or_another_byte_is_foreign() -> None:
    codec = KeyedCodec(SECRET)
    encoded = bytearray(codec.encode(KEY, memoryview(noise(100))))
    into = memoryview(bytearray(100))
    assert codec.decode(OTHER, memoryview(encoded), into) is Defect.FOREIGN
    assert KeyedCodec(SECRET + b"x").decode(KEY, memoryview(encoded), into) is Defect.FOREIGN
    for at in range(len(encoded)):
        encoded[at] ^= 1
        assert codec.decode(KEY, memoryview(encoded), into) is Defect.FOREIGN
        encoded[at] ^= 1
    assert codec.decode(KEY, memoryview(encoded), into) is None


def test_whoever_can_write_the_store_cannot_make_a_record_that_is_served() -> None:
    """A well-formed record, checksums and all, without the key: a miss."""
    medium = MemoryBackend()
    plain, marked = medium, coded(medium, KeyedCodec(SECRET))
    marked.open()
    forged = noise(48 + 100)
    plain.write(KEY, memoryview(forged))
    assert marked.read(KEY, memoryview(bytearray(100))) is Defect.FOREIGN
    marked.write(KEY, memoryview(noise(100)))
    into = bytearray(100)
    assert marked.read(KEY, memoryview(into)) is None
    assert into == noise(100)


@pytest.mark.parametrize(
    ("content", "mode", "text"), [(b"short", 0o600, "least"), (SECRET, 0o644, "chmod 600"), (None, 0, "cannot be read")]
)
def test_a_key_file_that_protects_nothing_is_refused(tmp_path, content, mode, text) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        os.chmod(path, mode)
    with pytest.raises(ConfigError, match=text) as caught:
        KeyedCodec.from_file(str(path))
    assert SECRET.decode() not in str(caught.value)


def test_a_key_is_in_no_repr() -> None:
    assert repr(KeyedCodec(SECRET)) == "KeyedCodec(***)"


# --- behind a backend


def test_an_exclusive_store_learns_the_payloads_lengths_at_its_start(zstd) -> None:
    medium = MemoryBackend()
    first = coded(medium, zstd)
    first.open()
    first.write(KEY, memoryview(text(5000)))
    first.write(OTHER, memoryview(noise(300)))
    medium.write(ObjectKey(b"p" * 32, "model", 0), memoryview(b"stored without compression"))
    scan = coded(medium, ZstdCodec()).open()
    assert {found.key: found.payload_bytes for found in scan.records} == {KEY: 5000, OTHER: 300}
    assert scan.defects == {Defect.FOREIGN: 1}
    assert set(medium.records) == {KEY, OTHER}, "what cannot be read is removed"

"""One entry of a slab store's index: its size, what it gives back, and each way in which it can be wrong."""

from __future__ import annotations

import struct

import pytest

from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.envelope import Defect
from kvcore.l2.slab_entry import (
    ENTRY_BYTES_MAX,
    MAGIC,
    PAGE_BYTES,
    SLOT_BYTES,
    decode_entry,
    encode_entry,
    entry_slots,
    pages_for,
    slots_for,
)
from kvcore.l2.slab_space import Run

SEED = 77
PAYLOAD = b"x" * (2 * PAGE_BYTES + 1)
RUNS = (Run(7, 1), Run(9, 2))
HEAD_BYTES = 32


def header_of(name_chars: int, payload: bytes = PAYLOAD) -> bytes:
    return envelope.encode_header(ObjectKey(b"h" * 32, "m" * name_chars, 0), payload)


@pytest.mark.parametrize("runs", [(Run(3, 3),), RUNS, tuple(Run(2 * number, 1) for number in range(3))])
def test_an_entry_of_any_length_has_the_slots_it_claims_and_comes_back(runs: tuple[Run, ...]) -> None:
    for chars in range(1, 2 * SLOT_BYTES):
        header = header_of(chars)
        entry = encode_entry(header, runs, 5, SEED)
        assert len(entry) == slots_for(len(header), len(runs)) * SLOT_BYTES
        assert len(runs) > 1 or slots_for(len(header)) == slots_for(len(header), 1), "one run when nothing is said"
        assert entry_slots(memoryview(entry)) == len(entry) // SLOT_BYTES
        found = decode_entry(memoryview(entry), SEED)
        assert not isinstance(found, Defect)
        assert (found.key.model_name, found.payload_bytes) == ("m" * chars, len(PAYLOAD))
        assert (found.runs, found.sequence, found.header) == (runs, 5, header)


@pytest.mark.parametrize("count", [4, 5, 60])
def test_an_entry_of_many_runs_comes_back(count: int) -> None:
    payload, runs = bytes(count * PAGE_BYTES), tuple(Run(2 * number, 1) for number in range(count))
    entry = encode_entry(header_of(3, payload), runs, 5, SEED)
    found = decode_entry(memoryview(entry), SEED)
    assert not isinstance(found, Defect)
    assert (found.runs, found.key.model_name) == (runs, "mmm")


@pytest.mark.parametrize(("payload_bytes", "pages"), [(0, 1), (1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2)])
def test_an_empty_payload_has_a_page_too(payload_bytes: int, pages: int) -> None:
    assert pages_for(payload_bytes) == pages


def test_any_flipped_byte_another_seed_and_a_missing_slot_are_seen() -> None:
    header = header_of(SLOT_BYTES)
    entry = encode_entry(header, RUNS, 5, SEED)
    length = HEAD_BYTES + 8 * len(RUNS) + len(header)
    for at in [*range(HEAD_BYTES), HEAD_BYTES, HEAD_BYTES + 8, length - 1]:
        damaged = bytearray(entry)
        damaged[at] ^= 1
        assert isinstance(decode_entry(memoryview(damaged), SEED), Defect), at
    assert decode_entry(memoryview(entry), SEED + 1) is Defect.FLIPPED
    assert decode_entry(memoryview(entry)[:SLOT_BYTES], SEED) is Defect.TORN


def test_a_header_with_more_behind_it_is_not_ours() -> None:
    entry = encode_entry(header_of(3) + b"more", RUNS, 5, SEED)
    assert decode_entry(memoryview(entry), SEED) is Defect.FOREIGN


@pytest.mark.parametrize("runs", [(Run(7, 2),), (Run(7, 4),), (Run(7, 3), Run(20, 0))])
def test_runs_that_are_not_the_payloads_pages_are_refused(runs: tuple[Run, ...]) -> None:
    assert decode_entry(memoryview(encode_entry(header_of(3), runs, 5, SEED)), SEED) is Defect.FLIPPED


@pytest.mark.parametrize(
    ("magic", "length", "claims"),
    [
        (MAGIC, HEAD_BYTES + envelope.FIXED_BYTES, 1),
        (MAGIC, HEAD_BYTES + envelope.FIXED_BYTES - 1, Defect.FLIPPED),
        (MAGIC, ENTRY_BYTES_MAX, ENTRY_BYTES_MAX // SLOT_BYTES),
        (MAGIC, ENTRY_BYTES_MAX + 1, Defect.FLIPPED),
        (b"KVSLABE2", 100, Defect.FOREIGN),
        (bytes(8), 0, Defect.FOREIGN),
    ],
)
def test_a_claim_of_slots_is_bounded(magic: bytes, length: int, claims: int | Defect) -> None:
    head = struct.pack("<8sIIQQ", magic, length, 1, 5, 0)
    assert entry_slots(memoryview(head + bytes(SLOT_BYTES - len(head)))) == claims


def test_the_longest_entry_is_four_mebibytes() -> None:
    assert ENTRY_BYTES_MAX == 4 << 20

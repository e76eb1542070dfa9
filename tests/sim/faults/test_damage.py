"""Every way in which a stored record can be wrong is met by name, as a miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore.keys import ObjectKey
from kvcore.l2 import envelope
from kvcore.l2.envelope import Defect
from kvcore.sim import damage

KEY = ObjectKey(b"\x07" * 32, "fingerprint", 1, 2, "blue")
PAYLOAD = bytes(range(200))
RECORD = envelope.encode_header(KEY, PAYLOAD) + PAYLOAD

Spoil = Callable[[ObjectKey, bytes, int], bytes]


def read_back(record: bytes) -> Defect | None:
    """What the backend makes of `record` under KEY."""
    split = envelope.header_bytes(KEY)
    into = bytearray(len(PAYLOAD))
    body = record[split:][: len(into)]
    into[: len(body)] = body
    return envelope.check_record(KEY, record[:split].ljust(split, b"\0"), memoryview(into), len(record))


def test_the_record_itself_is_whole() -> None:
    assert read_back(RECORD) is None


@pytest.mark.parametrize(
    ("spoil", "defects"),
    [
        (damage.flip_header, {Defect.FLIPPED, Defect.FOREIGN, Defect.STALE_VERSION}),
        (damage.flip_payload, {Defect.FLIPPED}),
        (damage.tear, {Defect.SHORT, Defect.TORN}),
        (damage.older_format, {Defect.STALE_VERSION}),
        (damage.older_record, {Defect.OTHER_SIZE}),
        (damage.of_model, {Defect.FOREIGN}),
        (damage.of_salt, {Defect.FOREIGN}),
    ],
)
def test_each_damage_is_seen_wherever_it_strikes(spoil: Spoil, defects: set[Defect]) -> None:
    seen = {read_back(spoil(KEY, RECORD, place)) for place in range(8 * len(RECORD))}
    assert seen == defects


def test_a_record_whose_end_was_never_written_is_seen_unless_its_end_is_zero_anyway() -> None:
    assert PAYLOAD[-1] != 0
    seen = {read_back(damage.zero_tail(KEY, RECORD, place)) for place in range(len(RECORD))}
    assert seen <= {Defect.FLIPPED, Defect.FOREIGN, Defect.STALE_VERSION, Defect.TORN}
    assert None not in seen


def test_a_foreign_record_is_as_long_as_ours_and_holds_other_bytes() -> None:
    for spoil in (damage.of_model, damage.of_salt):
        foreign = spoil(KEY, RECORD, 0)
        assert len(foreign) == len(RECORD)
        assert foreign[envelope.header_bytes(KEY) :] != PAYLOAD


def test_damage_of_what_is_damaged_already_is_harmless_to_the_fault() -> None:
    for record in (b"", RECORD[:5], RECORD[: envelope.header_bytes(KEY)]):
        for spoil in (damage.flip_payload, damage.tear, damage.zero_tail, damage.older_record, damage.of_model):
            assert isinstance(spoil(KEY, record, 12345), bytes)

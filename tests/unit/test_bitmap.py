"""Integers as sets, each function against the plainest way to say the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.bitmap import bits, from_bytes, ones, run_starts, span, to_bytes, trailing_ones, windowed
from kvcore.errors import CallerError

BITMAPS = st.integers(0, 2**70 - 1) | st.sets(st.integers(0, 300)).map(lambda members: sum(1 << m for m in members))


def members(bitmap: int) -> set[int]:
    return {index for index in range(bitmap.bit_length()) if bitmap >> index & 1}


@given(st.integers(0, 300), st.integers(0, 300))
def test_ones_and_spans_are_ranges(start: int, stop: int) -> None:
    assert members(ones(stop)) == set(range(stop))
    assert members(span(start, stop)) == set(range(start, stop))


@given(BITMAPS)
def test_trailing_ones_is_the_first_number_that_is_missing(bitmap: int) -> None:
    assert trailing_ones(bitmap) == min(set(range(400)) - members(bitmap))


@given(BITMAPS, st.integers(1, 40))
def test_run_starts_are_the_places_where_a_run_fits(bitmap: int, width: int) -> None:
    present = members(bitmap)
    assert members(run_starts(bitmap, width)) == {i for i in present if set(range(i, i + width)) <= present}


@given(BITMAPS, st.integers(0, 40), st.integers(0, 80))
def test_windowed_lengths_have_every_chunk_of_the_window_before_them(bitmap: int, width: int, length: int) -> None:
    present = members(bitmap)
    expected = {end for end in range(length + 1) if set(range(max(0, end - width), end)) <= present}
    assert members(windowed(bitmap, width, length)) == expected


def test_a_window_wider_than_the_prompt_is_a_prefix() -> None:
    assert members(windowed(0b1011, 10**9, 4)) == {0, 1, 2}


@given(BITMAPS)
def test_bits_are_the_members_in_ascending_order(bitmap: int) -> None:
    assert list(bits(bitmap)) == sorted(members(bitmap))


@given(BITMAPS, st.integers(0, 20))
def test_a_bitmap_survives_its_bytes(bitmap: int, room: int) -> None:
    length = bitmap.bit_length() + room
    data = to_bytes(bitmap, length)
    assert len(data) == (length + 7) // 8
    assert from_bytes(data, length) == bitmap


@pytest.mark.parametrize(("data", "length"), [(b"", 1), (b"\x00\x00", 8), (b"\x02", 1), (b"\x01", 0), (b"\xff\x01", 8)])
def test_bytes_of_another_length_or_with_bits_beyond_it_are_refused(data: bytes, length: int) -> None:
    with pytest.raises(CallerError, match="bitmap"):
        from_bytes(data, length)

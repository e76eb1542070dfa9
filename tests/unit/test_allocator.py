"""The allocator gives out disjoint ranges, finds every run that fits, and puts neighbours together again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.allocator import QUICK_RANGES_MAX, Allocator


def test_it_hands_out_all_of_its_bytes_and_then_refuses() -> None:
    allocator = Allocator(1024)
    assert allocator.take(256, 5) == [0, 256, 512, 768]
    assert allocator.take(1, 1) == []
    assert allocator.free == allocator.largest_free == 0


def test_a_range_given_back_is_the_next_one_taken_in_its_size() -> None:
    allocator = Allocator(1024)
    allocator.take(64, 10)
    allocator.give(64, [192])
    assert allocator.take(64, 1) == [192]


def test_neighbours_coalesce_when_another_size_needs_them() -> None:
    allocator = Allocator(1024)
    offsets = allocator.take(64, 16)
    allocator.give(64, offsets[3:7])
    assert allocator.take(320, 1) == []
    assert allocator.take(256, 1) == [192]
    allocator.give(256, [192])
    allocator.give(64, offsets[:3] + offsets[7:])
    assert allocator.largest_free == 1024
    allocator.check()


def test_the_smallest_run_that_fits_is_used_so_large_ones_stay_whole() -> None:
    allocator = Allocator(4096)
    allocator.take(64, 64)
    allocator.give(64, [64, 128, 192])  # 192 bytes
    allocator.give(64, [1024, 1088])  # 128 bytes
    assert allocator.take(128, 1) == [1024]
    assert allocator.largest_free == 192
    allocator.give(64, [0])  # the run of 192 grows to 256 and begins at 0
    assert allocator.take(256, 1) == [0]


def test_a_run_at_the_very_beginning_is_a_run_like_any_other() -> None:
    allocator = Allocator(4096)
    allocator.take(64, 64)
    allocator.give(64, [0, 64])
    allocator.give(64, [1024, 1088, 1152])
    assert allocator.take(128, 1) == [0]


def test_a_run_of_the_same_power_of_two_is_found_although_others_in_its_class_are_too_short() -> None:
    """Schemes that round the wish up to the next class would refuse 1,900 bytes here."""
    allocator = Allocator(8192)
    allocator.take(8192, 1)
    allocator.give(1100, [0])
    allocator.give(1920, [4096])
    assert allocator.take(1900, 1) == [4096]


def test_sizes_3_1_3_1_with_the_threes_freed_cannot_hold_6_and_say_so() -> None:
    """R57 b."""
    allocator = Allocator(8)
    assert [allocator.take(size, 1) for size in (3, 1, 3, 1)] == [[0], [3], [4], [7]]
    allocator.give(3, [0])
    allocator.give(3, [4])
    assert allocator.take(6, 1) == []
    assert (allocator.free, allocator.largest_free) == (6, 3)
    allocator.give(1, [3])
    assert allocator.take(6, 1) == [0]


def test_a_quick_bin_never_grows_beyond_its_bound() -> None:
    allocator = Allocator(64 * (QUICK_RANGES_MAX + 10))
    offsets = allocator.take(64, QUICK_RANGES_MAX + 10)
    for offset in offsets:
        allocator.give(64, [offset])
    assert allocator._quick_ranges <= QUICK_RANGES_MAX
    assert allocator.largest_free == allocator.capacity
    allocator.check()


def test_giving_a_range_back_twice_does_not_go_unnoticed() -> None:
    allocator = Allocator(1024)
    allocator.take(64, 1)
    allocator.give(64, [0])
    with pytest.raises(AssertionError, match="more was given back"):
        allocator.give(64, [0])


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([(32, 32), (64, 32)], "not coalesced"),
        ([(32, 32), (48, 32)], "overlap"),
        ([(96, 64)], None),
        ([(32, 16)], None),
    ],
)
def test_the_audit_finds_free_runs_that_touch_overlap_or_do_not_add_up(
    runs: list[tuple[int, int]], said: str | None
) -> None:
    allocator = Allocator(128)
    allocator.take(128, 1)
    allocator.free = 64
    for start, length in runs:
        allocator._file(start, length)
    with pytest.raises(AssertionError, match=said):
        allocator.check()


@pytest.mark.parametrize("kept", [0, 1, 2, 299, 300, 301])
def test_no_more_ranges_are_taken_than_were_asked_for(kept: int) -> None:
    """Some come out of the quick bin, the rest out of the coalescing store."""
    allocator = Allocator(8 * 1000)
    offsets = allocator.take(8, 400)
    allocator.give(8, offsets[:kept])
    taken = allocator.take(8, 300)
    assert len(set(taken)) == len(taken) == 300
    assert allocator.free == 8 * (1000 - 400 + kept - 300)
    allocator.check()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(1, 6)), max_size=60))
def test_taken_ranges_are_disjoint_and_a_refusal_means_that_no_run_was_long_enough(
    steps: list[tuple[bool, int, int]],
) -> None:
    allocator = Allocator(256)
    taken: list[tuple[int, int]] = []
    for giving, length, count in steps:
        if giving and taken:
            size, offset = taken.pop(length % len(taken))
            allocator.give(size, [offset])
            continue
        offsets = allocator.take(length, count)
        taken += [(length, offset) for offset in offsets]
        assert len(offsets) <= count
        if len(offsets) < count:
            assert allocator.largest_free < length
    allocator.check()
    occupied = [byte for length, offset in taken for byte in range(offset, offset + length)]
    assert len(occupied) == len(set(occupied)) == 256 - allocator.free
    assert not occupied or max(occupied) < 256
    gaps = "".join("x" if byte in set(occupied) else " " for byte in range(256)).split("x")
    assert allocator.largest_free == max(map(len, gaps))

"""`PageMap`: what a worker says of its pages is believed only where it fits; no block leads out of the segment."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.service.page_map import BadPagesError, PageMap, Part, check_apart
from kvcore.service.shapes import PageGroup, PageSegment

FULL = ObjectGroup(GroupKind.FULL, 4, 100)
WINDOW = ObjectGroup(GroupKind.WINDOW, 8, 60, 24)
STATE = ObjectGroup(GroupKind.RECURRENT, 16, 40)
LAYOUT = CacheLayout((FULL, WINDOW, STATE), ranks=1, chunk_tokens=16)
GROUPS = (PageGroup(0, 10, 128, 100), PageGroup(28, 9, 128, 60), PageGroup(1280, 4, 40, 40))
GOOD = PageSegment("kvcore-x", 1440, GROUPS)


def with_group(index: int, **changes: int) -> PageSegment:
    groups = list(GROUPS)
    groups[index] = msgspec.structs.replace(groups[index], **changes)
    return msgspec.structs.replace(GOOD, groups=tuple(groups))


def test_blocks_become_ranges_in_the_order_of_the_cell_and_neighbours_become_one() -> None:
    pages = PageMap(GOOD, LAYOUT)
    assert pages.parts(0, [3, 1, 2, 9], null=False) == (
        Part(384, 0, 100),
        Part(128, 100, 100),
        Part(256, 200, 100),
        Part(1152, 300, 100),
    )
    assert pages.parts(2, [2], null=False) == (Part(1360, 0, 40),)
    dense = PageMap(PageSegment("kvcore-x", 1000, (PageGroup(0, 10, 100, 100),)), CacheLayout((FULL,), 1, 16))
    assert dense.parts(0, [4, 5, 6, 2], null=False) == (Part(400, 0, 300), Part(200, 300, 100))
    assert dense.parts(0, [9, 4, 5, 2], null=False) == (Part(900, 0, 100), Part(400, 100, 200), Part(200, 300, 100))


def test_the_null_block_is_left_out_of_a_load_and_refused_in_a_store() -> None:
    pages = PageMap(GOOD, LAYOUT)
    assert pages.parts(1, [0, 3], null=True) == (Part(28 + 3 * 128, 60, 60),)
    with pytest.raises(BadPagesError, match="null block"):
        pages.parts(1, [0, 3], null=False)


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (msgspec.structs.replace(GOOD, groups=GROUPS[:2]), "2 groups; the layout has 3"),
        (msgspec.structs.replace(GOOD, groups=(*GROUPS, GROUPS[0])), "4 groups"),
        (msgspec.structs.replace(GOOD, size=1439), "ends at byte 1440 of a segment of 1439"),
        (with_group(0, block_bytes=99), "blocks of 99 bytes; the layout says 100"),
        (with_group(0, blocks=0), "0 blocks"),
        (with_group(1, stride_bytes=59), "59 bytes apart"),
        (with_group(1, offset=2**62), "ends at byte"),
        (with_group(1, blocks=2**62), "ends at byte"),
        (with_group(2, stride_bytes=2**62), "ends at byte"),
    ],
)
def test_a_description_that_fits_neither_itself_nor_the_layout_is_refused(described: PageSegment, why: str) -> None:
    with pytest.raises(BadPagesError, match=why):
        PageMap(described, LAYOUT)


@pytest.mark.parametrize(
    ("group", "blocks", "why"),
    [
        (3, [1], "group 3 does not exist"),
        (0, [1, 2, 3], "has 4 blocks, not 3"),
        (0, [1, 2, 3, 4, 5], "has 4 blocks, not 5"),
        (2, [], "has 1 blocks, not 0"),
        (0, [1, 2, 3, 10], "block 10 of group 0 does not exist"),
        (2, [2**62], "does not exist"),
    ],
)
def test_a_cell_that_is_none_is_refused(group: int, blocks: list[int], why: str) -> None:
    with pytest.raises(BadPagesError, match=why):
        PageMap(GOOD, LAYOUT).parts(group, blocks, null=True)


def test_parts_that_share_a_byte_are_refused_also_across_groups() -> None:
    pages = PageMap(GOOD, LAYOUT)
    check_apart([*pages.parts(0, [1, 2, 3, 4], null=True), *pages.parts(2, [1], null=True)])
    with pytest.raises(BadPagesError, match="twice"):
        check_apart(pages.parts(0, [1, 2, 1, 4], null=True))
    with pytest.raises(BadPagesError, match="twice"):
        check_apart([*pages.parts(0, [1, 2, 3, 4], null=True), *pages.parts(1, [4, 7], null=True)])


numbers = st.integers(0, 2**62)
wild_groups = st.builds(PageGroup, numbers | st.integers(0, 1500), numbers | st.integers(0, 12), numbers, numbers)
three_wild_groups = st.tuples(wild_groups, wild_groups, wild_groups)
near_groups = st.tuples(
    st.builds(
        PageGroup, st.integers(0, 600), st.integers(0, 14), st.integers(90, 160), st.sampled_from([100, 100, 99])
    ),
    st.builds(PageGroup, st.integers(0, 600), st.integers(0, 14), st.integers(50, 160), st.just(60)),
    st.builds(PageGroup, st.integers(0, 1500), st.integers(0, 14), st.integers(30, 60), st.just(40)),
)


@given(
    st.builds(
        PageSegment, st.just("kvcore-x"), numbers | st.integers(0, 2000), near_groups | st.tuples(*[wild_groups] * 3)
    ),
    st.integers(0, 4),
    st.lists(numbers | st.integers(0, 12), max_size=5),
    st.booleans(),
)
def test_whatever_is_said_no_range_leaves_the_segment_or_the_cell(
    described: PageSegment, group: int, blocks: list[int], null: bool
) -> None:
    try:
        parts = PageMap(described, LAYOUT).parts(group, blocks, null=null)
    except BadPagesError:
        return
    for offset, at, size in parts:
        assert 0 <= offset <= offset + size <= described.size
        assert 0 <= at <= at + size <= LAYOUT.cell_bytes(group)
    named = sum(block != 0 for block in blocks) * LAYOUT.groups[group].bytes_per_block
    assert sum(part.size for part in parts) == named

"""Planes: the address formula, its short form, and what is refused before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.device.planes import KVPlanes, Plane, plane_of, sample_blocks, simplify
from kvcore.errors import CallerError, ConfigError


def walk(plane: Plane, blocks: list[int]) -> Iterator[int]:
    """Every byte's address in chunk order, by the formula of the module text."""
    for block in blocks:
        for outer in range(plane.outer_count):
            for token in range(plane.tokens):
                for byte in range(plane.run_bytes):
                    yield (
                        plane.base
                        + block * plane.block_stride_bytes
                        + outer * plane.outer_stride_bytes
                        + token * plane.token_stride_bytes
                        + byte
                    )


@st.composite
def planes(draw: st.DrawFn) -> Plane:
    """Nested levels in any order of strides, each with or without a gap."""
    sizes = {"outer": draw(st.integers(1, 4)), "token": draw(st.integers(1, 5)), "block": 6}
    run = draw(st.integers(1, 9))
    strides, covered = {}, run
    for level in draw(st.permutations(sorted(sizes))):
        strides[level] = covered + draw(st.sampled_from([0, 0, 0, 3]))
        covered = strides[level] * sizes[level]
    return Plane(1000, strides["block"], sizes["outer"], strides["outer"], sizes["token"], strides["token"], run)


@given(planes(), st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
def test_the_short_form_names_the_same_bytes_in_the_same_order(plane: Plane, blocks: list[int]) -> None:
    short = simplify(plane)
    assert list(walk(short, blocks)) == list(walk(plane, blocks))
    assert short.run_bytes >= plane.run_bytes
    assert short.share_bytes == plane.share_bytes
    assert simplify(short) == short
    assert short == plane or not short.token_separable


@given(planes(), st.integers(0, 5))
def test_addresses_follow_the_formula(plane: Plane, block: int) -> None:
    addresses = list(walk(plane, [block]))
    assert plane.address(block) == addresses[0]
    assert plane.address(block, plane.outer_count - 1, plane.tokens - 1) == addresses[-1] + 1 - plane.run_bytes
    assert len(set(addresses)) == plane.share_bytes


@given(planes(), st.integers(0, 40))
def test_a_plane_in_which_two_bytes_meet_is_refused(plane: Plane, token_stride: int) -> None:
    """Strides that do not nest but miss each other by luck may be refused as well: no engine has such."""
    addresses = list(walk(_unchecked(plane, token_stride), list(range(6))))
    meets = len(set(addresses)) < len(addresses)
    try:
        KVPlanes((replace(plane, token_stride_bytes=token_stride, token_separable=False),), 6, 16)
    except ConfigError:
        return
    assert not meets


def _unchecked(plane: Plane, token_stride: int) -> Plane:
    copied = replace(plane)
    object.__setattr__(copied, "token_stride_bytes", token_stride)
    return copied


def test_a_dense_block_becomes_one_run_and_a_gap_stays_a_step() -> None:
    dense = Plane(0, 1024, 4, 256, 16, 16, 16)
    assert simplify(dense) == Plane(0, 1024, 1, 1024, 1, 256, 1024, False)
    gap = Plane(0, 1280, 4, 320, 16, 16, 16)
    assert (simplify(gap).outer_count, simplify(gap).tokens, simplify(gap).run_bytes) == (4, 1, 256)
    sliced = Plane(0, 2048, 4, 512, 16, 32, 16)
    assert (simplify(sliced).outer_count, simplify(sliced).tokens, simplify(sliced).run_bytes) == (1, 64, 16)


def test_dense_axes_are_joined_but_never_with_the_tokens() -> None:
    nhd = plane_of(0, 4096, [(16, 128), (4, 32), (16, 2)], 2, token_axis=0)
    assert nhd == Plane(0, 4096, 1, 0, 16, 128, 128)
    hnd = plane_of(0, 4096, [(4, 512), (16, 32), (16, 2)], 2, token_axis=1)
    assert hnd == Plane(0, 4096, 4, 512, 16, 32, 32)
    opaque = plane_of(0, 4096, [(4, 512), (16, 32), (16, 2)], 2, token_axis=None)
    assert opaque == Plane(0, 4096, 1, 0, 1, 0, 2048, False)


@pytest.mark.parametrize("axes", [[(4, 2), (3, 8)], [(2, 100), (3, 10), (4, 2)], [(3, 8), (4, 2)], [(2, 7), (1, 99)]])
def test_axes_without_tokens_keep_their_order_whatever_their_strides(axes: list[tuple[int, int]]) -> None:
    expected = [0]
    for size, stride in axes:
        expected = [start + index * stride for start in expected for index in range(size)]
    plane = plane_of(0, 4096, axes, 2, token_axis=None)
    assert list(walk(plane, [0])) == [address + byte for address in expected for byte in range(2)]


@pytest.mark.parametrize(("blocks", "sampled"), [(1, [0]), (2, [1, 0]), (3, [2, 0, 1]), (8, [7, 0, 4])])
def test_self_tests_write_the_last_the_first_and_a_middle_block(blocks: int, sampled: list[int]) -> None:
    assert sample_blocks(blocks) == sampled


def test_a_block_scattered_over_too_many_strides_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 levels of strides"):
        plane_of(0, 10_000, [(2, 4000), (2, 1000), (2, 100), (4, 2)], 2, token_axis=None)
    with pytest.raises(ConfigError, match="not one run"):
        plane_of(0, 10_000, [(16, 128), (4, 64), (4, 2)], 2, token_axis=0)


TWO = KVPlanes((Plane(0, 64, 1, 0, 4, 16, 16), Plane(4096, 32, 1, 0, 4, 8, 8)), num_blocks=8, block_tokens=4)
WHOLE = KVPlanes((Plane(0, 64, 1, 0, 1, 64, 64, False),), num_blocks=8, block_tokens=4)


def test_a_chunk_holds_plane_after_plane() -> None:
    assert TWO.block_bytes == 96
    assert TWO.chunk_bytes(3) == 288
    assert TWO.offsets(3) == (0, 192)
    part, offset = TWO.part(1, 2, 3)
    assert (part.planes, offset, part.num_blocks) == (TWO.planes[1:], 192, 8)
    with pytest.raises(CallerError, match=r"planes \[1, 3\) of 2"):
        TWO.part(1, 3, 3)
    assert [plane.run_bytes for plane in TWO.simplified().planes] == [64, 32]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([[0, 8]], "block id 8 does not exist"),
        ([[0, -1]], "block id -1 does not exist"),
        ([0, 1], "shape"),
        ([[0.0, 1.0]], "whole numbers"),
        ([[True, False]], "whole numbers"),
        (np.empty((0, 2), np.int64), "whole numbers"),
        (np.array([[2**64 - 1]], np.uint64), "does not exist"),
    ],
)
def test_block_ids_are_refused_on_the_host(ids: object, text: str) -> None:
    with pytest.raises(CallerError, match=text):
        TWO.check_blocks(ids)


def test_block_ids_come_back_dense_and_wide() -> None:
    ids = TWO.check_blocks(np.array([[1, 7], [3, 0]], np.int32).T)
    assert (ids.dtype, ids.flags.c_contiguous, ids.tolist()) == (np.int64, True, [[1, 3], [7, 0]])


def test_two_writers_of_one_block_are_refused_and_two_readers_are_not() -> None:
    assert TWO.check_blocks([[1, 1]]).tolist() == [[1, 1]]
    many = replace(TWO, num_blocks=1000)
    assert many.check_blocks([list(range(1000))], distinct=True).size == 1000
    with pytest.raises(CallerError, match="twice"):
        TWO.check_blocks([[1, 2], [3, 1]], distinct=True)


def test_tokens_are_skipped_only_where_they_can_be_told_apart() -> None:
    ids = TWO.check_blocks([[0, 1], [2, 3]])
    assert TWO.check_skip([3, 8], ids).tolist() == [3, 8]
    assert TWO.check_skip(None, ids).tolist() == [0, 0]
    assert WHOLE.check_skip([4, 8], ids).tolist() == [4, 8]
    for skip, text in (
        ([3, 4], "inner order"),
        ([0], "for each of 2"),
        ([0, 9], "must lie in"),
        ([-4, 0], "must lie in"),
    ):
        with pytest.raises(CallerError, match=text):
            WHOLE.check_skip(skip, ids)


def test_planes_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 planes"):
        KVPlanes((), 8, 4)
    with pytest.raises(ConfigError, match="4 tokens per block among blocks of 16"):
        KVPlanes(TWO.planes, 8, 16)
    with pytest.raises(ConfigError, match="overlap"):
        KVPlanes((Plane(0, 32, 1, 0, 4, 16, 16),), 8, 4)
    with pytest.raises(ConfigError, match="at least 1"):
        Plane(0, 64, 0, 0, 4, 16, 16)

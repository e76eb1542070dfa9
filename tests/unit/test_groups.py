"""The prefix rule, by example. `tests/machines/test_fold_brute_force.py` checks it against a cell-by-cell oracle."""

from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.bitmap import bits, ones
from kvcore.errors import CallerError, ConfigError
from kvcore.groups import CHUNK_TOKENS_MAX, CacheLayout, GroupKind, ObjectGroup, Row, negotiate_chunk_tokens

FULL = ObjectGroup(GroupKind.FULL, 2, 100)
RECURRENT = ObjectGroup(GroupKind.RECURRENT, 4, 1000)


def window(tokens: int, block_tokens: int = 2) -> ObjectGroup:
    return ObjectGroup(GroupKind.WINDOW, block_tokens, 10, tokens)


def layout(*groups: ObjectGroup, ranks: int = 1, chunk_tokens: int = 4) -> CacheLayout:
    return CacheLayout(groups, ranks, chunk_tokens)


def cells(text: str) -> int:
    """'101' is chunks 0 and 2."""
    return sum(1 << chunk for chunk, digit in enumerate(text) if digit == "1")


def servable(shape: CacheLayout, *rows: str, prompt_tokens: int | None = None, skip_chunks: int = 0) -> list[int]:
    chunks = len(rows[0])
    longer = chunks * shape.chunk_tokens + 1  # not a full hit
    tokens = longer if prompt_tokens is None else prompt_tokens
    return list(bits(shape.fold([cells(row) for row in rows], chunks, tokens, skip_chunks)))


# --- each kind of row by itself


def test_full_attention_serves_up_to_its_first_hole() -> None:
    assert servable(layout(FULL), "1101") == [0, 1, 2]
    assert servable(layout(FULL), "0111") == [0]
    assert servable(layout(FULL), "1111") == [0, 1, 2, 3, 4]


def test_a_window_of_one_chunk_serves_behind_a_hole() -> None:
    assert servable(layout(window(5)), "101") == [0, 1, 3]


def test_a_window_of_two_chunks_needs_two_in_a_row_but_at_the_beginning() -> None:
    assert servable(layout(window(6)), "1011011") == [0, 1, 4, 7]


def test_a_window_of_one_token_needs_nothing_and_is_not_full_attention() -> None:
    assert servable(layout(window(1)), "000") == [0, 1, 2, 3]
    assert servable(layout(window(1)), "000", prompt_tokens=12) == [0, 1, 2, 3]
    assert layout(window(1)).unfold(3, 12) == [0]


@pytest.mark.parametrize(("tokens", "width"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3), (10**6, 7)])
def test_a_window_covers_the_chunks_of_its_earlier_tokens(tokens: int, width: int) -> None:
    assert layout(window(tokens)).unfold(7, 100)[0].bit_count() == width


def test_a_recurrent_row_serves_where_a_snapshot_lies() -> None:
    assert servable(layout(RECURRENT), "0101") == [0, 2, 4]


def test_nothing_asked_and_nothing_there_serve_length_0() -> None:
    shape = layout(FULL, window(5), RECURRENT)
    assert shape.fold([0, 0, 0], 0, 0) == 1
    assert shape.fold([0, 0, 0], 3, 100) == 1
    assert shape.unfold(0, 0) == [0, 0, 0]
    assert shape.usable_tokens(0, 0) == 0


# --- rows together


def test_the_hit_is_a_length_that_every_row_serves_and_no_minimum_of_bests() -> None:
    shape = layout(FULL, window(5))
    full, windowed = cells("110"), cells("101")
    assert shape.best(layout(FULL).fold([full], 3, 100)) == 2
    assert shape.best(layout(window(5)).fold([windowed], 3, 100)) == 3
    assert shape.best(shape.fold([full, windowed], 3, 100)) == 1


def test_r42_one_rank_that_evicted_shortens_the_hit_of_all() -> None:
    shape = layout(FULL, ranks=2)
    lengths = shape.fold([cells("1111"), cells("1100")], 4, 100)
    assert shape.best(lengths) == 2
    # what rank 0 holds beyond is not kept
    assert shape.unfold(2, 100) == [0b11, 0b11]


def test_bits_beyond_the_asked_chunks_are_ignored() -> None:
    shape = layout(FULL, window(6), RECURRENT)
    assert shape.fold([-1, -1, -1], 3, 100) == ones(4)
    assert shape.fold([ones(90), ones(90), 1 << 50 | 0b100], 3, 100) == 0b1001


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_r14_what_unfold_names_is_all_that_has_to_be_stored_to_be_hit(ahead: int) -> None:
    shape = layout(FULL, window(8), window(5), RECURRENT, ranks=2)
    prompt = 40 + ahead
    length = 10 if ahead else 9
    assert shape.fold(shape.unfold(length, prompt), 10, prompt) >> length & 1


# --- the last token (R07)


def test_r07_a_full_hit_leaves_one_token_to_compute() -> None:
    shape = layout(FULL)
    assert servable(shape, "1111", prompt_tokens=16) == [0, 1, 2, 3, 4]
    assert shape.usable_tokens(4, 16) == 15
    assert shape.usable_tokens(4, 17) == 16
    assert shape.usable_tokens(3, 16) == 12


def test_r07_a_prompt_of_one_chunk_and_of_one_token() -> None:
    assert layout(FULL).usable_tokens(1, 4) == 3
    assert layout(FULL).usable_tokens(0, 1) == 0
    one_token = layout(ObjectGroup(GroupKind.FULL, 1, 1), chunk_tokens=1)
    assert one_token.fold([1], 1, 1) == 0b11
    assert one_token.usable_tokens(1, 1) == 0


def test_on_a_full_hit_a_window_of_1_mod_chunk_needs_one_chunk_more() -> None:
    shape = layout(window(5))
    assert servable(shape, "0001", prompt_tokens=17) == [0, 4]
    assert servable(shape, "0001", prompt_tokens=16) == [0]
    assert servable(shape, "0011", prompt_tokens=16) == [0, 3, 4]
    assert shape.unfold(4, 17) == [cells("0001")]
    assert shape.unfold(4, 16) == [cells("0011")]


@pytest.mark.parametrize("tokens", [2, 3, 4, 6, 7, 8])
def test_on_a_full_hit_other_windows_need_what_they_always_need(tokens: int) -> None:
    shape = layout(window(tokens))
    assert shape.unfold(4, 16) == shape.unfold(4, 17)


def test_with_chunks_of_one_token_the_chunk_that_is_computed_again_is_not_asked_of_a_window() -> None:
    shape = layout(window(3, block_tokens=1), chunk_tokens=1)
    # tokens [n - 3, n - 1) of n = 5
    assert shape.unfold(5, 5) == [cells("00110")]
    assert servable(shape, "00110", prompt_tokens=5) == [0, 4, 5]
    assert shape.unfold(4, 4) == [cells("0110")]


def test_a_recurrent_row_falls_back_to_an_earlier_snapshot_on_a_full_hit() -> None:
    shape = layout(FULL, RECURRENT)
    assert servable(shape, "1111", "0101", prompt_tokens=16) == [0, 2]
    assert servable(shape, "1111", "0101", prompt_tokens=17) == [0, 2, 4]
    assert servable(shape, "1111", "1111", prompt_tokens=16) == [0, 1, 2, 3]
    with pytest.raises(CallerError, match="recurrent"):
        shape.unfold(4, 16)
    assert shape.usable_tokens(4, 16) == 15  # an upper bound for whoever asks before anything is looked up
    assert shape.unfold(2, 16) == [0b11, 0b10]
    assert shape.usable_tokens(2, 16) == 8


def test_fewer_chunks_than_the_prompt_has_are_no_full_hit() -> None:
    assert layout(FULL, RECURRENT).fold([0b111, 0b111], 3, 16) == 0b1111


@pytest.mark.parametrize("length", [-1, 5])
def test_a_length_that_is_no_prefix_of_the_prompt_is_refused(length: int) -> None:
    for refused in (layout(FULL).unfold, layout(FULL).usable_tokens):
        with pytest.raises(CallerError, match="no prefix"):
            refused(length, 19)


# --- what the engine has already (R67)


def test_r67_chunks_the_engine_has_count_as_present_and_are_not_needed() -> None:
    shape = layout(FULL, window(6), RECURRENT)
    assert servable(shape, "0011", "0011", "0001", skip_chunks=2) == [0, 1, 2, 4]
    assert shape.unfold(4, 100, 2) == [cells("0011"), cells("0011"), cells("0001")]
    assert shape.unfold(3, 100, 2) == [cells("001"), cells("001"), cells("001")]
    assert shape.virtual(2) == 0b11


def test_a_length_inside_the_engines_own_prefix_needs_nothing() -> None:
    shape = layout(FULL, window(6), RECURRENT)
    assert shape.unfold(2, 100, 3) == [0, 0, 0]
    assert servable(shape, "00", "00", "00", skip_chunks=9) == [0, 1, 2]


def test_the_engines_own_prefix_does_not_lift_the_last_token_rule() -> None:
    assert servable(layout(FULL, RECURRENT), "00", "00", prompt_tokens=8, skip_chunks=2) == [0, 1]


# --- why not


def test_explain_names_row_and_missing_chunks() -> None:
    shape = layout(FULL, window(6), ranks=2)
    text = shape.explain([cells("1111"), cells("1111"), cells("1011"), cells("1101")], 4, 100, 4)
    assert "length 4 of 4" in text
    assert "not servable" in text
    assert "row 2 (rank 1, group 0: full) needs chunks 0-3 and lacks 1" in text
    assert "row 3 (rank 1, group 1: window 6) needs chunks 2-3 and lacks 2" in text
    assert "row 0" not in text
    assert "row 1" not in text


def test_explain_names_the_last_token_rule() -> None:
    text = layout(FULL, RECURRENT).explain([0b11, 0b11], 2, 8, 2)
    assert "row 1 (rank 0, group 1: recurrent) cannot serve the whole prompt" in text
    assert "row 0" not in text


def test_explain_says_that_a_length_is_servable_or_was_not_asked() -> None:
    assert layout(FULL).explain([0b11], 2, 100, 2).endswith(": servable")
    assert layout(FULL).explain([0b11], 2, 100, 3).endswith("not a length of this lookup")


def test_explain_of_many_holes_stays_short() -> None:
    text = layout(FULL).explain([cells("10" * 500)], 1000, 10**6, 1000)
    assert "1, 3, 5, 7, 9, 11, 13, 15 and 492 more" in text
    assert len(text) < 300


def test_explain_counts_whole_ranges_that_it_does_not_show() -> None:
    held = cells("10" * 8 + "100" + "1000" + "10000")
    text = layout(FULL).explain([held], 28, 10**6, 28)
    assert "lacks 1, 3, 5, 7, 9, 11, 13, 15 and 9 more" in text


def test_explain_shows_ranges_as_first_and_last() -> None:
    assert "lacks 1-2, 4, 6-8" in layout(FULL).explain([cells("100101000")], 9, 100, 9)


def test_explain_leaves_out_what_the_engine_has() -> None:
    text = layout(FULL).explain([cells("0001")], 4, 100, 4, skip_chunks=2)
    assert "needs chunks 2-3 and lacks 2" in text


# --- layouts


def test_rows_are_ordered_by_rank_and_then_by_group() -> None:
    shape = layout(FULL, window(5), ranks=2)
    assert shape.rows == (Row(0, 0, 0), Row(1, 1, 0), Row(2, 0, 1), Row(3, 1, 1))


def test_a_cell_holds_the_blocks_of_a_chunk_and_a_recurrent_one_a_single_state() -> None:
    shape = layout(FULL, ObjectGroup(GroupKind.WINDOW, 4, 10, 5), RECURRENT, ranks=2, chunk_tokens=8)
    assert [shape.blocks_per_chunk(group) for group in range(3)] == [4, 2, 1]
    assert [shape.cell_bytes(group) for group in range(3)] == [400, 20, 1000]
    assert shape.cell_bytes_rows == (400, 20, 1000) * 2


def test_layouts_are_values() -> None:
    one, two = layout(FULL, window(5), ranks=2), layout(FULL, window(5), ranks=2)
    assert one == two
    assert hash(one) == hash(two)
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    assert copy.fold([0b1, 0b1, 0b1, 0b1], 1, 100) == 0b11
    with pytest.raises(FrozenInstanceError):
        one.ranks = 3  # type: ignore[misc]


def test_a_layout_prints_what_it_was_made_of_and_nothing_that_follows_from_it() -> None:
    shown = re.findall(r"(\w+)=", repr(layout(window(5), ranks=2)))
    assert shown == ["groups", "kind", "block_tokens", "bytes_per_block", "window_tokens", "ranks", "chunk_tokens"]


def test_the_fingerprint_tells_layouts_apart() -> None:
    shapes = [
        layout(FULL),
        layout(FULL, ranks=2),
        layout(FULL, chunk_tokens=8),
        layout(FULL, FULL),
        layout(window(5)),
        layout(window(6)),
        layout(ObjectGroup(GroupKind.FULL, 4, 100)),
        layout(ObjectGroup(GroupKind.FULL, 2, 101)),
        layout(ObjectGroup(GroupKind.RECURRENT, 2, 100)),
    ]
    assert len({shape.fingerprint for shape in shapes}) == len(shapes)
    assert layout(FULL).fingerprint == layout(FULL).fingerprint


@pytest.mark.parametrize(
    "arguments",
    [
        (GroupKind.FULL, 0, 1),
        (GroupKind.FULL, -16, 1),
        (GroupKind.FULL, 16, 0),
        (GroupKind.FULL, True, 1),
        (GroupKind.FULL, 16.0, 1),
        (GroupKind.FULL, 16, 1, 64),
        (GroupKind.RECURRENT, 16, 1, 64),
        (GroupKind.WINDOW, 16, 1),
        (GroupKind.WINDOW, 16, 1, 0),
        ("full", 16, 1),
    ],
)
def test_a_group_that_cannot_exist_is_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=r"block|window|kind"):
        ObjectGroup(*arguments)


@pytest.mark.parametrize(
    ("groups", "ranks", "chunk_tokens", "reason"),
    [
        ((), 1, 4, "at least one object group"),
        ((FULL,), 0, 4, "ranks"),
        ((FULL,), 1, 0, "chunk_tokens"),
        ((FULL,), 1, CHUNK_TOKENS_MAX * 2, "limit"),
        ((FULL,), 1, 5, "nearest legal size is 4"),
        ((FULL, window(5, 3)), 1, 8, r"group 1 \(window 5\); the nearest legal size is 6"),
        ((FULL, RECURRENT), 1, 6, r"group 1 \(recurrent\)"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_its_reason(
    groups: Any, ranks: int, chunk_tokens: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        CacheLayout(groups, ranks, chunk_tokens)


def test_the_fingerprint_does_not_change_by_accident() -> None:
    """It is part of every namespace: another one makes everything that stores hold unreachable."""
    groups = (
        ObjectGroup(GroupKind.FULL, 16, 4096),
        ObjectGroup(GroupKind.WINDOW, 16, 1024, 128),
        ObjectGroup(GroupKind.RECURRENT, 64, 65536),
    )
    assert CacheLayout(groups, 2, 256).fingerprint == "9329d426cb71c24f0f937a42395a5431"


# --- negotiation


@pytest.mark.parametrize(
    ("blocks", "wish", "nearest"),
    [
        ((16,), 256, 256),
        ((16, 32), 256, 256),
        ((16, 48), 256, 240),
        ((16, 48), 265, 288),
        ((16, 48), 264, 240),  # 240 and 288 are equally near: the smaller
        ((100,), 1, 100),
        ((100,), 10**9, 65500),
        ((CHUNK_TOKENS_MAX,), 256, CHUNK_TOKENS_MAX),
    ],
)
def test_negotiation_gives_the_nearest_legal_size(blocks: tuple[int, ...], wish: int, nearest: int) -> None:
    assert negotiate_chunk_tokens([ObjectGroup(GroupKind.FULL, block, 1) for block in blocks], wish) == nearest


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(1, 70_000))
def test_no_legal_size_is_nearer_than_the_negotiated_one(blocks: list[int], wish: int) -> None:
    groups = [ObjectGroup(GroupKind.RECURRENT, block, 1) for block in blocks]
    sizes = np.arange(1, CHUNK_TOKENS_MAX + 1)
    legal = sizes[np.all([sizes % block == 0 for block in blocks], axis=0)].tolist()
    if not legal:
        with pytest.raises(ConfigError, match="no chunk size"):
            negotiate_chunk_tokens(groups, wish)
        return
    expected = min(legal, key=lambda size: (abs(size - wish), size))
    assert negotiate_chunk_tokens(groups, wish) == expected
    assert CacheLayout(tuple(groups), 1, expected).chunk_tokens == expected


def test_negotiation_says_why_no_size_is_legal() -> None:
    groups = [ObjectGroup(GroupKind.FULL, 65521, 1), window(64, 16)]
    with pytest.raises(ConfigError, match=r"full: 65521, window 64: 16\b.* is 1048336 tokens"):
        negotiate_chunk_tokens(groups, 256)
    with pytest.raises(ConfigError, match="at least one object group"):
        negotiate_chunk_tokens([], 256)


@pytest.mark.parametrize("wish", [0, -1, 2.5, True, None])
def test_a_wish_that_is_no_size_is_refused(wish: Any) -> None:
    with pytest.raises(ConfigError, match="wished chunk size"):
        negotiate_chunk_tokens([FULL], wish)

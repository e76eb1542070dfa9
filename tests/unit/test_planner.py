"""The plan of a lookup: every needed cell has one source, the greatest affordable length wins."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.planner import (
    Demand,
    Plan,
    common,
    demand_of,
    minus,
    none_of,
    plan,
    union,
    useful,
    worst_case_bytes,
)

CHUNK = 4
FULL = ObjectGroup(GroupKind.FULL, 4, 100)
WINDOW = ObjectGroup(GroupKind.WINDOW, 4, 40, 6)  # reaches 2 chunks back, and one more cell never hurts
RECURRENT = ObjectGroup(GroupKind.RECURRENT, 4, 70)


def layout_of(*groups: ObjectGroup, ranks: int = 1) -> CacheLayout:
    return CacheLayout(groups, ranks, CHUNK)


def everything(layout: CacheLayout, chunks: int) -> tuple[int, ...]:
    return ((1 << chunks) - 1,) * len(layout.rows)


def demand(layout: CacheLayout, chunks: int, *, prompt_tokens: int | None = None, skip: int = 0) -> Demand:
    tokens = chunks * CHUNK + 1 if prompt_tokens is None else prompt_tokens
    return demand_of(layout, chunks, tokens, everything(layout, chunks), skip)


def made(
    wanted: Demand, present: object = None, loading: object = None, found: object = (), budget: int = 1 << 40
) -> Plan:
    nothing = none_of(wanted.required)
    return plan(wanted, present=present or nothing, loading=loading or nothing, found=found, budget_bytes=budget)  # type: ignore[arg-type]


def test_a_cell_in_l1_is_not_loaded_even_when_both_adapters_have_it() -> None:
    layout = layout_of(FULL)
    result = made(demand(layout, 4), present=(0b0011,), found=[(0b1111,), (0b1111,)])
    assert result.length == 4
    assert result.loads == ((0b1100,), (0,))
    assert result.unlocks == ((0b0011,), (0b1111,))


def test_the_first_adapter_in_configured_order_supplies_what_both_have() -> None:
    result = made(demand(layout_of(FULL), 4), found=[(0b0101,), (0b1111,)])
    assert result.loads == ((0b0101,), (0b1010,))
    assert result.unlocks == ((0,), (0b0101,))


def test_a_cell_that_is_loading_already_is_joined_and_costs_nothing() -> None:
    result = made(demand(layout_of(FULL), 3), loading=(0b001,), found=[(0b111,)], budget=200)
    assert result.length == 3
    assert result.joined == (0b001,)
    assert result.load_bytes == 200


def test_a_hole_ends_the_prefix_and_everything_behind_it_is_given_back() -> None:
    result = made(demand(layout_of(FULL), 4), present=(0b1000,), found=[(0b0011,)])
    assert result.length == 2
    assert result.spare == (0b1000,)
    assert result.loads == ((0b0011,),)


def test_a_window_row_loads_only_its_window() -> None:
    layout = layout_of(FULL, WINDOW)
    result = made(demand(layout, 6), found=[everything(layout, 6)])
    assert result.length == 6
    assert result.loads == ((0b111111, 0b110000),)
    assert result.unlocks == ((0, 0b001111),)


def test_a_recurrent_row_falls_back_to_an_earlier_snapshot_on_a_full_hit() -> None:
    """R07: the last token must be computed, and a state that contains it serves nothing."""
    layout = layout_of(FULL, RECURRENT)
    result = made(demand(layout, 3, prompt_tokens=3 * CHUNK), found=[everything(layout, 3)])
    assert result.length == 2
    assert result.loads == ((0b011, 0b010),)


def test_a_recurrent_row_falls_back_to_an_earlier_snapshot_where_a_later_one_is_lost() -> None:
    """S50: the attention rows have four chunks, the newest snapshots are gone."""
    layout = layout_of(FULL, RECURRENT)
    result = made(demand(layout, 4, prompt_tokens=5 * CHUNK), found=[(0b1111, 0b0010)])
    assert result.length == 2
    assert result.loads == ((0b0011, 0b0010),)


def test_a_demand_over_the_budget_is_cut_to_the_longest_prefix_that_fits() -> None:
    """R36: the whole of a shorter prefix, never part of a longer one."""
    assert made(demand(layout_of(FULL), 8), found=[(0xFF,)], budget=350).length == 3
    assert made(demand(layout_of(FULL), 8), found=[(0xFF,)], budget=99).length == 0
    assert made(demand(layout_of(FULL), 8), present=(0b11,), found=[(0xFC,)], budget=0).length == 2


def test_a_longer_prefix_can_be_cheaper_when_its_window_is_in_l1() -> None:
    layout = layout_of(ObjectGroup(GroupKind.FULL, 4, 1), WINDOW)
    rows = (0b1111, 0b1100)
    result = made(demand(layout, 4), present=(0, 0b1100), found=[(0b1111, 0b0011)], budget=10)
    assert rows == union(result.kept, result.loads[0])
    assert result.length == 4


def test_chunks_that_the_engine_has_are_neither_leased_nor_loaded() -> None:
    """R67: with most of the prompt local, only the missing chunks are read."""
    layout = layout_of(FULL, WINDOW)
    wanted = demand(layout, 10, skip=9)
    assert wanted.required == (1 << 9, 1 << 9)
    result = made(wanted, found=[(1 << 9, 1 << 9)])
    assert result.length == 10
    assert result.load_bytes == 140


def test_another_servers_cells_count_as_present() -> None:
    layout = layout_of(FULL, ranks=2)
    wanted = demand_of(layout, 4, 100, (0b1111, 0))
    assert made(wanted, found=[(0b0111, 0)]).length == 3


def test_only_cells_that_can_lengthen_the_answer_are_worth_looking_up() -> None:
    layout = layout_of(FULL, WINDOW, RECURRENT)
    wanted = demand(layout, 8)
    held = (0b1111, 0b1100, 0b1000)
    missing = minus(wanted.required, held)
    full, window, recurrent = useful(wanted, held, missing)
    assert full == 0b11110000
    assert window == 0b11110000
    assert recurrent == 0b11110000
    assert useful(wanted, wanted.required, none_of(held)) == (0, 0, 0)


def test_the_worst_case_of_window_and_recurrent_rows_is_their_reach_not_their_sum() -> None:
    layout = layout_of(FULL, WINDOW, RECURRENT)
    wanted = demand(layout, 100)
    assert worst_case_bytes(wanted, wanted.required) == 100 * 100 + 3 * 40 + 70


def test_cost_of_a_large_cut_plan_is_milliseconds() -> None:
    """A bound on steps, not on time: the bisection leaves few candidates to walk over."""
    layout = CacheLayout((FULL, WINDOW), 16, CHUNK)
    wanted = demand(layout, 4096)
    result = made(wanted, found=[wanted.required], budget=16 * (2000 * 100 + 2 * 40))
    assert result.length == 2000


GROUPS = st.lists(
    st.sampled_from(
        [FULL, WINDOW, RECURRENT, ObjectGroup(GroupKind.WINDOW, 4, 30, 1), ObjectGroup(GroupKind.WINDOW, 2, 5, 9)]
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Demand, tuple[int, ...], tuple[int, ...], list[tuple[int, ...]], int]:
    chunks = draw(st.integers(0, 6))
    layout = CacheLayout(tuple(draw(GROUPS)), draw(st.integers(1, 2)), CHUNK)
    cells = st.integers(0, (1 << chunks) - 1)
    rows = st.tuples(*[cells] * len(layout.rows))
    tail = draw(st.integers(0, CHUNK - 1))
    wanted = demand_of(layout, chunks, chunks * CHUNK + tail, draw(rows), draw(st.integers(0, chunks)))
    present = common(draw(rows), wanted.required)
    loading = common(draw(rows), wanted.required)
    found = [common(draw(rows), wanted.required) for _ in range(draw(st.integers(0, 3)))]
    return wanted, present, loading, found, draw(st.sampled_from([0, 40, 140, 300, 1000, 1 << 30]))


def brute_force(wanted: Demand, present: object, loading: object, found: object, budget: int) -> int:
    """Length by length, row by row, cell by cell."""
    layout = wanted.layout
    have = union(present, loading)  # type: ignore[arg-type]
    best = 0
    for length in range(wanted.chunks + 1):
        cost, possible = 0, True
        for row in layout.rows:
            for chunk in cells_of(layout, row.group, length, wanted.prompt_tokens):
                if chunk is None:
                    possible = False
                elif not wanted.required[row.index] >> chunk & 1 or have[row.index] >> chunk & 1:
                    continue
                elif any(rows[row.index] >> chunk & 1 for rows in found):  # type: ignore[attr-defined]
                    cost += layout.cell_bytes_rows[row.index]
                else:
                    possible = False
        if possible and cost <= budget:
            best = length
    return best


def cells_of(layout: CacheLayout, group: int, length: int, prompt_tokens: int) -> list[int | None]:
    """The chunks whose tokens a continuation after `length` chunks attends to in this group. None: impossible."""
    spec = layout.groups[group]
    end = length * layout.chunk_tokens
    full_hit = length > 0 and end == prompt_tokens
    if length == 0:
        return []
    if spec.kind is GroupKind.RECURRENT:
        return [None] if full_hit else [length - 1]
    if spec.kind is GroupKind.FULL:
        return list(range(length))
    assert spec.window_tokens is not None
    next_token = end - 1 if full_hit else end  # the first token that is computed attends to window - 1 before it
    seen = range(max(0, next_token - spec.window_tokens + 1), next_token)
    return list(dict.fromkeys(token // layout.chunk_tokens for token in seen))


@settings(max_examples=400, deadline=None)
@given(situations())
def test_the_plan_is_the_greatest_affordable_length_of_brute_force(
    situation: tuple[Demand, tuple[int, ...], tuple[int, ...], list[tuple[int, ...]], int],
) -> None:
    wanted, present, loading, found, budget = situation
    result = made(wanted, present, loading, found, budget)
    assert result.length == brute_force(wanted, present, loading, found, budget)


@settings(max_examples=400, deadline=None)
@given(situations())
def test_each_needed_cell_has_one_protected_source_and_each_lock_is_used_or_returned(
    situation: tuple[Demand, tuple[int, ...], tuple[int, ...], list[tuple[int, ...]], int],
) -> None:
    wanted, present, loading, found, budget = situation
    result = made(wanted, present, loading, found, budget)
    for row, chunk in product(range(len(wanted.required)), range(wanted.chunks)):

        def has(rows: tuple[int, ...], row: int = row, chunk: int = chunk) -> bool:
            return bool(rows[row] >> chunk & 1)

        sources = [has(result.kept), has(result.joined), *map(has, result.loads)]
        assert sum(sources) == has(wanted.needed(result.length))
        assert not has(result.kept) or has(present)
        assert not has(result.joined) or has(loading)
        assert has(present) == (has(result.kept) or has(result.spare))
        for locked, loads, unlocks in zip(found, result.loads, result.unlocks, strict=True):
            assert has(locked) == (has(loads) or has(unlocks))
            assert not (has(loads) and has(unlocks))
    assert result.load_bytes <= budget


@settings(max_examples=200, deadline=None)
@given(situations())
def test_the_worst_case_bounds_every_plan_and_looking_up_only_useful_cells_loses_nothing(
    situation: tuple[Demand, tuple[int, ...], tuple[int, ...], list[tuple[int, ...]], int],
) -> None:
    wanted, present, loading, found, _ = situation
    coming = union(present, loading)
    worth = useful(wanted, coming, minus(wanted.required, coming))
    asked = [common(rows, worth) for rows in found]
    narrow = made(wanted, present, loading, asked)
    assert narrow.length == made(wanted, present, loading, found).length
    assert narrow.load_bytes <= worst_case_bytes(wanted, worth)


def test_a_lease_outside_the_demand_is_our_own_mistake() -> None:
    wanted = demand_of(layout_of(FULL), 4, 100, (0b0011,))
    with pytest.raises(AssertionError, match="outside the demand"):
        made(wanted, present=(0b0100,))


def test_plans_are_reproducible() -> None:
    rng = random.Random(5)
    layout = layout_of(FULL, WINDOW, ranks=2)
    wanted = demand(layout, 12)
    rows = [tuple(rng.getrandbits(12) for _ in layout.rows) for _ in range(4)]
    assert made(wanted, rows[0], rows[1], rows[2:]) == made(wanted, rows[0], rows[1], rows[2:])

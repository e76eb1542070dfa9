"""The search against brute force, and the decision under load."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.reports.breakeven import (
    Busy,
    LineLoad,
    break_even,
    inflation,
    overlapped_s,
    paying_ranges,
    pays,
    saved_s,
    split,
    split_s,
)
from kvcore.reports.prefill import PrefillTerms

PREFILLS = st.builds(PrefillTerms, fixed_s=st.floats(0, 0.1), token_s=st.floats(1e-6, 1e-3), pair_s=st.floats(0, 1e-6))
LOADS = st.builds(LineLoad, wait_s=st.floats(0, 0.5), token_s=st.floats(1e-7, 2e-3))
BUSY = st.builds(Busy, gpu=st.floats(0, 1.2), link=st.floats(0, 1.2))
BLOCKS = st.sampled_from([1, 7, 16])
UNIT = 2.0**-10  # exact in binary, so that ties are ties
LINE = PrefillTerms(0.0, 2 * UNIT, 0.0)


def test_a_load_that_saves_a_millisecond_per_token_pays_after_its_wait() -> None:
    assert break_even(LINE, LineLoad(1.0, UNIT)) == 1025, "at 1024 tokens both take as long"
    assert break_even(LINE, LineLoad(1.0, UNIT), block_tokens=16) == 1040


def test_a_load_slower_than_computing_never_pays_until_attention_makes_it() -> None:
    slow = LineLoad(0.0, 3 * UNIT)
    assert break_even(LINE, slow) is None
    bent = PrefillTerms(0.0, 2 * UNIT, UNIT**2)
    # U^2 p^2 / 2 = U p at p = 2048; the last token's own attention to the prefix is paid either way.
    assert break_even(bent, slow) == 2049
    assert break_even(bent, slow, tokens_max=2048) is None
    assert break_even(bent, slow, tokens_max=2049) == 2049


def test_a_limit_below_one_block_has_no_break_even() -> None:
    assert break_even(LINE, LineLoad(0.0, 0.0), block_tokens=16, tokens_max=15) is None
    assert break_even(LINE, LineLoad(0.0, 0.0), block_tokens=16, tokens_max=16) == 16


@given(PREFILLS, LOADS, BUSY, BLOCKS, st.integers(1, 50))
def test_the_search_finds_what_a_walk_finds(
    prefill: PrefillTerms, load: LineLoad, busy: Busy, block: int, rest: int
) -> None:
    limit = 600
    walk = [at for at in range(block, limit + 1, block) if pays(prefill, load, at, rest, busy)]
    found = break_even(prefill, load, rest_tokens=rest, block_tokens=block, busy=busy, tokens_max=limit)
    assert found == (walk[0] if walk else None)
    if found:
        assert walk == list(range(found, limit // block * block + 1, block)), "once it pays it stays so"


@dataclass(frozen=True)
class Stairs:
    """A prefill whose time is whatever a list says: for ranges that come and go."""

    times: tuple[float, ...]

    def seconds(self, new_tokens: int, prefix_tokens: int = 0) -> float:
        return self.times[min(new_tokens + prefix_tokens, len(self.times) - 1)] if not prefix_tokens else 0.0

    def marginal_s(self, prefix_tokens: int) -> float:
        raise AssertionError("ranges do not ask for it")


def ranges_of(walk: list[int]) -> list[tuple[int, int]]:
    starts = [at for at in walk if at - 1 not in walk]
    ends = [at for at in walk if at + 1 not in walk]
    return list(zip(starts, ends))


@given(st.lists(st.sampled_from([0.0, 2.0]), min_size=1, max_size=30), st.integers(1, 33))
def test_ranges_that_come_and_go_are_all_found_among_the_first_blocks(times: list[float], limit: int) -> None:
    prefill, load = Stairs((0.0, 0.0, *times)), LineLoad(1.0, 0.0)
    walk = [at for at in range(1, limit + 1) if pays(prefill, load, at)]
    assert paying_ranges(prefill, load, tokens_max=limit) == ranges_of(walk)
    assert break_even(prefill, load, tokens_max=limit) == (ranges_of(walk)[-1][0] if limit in walk else None)


def test_a_range_far_out_is_found_to_the_token() -> None:
    prefill = Stairs((0.0,) * 5_001 + (2.0,) * 777 + (0.0,))
    assert paying_ranges(prefill, LineLoad(1.0, 0.0), tokens_max=20_000) == [(5_000, 5_776)]
    assert break_even(prefill, LineLoad(1.0, 0.0), tokens_max=20_000) is None, "it ends"


def test_attention_of_the_rest_to_the_prefix_is_paid_either_way() -> None:
    prefill = PrefillTerms(0.5, 0.001, 1e-6)
    assert saved_s(prefill, 300, 40) == pytest.approx(prefill.seconds(300) - 0.5), "the fixed part is paid once, anyway"


@pytest.mark.parametrize(("busy", "times"), [(0.0, 1.0), (0.5, 2.0), (0.9, 10.0), (1.0, math.inf), (1.5, math.inf)])
def test_a_busy_second_is_worth_more_and_at_one_endless(busy: float, times: float) -> None:
    assert inflation(busy) == pytest.approx(times)


def test_a_busy_link_raises_the_break_even_and_a_busy_gpu_lowers_it() -> None:
    load = LineLoad(0.5, UNIT)
    idle, link, gpu = (break_even(LINE, load, busy=busy) for busy in (Busy(), Busy(link=0.3), Busy(gpu=0.5)))
    assert (idle, link, gpu) == (513, 897, 171)
    assert break_even(LINE, load, busy=Busy(link=0.5)) is None, "the link is worth as much as the GPU saved"
    assert break_even(LINE, load, busy=Busy(link=1.0)) is None, "a forced load on a saturated link diverges"


def test_the_wait_of_a_load_is_not_made_longer_by_a_busy_link() -> None:
    assert pays(LINE, LineLoad(1.9, 0.0), 1_000, 1, Busy(link=0.99)), "1.95 s saved"


@given(PREFILLS, LOADS, st.integers(0, 400), BLOCKS)
def test_no_other_split_ends_earlier(prefill: PrefillTerms, load: LineLoad, prefix: int, block: int) -> None:
    front = split(prefill, load, prefix, block)
    best = min(split_s(prefill, load, prefix, one) for one in (*range(0, prefix + 1, block), prefix))
    assert split_s(prefill, load, prefix, front) <= best * (1 + 1e-12)
    assert front % block == 0 or front == prefix


def test_equal_rates_split_in_the_middle() -> None:
    load = LineLoad(0.0, 2 * UNIT)
    assert split(LINE, load, 1_000) == 500
    assert split(LINE, LineLoad(10.0, 2 * UNIT), 1_000) == 1_000, "a long wait: load nothing"
    assert split(PrefillTerms(10.0, 2 * UNIT, 0.0), load, 1_000) == 0, "a dear step: load all"


@given(LOADS, st.integers(1, 10_000), st.floats(0, 10), st.integers(1, 100))
def test_overlap_lies_between_the_longer_part_and_both(
    load: LineLoad, prefix: int, compute: float, layers: int
) -> None:
    link = load.link_s(prefix)
    time = overlapped_s(load, prefix, compute, layers) - load.wait_s
    assert max(link, compute) <= time * (1 + 1e-9) + 1e-12
    assert time <= (link + compute) * (1 + 1e-9) + 1e-12


def test_one_layer_cannot_overlap_and_many_nearly_hide_the_shorter_part() -> None:
    load = LineLoad(0.0, 0.001)
    assert overlapped_s(load, 1_000, 1.0, 1) == pytest.approx(2.0)
    assert overlapped_s(load, 1_000, 1.0, 100) == pytest.approx(1.01)
    assert overlapped_s(load, 0, 1.0, 100) == 1.0

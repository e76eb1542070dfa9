"""Fits, percentiles and the prefix cache's rule, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.reports.fitting import fit, held_out
from kvcore.reports.percentiles import percentile, samples_needed
from kvcore.reports.prefix_lru import prefix_lru

SIZES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
ONES = [1.0] * len(SIZES)


@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_an_exact_law_is_found_exactly(fixed: float, each: float) -> None:
    found = fit([ONES, SIZES], [fixed + each * size for size in SIZES])
    assert found.error_mean < 1e-9


def test_one_bad_point_does_not_bend_the_law() -> None:
    times = [3.0 + 2.0 * size for size in SIZES]
    times[3] *= 3
    found = fit([ONES, SIZES], times)
    assert found.coefficients == (pytest.approx(3.0, rel=1e-3), pytest.approx(2.0, rel=1e-3))


def test_a_cost_is_never_negative() -> None:
    found = fit([ONES, SIZES], [2.0 * size - 1.5 for size in SIZES])
    assert found.coefficients[0] == 0.0
    assert found.coefficients[1] > 0


def test_held_out_points_are_not_in_the_fit() -> None:
    times = [3.0 + 2.0 * size for size in SIZES]
    times[1] = times[3] = times[5] = 1e6
    found = held_out([ONES, SIZES], times)
    assert found.coefficients == (pytest.approx(3.0), pytest.approx(2.0))
    assert len(found.errors) == 3
    assert min(found.errors) > 0.9


@pytest.mark.parametrize(
    ("columns", "times", "message"),
    [
        ([ONES], ONES[1:], "as many points"),
        ([[1.0, 1.0], [1.0, 2.0]], [1.0, 2.0], "2 points are too few for 2 terms"),
        ([ONES], [0.0] * 7, "above 0"),
        ([ONES], [-1.0] * 7, "above 0"),
        ([ONES], [float("nan")] * 7, "finite"),
        ([[float("inf")] * 7], ONES, "finite"),
    ],
)
def test_points_that_show_no_law_are_refused(columns: list[list[float]], times: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(columns, times)


@pytest.mark.parametrize(("percent", "needed"), [(50, 20), (90, 100), (99, 1_000), (99.9, 10_000), (1, 1_000)])
def test_a_percentile_needs_ten_samples_beyond_it(percent: float, needed: int) -> None:
    assert samples_needed(percent) == needed
    assert percentile([1.0] * (needed - 1), percent) is None
    assert percentile([1.0] * needed, percent) == 1.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=100, max_size=150), st.sampled_from([10, 50, 75, 90]))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_a_prompt_hits_its_leading_blocks_and_no_further() -> None:
    warm = [(40, [1, 2, 3, 4])]
    assert prefix_lru([*warm, (40, [1, 2, 9, 4])], 10, 10).hit_tokens == 20
    assert prefix_lru([*warm, (40, [9, 2, 3, 4])], 10, 10).hit_tokens == 0


def test_a_hit_is_never_longer_than_its_prompt() -> None:
    assert prefix_lru([(35, [1, 2, 3, 4]), (35, [1, 2, 3, 4])], 10, 10).hit_tokens == 35


def test_the_beginning_of_a_prompt_is_evicted_last() -> None:
    assert prefix_lru([(40, [1, 2, 3, 4]), (40, [1, 2, 3, 4])], 2, 10).hit_tokens == 20


def test_only_the_last_half_counts() -> None:
    rate = prefix_lru([(10, [1]), (10, [1]), (10, [2]), (10, [2])], 10, 10)
    assert (rate.hit_tokens, rate.input_tokens, rate.percent) == (10, 20, 50.0)


def test_no_room_and_no_requests_hit_nothing() -> None:
    assert prefix_lru([(10, [1]), (10, [1])], 0, 10).percent == 0.0
    assert prefix_lru([], 10).percent == 0.0
    with pytest.raises(ConfigError, match="capacity_blocks must be from 0"):
        prefix_lru([], -1)


@given(st.lists(st.lists(st.integers(0, 12), unique=True, min_size=1, max_size=6), max_size=30), st.integers(0, 12))
def test_more_room_hits_no_less(prompts: list[list[int]], capacity: int) -> None:
    trace = [(10 * len(blocks), blocks) for blocks in prompts]
    less, more = (prefix_lru(trace, size, 10).hit_tokens for size in (capacity, capacity + 1))
    assert more >= less

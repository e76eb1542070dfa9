"""A stream of requests: limits where the answer is known, and what hit rate, load and a shared link do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.reports.breakeven import LineLoad
from kvcore.reports.cost import load_terms, prefill_terms
from kvcore.reports.parameters import builtin
from kvcore.reports.prefill import PrefillTerms
from kvcore.reports.stream import Requests, finite, hits_floor, load_range, stream
from kvcore.reports.tier import host_memory

PREFILL = PrefillTerms(0.0, 1e-4, 0.0)  # 1 s for 10,000 tokens
FAST, SLOW = LineLoad(0.01, 1e-6), LineLoad(0.01, 3e-4)
LONG = Requests(9000, 1000, hits=1.0, load=0.0)


def test_without_load_a_request_takes_its_service_times() -> None:
    at = stream(PREFILL, FAST, LONG)
    assert at.never_s == pytest.approx(1.0)
    assert at.always_s == pytest.approx(0.1 + 0.01 + 0.009)


def test_without_hits_nothing_changes_but_the_lookups() -> None:
    at = stream(PREFILL, FAST, Requests(9000, 1000, hits=0.0, load=0.5, lookup_s=0.003))
    assert at.always_s == pytest.approx(at.never_s + 0.003)
    assert at.capacity == pytest.approx(1.0)


def test_without_hits_loading_wins_at_no_load() -> None:
    """Both ways are one figure then, but for the last bit: rounding made loading win at loads in between."""
    known = builtin()
    for model in known.models.values():
        for host in (known.host("H100").replica(8), known.host("A10").replica(3)):
            load = load_terms(model, host_memory(host), gpus=host.gpus)
            for prefix, rest in ((1, 4), (17, 1), (8192, 512), (10_000, 333)):
                asked = Requests(prefix, rest, hits=0.0, load=0.0)
                assert load_range(prefill_terms(model, host), load, asked) is None, (model.name, host.gpu, prefix)


def test_half_of_the_work_spared_doubles_what_the_gpu_can_take() -> None:
    at = stream(PREFILL, LineLoad(0.0, 0.0), Requests(10_000, 0, hits=0.5, load=0.8))
    assert at.capacity == pytest.approx(2.0)
    assert at.gpu == pytest.approx(0.4)
    assert at.always_s == pytest.approx(0.5 / 0.6)


def test_a_link_that_is_slower_than_the_gpu_fills_first_and_never_ends() -> None:
    at = stream(PREFILL, SLOW, Requests(9000, 1000, hits=1.0, load=0.5))
    assert at.link > 1
    assert math.isinf(at.always_s)
    assert finite(at.always_s) is None
    assert at.capacity < 1
    assert load_range(PREFILL, SLOW, LONG) is None


def test_a_link_of_ones_own_that_wins_wins_at_every_load() -> None:
    assert load_range(PREFILL, LineLoad(0.0, 0.98e-4), LONG) == (0.0, 0.99)


def test_a_shared_link_carries_only_so_much_load() -> None:
    """0.09 s of link for 0.9 s of GPU: ten replicas fill the link at a load of 1/0.9, twenty at 0.55."""
    load = LineLoad(0.0, 1e-5)
    assert load_range(PREFILL, load, Requests(9000, 1000, 1.0, 0.0, sharers=10)) == (0.0, 0.99)
    found = load_range(PREFILL, load, Requests(9000, 1000, 1.0, 0.0, sharers=20))
    assert found is not None
    assert found[0] == 0.0
    assert 0.5 <= found[1] <= 0.55
    over = stream(PREFILL, load, Requests(9000, 1000, 1.0, found[1] + 0.01, sharers=20))
    assert over.always_s >= over.never_s
    assert over.capacity == pytest.approx(1 / (20 * 0.09))


def test_lookups_that_find_nothing_need_a_hit_rate_to_be_worth_it() -> None:
    assert hits_floor(PREFILL, FAST, LONG) == 0.01
    floor = hits_floor(PREFILL, LineLoad(0.2, 1e-6), Requests(9000, 1000, 0.0, 0.0, lookup_s=0.2))
    assert floor == pytest.approx(0.23)  # h (0.9 - 0.209) > (1 - h) 0.2
    assert hits_floor(PREFILL, LineLoad(2.0, 1e-6), LONG) is None


def test_a_long_wait_is_worth_it_only_where_the_gpu_is_busy() -> None:
    found = load_range(PREFILL, LineLoad(1.5, 1e-6), LONG)
    assert found is not None
    assert found[0] > 0.3
    assert found[1] == 0.99


@given(st.floats(0, 1), st.floats(0, 0.99), st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 50))
def test_both_ways_take_at_least_their_service_times(
    hits: float, load: float, prefix: int, rest: int, sharers: int
) -> None:
    at = stream(PREFILL, FAST, Requests(prefix, rest, hits, load, sharers=sharers))
    assert at.never_s >= PREFILL.seconds(prefix + rest)
    assert at.always_s >= PREFILL.seconds(rest, prefix) * (1 - 1e-9)
    assert at.gpu <= load * (1 + 1e-9)

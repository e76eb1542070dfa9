"""What is measured of a running system for the admission: rates are found again, and old ones fade."""

from __future__ import annotations

import random

import pytest

from kvcore.admission import Line, Prefill, pairs
from kvcore.meters import TAIL_SHARE, Backlog, LineMeter, PrefillMeter, ShareMeter, TailMeter

PREFILL = Prefill(2e-5, 1e-9)


def test_a_line_is_found_again() -> None:
    meter = LineMeter()
    assert meter.line is None
    for size in (10, 50, 20, 80):
        meter.add(size, 0.03 + 0.002 * size)
    assert meter.line is not None
    assert (meter.line.fixed_s, meter.line.byte_s) == (pytest.approx(0.03), pytest.approx(0.002))
    assert meter.line.seconds(100) == pytest.approx(0.23)
    assert meter.line.seconds(0) == 0


def test_hauls_of_one_size_give_a_rate_and_no_fixed_part() -> None:
    meter = LineMeter()
    for _ in range(5):
        meter.add(100, 0.5)
    assert meter.line == Line(0.0, pytest.approx(0.005))


def test_a_line_never_has_a_negative_part() -> None:
    faster_when_large, below_zero = LineMeter(), LineMeter()
    for size, seconds in ((10, 0.5), (20, 0.4), (30, 0.3)):
        faster_when_large.add(size, seconds)
    for size, seconds in ((10, 0.01), (20, 0.10), (30, 0.20)):
        below_zero.add(size, seconds)
    for meter in (faster_when_large, below_zero):
        assert meter.line is not None
        assert meter.line.fixed_s >= 0
        assert meter.line.byte_s >= 0


def test_a_link_that_becomes_faster_is_noticed() -> None:
    meter = LineMeter()
    for at in range(400):
        meter.add(100 + at % 7, 0.01 * (100 + at % 7))
    for at in range(2000):
        meter.add(100 + at % 7, 0.001 * (100 + at % 7))
    assert meter.line is not None
    assert meter.line.seconds(100) == pytest.approx(0.1, rel=0.2)


def test_tokens_and_pairs_are_told_apart() -> None:
    meter, chance = PrefillMeter(), random.Random(7)
    assert meter.prefill is None
    for _ in range(64):
        tokens, prefix = chance.randint(100, 8192), chance.randint(0, 60_000)
        meter.add(tokens, pairs(tokens, prefix), 0.004 + PREFILL.seconds(tokens, prefix))
    assert meter.prefill is not None
    assert meter.prefill.token_s == pytest.approx(PREFILL.token_s, rel=1e-3)
    assert meter.prefill.pair_s == pytest.approx(PREFILL.pair_s, rel=1e-3)


def test_a_prompt_in_pieces_has_the_pairs_of_the_whole() -> None:
    assert pairs(4, 10) == 48, "each of four attends to ten, and to half of the four on average"
    assert pairs(4, 0) + pairs(6, 4) == pairs(10, 0) == 50


def test_a_backlog_is_the_sum_of_its_prompts_and_leaves_nothing_behind() -> None:
    backlog = Backlog()
    backlog.add(4, 10)
    backlog.add(7)
    assert backlog.seconds(PREFILL) == pytest.approx(PREFILL.seconds(4, 10) + PREFILL.seconds(7))
    backlog.remove(4, 10)
    assert backlog.seconds(PREFILL) == PREFILL.seconds(7)
    backlog.remove(7)
    assert (backlog.requests, backlog.tokens, backlog.seconds(Prefill(1.0, 1.0))) == (0, 0, 0.0)


def test_a_few_steps_give_something_to_go_on() -> None:
    meter = PrefillMeter()
    meter.add(1000, pairs(1000, 0), 0.05)
    assert meter.prefill == Prefill(pytest.approx(5e-5), 0.0)
    meter.add(1000, pairs(1000, 0), 0.05)
    assert meter.prefill == Prefill(pytest.approx(5e-5), 0.0)
    meter.add(2000, pairs(2000, 0), 0.01)  # slower work faster: nothing sensible follows, but nothing breaks
    assert meter.prefill.token_s > 0


def test_a_share_is_busy_seconds_per_second() -> None:
    meter = ShareMeter(window_s=60.0)
    assert meter.per_second(5.0) == 0.0
    for at in range(300):
        meter.add(float(at), 0.4)
    assert meter.per_second(299.0) == pytest.approx(0.4, rel=0.02)
    assert meter.per_second(299.0 + 600.0) < 1e-4, "long ago"


def test_a_young_share_divides_by_the_time_it_has_seen() -> None:
    meter = ShareMeter(window_s=60.0)
    for at in range(10):
        meter.add(float(at), 0.5)
    assert meter.per_second(9.0) == pytest.approx(0.5, rel=0.15)


def test_the_tail_is_what_one_in_fifty_exceeds() -> None:
    meter, chance = TailMeter(), random.Random(3)
    for _ in range(500):
        meter.add(chance.expovariate(1.0))
    beyond = 0
    for _ in range(4000):
        value = chance.expovariate(1.0)
        beyond += value > meter.tail_s
        meter.add(value)
    assert beyond / 4000 == pytest.approx(TAIL_SHARE, abs=0.01)

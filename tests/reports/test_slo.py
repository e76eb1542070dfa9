"""Objectives as people write them, and what counts as good."""

from __future__ import annotations

import pytest

from kvcore.errors import ConfigError
from kvcore.reports.slo import COLUMNS, Ending, Goodput, Outcome, goodput, parse_slo


def done(ttft_s: float, tpot_s: float = 0.01, tokens: int = 10, e2el_s: float = 1.0) -> Outcome:
    return Outcome(Ending.COMPLETED, tokens, ttft_s, tpot_s, e2el_s)


def test_the_syntax_is_that_of_vllm() -> None:
    slo = parse_slo("ttft:2000 tpot:50 e2el:30000.5")
    assert slo is not None
    assert slo.limits_ms == (("ttft", 2000.0), ("tpot", 50.0), ("e2el", 30000.5))
    assert str(slo) == "ttft:2000 tpot:50 e2el:30000.5"
    assert parse_slo(["ttft:2000", "tpot:50 e2el:30000.5"]) == slo


def test_without_an_objective_there_is_no_goodput() -> None:
    assert parse_slo(None) is None
    assert goodput([done(1.0)], None, 1.0) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the SLO is empty"),
        ("  ", "the SLO is empty"),
        ("ttft", "'ttft' has no colon"),
        ("ttft=2000", "'ttft=2000' has no colon"),
        ("tfft:2000", "unknown metric 'tfft': did you mean 'ttft'"),
        ("TTFT:2000", "unknown metric 'TTFT': did you mean 'ttft'"),
        ("xyz:2000", "unknown metric 'xyz': known are ttft, tpot, e2el"),
        (":2000", "unknown metric ''"),
        ("ttft:", "needs a number of milliseconds"),
        ("ttft:2s", "needs a number of milliseconds"),
        ("ttft:1:2", "needs a number of milliseconds"),
        ("ttft:-1", "must be above 0"),
        ("ttft:0", "must be above 0"),
        ("ttft:nan", "must be above 0"),
        ("ttft:inf", "must be above 0"),
        ("ttft:1e300", "must be above 0"),
        ("ttft:1 ttft:2", "names ttft twice"),
    ],
)
def test_an_objective_that_does_not_parse_is_refused(text: str, message: str) -> None:
    for words in (text, [text]):
        with pytest.raises(ConfigError, match=message):
            parse_slo(words)


def test_a_request_is_good_when_all_limits_are_met_and_the_limit_itself_is_met() -> None:
    slo = parse_slo("ttft:2000 tpot:50")
    found = goodput([done(2.0, 0.05), done(2.001, 0.05), done(2.0, 0.051), done(0.1, 0.01, tokens=30)], slo, 4.0)
    assert found == Goodput(good=2, counted=4, left_out=0, share=0.5, per_s=0.5, tokens_per_s=10.0)


def test_errors_count_against_and_cancelled_and_unevaluable_are_out_of_both_sides() -> None:
    outcomes = [
        done(0.1),
        Outcome(Ending.FAILED),
        Outcome(Ending.FAILED, 10, 0.1, 0.01, 0.2),
        Outcome(Ending.CANCELLED, 10, 0.1, 0.01, 0.2),
        Outcome(Ending.COMPLETED, 10, None, 0.01, 0.2),
        Outcome(Ending.COMPLETED, 10, float("nan"), 0.01, 0.2),
    ]
    found = goodput(outcomes, parse_slo("ttft:2000"), 10.0)
    assert found is not None
    assert (found.good, found.counted, found.left_out, found.share) == (1, 3, 3, pytest.approx(1 / 3))


def test_a_time_that_no_limit_names_need_not_be_measured() -> None:
    found = goodput([Outcome(Ending.COMPLETED, 10, None, None, 1.0)], parse_slo("e2el:2000"), 1.0)
    assert found is not None
    assert found.share == 1.0


def test_one_output_token_has_a_tpot_of_zero_as_in_vllm() -> None:
    found = goodput([Outcome(Ending.COMPLETED, 1, 0.1, None, 0.1)], parse_slo("tpot:50"), 1.0)
    assert found is not None
    assert (found.good, found.left_out) == (1, 0)


def test_a_run_in_which_nothing_counted_has_no_share() -> None:
    found = goodput([Outcome(Ending.CANCELLED)], parse_slo("ttft:1"), 1.0)
    assert found == Goodput(0, 0, 1, None, 0.0, 0.0)


@pytest.mark.parametrize("duration", [0.0, -1.0, float("nan"), float("inf")])
def test_a_run_without_a_duration_has_no_rate(duration: float) -> None:
    with pytest.raises(ConfigError, match="duration of the run"):
        goodput([], parse_slo("ttft:1"), duration)


def test_every_column_states_its_formula() -> None:
    assert {"goodput_share", "goodput_per_s", "goodput_tokens_per_s", "ttft", "tpot", "e2el"} == set(COLUMNS)
    assert all(COLUMNS.values())

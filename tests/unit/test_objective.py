"""An operator's objective, and how long the sequences that decode may be held up."""

from __future__ import annotations

import math

import pytest

from kvcore.errors import ConfigError
from kvcore.objective import Decodes, Objective

OBJECTIVE = Objective(tpot_s=0.1, ttft_s=2.0)


def after_answers(*lengths: int) -> Decodes:
    """Answers of so many tokens after the first, each exactly in time."""
    decodes = Decodes(OBJECTIVE)
    for name, more in enumerate(lengths):
        decodes.began(f"old{name}", 0.0, 1.0, 0)
        decodes.ended(f"old{name}", 0.1 * more, more)
    return decodes


def test_it_is_read_as_vllm_writes_it() -> None:
    assert Objective.read("ttft:2000 tpot:100") == OBJECTIVE
    assert Objective.read("tpot:100") == Objective(0.1, math.inf)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "needs a tpot"), ("ttft:2000", "needs a tpot"), ("tpot:1 e2el:9", "takes ttft and tpot"), ("tpot", "colon")],
)
def test_what_the_admission_could_not_act_on_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective.read(text)


def test_an_answer_is_expected_to_last_as_long_again_as_answers_do() -> None:
    decodes = after_answers(10, 30)
    decodes.began("now", 100.0, 1.0, 50)
    assert decodes.slacks_s(100.0, 50) == pytest.approx((2.0,)), "20 tokens more on average"
    assert decodes.slacks_s(102.0, 55) == pytest.approx((0.5,)), "25 tokens in all, 2 s spent"


def test_what_has_missed_a_limit_has_no_slack() -> None:
    decodes = after_answers(10)
    decodes.began("late", 0.0, 2.1, 0)
    decodes.began("slow", 0.0, 1.0, 0)
    assert len(decodes.slacks_s(0.5, 1)) == 1, "the first token of one came too late"
    assert decodes.slacks_s(9.0, 2) == ()
    decodes.ended("slow", 9.0, 2)
    decodes.ended("slow", 9.0, 2)
    assert decodes.good_share == 0.5


def test_a_limit_that_is_just_met_is_met() -> None:
    decodes = Decodes(Objective(tpot_s=0.25, ttft_s=2.0))
    decodes.began("exact", 0.0, 2.0, 0)
    decodes.ended("exact", 1.0, 4)
    assert decodes.good_share == 1.0


def test_before_an_answer_has_ended_nothing_is_known() -> None:
    decodes = after_answers()
    decodes.began("now", 0.0, 1.0, 0)
    assert decodes.slacks_s(0.0, 0) == ()
    assert decodes.good_share == 1.0

"""The admission: which of the ways to serve a prompt is cheapest, from what was measured."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.admission import (
    NOTHING,
    OWN_LATE,
    PROBE_AFTER,
    PROBE_TOKENS,
    SLACK_MIN,
    TAIL_WEIGHT,
    TRIALS,
    Gpu,
    Limits,
    Line,
    Link,
    Offer,
    Prefill,
    Prompt,
    Queue,
    Reason,
    cost_s,
    decide,
    promise_cost_s,
    stop_gain_s,
)
from kvcore.errors import ConfigError

KV = 131_072
PREFILL = Prefill(2e-5, 1e-9)
FAST, SLOW = Line(1e-5, 1 / 50e9), Line(0.03, 1 / 1e9)
FREE = Limits()


def offer(tokens: int, *links: int) -> Offer:
    return Offer(tokens, tuple((at, tokens * KV) for at in links or (0,)))


def gpu(**queue: float) -> Gpu:
    return Gpu(PREFILL, Queue(**queue))  # type: ignore[arg-type]


def reason(line: Line | None, machine: Gpu, tokens: int = 8192, **link: float) -> Reason:
    state = Link(line, **link)  # type: ignore[arg-type]
    return decide(Prompt(tokens + 500), [offer(tokens)], machine, [state], FREE).reason


# --- the decision --------------------------------------------------------------------------------------------------


def test_a_fast_link_is_used_and_a_slow_one_is_not() -> None:
    assert reason(FAST, gpu()) is Reason.PAYS
    assert reason(SLOW, gpu()) is Reason.COMPUTE


def test_those_who_wait_for_the_gpu_make_a_slow_link_worth_it() -> None:
    assert reason(SLOW, gpu(waiting=20)) is Reason.PAYS
    assert reason(SLOW, gpu(rate=4.0, busy=0.9, work_s=2.0)) is Reason.PAYS, "and those who will come"


def test_a_queue_on_the_link_makes_even_a_fast_one_too_slow() -> None:
    full = Link(FAST, Queue(work_s=5.0))
    assert decide(Prompt(8692), [offer(8192)], gpu(), [full], FREE).reason is Reason.COMPUTE


def test_a_link_that_others_need_is_left_to_them_where_the_gpu_is_idle() -> None:
    line = Line(0.001, 1 / 8e9)
    alone = Link(line)
    wanted = Link(line, Queue(rate=30.0, busy=0.95))
    assert decide(Prompt(8692), [offer(8192)], gpu(), [alone], FREE).reason is Reason.PAYS
    assert decide(Prompt(8692), [offer(8192)], gpu(), [wanted], FREE).reason is Reason.COMPUTE


def test_sequences_that_decode_count_on_a_busy_gpu_and_not_on_an_idle_one() -> None:
    assert reason(SLOW, gpu(running=30, busy=0.0)) is Reason.COMPUTE
    assert reason(SLOW, gpu(running=30, busy=0.8)) is Reason.PAYS


def test_answers_that_would_miss_their_objective_make_a_slow_link_worth_it() -> None:
    near, far = (dataclasses.replace(gpu(busy=0.5), slacks_s=8 * (slack_s,), good_share=0.5) for slack_s in (0.2, 1e6))
    assert reason(SLOW, near) is Reason.PAYS
    assert reason(SLOW, far) is Reason.COMPUTE, "they have time"
    assert reason(SLOW, dataclasses.replace(near, good_share=1.0)) is Reason.COMPUTE, "and so they did so far"
    assert reason(SLOW, dataclasses.replace(near, queue=Queue())) is Reason.COMPUTE, "an idle GPU makes up for it"


def test_what_computing_spoils_grows_with_the_busy_share_and_with_the_odds_of_a_bad_answer() -> None:
    def spoilt_s(busy: float, good: float, work_s: float = 1.0) -> float:
        return dataclasses.replace(gpu(busy=busy), slacks_s=(0.5, 4.0), good_share=good).spoilt_s(work_s, 0.0)

    half = spoilt_s(0.5, 0.5)
    assert half > 0
    assert spoilt_s(0.25, 0.5) == pytest.approx(half / 2), "busy"
    assert spoilt_s(0.5, 0.2) == pytest.approx(4 * half), "four bad answers for a good one"
    assert spoilt_s(0.5, 0.5, 4.0) == pytest.approx(half / 1.25 * 2), "no answer is spoilt twice"
    assert spoilt_s(3.0, 0.5) == pytest.approx(2 * half), "a meter of one minute may show more than one"


def test_a_request_beyond_the_tail_gives_less_of_its_time_up() -> None:
    """What pays for the average request does not for one that would be among the slowest, if it loads."""
    waited = Prompt(8692, 30.0)
    for tail_s, expected in ((60.0, Reason.PAYS), (31.0, Reason.COMPUTE)):
        machine = dataclasses.replace(gpu(waiting=8, work_s=1.2), tail_s=tail_s)
        assert decide(waited, [offer(8192)], machine, [Link(SLOW)], FREE).reason is expected


def test_who_would_push_others_beyond_the_tail_loads() -> None:
    """Computing takes 0.2 s, loading 1.1 s: this one stays within the tail either way, and those behind it do not."""
    full = gpu(waiting=1, rate=0.5, busy=0.2, work_s=2.0)
    for tail_s, expected in ((2.0, Reason.PAYS), (60.0, Reason.COMPUTE), (0.0, Reason.COMPUTE)):
        assert reason(SLOW, dataclasses.replace(full, tail_s=tail_s)) is expected, tail_s


def test_who_comes_while_the_queue_is_longer_than_the_tail_is_above_it() -> None:
    """3 s of work and 2 more, of which half a second goes by per second; a tail of 1.25 s leaves 1 s to wait."""
    queue = Queue(rate=2.0, busy=0.5, work_s=3.0)
    assert queue.above(1.25, 2.0, 3.0) == pytest.approx(2.0 * (3 + 2 - 1) / 0.5)
    assert queue.above(5.25, 2.0, 3.0) == 0, "all are below"
    assert dataclasses.replace(queue, busy=3.0).above(2.5, 2.0, 3.0) == pytest.approx(2.0 * (3 + 2 - 1) / SLACK_MIN)
    assert dataclasses.replace(queue, rate=0.0).above(1.25, 2.0, 3.0) == 0, "nobody comes, nobody waits"


def test_of_those_who_wait_the_part_that_is_behind_the_tail_is_above_it() -> None:
    """Their times lie between 1 s (this one's) and 3 s (the last one's)."""
    queue = Queue(waiting=8, work_s=3.0)
    above = [queue.above(3.0, work_s, 1.0) for work_s in (1e-6, 1.0, 2.0, 9.0)]
    assert above == pytest.approx([0.0, 4.0, 8.0, 8.0], abs=1e-4)


def test_others_above_the_tail_lose_with_the_weight_of_one_that_is_itself() -> None:
    queue = Queue(waiting=8, work_s=3.0)
    within, above = (Gpu(PREFILL, queue, tail_s=tail_s).others_s(2.0, 3.0) for tail_s in (60.0, 1.0))
    assert within == pytest.approx(2.0 * 8)
    assert above == pytest.approx((1 + TAIL_WEIGHT) * within)
    assert Gpu(PREFILL, queue).others_s(2.0, 3.0) == pytest.approx(within), "the tail is not known yet"


def test_first_tokens_that_come_too_late_are_answers_spoilt() -> None:
    """Two wait and none comes. With 3 s of work and 2 more, one of them is late; half of the answers are good."""
    told = Gpu(PREFILL, Queue(waiting=2, work_s=3.0, busy=0.5), good_share=0.5, limit_s=4.0)
    assert told.spoilt_s(0.5, 3.0) == 0, "both are in time"
    assert told.spoilt_s(2.0, 3.0) == pytest.approx(0.5 * 2 * (3 + 2 - 4) / 2 * told.answer_s)
    assert dataclasses.replace(told, limit_s=math.inf).spoilt_s(2.0, 3.0) == 0, "nobody told a limit"
    assert told.own_s(4.0) == 4.0
    assert told.own_s(4.1) == pytest.approx(4.1 + OWN_LATE * 0.5 * told.answer_s), "its own counts too"


def test_a_load_is_promised_with_a_way_back() -> None:
    """The link is 5 s behind. Nobody waits in 2 s, and then its prompt holds nobody up: that is what the load costs."""
    machine, links = gpu(waiting=20, work_s=2.0), [Link(FAST, Queue(work_s=5.0))]
    prompt, found = Prompt(8692), offer(8192)
    then = Gpu(PREFILL).others_s(PREFILL.seconds(8692), 0.0) + 2.0 + PREFILL.seconds(8692)
    assert promise_cost_s(prompt, found, machine, PREFILL, links) == pytest.approx(then)
    assert cost_s(prompt, NOTHING, machine, PREFILL, links) < cost_s(prompt, found, machine, PREFILL, links)
    assert decide(prompt, [found], machine, links, FREE).reason is Reason.PAYS
    late = [Link(FAST, Queue(work_s=1.0))]
    over = cost_s(prompt, found, machine, PREFILL, late)
    assert promise_cost_s(prompt, found, machine, PREFILL, late) == over, "it has ended before"


def test_what_has_arrived_by_then_is_not_computed() -> None:
    machine = gpu(waiting=8, work_s=2.0)
    half = Line(0.0, 4.0 / (8192 * KV))
    whole, rest = (PREFILL.seconds(8692 - tokens, tokens) for tokens in (0, 4096))
    cost = promise_cost_s(Prompt(8692), offer(8192), machine, PREFILL, [Link(half)])
    assert cost == pytest.approx(2.0 + rest)
    assert rest < whole


def test_a_load_is_stopped_when_computing_its_rest_is_cheaper() -> None:
    def gain_s(left_tokens: int, limits: Limits = FREE, machine: Gpu | None = None, line: Line | None = SLOW) -> float:
        left, here = Offer(8192, ((0, left_tokens * KV),)), Offer(8192 - left_tokens, ())
        return stop_gain_s(Prompt(8692), left, here, machine or gpu(), [Link(line)], limits)

    assert gain_s(7168) > gain_s(4096) > 0
    assert gain_s(4096, machine=gpu(running=30, busy=0.9)) == 0, "it would hold up those who decode"
    assert gain_s(7168, line=FAST) == 0
    assert gain_s(7168, line=None) == 0, "how slow it is is just being measured"
    assert gain_s(7168, machine=Gpu(None)) == 0
    assert gain_s(7168, Limits(ceiling_tokens=8192)) == 0, "it is always to be loaded"
    assert gain_s(7168, Limits(floor_tokens=2048)) == 0, "so little is never loaded"
    assert gain_s(8192, Limits(floor_tokens=2048)) > 0, "nothing has arrived"


def test_time_waited_already_counts_towards_the_tail() -> None:
    machine = dataclasses.replace(gpu(busy=0.5), tail_s=3.0, slacks_s=8 * (20.0,), good_share=0.5)
    decided = [decide(Prompt(8692, waited), [offer(8192)], machine, [Link(SLOW)], FREE) for waited in (0.0, 30.0)]
    assert [one.reason for one in decided] == [Reason.PAYS, Reason.COMPUTE]


def test_waiting_for_the_gpu_anyway_hides_a_load() -> None:
    later = dataclasses.replace(gpu(), ahead_s=2.0)
    assert reason(SLOW, later) is Reason.PAYS


def test_layers_that_overlap_hide_a_load_behind_the_rest() -> None:
    """A link as slow as the computing it spares: no gain, unless it is hidden by the rest of the prompt."""
    even = Link(Line(0.01, PREFILL.seconds(8192, 0) / (8192 * KV)))
    once, overlapped = gpu(), dataclasses.replace(gpu(), layers=32)
    assert decide(Prompt(16_384), [offer(8192)], once, [even], FREE).reason is Reason.COMPUTE
    assert decide(Prompt(16_384), [offer(8192)], overlapped, [even], FREE).reason is Reason.PAYS


def test_the_part_that_pays_is_taken_where_the_whole_does_not() -> None:
    here = offer(4096)
    there = Offer(8192, ((1, 4096 * KV), (0, 8192 * KV)))
    decision = decide(Prompt(9000), [here, there], gpu(), [Link(FAST), Link(SLOW)], FREE)
    assert (decision.tokens, decision.offer) == (4096, here)
    both = decide(Prompt(9000), [here, there], gpu(), [Link(FAST), Link(FAST)], FREE)
    assert (both.tokens, both.offer) == (8192, there)


def test_nothing_found_is_nothing_decided() -> None:
    assert decide(Prompt(100), [], gpu(), [Link(FAST)], FREE).reason is Reason.NOTHING
    assert decide(Prompt(100), [NOTHING], gpu(), [Link(FAST)], FREE).reason is Reason.NOTHING


@given(
    tokens=st.integers(1, 200_000),
    rest=st.integers(1, 10_000),
    rate=st.floats(1e8, 1e12),
    waiting=st.integers(0, 100),
    busy=st.floats(0, 1.5),
    work=st.floats(0, 100),
    link_busy=st.floats(0, 1.5),
)
def test_the_decision_is_the_cheaper_way(
    tokens: int, rest: int, rate: float, waiting: int, busy: float, work: float, link_busy: float
) -> None:
    machine = gpu(waiting=waiting, busy=busy, work_s=work, rate=3.0)
    links = [Link(Line(1e-4, 1 / rate), Queue(work_s=work / 10, rate=2.0, busy=link_busy))]
    found, prompt = offer(tokens), Prompt(tokens + rest)
    decision, machine_of = decide(prompt, [found], machine, links, FREE), (machine, PREFILL, links)
    load, compute = promise_cost_s(prompt, found, machine, PREFILL, links), cost_s(prompt, NOTHING, *machine_of)
    assert 0 <= load <= cost_s(prompt, found, *machine_of), "a way back costs nothing"
    assert decision.tokens in (0, tokens)
    assert (min(load, compute) == pytest.approx(load if decision.tokens else compute)) or load == compute
    assert decision.gain_s >= 0


@given(st.floats(1e8, 1e12), st.integers(0, 50))
def test_a_faster_link_or_a_longer_queue_never_turns_a_load_down(rate: float, waiting: int) -> None:
    def loads(rate: float, waiting: int) -> bool:
        return bool(decide(Prompt(5000), [offer(4096)], gpu(waiting=waiting), [Link(Line(0.0, 1 / rate))], FREE).tokens)

    if loads(rate, waiting):
        assert loads(2 * rate, waiting)
        assert loads(rate, waiting + 5)


# --- not measured yet ----------------------------------------------------------------------------------------------


def test_everything_is_loaded_until_the_gpu_is_known() -> None:
    decision = decide(Prompt(8692), [offer(8192)], Gpu(None), [Link(SLOW)], FREE)
    assert (decision.reason, decision.tokens) == (Reason.UNMEASURED, 8192)


def test_an_unknown_link_is_tried_by_a_few_at_a_time() -> None:
    assert reason(None, gpu()) is Reason.UNMEASURED
    assert reason(None, gpu(), hauls=TRIALS - 1) is Reason.UNMEASURED
    assert reason(None, gpu(), hauls=TRIALS) is Reason.COMPUTE


def test_an_unknown_second_link_does_not_keep_the_first_from_being_used() -> None:
    ways = [offer(4096), Offer(8192, ((1, 4096 * KV), (0, 8192 * KV)))]
    decision = decide(Prompt(9000), ways, gpu(), [Link(FAST), Link(None, hauls=TRIALS)], FREE)
    assert (decision.reason, decision.tokens) == (Reason.PAYS, 4096)


def test_a_link_that_was_passed_over_for_long_is_tried_with_a_small_piece() -> None:
    assert reason(SLOW, gpu(), idle_offers=PROBE_AFTER - 1) is Reason.COMPUTE
    stale = Link(SLOW, idle_offers=PROBE_AFTER)
    decision = decide(Prompt(8692), [offer(8192)], gpu(), [stale], FREE)
    assert (decision.reason, decision.tokens) == (Reason.PROBE, PROBE_TOKENS)
    small = decide(Prompt(300), [offer(200)], gpu(), [stale], FREE)
    assert small.tokens == 200
    assert reason(SLOW, gpu(), idle_offers=2 * PROBE_AFTER) is Reason.PROBE, "as long as nothing has gone over it"


def test_a_stale_second_link_is_tried_behind_what_the_first_one_serves() -> None:
    ways = [offer(4096), Offer(8192, ((1, 4096 * KV), (0, 8192 * KV)))]
    decision = decide(Prompt(9000), ways, gpu(), [Link(FAST), Link(SLOW, idle_offers=PROBE_AFTER)], FREE)
    assert (decision.tokens, decision.offer) == (4096 + PROBE_TOKENS, ways[1])


# --- limits --------------------------------------------------------------------------------------------------------


def test_the_floor_and_the_ceiling_have_the_last_word() -> None:
    prompt, ways = Prompt(8692), [offer(8192)]
    for_sure, never = [Link(FAST)], [Link(SLOW)]
    assert decide(prompt, ways, gpu(), for_sure, Limits(floor_tokens=8193)).reason is Reason.FLOOR
    assert decide(prompt, ways, gpu(), for_sure, Limits(floor_tokens=8192)).reason is Reason.PAYS
    assert decide(prompt, ways, gpu(), never, Limits(ceiling_tokens=8192)).reason is Reason.CEILING
    assert decide(prompt, ways, gpu(), never, Limits(ceiling_tokens=8193)).reason is Reason.COMPUTE
    assert decide(prompt, ways, Gpu(None), never, Limits(floor_tokens=9000)).reason is Reason.FLOOR


def test_a_part_below_the_floor_is_not_taken() -> None:
    ways = [offer(1024), Offer(8192, ((1, 7168 * KV), (0, 8192 * KV)))]
    links = [Link(FAST), Link(SLOW)]
    assert decide(Prompt(9000), ways, gpu(), links, FREE).tokens == 1024
    assert decide(Prompt(9000), ways, gpu(), links, Limits(floor_tokens=2048)).tokens == 0


@pytest.mark.parametrize(("floor", "ceiling"), [(-1, None), (10, 9), (0, -1), (1 << 41, None)])
def test_limits_that_cannot_be_are_refused(floor: int, ceiling: int | None) -> None:
    with pytest.raises(ConfigError):
        Limits(floor, ceiling)


# --- what others lose ----------------------------------------------------------------------------------------------


def test_what_others_lose_is_pollaczek_and_khinchins_wait_on_an_idle_queue() -> None:
    """Every request with x seconds of work at `rate`: the mean wait of M/D/1 is rate * x^2 / 2 / (1 - busy)."""
    x, rate = 0.2, 3.0
    queue = Queue(rate=rate, busy=rate * x)
    assert queue.lost_s(x) == pytest.approx(rate * x * x / 2 / (1 - rate * x))


def test_a_queue_beyond_its_capacity_has_a_price_and_no_infinity() -> None:
    assert Queue(rate=1.0, busy=3.0).lost_s(1.0) == pytest.approx(0.5 / SLACK_MIN)

"""One lookup over several servers, as a pure state machine."""

from __future__ import annotations

import pytest

from kvcore.errors import CallerError
from kvcore.lookup import Action, ActionKind, LookupOutcome, LookupState, Pace, Phase

PACE = Pace(poll_ns=10, poll_ns_max=40)
DEADLINE_NS = 1_000


def lookup(servers: int = 2, chunks: int = 4) -> LookupState:
    return LookupState(servers, chunks, DEADLINE_NS, PACE)


def query(server: int, serial: int = 1) -> Action:
    return Action(ActionKind.QUERY, server, serial=serial)


def release(server: int) -> Action:
    return Action(ActionKind.RELEASE, server)


def test_no_server_is_queried_before_its_own_acknowledgement() -> None:
    state = lookup()
    assert state.tick(0) == []
    assert state.acknowledged(1, 0) == [query(1)]
    assert state.tick(500) == [], "server 0 has not acknowledged"
    assert state.acknowledged(0, 501) == [query(0)]


def test_the_outcome_is_the_intersection_and_not_the_minimum_of_best_lengths() -> None:
    state = lookup()
    state.acknowledged(0, 0)
    state.acknowledged(1, 0)
    state.ready(0, 1, 0b10101)
    assert state.outcome is None
    state.ready(1, 1, 0b01011)
    assert state.outcome == LookupOutcome(0b00001), "4 and 3 are the best lengths; only 0 is common"


def test_a_pending_answer_is_followed_by_a_wait_that_doubles_up_to_the_limit() -> None:
    state = lookup(servers=1)
    state.acknowledged(0, 0)
    waits, now_ns = [], 0
    for serial in range(1, 6):
        assert state.pending(0, serial, now_ns) == [], "no immediate re-query"
        assert state.tick(now_ns) == []
        due_ns = state.next_due_ns
        assert due_ns is not None
        waits.append(due_ns - now_ns)
        now_ns = due_ns
        assert state.tick(now_ns) == [query(0, serial + 1)]
    assert waits == [10, 20, 40, 40, 40]


def test_a_query_is_due_from_its_moment_on_and_also_when_the_clock_comes_late() -> None:
    state = lookup(servers=1)
    state.acknowledged(0, 0)
    state.pending(0, 1, 100)
    assert state.tick(109) == []
    assert state.tick(150) == [query(0, 2)]
    assert state.tick(151) == [], "it was asked"


def test_the_next_moment_is_the_earliest_of_all_servers_and_never_after_the_deadline() -> None:
    state = lookup(servers=2)
    assert state.next_due_ns == DEADLINE_NS
    for server, now_ns in ((0, 30), (1, 20)):
        state.acknowledged(server, now_ns)
        state.pending(server, 1, now_ns)
    assert state.next_due_ns == 30
    state.tick(30)
    assert state.next_due_ns == 40
    state.tick(40)
    state.pending(1, 2, DEADLINE_NS - 1)
    assert state.next_due_ns == DEADLINE_NS


def test_a_lost_query_is_asked_again_and_its_late_reply_is_ignored() -> None:
    state = lookup(servers=1)
    state.acknowledged(0, 0)
    state.lost(0, 1, 100)
    assert state.tick(110) == [query(0, 2)]
    assert state.ready(0, 1, 0b11) == [], "a reply to the first query; the second one is outstanding"
    assert state.outcome is None
    assert state.late == 1
    state.ready(0, 2, 0b11)
    assert state.outcome == LookupOutcome(0b11)


def hurried(server: int, serial: int) -> Action:
    return Action(ActionKind.QUERY, server, serial=serial, hurry=True)


def test_in_a_hurry_each_server_is_asked_at_the_next_moment_at_which_it_may_be() -> None:
    """One has not acknowledged, one is being asked, one waits to be asked again, one has answered."""
    state = lookup(servers=4)
    for server in (1, 2, 3):
        state.acknowledged(server, 0)
    state.pending(2, 1, 100)
    state.ready(3, 1, 0b11111)
    assert state.hurry(101) == [hurried(2, 2)], "without the pace's wait"
    assert state.hurry(102) == [], "once"
    assert state.pending(1, 1, 103) == [hurried(1, 2)], "it had been asked by one who would wait"
    assert state.acknowledged(0, 104) == [hurried(0, 1)]
    state.ready(0, 1, 0b11)
    state.ready(1, 2, 0b111)
    assert state.outcome is None
    state.ready(2, 2, 0b111)
    assert state.outcome == LookupOutcome(0b11), "what all of them hold by now"
    assert state.settle(1) == [Action(ActionKind.SETTLE, server, length=1) for server in range(4)]


@pytest.mark.parametrize("answer", ["pending", "lost"])
def test_a_server_that_was_hurried_and_has_no_answer_is_asked_at_the_pace_and_hurried_again(answer: str) -> None:
    state = lookup(servers=1)
    state.acknowledged(0, 0)
    state.hurry(1)
    assert getattr(state, answer)(0, 1, 5) == [hurried(0, 2)]
    assert getattr(state, answer)(0, 2, 6) == []
    assert state.next_due_ns == 16
    assert state.tick(16) == [hurried(0, 3)]
    assert state.tick(DEADLINE_NS) == [release(0)]


def test_a_hurry_after_the_outcome_or_the_deadline_asks_nobody() -> None:
    state = lookup(servers=1)
    state.acknowledged(0, 0)
    state.ready(0, 1, 0b11)
    assert state.hurry(1) == []
    gone = lookup(servers=1)
    gone.acknowledged(0, 0)
    gone.release()
    assert gone.hurry(1) == []
    assert gone.pending(0, 1, 2) == [release(0)]
    late = lookup(servers=1)
    late.acknowledged(0, 0)
    assert late.hurry(DEADLINE_NS) == [release(0)]


def test_at_the_deadline_the_result_is_nothing_and_every_server_is_released() -> None:
    """R35: a wait has a deadline."""
    state = lookup(servers=3)
    for server in range(2):
        state.acknowledged(server, 0)
    state.ready(0, 1, 0b11111)
    assert state.next_due_ns == DEADLINE_NS
    assert state.tick(DEADLINE_NS - 1) == []
    assert state.tick(DEADLINE_NS) == [release(0), release(1), release(2)]
    assert state.outcome is not None
    assert state.outcome.best == 0
    assert state.outcome.reason == "no result from server 1, 2 before the deadline"
    assert state.next_due_ns is None


def test_a_late_acknowledgement_or_answer_is_followed_by_a_release_and_changes_nothing() -> None:
    """R37: the result stays, the late server gives its leases back."""
    state = lookup()
    state.acknowledged(0, 0)
    state.tick(DEADLINE_NS)
    outcome = state.outcome
    assert state.acknowledged(1, DEADLINE_NS + 1) == [release(1)]
    assert state.ready(0, 1, 0b111) == [release(0)]
    assert state.outcome == outcome
    assert state.late == 2


def test_an_unknown_lookup_fails_with_a_reason_and_only_the_others_are_released() -> None:
    """R33: a restarted server is not a silent zero, and holds nothing that could be released."""
    state = lookup()
    state.acknowledged(0, 0)
    state.acknowledged(1, 0)
    assert state.unknown(1, 1) == [release(0)]
    assert state.outcome == LookupOutcome(1, "server 1: it does not know this lookup (restarted?)")


def test_a_server_that_refuses_holds_nothing_and_the_others_are_released() -> None:
    state = lookup()
    state.acknowledged(1, 0)
    assert state.refused(0, "too many sessions") == [release(1)]
    assert state.outcome == LookupOutcome(1, "server 0: too many sessions")
    assert state.phases == (Phase.ABSENT, Phase.GIVEN_UP)
    assert (state.late, state.settled, state.next_due_ns) == (0, None, None)
    assert state.refused(0, "again") == []
    assert state.late == 1


def test_only_queries_have_a_serial_and_only_settlements_a_length() -> None:
    state = lookup(servers=1)
    (asked,) = state.acknowledged(0, 0)
    state.ready(0, 1, 0b111)
    (settled,) = state.settle(2)
    (released,) = state.release()
    assert [(action.serial, action.length) for action in (asked, settled, released)] == [(1, 0), (0, 2), (0, 0)]


def test_a_failed_server_makes_the_result_nothing_at_once() -> None:
    state = lookup()
    state.acknowledged(0, 0)
    assert state.failed(0, 1, "store on fire") == [release(0), release(1)]
    assert state.outcome == LookupOutcome(1, "server 0: store on fire")


def test_lengths_that_were_not_asked_for_are_a_failure_and_no_promise() -> None:
    for lengths in (0b100001, 0b10):
        state = lookup(servers=1, chunks=4)
        state.acknowledged(0, 0)
        assert state.ready(0, 1, lengths) == [release(0)]
        assert state.outcome is not None
        assert state.outcome.best == 0


def test_duplicates_count_once() -> None:
    """R39: a completion reported twice is a no-op the second time."""
    state = lookup()
    state.acknowledged(0, 0)
    assert state.acknowledged(0, 1) == []
    state.ready(0, 1, 0b111)
    assert state.ready(0, 1, 0b1) == []
    assert state.outcome is None, "server 1 has not answered; server 0 twice is not two servers"
    state.acknowledged(1, 2)
    state.ready(1, 1, 0b111)
    assert state.outcome == LookupOutcome(0b111)


def test_settle_names_the_length_to_every_server_once() -> None:
    state = lookup()
    for server in range(2):
        state.acknowledged(server, 0)
        state.ready(server, 1, 0b1111)
    assert state.settle(2) == [Action(ActionKind.SETTLE, 0, length=2), Action(ActionKind.SETTLE, 1, length=2)]
    assert state.settle(2) == []
    with pytest.raises(CallerError, match="settled at 2"):
        state.settle(3)
    assert state.release() == [release(0), release(1)]
    assert state.release() == []
    with pytest.raises(CallerError, match="was released"):
        state.settle(2)


def test_settle_at_zero_releases_everything_everywhere() -> None:
    """R22: the engine decides on no load."""
    state = lookup()
    for server in range(2):
        state.acknowledged(server, 0)
        state.ready(server, 1, 0b1111)
    assert state.settle(0) == [release(0), release(1)]
    assert state.settle(0) == []


def test_a_length_that_was_not_answered_cannot_be_settled() -> None:
    state = lookup(servers=1)
    with pytest.raises(CallerError, match="before the lookup has an outcome"):
        state.settle(0)
    state.acknowledged(0, 0)
    state.ready(0, 1, 0b101)
    for length in (-1, 1, 3, 99):
        with pytest.raises(CallerError, match="not among the lengths"):
            state.settle(length)


def test_a_release_while_pending_fixes_nothing_as_the_outcome() -> None:
    """R24: abort before the answer."""
    state = lookup()
    state.acknowledged(0, 0)
    assert state.release() == [release(0), release(1)]
    assert state.outcome == LookupOutcome(1, "released by the caller")
    assert state.phases == (Phase.GIVEN_UP, Phase.GIVEN_UP)
    assert state.tick(DEADLINE_NS) == []


@pytest.mark.parametrize(("servers", "chunks"), [(0, 1), (1, 0)])
def test_a_lookup_needs_a_server_and_a_chunk(servers: int, chunks: int) -> None:
    with pytest.raises(CallerError, match="at least one"):
        LookupState(servers, chunks, 1, PACE)


@pytest.mark.parametrize(("poll_ns", "poll_ns_max"), [(0, 1), (5, 4), (-1, -1)])
def test_a_pace_must_wait(poll_ns: int, poll_ns_max: int) -> None:
    with pytest.raises(CallerError, match="poll_ns"):
        Pace(poll_ns, poll_ns_max)

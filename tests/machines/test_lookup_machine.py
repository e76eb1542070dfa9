"""`LookupState` against a model of several servers and a network that loses, delays, repeats and reorders replies.

The model server holds leases from its LOOKUP until the first RELEASE that reaches it; each lookup's leases are released
exactly once. The model network keeps every message and lets Hypothesis deliver, repeat or lose it. Only the direction
client to server is ordered, as one connection is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.lookup import Action, ActionKind, LookupOutcome, LookupState, Pace, Phase

CHUNKS = 5
DEADLINE_NS = 1_000
PACE = Pace(poll_ns=7, poll_ns_max=50)


@dataclass
class ModelServer:
    """What a server promises: QUERY is idempotent, RELEASE ends the leases, a restart forgets everything."""

    lengths: int
    polls_left: int
    knows: bool = False
    leases: bool = False
    acknowledged: bool = False  # the ack has been delivered to the client
    releases: int = 0
    settled: int | None = None
    restarted: bool = False
    queries: int = 0

    def query(self, hurry: bool) -> str:
        self.queries += 1
        if not self.knows:
            return "unknown"
        if self.polls_left > 0 and not hurry:
            self.polls_left -= 1
            return "pending"
        return "ready"

    def release(self) -> None:
        if self.leases:
            self.releases += 1
        self.leases = self.knows = False


class LookupMachine(RuleBasedStateMachine):
    @initialize(servers=st.lists(st.tuples(st.integers(0, 2**CHUNKS - 1), st.integers(0, 3)), min_size=1, max_size=3))
    def start(self, servers: list[tuple[int, int]]) -> None:
        self.now_ns = 0
        self.state = LookupState(len(servers), CHUNKS, DEADLINE_NS, PACE)
        self.servers = [ModelServer(lengths << 1 | 1, polls) for lengths, polls in servers]
        self.up: list[deque[Action | str]] = [deque(["lookup"]) for _ in servers]
        self.down: list[list[tuple[str, int]]] = [[] for _ in servers]
        self.outstanding = [0] * len(servers)  # queries without any reply delivered or declared lost
        self.fixed: LookupOutcome | None = None
        self.last_pending_ns: dict[int, int] = {}
        self.settled: int | None = None
        self.past: list[tuple[int, str, int]] = []  # replies that were delivered
        self.hurry = False
        self.hurried: set[int] = set()  # servers that were asked in a hurry

    # --- the client's actions --------------------------------------------------------------------------------------

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            server = self.servers[action.server]
            if action.kind is ActionKind.QUERY:
                assert server.acknowledged, "QUERY before the acknowledgement"
                assert self.outstanding[action.server] == 0, "two queries at once"
                first = self.hurry and action.server not in self.hurried
                assert first or self.last_pending_ns.get(action.server, -1) < self.now_ns, "an immediate re-query"
                assert self.state.outcome is None, "a query after the outcome"
                assert action.hurry is self.hurry, "a server may keep us waiting"
                if action.hurry:
                    self.hurried.add(action.server)
                self.outstanding[action.server] += 1
            self.up[action.server].append(action)

    # --- the network -----------------------------------------------------------------------------------------------

    @precondition(lambda self: any(self.up))
    @rule(data=st.data())
    def a_message_reaches_its_server(self, data: st.DataObject) -> None:
        self.reach(data.draw(st.sampled_from([i for i, queue in enumerate(self.up) if queue])))

    def reach(self, index: int) -> None:
        message, server = self.up[index].popleft(), self.servers[index]
        if message == "lookup":
            server.knows = server.leases = True
            self.down[index].append(("ack", 0))
            return
        assert isinstance(message, Action)
        if message.kind is ActionKind.QUERY:
            self.down[index].append((server.query(message.hurry), message.serial))
        elif message.kind is ActionKind.SETTLE:
            server.settled = message.length
        else:
            server.release()

    @precondition(lambda self: any(queue and queue[0] == "lookup" for queue in self.up))
    @rule(data=st.data())
    def a_lookup_is_lost(self, data: st.DataObject) -> None:
        lost = [i for i, queue in enumerate(self.up) if queue and queue[0] == "lookup"]
        self.up[data.draw(st.sampled_from(lost))].popleft()

    @precondition(lambda self: any(self.down))
    @rule(data=st.data(), again=st.booleans())
    def a_reply_reaches_the_client(self, data: st.DataObject, again: bool) -> None:
        index = data.draw(st.sampled_from([i for i, replies in enumerate(self.down) if replies]))
        position = data.draw(st.integers(0, len(self.down[index]) - 1))
        kind, serial = self.down[index][position] if again else self.down[index].pop(position)
        self.deliver(index, kind, serial)

    @precondition(lambda self: any(self.down))
    @rule(data=st.data())
    def a_reply_is_lost(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i, replies in enumerate(self.down) if replies]))
        kind, serial = self.down[index].pop()
        if kind != "ack" and self.state.outcome is None and serial == self.servers[index].queries:
            self.outstanding[index] = 0
            self.perform(self.state.lost(index, serial, self.now_ns))
            self.last_pending_ns[index] = self.now_ns

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def an_old_reply_comes_once_more(self, data: st.DataObject) -> None:
        self.deliver(*data.draw(st.sampled_from(self.past)))

    def deliver(self, index: int, kind: str, serial: int) -> None:
        if (index, kind, serial) not in self.past:
            self.past.append((index, kind, serial))
        state, server = self.state, self.servers[index]
        current = state.phases[index].value == "asked" and state._parts[index].serial == serial
        if kind != "ack" and current:
            self.outstanding[index] = 0
        if kind == "ack":
            server.acknowledged = True
            self.perform(state.acknowledged(index, self.now_ns))
        elif kind == "pending":
            if current:
                self.last_pending_ns[index] = self.now_ns
            self.perform(state.pending(index, serial, self.now_ns))
        elif kind == "ready":
            self.perform(state.ready(index, serial, server.lengths))
        else:
            self.perform(state.unknown(index, serial))

    @rule(data=st.data())
    def a_server_answers_without_trouble(self, data: st.DataObject) -> None:
        """The common case: its messages arrive in order until it has nothing more to say for now."""
        index = data.draw(st.integers(0, len(self.servers) - 1))
        self.servers[index].polls_left = min(1, self.servers[index].polls_left)
        while self.up[index] or self.down[index]:
            if self.up[index]:
                self.reach(index)
            else:
                self.deliver(index, *self.down[index].pop(0))

    # --- the world -------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def a_server_restarts(self, data: st.DataObject) -> None:
        server = self.servers[data.draw(st.integers(0, len(self.servers) - 1))]
        server.knows = server.leases = False
        server.restarted = True

    @rule(step_ns=st.integers(1, 120))
    def time_passes(self, step_ns: int) -> None:
        self.now_ns += step_ns
        self.perform(self.state.tick(self.now_ns))

    @rule(really=st.integers(0, 5).map(lambda number: number == 5))
    def the_engine_will_not_wait(self, really: bool) -> None:
        if really:
            self.stop_waiting()

    @precondition(lambda self: Phase.ASKED in self.state.phases)
    @rule(data=st.data())
    def the_engine_will_not_wait_for_the_answer_that_is_under_way(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i, each in enumerate(self.state.phases) if each is Phase.ASKED]))
        while self.up[index]:
            self.reach(index)
        self.stop_waiting()
        while self.down[index]:
            self.deliver(index, *self.down[index].pop(0))

    def stop_waiting(self) -> None:
        self.hurry = self.hurry or self.state.outcome is None
        self.perform(self.state.hurry(self.now_ns))

    @invariant()
    def in_a_hurry_nobody_who_may_be_asked_is_waited_for(self) -> None:
        if self.hurry and self.state.outcome is None:
            waiting = [i for i, phase in enumerate(self.state.phases) if phase is Phase.WAITING]
            assert self.hurried.issuperset(waiting), "a server was not told to hurry"

    @precondition(lambda self: self.state.outcome is not None and self.settled is None)
    @rule(data=st.data())
    def the_engine_settles(self, data: st.DataObject) -> None:
        outcome = self.state.outcome
        assert outcome is not None
        self.settled = data.draw(st.sampled_from([i for i in range(CHUNKS + 1) if outcome.lengths >> i & 1]))
        self.perform(self.state.settle(self.settled))

    @precondition(lambda self: self.settled is None)
    @rule()
    def the_engine_aborts(self) -> None:
        self.settled = 0
        self.perform(self.state.release())

    # --- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def an_outcome_is_fixed_once(self) -> None:
        if self.fixed is None:
            self.fixed = self.state.outcome
        assert self.state.outcome == self.fixed

    @invariant()
    def a_promise_is_what_every_server_can_serve(self) -> None:
        if self.fixed is not None and not self.fixed.reason:
            expected = (1 << CHUNKS + 1) - 1
            for server in self.servers:
                expected &= server.lengths
            assert self.fixed.lengths == expected
        elif self.fixed is not None:
            assert self.fixed.lengths == 1

    @invariant()
    def past_the_deadline_there_is_an_outcome(self) -> None:
        assert self.now_ns < DEADLINE_NS or self.state.outcome is not None

    @invariant()
    def leases_are_released_at_most_once(self) -> None:
        assert all(server.releases <= 1 for server in self.servers)

    def teardown(self) -> None:
        """Everything that is under way arrives; the engine ends the lookup; no server holds anything."""
        if not hasattr(self, "state"):
            return
        self.perform(self.state.tick(max(self.now_ns, DEADLINE_NS)))
        self.now_ns = max(self.now_ns, DEADLINE_NS)
        self.perform(self.state.release())
        while any(self.up) or any(self.down):
            for index in range(len(self.servers)):
                while self.up[index]:
                    message = self.up[index].popleft()
                    if message == "lookup":
                        self.servers[index].knows = self.servers[index].leases = True
                        self.down[index].append(("ack", 0))
                    elif isinstance(message, Action) and message.kind is ActionKind.RELEASE:
                        self.servers[index].release()
                for kind, serial in self.down[index]:
                    self.deliver(index, kind, serial)
                self.down[index].clear()
        for server in self.servers:
            assert not server.leases, "a server still holds leases of a lookup that is over"
            assert server.releases <= 1


TestLookup = LookupMachine.TestCase
TestLookup.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2, stateful_step_count=40, deadline=None
)


# --- planted bugs


def test_a_minimum_of_best_lengths_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R42's trap: what every server can serve is not the least of their best."""
    original = LookupState._fix

    def fix(self: LookupState, outcome: LookupOutcome) -> None:
        best = min(part.lengths.bit_length() for part in self._parts)
        original(self, LookupOutcome((1 << best) - 1 if outcome.lengths > 1 else outcome.lengths, outcome.reason))

    monkeypatch.setattr(LookupState, "_fix", fix)
    assert finds(LookupMachine)


def test_a_late_acknowledgement_without_a_release_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R24, R37: the server that answers too late keeps its leases."""
    original = LookupState._release_all

    def release_all(self: LookupState) -> list[Action]:
        silent = [i for i, part in enumerate(self._parts) if part.phase.value == "sent"]
        return [action for action in original(self) if action.server not in silent]

    monkeypatch.setattr(LookupState, "_release_all", release_all)
    monkeypatch.setattr(LookupState, "_late", lambda self, server: [])
    assert "still holds leases" in finds(LookupMachine)


def test_replies_that_match_by_server_alone_are_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R39, R40: a duplicate of an old reply answers for the query that is under way."""

    def expects(self: LookupState, server: int, serial: int) -> bool:
        return self._parts[server].phase is Phase.ASKED

    monkeypatch.setattr(LookupState, "_expects", expects)
    assert "queries" in finds(LookupMachine, 4000)


def test_a_poll_without_a_pause_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35: over a million lookups for one request."""

    def pending(self: LookupState, server: int, serial: int, now_ns: int) -> list[Action]:
        if not self._expects(server, serial):
            return self._late(server)
        self._parts[server].phase = Phase.WAITING
        return [self._ask(server)]

    monkeypatch.setattr(LookupState, "pending", pending)
    assert "re-query" in finds(LookupMachine)


def test_a_hurry_that_forgets_who_is_being_asked_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The QUERY that is out was sent before: its pending answer is waited over as if nobody were in a hurry."""
    original = LookupState.hurry

    def hurry(self: LookupState, now_ns: int) -> list[Action]:
        actions = original(self, now_ns)
        for part in self._parts:
            part.hurried = True
        return actions

    monkeypatch.setattr(LookupState, "hurry", hurry)
    assert "not told to hurry" in finds(LookupMachine, 4000)

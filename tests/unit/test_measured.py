"""`LoadIfItPays` by itself: which steps and loads are samples, who is in front, and what a decision makes of it."""

from __future__ import annotations

import pytest

from kvcore.admission import Limits
from kvcore.connectors.measured import LoadIfItPays
from kvcore.connectors.tracker import RequestTracker
from kvcore.connectors.views import LoadTimes, ScheduledRequest
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.objective import Objective

MS = 1_000_000
TOKEN_NS = MS
"""To compute one token. A chunk has four tokens and eight bytes."""
PLAIN = CacheLayout((ObjectGroup(GroupKind.FULL, 4, 8),), 1, 4)
RECURRENT = CacheLayout((ObjectGroup(GroupKind.FULL, 4, 8), ObjectGroup(GroupKind.RECURRENT, 4, 8)), 1, 4)


class HandClock:
    """Stands still until it is turned."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


class Desk:
    """The admission, and what an engine would tell it."""

    def __init__(self, layout: CacheLayout = PLAIN, limits: Limits | None = None) -> None:
        self.layout = layout
        self.clock = HandClock()
        self.admission = LoadIfItPays(layout, self.clock, limits)

    def tracker(self, name: str, tokens: int) -> RequestTracker:
        return RequestTracker(self.layout, name, f"{name}#1", 1, tokens=range(tokens))

    def computed(self, name: str, tokens: int) -> None:
        """A prompt in one step of its own."""
        tracker = self.tracker(name, tokens)
        self.admission.waits(name, tokens)
        tracker.decline()
        self.admission.admitted(tracker)
        self.step(tokens * TOKEN_NS, (name, 0, tokens))

    def step(self, ns: int, *parts: tuple[str, int, int], loads: bool = False) -> None:
        self.begin(*parts, loads=loads)
        self.clock.ns += ns
        self.admission.step_ended()

    def begin(self, *parts: tuple[str, int, int], loads: bool = False) -> None:
        """Each part: who, from which token on, how many; all its known tokens are computed then."""
        shares = [ScheduledRequest(name, at, count, (), (), False, range(at + count)) for name, at, count in parts]
        self.admission.step_begins(shares, loads)

    def loads_take(self, byte_ns: int) -> None:
        """The first one is a warm-up."""
        for _ in range(5):
            self.admission.measured(LoadTimes(1, 64, 64 * byte_ns))

    def chosen(self, name: str, tokens: int, lengths: int | None = None, local: int = 0) -> int:
        """Chunks that are promised to a request which found everything, or the given lengths."""
        tracker = self.tracker(name, tokens)
        tracker.look(range(tokens), local)
        tracker.fix((1 << tokens // 4 + 1) - 1 if lengths is None else lengths)
        return self.admission.length(tracker, local)


def slow_desk(token_ns: int = TOKEN_NS * 5 // 4) -> Desk:
    """A load takes a quarter more than computing the same tokens, or so long: computing is cheaper."""
    desk = Desk()
    for at, tokens in enumerate((8, 16, 8, 16)):
        desk.computed(f"old{at}", tokens)
        desk.admission.gone(f"old{at}")
    desk.loads_take(token_ns // 2)
    return desk


# ---- samples


def test_only_steps_with_prompts_are_samples() -> None:
    desk = Desk()
    desk.computed("a", 8)
    assert desk.admission.statistics().steps_measured == 1
    assert desk.admission.statistics().prefill_token_s == pytest.approx(TOKEN_NS / 1e9)
    desk.step(50 * MS, ("a", 8, 1))
    assert desk.admission.statistics().steps_measured == 1, "a decode step tells nothing about prompts"
    desk.step(50 * MS, ("b", 0, 8), loads=True)
    assert desk.admission.statistics().steps_measured == 1, "it waited for a load"
    assert desk.admission.statistics().prefill_token_s == pytest.approx(TOKEN_NS / 1e9)


def test_steps_that_overlap_share_no_time() -> None:
    desk = Desk()
    desk.begin(("a", 0, 8))
    desk.clock.ns = MS
    desk.begin(("b", 0, 8))
    desk.clock.ns = 8 * MS
    desk.admission.step_ended()
    desk.clock.ns = 16 * MS
    desk.admission.step_ended()
    assert desk.admission.statistics().steps_measured == 2
    assert desk.admission.statistics().prefill_token_s == pytest.approx(TOKEN_NS / 1e9)


def test_an_empty_step_and_an_end_that_nobody_began_change_nothing() -> None:
    desk = Desk()
    desk.begin(("a", 0, 8))
    desk.begin()
    desk.admission.step_empty()
    desk.clock.ns = 8 * MS
    desk.admission.step_ended()
    desk.admission.step_ended()
    assert desk.admission.statistics().steps_measured == 1


def test_a_way_is_known_after_a_warm_up_and_four_loads() -> None:
    desk = Desk()
    for at in range(5):
        assert desk.admission.statistics().load_byte_s is None, f"after {at} loads"
        desk.admission.measured(LoadTimes(1, 64, 64 * (10 if at else 1_000)))
    assert desk.admission.statistics().load_byte_s == pytest.approx(10e-9), "the first one is not in it"
    desk.admission.measured(LoadTimes())
    assert desk.admission.statistics().loads_measured == 5
    desk.admission.measured(LoadTimes(2, 128, 128 * 10))
    assert desk.admission.statistics().loads_measured == 7
    assert desk.admission.statistics().load_byte_s == pytest.approx(10e-9), "two of them, told at once"


def test_a_lookup_is_timed_against_what_it_found_beyond_the_engines_own() -> None:
    desk = Desk()
    for at in range(5):
        tracker = desk.tracker(f"r{at}", 33)
        desk.admission.asks(tracker)
        desk.clock.ns += 32 * 10  # for four chunks, 32 bytes
        tracker.look(range(33), 16)
        tracker.fix((1 << 9) - 1)
        desk.admission.length(tracker, 16)
    assert desk.admission.statistics().lookup_byte_s == pytest.approx(10e-9)


def test_a_lookup_that_was_not_waited_for_is_no_sample() -> None:
    """It ended because we said so. What it has found by then is decided about as always."""
    desk = slow_desk(TOKEN_NS // 4)
    for at in range(5):
        tracker = desk.tracker(f"r{at}", 33)
        desk.admission.asks(tracker)
        desk.clock.ns += MS // 10
        tracker.look(range(33), 0)
        tracker.fix((1 << 9) - 1)
        desk.admission.length(tracker, 0)
    known = desk.admission.statistics()
    tracker = desk.tracker("late", 33)
    desk.admission.asks(tracker)
    tracker.look(range(33), 0)
    assert desk.admission.worth_asking(tracker, 33, 0)
    desk.clock.ns += 1_000 * MS
    assert not desk.admission.worth_asking(tracker, 33, 0)
    tracker.fix(0b11111)
    assert desk.admission.length(tracker, 0) == 4
    after = desk.admission.statistics()
    assert (after.lookups_measured, after.lookup_byte_s) == (known.lookups_measured, known.lookup_byte_s)
    assert (after.lookups_unwanted, after.decided_load) == (1, known.decided_load + 1)


def test_a_lookup_that_is_late_is_hurried_when_the_rest_of_it_is_computed_sooner() -> None:
    """33 tokens take 33 ms to compute, and 8 ms to load after the 20 ms that such a lookup takes. After 30 ms three
    quarters are taken to be here: 9 ms to compute and 6 to load, against 10 to wait and 9 for the rest."""
    desk = slow_desk(TOKEN_NS // 4)
    for at in range(5):
        tracker = desk.tracker(f"r{at}", 33)
        desk.admission.asks(tracker)
        desk.clock.ns += 20 * MS
        tracker.look(range(33), 0)
        tracker.fix((1 << 9) - 1)
        desk.admission.length(tracker, 0)
    tracker = desk.tracker("late", 33)
    asked = []
    for ns in (0, 10 * MS, 30 * MS):
        desk.clock.ns = 1_000 * MS + ns
        asked.append(desk.admission.worth_asking(tracker, 33, 0))
        if not ns:
            desk.admission.asks(tracker)
    assert asked == [True, True, False]


# ---- decisions


def test_what_is_not_measured_is_loaded() -> None:
    assert Desk().chosen("r", 33) == 8


def test_a_slow_way_is_left_alone_until_others_are_in_front() -> None:
    """What waits in front of the GPU gives the load its time; when that has gone, it does not."""
    desk = slow_desk()
    assert desk.chosen("r", 33) == 0
    front = desk.tracker("front", 400)
    front.decline()
    desk.admission.admitted(front)  # an engine that admits at once: it never waited
    assert desk.chosen("s", 33) == 8
    desk.admission.gone("front")
    assert desk.chosen("t", 33) == 0


@pytest.mark.parametrize(("tokens", "chunks"), [(9, 8), (4_001, 0)])
def test_loads_under_way_are_in_front_of_a_load(tokens: int, chunks: int) -> None:
    """A small one does no harm; behind a large one computing is cheaper, until it has ended."""
    desk = slow_desk(TOKEN_NS // 4)
    front = desk.tracker("front", tokens)
    front.hashes.extend(bytes([at % 256]) for at in range(tokens // 4))
    front.look(range(tokens), 0)
    front.fix((1 << tokens // 4 + 1) - 1)
    front.promise(0)
    front.take_load((list(range(1, tokens // 4 + 2)),))
    desk.admission.admitted(front)
    assert desk.chosen("r", 33) == chunks
    desk.admission.loaded("front")
    assert desk.chosen("s", 33) == 8


def test_of_a_prompt_in_pieces_what_is_left_is_in_front() -> None:
    desk = slow_desk(10 * TOKEN_NS)
    front = desk.tracker("front", 400)
    front.decline()
    desk.admission.waits("front", 400)
    desk.admission.admitted(front)
    assert desk.chosen("q", 33) == 8, "400 tokens are left"
    desk.admission.step_begins([ScheduledRequest("front", 0, 396, (), (), False, range(400))], False)
    desk.clock.ns += 396 * TOKEN_NS
    desk.admission.step_ended()
    assert desk.chosen("r", 33) == 0, "four tokens are left"


def test_a_piece_to_measure_a_way_is_a_length_that_can_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,200 tokens 512 would do; with a hybrid model not every length is servable."""
    monkeypatch.setattr("kvcore.admission.PROBE_AFTER", 1)
    for lengths, piece in (({0, 100, 300}, 100), ({0, 200, 250, 300}, 200), ({0, 100, 128, 300}, 128)):
        desk = slow_desk(100 * TOKEN_NS)
        assert desk.chosen("r", 1_201, sum(1 << length for length in lengths)) == 0
        assert desk.chosen("s", 1_201, sum(1 << length for length in lengths)) == piece


def test_a_piece_brings_more_than_the_engine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.admission.PROBE_AFTER", 1)
    desk = slow_desk(100 * TOKEN_NS)
    assert desk.chosen("r", 1_201, 1 | 1 << 100 | 1 << 300, local=400) == 0
    assert desk.chosen("s", 1_201, 1 | 1 << 100 | 1 << 300, local=400) == 300


@pytest.mark.parametrize(
    ("layout", "floor", "worth"), [(PLAIN, 31, True), (RECURRENT, 31, False), (RECURRENT, 28, True)]
)
def test_a_recurrent_state_at_the_end_of_the_prompt_cannot_be_found(
    layout: CacheLayout, floor: int, worth: bool
) -> None:
    """It would contain the last token, which is to be computed: at most 28 of 32 tokens are worth asking for."""
    desk = Desk(layout, Limits(floor))
    desk.computed("old", 8)
    assert desk.admission.worth_asking(desk.tracker("r", 32), 32, 0) is worth


def test_answers_within_the_objective_are_counted_where_there_is_one() -> None:
    assert Desk().admission.statistics().good_share is None
    desk = Desk(limits=Limits(objective=Objective(tpot_s=0.01)))
    assert desk.admission.statistics().good_share == 1.0
    for name, ns in (("good", 10 * MS), ("slow", 11 * MS)):
        desk.computed(name, 8)
        desk.step(ns, (name, 8, 1))
        desk.admission.gone(name)
    assert desk.admission.statistics().good_share == 0.5

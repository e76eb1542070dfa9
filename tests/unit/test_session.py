"""`SessionTable`: whose hashes are known, which lookup is current, and what its end gives back. No server, no loop."""

from __future__ import annotations

from enum import Enum

import pytest

from kvcore.errors import CallerError
from kvcore.leases import Owner
from kvcore.session import LookupName, SessionTable, Verdict, VerdictKind

IDLE_NS = 100
A, B, C, D = b"a", b"b", b"c", b"d"


class State(Enum):
    PENDING = 0
    READY = 1
    FAILED = 2


class FakeJob:
    """A lookup job whose end the test decides."""

    def __init__(self) -> None:
        self.state = State.PENDING
        self.lengths = 0
        self.reason = ""
        self.settled: list[int] = []
        self.cancelled = 0
        self.hurried = 0
        self.arrived = 0b11

    def hurry(self) -> None:
        """As the real one: what has arrived is the answer, once."""
        self.hurried += 1
        if self.state is State.PENDING:
            self.end(self.arrived)

    def end(self, lengths: int = 0, reason: str = "") -> None:
        self.state = State.FAILED if reason else State.READY
        self.lengths, self.reason = lengths, reason

    def settle(self, length: int) -> None:
        self.settled.append(length)

    def cancel(self) -> None:
        self.cancelled += 1


class Desk:
    """A table, its clock at 0, and the owners that it released."""

    def __init__(self, sessions_max: int = 3) -> None:
        self.released: list[Owner] = []
        self.owners: list[Owner] = []
        self.table = SessionTable(idle_ns=IDLE_NS, sessions_max=sessions_max, release_owner=self.released.append)

    def open(self, name: str = "s", generation: int = 1, epoch: int = 1, now_ns: int = 0) -> FakeJob:
        session = self.table.prepare(name, 0, b"", [A, B], now_ns)
        assert session is not None
        job = FakeJob()

        def start(owner: Owner) -> FakeJob:
            self.owners.append(owner)
            return job

        self.table.open(session, name_of(generation, epoch), "salt", start)
        return job


def name_of(generation: int = 1, epoch: int = 1, connection: int = 7) -> LookupName:
    return LookupName(connection, generation, epoch)


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- hashes


@pytest.mark.parametrize(
    ("base", "base_hash", "known"),
    [(0, b"", [C, D]), (1, A, [A, C, D]), (2, B, [A, B, C, D]), (1, B, None), (2, A, None), (3, B, None)],
)
def test_new_hashes_follow_the_base_if_its_last_hash_is_the_one_the_client_believes(
    desk: Desk, base: int, base_hash: bytes, known: list[bytes] | None
) -> None:
    desk.table.prepare("s", 0, b"", [A, B], 0)
    session = desk.table.prepare("s", base, base_hash, [C, D], 0)
    assert (session and session.hashes) == known


def test_a_session_that_is_not_known_has_no_base(desk: Desk) -> None:
    assert desk.table.prepare("s", 1, A, [B], 0) is None
    assert len(desk.table) == 0


def test_the_lookup_of_before_ends_whether_the_base_fits_or_not(desk: Desk) -> None:
    for base in (0, 9):
        job = desk.open()
        desk.table.prepare("s", base, b"", [A], 0)
        assert job.cancelled == 1
        assert desk.released == desk.owners
        assert desk.table.lookups_open == 0


def test_a_full_table_takes_no_other_session_and_goes_on_with_those_it_has(desk: Desk) -> None:
    for name in "abc":
        assert not desk.table.full
        assert desk.table.prepare(name, 0, b"", [A], 0) is not None
    assert desk.table.full
    assert desk.table.prepare("d", 0, b"", [A], 0) is None
    assert desk.table.prepare("a", 0, b"", [B], 0) is not None
    assert len(desk.table) == 3


# --- lookups


def test_no_two_lookups_have_one_owner_even_of_the_same_session_and_generation(desk: Desk) -> None:
    for _ in range(3):
        desk.open()
    assert len(set(desk.owners)) == 3
    assert desk.table.opened == 3
    assert desk.released == desk.owners[:2]


def test_a_lookup_that_could_not_start_holds_nothing(desk: Desk) -> None:
    session = desk.table.prepare("s", 0, b"", [A], 0)
    assert session is not None

    def start(owner: Owner) -> FakeJob:
        raise OSError

    with pytest.raises(OSError):
        desk.table.open(session, name_of(), "", start)
    assert (desk.table.lookups_open, desk.table.opened, desk.released) == (0, 0, [])
    assert desk.table.release("s", 7, 1, 0) is False


def test_a_verdict_is_pending_until_the_job_has_ended_and_then_never_changes(desk: Desk) -> None:
    job = desk.open()
    assert desk.table.verdict("s", name_of(), 0) == Verdict(VerdictKind.PENDING)
    job.end(0b101)
    assert desk.table.verdict("s", name_of(), 0) == Verdict(VerdictKind.READY, 0b101)
    job.end(0b1, "broken")
    assert desk.table.verdict("s", name_of(), 0) == Verdict(VerdictKind.READY, 0b101)


def test_a_hurried_lookup_answers_with_what_has_arrived_and_tells_everybody_the_same(desk: Desk) -> None:
    job = desk.open()
    ready = Verdict(VerdictKind.READY, 0b11)
    assert desk.table.verdict("s", name_of(2), 0, hurry=True) == Verdict(VerdictKind.UNKNOWN)
    assert job.hurried == 0, "another lookup was meant"
    assert desk.table.verdict("s", name_of(), 0, hurry=True) == ready
    job.arrived = 0b111
    assert desk.table.verdict("s", name_of(), 0, hurry=True) == ready
    assert desk.table.verdict("s", name_of(), 0) == ready
    assert job.hurried == 1
    assert desk.table.settle("s", name_of(), 1, 0) is True


def test_a_hurry_changes_no_verdict_that_there_is(desk: Desk) -> None:
    desk.open().end(reason="the store is gone")
    assert desk.table.verdict("s", name_of(), 0, hurry=True) == Verdict(VerdictKind.FAILED, 1, "the store is gone")


def test_a_failed_lookup_serves_the_empty_prefix_and_says_why(desk: Desk) -> None:
    desk.open().end(reason="the store is gone")
    assert desk.table.verdict("s", name_of(), 0) == Verdict(VerdictKind.FAILED, 1, "the store is gone")


@pytest.mark.parametrize("name", [name_of(2), name_of(1, 2), name_of(connection=8)])
def test_only_the_current_lookup_is_answered_and_settled(desk: Desk, name: LookupName) -> None:
    desk.open().end(0b11)
    assert desk.table.verdict("s", name, 0) == Verdict(VerdictKind.UNKNOWN)
    assert desk.table.settle("s", name, 1, 0) is False
    assert desk.table.verdict("other", name_of(), 0) == Verdict(VerdictKind.UNKNOWN)


def test_a_lookup_is_settled_once_at_a_length_that_was_answered(desk: Desk) -> None:
    job = desk.open()
    with pytest.raises(CallerError, match="was not answered"):
        desk.table.settle("s", name_of(), 2, 0)
    job.end(0b1101)
    with pytest.raises(CallerError, match="was not answered"):
        desk.table.settle("s", name_of(), 2, 0)  # ready, but nobody was told so
    desk.table.verdict("s", name_of(), 0)
    with pytest.raises(CallerError, match="length 1 was not answered"):
        desk.table.settle("s", name_of(), 1, 0)
    assert desk.table.settle("s", name_of(), 2, 0) is True
    assert desk.table.settle("s", name_of(), 2, 0) is True
    assert job.settled == [2]
    with pytest.raises(CallerError, match="settled at 2 chunks, it cannot become 3"):
        desk.table.settle("s", name_of(), 3, 0)


def test_a_failed_lookup_cannot_be_settled_at_a_length(desk: Desk) -> None:
    desk.open().end(reason="broken")
    desk.table.verdict("s", name_of(), 0)
    with pytest.raises(CallerError):
        desk.table.settle("s", name_of(), 1, 0)


def test_settling_at_nothing_gives_everything_back(desk: Desk) -> None:
    job = desk.open()
    assert desk.table.settle("s", name_of(), 0, 0) is True
    assert (job.cancelled, job.settled, desk.released) == (1, [], desk.owners)
    assert desk.table.settle("s", name_of(), 0, 0) is False


# --- ends


@pytest.mark.parametrize(
    ("connection", "epoch", "ends"), [(7, 4, False), (7, 5, True), (7, 6, True), (6, 5, False), (8, 9, False)]
)
def test_release_and_end_mean_everything_of_this_connection_up_to_the_epoch(
    connection: int, epoch: int, ends: bool
) -> None:
    for end in (False, True):
        desk = Desk()
        desk.open(epoch=5)
        if end:
            ended = desk.table.end("s", connection, epoch)
            assert (None if ended is None else ended.session) == ("s" if ends else None)
        else:
            assert desk.table.release("s", connection, epoch, 0) is ends
        assert desk.released == (desk.owners if ends else [])
        assert len(desk.table) == (0 if end and ends else 1)
        assert desk.table.ended == (end and ends)


def test_a_released_session_keeps_its_hashes_and_an_old_end_does_not_touch_it(desk: Desk) -> None:
    desk.open(epoch=5)
    assert desk.table.release("s", 7, 5, 0) is True
    assert desk.table.release("s", 7, 5, 0) is False
    assert desk.table.prepare("s", 2, B, [C], 0) is not None
    assert desk.table.end("s", 7, 4) is None
    session = desk.table.end("s", 7, 5)
    assert session is not None
    assert session.hashes == [A, B, C]
    assert desk.table.end("s", 7, 5) is None


def test_a_worker_is_told_the_owner_of_the_current_generation_only(desk: Desk) -> None:
    desk.open(generation=3)
    found = desk.table.owner_of("s", 3, 0)
    assert found is not None
    assert (found[1], found[0].salt) == (desk.owners[0], "salt")
    assert desk.table.owner_of("s", 2, 0) is None
    assert desk.table.owner_of("s", 4, 0) is None
    assert desk.table.owner_of("x", 3, 0) is None
    desk.table.release("s", 7, 1, 0)
    assert desk.table.owner_of("s", 3, 0) is None


# --- time


def test_sessions_die_by_idleness_the_longest_idle_first_and_not_one_moment_early(desk: Desk) -> None:
    assert desk.table.next_expiry_ns() is None
    desk.open("a", now_ns=0)
    desk.open("b", now_ns=10)
    desk.table.find("a", 20)
    assert list(desk.table.names) == ["b", "a"]
    assert desk.table.next_expiry_ns() == 110
    assert desk.table.expire(109) == 0
    assert desk.table.expire(110) == 1
    assert list(desk.table.names) == ["a"]
    assert desk.released == [desk.owners[1]]
    assert desk.table.expire(500) == 1
    assert desk.table.expired == 2
    assert desk.table.next_expiry_ns() is None


def test_a_session_that_is_named_again_and_again_never_dies_of_its_age(desk: Desk) -> None:
    desk.open("a", now_ns=10)
    for now_ns in range(60, 1000, 50):
        assert desk.table.expire(now_ns) == 0
        assert desk.table.find("a", now_ns) is not None
    assert desk.table.next_expiry_ns() == 960 + IDLE_NS


def test_several_sessions_can_die_at_once_and_a_closing_server_ends_all(desk: Desk) -> None:
    for name in "abc":
        desk.open(name)
    assert desk.table.expire(100) == 3
    assert desk.table.expired == 3
    desk.open("a", now_ns=100)
    desk.table.prepare("b", 0, b"", [], 100)
    assert desk.table.clear() == 2
    assert (len(desk.table), desk.released) == (0, desk.owners)


@pytest.mark.parametrize("idle_ns", [0, -1])
def test_a_session_needs_time_to_live(idle_ns: int) -> None:
    with pytest.raises(CallerError, match="idle_ns"):
        SessionTable(idle_ns=idle_ns, sessions_max=1, release_owner=lambda owner: None)
    SessionTable(idle_ns=1, sessions_max=1, release_owner=lambda owner: None)

"""One lookup asked of several servers: when it is fixed, to what, and who must be told. Pure: nothing here knows the
time, a socket or a message format.

Theory of operation
-------------------
A lookup is sent to every server. Each server's part walks

    SENT --acknowledged--> WAITING --(due)--> ASKED --pending--> WAITING      (poll with backoff)
                                              ASKED --lost----> WAITING       (QUERY is idempotent: ask again)
                                              ASKED --ready---> READY
                                              ASKED --failed--> FAILED
                                   WAITING --hurry--> ASKED             (to answer with what is there)
    SENT / WAITING / ASKED --deadline, failure elsewhere, release--> GIVEN_UP
    SENT / ASKED --refused or unknown there--> ABSENT     (that server holds nothing for us)

1. No QUERY before that server's acknowledgement, and never two QUERYs of one server at once.
2. The first QUERY follows the acknowledgement at once; after a pending answer the next one waits `poll_ns`, doubling up
   to `poll_ns_max`. A pending answer is never followed by an immediate re-query, but once: in a hurry (8).
3. All parts READY: the outcome is the *intersection* of their sets of servable lengths. A minimum of best lengths
   would be wrong for window and recurrent rows.
4. One part failed, absent, or not ready at the deadline: the outcome is "nothing" ({0}) with the reason, at once;
   every server that may hold something is told to release.
5. An outcome is fixed once. What arrives later is late: it is counted and changes nothing. A server that still answers
   for a lookup which we have given up has not seen our release (or answered before it), so it is told again.
6. `settle(L)` names the length that is used; each server gives back what L does not need. L = 0 releases everywhere.
7. Queries carry a serial number per server; a reply to any but the outstanding one is late.
8. `hurry`: each server that has not answered is asked, as soon as rule 1 allows, to do so with what it has by then.
   Every QUERY from then on says so. What follows from the answers does not change.

The caller sends the returned `Action`s, in order; `next_due_ns` says when `tick` has something to do.

Who holds, announces, frees: the leases are held by the servers in the name of this lookup's session and generation.
"Ready" is announced by QUERY's reply. They are freed by the Release or Settle actions of this object - exactly
one path for failure, deadline, cancel and normal end - or by the server's idle expiry if we vanish.

Rejected: waiting for the slow server with the fast ones' leases held past the deadline (hold-and-wait); a fallback to
the lengths of those servers that did answer (cells of the silent one could be promised and never come); counting
outstanding replies instead of phases (a duplicate would count twice).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique

from kvcore.errors import CallerError

NOTHING = 1
"""The bit set {0}: only the empty prefix can be served."""


@unique
class Phase(Enum):
    SENT = "sent"
    WAITING = "waiting"
    ASKED = "asked"
    READY = "ready"
    FAILED = "failed"
    ABSENT = "absent"
    GIVEN_UP = "given_up"


_UNDECIDED = frozenset((Phase.SENT, Phase.WAITING, Phase.ASKED))


@unique
class ActionKind(Enum):
    QUERY = "query"
    SETTLE = "settle"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Action:
    """One message the caller must send. `serial` and `hurry` belong to QUERY, `length` to SETTLE."""

    kind: ActionKind
    server: int
    serial: int = 0
    length: int = 0
    hurry: bool = False


@dataclass(frozen=True, slots=True)
class LookupOutcome:
    """`lengths`: bit L set = L chunks are held under lease on every server. `reason` is "" for a full answer."""

    lengths: int
    reason: str = ""

    @property
    def best(self) -> int:
        return self.lengths.bit_length() - 1


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a pending server is asked again."""

    poll_ns: int = 500_000
    poll_ns_max: int = 20_000_000

    def __post_init__(self) -> None:
        if not 0 < self.poll_ns <= self.poll_ns_max:
            raise CallerError(f"poll_ns {self.poll_ns} must be positive and at most poll_ns_max {self.poll_ns_max}")


class _Part:
    """One server's share of the lookup."""

    __slots__ = ("due_ns", "hurried", "lengths", "phase", "serial", "wait_ns")

    def __init__(self, wait_ns: int) -> None:
        self.phase = Phase.SENT
        self.serial = 0
        self.due_ns: int | None = None
        self.wait_ns = wait_ns
        self.hurried = False  # its last QUERY was
        self.lengths = 0


class LookupState:
    """See the module text. One object per (session, generation)."""

    __slots__ = ("_chunks", "_closed", "_deadline_ns", "_hurry", "_outcome", "_pace", "_parts", "_settled", "late")

    def __init__(self, servers: int, chunks: int, deadline_ns: int, pace: Pace) -> None:
        if servers < 1:
            raise CallerError(f"a lookup needs at least one server, not {servers}")
        if chunks < 1:
            raise CallerError(f"a lookup needs at least one chunk, not {chunks}")
        self._chunks = chunks
        self._deadline_ns = deadline_ns
        self._pace = pace
        self._parts = [_Part(pace.poll_ns) for _ in range(servers)]
        self._outcome: LookupOutcome | None = None
        self._settled: int | None = None
        self._closed = False
        self._hurry = False
        self.late = 0

    @property
    def outcome(self) -> LookupOutcome | None:
        """None while undecided; then always the same value."""
        return self._outcome

    @property
    def settled(self) -> int | None:
        """The length that was named, once it was."""
        return self._settled

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(part.phase for part in self._parts)

    @property
    def next_due_ns(self) -> int | None:
        """When `tick` should be called; None: never again."""
        if self._outcome is not None:
            return None
        dues = [part.due_ns for part in self._parts if part.due_ns is not None]
        return min(self._deadline_ns, *dues) if dues else self._deadline_ns

    # --- what the servers say -------------------------------------------------------------------------------------

    def acknowledged(self, server: int, now_ns: int) -> list[Action]:
        """The server has registered the lookup."""
        part = self._parts[server]
        if part.phase is not Phase.SENT:
            return self._late(server)
        assert self._outcome is None, "an undecided part after the outcome was fixed"
        part.phase = Phase.WAITING
        part.due_ns = now_ns
        return self.tick(now_ns)

    def refused(self, server: int, reason: str) -> list[Action]:
        """The server did not take the lookup and holds nothing for it."""
        part = self._parts[server]
        if part.phase is not Phase.SENT:
            self.late += 1
            return []
        return self._fail(server, Phase.ABSENT, reason)

    def pending(self, server: int, serial: int, now_ns: int) -> list[Action]:
        """Not finished there; ask again later."""
        if not self._expects(server, serial):
            return self._late(server)
        return self._wait(server, now_ns)

    def lost(self, server: int, serial: int, now_ns: int) -> list[Action]:
        """No reply to this QUERY will come any more. Asking again is free of effects, so we do, at the same pace."""
        if not self._expects(server, serial):
            self.late += 1
            return []
        return self._wait(server, now_ns)

    def ready(self, server: int, serial: int, lengths: int) -> list[Action]:
        """The server holds, under lease, what every length in `lengths` needs of it."""
        if not self._expects(server, serial):
            return self._late(server)
        if not lengths & NOTHING or lengths >> (self._chunks + 1):
            return self._fail(server, Phase.FAILED, "it answered with lengths that were not asked for")
        part = self._parts[server]
        part.phase = Phase.READY
        part.lengths = lengths
        self._conclude()
        return []

    def failed(self, server: int, serial: int, reason: str) -> list[Action]:
        """The lookup failed there."""
        if not self._expects(server, serial):
            return self._late(server)
        return self._fail(server, Phase.FAILED, reason)

    def unknown(self, server: int, serial: int) -> list[Action]:
        """The server knows nothing of this lookup: it restarted, or has dropped the session. Never a silent 0."""
        if not self._expects(server, serial):
            self.late += 1
            return []
        return self._fail(server, Phase.ABSENT, "it does not know this lookup (restarted?)")

    # --- what the clock and the caller say -------------------------------------------------------------------------

    def tick(self, now_ns: int) -> list[Action]:
        """Queries that are due, or the end at the deadline."""
        if self._outcome is not None:
            return []
        if now_ns >= self._deadline_ns:
            silent = [str(i) for i, part in enumerate(self._parts) if part.phase in _UNDECIDED]
            return self._give_up(f"no result from server {', '.join(silent)} before the deadline")
        return [self._ask(i) for i, part in enumerate(self._parts) if part.due_ns is not None and part.due_ns <= now_ns]

    def hurry(self, now_ns: int) -> list[Action]:
        """Stop waiting: what is there now shall do. Again, or after the outcome: no effect."""
        if self._outcome is not None or self._hurry:
            return []
        self._hurry = True
        for part in self._parts:
            if part.phase is Phase.WAITING:
                part.due_ns = now_ns
        return self.tick(now_ns)

    def settle(self, length: int) -> list[Action]:
        """Use `length` chunks of the outcome. Once; 0 releases everything."""
        outcome = self._outcome
        if outcome is None:
            raise CallerError("settle() before the lookup has an outcome; release() gives up a pending one")
        if not 0 <= length <= self._chunks or not outcome.lengths >> length & 1:
            raise CallerError(f"length {length} is not among the lengths that were answered")
        if length == 0:
            return self.release()
        if self._closed:
            raise CallerError("this lookup was released; nothing of it can be used any more")
        if self._settled is not None and self._settled != length:
            raise CallerError(f"this lookup was settled at {self._settled} chunks, it cannot become {length}")
        if self._settled is not None:
            return []
        self._settled = length
        assert all(part.phase is Phase.READY for part in self._parts), "a length above 0 without all servers ready"
        return [Action(ActionKind.SETTLE, i, length=length) for i in range(len(self._parts))]

    def release(self) -> list[Action]:
        """Give up or end the lookup: every server that may hold something is told, once."""
        if self._outcome is None:
            return self._give_up("released by the caller")
        if self._closed:
            return []
        return self._release_all()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _expects(self, server: int, serial: int) -> bool:
        part = self._parts[server]
        return part.phase is Phase.ASKED and part.serial == serial

    def _ask(self, server: int) -> Action:
        part = self._parts[server]
        assert part.phase is Phase.WAITING, "a QUERY before the acknowledgement, or a second one at once"
        part.phase = Phase.ASKED
        part.due_ns = None
        part.serial += 1
        part.hurried = self._hurry
        return Action(ActionKind.QUERY, server, serial=part.serial, hurry=part.hurried)

    def _wait(self, server: int, now_ns: int) -> list[Action]:
        part = self._parts[server]
        assert part.phase is Phase.ASKED
        part.phase = Phase.WAITING
        if self._hurry and not part.hurried:
            return [self._ask(server)]
        part.due_ns = now_ns + part.wait_ns
        part.wait_ns = min(2 * part.wait_ns, self._pace.poll_ns_max)
        assert part.due_ns > now_ns, "a pending answer must not be followed by an immediate re-query"
        return []

    def _conclude(self) -> None:
        if any(part.phase is not Phase.READY for part in self._parts):
            return
        lengths = self._parts[0].lengths
        for part in self._parts[1:]:
            lengths &= part.lengths
        assert lengths & NOTHING, "the empty prefix is always servable"
        self._fix(LookupOutcome(lengths))

    def _fail(self, server: int, phase: Phase, reason: str) -> list[Action]:
        assert phase not in _UNDECIDED
        self._parts[server].phase = phase
        self._parts[server].due_ns = None
        return self._give_up(f"server {server}: {reason}")

    def _give_up(self, reason: str) -> list[Action]:
        self._fix(LookupOutcome(NOTHING, reason))
        return self._release_all()

    def _fix(self, outcome: LookupOutcome) -> None:
        assert self._outcome is None, "the outcome of a lookup is fixed once"
        assert outcome.lengths & NOTHING
        self._outcome = outcome

    def _release_all(self) -> list[Action]:
        assert self._outcome is not None
        assert not self._closed
        self._closed = True
        actions = []
        for server, part in enumerate(self._parts):
            if part.phase in _UNDECIDED:
                part.phase = Phase.GIVEN_UP
                part.due_ns = None
            if part.phase is not Phase.ABSENT:
                actions.append(Action(ActionKind.RELEASE, server))
        return actions

    def _late(self, server: int) -> list[Action]:
        """A late or duplicate answer. It changes nothing; a server that has not heard our release hears it again."""
        self.late += 1
        if self._parts[server].phase is not Phase.GIVEN_UP:
            return []
        assert self._closed
        return [Action(ActionKind.RELEASE, server)]

"""Sessions of a cache server: whose hashes are known, which lookup is current, what has been answered. Pure.

Theory of operation
-------------------
A session belongs to one request of one engine and lives from its first LOOKUP to END_SESSION, or until nobody has named
it for `idle_ns` (sessions die by idleness, never by age). It holds the chunk hashes of the request, sent once, and at
most one current lookup:

    (none) --open--> PENDING --job ended--> READY | FAILED --settle--> SETTLED
    any --release / next open / end / expiry--> (none)

1. `open` begins a generation. The leases of the one before are released first; a load that somebody has joined goes on.
2. Every opened lookup gets an `Owner` with a number that this server has never used, so no operation of an older life -
   not even one with the same session and generation - can touch its leases.
3. `verdict` is idempotent: the first READY or FAILED is kept and repeated unchanged until release or end. Whoever is in
   a hurry ends a pending job first; it answers with what it holds, and that is the verdict for everybody.
4. A lookup is *named* by (session, generation, epoch) and by the connection it came from. RELEASE and END carry an
   epoch and mean "up to this epoch": a repeated or late one cannot hit a later life of a reused request id.
5. Whoever is released is released through one path, `_drop_lookup`: cancel the job, give back what the owner holds.
   I/O holds are not touched: a copy that runs goes on, and its memory drains.

Hashes: `base` hashes are kept, the rest is appended. The client says which hash it believes to be the last kept one;
the chain makes that one hash stand for the whole prefix. If it does not fit, nothing is opened and the client sends
all.
Rejected: a time-to-live per session (a request that decodes for an hour would lose its session in the middle); deciding
staleness by the caller's generation number alone (engines reuse request ids and may count from one again).

Who holds: the leases, in the name of the session's owner, by L1. Who announces: the job (`state`). Who frees: this
table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, NamedTuple, Protocol

from kvcore.errors import CallerError
from kvcore.leases import Owner


class Job(Protocol):
    """What `Storage.start_lookup` returns, as far as a session needs it."""

    @property
    def state(self) -> Any: ...

    @property
    def lengths(self) -> int: ...

    @property
    def reason(self) -> str: ...

    def settle(self, length: int) -> Any: ...

    def hurry(self) -> Any: ...

    def cancel(self) -> Any: ...


@unique
class VerdictKind(Enum):
    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: VerdictKind
    lengths: int = 0
    reason: str = ""


_PENDING = Verdict(VerdictKind.PENDING)
_UNKNOWN = Verdict(VerdictKind.UNKNOWN)


class LookupName(NamedTuple):
    """Which lookup of a session is meant, as the client counts."""

    connection: int
    generation: int
    epoch: int


class Session:
    """One session. Fields are read by the server, written by the table only."""

    __slots__ = ("hashes", "job", "last_used_ns", "latest", "lookup", "owner", "salt", "session", "settled", "verdict")

    def __init__(self, session: str) -> None:
        self.session = session
        self.hashes: list[bytes] = []
        self.salt = ""
        self.lookup: LookupName | None = None  # the current one
        self.latest: LookupName | None = None  # the newest one there was, also after its release
        self.owner: Owner | None = None
        self.job: Job | None = None
        self.verdict: Verdict | None = None
        self.settled: int | None = None
        self.last_used_ns = 0


class SessionTable:
    """All sessions of one server, least recently used first."""

    def __init__(self, *, idle_ns: int, sessions_max: int, release_owner: Callable[[Owner], object]) -> None:
        if idle_ns <= 0:
            raise CallerError(f"idle_ns must be positive, not {idle_ns}")
        self._idle_ns = idle_ns
        self._sessions_max = sessions_max
        self._release_owner = release_owner
        self._sessions: dict[str, Session] = {}
        self._lives = 0
        self.opened = 0
        self.expired = 0
        self.ended = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._sessions)

    @property
    def lookups_open(self) -> int:
        return sum(session.lookup is not None for session in self._sessions.values())

    def next_expiry_ns(self) -> int | None:
        """When the session that was idle longest dies if nobody names it; None: there is none."""
        for session in self._sessions.values():
            return session.last_used_ns + self._idle_ns
        return None

    def find(self, name: str, now_ns: int) -> Session | None:
        """The session, which counts as used now."""
        session = self._sessions.get(name)
        if session is not None:
            self._touch(session, now_ns)
        return session

    def prepare(self, name: str, base: int, base_hash: bytes, hashes: Sequence[bytes], now_ns: int) -> Session | None:
        """The session with its hash list brought up to date and no lookup. None: the base does not fit, or no room.

        Whatever the session had looked up before is released in either case: the client has moved on.
        """
        session = self._sessions.get(name)
        if session is not None:
            self._drop_lookup(session)
            self._touch(session, now_ns)
        known = session.hashes if session is not None else []
        if base > len(known) or (base > 0 and known[base - 1] != base_hash):
            return None
        if session is None:
            session = self._create(name, now_ns)
        if session is not None:
            session.hashes = [*known[:base], *hashes]
        return session

    @property
    def full(self) -> bool:
        return len(self._sessions) >= self._sessions_max

    def open(self, session: Session, lookup: LookupName, salt: str, start: Callable[[Owner], Job]) -> None:
        """Begin a generation of a prepared session. `start` gets the owner that no one else ever was."""
        assert session.lookup is None, "prepare() comes first"
        assert self._sessions.get(session.session) is session
        self._lives += 1
        owner = Owner(session.session, self._lives, "lookup")
        session.job = start(owner)  # if it raises, the session has no lookup and holds nothing
        session.lookup = session.latest = lookup
        session.owner = owner
        session.salt = salt
        self.opened += 1

    def verdict(self, name: str, lookup: LookupName, now_ns: int, *, hurry: bool = False) -> Verdict:
        """What QUERY answers. Idempotent, in a hurry too."""
        session = self.find(name, now_ns)
        if session is None or session.lookup != lookup:
            return _UNKNOWN
        if session.verdict is None:
            assert session.job is not None, "a lookup has a job"
            if hurry:
                session.job.hurry()
            session.verdict = _verdict_of(session.job)
        return session.verdict if session.verdict is not None else _PENDING

    def settle(self, name: str, lookup: LookupName, length: int, now_ns: int) -> bool:
        """Keep what `length` needs. False: no such lookup. Raises `CallerError` for a length that was not answered."""
        session = self.find(name, now_ns)
        if session is None or session.lookup != lookup:
            return False
        if length == 0:
            self._drop_lookup(session)
            return True
        self._settle(session, length)
        return True

    def _settle(self, session: Session, length: int) -> None:
        assert session.job is not None
        verdict = session.verdict
        if verdict is None or verdict.kind is not VerdictKind.READY or not verdict.lengths >> length & 1:
            raise CallerError(f"length {length} was not answered for this lookup")
        if session.settled is not None and session.settled != length:
            raise CallerError(f"this lookup was settled at {session.settled} chunks, it cannot become {length}")
        if session.settled is None:
            session.settled = length
            session.job.settle(length)

    def release(self, name: str, connection: int, epoch: int, now_ns: int) -> bool:
        """End the current lookup if it is this connection's and not newer than `epoch`."""
        session = self.find(name, now_ns)
        if session is None or session.lookup is None or not _covers(session.lookup, connection, epoch):
            return False
        self._drop_lookup(session)
        return True

    def end(self, name: str, connection: int, epoch: int) -> Session | None:
        """End the session, which holds nothing then, if its lookup is not newer than `epoch`. I/O holds go on."""
        session = self._sessions.get(name)
        if session is None:
            return None
        if session.latest is not None and not _covers(session.latest, connection, epoch):
            return None
        self._remove(session)
        self.ended += 1
        return session

    def owner_of(self, name: str, generation: int, now_ns: int) -> tuple[Session, Owner] | None:
        """The session and the owner of its current lookup, for a worker that names the engine's generation."""
        session = self.find(name, now_ns)
        if session is None or session.lookup is None or session.lookup.generation != generation:
            return None
        assert session.owner is not None
        return session, session.owner

    def expire(self, now_ns: int) -> int:
        """End the sessions that nobody has named for `idle_ns`; how many."""
        count = 0
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.last_used_ns + self._idle_ns > now_ns:
                break
            self._remove(session)
            count += 1
        self.expired += count
        return count

    def clear(self) -> int:
        """End all sessions (the server closes)."""
        count = len(self._sessions)
        for session in list(self._sessions.values()):
            self._remove(session)
        return count

    # --- inside ----------------------------------------------------------------------------------------------------

    def _create(self, name: str, now_ns: int) -> Session | None:
        if self.full:
            return None
        session = Session(name)
        self._touch(session, now_ns)
        return session

    def _touch(self, session: Session, now_ns: int) -> None:
        assert now_ns >= session.last_used_ns, "time does not go backwards"
        session.last_used_ns = now_ns
        self._sessions.pop(session.session, None)
        self._sessions[session.session] = session

    def _remove(self, session: Session) -> None:
        self._drop_lookup(session)
        del self._sessions[session.session]

    def _drop_lookup(self, session: Session) -> None:
        """The one path on which a lookup ends."""
        if session.lookup is None:
            assert session.job is None
            assert session.owner is None
            return
        assert session.job is not None
        assert session.owner is not None
        job, owner = session.job, session.owner
        session.lookup = session.job = session.owner = session.verdict = session.settled = None
        job.cancel()
        self._release_owner(owner)


def _covers(lookup: LookupName, connection: int, epoch: int) -> bool:
    return lookup.connection == connection and lookup.epoch <= epoch


def _verdict_of(job: Job) -> Verdict | None:
    """READY or FAILED once the job says so; None while it is pending."""
    name = job.state.name
    if name == "READY":
        assert job.lengths & 1, "the empty prefix is always servable"
        return Verdict(VerdictKind.READY, job.lengths)
    if name == "FAILED":
        return Verdict(VerdictKind.FAILED, 1, job.reason)
    assert name == "PENDING", f"a lookup job is pending, ready or failed, not {name}"
    return None

"""The scheduler's side of the cache: start a lookup, poll it, settle it. Synchronous for its caller; confined to the
loop's thread.

Theory of operation
-------------------
Per session there is at most one current lookup: a `LookupState` (pure, see `kvcore/lookup.py`) and this shell around
it, which turns its actions into messages and the replies into its events.

1. `start` sends LOOKUP to every server, at once. Hashes that a server has acknowledged before, in the same life of the
   server, are not sent again: LOOKUP names how many it keeps and which hash is the last of those. BASE_MISMATCH, or
   a restart of the server, makes us send all of them.
2. One timer per lookup, at `LookupState.next_due_ns`; it is cancelled when the outcome is fixed.
3. `poll` reads the outcome; it sends nothing. So a scheduler may ask as often as it likes.
4. SETTLE, RELEASE and END are debts of the connection: repeated until answered, the newest per session counts.
5. `epoch` counts the lookups of this client. A reply belongs to the epoch it was asked for; a reply for an older one is
   late, counted, and changes nothing, because the newer LOOKUP has already released the older leases on the servers
   (same ordered connection) and END or RELEASE cover every epoch up to theirs.
6. A LOOKUP whose acknowledgement is late - after the deadline, or after the end of its session - is still listened to
   for `linger_ns`: if it comes, the server is told to release again. (The first time an earlier life of it was told.)

Who holds: the servers hold leases in the session's name. Who announces: QUERY's reply. Who frees: `settle`, `release`,
`end` or the next `start`; if this process dies, the servers' idle expiry.

Rejected: blocking until the answer (a scheduler step must not wait); a query per poll (a busy scheduler would flood the
servers); one timer for all lookups (needs an ordered structure for no gain at hundreds of lookups).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.errors import CallerError
from kvcore.groups import CacheLayout
from kvcore.lookup import NOTHING, Action, ActionKind, LookupOutcome, LookupState, Pace
from kvcore.placement import Placement
from kvcore.ports import Clock
from kvcore.runtime.confined import LoopConfined
from kvcore.service import protocol as wire
from kvcore.service.connection import Connection
from kvcore.service.protocol import Error, ErrorCode, Reply

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
_SEND_ALL = frozenset((ErrorCode.BASE_MISMATCH, ErrorCode.RESTARTED))
"""The server has not the hashes that we thought it had, so it did not take the lookup."""
_SERVER_GONE = frozenset((ErrorCode.RESTARTED, ErrorCode.MISMATCH, ErrorCode.CLOSED))
"""The life of the server that may have held something for us has ended, or never held anything."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`server_timeout_ns` is the servers' own deadline: it ends earlier than ours, so that what they have by then still
    reaches us (a shorter hit instead of none)."""

    lookup_timeout_ns: int = 2_000_000_000
    server_timeout_ns: int = 1_500_000_000
    linger_ns: int = 10_000_000_000
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        if not 0 < self.server_timeout_ns <= self.lookup_timeout_ns:
            raise CallerError("server_timeout_ns must be positive and at most lookup_timeout_ns")
        if self.linger_ns < 0:
            raise CallerError(f"linger_ns must not be negative: {self.linger_ns}")


@dataclass(frozen=True, slots=True)
class SchedulerClientStatistics:
    sessions: int
    lookups: int
    lookups_pending: int
    outcomes_full: int  # every server answered
    outcomes_failed: int  # a server failed, was lost or was too late
    queries: int
    replies_late: int
    hashes_sent: int
    hashes_saved: int  # named by the base instead of sent


class _Lookup:
    """The current lookup of a session."""

    __slots__ = ("epoch", "generation", "hashes", "outcome", "prompt_tokens", "salt", "skip_chunks", "state", "timer")

    def __init__(
        self, generation: int, epoch: int, hashes: list[bytes], prompt_tokens: int, skip_chunks: int, salt: str
    ) -> None:
        self.generation = generation
        self.epoch = epoch
        self.hashes = hashes
        self.prompt_tokens = prompt_tokens
        self.skip_chunks = skip_chunks
        self.salt = salt
        self.state: LookupState | None = None  # None: nothing to ask for
        self.outcome: LookupOutcome | None = None
        self.timer: asyncio.TimerHandle | None = None


class _Session:
    """What this client knows of a session. `known[s]`: (incarnation, hashes) that server s has acknowledged."""

    __slots__ = ("asked", "known", "lookup", "waiters")

    def __init__(self, servers: int) -> None:
        self.asked = False  # some server may know this session
        self.lookup: _Lookup | None = None
        self.known: list[tuple[int, list[bytes]]] = [(0, []) for _ in range(servers)]
        self.waiters: list[asyncio.Future[None]] = []


class SchedulerClient:
    """See the module text. `connections[i]` leads to server i of the placement."""

    def __init__(
        self,
        connections: Sequence[Connection],
        placement: Placement,
        layout: CacheLayout,
        clock: Clock,
        config: SchedulerConfig | None = None,
    ) -> None:
        if len(connections) != placement.servers:
            raise CallerError(f"{len(connections)} connections for {placement.servers} servers")
        self._connections = tuple(connections)
        self._layout = layout
        self._clock = clock
        self._config = config if config is not None else SchedulerConfig()
        self._sessions: dict[str, _Session] = {}
        self._epoch = 0
        self._counts: Counter[str] = Counter()
        self._confined = LoopConfined()

    # --- what the scheduler calls ----------------------------------------------------------------------------------

    def start(
        self,
        session: str,
        generation: int,
        hashes: Sequence[bytes],
        *,
        prompt_tokens: int,
        skip_chunks: int = 0,
        salt: str = "",
    ) -> None:
        """Ask all servers. A new generation supersedes the old one; the same one twice is the caller's mistake."""
        self._check_start(session, generation, hashes, prompt_tokens, skip_chunks)
        record = self._sessions.get(session)
        if record is None:
            record = self._sessions[session] = _Session(len(self._connections))
        self._supersede(session, record, generation)
        self._epoch += 1
        lookup = _Lookup(generation, self._epoch, list(hashes), prompt_tokens, skip_chunks, salt)
        record.lookup = lookup
        self._counts["lookups"] += 1
        if not hashes:
            self._fix(record, lookup, LookupOutcome(NOTHING))
            for server in range(len(self._connections)) if record.asked else ():
                self._owe_release(session, lookup, server)  # no LOOKUP follows that would do it
            return
        record.asked = True
        now_ns = self._clock.now_ns()
        deadline_ns = now_ns + self._config.lookup_timeout_ns
        lookup.state = LookupState(len(self._connections), len(hashes), deadline_ns, self._config.pace)
        for server in range(len(self._connections)):
            self._send_lookup(session, record, lookup, server)
        self._rearm(session, lookup)

    def poll(self, session: str, generation: int) -> LookupOutcome | None:
        """The outcome once it is fixed, then always the same; None while it is not. Sends nothing."""
        return self._current(session, generation).outcome

    def hurry(self, session: str, generation: int) -> None:
        """Stop waiting: servers that have not answered do so with what they hold. Again, or after that: nothing."""
        lookup = self._current(session, generation)
        if lookup.state is not None:
            self._perform(session, lookup, lookup.state.hurry(self._clock.now_ns()))
            self._after(session, lookup)

    async def wait(self, session: str, generation: int) -> LookupOutcome:
        """Return the outcome when it is fixed; bounded by the lookup time-out."""
        lookup = self._current(session, generation)
        while lookup.outcome is None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._sessions[session].waiters.append(future)
            await future
            self._current(session, generation)
        return lookup.outcome

    def settle(self, session: str, generation: int, length: int) -> None:
        """Use `length` chunks: every server keeps the leases it needs and gives back the rest. 0: everything."""
        lookup = self._current(session, generation)
        if lookup.outcome is None:
            raise CallerError("settle() before the lookup has an outcome; release() gives up a pending one")
        if lookup.state is not None:
            self._perform(session, lookup, lookup.state.settle(length))
        elif length != 0:
            raise CallerError(f"length {length} is not among the lengths that were answered")

    def release(self, session: str, generation: int) -> None:
        """Give everything back, also of a pending lookup. A second call, or one for an old generation: nothing."""
        self._confined.check()
        record = self._sessions.get(session)
        if record is None or record.lookup is None or record.lookup.generation != generation:
            return
        lookup = record.lookup
        if lookup.state is not None:
            self._perform(session, lookup, lookup.state.release())
            self._after(session, lookup)

    def end(self, session: str) -> None:
        """The request is over: forget it here and on the servers. A second call does nothing."""
        record = self._sessions.pop(session, None)
        if record is None:
            return
        lookup = record.lookup
        assert lookup is not None, "a session begins with a lookup"
        self._stop_timer(lookup)
        self._wake(record)
        for connection in self._connections if record.asked else ():
            connection.owe(_debt(session), wire.EndSession(session, lookup.epoch))

    def close(self) -> None:
        """End all sessions. The connections stay their owner's."""
        for session in list(self._sessions):
            self.end(session)

    def statistics(self) -> SchedulerClientStatistics:
        count = self._counts
        lookups = [record.lookup for record in self._sessions.values() if record.lookup is not None]
        return SchedulerClientStatistics(
            sessions=len(self._sessions),
            lookups=count["lookups"],
            lookups_pending=sum(lookup.outcome is None for lookup in lookups),
            outcomes_full=count["full"],
            outcomes_failed=count["failed"],
            queries=count["queries"],
            replies_late=count["late"],
            hashes_sent=count["hashes_sent"],
            hashes_saved=count["hashes_saved"],
        )

    # --- starting --------------------------------------------------------------------------------------------------

    def _check_start(
        self, session: str, generation: int, hashes: Sequence[bytes], prompt_tokens: int, skip_chunks: int
    ) -> None:
        self._confined.check()
        if not session:
            raise CallerError("a session needs a name")
        if generation < 0 or skip_chunks < 0:
            raise CallerError(f"generation {generation} and skip_chunks {skip_chunks} must not be negative")
        if len(hashes) * self._layout.chunk_tokens > prompt_tokens:
            raise CallerError(f"{len(hashes)} chunks are more than a prompt of {prompt_tokens} tokens has")
        record = self._sessions.get(session)
        if record is not None and record.lookup is not None and record.lookup.generation == generation:
            raise CallerError(f"generation {generation} of session {session!r} was started already")

    def _supersede(self, session: str, record: _Session, generation: int) -> None:
        """The LOOKUP that follows releases the old leases on every server that gets it, so old debts are void."""
        if record.lookup is not None:
            assert record.lookup.generation != generation
            self._stop_timer(record.lookup)
            self._wake(record)
            record.lookup = None
        for connection in self._connections:
            connection.forgive(_debt(session))

    def _send_lookup(
        self, session: str, record: _Session, lookup: _Lookup, server: int, *, whole: bool = False
    ) -> None:
        connection = self._connections[server]
        base = 0 if whole else self._common(record.known[server], connection, lookup.hashes)
        rest = lookup.hashes[base:]
        message = wire.Lookup(
            session=session,
            generation=lookup.generation,
            epoch=lookup.epoch,
            base=base,
            base_hash=lookup.hashes[base - 1] if base else b"",
            hashes=rest,
            prompt_tokens=lookup.prompt_tokens,
            skip_chunks=lookup.skip_chunks,
            salt=lookup.salt,
            timeout_ms=max(1, self._config.server_timeout_ns // _NS_PER_MS),
        )
        self._counts["hashes_sent"] += len(rest)
        self._counts["hashes_saved"] += base
        timeout_ns = self._config.lookup_timeout_ns + self._config.linger_ns
        connection.request(message, lambda reply: self._lookup_replied(session, lookup, server, reply), timeout_ns)

    def _common(self, known: tuple[int, list[bytes]], connection: Connection, hashes: list[bytes]) -> int:
        """How many of the first hashes the server has. They are chained: the last equal one decides for all."""
        incarnation, old = known
        if incarnation == 0 or incarnation != connection.incarnation:
            return 0
        low, high = 0, min(len(old), len(hashes))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if old[middle - 1] == hashes[middle - 1] else (low, middle - 1)
        return low

    # --- replies ---------------------------------------------------------------------------------------------------

    def _lookup_replied(self, session: str, lookup: _Lookup, server: int, reply: Reply) -> None:
        record = self._record_of(session, lookup)
        if record is None:
            self._counts["late"] += not isinstance(reply, Error)
            self._disown(session, lookup, server, reply)
            return
        assert lookup.state is not None
        if isinstance(reply, wire.Ack):
            record.known[server] = (self._connections[server].incarnation, lookup.hashes)
            actions = lookup.state.acknowledged(server, self._clock.now_ns())
        elif isinstance(reply, Error) and reply.code in _SEND_ALL and lookup.outcome is None:
            record.known[server] = (0, [])
            self._send_lookup(session, record, lookup, server, whole=True)
            return
        else:
            if not (isinstance(reply, Error) and reply.code in _SERVER_GONE):
                self._owe_release(session, lookup, server)  # the lookup before this one may still be held there
            actions = lookup.state.refused(server, _text(reply))
        self._perform(session, lookup, actions)
        self._after(session, lookup)

    def _disown(self, session: str, lookup: _Lookup, server: int, reply: Reply) -> None:
        """A server has, or may have, begun a lookup that is over here. It is told unless it is being told.

        It was told before; but the server may have restarted since, the new life got the LOOKUP, and the old one had
        answered what followed it.
        """
        connection = self._connections[server]
        begun = isinstance(reply, wire.Ack) or (isinstance(reply, Error) and reply.code is ErrorCode.TIMEOUT)
        if not begun or connection.owes(_debt(session)):
            return
        if session in self._sessions:
            release = wire.Release(session, lookup.generation, lookup.epoch)
            connection.owe(f"{_debt(session)}:{lookup.epoch}", release)  # beside what the newer lookup will owe
        else:
            connection.owe(_debt(session), wire.EndSession(session, lookup.epoch))

    def _query_replied(self, session: str, lookup: _Lookup, server: int, serial: int, reply: Reply) -> None:
        if self._record_of(session, lookup) is None:
            self._counts["late"] += 1
            return
        state, now_ns = lookup.state, self._clock.now_ns()
        assert state is not None
        if isinstance(reply, wire.Pending):
            actions = state.pending(server, serial, now_ns)
        elif isinstance(reply, wire.Ready):
            actions = state.ready(server, serial, wire.unpack_bits(reply.lengths))
        elif isinstance(reply, wire.Unknown):
            actions = state.unknown(server, serial)
        elif isinstance(reply, Error) and reply.code is ErrorCode.TIMEOUT:
            actions = state.lost(server, serial, now_ns)
        else:
            actions = state.failed(server, serial, _text(reply))
        self._perform(session, lookup, actions)
        self._after(session, lookup)

    def _record_of(self, session: str, lookup: _Lookup) -> _Session | None:
        """The session, if this lookup is still its current one."""
        record = self._sessions.get(session)
        return record if record is not None and record.lookup is lookup else None

    # --- acting ----------------------------------------------------------------------------------------------------

    def _perform(self, session: str, lookup: _Lookup, actions: Sequence[Action]) -> None:
        for action in actions:
            connection = self._connections[action.server]
            if action.kind is ActionKind.QUERY:
                self._send_query(session, lookup, action)
            elif action.kind is ActionKind.SETTLE:
                message = wire.Settle(session, lookup.generation, lookup.epoch, action.length)
                connection.owe(_debt(session), message)
            else:
                self._owe_release(session, lookup, action.server)

    def _owe_release(self, session: str, lookup: _Lookup, server: int) -> None:
        message = wire.Release(session, lookup.generation, lookup.epoch)
        self._connections[server].owe(_debt(session), message)

    def _send_query(self, session: str, lookup: _Lookup, action: Action) -> None:
        self._counts["queries"] += 1
        message = wire.Query(session, lookup.generation, lookup.epoch, action.hurry)
        server, serial = action.server, action.serial
        self._connections[server].request(
            message, lambda reply: self._query_replied(session, lookup, server, serial, reply)
        )

    def _after(self, session: str, lookup: _Lookup) -> None:
        """The state has moved: publish the outcome if there is one, and set the timer for what is due next."""
        assert lookup.state is not None
        record = self._sessions[session]
        if lookup.outcome is None and lookup.state.outcome is not None:
            self._fix(record, lookup, lookup.state.outcome)
        assert lookup.outcome == lookup.state.outcome, "an outcome, once fixed, does not change"
        self._rearm(session, lookup)

    def _fix(self, record: _Session, lookup: _Lookup, outcome: LookupOutcome) -> None:
        assert lookup.outcome is None
        lookup.outcome = outcome
        self._counts["failed" if outcome.reason else "full"] += 1
        self._wake(record)

    def _wake(self, record: _Session) -> None:
        waiters, record.waiters = record.waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def _rearm(self, session: str, lookup: _Lookup) -> None:
        self._stop_timer(lookup)
        assert lookup.state is not None
        due_ns = lookup.state.next_due_ns
        if due_ns is not None:
            delay_s = max(0, due_ns - self._clock.now_ns()) / _NS_PER_S
            lookup.timer = asyncio.get_running_loop().call_later(delay_s, self._due, session, lookup)

    def _due(self, session: str, lookup: _Lookup) -> None:
        lookup.timer = None
        assert self._record_of(session, lookup) is not None, "the timer of a lookup that is over was not cancelled"
        assert lookup.state is not None
        self._perform(session, lookup, lookup.state.tick(self._clock.now_ns()))
        self._after(session, lookup)

    def _stop_timer(self, lookup: _Lookup) -> None:
        self._confined.check()
        if lookup.timer is not None:
            lookup.timer.cancel()
            lookup.timer = None

    def _current(self, session: str, generation: int) -> _Lookup:
        self._confined.check()
        record = self._sessions.get(session)
        if record is None or record.lookup is None or record.lookup.generation != generation:
            raise CallerError(f"generation {generation} of session {session!r} is not the current lookup; start() it")
        return record.lookup


def _debt(session: str) -> str:
    return f"session:{session}"


def _text(reply: Reply) -> str:
    if isinstance(reply, Error):
        return f"{reply.code.value}: {reply.message}"
    if isinstance(reply, wire.Failed):
        return reply.reason
    return f"unexpected reply {type(reply).__name__}"

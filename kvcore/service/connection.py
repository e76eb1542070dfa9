"""One client's conversation with one server: handshake, matching of replies, time-outs, debts. Shell: confined to its
loop's thread.

Theory of operation
-------------------
    NEW --first request--> GREETING --welcome--> READY
    GREETING --mismatch, other version--> REFUSED          for good: the two sides are configured differently
    READY --another incarnation in a reply--> NEW           the server restarted
    READY --"hello required"--> GREETING                    the server has forgotten an idle connection
    any --close--> CLOSED

1. Requests made before READY wait in a queue and are sent, in order, after WELCOME. What times out while it waits is
   taken out and was never sent.
2. A reply is matched by connection number and request id. The first reply to an id decides; others are late: counted,
   nothing else. The callback of a request runs exactly once, never from inside the call that made the request.
3. Every reply carries the server's incarnation. A new one means that everything granted before is gone: debts are void,
   outstanding requests fail with RESTARTED, except those that build on nothing the old life had (STORE, and LOOKUP with
   all its hashes), which are sent to the new life - and then the debts about the same session or store are still owed,
   to the new life and behind them. The handshake is made again with the next request, and subscribers
   of `on_ready` run before anything else is sent to the new life (workers register there).
4. A request that the server did not execute because it had forgotten the connection is sent again by itself, after a
   new handshake, under a new id.
5. *Debts* are messages that must arrive some time (`debts.py`). They are woken whenever the server is heard from, and
   void with its life, unless their cause lives on (3).
6. There is a timer per outstanding request and per unpaid debt, and none otherwise: at rest nothing is scheduled.

Who holds: a request's callback is held here until it has run once, a debt until it is paid or void. Who announces: the
reply, the time-out, or the restart, whichever comes first. Who frees: this object; `close` drops all of it.

Rejected: resending requests in general (STORE twice would reserve twice; QUERY is repeated by its own rule, in
`lookup.py`); a time-out without an owner for what it left behind (see debts); a background ping per connection.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique

from kvcore.errors import CallerError
from kvcore.ports import ClientTransport, Clock
from kvcore.runtime.confined import LoopConfined
from kvcore.service.debts import UNREAD, Debts, ReplyCallback
from kvcore.service.protocol import (
    PROTOCOL_VERSION,
    Error,
    ErrorCode,
    Header,
    Hello,
    Identity,
    Reply,
    Request,
    ServerLimits,
    Transfer,
    UndecodableError,
    Welcome,
    pack,
    read_header,
    read_reply,
    stands_alone,
    subject_of,
)

_NS_PER_S = 1_000_000_000


@unique
class ConnectionState(Enum):
    NEW = "new"
    GREETING = "greeting"
    READY = "ready"
    REFUSED = "refused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    request_timeout_ns: int = 2_000_000_000
    hello_interval_ns: int = 500_000_000
    resend_ns: int = 250_000_000  # first repetition of a debt; doubles
    resend_ns_max: int = 4_000_000_000
    resends_max: int = 8

    def __post_init__(self) -> None:
        if min(self.request_timeout_ns, self.hello_interval_ns, self.resend_ns, self.resend_ns_max) <= 0:
            raise CallerError("the times of a connection must be positive")
        if self.resends_max < 1:
            raise CallerError("resends_max must be at least 1")


@dataclass(frozen=True, slots=True)
class ConnectionStatistics:
    state: str
    incarnation: int
    incarnations_seen: int
    requests: int
    replies: int
    replies_late: int
    replies_foreign: int  # not decodable, or not for this connection
    timeouts: int
    resends: int
    outstanding: int
    waiting: int
    debts: int
    debts_asleep: int  # of these: until the server is heard from


class _Call:
    """One request that has no reply yet."""

    __slots__ = ("callback", "message", "request_id", "timer")

    def __init__(self, message: Request, callback: ReplyCallback) -> None:
        self.message = message
        self.request_id = 0  # 0: not sent
        self.callback = callback
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Connection:
    """See the module text. `index` is the server's position in the placement; `transfer`: who copies KV."""

    def __init__(
        self,
        transport: ClientTransport,
        identity: Identity,
        clock: Clock,
        config: ConnectionConfig | None = None,
        *,
        index: int = 0,
        transfer: Transfer = "worker",
    ) -> None:
        self._transport = transport
        self._transfer: Transfer = transfer
        self._identity = identity
        self._config = config if config is not None else ConnectionConfig()
        self.index = index
        self._number = int(clock.token(8), 16)
        self._state = ConnectionState.NEW
        self._incarnation = 0
        self._limits = ServerLimits()
        self._refusal = ""
        self._server_process = ""
        self._next_id = 1
        self._calls: dict[int, _Call] = {}  # sent, by request id
        self._waiting: dict[_Call, None] = {}  # not sent yet, in order
        self._debts = Debts(self.request, self._config)
        self._ready_callbacks: list[Callable[[Connection], None]] = []
        self._hello_ids: dict[int, None] = {}  # of the greeting that is going on; each may still be answered
        self._hello_timer: asyncio.TimerHandle | None = None
        self._counts: Counter[str] = Counter()
        self._confined = LoopConfined()
        transport.receive(self._received)

    # --- what users call -------------------------------------------------------------------------------------------

    @property
    def state(self) -> ConnectionState:
        return self._state

    @property
    def incarnation(self) -> int:
        """The server's life we last shook hands with; 0 before the first handshake."""
        return self._incarnation

    @property
    def limits(self) -> ServerLimits:
        """What the server told us of its limits (the defaults before the first handshake)."""
        return self._limits

    @property
    def server_process(self) -> str:
        """How the server names its process (`kvcore.runtime.deaths`); "" if it does not."""
        return self._server_process

    @property
    def refusal(self) -> str:
        """Why the server refused the handshake; "" if it did not."""
        return self._refusal

    def on_ready(self, callback: Callable[[Connection], None]) -> None:
        """Run `callback(self)` after every handshake with a server life that we had not met."""
        self._ready_callbacks.append(callback)

    def request(self, message: Request, callback: ReplyCallback, timeout_ns: int | None = None) -> None:
        """Send one request. `callback` runs exactly once: with the reply, or with a local `Error`."""
        self._confined.check()
        assert not isinstance(message, Hello), "the handshake is made by the connection itself"
        self._counts["requests"] += 1
        call = _Call(message, callback)
        if self._state in (ConnectionState.CLOSED, ConnectionState.REFUSED):
            self._fail_soon(call, self._refused_error())
            return
        delay_ns = timeout_ns if timeout_ns is not None else self._config.request_timeout_ns
        call.timer = self._later(delay_ns, self._timed_out, call)
        self._dispatch(call)

    async def call(self, message: Request, timeout_ns: int | None = None) -> Reply:
        """`request` as a coroutine; never raises for what the server or the network does."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def resolve(reply: Reply) -> None:
            if not future.done():
                future.set_result(reply)

        self.request(message, resolve, timeout_ns)
        return await future

    def owe(self, key: str, message: Request) -> None:
        """Get this message to the server sooner or later; it replaces an unpaid one under the same key."""
        self._confined.check()
        if self._state not in (ConnectionState.CLOSED, ConnectionState.REFUSED):
            self._debts.owe(key, message)

    def forgive(self, key: str) -> None:
        """The message under `key` need not arrive any more."""
        self._confined.check()
        self._debts.forgive(key)

    def owes(self, key: str) -> bool:
        """The message under `key` is still to be paid."""
        return key in self._debts

    def close(self) -> None:
        """Fail what is outstanding, drop the debts, close the transport. A second close does nothing."""
        if self._state is ConnectionState.CLOSED:
            return
        self._confined.check()
        self._state = ConnectionState.CLOSED
        self._stop_hello()
        self._debts.drop()
        self._fail_all(Error(ErrorCode.CLOSED, "the connection was closed"))
        self._transport.close()

    def statistics(self) -> ConnectionStatistics:
        count = self._counts
        return ConnectionStatistics(
            state=self._state.value,
            incarnation=self._incarnation,
            incarnations_seen=count["incarnations"],
            requests=count["requests"],
            replies=count["replies"],
            replies_late=count["late"],
            replies_foreign=count["foreign"],
            timeouts=count["timeouts"],
            resends=self._debts.resends,
            outstanding=len(self._calls),
            waiting=len(self._waiting),
            debts=len(self._debts),
            debts_asleep=self._debts.asleep,
        )

    # --- sending ---------------------------------------------------------------------------------------------------

    def _dispatch(self, call: _Call) -> None:
        if self._state is ConnectionState.READY:
            self._send(call)
            return
        self._waiting[call] = None
        if self._state is ConnectionState.NEW:
            self._greet()

    def _send(self, call: _Call) -> None:
        assert self._state is ConnectionState.READY
        call.request_id = self._take_id()
        if self._transmit(call.request_id, call.message):
            self._calls[call.request_id] = call
        else:
            self._fail_soon(call, _disconnected())

    def _take_id(self) -> int:
        request_id = self._next_id
        self._next_id += 1
        return request_id

    def _transmit(self, request_id: int, message: Request) -> bool:
        incarnation = 0 if isinstance(message, Hello) else self._incarnation
        return self._transport.send(pack(Header(PROTOCOL_VERSION, request_id, self._number, incarnation), message))

    def _later(self, delay_ns: int, callback: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0, delay_ns) / _NS_PER_S, callback, *arguments)

    # --- handshake -------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        assert self._state in (ConnectionState.NEW, ConnectionState.GREETING)
        self._state = ConnectionState.GREETING
        hello_id = self._take_id()
        self._hello_ids[hello_id] = None
        if not self._transmit(hello_id, Hello(self._identity, self.index, self._transfer)):
            self._stop_hello()
            self._state = ConnectionState.NEW
            self._fail_waiting(_disconnected())
            return
        self._hello_timer = self._later(self._config.hello_interval_ns, self._hello_lost)

    def _hello_lost(self) -> None:
        self._hello_timer = None
        if self._waiting:
            self._greet()
        else:
            self._stop_hello()
            self._state = ConnectionState.NEW

    def _stop_hello(self) -> None:
        self._hello_ids.clear()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None

    def _greeted(self, header: Header, reply: Reply) -> None:
        self._stop_hello()
        if not isinstance(reply, Welcome):
            self._refused(reply)
            return
        met = header.incarnation != self._incarnation
        if met:
            self._meet(header.incarnation)
        self._limits = reply.limits
        self._state = ConnectionState.READY
        waiting, self._waiting = self._waiting, {}
        if met:
            for callback in self._ready_callbacks:
                callback(self)
        for call in waiting:
            self._send(call)
        self._debts.wake()

    def _refused(self, reply: Reply) -> None:
        text = reply.message if isinstance(reply, Error) else f"unexpected {type(reply).__name__} to HELLO"
        if isinstance(reply, Error) and reply.code in UNREAD | {ErrorCode.BUSY}:
            self._state = ConnectionState.NEW
            self._fail_waiting(reply)
            return
        self._state = ConnectionState.REFUSED
        self._refusal = text
        self._debts.drop()
        self._fail_waiting(self._refused_error())

    def _refused_error(self) -> Error:
        if self._state is ConnectionState.CLOSED:
            return Error(ErrorCode.CLOSED, "the connection was closed")
        return Error(ErrorCode.MISMATCH, self._refusal)

    def _meet(self, incarnation: int) -> None:
        """A server life that we had not met: what the last one owed us or we owed it is void."""
        assert incarnation != self._incarnation
        if self._incarnation:
            self._life_ended()
        self._incarnation = incarnation
        self._counts["incarnations"] += 1

    # --- receiving -------------------------------------------------------------------------------------------------

    def _received(self, payload: bytes) -> None:
        self._confined.check()
        if self._state is ConnectionState.CLOSED:
            return
        header = read_header(payload)
        if header is None or header.connection != self._number:
            self._counts["foreign"] += 1
            return
        reply = self._decode(header, payload)
        if reply is None:
            self._counts["foreign"] += 1
            return
        self._counts["replies"] += 1
        if header.request_id in self._hello_ids:
            self._server_process = reply.process if isinstance(reply, Welcome) else ""
            self._greeted(header, reply)
            return
        call = self._calls.pop(header.request_id, None)
        if call is None:
            self._counts["late"] += 1
        self._notice_life(header, reply)
        if call is not None:
            self._answer(call, header, reply)
        if self._state is ConnectionState.READY:
            self._debts.wake()

    def _decode(self, header: Header, payload: bytes) -> Reply | None:
        if header.version != PROTOCOL_VERSION:
            return Error(ErrorCode.VERSION, f"the server speaks version {header.version}, we speak {PROTOCOL_VERSION}")
        try:
            return read_reply(payload)
        except UndecodableError:
            return None

    def _notice_life(self, header: Header, reply: Reply) -> None:
        """A restart shows in the refusal of a request, also in a late one."""
        if self._state is not ConnectionState.READY or header.incarnation == self._incarnation:
            return
        if not (isinstance(reply, Error) and reply.code in (ErrorCode.STALE_INCARNATION, ErrorCode.HELLO_REQUIRED)):
            return  # a reply that an earlier life had sent; that life is over
        self._state = ConnectionState.NEW
        self._life_ended()
        if self._waiting and self._state is ConnectionState.NEW:
            self._greet()

    def _answer(self, call: _Call, header: Header, reply: Reply) -> None:
        forgotten = isinstance(reply, Error) and reply.code is ErrorCode.HELLO_REQUIRED
        if forgotten and header.incarnation == self._incarnation:
            if self._state is ConnectionState.READY:
                self._state = ConnectionState.NEW
            self._dispatch(call)  # it was not executed; its own timer still runs
            return
        if header.incarnation != self._incarnation:
            self._survive(call)
            return
        call.stop_timer()
        call.callback(reply)

    def _timed_out(self, call: _Call) -> None:
        call.timer = None
        self._counts["timeouts"] += 1
        self._waiting.pop(call, None)
        self._calls.pop(call.request_id, None)
        call.callback(Error(ErrorCode.TIMEOUT, "no reply in time"))

    def _life_ended(self) -> None:
        """The server's life that we knew is over, and with it all that it held for us or that we owed it.

        What goes on into the next life takes the debts about it along: a LOOKUP that nobody waits for any more is
        carried out there all the same, and must be released there.
        """
        calls, self._calls = self._calls, {}
        carried = {subject_of(call.message) for call in (*calls.values(), *self._waiting) if stands_alone(call.message)}
        self._debts.keep(carried)
        for call in calls.values():
            self._survive(call)

    def _survive(self, call: _Call) -> None:
        """A call of the old life: into the new one if it needs nothing of the old one, else it has failed."""
        if stands_alone(call.message):
            self._dispatch(call)
        else:
            self._fail_soon(call, Error(ErrorCode.RESTARTED, "the server has restarted; what it had granted is gone"))

    def _fail_soon(self, call: _Call, error: Error) -> None:
        call.stop_timer()
        asyncio.get_running_loop().call_soon(call.callback, error)

    def _fail_sent(self, error: Error) -> None:
        calls, self._calls = self._calls, {}
        for call in calls.values():
            self._fail_soon(call, error)

    def _fail_waiting(self, error: Error) -> None:
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            self._fail_soon(call, error)

    def _fail_all(self, error: Error) -> None:
        self._fail_sent(error)
        self._fail_waiting(error)


def _disconnected() -> Error:
    return Error(ErrorCode.DISCONNECTED, "the transport did not take the message")

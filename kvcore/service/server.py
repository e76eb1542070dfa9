"""`CacheServer`: one request in, one reply out, at once. Synchronous; only `attach` knows a loop.

Theory of operation
-------------------
`handle(peer, payload)` always returns a reply and never raises:

1. Frame: over the size limit, no header, another protocol version, a body that does not decode - an error reply with
   the request id if one could be read, counted by code, nothing else happens.
2. HELLO compares the two sides' identity (hashing, namespace, layout, chunk size, placement). A difference is refused
   with both values in the text, because two sides that hash differently would share a cache that never hits, and two
   that lay bytes out differently would load garbage.
3. STATUS and CLEAR are the operator's: they belong to no client and need no handshake.
4. Anything else must name this server's incarnation and a connection that has shaken hands, with a request id higher
   than any before: each request is executed at most once (`peers.py`).
5. The operation runs to its end. Nothing in it waits: LOOKUP registers a job and is acknowledged; QUERY looks at it.
6. A `CallerError` from below is the peer's mistake: INVALID. Any other exception is our own bug: INTERNAL to the peer,
   and handed to `on_bug` (which logs; a test or a simulation fails there).

Sessions die by idleness, workers that have something open and are silent are reaped (`workers.py`): `expire(now_ns)`
does both; `attach` calls it from a timer that runs only while there are sessions or open stores and reads. A worker's
word that copies have ended is taken before it is told that it was reaped. `worker_died` is for a proven death.

Who holds: sessions hold leases through their owner, workers hold memory through their holder, both in L1. Who
announces: the messages of `protocol.py`. Who frees: `session.py` on one path, `workers.py` on one path; nothing is
freed here.
Rejected: pushing results to clients (a push can be lost; an idempotent QUERY cannot be misread); an asynchronous
handler (a request that waits holds things while others wait for those); letting exceptions reach the transport.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from kvcore.errors import CallerError, ConfigError
from kvcore.groups import CacheLayout
from kvcore.leases import Owner
from kvcore.placement import Placement
from kvcore.ports import Clock, ServerTransport
from kvcore.runtime.confined import LoopConfined
from kvcore.service import protocol as wire
from kvcore.service.checks import LimitChecks, RefusedError, too_large
from kvcore.service.page_desk import PageAccess
from kvcore.service.page_map import BadPagesError
from kvcore.service.peers import ConnectionTable
from kvcore.service.protocol import Error, ErrorCode, Header, Identity, Message, Reply, ServerLimits
from kvcore.service.server_config import ServerConfig, ServerStatistics
from kvcore.service.server_ports import Deaths, ServerStorage
from kvcore.service.worker_operations import WorkerOperations
from kvcore.session import Job, LookupName, SessionTable, VerdictKind

__all__ = ["CacheServer", "Deaths", "ServerConfig", "ServerStatistics", "ServerStorage"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000
_ACK = wire.Ack()
_OPERATORS = (wire.Status, wire.Clear)
_TAGS = {kind: str(kind.__struct_config__.tag) for kind in wire.Request.__args__}
_log = logging.getLogger("kvcore.server")


class CacheServer:
    """See the module text. `index` is this server's position in the placement.

    `process` names its process to those who let it copy; `pages` None: it does not copy by itself.
    """

    def __init__(
        self,
        storage: ServerStorage,
        *,
        layout: CacheLayout,
        model_name: str,
        identity: Identity,
        placement: Placement,
        clock: Clock,
        index: int = 0,
        config: ServerConfig | None = None,
        limits: ServerLimits | None = None,
        on_bug: Callable[[BaseException], None] | None = None,
        deaths: Deaths | None = None,
        process: str = "",
        pages: PageAccess | None = None,
    ) -> None:
        if not 0 <= index < placement.servers:
            raise ConfigError(f"server index {index} does not exist among {placement.servers} servers")
        if identity.layout_fingerprint != layout.fingerprint or identity.servers != placement.servers:
            raise ConfigError("the server's identity does not describe its own layout and placement")
        self._storage = storage
        self._layout = layout
        self._identity = identity
        self._placement = placement
        self._clock = clock
        self._index = index
        self._config = config if config is not None else ServerConfig()
        self._limits = msgspec.structs.replace(
            limits if limits is not None else ServerLimits(), worker_silence_ns=self._config.worker_silence_ns
        )
        self._checks = LimitChecks(self._limits)
        self._on_bug = on_bug
        self._incarnation = 1 + (int(clock.token(8), 16) >> 1)
        self._connections = ConnectionTable(self._limits.connections_max)
        self._sessions = SessionTable(
            idle_ns=self._config.session_idle_ns,
            sessions_max=self._limits.sessions_max,
            release_owner=storage.release_owner,
        )
        self._workers = WorkerOperations(
            storage,
            self._sessions,
            layout=layout,
            model_name=model_name,
            clock=clock,
            config=self._config,
            checks=self._checks,
            limits=self._limits,
            deaths=deaths,
            pages=pages,
        )
        self._desk = self._workers.desk
        self._process = process
        self._operations = self._table()
        self._counts: Counter[str] = Counter()
        self._by_operation: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._transport: ServerTransport | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._lives_ns = (self._config.session_idle_ns, self._config.worker_silence_ns)
        self._confined = LoopConfined()

    def _table(self) -> dict[type[Message], Callable[[Header, Any], Reply]]:
        return {
            wire.Lookup: self._lookup,
            wire.Query: self._query,
            wire.Settle: self._settle,
            wire.Release: self._release,
            wire.EndSession: self._end_session,
            **self._workers.table(),
            wire.Status: self._status,
            wire.Clear: self._clear,
        }

    # --- what the owner calls --------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """A number of this life of the server; never 0."""
        return self._incarnation

    @property
    def limits(self) -> ServerLimits:
        return self._limits

    def handle(self, peer: bytes, payload: bytes) -> bytes:
        """Answer one frame. Never raises. `peer` is where the reply goes; nothing is decided by it."""
        self._confined.check()
        self._counts["requests"] += 1
        self._counts["bytes_in"] += len(payload)
        header = wire.read_header(payload)
        reply = self._answer(header, payload)
        if isinstance(reply, Error):
            self._errors[reply.code.value] += 1
        request_id, connection = (header.request_id, header.connection) if header is not None else (0, 0)
        frame = wire.pack(Header(wire.PROTOCOL_VERSION, request_id, connection, self._incarnation), reply)
        self._counts["bytes_out"] += len(frame)
        self._schedule_expiry()
        return frame

    def expire(self, now_ns: int) -> int:
        """End the sessions that have been idle too long, reap the workers that were silent too long; how many."""
        self._confined.check()
        return self._sessions.expire(now_ns) + self._desk.reap(now_ns)

    @property
    def session_names(self) -> tuple[str, ...]:
        return self._sessions.names

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Of the workers that are registered and not reaped."""
        return self._desk.workers

    def worker_died(self, worker: str) -> int:
        """The worker's process is *proven* dead: its stores are aborted, its holds end. How many holds that freed."""
        self._confined.check()
        return self._workers.died(worker)

    def attach(self, transport: ServerTransport) -> None:
        """Serve a transport on the running loop until `detach`."""
        if self._transport is not None:
            raise CallerError("this server is attached to a transport already")
        self._transport = transport
        transport.receive(self._received)

    def detach(self) -> None:
        """Stop serving; the transport stays its owner's. A second call does nothing."""
        self._transport = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def close(self) -> None:
        """Detach, end all sessions. Open stores and reads stay: only their workers can end those.

        Copies of our own that have begun end a little later (`copying`).
        """
        self.detach()
        if self._workers.pages is not None:
            self._workers.pages.close()
        self._sessions.clear()

    @property
    def copying(self) -> bool:
        """Copies between L1 and workers' pages run or wait."""
        return self._workers.pages is not None and not self._workers.pages.idle

    def statistics(self) -> ServerStatistics:
        self._confined.check()
        return ServerStatistics(
            incarnation=self._incarnation,
            requests=self._counts["requests"],
            requests_by_operation=dict(self._by_operation),
            errors=dict(self._errors),
            bytes_in=self._counts["bytes_in"],
            bytes_out=self._counts["bytes_out"],
            connections=len(self._connections),
            sessions=len(self._sessions),
            sessions_opened=self._sessions.opened,
            sessions_expired=self._sessions.expired,
            sessions_ended=self._sessions.ended,
            lookups_open=self._sessions.lookups_open,
            workers=len(self._desk.workers),
            stores_open=self._desk.stores_open,
            reads_open=self._desk.reads_open,
            workers_reaped=self._desk.reaped,
            pages=self._workers.pages.statistics() if self._workers.pages is not None else None,
        )

    # --- transport -------------------------------------------------------------------------------------------------

    def _received(self, peer: bytes, payload: bytes) -> None:
        reply = self.handle(peer, payload)
        if self._transport is not None:
            self._transport.send(peer, reply)

    def _schedule_expiry(self) -> None:
        """A timer for what dies first; none while there is nothing that could.

        It never waits longer than the shortest of these lives, so nothing that begins later can die before it.
        """
        if self._expiry is not None or self._transport is None:
            return
        dues = [due for due in (self._sessions.next_expiry_ns(), self._desk.next_reap_ns()) if due is not None]
        if not dues:
            return
        delay_ns = max(0, min(min(dues) - self._clock.now_ns(), *self._lives_ns))
        self._expiry = asyncio.get_running_loop().call_later(delay_ns / _NS_PER_S, self._expiry_due)

    def _expiry_due(self) -> None:
        self._expiry = None
        self.expire(self._clock.now_ns())
        self._schedule_expiry()

    # --- one request -----------------------------------------------------------------------------------------------

    def _answer(self, header: Header | None, payload: bytes) -> Reply:
        try:
            request = self._decode(header, payload)
            assert header is not None
            self._by_operation[_TAGS[type(request)]] += 1
            return self._execute(header, request)
        except RefusedError as refused:
            return Error(refused.code, refused.text)
        except wire.UndecodableError as error:
            return Error(error.code, error.text)
        except BadPagesError as error:
            return Error(ErrorCode.BAD_PAGES, str(error))
        except CallerError as error:
            return Error(ErrorCode.INVALID, str(error))
        except Exception as error:
            return self._bug(error)

    def _bug(self, error: Exception) -> Error:
        if self._on_bug is not None:
            self._on_bug(error)
        else:
            _log.error("a request ended in our own bug", exc_info=error)
        return Error(ErrorCode.INTERNAL, f"{type(error).__name__} in the server; this is a bug in kvcore")

    def _decode(self, header: Header | None, payload: bytes) -> wire.Request:
        if len(payload) > self._limits.frame_bytes_max:
            limit = self._limits.frame_bytes_max
            raise RefusedError(ErrorCode.TOO_LARGE, f"a frame of {len(payload)} bytes; the limit is {limit}")
        if header is None:
            raise RefusedError(ErrorCode.MALFORMED, "this is not a kvcore frame")
        if header.version != wire.PROTOCOL_VERSION:
            ours = wire.PROTOCOL_VERSION
            raise RefusedError(
                ErrorCode.VERSION, f"protocol version: the server speaks {ours}, the client {header.version}"
            )
        return wire.read_request(payload)

    def _execute(self, header: Header, request: wire.Request) -> Reply:
        if isinstance(request, wire.Hello):
            return self._hello(header, request)
        if isinstance(request, _OPERATORS):
            return self._operations[type(request)](header, request)
        if header.incarnation != self._incarnation:
            raise RefusedError(ErrorCode.STALE_INCARNATION, "this was meant for an earlier life of the server")
        if not self._connections.known(header.connection):
            raise RefusedError(ErrorCode.HELLO_REQUIRED, "this connection has not shaken hands, or was forgotten")
        if not self._connections.admit(header.connection, header.request_id):
            raise RefusedError(ErrorCode.DUPLICATE, f"request {header.request_id} or a later one has been executed")
        return self._operations[type(request)](header, request)

    def _hello(self, header: Header, request: wire.Hello) -> Reply:
        difference = self._identity.difference(request.identity)
        if not difference and request.server_index != self._index:
            difference = f"server index: this is server {self._index}, the client expects {request.server_index}"
        offered = ("worker",) if self._workers.pages is None else ("worker", "server")
        if not difference and request.transfer not in offered:
            difference = f"transfer: the server offers {' and '.join(offered)}, the client wants {request.transfer}"
        if difference:
            raise RefusedError(ErrorCode.MISMATCH, difference)
        if header.request_id == 0:
            raise RefusedError(ErrorCode.INVALID, "request ids begin at 1")
        self._connections.greet(header.connection, header.request_id)
        return wire.Welcome(self._limits, self._process)

    # --- sessions --------------------------------------------------------------------------------------------------

    def _lookup(self, header: Header, request: wire.Lookup) -> Reply:
        self._check_lookup(request)
        now_ns = self._clock.now_ns()
        session = self._sessions.prepare(request.session, request.base, request.base_hash, request.hashes, now_ns)
        if session is None:
            if request.base > 0:
                raise RefusedError(ErrorCode.BASE_MISMATCH, "these are not the hashes this session has; send all")
            raise RefusedError(ErrorCode.BUSY, f"{self._limits.sessions_max} sessions are open")
        hashes = tuple(session.hashes)
        masks = self._placement.masks(self._layout, hashes, self._index)

        def start(owner: Owner) -> Job:
            return self._storage.start_lookup(
                owner,
                hashes,
                salt=request.salt,
                prompt_tokens=request.prompt_tokens,
                masks=masks,
                skip_chunks=request.skip_chunks,
                deadline_ns=now_ns + request.timeout_ms * _NS_PER_MS,
            )

        name = LookupName(header.connection, request.generation, request.epoch)
        self._sessions.open(session, name, request.salt, start)
        return _ACK

    def _check_lookup(self, request: wire.Lookup) -> None:
        self._checks.lookup(request, self._layout.chunk_tokens)

    def _query(self, header: Header, request: wire.Query) -> Reply:
        name = LookupName(header.connection, request.generation, request.epoch)
        verdict = self._sessions.verdict(request.session, name, self._clock.now_ns(), hurry=request.hurry)
        if verdict.kind is VerdictKind.READY:
            return wire.Ready(wire.pack_bits(verdict.lengths))
        if verdict.kind is VerdictKind.FAILED:
            return wire.Failed(verdict.reason)
        return wire.Pending() if verdict.kind is VerdictKind.PENDING else wire.Unknown()

    def _settle(self, header: Header, request: wire.Settle) -> Reply:
        name = LookupName(header.connection, request.generation, request.epoch)
        if request.length > self._limits.chunks_per_session_max:
            raise too_large("length", request.length, self._limits.chunks_per_session_max)
        done = self._sessions.settle(request.session, name, request.length, self._clock.now_ns())
        return wire.Done() if done else wire.Unknown()

    def _release(self, header: Header, request: wire.Release) -> Reply:
        done = self._sessions.release(request.session, header.connection, request.epoch, self._clock.now_ns())
        return wire.Done() if done else wire.Unknown()

    def _end_session(self, header: Header, request: wire.EndSession) -> Reply:
        session = self._sessions.end(request.session, header.connection, request.epoch)
        if session is None:
            return wire.Unknown()
        self._storage.renew(session.hashes, session.salt)
        return wire.Done()

    # --- the operator ----------------------------------------------------------------------------------------------

    def _status(self, header: Header, request: wire.Status) -> Reply:
        statistics = self.statistics()
        names = ("requests", "connections", "sessions", "lookups_open", "workers", "stores_open", "reads_open")
        counters = {name: int(getattr(statistics, name)) for name in names}
        counters.update({f"errors_{code}": count for code, count in statistics.errors.items()})
        return wire.StatusReply(counters)

    def _clear(self, header: Header, request: wire.Clear) -> Reply:
        return wire.Cleared(self._storage.drop_l1())

"""What workers ask of a server: who they are, stores and reads by their own copies, copies by the server. Synchronous.

Checks what a message says against the limits, the layout and what its sender is; the desks do the rest: `workers.py`
for copies of the workers, `page_desk.py` for ours. Every method answers one message, or raises what `server.py` turns
into an error reply.

Who holds, announces, frees: see the two desks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.groups import CacheLayout
from kvcore.keys import ObjectKey
from kvcore.leases import Owner
from kvcore.ports import Clock
from kvcore.service import protocol as wire
from kvcore.service.checks import LimitChecks, RefusedError
from kvcore.service.page_desk import PageAccess, PageDesk
from kvcore.service.page_map import BadPagesError
from kvcore.service.protocol import ErrorCode, Header, Message, Reply, ServerLimits
from kvcore.service.server_config import ServerConfig
from kvcore.service.server_ports import Deaths, ServerStorage
from kvcore.service.workers import WorkerDesk
from kvcore.session import SessionTable


class WorkerOperations:
    """See the module text. `pages` None: this server does not copy by itself."""

    def __init__(
        self,
        storage: ServerStorage,
        sessions: SessionTable,
        *,
        layout: CacheLayout,
        model_name: str,
        clock: Clock,
        config: ServerConfig,
        checks: LimitChecks,
        limits: ServerLimits,
        deaths: Deaths | None,
        pages: PageAccess | None,
    ) -> None:
        self._sessions = sessions
        self._layout = layout
        self._model_name = model_name
        self._clock = clock
        self._config = config
        self._limits = limits
        self._checks = checks
        self._deaths = deaths
        self.desk = WorkerDesk(
            storage,
            ranks=layout.ranks,
            workers_max=limits.workers_max,
            open_per_worker_max=limits.open_per_worker_max,
            silence_ns=config.worker_silence_ns,
        )
        self.pages = None if pages is None else PageDesk(storage, pages, layout, limits.open_per_worker_max)

    def table(self) -> dict[type[Message], Callable[[Header, Any], Reply]]:
        """By message, for the server's own table."""
        return {
            wire.Register: self.register,
            wire.Unregister: self.unregister,
            wire.Ping: self.ping,
            wire.Store: self.store,
            wire.Commit: self.commit,
            wire.Abort: self.abort,
            wire.Retrieve: self.retrieve,
            wire.LoadDone: self.load_done,
            wire.StorePages: self.store_pages,
            wire.RetrievePages: self.retrieve_pages,
            wire.Copies: self.copies,
        }

    def died(self, worker: str) -> int:
        """The worker's process is proven dead; how many of its holds that ended."""
        if self.pages is not None:
            self.pages.gone(worker)
        return self.desk.died(worker)

    def register(self, header: Header, request: wire.Register) -> Reply:
        self._checks.name(request.worker)
        if not self.desk.register(request.worker, request.rank, self._clock.now_ns()):
            raise RefusedError(ErrorCode.BUSY, f"{self._limits.workers_max} workers are registered")
        if request.pages is not None:
            self._page_desk.keep(self.desk.knows)
            self._page_desk.register(request.worker, request.pages)
        if self._deaths is not None and request.process:
            self._deaths.watch(request.worker, request.process, partial(self.died, request.worker))
        return wire.Done()

    def unregister(self, header: Header, request: wire.Unregister) -> Reply:
        known = self.desk.knows(request.worker)
        if self._deaths is not None:
            self._deaths.forget(request.worker)
        self.desk.leave(request.worker)  # also of a reaped one: no copy of it is running
        if self.pages is not None:
            self.pages.gone(request.worker)
        if not known:
            self._check_worker(request.worker)
        return wire.Done()

    def ping(self, header: Header, request: wire.Ping) -> Reply:
        self._check_worker(request.worker)
        return wire.Done()

    def store(self, header: Header, request: wire.Store) -> Reply:
        self._check_worker(request.worker, request.rank)
        keys = self._keys_to_store(request, request.cells)
        sizes = [self._layout.cell_bytes(group) for group, _ in request.cells]
        deadline_ns = self._clock.now_ns() + self._config.store_lease_ns
        stored = self.desk.store(request.worker, request.tag, keys, sizes, deadline_ns)
        if stored is None:
            raise self._too_much_open()
        return wire.Reserved(self._config.segment, *stored)

    def _keys_to_store(
        self, request: wire.Store | wire.StorePages, cells: Sequence[tuple[int, bytes]]
    ) -> list[ObjectKey]:
        self._checks.name(request.tag)
        self._checks.salt(request.salt)
        self._checks.batch(cells)
        self._checks.hashes([chunk_hash for _, chunk_hash in cells])
        return [self._key(chunk_hash, request.rank, group, request.salt) for group, chunk_hash in cells]

    def _too_much_open(self) -> RefusedError:
        return RefusedError(ErrorCode.BUSY, f"{self._limits.open_per_worker_max} stores and reads are open")

    def commit(self, header: Header, request: wire.Commit) -> Reply:
        done = self._checks.bits(request.done)
        return self._finished(request.worker, self.desk.commit(request.worker, request.tag, done))

    def abort(self, header: Header, request: wire.Abort) -> Reply:
        return self._finished(request.worker, self.desk.abort(request.worker, request.tag))

    def retrieve(self, header: Header, request: wire.Retrieve) -> Reply:
        self._check_worker(request.worker, request.rank)
        found = self._keys_to_read(request, request.cells)
        if found is None:
            return wire.Granted(self._config.segment, [None] * len(request.cells))
        slots = self.desk.retrieve(request.worker, request.ticket, *found)
        if slots is None:
            raise self._too_much_open()
        return wire.Granted(self._config.segment, slots)

    def _keys_to_read(
        self, request: wire.Retrieve | wire.RetrievePages, cells: Sequence[tuple[int, int]]
    ) -> tuple[Owner, list[ObjectKey]] | None:
        """Whose leases, and on what. None: there is no such lookup (any more)."""
        self._checks.batch(cells)
        found = self._sessions.owner_of(request.session, request.generation, self._clock.now_ns())
        if found is None:
            return None
        session, owner = found
        if any(index >= len(session.hashes) for _, index in cells):
            raise CallerError(f"a chunk index lies outside the {len(session.hashes)} chunks of session")
        return owner, [self._key(session.hashes[index], request.rank, group, session.salt) for group, index in cells]

    def load_done(self, header: Header, request: wire.LoadDone) -> Reply:
        done = self._checks.bits(request.done)
        return self._finished(request.worker, self.desk.load_done(request.worker, request.ticket, done))

    def store_pages(self, header: Header, request: wire.StorePages) -> Reply:
        self._check_worker(request.worker, request.rank)
        keys = self._keys_to_store(request, [(group, chunk_hash) for group, chunk_hash, _ in request.cells])
        blocks = [own for _, _, own in request.cells]
        deadline_ns = self._clock.now_ns() + self._config.store_lease_ns
        told = self._page_desk.store(request.worker, request.tag, keys, blocks, deadline_ns)
        if told is None:
            raise self._too_much_open()
        return told

    def retrieve_pages(self, header: Header, request: wire.RetrievePages) -> Reply:
        self._check_worker(request.worker, request.rank)
        self._checks.name(request.tag)
        found = self._keys_to_read(request, [(group, index) for group, index, _ in request.cells])
        if found is None:
            return wire.Copied(b"", [Answer.UNKNOWN] * len(request.cells))
        told = self._page_desk.retrieve(request.worker, request.tag, *found, [own for _, _, own in request.cells])
        if told is None:
            raise self._too_much_open()
        return told

    def copies(self, header: Header, request: wire.Copies) -> Reply:
        """Answered to anybody who knows the names, also to a worker that has been forgotten: a copy may still run."""
        self.desk.heard(request.worker, self._clock.now_ns())
        told = self._page_desk.copies(request.worker, request.tag, self._checks.bits(request.cancel))
        if told is None:
            raise RefusedError(ErrorCode.UNKNOWN_TAG, "nothing is copied under this tag")
        return told

    @property
    def _page_desk(self) -> PageDesk:
        if self.pages is None:
            raise BadPagesError("this server does not copy from or to the pages of workers")
        return self.pages

    def _finished(self, worker: str, answers: list[Answer] | None) -> Reply:
        self._check_worker(worker)
        if answers is None:
            raise RefusedError(ErrorCode.UNKNOWN_TAG, "nothing is open under this tag or ticket")
        return wire.Finished(answers)

    def _key(self, chunk_hash: bytes, rank: int, group: int, salt: str) -> ObjectKey:
        if group >= len(self._layout.groups):
            raise CallerError(f"group {group} does not exist: the layout has {len(self._layout.groups)} groups")
        return ObjectKey(chunk_hash, self._model_name, rank, group, salt)

    def _check_worker(self, worker: str, rank: int | None = None) -> None:
        self.desk.heard(worker, self._clock.now_ns())
        if not self.desk.knows(worker):
            raise RefusedError(ErrorCode.UNKNOWN_WORKER, f"no worker {worker[:80]!r} is registered here")
        if rank is not None and rank != self.desk.rank_of(worker):
            raise CallerError(f"worker {worker!r} is rank {self.desk.rank_of(worker)}, not {rank}")

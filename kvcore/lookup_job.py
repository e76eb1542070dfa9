"""The record of one lookup: its cells, its state, and all that it holds. Shell (one loop thread).

`LookupJob` is what `Storage.start_lookup` returns. Everything it holds is in its fields and nowhere else; they are
written by the prefetch controller only (see `kvcore.prefetch` for the phases). Who holds: `held` leases belong to
the job's owner, `found` locks and the `grant` to the job. Who announces: `state`, and the `on_done` callbacks. Who
frees: the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, unique
from typing import Protocol

from kvcore import bitmap
from kvcore.bitmap import ones
from kvcore.budget import Grant
from kvcore.deadlines import DeadlineTimer
from kvcore.groups import CacheLayout
from kvcore.keys import ObjectKey, object_keys
from kvcore.leases import Owner
from kvcore.loads import Load
from kvcore.planner import Demand, Rows, cells_in, none_of


@unique
class LookupState(Enum):
    """What a lookup can say. READY and FAILED are final."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


@unique
class Phase(Enum):
    WAITING = "waiting"
    LOOKING = "looking"
    LOADING = "loading"
    ANSWERED = "answered"
    ENDED = "ended"


class Cells:
    """The keys of one lookup: (row, chunk) <-> ObjectKey, and flat batches in row-major order."""

    def __init__(
        self, layout: CacheLayout, model_name: str, salt: str, hashes: Sequence[bytes], demand: Demand
    ) -> None:
        self._groups = len(layout.groups)
        self._salt = salt
        self._model_name = model_name
        self._hashes = hashes  # distinct
        self._chunk_of: dict[bytes, int] = {}
        wanted = 0
        for row in demand.required:
            wanted |= row
        self._first = (wanted & -wanted).bit_length() - 1 if wanted else 0
        self._all = ones(len(hashes)) >> self._first << self._first
        tail = hashes[self._first :]
        self._keys = [
            object_keys(tail, model_name, row.rank, row.group, salt) if cells else []
            for row, cells in zip(layout.rows, demand.required, strict=True)
        ]

    def keys(self, rows: Sequence[int]) -> list[ObjectKey]:
        first = self._first
        batch: list[ObjectKey] = []
        for keys, row in zip(self._keys, rows, strict=True):
            if row == self._all:
                batch.extend(keys)
            elif row:
                batch.extend(keys[chunk - first] for chunk in bitmap.bits(row))
        return batch

    def forget(self) -> None:
        """The lookup holds nothing and never will again: its keys, most of its memory, go before its session does."""
        self._keys = []
        self._hashes = ()
        self._chunk_of = {}

    def sizes(self, rows: Sequence[int], cell_bytes: Sequence[int]) -> list[int]:
        sizes: list[int] = []
        for row, size in zip(rows, cell_bytes, strict=True):
            sizes.extend([size] * row.bit_count())
        return sizes

    def cell(self, key: ObjectKey) -> tuple[int, int] | None:
        """(row, chunk), or None when the key is not of this lookup."""
        if not self._chunk_of:  # most lookups never ask: what they find is all or nothing
            self._chunk_of = {chunk_hash: chunk for chunk, chunk_hash in enumerate(self._hashes)}
            assert len(self._chunk_of) == len(self._hashes)
        chunk = self._chunk_of.get(key.chunk_hash)
        row = key.kv_rank * self._groups + key.object_group_id
        if chunk is None or not 0 <= row < len(self._keys) or not 0 <= key.object_group_id < self._groups:
            return None
        if key.cache_salt != self._salt or key.model_name != self._model_name:
            return None
        return row, chunk

    def rows(self, keys: Iterable[ObjectKey]) -> Rows:
        """The cells among `keys` that are of this lookup."""
        result = [0] * len(self._keys)
        for key in keys:
            cell = self.cell(key)
            if cell is not None:
                result[cell[0]] |= 1 << cell[1]
        return tuple(result)


class Controller(Protocol):
    """Who runs the job: the prefetch controller."""

    def settle(self, job: LookupJob, length: int) -> None: ...

    def hurry(self, job: LookupJob) -> None: ...

    def cancel(self, job: LookupJob, reason: str) -> None: ...

    def loads_ended(self, job: LookupJob, arrived: Sequence[ObjectKey], lost: Sequence[ObjectKey]) -> None: ...


class LookupJob:
    """One lookup of one owner. Made by `Storage.start_lookup`; see the module text."""

    def __init__(
        self,
        controller: Controller,
        owner: Owner,
        cells: Cells,
        demand: Demand,
        deadline_ns: int,
        lease_ns: int,
    ) -> None:
        self.owner = owner
        self.state = LookupState.PENDING
        self.lengths = 0
        self.reason = ""
        self.lease_deadline_ns = lease_ns
        self.controller = controller
        self.cells = cells
        self.demand = demand
        self.deadline_ns = deadline_ns
        self.phase = Phase.WAITING
        self.held: Rows = none_of(demand.required)
        self.joined: dict[ObjectKey, Load] = {}
        self.found: list[Rows] = []
        self.lookups = 0
        self.grant: Grant | None = None
        self.replanned = False
        self.settled: int | None = None
        self.timer: DeadlineTimer | None = None
        self.callbacks: list[Callable[[LookupJob], None]] = []

    @property
    def leases(self) -> int:
        """Cells leased to the owner through this job."""
        return cells_in(self.held)

    def lacks(self, key: ObjectKey) -> bool:
        """A cell that this lookup needs and has no lease on."""
        cell = self.cells.cell(key)
        return cell is not None and bool((self.demand.required[cell[0]] & ~self.held[cell[0]]) >> cell[1] & 1)

    def finish(self, state: LookupState) -> None:
        """The state is final: whoever asked to be told is told soon. For the controller."""
        assert self.state is LookupState.PENDING
        self.state = state
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            asyncio.get_running_loop().call_soon(callback, self)

    def settle(self, length: int) -> None:
        """Keep exactly the leases that `length` needs. Repeating it changes nothing; 0 gives everything back."""
        self.controller.settle(self, length)

    def hurry(self) -> None:
        """Answer now, with what is held, as at the deadline. No effect once there is an answer."""
        self.controller.hurry(self)

    def cancel(self) -> None:
        """Give everything back. Idempotent; a load that others wait for goes on."""
        self.controller.cancel(self, "cancelled")

    def on_done(self, callback: Callable[[LookupJob], None]) -> None:
        """`callback(job)` from the loop once the state is final (also when it is already)."""
        if self.state is LookupState.PENDING:
            self.callbacks.append(callback)
        else:
            asyncio.get_running_loop().call_soon(callback, self)

    async def wait(self) -> LookupState:
        """Return when the state is final. Cancelling the waiter cancels nothing else."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def finish(_: LookupJob) -> None:
            if not done.done():
                done.set_result(None)

        self.on_done(finish)
        await done
        return self.state

    def loads_ended(self, arrived: Sequence[ObjectKey], lost: Sequence[ObjectKey]) -> None:
        """From the load table: `arrived` are leased to us now."""
        self.controller.loads_ended(self, arrived, lost)


def distinct_prefix(hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Up to the first repeated hash. A chain never repeats one; a peer may send anything."""
    if len(set(hashes)) == len(hashes):
        return hashes
    seen: dict[bytes, None] = {}
    for chunk_hash in hashes:
        if chunk_hash in seen:
            break
        seen[chunk_hash] = None
    return list(seen)

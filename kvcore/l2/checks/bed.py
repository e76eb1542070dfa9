"""The bed of a check: opens adapters on one store, waits as a user of an adapter does, and cleans up behind itself.

Everything a check stores has a salt of its own (`token`), so a check may run on a store that holds other people's
records: it reads, counts and deletes its own alone. What the store is capable of, beyond what each adapter declares, is
in `Traits`; a check that needs more raises `NotApplicableError`.

Nothing here knows pytest, threads or which world it is in: it runs on asyncio's loop and in virtual time.

Who holds: the bed its clients and, through its salt, the records that checks left; `clean` deletes those and closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from blake3 import blake3

from kvcore.errors import KvcoreError
from kvcore.keys import ObjectKey
from kvcore.l2.adapter import LockKind, StoreAnswer, TaskId
from kvcore.l2.wrapped import CountingAdapter
from kvcore.ports import Executor, Outcome
from kvcore.quota import Quota

T = TypeVar("T")

_HASH_BYTES = 32


class CheckFailedError(KvcoreError):
    """The adapter has broken a promise. The text says which, what was wanted and what came."""


class NotApplicableError(KvcoreError):
    """This store does not claim to do what the check is about."""


@dataclass(frozen=True, slots=True)
class Traits:
    """`restart`: records survive the adapter. `shared`: several adapters at once. `capacity`: it takes a limit."""

    restart: bool = True
    shared: bool = False
    capacity: bool = True


@dataclass(frozen=True, slots=True)
class Opening:
    """What a check asks of an adapter: a limit of whole records in bytes, and tenants' limits."""

    capacity_bytes: int | None = None
    quota: Quota | None = None


def require(what: str, given: Any, wanted: Any) -> None:
    if given != wanted:
        raise CheckFailedError(f"{what}: wanted {_short(wanted)}, got {_short(given)}")


def _short(value: Any) -> str:
    text = repr(bytes(value) if isinstance(value, bytearray) else value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


class Client:
    """One opened adapter and somebody who waits for its notices."""

    def __init__(self, adapter: CountingAdapter, executor: Executor) -> None:
        self.adapter = adapter
        self.closed = False
        self.notices = {"store": 0, "lookup": 0, "load": 0}
        self._executor = executor
        self._answers: dict[TaskId, list[StoreAnswer]] = {}
        self._news = {kind: asyncio.Event() for kind in self.notices}
        adapter.store_notice.subscribe(lambda: self._noticed("store"))
        adapter.lookup_notice.subscribe(lambda: self._noticed("lookup"))
        adapter.load_notice.subscribe(lambda: self._noticed("load"))

    def _noticed(self, kind: str) -> None:
        self.notices[kind] += 1
        self._news[kind].set()

    async def store(self, keys: Sequence[ObjectKey], payloads: Sequence[bytes]) -> list[StoreAnswer]:
        return await self.stored(self.adapter.submit_store(keys, [memoryview(payload) for payload in payloads]))

    async def stored(self, task: TaskId) -> list[StoreAnswer]:
        def take() -> list[StoreAnswer] | None:
            self._answers.update(self.adapter.pop_completed_stores())
            return self._answers.pop(task, None)

        return await self._until("store", take)

    async def lookup(self, keys: Sequence[ObjectKey]) -> int:
        return await self.looked_up(self.adapter.submit_lookup_and_lock(keys))

    async def looked_up(self, task: TaskId) -> int:
        return await self._until("lookup", lambda: self.adapter.take_lookup(task))

    async def load(self, keys: Sequence[ObjectKey], lengths: Sequence[int]) -> tuple[int, list[bytearray]]:
        buffers = [bytearray(b"\xee" * length) for length in lengths]
        bits = await self.loaded(self.adapter.submit_load(keys, [memoryview(buffer) for buffer in buffers]))
        return bits, buffers

    async def loaded(self, task: TaskId) -> int:
        return await self._until("load", lambda: self.adapter.take_load(task))

    async def found(self, keys: Sequence[ObjectKey]) -> int:
        """What a lookup finds; the locks are given back."""
        bits = await self.lookup(keys)
        self.adapter.submit_unlock([key for position, key in enumerate(keys) if bits >> position & 1])
        return bits

    def listed(self) -> list[ObjectKey]:
        return self.adapter.keys()

    async def announced(self, kind: str, count: int) -> None:
        """Until `count` notices of this kind have come."""
        while self.notices[kind] < count:
            self._news[kind].clear()
            await self._news[kind].wait()

    async def at_rest(self) -> None:
        """All background work has ended. Deletions are not announced, so ask again after each round trip."""
        while self.adapter.work_inflight:
            await self.round_trip()

    async def round_trip(self) -> None:
        returned = asyncio.Event()

        def back(outcome: Outcome[None]) -> None:
            returned.set()

        self._executor.submit(lambda: None, back)
        await returned.wait()

    def close(self) -> None:
        self.closed = True
        self.adapter.close()

    async def _until(self, kind: str, take: Callable[[], T | None]) -> T:
        while True:
            self._news[kind].clear()
            result = take()
            if result is not None:
                return result
            await self._news[kind].wait()


class Bed:
    """See the module text. `open_adapter` opens the store anew each time it is called; the executor is the caller's."""

    def __init__(
        self, open_adapter: Callable[[Opening], CountingAdapter], executor: Executor, traits: Traits, token: str
    ) -> None:
        self.traits = traits
        self._open_adapter = open_adapter
        self._executor = executor
        self._salt = f"kvcore-check-{token}"
        self._model = f"check-{token}"
        self._clients: list[Client] = []

    # -- names and contents

    def key(self, name: object, *, salt: str = "", model: str = "", rank: int = 0, group: int = 0) -> ObjectKey:
        """A key of this check. `salt` and `model` are appended to its own."""
        chunk_hash = str(name).encode().ljust(_HASH_BYTES, b".")
        return ObjectKey(chunk_hash, self._model + model, rank, group, self._salt + salt)

    def mine(self, key: ObjectKey) -> bool:
        return key.cache_salt.startswith(self._salt) and key.model_name.startswith(self._model)

    def many(self, count: int, length: int = 100) -> tuple[list[ObjectKey], list[bytes]]:
        return [self.key(number) for number in range(count)], [payload(number, length) for number in range(count)]

    # -- adapters

    async def open(self, capacity_bytes: int | None = None, quota: Quota | None = None) -> Client:
        client = Client(self._open_adapter(Opening(capacity_bytes, quota)), self._executor)
        self._clients.append(client)
        return client

    async def end(self, client: Client) -> None:
        """Close it when nothing runs any more, so that the store can be opened again."""
        await client.at_rest()
        client.close()
        await client.at_rest()

    async def restart(self, client: Client) -> Client:
        if not self.traits.restart:
            raise NotApplicableError("the store does not outlive its adapter")
        await self.end(client)
        return await self.open()

    async def second(self) -> Client:
        """Another adapter on the store, as another process would have it."""
        if not self.traits.shared:
            raise NotApplicableError("the store belongs to one adapter at a time")
        return await self.open()

    async def limited(self, capacity_bytes: int, quota: Quota | None = None) -> Client:
        if not self.traits.capacity:
            raise NotApplicableError("the store takes no limit of this size")
        return await self.open(capacity_bytes, quota)

    def strong(self, client: Client) -> None:
        if client.adapter.lock_strength.kind is not LockKind.STRONG:
            raise NotApplicableError("a lookup of this store does not protect what it finds")

    def keeps_own_locks(self, client: Client) -> None:
        if client.adapter.lock_strength.kind is LockKind.NONE and not self.traits.shared:
            raise NotApplicableError("a lookup of this store does not protect what it finds, not even from ourselves")

    async def clean(self) -> None:
        """Delete what checks have left, and close."""
        open_clients = [client for client in self._clients if not client.closed]
        if not open_clients and self.traits.restart:
            open_clients = [await self.open()]
        for client in open_clients:
            await client.at_rest()  # a shared store lists what its first scan has found, in the background
            left = [key for key in client.listed() if self.mine(key)]
            client.adapter.delete(left)
            await self.end(client)
        self._clients.clear()


def payload(number: int, length: int = 100) -> bytes:
    """Bytes that tell which number they belong to."""
    period = bytes((number * 7 + position) % 251 for position in range(251))
    return (period * (length // len(period) + 1))[:length]


def noise(number: int, length: int) -> bytes:
    """Like `payload`, and nothing makes it smaller."""
    return blake3(str(number).encode()).digest(length=length)

"""Silent workers: what they staged is never published, what they read is not leased for ever, and their memory is not
used again before their copies have certainly ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from kvcore.answers import Answer
from kvcore.errors import CallerError
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace, object_keys
from kvcore.l1 import L1Cache
from kvcore.leases import Owner
from kvcore.memory import PlainArena
from kvcore.placement import Placement
from kvcore.service import protocol as wire
from kvcore.service.client import (
    Connection,
    ConnectionConfig,
    LoadCell,
    Region,
    SchedulerClient,
    StoreCell,
    WorkerClient,
    identity_of,
)
from kvcore.service.pings import PINGS_PER_SILENCE
from kvcore.service.server import CacheServer, ServerConfig
from kvcore.service.workers import WorkerDesk
from kvcore.sim.loop import SimLoop
from kvcore.sim.world import SimWorld
from kvcore.storage import Storage, StorageConfig

T = TypeVar("T")
MS = 1_000_000
CHUNK = 4
CELL_BYTES = 64
SILENCE = 100 * MS
NAMESPACE = Namespace("m", chunk_tokens=CHUNK)
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, CHUNK, CELL_BYTES),), 1, CHUNK)
PLACEMENT = Placement("chunk", 1)
HASHES = ChunkHasher(NAMESPACE).hash_tokens(range(4 * CHUNK))
CELLS = [StoreCell(0, chunk_hash) for chunk_hash in HASHES]


class Rig:
    """One server, one scheduler's client, one worker's client, each in a process of its own."""

    def __init__(self, seed: int) -> None:
        self.loop = SimLoop(seed)
        self.world = SimWorld(self.loop, in_process=False)

    def build(self) -> None:
        self.arena = PlainArena(8 * CELL_BYTES)
        self.world.inside("server0", self._build_server)
        self.scheduler = self.world.inside(
            "scheduler", lambda: SchedulerClient([self._connect("scheduler")], PLACEMENT, LAYOUT, self.world.clock)
        )
        self.worker = self.client("worker")

    def _build_server(self) -> None:
        self.l1 = L1Cache(self.arena, LruPolicy)
        self.storage = Storage(
            layout=LAYOUT,
            model_name="m",
            l1=self.l1,
            adapters=[],
            clock=self.world.clock,
            config=StorageConfig(prefetch_budget_bytes=1 << 20),
        )
        self.server = CacheServer(
            self.storage,
            layout=LAYOUT,
            model_name="m",
            identity=identity_of(NAMESPACE, LAYOUT, PLACEMENT),
            placement=PLACEMENT,
            clock=self.world.clock,
            config=ServerConfig(segment="memory", worker_silence_ns=SILENCE),
            on_bug=self.loop.fail,
        )
        self.server.attach(self.world.listen(0))

    def _connect(self, name: str) -> Connection:
        identity = identity_of(NAMESPACE, LAYOUT, PLACEMENT)
        config = ConnectionConfig(request_timeout_ns=20 * MS, resend_ns=5 * MS, resends_max=100)
        return Connection(self.world.connect(0, name), identity, self.world.clock, config)

    def client(self, name: str) -> WorkerClient:
        return self.world.inside(
            name,
            lambda: WorkerClient([self._connect(name)], PLACEMENT, LAYOUT, 0, name, lambda segment: Region(self.arena)),
        )

    def run(self, scenario: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            self.build()
            await scenario(self)

        with self.loop:
            self.loop.run_until_complete(main())

    async def by(self, process: str, work: Coroutine[Any, Any, T]) -> T:
        """Do this as code of a process: it dies and stops with it."""
        return await self.world.process(process).spawn(work, process)

    def silence(self, name: str = "worker") -> None:
        self.world.network.partition(f"{name}>server0")

    def heal(self, name: str = "worker") -> None:
        self.world.network.heal(f"{name}>server0")

    async def sleep(self, delay_ns: int) -> None:
        woken = self.loop.create_future()
        self.loop.call_later_ns(delay_ns, woken.set_result, None)
        await woken

    async def publish(self, number: int = 1) -> list[Answer]:
        return await self.by("worker", self._publish(number))

    async def _publish(self, number: int) -> list[Answer]:
        tag = self.worker.tag(number)
        grants = await self.worker.reserve_store(tag, CELLS)
        for grant in grants:
            if grant is not None:
                grant.view[:] = b"\x11" * CELL_BYTES
        return await self.worker.commit_store(tag, [grant is not None for grant in grants])

    async def lookup(self) -> None:
        await self.by("scheduler", self._lookup())

    async def _lookup(self) -> None:
        self.scheduler.start("s", 1, HASHES, prompt_tokens=4 * CHUNK + 1)
        outcome = await self.scheduler.wait("s", 1)
        assert outcome.best == 4
        self.scheduler.settle("s", 1, 4)

    def assert_nothing_is_open(self) -> None:
        state = self.l1.statistics()
        assert (state.holds, state.bytes_staging, state.bytes_draining, state.quarantined_bytes) == (0, 0, 0, 0)
        counts = self.server.statistics()
        assert (counts.stores_open, counts.reads_open) == (0, 0)
        self.l1.check()


@pytest.fixture(params=range(4))
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_what_a_silent_worker_staged_is_never_published_and_its_memory_is_kept_until_its_copies_have_ended(
    rig: Rig,
) -> None:
    """Core 3 and 11: reaping forbids publishing and does not end holds."""

    async def scenario(rig: Rig) -> None:
        grants = await rig.by("worker", rig.worker.reserve_store("t", CELLS))
        assert all(grants)
        rig.silence()
        await rig.sleep(2 * SILENCE)
        state = rig.l1.statistics()
        assert rig.server.worker_names == ()
        assert (state.bytes_staging, state.quarantined_bytes) == (0, 4 * CELL_BYTES)
        assert rig.server.statistics().stores_open == 1
        for grant in grants:  # the copies run on: nobody else has this memory
            assert grant is not None
            grant.view[:] = b"\x77" * CELL_BYTES
        rig.heal()
        answers = await rig.by("worker", rig.worker.commit_store("t", [True] * 4))
        assert Answer.PUBLISHED not in answers
        assert list(rig.l1.resident_keys()) == []
        rig.assert_nothing_is_open()
        assert await rig.publish(2) == [Answer.PUBLISHED] * 4  # it has registered again by itself
        assert rig.server.worker_names == ("worker",)

    rig.run(scenario)


def test_the_first_store_after_reaping_is_kept(rig: Rig) -> None:
    """Found by the swarm (seed 1669): the worker registered again, and the store that told it to was lost."""

    async def scenario(rig: Rig) -> None:
        assert all(await rig.by("worker", rig.worker.reserve_store("t", CELLS)))
        rig.silence()
        await rig.sleep(2 * SILENCE)
        assert rig.server.worker_names == ()
        rig.world.inside("worker", lambda: rig.worker.abort_store("t"))
        rig.heal()
        assert await rig.publish(2) == [Answer.PUBLISHED] * 4
        assert rig.server.worker_names == ("worker",)
        await rig.sleep(2 * SILENCE)
        rig.assert_nothing_is_open()

    rig.run(scenario)


def test_a_store_that_is_given_up_while_its_worker_is_unknown_is_not_asked_for_again(rig: Rig) -> None:
    async def scenario(rig: Rig) -> None:
        assert all(await rig.by("worker", rig.worker.reserve_store("t", CELLS)))
        rig.silence()
        await rig.sleep(2 * SILENCE)
        rig.world.inside("worker", lambda: rig.worker.abort_store("t"))
        rig.heal()
        asking = rig.world.inside("worker", lambda: asyncio.ensure_future(rig.worker.reserve_store("u", CELLS)))
        while not rig.worker.statistics().stores_open:
            await asyncio.sleep(0)
        rig.world.inside("worker", lambda: rig.worker.abort_store("u"))
        assert await asking == [None] * 4
        await rig.sleep(SILENCE)
        rig.assert_nothing_is_open()

    rig.run(scenario)


def test_a_silence_that_begins_while_long_lived_sessions_are_watched_is_noticed_in_time(rig: Rig) -> None:
    """The server has one timer. A session's life is long, a worker's silence short, and the session was there first."""

    async def scenario(rig: Rig) -> None:
        await rig.publish()
        await rig.lookup()
        await rig.sleep(3 * SILENCE // 2)
        assert rig.server.session_names == ("s",)
        assert all(await rig.by("worker", rig.worker.reserve_store("t", [StoreCell(0, b"n" * 32)])))
        rig.silence()
        await rig.sleep(SILENCE - 2 * MS)
        assert rig.server.worker_names == ("worker",)
        await rig.sleep(4 * MS)
        assert rig.server.worker_names == ()
        rig.world.inside("worker", lambda: rig.worker.abort_store("t"))
        rig.heal()
        await rig.sleep(SILENCE)
        rig.assert_nothing_is_open()

    rig.run(scenario)


def test_an_abort_that_comes_after_the_reaping_ends_the_holds(rig: Rig) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.by("worker", rig.worker.reserve_store("t", CELLS))
        rig.silence()
        await rig.sleep(2 * SILENCE)
        assert rig.l1.statistics().quarantined_bytes == 4 * CELL_BYTES
        rig.world.inside("worker", lambda: rig.worker.abort_store("t"))
        rig.heal()
        await rig.sleep(SILENCE)
        rig.assert_nothing_is_open()

    rig.run(scenario)


def test_the_leases_of_what_a_silent_worker_reads_end_and_its_bytes_are_not_taken_for_certain(rig: Rig) -> None:
    async def scenario(rig: Rig) -> None:
        assert await rig.publish() == [Answer.PUBLISHED] * 4
        await rig.lookup()
        cells = [LoadCell(0, index, chunk_hash) for index, chunk_hash in enumerate(HASHES)]
        grants = await rig.by("worker", rig.worker.open_read("s", 1, cells))
        assert all(grants)
        rig.silence()
        await rig.sleep(2 * SILENCE)
        assert rig.l1.statistics().leases == 0
        assert rig.l1.statistics().holds == 4
        assert rig.storage.drop_l1() == 4  # nothing protects them any more, but the memory is still read
        assert rig.l1.statistics().quarantined_bytes == 4 * CELL_BYTES
        assert [bytes(grant.view) for grant in grants if grant] == [b"\x11" * CELL_BYTES] * 4
        rig.heal()
        assert await rig.by("worker", rig.worker.close_read("s", 1, cells)) == [False] * 4
        rig.assert_nothing_is_open()

    rig.run(scenario)


def test_a_worker_that_copies_for_a_long_time_pings_and_is_not_reaped(rig: Rig) -> None:
    """S10."""

    async def scenario(rig: Rig) -> None:
        grants = await rig.by("worker", rig.worker.reserve_store("t", CELLS))
        await rig.sleep(20 * SILENCE)
        assert rig.worker.statistics().pings >= 20 * PINGS_PER_SILENCE - 2
        for grant in grants:
            assert grant is not None
            grant.view[:] = b"\x22" * CELL_BYTES
        assert await rig.by("worker", rig.worker.commit_store("t", [True] * 4)) == [Answer.PUBLISHED] * 4
        pings = rig.worker.statistics().pings
        await rig.sleep(20 * SILENCE)
        assert rig.worker.statistics().pings == pings, "with nothing open nothing is sent"
        assert rig.server.worker_names == ("worker",), "and nobody is reaped"

    rig.run(scenario)


def test_a_stopped_worker_is_reaped_and_goes_on_when_it_runs_again(rig: Rig) -> None:
    """A pause longer than the silence: its commit was ready to be sent, and comes too late."""

    async def scenario(rig: Rig) -> None:
        process = rig.world.process("worker")
        answers: list[list[Answer]] = []

        async def store() -> None:
            for number in (1, 2):
                answers.append(await rig._publish(number))

        granted = rig.server._desk.store

        def stop_behind(*args: Any) -> Any:
            if not process.stopped and not answers and rig.loop.now_ns() < SILENCE:
                process.pause()
            return granted(*args)

        rig.server._desk.store = stop_behind  # type: ignore[method-assign]
        task = process.spawn(store(), "store")
        await rig.sleep(3 * SILENCE)
        assert rig.l1.statistics().quarantined_bytes == 4 * CELL_BYTES
        process.resume()
        await task
        assert Answer.PUBLISHED not in answers[0]
        assert answers[1] == [Answer.PUBLISHED] * 4, "the first failure has told it, or the refusal of the second store"
        rig.assert_nothing_is_open()

    rig.run(scenario)


def test_the_proof_of_death_ends_what_reaping_had_left(rig: Rig) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.by("worker", rig.worker.reserve_store("t", CELLS))
        rig.world.crash("worker")
        await rig.sleep(2 * SILENCE)
        assert rig.l1.statistics().quarantined_bytes == 4 * CELL_BYTES
        rig.server.worker_died("worker")
        rig.assert_nothing_is_open()

    rig.run(scenario)


def test_a_message_that_comes_after_the_proof_of_death_brings_nobody_back() -> None:
    """Messages outlive their sender: a late REGISTER and STORE would hold memory that no proof will ever free."""

    async def scenario(rig: Rig) -> None:
        link = rig.worker._connections[0]
        await link.call(wire.Status())
        assert rig.server.worker_died("worker") == 0
        late = await link.call(wire.Register("worker", 0))
        assert isinstance(late, wire.Error)
        assert late.code is wire.ErrorCode.INVALID
        store = await link.call(wire.Store("worker", "t", 0, "", [(0, HASHES[0])]))
        assert isinstance(store, wire.Error)
        assert store.code is wire.ErrorCode.UNKNOWN_WORKER
        rig.assert_nothing_is_open()
        assert isinstance(await rig.client("worker.1")._connections[0].call(wire.Register("worker.1", 0)), wire.Done)

    Rig(0).run(scenario)


def test_a_scheduler_that_vanished_leaves_its_sessions_to_their_idleness() -> None:
    async def scenario(rig: Rig) -> None:
        assert await rig.publish() == [Answer.PUBLISHED] * 4
        await rig.lookup()
        rig.world.crash("scheduler")
        await rig.sleep(599_000 * MS)
        assert rig.server.statistics().sessions == 1
        await rig.sleep(2_000 * MS)
        assert rig.server.statistics().sessions == 0
        assert rig.l1.statistics().leases == 0

    Rig(0).run(scenario)


# ---- the desk alone


class NoStorage:
    """Grants everything; counts what is given up."""

    def __init__(self) -> None:
        self.given_up: list[str] = []
        self.l1 = L1Cache(PlainArena(1 << 16), LruPolicy)

    def reserve_store(self, tag: str, holder: str, keys: Any, sizes: Any, deadline_ns: int | None) -> Any:
        answers, slots = self.l1.reserve_write(tag, keys, sizes)
        self.l1.hold_write(holder, tag, keys)
        return answers, slots

    def commit_store(self, tag: str, holder: str, keys: Any) -> list[Answer]:
        return [Answer.PUBLISHED] * len(keys)

    def abort_store(self, tag: str, holder: str, keys: Any) -> list[Answer]:
        return [Answer.ABORTED] * len(keys)

    def open_read(self, holder: str, owner: Owner, keys: Any) -> Any:
        return [None] * len(keys)

    def close_read(self, holder: str, owner: Owner, keys: Any) -> list[Answer]:
        return []

    def give_up_holder(self, holder: str) -> int:
        self.given_up.append(holder)
        return 0

    def release_holder(self, holder: str) -> int:
        return 0


def desk_of(storage: NoStorage, workers_max: int = 2) -> WorkerDesk:
    return WorkerDesk(storage, ranks=1, workers_max=workers_max, open_per_worker_max=8, silence_ns=10)


def open_one(desk: WorkerDesk, name: str, now_ns: int) -> None:
    desk.heard(name, now_ns)
    assert desk.store(name, f"{name}:1", object_keys([name.encode()], "m", 0), [CELL_BYTES], now_ns + 100) is not None


def test_only_workers_with_something_open_are_watched_and_the_longest_silent_goes_first() -> None:
    storage = NoStorage()
    desk = desk_of(storage, workers_max=3)
    for name in ("a", "b", "c"):
        assert desk.register(name, 0, 0)
    assert desk.next_reap_ns() is None
    open_one(desk, "a", 1)
    open_one(desk, "b", 2)
    desk.heard("a", 3)
    assert desk.next_reap_ns() == 12
    assert desk.reap(11) == 0
    assert desk.reap(12) == 1
    assert storage.given_up == ["worker:b"]
    assert (desk.workers, desk.reaped_open, desk.next_reap_ns()) == (("c", "a"), 1, 13)
    assert desk.commit("b", "b:1", 1) is not None
    assert desk.reaped_open == 0


def test_a_reaped_worker_takes_no_place_and_an_idle_one_gives_up_its_own_when_it_was_silent_too_long() -> None:
    desk = desk_of(NoStorage())
    assert desk.register("a", 0, 0)
    open_one(desk, "a", 0)
    assert desk.register("b", 0, 0)
    assert not desk.register("c", 0, 5), "b is idle, but was heard of just now"
    assert desk.reap(10) == 1
    assert desk.register("c", 0, 10)
    assert desk.register("d", 0, 10), "b has said nothing for long"
    assert desk.workers == ("c", "d")


def test_a_desk_needs_a_silence_to_wait_for() -> None:
    with pytest.raises(CallerError, match="silence_ns"):
        WorkerDesk(NoStorage(), ranks=1, workers_max=1, open_per_worker_max=1, silence_ns=0)

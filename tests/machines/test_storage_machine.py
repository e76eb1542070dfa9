"""Prefetch and write-back, stepped by rules: deliver, delay, fail, cancel, expire. On the SimLoop, with a real L1.

Two L2 adapters complete nothing by themselves: each lookup, load and store ends when a rule delivers it, with the
outcome that the rule has drawn, and by then time may have passed, the lookup may have been cancelled, the worker may
have died, the lease may have run out and the object may have been evicted. Rules run as code of the loop; between two
of them either everything that is due now has run, or only a part of it.

The model: what each cell must hold (a function of its key); per lookup its deadline, its first answer and what must be
readable under it; per published object (`Life`) which adapters it is still owed to. An adapter ends its debt by an
answer, a deadline or the object's end. The adapters keep their own books of locks and fail on a wrong one.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.answers import Answer
from kvcore.keys import ObjectKey
from kvcore.l2 import pump
from kvcore.l2.adapter import StoreAnswer
from kvcore.loads import LoadTable
from kvcore.planner import union
from kvcore.prefetch import PrefetchController
from kvcore.sim.oracles.hits import usable_prefix
from kvcore.writeback import WritebackController


def _module(name: str, path: Path) -> Any:
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


rigs = _module("kvcore_storage_rig", Path(__file__).parent.parent / "sim" / "conftest.py")

MS = 1_000_000
CHUNKS = 4
ALL = set(range(CHUNKS))
SOME = st.just(ALL) | st.sets(st.integers(0, CHUNKS - 1), min_size=1)
RARELY = st.integers(0, 5).map(lambda number: number == 0)
PROMPTS = st.sampled_from(("p", "q"))
ADAPTERS = st.sampled_from((0, 1))
LOOKUP_DEADLINE, STORE_DEADLINE, LEASE = 8 * MS, 10 * MS, 30 * MS
ATTEMPTS = 2


@dataclass
class Asked:
    """A lookup of the model."""

    job: Any
    prompt: str
    lengths: int | None = None  # the first answer
    length: int | None = None  # settled
    reads: list[ObjectKey] | None = None  # being copied out
    over: bool = False


@dataclass
class Life:
    """A durable object from its publication to its removal: which adapters have still to get it, or have.

    `owed` gives, per adapter, how many stores of the key it had been asked for when it became owed the next one.
    """

    owed: dict[int, int]
    retries: dict[int, int] = field(default_factory=dict)
    stored: dict[int, None] = field(default_factory=dict)


class StorageMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 1 << 16),
        hybrid=st.booleans(),
        retain=st.booleans(),
        skip_l1=st.booleans(),
        cells=st.sampled_from((10, 14, 40)),
        budget=st.sampled_from((3, 8, 40)),
        slice_cells=st.sampled_from((40, 1, 2)),
    )
    def start(
        self, seed: int, hybrid: bool, retain: bool, skip_l1: bool, cells: int, budget: int, slice_cells: int
    ) -> None:
        gc.disable()  # each entry into the loop would collect; the end of the example lets go of all of it
        self.roomy = cells == budget == 40
        self.rig = rigs.Rig(
            seed,
            groups=(rigs.FULL, rigs.WINDOW) if hybrid else (rigs.FULL,),
            l1_cells=cells // 2,
            adapters=("a", "b"),
            automatic=False,
            retain=retain,
            skip_l1=skip_l1,
            prefetch_budget_bytes=budget * 64,
            load_slice_bytes=slice_cells * 64,
            writeback_bytes_inflight_max=4 * 64,
            lookup_deadline_ns=LOOKUP_DEADLINE,
            store_deadline_ns=STORE_DEADLINE,
            store_attempts_max=ATTEMPTS,
            store_backoff_ns=2 * MS,
            lease_ns=LEASE,
        )
        self.asked: list[Asked] = []
        self.open: dict[str, tuple[list[ObjectKey], list[Any], int]] = {}  # a worker's stores, with their deadline
        self.lives: dict[ObjectKey, Life] = {}
        self.by_worker: set[ObjectKey] = set()
        self.began: dict[tuple[int, int], tuple[int, list[Life | None]]] = {}  # store task: not before, for whom
        self.tags = 0
        self.act(self.build)

    def build(self) -> None:
        rig = self.rig
        rig.storage = rigs.Storage(
            layout=rig.layout, model_name="m", l1=rig.l1, adapters=rig.adapters, clock=rig.clock, config=rig.config
        )
        writeback = rig.storage._writeback
        published, removed = writeback.published, writeback.removed

        def watch_published(key: ObjectKey, slot: Any, temporary: bool) -> None:
            published(key, slot, temporary)  # which first ends an older life
            if not temporary:
                origin = rig.storage._prefetch.loads.origins.get(key)
                self.lives[key] = Life(
                    {index: each.stores_of.get(key, 0) for index, each in enumerate(rig.adapters) if index != origin}
                )

        def watch_removed(key: ObjectKey) -> None:
            self.lives.pop(key, None)
            removed(key)

        writeback.published, writeback.removed = watch_published, watch_removed

    def act(self, function: Callable[[], Any], wait_ns: int = 1) -> Any:
        """Run `function` as code of the loop, then what happens in the next `wait_ns` (0: a part of what is due)."""
        before = self.rig.clock.now_ns()

        async def step() -> Any:
            result = function()
            if wait_ns:
                await self.rig.pause(wait_ns)
            return result

        result = self.rig.loop.run_until_complete(step())
        for index, adapter in enumerate(self.rig.adapters):
            for task, entry in adapter.stores.items():
                if (index, task) not in self.began:
                    self.began[index, task] = before, [self.lives.get(key) for key in entry.keys]
        return result

    def keys(self, prompt: str, chunks: set[int]) -> list[ObjectKey]:
        rows = range(len(self.rig.layout.rows))
        return [self.rig.key(chunk, row=row, prompt=prompt) for row in rows for chunk in sorted(chunks)]

    def right(self, key: ObjectKey) -> bytes:
        return rigs.payload_of(key, self.rig.size(key))

    # The worlds outside

    @rule(adapter=ADAPTERS, prompt=PROMPTS, chunks=SOME)
    def l2_has_records(self, adapter: int, prompt: str, chunks: set[int]) -> None:
        self.rig.fill_l2(self.rig.adapters[adapter], self.keys(prompt, chunks))

    @rule(adapter=ADAPTERS, prompt=PROMPTS, chunk=st.integers(0, CHUNKS - 1))
    def l2_forgets(self, adapter: int, prompt: str, chunk: int) -> None:
        for key in self.keys(prompt, {chunk}):
            if not self.rig.adapters[adapter].locks.get(key):
                self.rig.adapters[adapter].records.pop(key, None)

    @rule(adapter=ADAPTERS, refuses=st.booleans())
    def l2_refuses_everything(self, adapter: int, refuses: bool) -> None:
        self.rig.adapters[adapter].refuse_submit = refuses

    @rule(wait_ms=st.sampled_from((1, 3, 6, 12, 40)))
    def time_passes(self, wait_ms: int) -> None:
        self.act(lambda: None, wait_ms * MS)
        for index, adapter in enumerate(self.rig.adapters):
            for task in adapter.stores:
                not_before, lives = self.began[index, task]
                for life in lives if self.rig.clock.now_ns() >= not_before + STORE_DEADLINE else ():
                    if life is not None:
                        life.owed.pop(index, None)  # this store may have met its deadline: that ends the debt

    @rule(really=RARELY)
    def l1_is_cleared(self, really: bool) -> None:
        if really:
            self.act(self.rig.storage.drop_l1)

    # Lookups

    @rule(prompt=PROMPTS, chunks=st.integers(1, CHUNKS), skip=st.integers(0, 1), timeout=st.sampled_from((2, 5, 25)))
    def look_up(self, prompt: str, chunks: int, skip: int, timeout: int) -> None:
        job = self.act(lambda: self.rig.start(chunks, prompt=prompt, skip=skip, timeout_ns=timeout * MS))
        self.asked.append(Asked(job, prompt))

    def ready(self) -> list[Asked]:
        return [asked for asked in self.asked if not asked.over and asked.lengths is not None]

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.ready()))
        lengths = [length for length in range(CHUNKS + 1) if asked.lengths >> length & 1]
        length = data.draw(st.sampled_from(lengths)) if asked.length is None else asked.length
        if self.rig.clock.now_ns() < asked.job.lease_deadline_ns and asked.reads is None:
            self.act(lambda: asked.job.settle(length))
            asked.length = length

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def copy_out(self, data: st.DataObject) -> None:
        """A copy begins, or one that has begun ends."""
        asked = data.draw(st.sampled_from(self.ready()))
        if asked.reads is None:
            asked.reads = self.needed(asked)
            self.act(lambda: self.rig.storage.open_read("w", asked.job.owner, asked.reads))
            return
        slots = self.rig.storage._readings.get("w", {})
        held = [key for key in asked.reads if (asked.job.owner, key) in slots]
        for key in held:
            slot = slots[asked.job.owner, key]
            assert bytes(self.rig.l1.view(slot)) == self.right(key), "the bytes changed under a hold"
        alive = self.rig.clock.now_ns() < asked.job.lease_deadline_ns
        answers = self.act(lambda: self.rig.storage.close_read("w", asked.job.owner, held))
        assert answers == [Answer.RELEASED if alive else Answer.EXPIRED] * len(held)
        asked.over = True
        self.act(lambda: self.rig.storage.release_owner(asked.job.owner))

    def needed(self, asked: Asked) -> list[ObjectKey]:
        length = asked.length
        if length is None:
            assert asked.lengths is not None
            length = asked.lengths.bit_length() - 1
        rows = asked.job.demand.needed(length)
        return [
            self.rig.key(chunk, row=row, prompt=asked.prompt)
            for row, bits in enumerate(rows)
            for chunk in range(CHUNKS)
            if bits >> chunk & 1
        ]

    @precondition(lambda self: [asked for asked in self.asked if not asked.over and asked.reads is None])
    @rule(data=st.data(), wait_ns=st.sampled_from((0, 1)))
    def cancel(self, data: st.DataObject, wait_ns: int) -> None:
        asked = data.draw(st.sampled_from([each for each in self.asked if not each.over and each.reads is None]))
        self.act(lambda: self.rig.storage.release_owner(asked.job.owner), wait_ns)
        asked.over = True
        assert asked.job.leases == 0

    @precondition(lambda self: [asked for asked in self.asked if not asked.over])
    @rule(data=st.data(), wait_ns=st.sampled_from((0, 1)))
    def hurry(self, data: st.DataObject, wait_ns: int) -> None:
        """An answer at once, whatever has arrived; the invariants hold it to its word. A second time: no effect."""
        asked = data.draw(st.sampled_from([each for each in self.asked if not each.over]))
        self.act(asked.job.hurry, wait_ns)
        assert asked.job.state.name == "READY"

    # Stores of a worker

    @rule(prompt=PROMPTS, chunks=SOME, deadline=st.sampled_from((5, 50)))
    def reserve_store(self, prompt: str, chunks: set[int], deadline: int) -> None:
        self.tags += 1
        tag, keys = f"t{self.tags}", self.keys(prompt, chunks)
        when = self.rig.clock.now_ns() + deadline * MS
        sizes = [self.rig.size(key) for key in keys]
        answers, slots = self.act(lambda: self.rig.storage.reserve_store(tag, "w", keys, sizes, when))
        got = [position for position, answer in enumerate(answers) if answer is Answer.RESERVED]
        if got:
            self.open[tag] = ([keys[i] for i in got], [slots[i] for i in got], when)

    @rule(prompt=PROMPTS, chunks=SOME)
    def store(self, prompt: str, chunks: set[int]) -> None:
        """From reservation to commit without a pause: the common case, which fills the cache."""
        keys = self.keys(prompt, chunks)
        answers = self.act(lambda: self.rig.store(keys))
        self.by_worker.update(key for key, answer in zip(keys, answers, strict=True) if answer is Answer.RESERVED)

    @rule(prompt=PROMPTS, adapter=ADAPTERS, timeout=st.sampled_from((5, 25)), load=st.booleans())
    def look_up_in_l2(self, prompt: str, adapter: int, timeout: int, load: bool) -> None:
        """Up to the loads, or with them: what L1 lacks is there, and both adapters have said what they have."""
        self.l2_has_records(adapter, prompt, ALL)
        self.look_up(prompt, CHUNKS, 0, timeout)
        for each in self.rig.adapters:
            for task in list(each.lookups):
                self.act(lambda each=each, task=task: each.finish_lookup(task))
            while load and each.loads:  # one slice brings the next
                self.act(each.finish_load)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), commit=st.sampled_from((True, True, False)))
    def end_store(self, data: st.DataObject, commit: bool) -> None:
        tag = data.draw(st.sampled_from(sorted(self.open)))
        keys, slots, deadline = self.open.pop(tag)
        for key, slot in zip(keys, slots, strict=True):
            size = self.rig.size(key)
            self.rig.l1.view(slot)[:] = self.right(key) if commit else b"\xdd" * size  # also when it has expired
        end = self.rig.storage.commit_store if commit else self.rig.storage.abort_store
        late = self.rig.clock.now_ns() >= deadline
        answers = self.act(lambda: end(tag, "w", keys))
        good = (Answer.PUBLISHED, Answer.DISCARDED) if commit else (Answer.ABORTED,)
        assert all((answer in good) is not late for answer in answers), (answers, late)
        if commit and not late:
            self.by_worker.update(keys)

    @rule(really=RARELY)
    def the_worker_dies(self, really: bool) -> None:
        if not really:
            return
        self.act(lambda: self.rig.storage.release_holder("w"))
        self.open.clear()
        for asked in self.asked:
            asked.over = asked.over or asked.reads is not None

    # What L2 answers

    @precondition(lambda self: any(adapter.lookups for adapter in self.rig.adapters))
    @rule(data=st.data(), wait_ns=st.sampled_from((0, 1)))
    def a_lookup_is_delivered(self, data: st.DataObject, wait_ns: int) -> None:
        adapter, task = self.draw_task(data, "lookups")
        self.act(lambda: adapter.finish_lookup(task), wait_ns)

    @precondition(lambda self: any(adapter.loads for adapter in self.rig.adapters))
    @rule(data=st.data(), wait_ns=st.sampled_from((0, 1)))
    def a_load_is_delivered(self, data: st.DataObject, wait_ns: int) -> None:
        adapter, task = self.draw_task(data, "loads")
        keys = adapter.loads[task].keys
        lost = data.draw(st.just(set()) | st.sets(st.sampled_from(keys)), label="lost")
        adapter.lose = lost
        self.act(lambda: adapter.finish_load(task), wait_ns)
        adapter.lose = set()

    @precondition(lambda self: any(adapter.stores for adapter in self.rig.adapters))
    @rule(data=st.data(), wait_ns=st.sampled_from((0, 1)))
    def a_store_is_delivered(self, data: st.DataObject, wait_ns: int) -> None:
        adapter, task = self.draw_task(data, "stores")
        index, keys = self.rig.adapters.index(adapter), adapter.stores[task].keys
        bad = st.sampled_from((StoreAnswer.RETRY, StoreAnswer.FULL, StoreAnswer.FAILED))
        answers = {key: data.draw(st.just(StoreAnswer.STORED) | bad, label="answer") for key in keys}
        adapter.store_answer = answers.__getitem__
        not_before, lives = self.began[index, task]
        in_time = self.rig.clock.now_ns() < not_before + STORE_DEADLINE
        self.act(lambda: adapter.finish_store(task), wait_ns)
        adapter.store_answer = lambda key: StoreAnswer.STORED
        for key, life in zip(keys, lives, strict=True):
            assert answers[key] is not StoreAnswer.STORED or adapter.records[key] == self.right(key), "other bytes"
            if life is not None and index in life.owed:
                self.note(life, index, answers[key] if in_time else StoreAnswer.FAILED, adapter.stores_of[key])

    def note(self, life: Life, index: int, answer: StoreAnswer, stores: int) -> None:
        life.retries[index] = life.retries.get(index, 0) + 1
        if answer is StoreAnswer.RETRY and life.retries[index] < ATTEMPTS:
            life.owed[index] = stores
            return
        del life.owed[index]
        if answer is StoreAnswer.STORED:
            life.stored[index] = None

    def draw_task(self, data: st.DataObject, kind: str) -> tuple[Any, int]:
        places = [(adapter, task) for adapter in self.rig.adapters for task in getattr(adapter, kind)]
        return places[data.draw(st.integers(0, len(places) - 1), label=kind)]

    # What must hold

    @invariant()
    def what_is_visible_is_right(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.l1.check()
        for key in self.rig.l1.resident_keys():
            slot = self.rig.l1.slot_of(key)
            assert bytes(self.rig.l1.view(slot)) == self.right(key), "a reader sees what nobody finished"

    @invariant()
    def lookups_answer_in_time_and_keep_their_word(self) -> None:
        if not hasattr(self, "rig"):
            return
        now = self.rig.clock.now_ns()
        for asked in self.asked:
            job = asked.job
            if asked.over:
                continue
            assert job.state.name != "PENDING" or now <= job.deadline_ns, "a wait without an end"
            if job.state.name == "READY" and asked.lengths is None:
                asked.lengths = job.lengths
            assert asked.lengths in (None, job.lengths), "a fixed answer changed"
            if now > job.lease_deadline_ns:
                assert job.leases == 0, "a lease outlives its deadline"
            elif asked.lengths is not None and asked.reads is None:
                for key in self.needed(asked):
                    slot = self.rig.l1.slot_of(key)
                    assert slot is not None, "a promised cell is not resident"
                    assert self.rig.l1._leases.holds(job.owner, slot), "a promised cell is not leased"

    @invariant()
    def bytes_and_origins_are_accounted(self) -> None:
        if not hasattr(self, "rig"):
            return
        budget = self.rig.storage.statistics().prefetch.budget
        assert 0 <= budget.bytes_used <= budget.bytes_capacity
        for index, adapter in enumerate(self.rig.adapters):
            touched = sum(len(task.keys) for task in (*adapter.loads.values(), *adapter.stores.values()))
            held = self.rig.l1._holds._held.get(f"l2:{adapter.name}", {})
            assert sum(held.values()) >= touched, "an adapter uses memory that nobody holds for it"
            other = self.rig.adapters[1 - index]
            for key in adapter.stores_of:
                assert key in self.by_worker or key in other.loads_of, "stored where it came from"

    def teardown(self) -> None:
        """Everything is delivered, everybody ends; then nothing is left, nobody is owed, and the cache serves again."""
        if not hasattr(self, "rig"):
            return
        try:
            self.rig.loop.run_until_complete(self.ending())
        finally:
            self.rig.loop.close()
            gc.enable()

    async def ending(self) -> None:
        rig = self.rig
        for tag, (keys, _, _) in self.open.items():
            rig.storage.abort_store(tag, "w", keys)
        rig.storage.release_holder("w")
        for adapter in rig.adapters:
            adapter.refuse_submit = False
        await rig.at_rest()
        for key, life in self.lives.items():
            for index, stores in life.owed.items():
                assert rig.adapters[index].stores_of.get(key, 0) > stores, "an adapter never got an object"
            skipped = rig.config.skip_l1 and not life.owed and len(life.stored) == 2
            assert not skipped or not rig.l1.contains(key), "stored everywhere, and not skipped"
        await self.serves_again()

    async def serves_again(self) -> None:
        rig = self.rig
        for prompt in ("p", "q"):
            job = rig.start(CHUNKS, prompt=prompt)
            there = {key for adapter in rig.adapters for key in adapter.records} | set(rig.l1.resident_keys())
            cells = {(key.object_group_id, key.kv_rank, key.chunk_hash) for key in there}
            tokens = usable_prefix(
                rig.layout, rig.hashes(CHUNKS, prompt), CHUNKS * rigs.CHUNK + 1, cells.__contains__, 0
            )
            await job.wait()
            if self.roomy:
                assert rig.best(job) * rigs.CHUNK == tokens, "what is there is not found"
            assert rig.best(job) * rigs.CHUNK <= tokens
            rig.read(job, rig.best(job), prompt=prompt)
            await rig.at_rest()


TestStorage = StorageMachine.TestCase
TestStorage.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2, stateful_step_count=40, deadline=None
)


# --- planted bugs


def test_a_failed_load_that_is_published_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R20, R16: the clean-up of a failed cell makes it readable."""
    original = LoadTable._complete
    monkeypatch.setattr(LoadTable, "_complete", lambda self, loads, bits: original(self, loads, -1))
    # Rare; and Hypothesis draws constants from whatever modules are loaded, so the search depends on its neighbours.
    assert finds(StorageMachine, 2_000) in ("a reader sees what nobody finished", "foreign bytes")


def test_memory_that_is_freed_at_the_deadline_of_a_store_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: giving up a wait frees what is still being read."""
    original = WritebackController._give_up

    def give_up(self: Any, batch: Any) -> None:
        original(self, batch)
        self._l1.unhold(f"l2:{batch.lane.pump.name}", batch.slots)

    monkeypatch.setattr(WritebackController, "_give_up", give_up)
    assert "nobody holds" in finds(StorageMachine)


def test_locks_of_a_late_lookup_that_are_kept_are_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R24, R37."""
    original = pump._Waiting.deliver

    def deliver(self: Any, result: Any) -> bool:
        if self.answer is None and isinstance(result, int):
            return True
        return original(self, result)

    monkeypatch.setattr(pump._Waiting, "deliver", deliver)
    assert "L2 locks left" in finds(StorageMachine, 2_000)


def test_locks_of_loads_that_are_dropped_and_kept_are_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R24: a load that nobody waits for is given up before it begins, and its source stays locked."""
    original = LoadTable._drop_left

    def drop_left(self: Any) -> None:
        pumps, self._pumps = self._pumps, [SimpleNamespace(unlock=lambda keys: None) for _ in self._pumps]
        original(self)
        self._pumps = pumps

    monkeypatch.setattr(LoadTable, "_drop_left", drop_left)
    assert "L2 locks left" in finds(StorageMachine, 2_000)


def test_a_retry_that_is_forgotten_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R14 b's kind: what was skipped is never stored."""

    def queue_again(self: Any, item: Any, lane: Any) -> None:
        del lane.backing_off[item.key]
        self._ended()

    monkeypatch.setattr(WritebackController, "_queue_again", queue_again)
    assert "never got" in finds(StorageMachine)


def test_a_store_back_to_where_it_came_from_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R65."""
    original = WritebackController.published

    def published(self: Any, key: ObjectKey, slot: Any, temporary: bool) -> None:
        self._origins = {}
        original(self, key, slot, temporary)

    monkeypatch.setattr(WritebackController, "published", published)
    assert "where it came from" in finds(StorageMachine)


def test_a_lookup_without_a_deadline_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R35."""
    monkeypatch.setattr(PrefetchController, "_deadline", lambda self, job: None)
    assert "without an end" in finds(StorageMachine, 2_000)


def test_a_hurried_answer_of_what_has_not_arrived_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still being loaded is promised, too."""
    original = PrefetchController.hurry

    def hurry(self, job):
        coming = union(job.held, job.cells.rows(job.joined)) if job.joined else job.held
        original(self, job)
        job.lengths |= job.demand.fold(coming)

    monkeypatch.setattr(PrefetchController, "hurry", hurry)
    assert finds(StorageMachine, 2_000) in ("a promised cell is not leased", "a promised cell is not resident")


def test_leases_that_an_answer_gives_back_too_early_are_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R08: looked up, and not protected until the load."""
    original = PrefetchController._answer

    def answer(self: Any, job: Any) -> None:
        original(self, job)
        self._l1.release_owner(job.owner)

    monkeypatch.setattr(PrefetchController, "_answer", answer)
    assert finds(StorageMachine) in ("a promised cell is not leased", "a cell of the answer is not readable")

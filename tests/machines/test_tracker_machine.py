"""`SchedulerConnector` with its trackers against a small engine that preempts, resumes, aborts and loses loads at will.

The engine knows for sure how many tokens of a request hold valid KV if every load that was not yet reported turns out
bad; nothing beyond may be stored. The client is a model of the servers' books: each generation's leases are given back
exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.connectors.admission import LoadAll
from kvcore.connectors.plan import LoadPlan, StepMeta, StorePlan
from kvcore.connectors.scheduler import SchedulerConnector, SchedulerConnectorConfig
from kvcore.connectors.tracker import Phase, RequestTracker
from kvcore.connectors.views import Finished, RequestView, ScheduledRequest, StepView
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.lookup import LookupOutcome

CHUNK, BLOCK = 4, 2
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, BLOCK, 8),), 1, CHUNK)
HASHER = ChunkHasher(Namespace("m", chunk_tokens=CHUNK))
NAMES = ("a", "b", "c")


class Books:
    """The servers' books, in place of the client."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}  # session -> generation whose leases are held
        self.lengths: dict[tuple[str, int], int] = {}
        self.chunks: dict[tuple[str, int], int] = {}
        self.skips: dict[tuple[str, int], int] = {}
        self.settled: dict[tuple[str, int], int] = {}
        self.ended: set[str] = set()
        self.hurried: set[tuple[str, int]] = set()

    def start(
        self, session: str, generation: int, hashes: Sequence[bytes], *, prompt_tokens: int, skip_chunks: int, salt: str
    ) -> None:
        assert session not in self.open, "the last generation still holds leases"
        assert session not in self.ended
        assert (session, generation) not in self.chunks, "two lookups of one generation"
        assert len(hashes) == prompt_tokens // CHUNK
        assert skip_chunks <= len(hashes)
        self.open[session] = generation
        self.chunks[session, generation] = len(hashes)
        self.skips[session, generation] = skip_chunks

    def poll(self, session: str, generation: int) -> LookupOutcome | None:
        assert self.open[session] == generation
        lengths = self.lengths.get((session, generation))
        return None if lengths is None else LookupOutcome(lengths)

    def hurry(self, session: str, generation: int) -> None:
        assert self.open[session] == generation
        assert (session, generation) not in self.lengths, "hurried after the answer"
        assert (session, generation) not in self.hurried, "hurried twice"
        self.hurried.add((session, generation))

    def settle(self, session: str, generation: int, length: int) -> None:
        assert self.open[session] == generation
        assert self.lengths[session, generation] >> length & 1
        assert (session, generation) not in self.settled
        self.settled[session, generation] = length

    def release(self, session: str, generation: int) -> None:
        assert self.open.pop(session) == generation, "given back twice"

    def end(self, session: str) -> None:
        assert session not in self.ended, "ended twice"
        self.ended.add(session)
        self.open.pop(session, None)


class Moods(LoadAll):
    """Now and then no lookup is worth beginning, or waiting for."""

    begins = waits_on = True

    def worth_asking(self, tracker: RequestTracker, tokens: int, local_tokens: int) -> bool:
        return self.begins if tracker.phase is Phase.IDLE else self.waits_on


@dataclass
class Job:
    """A request in the model engine. `sure`: tokens that are valid even if every unreported load is bad."""

    name: str
    tokens: list[int]
    state: str = "waiting"  # waiting, loading (asynchronous), running
    computed: int = 0
    sure: int = 0
    local: int = 0
    blocks: list[int] = field(default_factory=list)
    load: LoadPlan | None = None
    ran: bool = False  # in this attempt
    cached: range = range(0)  # chunks that a load brought well: in the cache already

    def view(self) -> RequestView:
        return RequestView(self.name, tuple(self.tokens), len(self.tokens))


class TrackerMachine(RuleBasedStateMachine):
    @initialize(load_async=st.booleans())
    def begin(self, load_async: bool) -> None:
        self.load_async = load_async
        self.books = Books()
        config = SchedulerConnectorConfig(load_async=load_async)
        self.moods = Moods()
        self.connector = SchedulerConnector(LAYOUT, HASHER, self.books, config, self.moods)  # type: ignore[arg-type]
        self.jobs: dict[str, Job] = {}
        self.next_block = 1
        self.late: dict[str, LoadPlan] = {}  # asynchronous loads of aborted requests, not reported yet
        self.due_sent: set[tuple[str, int]] = set()
        self.stored: dict[int, list[int]] = {}  # generation -> chunks that were given out
        self.owed: list[tuple[int, list[int]]] = []  # generation, what it must have given out by the next step
        self.loaded: set[int] = set()
        self.bad: set[int] = set()  # blocks that were ever reported; none is used twice
        self.dead: dict[int, Job] = {}  # by generation: ended since the last step was built
        self.steps = 0

    def of(self, *states: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in states]

    # --- arrival, questions, answers

    @rule(name=st.sampled_from(NAMES), tokens=st.sampled_from((13, 16, 18, 9, 8, 3, 1)))
    def arrive(self, name: str, tokens: int) -> None:
        if name not in self.jobs:  # while a load of an older life may still run
            self.jobs[name] = Job(name, [100 * NAMES.index(name) + i for i in range(tokens)])

    def trackable(self, job: Job) -> tuple[str, int] | None:
        tracker = self.connector.tracker(job.name)
        return None if tracker is None else (tracker.session, tracker.generation)

    @precondition(lambda self: self.of("waiting"))
    @rule(data=st.data())
    def servers_answer(self, data: st.DataObject) -> None:
        pending = [key for key in self.books.chunks if key not in self.books.lengths]
        current = [key for key in pending if self.books.open.get(key[0]) == key[1]]
        if current:
            self.answer(data, data.draw(st.sampled_from(current)))

    def answer(self, data: st.DataObject, key: tuple[str, int] | None) -> None:
        assert key is not None
        chunks = self.books.chunks[key]
        best = data.draw(st.sampled_from((max(0, chunks - 1), chunks, 0)), label="best length")
        self.books.lengths[key] = 1 << best | 1

    def ask(self, data: st.DataObject, job: Job, local: int) -> int | None:
        answer, load_async = self.connector.matched_tokens(job.view(), local)
        if answer is None and self.trackable(job) in self.books.hurried:
            key = self.trackable(job)
            if data.draw(st.booleans(), label="the servers are as quick"):
                self.answer(data, key)
            answer, load_async = self.connector.matched_tokens(job.view(), local)
            assert answer is not None, "a second wait for a lookup that was hurried"
            assert answer == 0 or key in self.books.lengths
        assert self.connector.matched_tokens(job.view(), local) == (answer, load_async), "a second question differs"
        if answer is None:
            return None
        assert 0 <= answer <= max(0, len(job.tokens) - 1 - local)
        assert load_async is (self.load_async and answer > 0)
        if answer:
            key = self.trackable(job)
            assert key is not None
            length = self.books.lengths[key].bit_length() - 1
            assert answer == min(length * CHUNK, len(job.tokens) - 1) - local
        return answer

    def draw_local(self, data: st.DataObject, job: Job) -> int:
        return data.draw(st.integers(0, (len(job.tokens) - 1) // BLOCK), label="local blocks") * BLOCK

    @precondition(lambda self: self.of("waiting"))
    @rule(data=st.data())
    def allocation_fails(self, data: st.DataObject) -> None:
        self.question(data, admit=False)

    @precondition(lambda self: self.of("waiting"))
    @rule(data=st.data())
    def admission(self, data: st.DataObject) -> None:
        self.question(data, admit=True)

    @precondition(lambda self: self.of("waiting"))
    @rule(data=st.data())
    def late_admission(self, data: st.DataObject) -> None:
        self.question(data, admit=True)

    def question(self, data: st.DataObject, admit: bool) -> None:
        job = data.draw(st.sampled_from(self.of("waiting")))
        local = self.draw_local(data, job) if data.draw(st.booleans(), label="local") else 0
        self.moods.begins = data.draw(st.integers(0, 9), label="begins") < 9
        self.moods.waits_on = data.draw(st.integers(0, 3), label="waits on") < 3
        external = self.ask(data, job, local)
        if external is None and data.draw(st.integers(0, 3), label="the answer has come by the next step"):
            self.answer(data, self.trackable(job))
            external = self.ask(data, job, local)
        if external is None or not admit:
            return
        take = external if external == 0 or data.draw(st.integers(0, 5)) else 0  # now and then it is not taken
        count = -(-(len(job.tokens) + 12) // BLOCK)
        job.blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        job.local = job.sure = local
        job.computed = local + take
        self.connector.after_alloc(job.view(), (list(job.blocks),), take)
        job.state = "loading" if take and self.load_async else "running"
        job.load = None
        if not (take and self.load_async):
            self.run_step(data, [job], expected={job.name: (local, take)} if take else {})
        else:
            self.run_step(data, [], expected={job.name: (local, take)})

    @precondition(lambda self: self.of("loading"))
    @rule(data=st.data())
    def question_while_loading(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.of("loading")))
        assert self.connector.matched_tokens(job.view(), self.draw_local(data, job)) == (None, False)

    # --- steps

    @precondition(lambda self: self.of("running", "loading") or self.late or self.due_sent)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.run_step(data, [], {})

    def run_step(self, data: st.DataObject, must: list[Job], expected: dict[str, tuple[int, int]]) -> None:
        entries = []
        for job in self.of("running"):
            left = len(job.tokens) - job.computed
            count = data.draw(st.sampled_from((left, 1, 1 + left // 2) + (() if job in must else (0,)))) if left else 0
            if count:
                entries.append((job, count, data.draw(st.integers(0, 3), label="drafts") if count == left else 0))
        scheduled = tuple(
            ScheduledRequest(job.name, job.computed, count + drafts, (list(job.blocks),), (), False, tuple(job.tokens))
            for job, count, drafts in entries
        )
        self.steps += 1
        meta = self.connector.build_meta(StepView(self.steps, scheduled, frozenset(), (), ()))
        self.check_loads(meta, expected)
        for job, count, _ in entries:
            job.computed += count
            job.ran = True
            if job.name not in expected:
                job.sure = job.computed
        for plan in meta.stores:
            self.check_store(plan)
        for generation, chunks in self.owed:
            assert self.stored.get(generation, []) == chunks, "a computed chunk was forgotten"
        self.owed = []
        assert {(ended.request_id, ended.generation) for ended in meta.ended} == self.due_sent
        self.due_sent = set()
        self.report(data, [job for job, _, _ in entries])

    def check_loads(self, meta: StepMeta, expected: dict[str, tuple[int, int]]) -> None:
        plans = {plan.request_id: plan for plan in meta.loads if plan.request_id in self.jobs}
        assert plans.keys() == expected.keys()
        for name, (local, external) in expected.items():
            plan, job = plans[name], self.jobs[name]
            assert plan.generation not in self.loaded, "two loads of one generation"
            self.loaded.add(plan.generation)
            assert (plan.session, plan.generation) == self.trackable(job)
            loaded = [block for cell in plan.cells for block in cell.blocks if block]
            end = -(-(local + external) // CHUNK) * CHUNK // BLOCK
            assert loaded == job.blocks[local // BLOCK : end], "not the blocks of the promised tokens"
            hashes = HASHER.hash_tokens(job.tokens)
            assert all(cell.chunk_hash == hashes[cell.chunk] for cell in plan.cells)
            job.load = plan

    def check_store(self, plan: StorePlan) -> None:
        job = self.dead.get(plan.generation) or self.jobs[plan.request_id]
        hashes = HASHER.hash_tokens(job.tokens)
        for cell in plan.cells:
            given = self.stored.setdefault(plan.generation, [])
            assert not given or cell.chunk > given[-1], "stored twice, or backwards"
            given.append(cell.chunk)
            assert (cell.chunk + 1) * CHUNK <= job.sure, "stored what may rest on garbage"
            assert cell.chunk_hash == hashes[cell.chunk]
            first = cell.chunk * CHUNK // BLOCK
            assert list(cell.blocks) == job.blocks[first : first + CHUNK // BLOCK]

    def report(self, data: st.DataObject, ran: list[Job]) -> None:
        """The output of the step: synchronous loads have ended, asynchronous ones perhaps."""
        self.dead = {}
        errors: set[int] = set()
        received: list[str] = []
        over: list[Job] = []
        for job in list(self.jobs.values()):
            if job.load is None:
                continue
            if self.load_async and not data.draw(st.booleans(), label=f"{job.name} received"):
                if data.draw(st.integers(0, 3)) == 0:
                    self.draw_errors(data, job, errors)  # one rank's errors come before the other rank has ended
                continue
            self.draw_errors(data, job, errors)
            over.append(job)
            received += [job.name] if self.load_async else []
        for name in [name for name in self.late if data.draw(st.booleans(), label=f"{name} late")]:
            if name not in received:
                del self.late[name]
                received.append(name)
        self.connector.update_output(Finished(received=frozenset(received)), frozenset(errors))
        for job in self.of("loading"):
            tracker = self.connector.tracker(job.name)
            assert tracker is not None
            assert (tracker.phase is Phase.LOADING) is (job not in over), "the end of another load"
        for job in over:
            self.end_load(job)
        for job in ran:
            self.sample(data, job)
        for job in over:
            if self.jobs.get(job.name) is job and data.draw(st.integers(0, 2), label="aborted at once") == 0:
                self.end(job)

    def draw_errors(self, data: st.DataObject, job: Job, errors: set[int]) -> None:
        assert job.load is not None
        for cell in job.load.cells:
            if data.draw(st.integers(0, 5), label="cell fails") == 0:
                errors.update(block for block in cell.blocks if block)
        self.bad |= errors

    def end_load(self, job: Job) -> None:
        """As the engine does it: back to the first bad block, or to the queue if nothing is left."""
        bad = [index for index, block in enumerate(job.blocks) if block in self.bad]
        assert job.load is not None
        assert job.load.session not in self.books.open, "leases outlive their load"
        key = (job.load.session, job.load.generation)
        first, end = self.books.skips[key], self.books.settled[key]
        job.cached = range(first, min([end, *(index * BLOCK // CHUNK for index in bad)]))
        job.load = None
        if bad:
            job.computed = min(job.computed, bad[0] * BLOCK)
        job.sure = job.computed
        if job.computed == 0:
            self.back_to_queue(job)
        else:
            job.state = "running"

    def sample(self, data: st.DataObject, job: Job) -> None:
        if job.state == "running" and job.computed == len(job.tokens) and len(job.tokens) < 24:
            if data.draw(st.booleans(), label=f"{job.name} goes on"):
                job.tokens.append(50 + len(job.tokens))
            else:
                self.end(job)

    # --- ends

    def back_to_queue(self, job: Job) -> None:
        job.state, job.computed, job.sure, job.local = "waiting", 0, 0, 0
        job.cached, job.ran = range(0), False
        self.connector.preempted(job.name)

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.back_to_queue(data.draw(st.sampled_from(self.of("running"))))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        if job.state != "waiting" or data.draw(st.integers(0, 3)) == 0:
            self.end(job)

    def end(self, job: Job) -> None:
        key = self.trackable(job)
        held = self.connector.finished(
            RequestView(job.name, tuple(job.tokens), len(job.tokens)),
            (list(job.blocks),) if job.state != "waiting" else ([],),
        )
        del self.jobs[job.name]
        if key is not None:
            self.dead[key[1]] = job
        if held:
            assert key is not None
            self.due_sent.add((job.name, key[1]))
        if job.state == "running" and key is not None and job.ran:
            due = [chunk for chunk in range(job.sure // CHUNK) if chunk not in job.cached]
            self.owed.append((key[1], due))
        if job.load is not None:
            self.late[job.name] = job.load

    @invariant()
    def every_request_has_at_most_one_open_generation(self) -> None:
        if not hasattr(self, "books"):
            return
        current = {self.trackable(job) for job in self.jobs.values()}
        assert set(self.books.open.items()) <= current, "leases of a generation that is over"

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        for job in list(self.jobs.values()):
            self.end(job)
        assert not self.books.open
        state = self.connector.statistics()
        assert (state.requests_open, state.loads_open) == (0, 0)


TestTracker = TrackerMachine.TestCase
TestTracker.settings = settings(
    max_examples=settings.default.max_examples * 6 // 5, stateful_step_count=50, deadline=None
)


# --- planted bugs


def test_a_store_of_the_slot_of_the_last_sampled_token_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: the request's length is taken for what was computed."""
    original = SchedulerConnector.finished

    def finished(self, request, blocks):
        tracker = self.tracker(request.request_id)
        if tracker is not None and tracker.phase is Phase.RUNNING:
            tracker.tokens, tracker.computed_tokens = request.tokens, len(request.tokens)
        return original(self, request, blocks)

    monkeypatch.setattr(SchedulerConnector, "finished", finished)
    assert "garbage" in finds(TrackerMachine)


def test_a_store_position_that_survives_a_preemption_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R01, R09 b: after the resume the store goes on where the old attempt had been."""
    original = RequestTracker.next_generation

    def next_generation(self, generation: int) -> None:
        stored = self.stored_chunks
        original(self, generation)
        self.stored_chunks = stored

    monkeypatch.setattr(RequestTracker, "next_generation", next_generation)
    assert finds(TrackerMachine)


def test_a_failed_load_that_is_believed_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R16: computation goes on over the hole, and what it gives is stored."""
    monkeypatch.setattr(RequestTracker, "note_errors", lambda self, blocks: None)
    assert finds(TrackerMachine) in ("stored what may rest on garbage", "a computed chunk was forgotten")


def test_leases_of_an_aborted_request_that_are_kept_are_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R24: the session of a request that was never admitted is not ended."""
    original = SchedulerConnector.finished

    def finished(self, request, blocks):
        tracker = self.tracker(request.request_id)
        if tracker is not None and tracker.phase is Phase.LOOKING:
            del self._trackers[request.request_id]
            return False
        return original(self, request, blocks)

    monkeypatch.setattr(SchedulerConnector, "finished", finished)
    assert finds(TrackerMachine)


def test_a_lookup_that_is_hurried_again_and_again_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is told to come again as long as a server is silent."""
    original = SchedulerConnector._hurry

    def hurry(self, tracker):
        outcome = original(self, tracker)
        tracker.hurried = False
        return outcome

    monkeypatch.setattr(SchedulerConnector, "_hurry", hurry)
    assert finds(TrackerMachine) in ("hurried twice", "a second wait for a lookup that was hurried")


def test_a_promise_of_the_whole_prompt_is_found(finds, monkeypatch: pytest.MonkeyPatch) -> None:
    """R07."""
    original = RequestTracker.promise
    monkeypatch.setattr(
        RequestTracker, "promise", lambda self, local: original(self, local) and len(self.tokens) - local
    )
    assert finds(TrackerMachine)

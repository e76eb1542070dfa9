"""Processes that are stopped, killed at a step and killed again: what runs, what waits, and what the faults report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from kvcore.errors import CallerError
from kvcore.ladder.swarm.case import Case, CaseRequest, EpisodeConfig
from kvcore.ladder.swarm.episode import Episode, run_case
from kvcore.ladder.swarm.outcome import Outcome
from kvcore.sim.faults.kind import FaultEvent, Shape
from kvcore.sim.faults.process import KINDS
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.ports.deaths import SimDeaths
from kvcore.sim.ports.network import SimNetwork
from kvcore.sim.process import SimProcess
from kvcore.sim.streams import RandomStream
from kvcore.sim.trace import Trace

MS = 1_000_000


@pytest.fixture(params=range(3))
def loop(request: pytest.FixtureRequest) -> Iterator[SimLoop]:
    with SimLoop(request.param) as made:
        yield made


def run_for(loop: SimLoop, duration_ns: int) -> None:
    loop.call_later_ns(duration_ns, loop.stop)
    loop.run_forever()


async def tick(loop: SimLoop, seen: list[int], times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0.001)
        seen.append(loop.now_ns() // MS)


# ---- pause


def test_a_stopped_process_runs_nothing_and_goes_on_late_where_it_was(loop: SimLoop) -> None:
    process = loop.process("p")
    seen: list[int] = []
    stopped: list[int] = []
    process.spawn(tick(loop, seen, 4), "tick")
    loop.call_at_ns(2 * MS + 1, process.pause, lambda: stopped.append(loop.now_ns()))
    loop.call_at_ns(9 * MS, process.resume)
    run_for(loop, 20 * MS)
    assert seen == [1, 2, 9, 10]
    assert stopped == [3 * MS], "said once, when something first had to wait"


def test_what_waits_for_a_stopped_process_keeps_its_order(loop: SimLoop) -> None:
    process = loop.process("p")
    seen: list[int] = []
    channel = loop.channel("letters")
    for number in range(6):
        channel.post(seen.append, number, delay_ns=number * MS, context=process.context())
    process.pause()
    loop.call_at_ns(4 * MS, process.resume)
    run_for(loop, 10 * MS)
    assert seen == list(range(6))


def test_messages_to_a_stopped_process_queue_and_others_are_served(loop: SimLoop) -> None:
    network = SimNetwork(loop)
    server, client = loop.process("server"), loop.process("client")
    arrived: list[bytes] = []
    echoed: list[bytes] = []

    def serve() -> None:
        transport = network.listen("server")

        def answer(peer: bytes, payload: bytes) -> None:
            arrived.append(payload)
            transport.send(peer, payload)

        transport.receive(answer)

    server.run(serve)
    link = client.run(lambda: network.connect("server", "client"))
    client.run(lambda: link.receive(echoed.append))
    server.pause()
    for number in range(5):
        client.run(lambda number=number: link.send(bytes([number])))  # type: ignore[misc]
    run_for(loop, 5 * MS)
    assert (arrived, echoed) == ([], [])
    server.resume()
    run_for(loop, 5 * MS)
    assert arrived == echoed == [bytes([number]) for number in range(5)]


def test_a_device_finishes_its_work_while_the_process_that_asked_for_it_is_stopped(loop: SimLoop) -> None:
    process = loop.process("worker")
    done: list[str] = []
    noticed: list[int] = []

    def submit() -> None:
        device = SimCopyEngine(loop, "device")
        event = device.run_compute(lambda: done.append("kernel"), MS)
        event.on_done(lambda: noticed.append(loop.now_ns()))  # type: ignore[attr-defined]

    process.run(submit)
    process.pause()
    loop.call_at_ns(7 * MS, process.resume)
    run_for(loop, 3 * MS)
    assert done == ["kernel"]
    assert noticed == []
    run_for(loop, 10 * MS)
    assert noticed == [7 * MS]


def test_a_stopped_process_that_is_killed_runs_nothing_more_and_its_next_life_is_not_stopped(loop: SimLoop) -> None:
    process = loop.process("p")
    old: list[int] = []
    new: list[int] = []
    process.spawn(tick(loop, old, 3), "old")
    process.pause()
    run_for(loop, 5 * MS)
    process.crash()
    process.restart()
    assert not process.stopped
    process.spawn(tick(loop, new, 1), "new")
    process.resume()  # of the former life's pause: nothing to do
    run_for(loop, 5 * MS)
    assert (old, len(new)) == ([], 1)


def test_a_process_is_stopped_once_at_a_time_and_only_while_it_lives(loop: SimLoop) -> None:
    process = loop.process("p")
    process.pause()
    with pytest.raises(CallerError, match="stopped already"):
        process.pause()
    process.crash()
    with pytest.raises(CallerError, match="down"):
        process.pause()


# ---- at a step


def steps_before_a_crash(nth: int, seed: int = 0) -> int:
    with SimLoop(seed) as loop:
        process = loop.process("p")
        steps: list[int] = []

        async def work() -> None:
            for number in range(10):
                steps.append(number)
                await asyncio.sleep(0)

        process.spawn(work(), "work")
        process.at_step(nth, process.crash)
        run_for(loop, MS)
        return len(steps)


def test_a_crash_at_each_step_comes_right_before_that_step() -> None:
    assert [steps_before_a_crash(nth) for nth in range(1, 12)] == [*range(10), 10]


def test_steps_are_counted_over_lives_and_can_be_disarmed(loop: SimLoop) -> None:
    process = loop.process("p")
    hits: list[int] = []
    seen: list[int] = []
    process.at_step(5, lambda: hits.append(process.incarnation))
    disarm = process.at_step(6, lambda: hits.append(-1))
    process.spawn(tick(loop, seen, 1), "first")
    run_for(loop, 2 * MS)
    process.crash()
    process.restart()
    disarm()
    process.spawn(tick(loop, seen, 8), "second")
    run_for(loop, 20 * MS)
    assert hits == [1]
    with pytest.raises(CallerError, match="from 1"):
        process.at_step(0, process.crash)


# ---- the kinds, in whole episodes


def case_of(*events: FaultEvent, servers: int = 1, ranks: int = 1, dead: tuple[str, ...] = (), seed: int = 5) -> Case:
    config = EpisodeConfig(servers=servers, ranks=ranks, l2=("file",), load_async=True, fault_ns=60 * MS)
    requests = tuple(CaseRequest(f"r{i}", (1, 2, 10 + i), 3, 4, i * MS) for i in range(5))
    second = tuple(CaseRequest(f"s{i}", (100, 101, 110 + i), 3, 2) for i in range(3))
    return Case(seed, config, requests, second, tuple(events), dead=dead)


def lived(case: Case, loads_min: int = 1) -> tuple[Outcome, Episode]:
    episodes: list[Episode] = []
    outcome = run_case(case, watch=episodes.append)
    assert outcome.verdict == "pass", outcome.findings
    assert outcome.loads_verified >= loads_min
    return outcome, episodes[0]


@pytest.mark.parametrize("at_ms", [1, 3, 6])
@pytest.mark.parametrize(
    ("event", "layout"),
    [
        (FaultEvent("process.server_restart", target="server0", until_ns=2 * MS), {}),
        (FaultEvent("process.server_restart", target="server1", until_ns=3 * MS), {"servers": 2, "ranks": 2}),
        (FaultEvent("process.power_loss", target="server0", until_ns=2 * MS), {}),
        (FaultEvent("process.scheduler_kill", target="scheduler"), {}),
        (FaultEvent("process.worker_kill", target="worker0"), {}),
        (FaultEvent("process.worker_kill", target="worker1"), {"servers": 2, "ranks": 2}),
        (FaultEvent("process.engine_kill", target="engine"), {"servers": 0}),
        (FaultEvent("process.kill_in_recovery", target="server0", nth=5, amount=MS), {}),
        (FaultEvent("process.kill_in_recovery", target="scheduler", nth=5), {}),
        (FaultEvent("process.kill_in_recovery", target="worker1", nth=2), {"servers": 2, "ranks": 2}),
        (FaultEvent("process.pause", target="server0", until_ns=5 * MS), {}),
        (FaultEvent("process.pause", target="worker0", until_ns=30 * MS), {}),
        (FaultEvent("process.pause", target="scheduler", until_ns=30 * MS), {}),
        (FaultEvent("process.crash_at_step", target="server0", nth=20, amount=MS), {}),
        (FaultEvent("process.crash_at_step", target="worker0", nth=20), {}),
        (FaultEvent("process.crash_at_step", target="engine", nth=90), {"servers": 0}),
    ],
    ids=lambda value: f"{value.kind}-{value.target}" if isinstance(value, FaultEvent) else "",
)
def test_each_fault_fires_changes_the_run_and_no_answer(event: FaultEvent, layout: dict[str, int], at_ms: int) -> None:
    at_ns = at_ms * MS
    event = FaultEvent(
        event.kind, at_ns, event.until_ns and at_ns + event.until_ns, event.target, event.nth, event.amount
    )
    outcome, _ = lived(case_of(event, **layout))
    quiet, _ = lived(case_of(**layout))
    assert outcome.fired == {event.kind: 1}
    assert outcome.trace_hash != quiet.trace_hash
    assert outcome.tokens_compared == quiet.tokens_compared


def test_the_same_step_is_the_same_place_in_every_run() -> None:
    event = FaultEvent("process.crash_at_step", 2 * MS, target="scheduler", nth=33)
    hashes = {lived(case_of(event))[0].trace_hash for _ in range(2)}
    others = {lived(case_of(FaultEvent(event.kind, 2 * MS, 0, "scheduler", nth)))[0].trace_hash for nth in (32, 34)}
    assert len(hashes) == 1
    assert len(hashes | others) == 3


def test_a_server_that_stays_dead_is_missed_and_the_other_one_goes_on() -> None:
    event = FaultEvent("process.server_restart", 2 * MS, 0, "server1")
    outcome, episode = lived(case_of(event, servers=2, dead=("server1",)), 0)  # what a dead server has, nobody knows
    assert not episode.world.process("server1").alive
    assert outcome.tokens_compared > 0


def test_a_process_that_is_stopped_for_ever_is_killed_by_the_engines_host() -> None:
    event = FaultEvent("process.pause", 2 * MS, 0, "scheduler")
    _, episode = lived(case_of(event, dead=("scheduler",)))
    assert episode.host.lives == 1


def test_a_kill_of_what_is_down_already_does_not_fire() -> None:
    events = [
        FaultEvent("process.server_restart", 2 * MS, 6 * MS, "server0"),
        FaultEvent("process.power_loss", 4 * MS, 5 * MS, "server0"),
    ]
    outcome, _ = lived(case_of(*events))
    assert outcome.fired == {"process.server_restart": 1}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_events_are_drawn_only_for_parts_that_exist(kind: object) -> None:
    networked = Shape(servers=2, ranks=2, l2=("file",), request_ids=("r0",))
    in_process = Shape(servers=1, in_process=True, l2=("memory",), request_ids=("r0",))
    drawn = 0
    for seed in range(50):
        for shape in (networked, in_process):
            draw: Callable[[RandomStream, Shape], list[FaultEvent]] = kind.draw  # type: ignore[attr-defined]
            events = draw(RandomStream(seed, "test"), shape)
            assert all(event.target in shape.processes for event in events)
            assert all(event.until_ns == 0 or event.until_ns > event.at_ns for event in events)
            drawn += len(events)
    assert drawn >= 50


def test_a_stop_of_one_process_is_in_the_trace_and_stops_no_other(loop: SimLoop) -> None:
    loop.trace = Trace()
    loop.trace.now_ns = loop.now_ns
    first, second = loop.process("first"), loop.process("second")
    seen: dict[str, list[int]] = {"first": [], "second": []}
    for process in (first, second):
        process.spawn(tick(loop, seen[process.name], 3), "tick")
    first.pause()
    run_for(loop, 5 * MS)
    assert [len(seen["first"]), len(seen["second"])] == [0, 3]
    assert isinstance(first, SimProcess)


# ---- proofs of death


def watched(loop: SimLoop, name: str = "worker#0") -> tuple[SimDeaths, list[int]]:
    """A watcher in a process of its own, and when it was told."""
    told: list[int] = []
    processes = {"worker": loop.process("worker"), "server": loop.process("server")}
    deaths = processes["server"].run(lambda: SimDeaths(loop, processes, proof_ns=(MS, 2 * MS)))
    assert deaths.watch("key", name, lambda: told.append(loop.now_ns()))
    return deaths, told


def test_a_death_is_proven_after_it_and_once(loop: SimLoop) -> None:
    _, told = watched(loop)
    run_for(loop, 10 * MS)
    assert told == []
    worker = loop._processes["worker"]
    worker.crash()
    worker.restart()
    worker.crash()
    run_for(loop, 10 * MS)
    assert len(told) == 1
    assert 11 * MS <= told[0] <= 12 * MS


def test_a_life_that_is_over_when_the_watch_begins_is_proven_dead_too(loop: SimLoop) -> None:
    deaths, told = watched(loop)
    loop._processes["worker"].crash()
    loop._processes["worker"].restart()
    late: list[int] = []
    assert deaths.watch("late", "worker#0", lambda: late.append(loop.now_ns()))
    assert not deaths.watch("nobody", "stranger#0", lambda: late.append(-1))
    run_for(loop, 10 * MS)
    assert (len(told), len(late)) == (1, 1)


def test_a_watch_that_is_forgotten_or_replaced_says_nothing(loop: SimLoop) -> None:
    deaths, told = watched(loop)
    again: list[int] = []
    deaths.watch("key", "worker#0", lambda: again.append(1))
    loop._processes["worker"].crash()
    run_for(loop, 10 * MS)
    assert (told, again) == ([], [1])
    deaths.watch("key", "worker#0", lambda: again.append(2))
    deaths.forget("key")
    run_for(loop, 10 * MS)
    assert again == [1]


def test_a_stopped_watcher_hears_of_a_death_when_it_runs_on(loop: SimLoop) -> None:
    _, told = watched(loop)
    loop._processes["server"].pause()
    loop._processes["worker"].crash()
    loop.call_at_ns(9 * MS, loop._processes["server"].resume)
    run_for(loop, 20 * MS)
    assert told == [9 * MS]

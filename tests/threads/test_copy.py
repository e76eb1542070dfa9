"""`ThreadCopyEngine`: cancel and begin exclude each other, events order streams, close delivers nothing more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcore.ports import Copy
from kvcore.runtime import copy, streams
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.runtime.streams import CopyCancelled


class Desk:
    """A copy engine on a loop. What its moves touch is seen by the scheduler."""

    def __init__(self, threads: SimpleNamespace) -> None:
        self.loop = threads.Loop()
        self.engine = ThreadCopyEngine(self.loop)
        self.moved: list[str] = []
        self.told: list[str] = []
        self.cancelled: list[bool] = []
        self.told_closed = 0
        self.closed = False

    def submit(self, label: str, stream: str, *after: Any) -> Any:
        ticket = self.engine.submit([_copy(label)], stream=stream, after=after)
        ticket.on_done(lambda: self.tell(label))
        return ticket

    def tell(self, label: str) -> None:
        self.told.append(label)
        self.told_closed += self.closed

    def wait(self, count: int) -> None:
        self.loop.turn_until(lambda: len(self.told) == count)

    def close(self) -> None:
        (_, deliver) = self.loop.reader
        self.engine.close()
        self.closed = True
        deliver()


def _copy(label: str) -> Copy:
    return Copy(np.ones(1, np.uint8), np.zeros(1, np.uint8), label)


DESK: list[Desk] = []


@pytest.fixture(autouse=True)
def _visible_moves(threads: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy writes its label into the desk's book in place of bytes."""

    class Move:
        def __init__(self, copy: Copy) -> None:
            self.label = copy.label

        def __call__(self) -> None:
            threads.step("move bytes")
            DESK[-1].moved.append(self.label)

    monkeypatch.setattr(copy, "Move", Move)


def cancelling(threads: SimpleNamespace) -> Any:
    """One batch is submitted; the loop cancels it at any moment."""

    def scenario(run: Any) -> Any:
        DESK[:] = [desk := Desk(threads)]

        def loop() -> None:
            ticket = desk.submit("batch", "store")
            cancelled = ticket.cancel()
            desk.wait(1)
            desk.cancelled.append(cancelled)
            assert ticket.done
            assert isinstance(ticket.error, CopyCancelled) == cancelled
            assert ticket.cancel() is False
            desk.close()

        run.spawn(loop, "loop")
        return lambda: desk.moved == ([] if desk.cancelled[0] else ["batch"]) and desk.told == ["batch"]

    return scenario


def test_a_batch_is_either_cancelled_or_moved_and_told_once(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(cancelling(threads)) > 20


def test_both_ends_of_that_race_happen(threads: SimpleNamespace, explore: Any) -> None:
    ends: set[bool] = set()

    def scenario(run: Any) -> Any:
        check = cancelling(threads)(run)
        desk = DESK[-1]

        def end() -> Any:
            ends.add(desk.cancelled[0])
            return check()

        return end

    assert explore(scenario).failure == ""
    assert ends == {True, False}


def test_cancel_without_the_lock_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams.threading, "Lock", threads.NoLock)
    broken(cancelling(threads))


def test_a_batch_that_begins_without_looking_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(job: Any) -> None:
        job._gate.wait()
        if job._done:
            return
        job._begun = True
        job._complete(streams._run_parts(job._parts))

    monkeypatch.setattr(streams.Job, "_pass", careless)
    broken(cancelling(threads))


def depending(threads: SimpleNamespace) -> Any:
    """A load waits for a store on another stream; a second batch waits for both."""

    def scenario(run: Any) -> Any:
        DESK[:] = [desk := Desk(threads)]

        def loop() -> None:
            first = desk.submit("first", "store")
            desk.submit("second", "load", first)
            desk.wait(2)
            desk.close()

        run.spawn(loop, "loop")
        return lambda: desk.moved == ["first", "second"] == desk.told

    return scenario


def test_an_event_orders_two_streams(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(depending(threads), 1) > 20


def gating(threads: SimpleNamespace) -> Any:
    """The loop counts two events at a gate while both come to pass, and a stream waits at it."""

    def scenario(run: Any) -> Any:
        DESK[:] = [desk := Desk(threads)]
        one, two, last = (
            streams.Job(desk.engine, (lambda name=name: desk.moved.append(name),)) for name in ("one", "two", "last")
        )
        one._shut_gate(())
        two._shut_gate(())

        def loop() -> None:
            last._shut_gate((one, two))
            last._pass()

        for body in (one._pass, two._pass, loop):
            run.spawn(body)
        return lambda: len(desk.moved) == 3 and desk.moved[-1] == "last"

    return scenario


def test_a_gate_opens_when_the_last_of_its_events_is_done(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(gating(threads)) > 50


def test_a_gate_that_is_counted_without_the_lock_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two events come at once and one of them is not counted: the gate stays shut for ever."""
    monkeypatch.setattr(streams.threading, "Lock", threads.NoLock)
    assert "deadlock" in broken(gating(threads))


def test_a_gate_without_the_extra_one_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens when the first of two events is done while the second is not yet counted."""

    def count_as_it_goes(job: Any, events: Any) -> None:
        for event in events:
            with job._lock:
                job._gates_shut += 1
            event._when_done(job._one_event_done)
        if not events:
            job._gate.set()

    monkeypatch.setattr(streams.Job, "_shut_gate", count_as_it_goes)
    broken(gating(threads))


def closing(threads: SimpleNamespace) -> Any:
    def scenario(run: Any) -> Any:
        DESK[:] = [desk := Desk(threads)]
        tickets: list[Any] = []

        def loop() -> None:
            tickets.append(desk.submit("one", "store"))
            tickets.append(desk.submit("two", "store"))
            desk.close()

        def check() -> bool:
            moved = [label for label, ticket in zip(("one", "two"), tickets, strict=True) if ticket.error is None]
            return all(ticket.done for ticket in tickets) and desk.moved == moved and desk.told_closed == 0

        run.spawn(loop, "loop")
        return check

    return scenario


def test_close_ends_what_has_not_begun_and_tells_nobody(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(closing(threads)) > 20


def test_telling_after_close_is_found(threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def drain(engine: Any) -> None:
        for _ in range(engine._posts.qsize()):
            engine._posts.get_nowait()()

    monkeypatch.setattr(ThreadCopyEngine, "_drain", drain)
    monkeypatch.setattr(streams.EventfdNotice, "_deliver", lambda notice: notice._callback and notice._callback())

    def forget(notice: Any) -> None:
        notice._closed = True

    monkeypatch.setattr(streams.EventfdNotice, "close", forget)
    assert "check" in broken(closing(threads))

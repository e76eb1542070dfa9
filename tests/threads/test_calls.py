"""`CallGate`: a native client is closed once, when the last call has left it, and none begins afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import StoreError
from kvcore.runtime import calls
from kvcore.runtime.calls import CallGate, RequestThreads, in_background


def closing(threads: SimpleNamespace) -> Any:
    def scenario(run: Any) -> Any:
        inside: list[str] = []
        ended: list[str] = []

        def end() -> None:
            assert not inside, "closed while a call runs in it"
            ended.append("ended")

        gate = CallGate("the client", end)

        def call() -> None:
            try:
                with gate.call():
                    inside.append("call")
                    threads.step("the call")
                    assert not ended, "a call runs in a client that is closed"
                    inside.pop()
            except StoreError:
                pass

        run.spawn(call, "one")
        run.spawn(call, "another")
        run.spawn(gate.close, "loop")
        return lambda: len(ended) == 1 and gate.inside == 0

    return scenario


def test_the_client_is_closed_once_and_after_the_last_call(threads: SimpleNamespace, proven: Any) -> None:
    assert proven(closing(threads)) > 50


def test_counting_calls_without_the_lock_is_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls.threading, "Lock", threads.NoLock)
    broken(closing(threads))


def test_a_gate_closed_twice_ends_once() -> None:
    ended: list[int] = []
    gate = CallGate("the client", lambda: ended.append(1))
    gate.close()
    gate.close()
    assert ended == [1]
    with pytest.raises(StoreError, match="the client is closed"), gate.call():
        raise AssertionError("a call began after close")


def test_requests_run_side_by_side_and_answer_in_order() -> None:
    requests = RequestThreads(4, "test")
    assert requests.map(lambda number: number * number, range(20)) == [number * number for number in range(20)]
    requests.close()
    assert requests.map(abs, [-1]) == [1]  # one alone needs no thread
    with pytest.raises(StoreError, match="closed"):
        requests.map(abs, [-1, -2])


def test_background_work_runs() -> None:
    import threading

    ran = threading.Event()
    in_background(ran.set, "test")
    assert ran.wait(60)

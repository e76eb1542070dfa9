"""`UcxBackend`: one transfer at a time, each with the frame to itself; regions are let go when the last one has ended.

The agent and the pool stand in: NIXL's own threads are outside of what a scheduler of Python's can order.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import StoreError
from kvcore.keys import ObjectKey
from kvcore.l2 import envelope, nixl_ucx
from kvcore.l2 import nixl_pool_wire as wire
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.nixl_ucx import Piece, UcxBackend, UcxOptions

TRACED = [str(nixl_ucx.__file__), __file__]
OLD, NEW = (ObjectKey(bytes([number]) * 32, "model", 0) for number in (1, 2))
BYTES = {OLD: b"there already", NEW: b"written here."}
LENGTH = envelope.record_bytes(OLD, len(BYTES[OLD]))


def record(key: ObjectKey) -> bytes:
    return envelope.encode_header(key, memoryview(BYTES[key])) + BYTES[key]


class Mover:
    """An agent and the pool's memory: `OLD` lies in front, `NEW` comes behind it. Nobody uses it beside another."""

    def __init__(self, step: Any) -> None:
        self.memory = bytearray(record(OLD)) + bytearray(LENGTH)
        self.known: list[memoryview] = []
        self._step = step
        self._frame = bytearray(LENGTH)
        self._busy = False

    def registered(self, view: memoryview, regions: Sequence[memoryview]) -> bool:
        self.known += regions[len(self.known) :]
        return False

    def frame(self, length: int) -> memoryview:
        return memoryview(self._frame)[:length]

    def move(self, operation: str, pool: object, pieces: Sequence[Piece]) -> None:
        assert not self._busy, "two transfers at once"
        self._busy = True
        self._step("transfer")
        for here, offset in pieces:
            there = memoryview(self.memory)[offset : offset + len(here)]
            target, source = (here, there) if operation == "READ" else (there, here)
            target[:] = source
        self._busy = False

    def forget_regions(self) -> None:
        assert not self._busy, "memory is let go while bytes move"
        self.known.clear()


class Link:
    """A connection to a pool that gives the places of `Mover`. It is its own socket."""

    pool = None

    def __init__(self) -> None:
        self.sock = self
        self.closed = False

    def ask(self, message: wire.Ask, kind: object) -> wire.Answer:
        assert not self.closed
        if isinstance(message, wire.Reserve | wire.Locate):
            offset = LENGTH if isinstance(message, wire.Reserve) else 0
            return wire.Places([wire.Place(offset, LENGTH, 1)])
        return wire.Done()

    def close(self) -> None:
        self.closed = True


def at_once(threads: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lock: type, closing: bool) -> Any:
    """A writer and a reader; and with `closing` somebody who closes the backend, as a loop does: without waiting."""
    monkeypatch.setattr(nixl_ucx, "threading", SimpleNamespace(Lock=lock))

    def scenario(run: Any) -> Any:
        mover, links, done = Mover(threads.step), [], []

        def connected(_: UcxOptions) -> Link:
            links.append(Link())
            return links[-1]

        monkeypatch.setattr(nixl_ucx, "_Link", connected)
        monkeypatch.setattr(nixl_ucx, "_new_mover", lambda: mover)
        backend = UcxBackend(UcxOptions("unused"))
        backend.register_region(memoryview(bytearray(8)))
        backend.open()
        buffer = bytearray(len(BYTES[OLD]))

        def write() -> None:
            assert backend.write([(NEW, memoryview(BYTES[NEW]))]) == [StoreAnswer.STORED]
            assert mover.memory[LENGTH:] == record(NEW)

        def read() -> None:
            assert backend.read([(OLD, memoryview(buffer))]) == [None]
            assert buffer == BYTES[OLD]

        def user(work: Any) -> None:
            try:
                work()
                done.append(work)
            except StoreError:
                assert backend._closed

        run.spawn(lambda: user(write), "writer")
        run.spawn(lambda: user(read), "reader")
        if closing:
            run.spawn(backend.close, "loop")
            return lambda: mover.known == [] and all(link.closed for link in links)
        return lambda: len(done) == 2 and len(mover.known) == 1

    return scenario


def test_a_transfer_has_the_agent_and_its_frame_to_itself(
    threads: SimpleNamespace, proven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proven(at_once(threads, monkeypatch, threads.TryLock, closing=False), 1, TRACED) > 50


def test_transfers_without_the_lock_are_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = broken(at_once(threads, monkeypatch, threads.NoLock, closing=False), 1, TRACED)
    assert "two transfers at once" in failure


def test_regions_are_let_go_when_the_last_transfer_has_ended(
    threads: SimpleNamespace, proven: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proven(at_once(threads, monkeypatch, threads.TryLock, closing=True), 1, TRACED) > 50


def test_regions_let_go_without_having_the_lock_are_found(
    threads: SimpleNamespace, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Careless(threads.TryLock):  # type: ignore[misc, name-defined]
        def acquire(self, blocking: bool) -> bool:
            return True

        def release(self) -> None: ...

    failure = broken(at_once(threads, monkeypatch, Careless, closing=True), 1, TRACED)
    assert "memory is let go while bytes move" in failure

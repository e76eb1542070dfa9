"""The file adapter, 2 MiB objects, against plain files in the same run.

Plain: write to a temporary name and rename; open and read into a warm buffer. The adapter does the same plus envelope,
checksum, thread hand-over and notice. Bare figures of one machine say little; compare the two within a run.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from kvcore.keys import ObjectKey
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.file import file_adapter
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.files import OsFiles
from kvcore.runtime.notice import EventfdNotice

SIZE = 2 * 1024 * 1024
COUNT = 16
KEYS = [ObjectKey(bytes([number]) * 32, "model", 0) for number in range(COUNT)]


@pytest.fixture
def payloads():
    return [memoryview(bytearray(os.urandom(SIZE))) for _ in range(COUNT)]


@pytest.fixture
def buffers():
    return [memoryview(bytearray(b"\xff" * SIZE)) for _ in range(COUNT)]


class Session:
    """An adapter on a real loop, driven synchronously, one batch at a time."""

    def __init__(self, path):
        self.runner = asyncio.Runner()
        self.loop = self.runner.get_loop()
        self.executor = ThreadExecutor(self.loop, 2)
        self.adapter = file_adapter(
            "bench",
            OsFiles(path),
            executor=self.executor,
            notice_factory=lambda: EventfdNotice(self.loop),
            clock=SystemClock(),
        )
        self.done = asyncio.Event()
        self.adapter.store_notice.subscribe(self.done.set)
        self.adapter.load_notice.subscribe(self.done.set)

    def store(self, payloads):
        async def batch():
            task = self.adapter.submit_store(KEYS, payloads)
            while not (answers := self.adapter.pop_completed_stores()):
                self.done.clear()
                await self.done.wait()
            assert answers[task] == [StoreAnswer.STORED] * COUNT

        self.runner.run(batch())

    def load(self, buffers):
        async def batch():
            task = self.adapter.submit_load(KEYS, buffers)
            while (bits := self.adapter.take_load(task)) is None:
                self.done.clear()
                await self.done.wait()
            assert bits == (1 << COUNT) - 1

        self.runner.run(batch())

    def delete(self):
        async def all_gone():
            self.adapter.delete(KEYS)
            while self.adapter.work_inflight:
                self.done.clear()
                self.executor.submit(lambda: None, lambda outcome: self.done.set())
                await self.done.wait()

        self.runner.run(all_gone())

    def close(self):
        self.adapter.close()
        self.executor.close()
        self.runner.close()


@pytest.fixture
def session(tmp_path):
    made = Session(tmp_path / "store")
    yield made
    made.close()


def plain_store(path, payloads):
    for number, data in enumerate(payloads):
        with open(path / "temporary", "wb", buffering=0) as file:
            file.write(data)
        os.rename(path / "temporary", path / str(number))


def plain_load(path, buffers):
    for number, buffer in enumerate(buffers):
        with open(path / str(number), "rb", buffering=0) as file:
            assert file.readinto(buffer) == SIZE


def plain_delete(path):
    for number in range(COUNT):
        os.unlink(path / str(number))


@pytest.mark.benchmark(group="store 16 x 2 MiB")
def test_store_plain(benchmark, tmp_path, payloads):
    plain_store(tmp_path, payloads)
    benchmark.pedantic(plain_store, (tmp_path, payloads), setup=lambda: plain_delete(tmp_path), rounds=10)


@pytest.mark.benchmark(group="store 16 x 2 MiB")
def test_store_adapter(benchmark, session, payloads):
    session.store(payloads)
    benchmark.pedantic(session.store, (payloads,), setup=session.delete, rounds=10)


@pytest.mark.benchmark(group="load 16 x 2 MiB")
def test_load_plain(benchmark, tmp_path, payloads, buffers):
    plain_store(tmp_path, payloads)
    benchmark.pedantic(plain_load, (tmp_path, buffers), rounds=20, warmup_rounds=1)
    assert buffers == payloads


@pytest.mark.benchmark(group="load 16 x 2 MiB")
def test_load_adapter(benchmark, session, payloads, buffers):
    session.store(payloads)
    benchmark.pedantic(session.load, (buffers,), rounds=20, warmup_rounds=1)
    assert buffers == payloads


@pytest.mark.benchmark(group="present 16 keys, no I/O")
def test_store_of_present_keys(benchmark, session, payloads):
    session.store(payloads)

    def again():
        task = session.adapter.submit_store(KEYS, payloads)
        assert session.adapter.pop_completed_stores()[task] == [StoreAnswer.PRESENT] * COUNT

    benchmark(again)

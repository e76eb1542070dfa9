"""A server that is told to end while it has work: in time, with exit status 0, and with nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.ladder.storm.remains import segment_of, segments_left
from kvcore.runtime.child import Child
from kvcore.service import protocol as wire
from kvcore.service.client import ConnectionConfig, SchedulerClient, SchedulerConfig, StoreCell, WorkerClient
from kvcore.service.remote import RemoteConfig, ServerLink

CHUNK = 16
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, CHUNK, 4096),), ranks=1, chunk_tokens=CHUNK)
NAMESPACE = Namespace("tiny", layout=LAYOUT.fingerprint, chunk_tokens=CHUNK)
TOKENS = list(range(8 * CHUNK))
HASHES = ChunkHasher(NAMESPACE).hash_tokens(TOKENS)
PATIENCE_S = 60.0
PATIENCE_NS = 60_000_000_000
CONNECTION = ConnectionConfig(request_timeout_ns=PATIENCE_NS)
LOOKUP = SchedulerConfig(lookup_timeout_ns=PATIENCE_NS)
"""The server's own deadline of a lookup stays what it is."""
ENDS_IN_S = 5.0
"""Whatever is outstanding."""
SLOW_MACHINE_S = 20.0
"""For an interpreter to wind up, on a machine that is busy with something else."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvd-") as path:
        yield Path(path)


@pytest.fixture
def server(directory: Path) -> Iterator[Child]:
    """On `directory`/s.sock, with files behind L1."""
    child = Child(
        directory / "log",
        "kvcore.cli",
        *("serve", "--listen", f"ipc://{directory}/s.sock", "--l1", "1MiB", "--l2", f"file://{directory}/l2"),
        *("--chunk-tokens", str(CHUNK), "--log-level", "warning"),
    )
    try:
        child.line_with("listening on ")
        yield child
    finally:
        child.signal(signal.SIGCONT)
        child.kill()


class Engine:
    """A scheduler and a worker that leave things open."""

    def __init__(self, directory: Path) -> None:
        config = RemoteConfig((f"ipc://{directory}/s.sock",), connection=CONNECTION, lookup=LOOKUP)
        self.link = ServerLink(asyncio.get_running_loop(), config, NAMESPACE, LAYOUT)
        self.scheduler: SchedulerClient = self.link.scheduler()
        self.worker: WorkerClient = self.link.worker(0)

    async def store(self, number: int, *, commit: bool = True) -> None:
        tag = self.worker.tag(number)
        grants = await self.worker.reserve_store(tag, [StoreCell(0, HASHES[number])])
        assert grants[0] is not None
        if commit:
            await self.worker.commit_store(tag, [True])


def run(directory: Path, body: Callable[[Engine], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            engine = Engine(directory)
            try:
                await body(engine)
            finally:
                engine.link.close()

    asyncio.run(main())


async def ends(server: Child, directory: Path, *, told_every_s: float = PATIENCE_S) -> None:
    """Told to end, once or again and again, it does so in time, and nothing is left."""
    segment, begin = segment_of(server.pid), time.monotonic()
    stopping = asyncio.ensure_future(asyncio.to_thread(server.stop, PATIENCE_S))
    while not (await asyncio.wait([stopping], timeout=told_every_s))[0]:
        server.signal(signal.SIGTERM)
    status = stopping.result()
    seconds = time.monotonic() - begin
    assert status == 0, server.last_words()
    assert seconds < ENDS_IN_S + SLOW_MACHINE_S
    assert segment
    assert not segments_left([segment])
    assert not (directory / "s.sock").exists()
    assert "Traceback" not in server.last_words()


def test_stores_reads_and_lookups_that_are_open_do_not_keep_a_server(server: Child, directory: Path) -> None:
    async def body(engine: Engine) -> None:
        for number in range(4):
            await engine.store(number)
        await engine.store(4, commit=False)
        engine.scheduler.start("q", 0, HASHES, prompt_tokens=len(TOKENS) + 1)
        await engine.scheduler.wait("q", 0)
        await ends(server, directory)

    run(directory, body)


def test_a_store_that_hangs_does_not_keep_a_server(server: Child, directory: Path) -> None:
    """A record that is a pipe nobody writes to: whoever opens it waits for ever, as on a network disk that is gone."""

    async def body(engine: Engine) -> None:
        await engine.store(0)
        record = await _record(directory / "l2")
        os.unlink(record)
        os.mkfifo(record)
        connection = engine.link.connections[0]
        while await connection.call(wire.Clear()) != wire.Cleared(1):
            pass  # the record is there a moment before the write-back has let go of the chunk
        engine.scheduler.start("q", 0, HASHES, prompt_tokens=len(TOKENS) + 1)
        outcome = await engine.scheduler.wait("q", 0)
        assert outcome.best == 0
        await ends(server, directory)

    run(directory, body)


def test_being_told_again_and_again_changes_nothing(server: Child, directory: Path) -> None:
    """Once the end has begun the default action of the signal would be death, with another exit status."""

    async def body(engine: Engine) -> None:
        await engine.store(0)
        await ends(server, directory, told_every_s=0.002)

    run(directory, body)


async def _record(l2: Path) -> Path:
    """The first record, as soon as it has been written."""
    while True:
        found = list(l2.rglob("*.kv"))
        if found:
            return found[0]
        await asyncio.sleep(0)

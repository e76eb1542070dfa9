"""`kvcore serve` that copies by itself: real processes, real shared memory, and workers that die or lie."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.runtime.child import ServerChild
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.runtime.worker_pages import SharedPages
from kvcore.service import protocol as wire
from kvcore.service.client import ConnectionConfig, LoadCell, PageCell, SchedulerConfig, StoreCell
from kvcore.service.page_client import PageTicket
from kvcore.service.page_shares import describe
from kvcore.service.remote import RemoteConfig, ServerLink
from kvcore.service.shapes import PageGroup, PageSegment

Serve = Callable[..., ServerChild]

CHUNK = 16
BLOCK_BYTES = 4096
BLOCKS = 64
LAYOUT = CacheLayout((ObjectGroup(GroupKind.FULL, CHUNK // 2, BLOCK_BYTES),), ranks=1, chunk_tokens=CHUNK)
NAMESPACE = Namespace("tiny", layout=LAYOUT.fingerprint, chunk_tokens=CHUNK)
HASHES = ChunkHasher(NAMESPACE).hash_tokens(range(8 * CHUNK))
SOURCES = [(1 + 2 * cell, 33 + 2 * cell) for cell in range(8)]
TARGETS = [(2 + 2 * cell, 34 + 2 * cell) for cell in range(8)]
PATIENCE_S = 60.0
PATIENCE_NS = 60_000_000_000
CONNECTION = ConnectionConfig(request_timeout_ns=PATIENCE_NS, hello_interval_ns=100_000_000)
LOOKUP = SchedulerConfig(lookup_timeout_ns=PATIENCE_NS, server_timeout_ns=PATIENCE_NS)


class Engine:
    """A scheduler, and a worker whose pages lie in shared memory."""

    def __init__(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        self.shared = SharedPages(BLOCKS * BLOCK_BYTES)
        self.pages = np.frombuffer(self.shared.buffer, dtype=np.uint8).reshape(BLOCKS, BLOCK_BYTES)
        self.device = ThreadCopyEngine(loop, "test")
        config = RemoteConfig((address,), connection=CONNECTION, lookup=LOOKUP, transfer="server")
        self.link = ServerLink(loop, config, NAMESPACE, LAYOUT)
        self.scheduler, self.worker = self.link.scheduler(), self.link.worker(0)
        self.worker.pages.share(describe(self.shared.segment, self.shared.buffer, [self.pages]))
        self._numbers = 0

    async def store(self, cells: Sequence[int] = range(8)) -> list[PageTicket]:
        self._numbers += 1
        for cell in cells:
            self.pages[list(SOURCES[cell])] = cell + 1
        asked = [PageCell(StoreCell(0, HASHES[cell]), SOURCES[cell]) for cell in cells]
        gate = self.device.submit((), stream="store")
        return await ended(self.worker.pages.store(self.worker.tag(self._numbers), asked, "", gate))

    async def load(self) -> list[PageTicket]:
        self._numbers += 1
        session, number = f"s{self._numbers}", self._numbers
        self.scheduler.start(session, number, HASHES, prompt_tokens=8 * CHUNK + 1)
        outcome = await self.scheduler.wait(session, number)
        assert outcome.best == 8, outcome
        self.scheduler.settle(session, number, 8)
        asked = [PageCell(LoadCell(0, cell, HASHES[cell]), TARGETS[cell]) for cell in range(8)]
        tickets = await ended(self.worker.pages.load(session, number, asked, self.device.submit((), stream="load")))
        self.scheduler.end(session)
        return tickets

    def close(self) -> None:
        self.link.close()
        self.device.close()
        self.shared.close()


async def ended(tickets: list[PageTicket]) -> list[PageTicket]:
    async with asyncio.timeout(PATIENCE_S):
        for ticket in tickets:
            await ticket.wait()
    return tickets


def with_engine(address: str, scenario: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        engine = Engine(address)
        try:
            await scenario(engine)
        finally:
            engine.close()

    asyncio.run(main())


def status_of(server: ServerChild) -> dict[str, Any]:
    with urllib.request.urlopen(server.http + "/status", timeout=PATIENCE_S) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def segments_mapped(pid: int) -> set[str]:
    """In this process perhaps also what an earlier test has left to the collector."""
    words = Path(f"/proc/{pid}/maps").read_text().split()
    return {word.removeprefix("/dev/shm/") for word in words if word.startswith("/dev/shm/kvcore-")}


def wait_for(condition: Callable[[], bool]) -> None:
    """Processes do their work in their own time; a second is usual, a machine under load may take many."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        os.sched_yield()


@pytest.fixture
def server(serve: Serve) -> ServerChild:
    return serve("--chunk-tokens", str(CHUNK))


def test_kv_comes_back_into_other_blocks_and_the_worker_maps_nothing_of_the_server(server: ServerChild) -> None:
    async def scenario(engine: Engine) -> None:
        assert [ticket.error for ticket in await engine.store()] == [None] * 8
        assert [ticket.error for ticket in await engine.load()] == [None] * 8
        for cell in range(8):
            assert (engine.pages[list(TARGETS[cell])] == cell + 1).all()
        of_the_server = segments_mapped(server.pid) - {engine.shared.segment}
        assert len(of_the_server) == 1
        assert segments_mapped(os.getpid()) & {*of_the_server, engine.shared.segment} == {engine.shared.segment}

    with_engine(server.address, scenario)
    state = status_of(server)
    assert (state["server"]["pages"]["cells_stored"], state["server"]["pages"]["cells_retrieved"]) == (8, 8)
    wait_for(lambda: not status_of(server)["server"]["workers"])
    l1 = status_of(server)["storage"]["l1"]
    assert (l1["leases"], l1["holds"], l1["objects_staging"]) == (0, 0, 0)


def test_a_segment_that_was_cut_short_fails_its_cells_and_nobody_else(server: ServerChild) -> None:
    async def scenario(engine: Engine) -> None:
        assert [ticket.error for ticket in await engine.store()] == [None] * 8
        path = Path("/dev/shm") / engine.shared.segment
        os.truncate(path, 8 * BLOCK_BYTES)  # blocks 1 to 7 are left; this process touches none beyond
        assert all(ticket.error is not None for ticket in await engine.load()), "nothing is written into it"
        assert path.stat().st_size == 8 * BLOCK_BYTES
        os.truncate(path, BLOCKS * BLOCK_BYTES)

    with_engine(server.address, scenario)
    assert status_of(server)["server"]["pages"]["cells_failed"] == 8
    with_engine(server.address, _loads_again)
    assert server.alive
    assert "Traceback" not in server.text


async def _loads_again(engine: Engine) -> None:
    assert [ticket.error for ticket in await engine.load()] == [None] * 8
    assert (engine.pages[list(TARGETS[7])] == 8).all()


def test_of_a_worker_killed_while_the_server_copies_nothing_is_left(serve: Serve, directory: Path) -> None:
    server = serve("--chunk-tokens", str(CHUNK), l1="96MiB")
    code = f"""
import asyncio
import numpy as np
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.runtime.worker_pages import SharedPages
from kvcore.service.client import ConnectionConfig, PageCell, StoreCell
from kvcore.service.page_shares import describe
from kvcore.service.remote import RemoteConfig, ServerLink

async def main():
    size = 1 << 20
    layout = CacheLayout((ObjectGroup(GroupKind.FULL, {CHUNK}, size),), ranks=1, chunk_tokens={CHUNK})
    namespace = Namespace("tiny", layout=layout.fingerprint, chunk_tokens={CHUNK})
    patience = ConnectionConfig(request_timeout_ns={PATIENCE_NS})
    config = RemoteConfig(({server.address!r},), connection=patience, transfer="server")
    link = ServerLink(asyncio.get_running_loop(), config, namespace, layout)
    shared = SharedPages(size * 65)
    pages = np.frombuffer(shared.buffer, dtype=np.uint8).reshape(65, size)
    worker = link.worker(0)
    worker.pages.share(describe(shared.segment, shared.buffer, [pages]))
    device = ThreadCopyEngine(asyncio.get_running_loop())
    cells = [PageCell(StoreCell(0, bytes([n]) * 32), [n + 1]) for n in range(64)]
    tickets = worker.pages.store("t", cells, "", device.submit((), stream="store"))
    await tickets[0].wait()
    print(shared.segment, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        segment = child.stdout.readline().strip()
        assert segment
        child.kill()
    wait_for(lambda: status_of(server)["server"]["workers"] == 0)
    wait_for(lambda: status_of(server)["server"]["pages"]["transfers_open"] == 0)
    state = status_of(server)
    l1 = state["storage"]["l1"]
    assert (l1["holds"], l1["objects_staging"], l1["objects_draining"], l1["quarantined_bytes"]) == (0, 0, 0, 0)
    assert l1["objects_resident"] == state["server"]["pages"]["cells_stored"]
    wait_for(lambda: not (Path("/dev/shm") / segment).exists())
    for descriptor in os.listdir(f"/proc/{server.pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile, as the connection that answered us
            assert segment not in os.readlink(f"/proc/{server.pid}/fd/{descriptor}")


def test_a_server_that_is_told_to_end_ends_with_copies_under_way(server: ServerChild) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.store([0])
        asked = [PageCell(StoreCell(0, HASHES[cell]), SOURCES[cell]) for cell in range(1, 8)]
        tickets = engine.worker.pages.store("t", asked, "", engine.device.submit((), stream="store"))
        server.signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.ended, PATIENCE_S) == 0
        await ended(tickets)  # by the proof of its death, if not before

    with_engine(server.address, scenario)
    assert "Traceback" not in server.text


def test_the_tickets_of_a_killed_server_end_at_once(server: ServerChild) -> None:
    async def scenario(engine: Engine) -> None:
        await engine.store([0])
        server.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # all its threads: one might still answer
        asked = [PageCell(StoreCell(0, HASHES[cell]), SOURCES[cell]) for cell in range(1, 8)]
        tickets = engine.worker.pages.store("t", asked, "", engine.device.submit((), stream="store"))
        await asyncio.wait([asyncio.ensure_future(tickets[0].wait())], timeout=0.1)
        assert not any(ticket.done for ticket in tickets), "it is only silent"
        await asyncio.to_thread(server.stop, PATIENCE_S, signal.SIGKILL)
        await ended(tickets)
        assert all(ticket.error is not None for ticket in tickets)

    with_engine(server.address, scenario)


def test_a_server_for_workers_that_copy_refuses_the_others_with_both_values(serve: Serve) -> None:
    server = serve("--chunk-tokens", str(CHUNK), "--transfer", "worker")

    async def scenario(engine: Engine) -> None:
        assert all(ticket.error is not None for ticket in await engine.store())
        refusals = {connection.refusal for connection in engine.link.connections if connection.refusal}
        assert refusals == {"transfer: the server offers worker, the client wants server"}

    with_engine(server.address, scenario)
    assert status_of(server)["server"] is None, "and it still waits for its engine"


# -- hostile workers


class Wild:
    """Registers pages and names blocks as no worker would, from a seed."""

    def __init__(self, shared: SharedPages) -> None:
        self._draw = random.Random(11)
        self._shared = shared
        self._good = PageSegment(
            shared.segment, BLOCKS * BLOCK_BYTES, (PageGroup(0, BLOCKS, BLOCK_BYTES, BLOCK_BYTES),)
        )

    def requests(self, count: int) -> Iterator[wire.Request]:
        yield wire.Register("good", 0, "", self._good)
        for number in range(count):
            kind = self._draw.randrange(4)
            if kind == 0:
                yield wire.Register(f"w{self._draw.randrange(40)}", 0, "1:2:3", self._segment())
            elif kind == 1:
                yield wire.StorePages(self._worker(), f"t{number}", 0, "", self._cells(HASHES))
            elif kind == 2:
                yield wire.RetrievePages(self._worker(), f"t{number}", "s", 1, 0, self._cells(range(9)))
            else:
                yield wire.Copies(self._worker(), f"t{self._draw.randrange(number + 1)}", self._draw.randbytes(2))

    def _worker(self) -> str:
        return self._draw.choice(("good", "good", "good", f"w{self._draw.randrange(40)}", "nobody"))

    def _number(self) -> int:
        return self._draw.choice((0, 1, BLOCKS - 1, BLOCKS, BLOCK_BYTES, 2**31, 2**62, self._draw.randrange(BLOCKS)))

    def _segment(self) -> PageSegment:
        name = self._draw.choice((self._shared.segment, self._shared.segment, "kvcore-nothing", "../shadow", "x"))
        size = self._draw.choice((BLOCKS * BLOCK_BYTES, self._number()))
        block_bytes = self._draw.choice((BLOCK_BYTES, self._number()))
        group = PageGroup(self._number(), self._number(), self._number(), block_bytes)
        return PageSegment(name, size, self._draw.choice(((group,), (group, group), (), self._good.groups)))

    def _cells(self, names: Sequence[Any]) -> list[Any]:
        draw = self._draw
        return [
            (draw.choice((0, 0, 0, 1, 2**62)), draw.choice(names), [self._number() for _ in range(length)])
            for length in draw.choices((2, 2, 1, 3), k=draw.randrange(1, 6))
        ]


def test_ranges_that_lie_are_refused_counted_and_harmless(server: ServerChild) -> None:
    shared = SharedPages(BLOCKS * BLOCK_BYTES)
    shared.buffer[:BLOCK_BYTES] = b"\x77" * BLOCK_BYTES  # the null block
    replies: dict[str, int] = {}

    async def talk() -> None:
        config = RemoteConfig((server.address,), connection=CONNECTION)
        link = ServerLink(asyncio.get_running_loop(), config, NAMESPACE, LAYOUT)
        link.worker(0)
        (connection,) = link.connections
        await connection.call(wire.Lookup("s", 1, 1, 0, b"", HASHES, 8 * CHUNK + 1, 0, "", 1000))
        for request in Wild(shared).requests(4000):
            reply = await connection.call(request)
            name = reply.code.value if isinstance(reply, wire.Error) else type(reply).__name__
            replies[name] = replies.get(name, 0) + 1
        link.close()

    try:
        asyncio.run(talk())
        assert bytes(shared.buffer[:BLOCK_BYTES]) == b"\x77" * BLOCK_BYTES
    finally:
        shared.close()
    assert {"bad_pages", "unknown_worker", "unknown_tag", "Copied", "Done"} <= set(replies), replies
    assert "internal" not in replies
    assert "malformed" not in replies
    assert replies["bad_pages"] > 1000
    assert status_of(server)["server"]["errors"]["bad_pages"] == replies["bad_pages"]
    with_engine(server.address, _stores_and_loads)
    assert "Traceback" not in server.text


async def _stores_and_loads(engine: Engine) -> None:
    assert all(ticket.done for ticket in await engine.store())
    assert [ticket.error for ticket in await engine.load()] == [None] * 8


def test_pages_are_refused_in_the_server_that_are_open_to_others(server: ServerChild) -> None:
    async def scenario(engine: Engine) -> None:
        (Path("/dev/shm") / engine.shared.segment).chmod(0o666)
        assert all("bad_pages" in str(ticket.error) for ticket in await engine.store())

    with_engine(server.address, scenario)

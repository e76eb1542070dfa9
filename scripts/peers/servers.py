"""The servers side by side: real processes over tcp on loopback, each driven by its own client classes.

kvcore's clients run in this process, LMCache's in `peer_lmcache.py`. No line of LMCache is copied here.

    lookups      whole lookups that find everything in the server's memory, `in_flight` at the same time
    long lookup  one prompt of 128K tokens, one at a time
    copies       store and retrieve of new chunks through shared memory, beside one plain copy of the same bytes

The processor time of a server is the kernel's clock of that process, all threads of it. `NOT_COMPARABLE` says what the
figures do not show.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvcore.bench.server import CHUNK_TOKENS, cpu_seconds
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace
from kvcore.service.client import LoadCell, SchedulerClient, StoreCell, WorkerClient
from kvcore.service.connection import ConnectionConfig
from kvcore.service.remote import RemoteConfig, ServerLink
from kvcore.service.scheduler_client import SchedulerConfig
from peers.environment import ROOT, Talker, last_line, process, talker
from peers.figures import Samples, in_turns
from peers.inputs import Watch

PEER = ROOT / "scripts" / "peer_lmcache.py"
L1_BATCHES = 4
PATIENCE_NS = 60_000_000_000

NOT_COMPARABLE = (
    "Who hashes: LMCache's client sends token ids and its server hashes them, at LOOKUP and again when locks are given "
    "back and when the session ends; kvcore's client hashes, and sends hashes. So both lookups include the hashing of "
    "the prompt, but the processor time of the server does in LMCache only; the client's is printed beside it.",
    "The clients: LMCache's hands each request to a thread and waits for a future, kvcore's runs on an asyncio loop. "
    "The lookups per second contain them; the servers' processor time does not.",
    "What a copy is: whole pages that lie in one piece, copied by the client on one thread (kvcore: memoryview, "
    "LMCache: Tensor.copy_). LMCache's worker gathers the blocks of every layer into a slot, which is not measured, as "
    "kvcore's page copier is not; each is measured against a plain copy of the same kind in the same process.",
    "LMCache's copies are its engine-driven path. Its default path (lmcache_driven, where the server copies from GPU "
    "memory) needs a GPU and is not measured at all.",
    "Protection: kvcore's leases belong to an owner and its holds end with the copy; LMCache's read locks are counts "
    "that time out. That work is part of both figures and is not the same work.",
    "LMCache runs as shipped (one thread for requests) but for: engine-driven transfer over shared memory, memory "
    "allocated at start, metrics and logs off. kvcore runs as shipped, metrics server off.",
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The defaults are those that figures are quoted with."""

    rounds: int = 5
    lookups: int = 640
    in_flight: int = 64
    lookup_chunks: int = 16
    long_lookups: int = 10
    long_chunks: int = 512
    page_bytes: int = 2 << 20
    batch: int = 64


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _patient(address: str) -> RemoteConfig:
    """Deadlines as long as the other side has them: on a loaded machine a late answer is a figure and not a miss."""
    lookup = SchedulerConfig(lookup_timeout_ns=PATIENCE_NS, server_timeout_ns=PATIENCE_NS)
    return RemoteConfig((address,), connection=ConnectionConfig(request_timeout_ns=PATIENCE_NS), lookup=lookup)


class Kvcore:
    """A server of kvcore, and its own clients in this process. `page_bytes`: of one chunk."""

    def __init__(self, stack: ExitStack, directory: Path, page_bytes: int, l1_bytes: int) -> None:
        address = f"tcp://127.0.0.1:{free_port()}"
        command = [
            sys.executable,
            "-m",
            "kvcore.cli",
            "serve",
            "--listen",
            address,
            "--http",
            "",
            "--log-level",
            "error",
        ]
        command += ["--l1", str(l1_bytes), "--chunk-tokens", str(CHUNK_TOKENS)]
        log = directory / f"kvcore-{page_bytes}.log"
        server = stack.enter_context(process(command, log, stdout=subprocess.PIPE))
        assert server.stdout is not None
        if not server.stdout.readline():
            raise SystemExit(f"kvcore serve did not start: {log.read_text()}")
        self.pid = server.pid
        self._page_bytes = page_bytes
        self._runner = stack.enter_context(asyncio.Runner())
        group = ObjectGroup(GroupKind.FULL, CHUNK_TOKENS, page_bytes)
        layout = CacheLayout((group,), ranks=1, chunk_tokens=CHUNK_TOKENS)
        namespace = Namespace("peers", layout=layout.fingerprint, chunk_tokens=CHUNK_TOKENS)
        self._hasher = ChunkHasher(namespace)
        self._link = ServerLink(self._runner.get_loop(), _patient(address), namespace, layout)
        self._scheduler, self._worker = self._runner.run(self._clients())
        stack.callback(lambda: self._runner.run(self._close()))
        self._source, self._target = memoryview(b""), memoryview(bytearray())
        self._sessions = 0

    async def _clients(self) -> tuple[SchedulerClient, WorkerClient]:
        return self._link.scheduler(), self._link.worker(0)

    async def _close(self) -> None:
        self._link.close()

    def fill(self, chunks: int) -> None:
        """Store the first `chunks` chunks of the prompt that the lookups ask for."""
        self._runner.run(self._store("fill", self._hasher.hash_tokens(_prompt(chunks)), None))

    def lookups(self, count: int, chunks: int, in_flight: int) -> dict[str, float]:
        """Whole lookups, answered in full: the prompt hashed, LOOKUP, QUERY, then the session ended."""
        begin, cpu = time.perf_counter(), time.process_time()
        self._runner.run(self._lookups(_prompt(chunks), count // in_flight, in_flight))
        done = count // in_flight * in_flight
        return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu, "count": done}

    async def _lookups(self, prompt: list[int], count: int, in_flight: int) -> None:
        async def one_after_the_other() -> None:
            for _ in range(count):
                await self._lookup(prompt)

        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(one_after_the_other())

    async def _lookup(self, prompt: list[int]) -> None:
        self._sessions += 1
        session = f"s{self._sessions}"
        hashes = self._hasher.hash_tokens(prompt)
        await self._found(session, hashes)
        self._scheduler.end(session)

    async def _found(self, session: str, hashes: list[bytes]) -> None:
        self._scheduler.start(session, 1, hashes, prompt_tokens=len(hashes) * CHUNK_TOKENS)
        outcome = await self._scheduler.wait(session, 1)
        assert outcome.best == len(hashes), f"only {outcome.best} chunks found: {outcome.reason}"

    def copies(self, turn: int, batch: int) -> dict[str, float]:
        """Store a new batch, retrieve it, and copy the same bytes once between private buffers."""
        size = self._page_bytes
        if not len(self._source):
            self._source, self._target = _private(size * batch, b"x"), _private(size * batch, b"y")
        pages = [slice(size * index, size * (index + 1)) for index in range(batch)]
        return self._runner.run(self._copies(f"c{turn}", [turn, *_prompt(batch)[1:]], pages))

    async def _copies(self, session: str, tokens: list[int], pages: list[slice]) -> dict[str, float]:
        watch = Watch()
        hashes = self._hasher.hash_tokens(tokens)
        await self._store(session, hashes, pages)
        watch.stop("store")
        await self._found(session, hashes)
        watch.start()
        cells = [LoadCell(0, index, chunk_hash) for index, chunk_hash in enumerate(hashes)]
        grants = await self._worker.open_read(session, 1, cells)
        for page, grant in zip(pages, grants, strict=True):
            assert grant is not None, "a leased cell is readable"
            self._target[page] = grant.view
        assert all(await self._worker.close_read(session, 1, cells))
        watch.stop("retrieve")
        assert self._target == self._source
        self._scheduler.end(session)
        watch.start()
        for page in pages:
            self._target[page] = self._source[page]
        watch.stop("plain")
        return watch.seconds

    async def _store(self, session: str, hashes: list[bytes], pages: list[slice] | None) -> None:
        """Without pages the cells are published as they are: what they hold does not matter to lookups."""
        tag = self._worker.tag(self._sessions)
        self._sessions += 1
        grants = await self._worker.reserve_store(tag, [StoreCell(0, chunk_hash) for chunk_hash in hashes])
        for index, grant in enumerate(grants):
            assert grant is not None, "no room in L1"
            if pages is not None:
                grant.view[:] = self._source[pages[index]]
        await self._worker.commit_store(tag, [True] * len(hashes))

    def clear(self) -> None:
        """Nothing: a full L1 gives up what was used longest ago, and its pages have all been touched by then."""


class Lmcache:
    """A server of LMCache, and `peer_lmcache.py` as its client."""

    def __init__(self, stack: ExitStack, directory: Path, python: Path, page_bytes: int, l1_bytes: int) -> None:
        port = free_port()
        name = f"peers-{os.getpid()}-{page_bytes}"
        command = [str(python), "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", name, "--no-l1-use-lazy"]
        command += ["--l1-size-gb", str(max(0.25, l1_bytes / 2**30)), "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(CHUNK_TOKENS), "--disable-observability"]
        server_log, client_log = [directory / f"{part}-{page_bytes}.log" for part in ("lmcache", "client")]
        self.pid = stack.enter_context(process(command, server_log, stdout=subprocess.DEVNULL)).pid
        client = [str(python), str(PEER), f"tcp://127.0.0.1:{port}", str(page_bytes)]
        try:
            self._client: Talker = stack.enter_context(talker(client, client_log))
        except SystemExit as error:
            raise SystemExit(
                f"LMCache is installed, but {error}; its server: {last_line(server_log.read_text())}"
            ) from None

    def fill(self, chunks: int) -> None:
        self._client.ask("fill", chunks=chunks)

    def lookups(self, count: int, chunks: int, in_flight: int) -> dict[str, float]:
        return dict(self._client.ask("lookups", count=count, chunks=chunks, in_flight=in_flight))

    def copies(self, turn: int, batch: int) -> dict[str, float]:
        return dict(self._client.ask("copies", turn=turn, batch=batch))

    def clear(self) -> None:
        self._client.ask("clear")


Side = Kvcore | Lmcache


def measure(python: Path, directory: Path, sizes: Sizes) -> Samples:
    """Samples of all figures."""
    with ExitStack() as stack:
        sides = _sides(stack, directory, python, 4096, 256 << 20)
        for side in sides.values():
            side.fill(max(sizes.lookup_chunks, sizes.long_chunks))
        found = in_turns(sides, sizes.rounds, warm=1, one=lambda side, _: _lookup_round(side, sizes))
    with ExitStack() as stack:
        sides = _sides(stack, directory, python, sizes.page_bytes, L1_BATCHES * sizes.page_bytes * sizes.batch)
        one = partial(_copy_round, sizes=sizes)
        return found | in_turns(sides, sizes.rounds, warm=L1_BATCHES + 1, one=one)


def _sides(stack: ExitStack, directory: Path, python: Path, page_bytes: int, l1_bytes: int) -> dict[str, Side]:
    # LMCache begins to evict at four fifths, and must not here
    lmcache = Lmcache(stack, directory, python, page_bytes, 2 * l1_bytes)
    return {"kvcore": Kvcore(stack, directory, page_bytes, l1_bytes), "lmcache": lmcache}


def _lookup_round(side: Side, sizes: Sizes) -> dict[str, float]:
    before = cpu_seconds(side.pid)
    short = side.lookups(sizes.lookups, sizes.lookup_chunks, sizes.in_flight)
    between = cpu_seconds(side.pid)
    long = side.lookups(sizes.long_lookups, sizes.long_chunks, 1)
    after = cpu_seconds(side.pid)
    return {
        "lookups_per_s": short["count"] / short["seconds"],
        "lookup_server_us": 1e6 * (between - before) / short["count"],
        "lookup_client_us": 1e6 * short["cpu_seconds"] / short["count"],
        "long_ms": 1e3 * long["seconds"] / long["count"],
        "long_server_ms": 1e3 * (after - between) / long["count"],
    }


def _copy_round(side: Side, turn: int, sizes: Sizes) -> dict[str, float]:
    took = side.copies(turn, sizes.batch)
    if turn % L1_BATCHES == L1_BATCHES - 1:
        side.clear()
    total = sizes.page_bytes * sizes.batch / 1e9
    rates = {f"{name}_gb_per_s": total / seconds for name, seconds in took.items()}
    return rates | {f"{name}_share": took["plain"] / took[name] for name in ("store", "retrieve")}


def _private(size: int, filled_with: bytes) -> memoryview:
    """Touched, and aligned as tensors are."""
    buffer = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    buffer[:] = filled_with * size
    return buffer


def _prompt(chunks: int) -> list[int]:
    return list(range(chunks * CHUNK_TOKENS))

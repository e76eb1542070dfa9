"""`kvcore bench server`: what a cache server costs, beside yardsticks of the same run.

Theory of operation
-------------------
Real processes: a `kvcore serve` with an L1 of its own, an echo server (`echo.py`) and this one, which plays the engine.

    round trips    LOOKUP -> ACK against an echo of the same bytes, the same number in flight, in turns
    big lookup     128K tokens (512 chunks x 4 rows), all in L1: processor time of the server for LOOKUP, QUERY, END
    throughput     lookups per second, answered READY, with many sessions in flight
    copies         store and retrieve by either driver against one copy of the same bytes in private memory,
                   everything touched before: the worker copies through shared memory (reserve, copy, commit; open,
                   copy, close), and the server copies from and to the worker's shared pages. The yardstick copies the
                   very same bytes to the very same place: a pair of buffers of its own, used at each turn, was a
                   quarter faster than pairs in turns, which is what L1 is

Each pair runs in turns, `rounds` times; medians and their ratio are printed. The processor time of a server or of the
echo is read from the kernel's clock of that process, so that what runs beside it does not count: on a busy machine the
ratio of processor times says what that of the latencies would be on a quiet one, where the server is the bottleneck.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from kvcore.bench.figures import Latencies, median
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import Namespace
from kvcore.placement import Placement
from kvcore.runtime.child import Child, ServerChild
from kvcore.runtime.copy import ThreadCopyEngine
from kvcore.runtime.worker_pages import SharedPages
from kvcore.service import protocol as wire
from kvcore.service.client import LoadCell, PageCell, StoreCell, identity_of
from kvcore.service.page_client import PageTicket
from kvcore.service.page_shares import describe
from kvcore.service.protocol import PROTOCOL_VERSION, Header, Transfer
from kvcore.service.remote import RemoteConfig, ServerLink

CHUNK_TOKENS = 256
IN_FLIGHT = 64
_PATIENCE_S = 60.0
_L1_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. The defaults are the ones that figures are quoted with."""

    rounds: int = 5
    round_trips: int = 2000  # in one round, whose sessions stay open to its end
    lookup_chunks: int = 16
    big_lookups: int = 40
    throughput_lookups: int = 2000
    copy_bytes: int = 2 << 20
    copy_batch: int = 64


def bench_server(sizes: Sizes) -> dict[str, Any]:
    """All measurements; a JSON-able dict."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        directory = Path(name)
        return {
            "schema": 1,
            "python": sys.version.split()[0],
            "sizes": asdict(sizes),
            "round_trip": _round_trips(directory, sizes),
            "big_lookup": _big_lookup(directory, sizes),
            "throughput": _throughput(directory, sizes),
            "copies": _copies(directory, sizes, "worker"),
            "copies_by_server": _copies(directory, sizes, "server"),
        }


# -- processes


@contextmanager
def server(directory: Path, l1_bytes: int) -> Iterator[tuple[str, int]]:
    """A cache server; its address and process id."""
    listen = ("--listen", f"ipc://{directory}/kv.sock", "--l1", str(l1_bytes), "--http", "")
    child = ServerChild(directory / "serve.log", *listen, "--chunk-tokens", str(CHUNK_TOKENS), "--log-level", "error")
    try:
        yield child.started().address, child.pid
    finally:
        child.stop()


@contextmanager
def echo_server(directory: Path) -> Iterator[tuple[str, int]]:
    """The yardstick; its address and process id."""
    address = f"ipc://{directory}/echo.sock"
    child = Child(directory / "echo.log", "kvcore.bench.echo", address)
    try:
        child.line_with("ready")
        yield address, child.pid
    finally:
        child.stop()


def cpu_seconds(pid: int) -> float:
    """Processor time of another process so far: the kernel's clock of that process (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


# -- round trips


class _Raw:
    """A bare DEALER socket: what the client costs is the same on both sides of the comparison."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.socket.setsockopt(zmq.RCVTIMEO, int(_PATIENCE_S * 1000))

    def ask(self, frame: bytes) -> bytes:
        self.socket.send(frame)
        return bytes(self.socket.recv())

    def pipelined(self, frames: Sequence[bytes], in_flight: int) -> list[float]:
        """Seconds from each request to its reply, with `in_flight` under way. Replies come in order."""
        sent: list[float] = []
        took: list[float] = []
        for frame in frames[:in_flight]:
            sent.append(time.perf_counter())
            self.socket.send(frame)
        for number in range(len(frames)):
            self.socket.recv()
            now = time.perf_counter()
            took.append(now - sent[number])
            if len(sent) < len(frames):
                sent.append(time.perf_counter())
                self.socket.send(frames[len(sent) - 1])
        return took

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@dataclass(frozen=True, slots=True)
class _Trips:
    """Round trips to one process, and its processor time for each."""

    took: Latencies
    cpu_us: float


def _trips(raw: _Raw, frames: Sequence[bytes], pid: int) -> _Trips:
    before = cpu_seconds(pid)
    took = Latencies.of(raw.pipelined(frames, IN_FLIGHT))
    return _Trips(took, 1e6 * (cpu_seconds(pid) - before) / len(frames))


class _Speaker:
    """Frames of one connection to one server, numbered."""

    def __init__(self, raw: _Raw, layout: CacheLayout, namespace: Namespace) -> None:
        self._number = 0
        self._incarnation = 0
        self._connection = time.monotonic_ns()
        hello = wire.Hello(identity_of(namespace, layout, Placement()), 0)
        header = wire.read_header(raw.ask(self.frame(hello)))
        assert header is not None
        self._incarnation = header.incarnation

    def frame(self, message: wire.Request) -> bytes:
        self._number += 1
        return wire.pack(Header(PROTOCOL_VERSION, self._number, self._connection, self._incarnation), message)

    def lookup(self, session: str, hashes: Sequence[bytes], epoch: int = 1) -> bytes:
        tokens = len(hashes) * CHUNK_TOKENS + 1
        return self.frame(wire.Lookup(session, epoch, epoch, 0, b"", list(hashes), tokens, 0, "", 1000))


def _layout(groups: int = 1, ranks: int = 1, cell_bytes: int = 4096) -> tuple[CacheLayout, Namespace]:
    group = ObjectGroup(GroupKind.FULL, CHUNK_TOKENS, cell_bytes)
    layout = CacheLayout((group,) * groups, ranks=ranks, chunk_tokens=CHUNK_TOKENS)
    return layout, Namespace("bench", layout=layout.fingerprint, chunk_tokens=CHUNK_TOKENS)


def _hashes(count: int, salt: int = 0) -> list[bytes]:
    return [salt.to_bytes(16, "little") + number.to_bytes(16, "little") for number in range(count)]


def _round_trips(directory: Path, sizes: Sizes) -> dict[str, Any]:
    layout, namespace = _layout()
    with ExitStack() as stack:
        address, pid = stack.enter_context(server(directory, 64 << 20))
        echo_address, echo_pid = stack.enter_context(echo_server(directory))
        ours, echo = _Raw(address), _Raw(echo_address)
        stack.callback(ours.close)
        stack.callback(echo.close)
        speaker = _Speaker(ours, layout, namespace)
        pairs: list[tuple[_Trips, _Trips]] = []
        for turn in range(sizes.rounds + 1):
            frames = [
                speaker.lookup(f"s{turn}.{number}", _hashes(sizes.lookup_chunks, number))
                for number in range(sizes.round_trips)
            ]
            yardstick = _trips(echo, frames, echo_pid)
            found = _trips(ours, frames, pid)
            for number in range(sizes.round_trips):
                ours.ask(speaker.frame(wire.EndSession(f"s{turn}.{number}", 1)))
            if turn:  # the first one warms up
                pairs.append((found, yardstick))
    return {
        "what": f"LOOKUP of {sizes.lookup_chunks} chunks to ACK, {IN_FLIGHT} in flight, against an echo of its bytes",
        "n": sizes.round_trips * len(pairs),
        "ack_p50_us": median([found.took.p50_us for found, _ in pairs]),
        "ack_p99_us": median([found.took.p99_us for found, _ in pairs]),
        "ack_cpu_us": median([found.cpu_us for found, _ in pairs]),
        "echo_p50_us": median([yardstick.took.p50_us for _, yardstick in pairs]),
        "echo_p99_us": median([yardstick.took.p99_us for _, yardstick in pairs]),
        "echo_cpu_us": median([yardstick.cpu_us for _, yardstick in pairs]),
        "ratio_p50": median([found.took.p50_us / yardstick.took.p50_us for found, yardstick in pairs]),
        "ratio_cpu": median([found.cpu_us / yardstick.cpu_us for found, yardstick in pairs]),
    }


# -- lookups


def _big_lookup(directory: Path, sizes: Sizes) -> dict[str, Any]:
    layout, namespace = _layout(groups=2, ranks=2)
    hashes = _hashes(512)
    with server(directory, 64 << 20) as (address, pid):
        asyncio.run(_fill(address, layout, namespace, hashes))
        raw = _Raw(address)
        speaker = _Speaker(raw, layout, namespace)
        seconds = []
        for number in range(sizes.big_lookups):
            asked = [
                speaker.lookup(f"b{number}", hashes),
                speaker.frame(wire.Query(f"b{number}", 1, 1)),
                speaker.frame(wire.EndSession(f"b{number}", 1)),
            ]
            before = cpu_seconds(pid)
            replies = [wire.read_reply(raw.ask(frame)) for frame in asked]
            seconds.append(cpu_seconds(pid) - before)
            assert isinstance(replies[1], wire.Ready), replies[1]
            assert replies[1].lengths
        raw.close()
    return {
        "what": "LOOKUP, QUERY and END of 128K tokens (512 chunks x 4 rows) in L1: processor time of the server",
        "n": len(seconds),
        "p50_ms": 1e3 * median(seconds),
        "max_ms": 1e3 * max(seconds),
    }


async def _fill(address: str, layout: CacheLayout, namespace: Namespace, hashes: Sequence[bytes]) -> None:
    """Store every cell of `hashes`."""
    for rank in range(layout.ranks):
        link = ServerLink(asyncio.get_running_loop(), RemoteConfig((address,)), namespace, layout)
        worker = link.worker(rank)
        for first in range(0, len(hashes), 256):
            part = hashes[first : first + 256]
            for group in range(len(layout.groups)):
                tag = worker.tag(first * 64 + group)
                grants = await worker.reserve_store(tag, [StoreCell(group, chunk_hash) for chunk_hash in part])
                await worker.commit_store(tag, [grant is not None for grant in grants])
        link.close()


def _throughput(directory: Path, sizes: Sizes) -> dict[str, Any]:
    layout, namespace = _layout()
    hashes = _hashes(sizes.lookup_chunks)
    with server(directory, 64 << 20) as (address, _):
        asyncio.run(_fill(address, layout, namespace, hashes))
        raw = _Raw(address)
        speaker = _Speaker(raw, layout, namespace)
        rates = []
        for turn in range(sizes.rounds):
            frames = []
            for number in range(sizes.throughput_lookups):
                session = f"t{turn}.{number}"
                frames += [
                    speaker.lookup(session, hashes),
                    speaker.frame(wire.Query(session, 1, 1)),
                    speaker.frame(wire.EndSession(session, 1)),
                ]
            begin = time.perf_counter()
            raw.pipelined(frames, IN_FLIGHT)
            rates.append(sizes.throughput_lookups / (time.perf_counter() - begin))
        raw.close()
    return {
        "what": f"whole lookups (LOOKUP, QUERY, END) of {sizes.lookup_chunks} chunks in L1, {IN_FLIGHT} in flight",
        "n": sizes.throughput_lookups * sizes.rounds,
        "lookups_per_s": median(rates),
    }


# -- copies


class _Cost(NamedTuple):
    """Wall time, and the processor time of both processes."""

    seconds: float
    cpu_seconds: float


class _Turns(ABC):
    """Batches of whole pages, stored, looked up and retrieved; remembers what each kind of copy has cost."""

    def __init__(self, link: ServerLink, pid: int, sizes: Sizes, buffers: Sequence[memoryview]) -> None:
        self._pid = pid
        self._sizes = sizes
        self._scheduler, self.worker = link.scheduler(), link.worker(0)
        self._sources, self._targets = buffers[:_L1_BATCHES], buffers[_L1_BATCHES:]
        self.costs: dict[str, list[_Cost]] = {"store": [], "retrieve": [], "plain": []}

    async def turn(self, number: int) -> None:
        """A new batch is stored, looked up and retrieved; then the same bytes are copied once, plainly."""
        hashes, place = _hashes(self._sizes.copy_batch, salt=number), number % _L1_BATCHES
        session = f"c{number}"
        with self._measured("store"):
            await self.store(number, hashes, place)
        self._scheduler.start(session, number, hashes, prompt_tokens=len(hashes) * CHUNK_TOKENS + 1)
        outcome = await self._scheduler.wait(session, number)
        assert outcome.best == len(hashes)
        with self._measured("retrieve"):
            await self.retrieve(session, number, hashes, place)
        self._scheduler.end(session)
        source, target = self._sources[place], self._targets[place]
        assert np.array_equal(np.asarray(source), np.asarray(target)), "what was retrieved is what was stored"
        with self._measured("plain"):
            for page in self.pages:
                target[page] = source[page]

    @property
    def pages(self) -> list[slice]:
        size = self._sizes.copy_bytes
        return [slice(size * index, size * (index + 1)) for index in range(self._sizes.copy_batch)]

    @abstractmethod
    async def store(self, number: int, hashes: Sequence[bytes], place: int) -> None:
        """Store the batch from the source buffer at `place`."""

    @abstractmethod
    async def retrieve(self, session: str, generation: int, hashes: Sequence[bytes], place: int) -> None:
        """Retrieve it into the target buffer at `place`."""

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        seconds, cpu = time.perf_counter(), time.process_time() + cpu_seconds(self._pid)
        yield
        spent = time.process_time() + cpu_seconds(self._pid) - cpu
        self.costs[name].append(_Cost(time.perf_counter() - seconds, spent))


class _ByWorker(_Turns):
    """The worker copies through the server's shared memory."""

    def __init__(self, link: ServerLink, pid: int, sizes: Sizes) -> None:
        size = sizes.copy_bytes * sizes.copy_batch
        super().__init__(link, pid, sizes, [_private(size) for _ in range(2 * _L1_BATCHES)])

    async def store(self, number: int, hashes: Sequence[bytes], place: int) -> None:
        tag = self.worker.tag(number)
        grants = await self.worker.reserve_store(tag, [StoreCell(0, chunk_hash) for chunk_hash in hashes])
        for page, grant in zip(self.pages, grants, strict=True):
            assert grant is not None
            grant.view[:] = self._sources[place][page]
        await self.worker.commit_store(tag, [True] * len(hashes))

    async def retrieve(self, session: str, generation: int, hashes: Sequence[bytes], place: int) -> None:
        cells = [LoadCell(0, index, chunk_hash) for index, chunk_hash in enumerate(hashes)]
        grants = await self.worker.open_read(session, generation, cells)
        for page, grant in zip(self.pages, grants, strict=True):
            assert grant is not None
            self._targets[place][page] = grant.view
        assert all(await self.worker.close_read(session, generation, cells))


class _ByServer(_Turns):
    """The server copies from and to the worker's shared pages: a null block, then a block per cell and buffer."""

    def __init__(self, link: ServerLink, pid: int, sizes: Sizes) -> None:
        size, batch = sizes.copy_bytes, sizes.copy_batch
        self._shared = SharedPages(size * (1 + 2 * _L1_BATCHES * batch))
        buffer = self._shared.buffer
        _fill_with_noise(buffer)
        cuts = [slice(size * (1 + n * batch), size * (1 + (n + 1) * batch)) for n in range(2 * _L1_BATCHES)]
        super().__init__(link, pid, sizes, [buffer[cut] for cut in cuts])
        self._device = ThreadCopyEngine(asyncio.get_running_loop(), "bench")
        pages = np.frombuffer(buffer, dtype=np.uint8).reshape(-1, size)
        self.worker.pages.share(describe(self._shared.segment, buffer, [pages]))

    def _block(self, buffer: int, index: int) -> list[int]:
        return [1 + buffer * self._sizes.copy_batch + index]

    async def store(self, number: int, hashes: Sequence[bytes], place: int) -> None:
        cells = [PageCell(StoreCell(0, each), self._block(place, index)) for index, each in enumerate(hashes)]
        gate = self._device.submit((), stream="store")
        await self._all(self.worker.pages.store(self.worker.tag(number), cells, "", gate))

    async def retrieve(self, session: str, generation: int, hashes: Sequence[bytes], place: int) -> None:
        place += _L1_BATCHES
        cells = [PageCell(LoadCell(0, index, each), self._block(place, index)) for index, each in enumerate(hashes)]
        gate = self._device.submit((), stream="load")
        await self._all(self.worker.pages.load(session, generation, cells, gate))

    @staticmethod
    async def _all(tickets: Sequence[PageTicket]) -> None:
        for ticket in tickets:
            await ticket.wait()
            assert ticket.error is None, ticket.error

    def close(self) -> None:
        self._device.close()
        self._shared.close()


def _fill_with_noise(buffer: memoryview) -> None:
    """Touched, and different everywhere, so that a copy to or from a wrong place shows."""
    words = np.frombuffer(buffer, dtype=np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _private(size: int) -> memoryview:
    """Touched, and at the beginning of a page, as L1 and the tensors of an engine are."""
    buffer = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    buffer[:] = bytes(size)
    return buffer


def _copies(directory: Path, sizes: Sizes, transfer: Transfer) -> dict[str, Any]:
    layout, namespace = _layout(cell_bytes=sizes.copy_bytes)

    async def rounds(address: str, pid: int) -> dict[str, list[_Cost]]:
        config = RemoteConfig((address,), transfer=transfer)
        link = ServerLink(asyncio.get_running_loop(), config, namespace, layout)
        copier = _ByServer(link, pid, sizes) if transfer == "server" else _ByWorker(link, pid, sizes)
        warm = _L1_BATCHES + 1  # these touch all of L1, so that no page is new afterwards
        for turn in range(warm + sizes.rounds):
            await copier.turn(turn + 1)
        link.close()
        if isinstance(copier, _ByServer):
            copier.close()
        return {name: costs[warm:] for name, costs in copier.costs.items()}

    with server(directory, _L1_BATCHES * sizes.copy_bytes * sizes.copy_batch) as (address, pid):
        costs = asyncio.run(rounds(address, pid))
    total = sizes.copy_bytes * sizes.copy_batch
    how = "by the server from and to shared pages" if transfer == "server" else "by the worker through shared memory"
    found: dict[str, Any] = {
        "what": f"{sizes.copy_batch} chunks of {sizes.copy_bytes} bytes: store and retrieve {how} against a plain copy",
        "n": sizes.rounds,
    }
    for name, label in (("store", "store"), ("retrieve", "retrieve"), ("plain", "memcpy")):
        found[f"{label}_gb_per_s"] = total / median([cost.seconds for cost in costs[name]]) / 1e9
    for name in ("store", "retrieve"):
        pairs = list(zip(costs["plain"], costs[name], strict=True))
        found[f"{name}_share"] = median([plain.seconds / mine.seconds for plain, mine in pairs])
        found[f"{name}_share_cpu"] = median([plain.cpu_seconds / mine.cpu_seconds for plain, mine in pairs])
    return found

"""The disk stores beside plain system calls, and beside another cache's `fs` adapter, in the same run.

What is compared, all on one file system, with buffers and pages that have been touched before:

    slab        one `pwritev` or `preadv` per object on one preallocated file
    fs, file    a temporary file, `writev`, rename; open and `preadv`

The adapters do that plus lookups in their indexes, envelopes, a checksum of every byte in both directions, the way into
threads and back, and notices. Seven pairs are taken in turns, each side in turn first; the figure is the ratio of the
medians, plain over adapter: 1.0 is as fast as the plain calls. What becomes of a bar that is missed: `conftest.py`.
Processor seconds are shown beside the plain calls as well: they say what the work costs, also on a machine where others
run, but not what a second core gains. The checksum alone is a third of a plain call that finds its pages in memory. The
collector of garbage is set as `kvcore serve` sets it.

The other cache is LMCache 0.5.6, in an environment of its own: `make bench-peers` makes `.venv-peers`, or
KVCORE_PEERS_PYTHON names an interpreter. Without it that comparison is skipped in one loud line.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from kvcore.bench.figures import median
from kvcore.keys import ObjectKey
from kvcore.l2 import fs, slab
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.file import file_adapter
from kvcore.l2.shared import SharedAdapter
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.files import OsFiles
from kvcore.runtime.notice import EventfdNotice

pytestmark = pytest.mark.usefixtures("collector")

PAIRS = 7
COUNTS = {2 << 20: 32, 64 << 10: 512}
BARS = {("slab", 2 << 20): 0.80, ("slab", 64 << 10): 0.60, ("fs", 2 << 20): 0.80}
BAR_OVER_PEER = 1.5
PEER_PYTHON = os.environ.get("KVCORE_PEERS_PYTHON") or str(Path(__file__).parents[2] / ".venv-peers/bin/python")
PEER_PATIENCE_S = 120


def now():
    """Seconds by the clock, and of this process's work."""
    return time.perf_counter(), time.process_time()


def since(begin):
    return tuple(after - before for before, after in zip(begin, now()))


class Adapter:
    """One of our adapters on a real loop, one batch at a time."""

    def __init__(self, kind, directory, size):
        self.count = COUNTS[size]
        self.keys = [ObjectKey(number.to_bytes(32, "big"), "model", 0) for number in range(self.count)]
        self.source = [memoryview(bytearray(os.urandom(1024) * (size // 1024))) for _ in range(self.count)]
        self.target = [memoryview(bytearray(b"\xee" * size)) for _ in range(self.count)]
        self.runner = asyncio.Runner()
        self.loop = self.runner.get_loop()
        self.executor = ThreadExecutor(self.loop, 2)
        self.adapter = self._open(kind, str(directory), self.count * (size + 8192))
        self.done = asyncio.Event()
        for notice in (self.adapter.store_notice, self.adapter.load_notice):
            notice.subscribe(self.done.set)

    def _open(self, kind, directory, capacity_bytes):
        shared = {"executor": self.executor, "notice_factory": lambda: EventfdNotice(self.loop)}
        if kind == "slab":
            return slab.slab_adapter("bench", slab.SlabOptions(directory, capacity_bytes), **shared)
        if kind == "file":
            return file_adapter("bench", OsFiles(directory), clock=SystemClock(), **shared)
        backend = fs.open_backend(fs.FsOptions(directory))
        return SharedAdapter("bench", backend, *shared.values(), SystemClock())

    async def _until(self, take):
        while (result := take()) is None:
            self.done.clear()
            if (result := take()) is not None:
                break
            await self.done.wait()
        return result

    def store(self):
        async def batch():
            begin = now()
            task = self.adapter.submit_store(self.keys, self.source)
            answers = await self._until(lambda: self.adapter.pop_completed_stores().get(task))
            return since(begin), answers

        seconds, answers = self.runner.run(batch())
        assert answers == [StoreAnswer.STORED] * self.count
        return seconds

    def load(self):
        async def batch():
            begin = now()
            task = self.adapter.submit_load(self.keys, self.target)
            bits = await self._until(lambda: self.adapter.take_load(task))
            return since(begin), bits

        seconds, bits = self.runner.run(batch())
        assert bits == (1 << self.count) - 1
        return seconds

    def delete(self):
        async def gone():
            self.adapter.delete(self.keys)
            while self.adapter.work_inflight:
                self.done.clear()
                self.executor.submit(lambda: None, lambda outcome: self.done.set())
                await self.done.wait()

        self.runner.run(gone())

    def close(self):
        assert self.target == self.source or self.adapter.statistics().loads == 0
        self.adapter.close()
        self.executor.close()
        self.runner.close()


class Plain:
    """The same bytes with nothing but system calls, in this thread."""

    def __init__(self, kind, directory, ours):
        self.directory = directory
        directory.mkdir()
        self.one_file = kind == "slab"
        self.source, self.target = ours.source, ours.target
        self.size = len(self.source[0])
        self.store, self.load = (self._store_slab, self._load_slab) if self.one_file else (self._store, self._load)
        if self.one_file:
            self.fd = os.open(directory / "slab", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(self.fd, 0, self.size * len(self.source))

    def _store_slab(self):
        begin = now()
        for number, data in enumerate(self.source):
            assert os.pwritev(self.fd, [data], number * self.size) == self.size
        return since(begin)

    def _load_slab(self):
        begin = now()
        for number, data in enumerate(self.target):
            assert os.preadv(self.fd, [data], number * self.size) == self.size
        return since(begin)

    def _store(self):
        begin = now()
        for number, data in enumerate(self.source):
            temporary = f"{self.directory}/temporary-{number}"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            assert os.writev(fd, [data]) == self.size
            os.close(fd)
            os.rename(temporary, f"{self.directory}/{number}")
        return since(begin)

    def _load(self):
        begin = now()
        for number, data in enumerate(self.target):
            fd = os.open(f"{self.directory}/{number}", os.O_RDONLY)
            assert os.preadv(fd, [data], 0) == self.size
            os.close(fd)
        return since(begin)

    def delete(self):
        if not self.one_file:
            for number in range(len(self.source)):
                os.unlink(f"{self.directory}/{number}")

    def close(self):
        if self.one_file:
            os.close(self.fd)


class Peer:
    """LMCache's adapter, in its own process."""

    def __init__(self, directory, size):
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"}
        script = str(Path(__file__).with_name("peer_lmcache_fs.py"))
        self.process = subprocess.Popen(
            [PEER_PYTHON, script, str(directory), str(size), str(COUNTS[size])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout.readline() == "ready\n"

    def _ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline()), 0.0  # its work is done over there

    def store(self):
        return self._ask("store")

    def load(self):
        return self._ask("load")

    def delete(self):
        self._ask("delete")

    def close(self):
        self.process.stdin.close()
        self.process.wait(PEER_PATIENCE_S)
        self.process.stdout.close()


def one(side, operation):
    """Seconds, as `now` has them. Nothing is there before a store, everything before a load."""
    seconds = getattr(side, operation)()
    if operation == "store":
        side.delete()
    return seconds


def compare(benchmark, operation, ours, other, name, show):
    """How many times as fast as the other one ours is: by the clock, and by processor seconds where they are known."""
    for side in (ours, other):
        side.store()
        side.delete() if operation == "store" else side.load()
    times = {ours: [], other: []}

    def pair():
        for side in (ours, other) if len(times[ours]) % 2 else (other, ours):
            times[side].append(one(side, operation))

    benchmark.pedantic(pair, rounds=PAIRS)
    total_gb = len(ours.source) * len(ours.source[0]) / 1e9
    clock, work = [{side: median([both[which] for both in times[side]]) for side in times} for which in (0, 1)]
    ratio = clock[other] / clock[ours]
    speeds = [f"{total_gb / clock[side]:.2f}" for side in (ours, other)]
    benchmark.extra_info.update(ratio=round(ratio, 3), ours_gb_per_s=speeds[0], other_gb_per_s=speeds[1])
    text = f"{name}: {ratio:.2f} x ({speeds[0]} against {speeds[1]} GB/s, medians of {len(times[ours])}"
    if work[other]:
        benchmark.extra_info.update(work_ratio=round(work[other] / work[ours], 3))
        text += f"; {work[other] / work[ours]:.2f} x by processor seconds"
    with show():
        print(f"\n  {text})")
    return ratio, work[other] / work[ours] if work[other] else None


def sized(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


@pytest.mark.parametrize("size", COUNTS, ids=sized)
@pytest.mark.parametrize("operation", ["store", "load"])
@pytest.mark.parametrize("kind", ["slab", "fs", "file"])
def test_beside_plain_calls(benchmark, bar, tmp_path, capsys, kind, operation, size):
    ours = Adapter(kind, tmp_path / "store", size)
    plain = Plain(kind, tmp_path / "plain", ours)
    name = f"{kind} {operation} {sized(size)} beside plain calls"
    ratios = compare(benchmark, operation, ours, plain, name, capsys.disabled)
    ours.close()
    plain.close()
    if (kind, size) in BARS:
        bar(name, BARS[kind, size], *ratios)


@pytest.mark.parametrize("size", COUNTS, ids=sized)
@pytest.mark.parametrize("operation", ["store", "load"])
def test_beside_the_fs_adapter_of_lmcache(benchmark, bar, tmp_path, capsys, operation, size):
    if not Path(PEER_PYTHON).exists():
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn(f"{PEER_PYTHON} is missing: LMCache's fs adapter is not measured", stacklevel=1)
        pytest.skip("no environment with LMCache; `make bench-peers` makes one")
    ours, peer = Adapter("fs", tmp_path / "store", size), Peer(tmp_path / "peer", size)
    name = f"fs {operation} {sized(size)} beside LMCache's fs"
    ratios = compare(benchmark, operation, ours, peer, name, capsys.disabled)
    ours.close()
    peer.close()
    bar(name, BAR_OVER_PEER, *ratios)

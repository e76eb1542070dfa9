"""Processes that write a disk store and are killed in the middle, again and again.

    python churn.py KIND DIRECTORY CYCLES SEED [BUG]

This process has everything imported and opens nothing; each cycle is a child forked from it. A child opens the store
and looks at everything in it: what is loaded holds its key's bytes, no record is damaged (a killed process leaves
none), and the accounting equals the directory. Then it stores, loads and deletes at random until it is killed with
SIGKILL. When, the parent decides by the child's own progress, which it reads from a pipe, and a number of empty
turns: no clock is involved, and what the child's threads do at that moment is anybody's guess. A store that processes
share (`fs`) has a second writer beside the first.

The last line is a JSON object of counts. BUG plants one that must be found: `early` makes a slab record visible before
its payload is there, `lost` forgets to erase what is deleted, `unchecked` believes every payload.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path

from kvcore.l2 import envelope, fs, slab
from kvcore.l2.indexed import IndexedAdapter
from kvcore.l2.shared import SharedAdapter
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice

CONTENT = runpy.run_path(str(Path(__file__).with_name("content.py")))
KEYS = [CONTENT["key"](number) for number in range(48)]
PAYLOADS = [CONTENT["content"](number, 1 + number * 5_999) for number in range(48)]
CAPACITY_BYTES = sum(map(len, PAYLOADS)) // 2  # so that every second store evicts
BATCH = 6
OPERATIONS_MAX = 12
SPINS_MAX = 100_000  # some milliseconds


class Store:
    """An adapter of `kind`, opened; its calls wait."""

    def __init__(self, kind, directory, loop):
        self.kind = kind
        self.directory = directory
        self.executor = ThreadExecutor(loop, 2)
        shared = (self.executor, lambda: EventfdNotice(loop))
        if kind == "fs":
            backend = fs.open_backend(fs.FsOptions(directory))
            self.adapter = SharedAdapter("churn", backend, *shared, SystemClock(), CAPACITY_BYTES)
        else:
            backend = slab.open_backend(slab.SlabOptions(directory, CAPACITY_BYTES, slab_bytes=256 * 1024))
            self.adapter = IndexedAdapter("churn", backend, *shared, CAPACITY_BYTES)
        self.backend = backend
        self.wake = asyncio.Event()
        for notice in (self.adapter.store_notice, self.adapter.load_notice, self.adapter.lookup_notice):
            notice.subscribe(self.wake.set)

    async def done(self, take):
        while (result := take()) is None:
            self.wake.clear()
            await self.wake.wait()
        return result

    async def store(self, numbers):
        buffers = [memoryview(PAYLOADS[number]) for number in numbers]
        task = self.adapter.submit_store([KEYS[number] for number in numbers], buffers)
        await self.done(lambda: self.adapter.pop_completed_stores().get(task))

    async def load(self, numbers):
        """How many were there. A wrong byte ends the process with its traceback."""
        buffers = [bytearray(len(PAYLOADS[number])) for number in numbers]
        views = [memoryview(buffer) for buffer in buffers]
        task = self.adapter.submit_load([KEYS[number] for number in numbers], views)
        bits = await self.done(lambda: self.adapter.take_load(task))
        for position, number in enumerate(numbers):
            if bits >> position & 1:
                assert buffers[position] == PAYLOADS[number], f"wrong bytes under key {number}"
        return bits.bit_count()

    async def at_rest(self):
        while self.adapter.work_inflight:
            self.wake.clear()
            self.executor.submit(lambda: None, lambda outcome: self.wake.set())
            await self.wake.wait()

    def check_accounting(self):
        """What is believed to be there is there, byte for byte, and nothing else."""
        used_bytes = self.adapter.usage().bytes_used
        if self.kind == "slab":
            self.adapter.check()
            self.backend.check()
            present = [(key, len(PAYLOADS[KEYS.index(key)])) for key in [*self.adapter.keys()]]
            assert used_bytes == sum(self.backend.record_bytes(*pair) for pair in present)
        else:
            sizes = [path.stat().st_size for path in Path(self.directory).glob("??/*.kv")]
            assert used_bytes == sum(sizes), f"{used_bytes} bytes are accounted, the files hold {sum(sizes)}"
        assert used_bytes <= CAPACITY_BYTES


async def live(kind, directory, seed, say, verify):
    store = Store(kind, directory, asyncio.get_running_loop())
    await store.at_rest()
    if verify:
        store.check_accounting()
        hits = await store.load(range(len(KEYS)))
        statistics = store.adapter.statistics()
        assert statistics.defects == statistics.missing, statistics
        assert hits == statistics.objects
        say(f"v{hits}\n")
    else:
        say("v0\n")
    draws = random.Random(seed)
    while verify != "only":
        numbers = draws.sample(range(len(KEYS)), BATCH)
        say(".\n")
        what = draws.random()
        if what < 0.7:
            await store.store(numbers)
        elif what < 0.85:
            await store.load(numbers)
            statistics = store.adapter.statistics()
            assert statistics.defects == statistics.missing, statistics
        else:
            store.adapter.delete([KEYS[number] for number in numbers])
            await store.at_rest()


def fork(kind, directory, seed, verify):
    """A child, and the end of its pipe."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, os.fdopen(reader)
    code = 1
    try:
        os.close(reader)
        asyncio.run(live(kind, directory, seed, lambda text: os.write(writer, text.encode()), verify))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def kill(child, pipe):
    """The pipe stays open until the child is gone: one that still writes would meet a broken pipe, and say so."""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    pipe.close()
    assert os.WIFSIGNALED(status), "the child ended by itself; its traceback says why"


def progress(pipe):
    line = pipe.readline()
    assert line, "the child ended by itself; its traceback says why"
    return line.strip()


def plant(bug):
    write_grouped = slab.SlabBackend._write_grouped
    steps = threading.local()

    def entries_first(self, jobs, results, neighbours, write, undo):
        if write == self._write_payloads:
            steps.payloads = (write, undo)
            good = write_grouped(self, jobs, results, slab.entry_neighbours, self._write_entries, undo)
            for _ in range(SPINS_MAX):  # a window wide enough for a few dozen kills to hit it
                pass
            return good
        return write_grouped(self, jobs, results, self._neighbours, *steps.payloads)

    if bug == "early":
        slab.SlabBackend._write_grouped = entries_first
    elif bug == "lost":
        slab.SlabBackend._erase = lambda self, record: None
    elif bug == "unchecked":
        plant("early")
        envelope.payload_matches = lambda header, payload: True


def main():
    kind, directory, cycles, seed, *bug = sys.argv[1:]
    plant(*bug or [""])
    draws = random.Random(int(seed))
    verified = operations = 0
    for _ in range(int(cycles)):
        children = [fork(kind, directory, draws.random(), True)]
        verified += int(progress(children[0][1])[1:])
        if kind == "fs":
            children.append(fork(kind, directory, draws.random(), False))
            progress(children[1][1])
        for _ in range(draws.randrange(OPERATIONS_MAX)):
            progress(children[-1][1])
            operations += 1
        for _ in range(draws.randrange(SPINS_MAX)):
            pass
        for child in children:
            kill(*child)
    child, pipe = fork(kind, directory, 0, "only")
    verified += int(progress(pipe)[1:])
    _, status = os.waitpid(child, 0)
    assert status == 0
    print(json.dumps({"cycles": int(cycles), "verified": verified, "operations": operations}))


if __name__ == "__main__":
    main()

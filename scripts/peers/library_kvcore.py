"""kvcore's half of the comparison of libraries: PYTHON library_kvcore.py DIRECTORY (see library.py)."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import inputs

from kvcore.bitmap import ones
from kvcore.eviction import LruPolicy
from kvcore.groups import CacheLayout, GroupKind, ObjectGroup
from kvcore.keys import ChunkHasher, Namespace, ObjectKey
from kvcore.l1 import L1Cache
from kvcore.l2 import fs, slab
from kvcore.l2.adapter import StoreAnswer
from kvcore.l2.shared import SharedAdapter
from kvcore.leases import Owner
from kvcore.memory import PlainArena
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice

READER = Owner("reader", 1, "read")
FOREVER_NS = 1 << 60


def _keys(count: int) -> list[ObjectKey]:
    return [ObjectKey(chunk_hash, inputs.MODEL, 0) for chunk_hash in inputs.chunk_hashes(count)]


class Files:
    """An adapter on a real loop with two threads, a batch at a time."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._keys = _keys(inputs.FILES)
        self._source = [memoryview(bytearray([7 + n]) * inputs.FILE_BYTES) for n in range(inputs.FILES)]
        self._target = [memoryview(bytearray(b"\xee") * inputs.FILE_BYTES) for _ in range(inputs.FILES)]
        self._runner = asyncio.Runner()
        loop = self._runner.get_loop()
        self._executor = ThreadExecutor(loop, 2)
        self._adapter = self._open(kind, str(directory / kind), loop)
        self._done = asyncio.Event()
        self._adapter.store_notice.subscribe(self._done.set)
        self._adapter.load_notice.subscribe(self._done.set)

    def _open(self, kind: str, directory: str, loop: asyncio.AbstractEventLoop) -> Any:
        notices = partial(EventfdNotice, loop)
        if kind == "slab":
            options = slab.SlabOptions(directory, inputs.FILES * (inputs.FILE_BYTES + 8192))
            return slab.slab_adapter("bench", options, executor=self._executor, notice_factory=notices)
        backend = fs.open_backend(fs.FsOptions(directory))
        return SharedAdapter("bench", backend, self._executor, notices, SystemClock())

    async def _until(self, take: Callable[[], Any]) -> Any:
        while (result := take()) is None:
            self._done.clear()
            if (result := take()) is not None:
                break
            await self._done.wait()
        return result

    def store(self) -> dict[str, float]:
        async def batch() -> None:
            task = self._adapter.submit_store(self._keys, self._source)
            answers = await self._until(lambda: self._adapter.pop_completed_stores().get(task))
            assert answers == [StoreAnswer.STORED] * inputs.FILES

        return inputs.timed(lambda: self._runner.run(batch()), 1)

    def load(self) -> dict[str, float]:
        async def batch() -> None:
            task = self._adapter.submit_load(self._keys, self._target)
            assert await self._until(lambda: self._adapter.take_load(task)) == ones(inputs.FILES)

        found = inputs.timed(lambda: self._runner.run(batch()), 1)
        assert self._target == self._source
        return found

    def delete(self) -> None:
        async def gone() -> None:
            self._adapter.delete(self._keys)
            while self._adapter.work_inflight:
                self._done.clear()
                self._executor.submit(lambda: None, lambda outcome: self._done.set())
                await self._done.wait()

        self._runner.run(gone())

    def close(self) -> None:
        self._adapter.close()
        self._executor.close()
        self._runner.close()


class Kvcore:
    """The commands, by name."""

    def __init__(self, directory: Path) -> None:
        self._tokens = inputs.tokens()
        self._hasher = ChunkHasher(Namespace(inputs.MODEL, chunk_tokens=inputs.CHUNK_TOKENS))
        full = ObjectGroup(GroupKind.FULL, 16, 4096)
        window = ObjectGroup(GroupKind.WINDOW, 16, 4096, inputs.WINDOW_CHUNKS * inputs.CHUNK_TOKENS)
        self._layout = CacheLayout((full, window), inputs.ROWS // 2, inputs.CHUNK_TOKENS)
        self._l1 = L1Cache(PlainArena(512 * inputs.OBJECT_BYTES), LruPolicy)
        self._files = {kind: Files(kind, directory) for kind in ("fs", "slab")}

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("kvcore", "blake3", "numpy", "pyzmq")} | {
            "python": sys.version.split()[0]
        }

    def hashes(self, times: int) -> dict[str, float]:
        return inputs.timed(lambda: self._hasher.hash_tokens(self._tokens), times)

    def fold(self, name: str, times: int) -> dict[str, float]:
        rows = [ones(inputs.CHUNKS) & ~(0 if hole is None else 1 << hole) for hole in inputs.holes(name)]
        prompt = inputs.CHUNKS * inputs.CHUNK_TOKENS + 1

        def decide() -> list[int]:
            length = self._layout.best(self._layout.fold(rows, inputs.CHUNKS, prompt))
            return self._layout.unfold(length, prompt)

        kept = [mask.bit_count() for mask in decide()]
        return {**inputs.timed(decide, times), "kept": sum(kept), "length": max(kept)}

    def cycle(self, batch: int, times: int) -> dict[str, float]:
        keys = _keys(batch)
        l1 = self._l1

        def cycle() -> None:
            l1.reserve_write("w", keys, inputs.OBJECT_BYTES, deadline_ns=FOREVER_NS)
            l1.finish_write("w", keys)
            l1.reserve_read(READER, keys, deadline_ns=FOREVER_NS)
            l1.finish_read(READER, keys)
            l1.delete(keys)

        before = l1.statistics().published
        found = inputs.timed(cycle, times)
        assert l1.statistics().published - before == batch * times
        return found

    def file(self, way: str) -> dict[str, float]:
        return self._disk("fs", way)

    def slab(self, way: str) -> dict[str, float]:
        return self._disk("slab", way)

    def _disk(self, kind: str, way: str) -> dict[str, float]:
        files = self._files[kind]
        if way == "store":
            files.delete()
        found: dict[str, float] = getattr(files, way)()
        return found

    def memory(self) -> dict[str, float]:
        """Bytes per object of a process whose arena was touched before."""
        l1 = L1Cache(PlainArena(inputs.MEMORY_OBJECTS * inputs.OBJECT_BYTES), LruPolicy)
        names = _keys(64)
        l1.reserve_write("w", names, inputs.MEMORY_OBJECTS // 64 * inputs.OBJECT_BYTES)
        for key in names:
            (slot,) = l1.hold_write("", "w", [key])
            assert slot is not None
            l1.view(slot)[:] = bytes(len(l1.view(slot)))
            l1.unhold("", [slot])
        l1.abort_write("w", names)
        gc.collect()
        before = inputs.resident_bytes()
        for start in range(0, inputs.MEMORY_OBJECTS, 64):
            hashes = inputs.chunk_hashes(inputs.MEMORY_OBJECTS)[start : start + 64]
            keys = [ObjectKey(chunk_hash, inputs.MODEL, 0) for chunk_hash in hashes]
            l1.reserve_write("w", keys, inputs.OBJECT_BYTES)
            l1.finish_write("w", keys)
        gc.collect()
        assert l1.statistics().objects_resident == inputs.MEMORY_OBJECTS
        return {"bytes": (inputs.resident_bytes() - before) / inputs.MEMORY_OBJECTS}

    def close(self) -> None:
        for files in self._files.values():
            files.close()


if __name__ == "__main__":
    sys.exit(inputs.serve(lambda: Kvcore(Path(sys.argv[1]))))

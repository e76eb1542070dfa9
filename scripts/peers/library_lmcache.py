"""LMCache's half of the comparison of libraries: PYTHON library_lmcache.py DIRECTORY (see library.py).

Its own classes and functions, called as its server calls them. Runs where kvcore is not installed.
"""

from __future__ import annotations

import gc
import select
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import inputs
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.bitmap_ops import fold_unfold_grouped
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.token_hasher import TokenHasher

LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([inputs.OBJECT_BYTES])], dtypes=[torch.uint8])


def _keys(count: int) -> list:
    return [ObjectKey(chunk_hash, inputs.MODEL, 0) for chunk_hash in inputs.chunk_hashes(count)]


def _manager(objects: int) -> Any:
    memory = L1MemoryManagerConfig(
        objects * inputs.OBJECT_BYTES, use_lazy=False, align_bytes=inputs.OBJECT_BYTES, shm_name=""
    )
    return L1Manager(L1ManagerConfig(memory))


def _objects(first: int) -> list:
    made = []
    for number in range(inputs.FILES):
        data = torch.full((inputs.FILE_BYTES,), first + number, dtype=torch.uint8)
        metadata = MemoryObjMetadata(
            data.shape, data.dtype, 0, inputs.FILE_BYTES, 1, shapes=[torch.Size(data.shape)], dtypes=[torch.uint8]
        )
        made.append(TensorMemoryObj(data, metadata, None))
    return made


class Lmcache:
    """The commands, by name."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self._tokens = inputs.tokens()
        self._hasher = TokenHasher(inputs.CHUNK_TOKENS)
        self._manager = _manager(512)
        self._adapter = FSL2Adapter(FSL2AdapterConfig(str(directory / "lmcache")))
        self._names = _keys(inputs.FILES)
        self._source, self._target = _objects(7), _objects(100)

    def versions(self) -> dict:
        found = {name: version(name) for name in ("lmcache", "torch", "blake3", "numpy", "pyzmq")}
        return found | {"python": sys.version.split()[0]}

    def hashes(self, times: int) -> dict:
        return inputs.timed(lambda: self._hasher.compute_chunk_hashes(self._tokens), times)

    def fold(self, name: str, times: int) -> dict:
        rows = [Bitmap(inputs.CHUNKS, inputs.CHUNKS) for _ in range(inputs.ROWS)]
        for row, hole in zip(rows, inputs.holes(name), strict=True):
            if hole is not None:
                row.clear(hole)
        windows = [-1, inputs.WINDOW_CHUNKS] * (inputs.ROWS // 2)
        length, kept = fold_unfold_grouped(rows, windows)
        found = inputs.timed(lambda: fold_unfold_grouped(rows, windows), times)
        return {**found, "kept": sum(row.popcount() for row in kept), "length": length}

    def cycle(self, batch: int, times: int) -> dict:
        keys, durable, manager = _keys(batch), [False] * batch, self._manager

        def cycle() -> None:
            manager.reserve_write(keys, durable, LAYOUT, "w")
            manager.finish_write(keys, "w")
            manager.reserve_read(keys)
            manager.finish_read(keys)
            manager.delete(keys)

        return inputs.timed(cycle, times)

    def file(self, way: str) -> dict:
        if way == "store":
            self._adapter.delete(self._names)
        return inputs.timed(getattr(self, f"_{way}"), 1)

    def slab(self, way: str) -> dict:
        """It has one way to write files; kvcore's other one is put beside it once more."""
        return self.file(way)

    def _store(self) -> None:
        task = self._adapter.submit_store_task(self._names, self._source)
        while task not in (done := self._adapter.pop_completed_store_tasks()):
            select.select([self._adapter.get_store_event_fd()], [], [])
        assert int(done[task]) == inputs.FILES * inputs.FILE_BYTES

    def _load(self) -> None:
        task = self._adapter.submit_load_task(self._names, self._target)
        while (bits := self._adapter.query_load_result(task)) is None:
            select.select([self._adapter.get_load_event_fd()], [], [])
        assert bits.popcount() == inputs.FILES
        assert all(a.raw_data[0] == b.raw_data[0] for a, b in zip(self._source, self._target, strict=True))

    def memory(self) -> dict:
        """Bytes per object of a process whose memory was touched before."""
        manager = _manager(inputs.MEMORY_OBJECTS)
        touched = manager.reserve_write(names := _keys(64), [False] * 64, _large(), "w")
        for _, memory in touched.values():
            memory.raw_data.fill_(1)
        manager.finish_write_and_delete(names, "w")
        del touched
        gc.collect()
        before = inputs.resident_bytes()
        for start in range(0, inputs.MEMORY_OBJECTS, 64):
            hashes = inputs.chunk_hashes(inputs.MEMORY_OBJECTS)[start : start + 64]
            keys = [ObjectKey(chunk_hash, inputs.MODEL, 0) for chunk_hash in hashes]
            manager.reserve_write(keys, [False] * len(keys), LAYOUT, "w")
            manager.finish_write(keys, "w")
        gc.collect()
        assert manager.report_status()["total_object_count"] == inputs.MEMORY_OBJECTS
        return {"bytes": (inputs.resident_bytes() - before) / inputs.MEMORY_OBJECTS}

    def close(self) -> None:
        self._adapter.close()
        self._manager.close()


def _large() -> Any:
    size = inputs.MEMORY_OBJECTS // 64 * inputs.OBJECT_BYTES
    return MemoryLayoutDesc(shapes=[torch.Size([size])], dtypes=[torch.uint8])


if __name__ == "__main__":
    sys.exit(inputs.serve(lambda: Lmcache(Path(sys.argv[1]))))

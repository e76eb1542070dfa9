"""Drives the `fs` adapter of LMCache with LMCache's own classes. The other half of `test_bench_disk.py`.

    PYTHON-WITH-LMCACHE peer_lmcache_fs.py DIRECTORY SIZE COUNT

One command a line (`store`, `load`, `delete`) comes in on stdin, the seconds it took go out on stdout. Runs in an
environment of its own, where kvcore is not installed; what the library prints goes to stderr. The objects are LMCache's
tensor objects on memory that has been touched, as its own L1 would hand them over; each load is checked.
"""

from __future__ import annotations

import os
import select
import sys
import time

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj


def objects(size, count, value):
    made = []
    for number in range(count):
        data = torch.full((size,), (value + number) % 251, dtype=torch.uint8)
        metadata = MemoryObjMetadata(
            data.shape, data.dtype, 0, size, 1, shapes=[torch.Size(data.shape)], dtypes=[torch.uint8]
        )
        made.append(TensorMemoryObj(data, metadata, None))
    return made


class Peer:
    def __init__(self, directory, size, count):
        self.adapter = FSL2Adapter(FSL2AdapterConfig(directory))
        self.keys = [ObjectKey(number.to_bytes(32, "big"), "model", 0) for number in range(count)]
        self.source, self.target = objects(size, count, 7), objects(size, count, 8)

    def store(self):
        begin = time.perf_counter()
        task = self.adapter.submit_store_task(self.keys, self.source)
        while task not in (done := self.adapter.pop_completed_store_tasks()):
            select.select([self.adapter.get_store_event_fd()], [], [])
        seconds = time.perf_counter() - begin
        assert int(done[task]) == sum(len(item.byte_array) for item in self.source)
        return seconds

    def load(self):
        begin = time.perf_counter()
        task = self.adapter.submit_load_task(self.keys, self.target)
        while (bits := self.adapter.query_load_result(task)) is None:
            select.select([self.adapter.get_load_event_fd()], [], [])
        seconds = time.perf_counter() - begin
        assert len(bits.get_indices_list()) == len(self.keys)
        assert all(a.raw_data[0] == b.raw_data[0] for a, b in zip(self.source, self.target, strict=True))
        return seconds

    def delete(self):
        self.adapter.delete(self.keys)
        return 0.0


def main():
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library may print
    peer = Peer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    replies.write("ready\n")
    for line in sys.stdin:
        replies.write(f"{getattr(peer, line.strip())()}\n")
    peer.adapter.close()


if __name__ == "__main__":
    main()

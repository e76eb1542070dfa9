"""Who moves the bytes of a `CheckedCopy` on the host: the compiled kernels, or torch where they were not built.

Both give the same bytes (tests/device). `cpu_mover` picks: the library if it is there and speaks our version, else
torch.

A mover is called in the thread of a stream. Who holds: the submitter, pages and chunks, until the call has returned.
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

import numpy as np

from kvcore.device import reference
from kvcore.device.discover import PagedKV
from kvcore.device.native import CopyBatch, CpuKernels, PlaneTable
from kvcore.device.paged import Bytes, CheckedCopy, Direction
from kvcore.errors import ConfigError


class Mover(Protocol):
    """`name` is for reports."""

    name: str

    def move(self, copy: CheckedCopy) -> None:
        """Carry it out; every byte is in place on return."""
        ...


class NativeMover:
    """The compiled kernels. `threads` share one batch; small batches take fewer."""

    name = "native"

    def __init__(self, kernels: CpuKernels, threads: int = 0) -> None:
        self._kernels = kernels
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._tables = PlaneTables()

    def move(self, copy: CheckedCopy) -> None:
        batch = batch_of(copy, self._tables.of(copy.kv))
        run = self._kernels.gather if copy.direction is Direction.GATHER else self._kernels.scatter
        run(batch, self._threads)


class TorchMover:
    """Plain torch indexing (`reference.py`)."""

    name = "torch"

    def move(self, copy: CheckedCopy) -> None:
        from_numpy = reference.import_torch().from_numpy
        chunks = [from_numpy(writable(chunk)) for chunk in copy.chunks]
        if copy.direction is Direction.GATHER:
            reference.gather(copy.kv, copy.block_ids, chunks)
        else:
            skip = None if copy.skip_tokens is None else copy.skip_tokens.tolist()
            reference.scatter(copy.kv, copy.block_ids, chunks, skip)


class PlaneTables:
    """The kernels' form of each registered KV. Kept while the KV is: a handful of registrations and layer slices."""

    def __init__(self) -> None:
        self._tables: dict[PagedKV, PlaneTable] = {}

    def of(self, kv: PagedKV) -> PlaneTable:
        known = self._tables.get(kv)
        if known is None:
            known = self._tables[kv] = PlaneTable(kv.planes)
        return known


def batch_of(copy: CheckedCopy, table: PlaneTable) -> CopyBatch:
    return CopyBatch(table, copy.block_ids, copy.addresses, copy.chunk_bytes, skip_tokens=copy.skip_tokens)


def cpu_mover(threads: int = 0) -> Mover:
    """The fastest that works here."""
    try:
        return NativeMover(CpuKernels(), threads)
    except ConfigError:
        return TorchMover()


def writable(chunk: Bytes) -> Bytes:
    """torch warns about read-only memory although a scatter only reads it: the same bytes, not marked."""
    if chunk.flags.writeable:
        return chunk
    unmarked = (ctypes.c_char * chunk.nbytes).from_address(chunk.ctypes.data)  # the submitter keeps `chunk` alive
    same: Bytes = np.frombuffer(memoryview(unmarked), dtype=np.uint8)
    return same

"""The compiled copies as the tests use them: every backend behind one face, built from the sources in the tree.

The tests of native copies load it by its path, in this process and in those that run under a sanitizer. There,
KVCORE_TEST_SANITIZER names the sanitizer, KVCORE_TEST_KERNELS the folder of the sources (with a planted bug) and
KVCORE_TEST_BACKEND the only backend that is wanted.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.device.native import WORKSPACE_ALIGN_BYTES, CopyBatch, CpuKernels, CudaCall, CudaKernels, PlaneTable
from kvcore.device.planes import KVPlanes, Plane

ROOT = Path(__file__).resolve().parents[2]
SANITIZER = os.environ.get("KVCORE_TEST_SANITIZER", "")
KERNELS = Path(os.environ.get("KVCORE_TEST_KERNELS", ROOT / "kernels"))
ONLY = os.environ.get("KVCORE_TEST_BACKEND", "")
POISON = 0xA5
_LIBC = ctypes.CDLL(None)


@cache
def script() -> ModuleType:
    """scripts/kernels.py."""
    specification = importlib.util.spec_from_file_location("kvcore_kernels_script", ROOT / "scripts" / "kernels.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def library(source: str, *, small: bool) -> Path:
    built: Path = script().build_for_tests(source, sanitizer=SANITIZER, small=small, sources=KERNELS)
    return built


class Memory:
    """Exactly so many bytes, `shift` behind a 64-byte boundary: under AddressSanitizer their ends are guarded."""

    def __init__(self, size: int, shift: int = 0) -> None:
        start = ctypes.c_void_p()
        failed = _LIBC.posix_memalign(ctypes.byref(start), ctypes.c_size_t(64), ctypes.c_size_t(shift + size))
        assert not failed
        assert start.value
        self._start = start
        self.address = start.value + shift
        self.bytes = np.ctypeslib.as_array(ctypes.cast(self.address, ctypes.POINTER(ctypes.c_uint8)), (size,))
        self.bytes[:] = POISON

    def __del__(self) -> None:
        _LIBC.free(self._start)


Copy = Callable[[CopyBatch], None]


@dataclass(frozen=True, slots=True)
class Backend:
    """`gather` and `scatter` are over when they return."""

    gather: Copy
    scatter: Copy


def cpu(threads: int, *, small: bool) -> Backend:
    kernels = CpuKernels(library("copy_cpu.cpp", small=small))
    return Backend(lambda batch: kernels.gather(batch, threads), lambda batch: kernels.scatter(batch, threads))


class Emulated:
    """The CUDA source on the CPU. `order`: 0, or a seed for the order of blocks and threads."""

    def __init__(self, *, small: bool, order: int = 0, grid_max: int = 0, direct: bool = False) -> None:
        path = library("emulated.cpp", small=small)
        self.kernels = CudaKernels(path)
        self._library = ctypes.CDLL(str(path))
        self._order = order
        self._grid_max = grid_max
        self._direct = direct
        self.processors = 2

    def gather(self, batch: CopyBatch) -> None:
        self._run(self.kernels.gather, batch, scatter=False)

    def scatter(self, batch: CopyBatch) -> None:
        self._run(self.kernels.scatter, batch, scatter=True)

    def statistics(self) -> dict[str, int]:
        """Since the last call."""
        found = (ctypes.c_int64 * 5)()
        self._library.kvcore_emulation_statistics(found)
        return dict(zip(("launches", "blocks", "threads", "loads", "stores"), found, strict=True))

    def _run(self, kernel: Callable[[CopyBatch, CudaCall], None], batch: CopyBatch, *, scatter: bool) -> None:
        self._library.kvcore_emulation_set(ctypes.c_uint64(self._order), self.processors)
        if self._direct:
            self.kernels.direct(batch, CudaCall(0, 0), scatter=scatter)
            return
        size = self.kernels.workspace_bytes(batch)
        host, device = Memory(size), Memory(size)
        assert host.address % WORKSPACE_ALIGN_BYTES == 0
        kernel(batch, CudaCall(0, 0, host.address, device.address, size, self._grid_max))


def _emulated(**options: Any) -> Backend:
    made = Emulated(**options)
    return Backend(made.gather, made.scatter)


_MAKERS: dict[str, Callable[[], Backend]] = {
    "cpu": lambda: cpu(1, small=False),
    "cpu, small": lambda: cpu(1, small=True),
    "cpu, small, threads": lambda: cpu(3, small=True),
    "kernel": lambda: _emulated(small=False),
    "kernel, small": lambda: _emulated(small=True),
    "kernel, small, any order": lambda: _emulated(small=True, order=20251129, grid_max=3),
    "direct": lambda: _emulated(small=True, direct=True),
}


def backends() -> dict[str, Backend]:
    """All of them, or the one that is asked for; those with `small` in the name take every path with few bytes."""
    return {name: make() for name, make in _MAKERS.items() if ONLY in {"", name}}


@dataclass(frozen=True, slots=True)
class Pages:
    """Planes in memory of their own, and the truth about them: strided views made by numpy."""

    planes: KVPlanes
    memory: list[Memory]
    views: list[npt.NDArray[Any]]  # [blocks, outer, tokens, run]


def chunks_of(count: int, size: int, shift: int = 0) -> list[Memory]:
    return [Memory(size, shift) for _ in range(count)]


def batch_of(planes: KVPlanes, ids: npt.ArrayLike, chunks: Sequence[Memory], **more: Any) -> CopyBatch:
    addresses = [chunk.address for chunk in chunks]
    return CopyBatch(PlaneTable(planes), ids, addresses, len(chunks[0].bytes), **more)


def pages_of(planes: Sequence[Plane], num_blocks: int, block_tokens: int, seed: int) -> Pages:
    """Memory for planes whose `base` is how far behind a 64-byte boundary they begin; filled with noise."""
    source = np.random.default_rng(seed)
    memory, views, placed = [], [], []
    for plane in planes:
        size = (num_blocks - 1) * plane.block_stride_bytes + _reach_bytes(plane)
        memory.append(Memory(size, plane.base))
        memory[-1].bytes[:] = source.integers(0, 256, size, np.uint8)
        shape = (num_blocks, plane.outer_count, plane.tokens, plane.run_bytes)
        strides = (plane.block_stride_bytes, plane.outer_stride_bytes, plane.token_stride_bytes, 1)
        views.append(np.lib.stride_tricks.as_strided(memory[-1].bytes, shape, strides))
        placed.append(_at(plane, memory[-1].address))
    return Pages(KVPlanes(tuple(placed), num_blocks, block_tokens), memory, views)


def _reach_bytes(plane: Plane) -> int:
    """From a block's first byte to behind its last."""
    return plane.address(0, plane.outer_count - 1, plane.tokens - 1) - plane.address(0) + plane.run_bytes


def _at(plane: Plane, base: int) -> Plane:
    fields = {name: getattr(plane, name) for name in Plane.__slots__}
    return Plane(**{**fields, "base": base})


def gathered(pages: Pages, row: Sequence[int]) -> npt.NDArray[np.uint8]:
    """The chunk that a gather of these blocks must give."""
    return np.concatenate([view[list(row)].reshape(-1) for view in pages.views])


def scattered(pages: Pages, row: Sequence[int], chunk: npt.NDArray[np.uint8], skip: int) -> None:
    """Write the chunk into the pages token by token, as a scatter must."""
    at, tokens = 0, pages.planes.block_tokens
    for view in pages.views:
        for number, block in enumerate(row):
            share = chunk[at : at + view[0].size].reshape(view[0].shape)
            at += view[0].size
            left = min(max(skip - number * tokens, 0), tokens) * view.shape[2] // tokens
            view[block][:, left:] = share[:, left:]

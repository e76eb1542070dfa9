"""The compiled CPU copies beside memcpy and torch.

Bars: 85 % of memcpy of the same bytes for blocks of 32 KiB and more; never slower than the best form torch has, for
16-token blocks of a Llama-3.1-8B-like layout.

All forms of one case move the same bytes in turns, in one process; the best round of each counts. memcpy moves them as
one dense piece, in as many threads as the others have. One thread is timed by its processor time, which a busy machine
stretches less. torch has its best forms: `index_select(out=)` for a gather,
`index_copy_` and indexing for a scatter. The bars are asserted when the run asks for it with `--benchmark-only`.

Llama-3.1-8B: 32 layers, 8 KV heads of 128, 2 bytes each: a block of 16 tokens has 32 KiB per layer in K and as much
in V.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="NOT MEASURED: the best torch forms are what the copies are compared with")

from kvcore.device.native import CopyBatch, CpuKernels, PlaneTable, find_library  # noqa: E402
from kvcore.device.planes import KVPlanes, Plane  # noqa: E402

if find_library("libkvcore_copy.so") is None:
    pytest.skip("NOT MEASURED: kvcore was built without its compiled copies", allow_module_level=True)

ROUNDS = 9
MEMCPY_SHARE_MIN = 0.85
BLOCK_TOKENS = 16
_MEMMOVE = ctypes.CDLL(None).memmove
_MEMMOVE.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class Case:
    """`share_bytes`: of a block in one plane."""

    layers: int
    blocks: int
    share_bytes: int
    chunks: int
    blocks_per_chunk: int = 16


CASES = {
    "32 KiB (Llama-3.1-8B), 4 chunks": Case(32, 128, 32 << 10, 4),
    "32 KiB (Llama-3.1-8B), 1 chunk": Case(32, 128, 32 << 10, 1),
    "128 KiB": Case(8, 128, 128 << 10, 4),
    "1 MiB": Case(2, 64, 1 << 20, 2),
}


class Stage:
    """Pages and chunks of a case, and everything that can move the bytes between them."""

    def __init__(self, case: Case, threads: int) -> None:
        self.case, self.threads = case, threads
        source = np.random.default_rng(7)
        made = [
            torch.randint(0, 255, (2, case.blocks, case.share_bytes), dtype=torch.uint8) for _ in range(case.layers)
        ]
        self.parts = [pages[part].view(torch.int16) for pages in made for part in (0, 1)]
        run = case.share_bytes // BLOCK_TOKENS
        planes = [Plane(part.data_ptr(), case.share_bytes, 1, 0, BLOCK_TOKENS, run, run) for part in self.parts]
        table = PlaneTable(KVPlanes(tuple(planes), case.blocks, BLOCK_TOKENS))
        ids = source.permutation(case.blocks)[: case.chunks * case.blocks_per_chunk]
        self.ids = torch.from_numpy(ids.reshape(case.chunks, case.blocks_per_chunk))
        size = table.share_bytes * case.blocks_per_chunk
        self.chunks = torch.zeros((case.chunks, size), dtype=torch.uint8)
        self.dense = torch.randint(0, 255, (case.chunks * size,), dtype=torch.uint8)
        self.batch = CopyBatch(table, self.ids.numpy(), [chunk.data_ptr() for chunk in self.chunks], size)
        self.kernels = CpuKernels()

    def memcpy(self) -> None:
        piece = len(self.dense) // self.threads
        starts = [(self.chunks.data_ptr() + i * piece, self.dense.data_ptr() + i * piece) for i in range(self.threads)]
        others = [threading.Thread(target=_MEMMOVE, args=(*start, piece)) for start in starts[1:]]
        for other in others:
            other.start()
        _MEMMOVE(*starts[0], piece)
        for other in others:
            other.join()

    def gather(self) -> None:
        self.kernels.gather(self.batch, self.threads)

    def scatter(self) -> None:
        self.kernels.scatter(self.batch, self.threads)

    def index_select(self) -> None:
        self._each(lambda part, row, piece: torch.index_select(part, 0, row, out=piece))

    def index_copy(self) -> None:
        self._each(lambda part, row, piece: part.index_copy_(0, row, piece))

    def index_put(self) -> None:
        self._each(lambda part, row, piece: part.index_put_((row,), piece))

    def _each(self, move: Callable[[Any, Any, Any], object]) -> None:
        blocks, size = self.case.blocks_per_chunk, self.case.share_bytes * self.case.blocks_per_chunk
        for row, chunk in zip(self.ids, self.chunks, strict=True):
            for index, part in enumerate(self.parts):
                move(part, row, chunk[index * size : (index + 1) * size].view(torch.int16).view(blocks, -1))


def best_seconds(stage: Stage) -> Mapping[str, float]:
    forms = (stage.memcpy, stage.gather, stage.scatter, stage.index_select, stage.index_copy, stage.index_put)
    best = {form.__name__: float("inf") for form in forms}
    clock = process_time if stage.threads == 1 else perf_counter
    for _ in range(ROUNDS):
        for form in forms:
            start = clock()
            form()
            best[form.__name__] = min(best[form.__name__], clock() - start)
    return best


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_copies_of_blocks(benchmark: Any, name: str, threads: int, request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        stage = Stage(CASES[name], threads)
        best = best_seconds(stage)
        benchmark.pedantic(stage.gather, rounds=ROUNDS)
    finally:
        torch.set_num_threads(before)
    shares = {form: best["memcpy"] / best[form] for form in best if form != "memcpy"}
    rate = len(stage.dense) / best["memcpy"] / 1e9
    print(
        f"{name}, {threads} threads; memcpy {rate:.1f} GB/s;",
        *(f"{form} {share:.2f}" for form, share in shares.items()),
    )
    benchmark.extra_info.update(memcpy_gb_s=rate, **{f"{form}_of_memcpy": share for form, share in shares.items()})
    assert stage.batch.bytes == len(stage.dense)
    if request.config.getoption("benchmark_only"):
        assert min(shares["gather"], shares["scatter"]) >= MEMCPY_SHARE_MIN
        assert shares["gather"] >= shares["index_select"]
        assert shares["scatter"] >= max(shares["index_copy"], shares["index_put"])

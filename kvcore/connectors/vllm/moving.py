"""Who moves an engine's pages: chosen once, at registration, by where they lie and how large a cell is.

    tensors on CUDA              `CudaCopyEngine`: its transfer streams wait for the event that was recorded on the
                                 engine's compute stream, and a ticket is done when the transfer's own event is
    host, cells of 2 MiB and     `CpuCopyEngine`: one `PagedCopy` per cell, by the compiled kernels
    more, kernels compiled
    host, else                   `ThreadCopyEngine`: one numpy copy per block

Why 2 MiB: a paged copy costs some 20 to 40 us more to begin (checks, tables, a second thread), and moves more bytes per
second from then on. Measured on vLLM's layout, quarter-best of 20 rounds on two busy cores, in us per cell out of and
into the pages, layers apart (numpy -> kernels):

    16 KiB    59, 56 -> 89, 92            2 MiB    1514, 1462 -> 442, 333      16 MiB   3733, 3881 -> 2494, 2333
     1 MiB   251, 238 -> 288, 257         8 MiB    2187, 2128 -> 1972, 1692    32 MiB   7684, 7704 -> 4619, 4422

The first row is a median of twelve. At 2 MiB and 8 MiB with all layers of a block together both are equally fast. The
kernels share a batch among threads, so a core that is taken away costs them more: medians of twelve rounds on the same
cores, busier, had numpy ahead up to 8 MiB. Models that people serve have cells of tens of megabytes; tiny ones of a
test have kilobytes.

The bytes of a cell are the same whoever moves them (`pages.py`), so what one engine stored another one loads. Layers
that are not equally far apart have no numpy form: their cells are always paged.

Who holds: the engine its pages; the side (`sides.py`) the copy engine, which it closes when it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kvcore.connectors.pages import TensorPages
from kvcore.device.cpu_engine import CpuCopyEngine
from kvcore.device.cuda_engine import CudaCopyEngine
from kvcore.device.cuda_runtime import TorchCudaRuntime
from kvcore.device.discover import PagedKV
from kvcore.device.movers import NativeMover, cpu_mover
from kvcore.device.reference import import_torch
from kvcore.errors import ConfigError
from kvcore.ports import CopyEngine
from kvcore.runtime.copy import ThreadCopyEngine

PAGED_CELL_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Moving:
    """`pages` in the form that `device` copies: tensors for paged copies, or arrays by group."""

    pages: TensorPages | Sequence[Any]
    device: CopyEngine


def compute_runtime(pages: TensorPages) -> TorchCudaRuntime | None:
    """Of the CUDA device that the pages lie on; None: on the host. Call it in the thread in which the engine computes.

    Raises ConfigError for pages that nobody here can move.
    """
    if pages.device_type == "cpu":
        return None
    if pages.device_type != "cuda":
        raise ConfigError(f"the pages lie on {pages.device_type}; kvcore moves KV of CUDA devices and of the host")
    index = pages.groups[0].device.index
    return TorchCudaRuntime(index or 0)


def choose(
    loop: asyncio.AbstractEventLoop, pages: TensorPages, cell_bytes: int, runtime: TorchCudaRuntime | None
) -> Moving:
    """See the module text. `cell_bytes`: of the smallest cell. On the loop."""
    if runtime is not None:
        return Moving(pages, CudaCopyEngine(loop, runtime))
    arrays, mover = host_arrays(pages), cpu_mover()
    if arrays is None or (cell_bytes >= PAGED_CELL_BYTES and isinstance(mover, NativeMover)):
        return Moving(pages, CpuCopyEngine(loop, mover))
    return Moving(arrays, ThreadCopyEngine(loop))


def host_arrays(pages: TensorPages) -> list[Any] | None:
    """Per group [blocks, layers, page bytes] over the layers' own memory; None where layers lie unevenly."""
    arrays = [_array(kv) for kv in pages.groups]
    return None if any(array is None for array in arrays) else arrays


def _array(kv: PagedKV) -> Any:
    torch = import_torch()
    planes = kv.planes.simplified().planes
    steps = {after.base - before.base for before, after in pairwise(planes)} or {planes[0].share_bytes}
    if len(steps) > 1 or min(steps) < 0:
        return None
    first = kv.layers[0][0]
    flat = torch.empty(0, dtype=torch.uint8).set_(
        first.untyped_storage(),
        first.storage_offset() * first.element_size(),
        (kv.layout.num_blocks, len(planes), planes[0].share_bytes),
        (planes[0].block_stride_bytes, steps.pop(), 1),
    )
    return np.asarray(flat.numpy())

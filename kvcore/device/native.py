"""The compiled copies: `kernels/kvcore_copy.h` by ctypes.

Theory of operation
-------------------
1. `CopyBatch` is one batch as the C interface wants it: planes, block ids, addresses of chunks, skipped tokens. It owns
   arrays of numbers, and no buffer: addresses are all it knows of pages and chunks.
2. `CpuKernels` and `CudaKernels` wrap one library each. A call checks the whole batch in C before the first byte moves;
   what it refuses is a `CallerError` here, with the block, plane or chunk that is wrong.
3. ctypes lets go of the interpreter's lock during a call: engines copy in threads of their own.
4. The libraries are built with the wheel where a compiler is. `find_library` looks beside this module, where the wheel
   has them, and where an editable install has put them. One that is missing, or of another version of the interface, is
   a `ConfigError` that says what to install; `kvcore.device.capability` asks without raising.

Who holds: the caller holds pages and chunks until the copy is over: for the CPU until the call returns, for CUDA until
an event recorded behind the call on its stream is done. The workspace of a CUDA call is in use until then, too. Nothing
is freed here.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.device.planes import KVPlanes
from kvcore.errors import CallerError, ConfigError, KvcoreError, OutOfRoomError

ABI = 1
CPU_LIBRARY = "libkvcore_copy.so"
CUDA_LIBRARY = "libkvcore_copy_cuda.so"
WORKSPACE_ALIGN_BYTES = 16

Int64s = npt.NDArray[np.int64]

_FIELDS = (
    "base",
    "block_stride_bytes",
    "outer_count",
    "outer_stride_bytes",
    "tokens",
    "token_stride_bytes",
    "run_bytes",
)
_STEPS = {1: "choosing the device", 2: "reading the device", 3: "copying the workspace", 4: "the launch", 5: "a copy"}


class CudaError(KvcoreError):
    """The CUDA runtime refused a call. What was queued before it may still run."""


class _Batch(ctypes.Structure):
    _fields_ = [
        ("planes", ctypes.c_void_p),
        ("plane_count", ctypes.c_int64),
        ("block_ids", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("block_tokens", ctypes.c_int64),
        ("chunk_count", ctypes.c_int64),
        ("blocks_per_chunk", ctypes.c_int64),
        ("chunks", ctypes.c_void_p),
        ("chunk_bytes", ctypes.c_int64),
        ("chunk_offset_bytes", ctypes.c_int64),
        ("skip_tokens", ctypes.c_void_p),
    ]


class _Failure(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int32), ("where", ctypes.c_int64), ("value", ctypes.c_int64)]


class _CudaCall(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_int32),
        ("grid_max", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace_host", ctypes.c_uint64),
        ("workspace_device", ctypes.c_uint64),
        ("workspace_bytes", ctypes.c_int64),
    ]


class PlaneTable:
    """Planes as the kernels read them. Made once per registration, or per slice of layers."""

    __slots__ = ("block_tokens", "num_blocks", "rows", "share_bytes")

    def __init__(self, planes: KVPlanes) -> None:
        """Give the planes as discovered, not simplified: the kernels join runs themselves and then still can skip."""
        rows = [[*(getattr(plane, field) for field in _FIELDS), plane.token_separable] for plane in planes.planes]
        self.rows: Int64s = np.array(rows, dtype=np.int64)  # kvcore_plane: eight fields of 64 bits
        self.num_blocks = planes.num_blocks
        self.block_tokens = planes.block_tokens
        self.share_bytes = planes.block_bytes


class CopyBatch:
    """See the module text. `block_ids`: [chunks, blocks per chunk]; `chunks`: the address of each chunk's first byte.

    `chunk_bytes`: what each chunk's buffer holds. `chunk_offset_bytes`: where the first plane begins in a chunk, for
    a slice of layers. `skip_tokens`: per chunk, leading tokens that a scatter leaves alone.
    """

    __slots__ = ("_block_ids", "_chunks", "_skip_tokens", "_struct", "_table", "bytes")

    def __init__(
        self,
        table: PlaneTable,
        block_ids: npt.ArrayLike,
        chunks: Sequence[int] | npt.NDArray[Any],
        chunk_bytes: int,
        *,
        chunk_offset_bytes: int = 0,
        skip_tokens: Sequence[int] | Int64s | None = None,
    ) -> None:
        self._table = table
        self._block_ids = _int64s(block_ids, 2, "block ids")
        self._chunks = np.ascontiguousarray(chunks, dtype=np.uint64)
        count, blocks_per_chunk = self._block_ids.shape
        if self._chunks.shape != (count,):
            raise CallerError(f"{count} rows of block ids need one chunk each, not {self._chunks.shape}")
        self._skip_tokens = None if skip_tokens is None else _int64s(skip_tokens, 1, "skipped tokens")
        if self._skip_tokens is not None and self._skip_tokens.shape != (count,):
            raise CallerError(f"{count} chunks need one number of skipped tokens each, not {self._skip_tokens.shape}")
        self.bytes = table.share_bytes * self._block_ids.size
        self._struct = _Batch(
            table.rows.ctypes.data,
            len(table.rows),
            self._block_ids.ctypes.data,
            table.num_blocks,
            table.block_tokens,
            count,
            blocks_per_chunk,
            self._chunks.ctypes.data,
            chunk_bytes,
            chunk_offset_bytes,
            None if self._skip_tokens is None else self._skip_tokens.ctypes.data,
        )

    @property
    def pointer(self) -> Any:
        """For a call of a library; the batch must outlive the call."""
        return ctypes.byref(self._struct)


def _int64s(values: npt.ArrayLike, dimensions: int, what: str) -> Int64s:
    array = np.asarray(values)
    if array.ndim != dimensions or array.dtype.kind not in "iu":
        raise CallerError(f"{what}: whole numbers in {dimensions} dimensions, not {array.dtype} in {array.ndim}")
    return np.ascontiguousarray(array, dtype=np.int64)


def find_library(name: str) -> Path | None:
    """Where the build has put the library; None: it was built without one."""
    beside = Path(__file__).with_name(name)
    if beside.is_file():
        return beside
    try:  # an editable install: modules lie in the source tree, what was built beside the package's metadata
        built = Path(str(importlib.metadata.distribution("kvcore").locate_file(f"kvcore/device/{name}")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return built if built.is_file() else None


def _load(name: str, path: Path | None, missing: str) -> ctypes.CDLL:
    found = path or find_library(name)
    if found is None:
        raise ConfigError(f"this kvcore was built without {name}: {missing}")
    try:
        return ctypes.CDLL(str(found))
    except OSError as error:
        raise ConfigError(f"{found} cannot be loaded: {error}") from error


def _check_abi(library: ctypes.CDLL, function: str) -> None:
    """The library may be older than this file, in an editable install that was not built again."""
    answer = getattr(library, function)()
    if answer != ABI:
        raise ConfigError(f"the library speaks version {answer} of the interface, not {ABI}: install kvcore again")


def _call(function: Callable[..., int], *arguments: Any) -> None:
    """Call, with the failure as the last argument; raise what it says."""
    failure = _Failure()
    if function(*arguments, ctypes.byref(failure)):
        raise _error(int(failure.status), int(failure.where), int(failure.value))


def _error(status: int, where: int, value: int) -> KvcoreError:
    if status == 10:
        return CudaError(f"CUDA error {value} at {_STEPS.get(where, where)}")
    if status == 11:
        return OutOfRoomError("no memory for the tables of a copy")
    texts = {
        1: f"plane {where} cannot be: {(*_FIELDS, 'its share of a block, 2 GiB or more')[value % 8]}",
        2: f"a batch cannot have a count, offset or address of {value}",
        3: f"block id {value} (entry {where}) does not exist",
        4: f"block {value} stands twice among the targets of one scatter: two writers would race for it",
        5: f"each chunk needs room for {value} bytes",
        6: f"two chunks of one gather overlap, at address {value:#x}",
        7: f"chunk {where} cannot skip {value} tokens",
        8: f"chunk {where} skips tokens inside a block, and plane {value} can only be skipped by whole blocks",
        9: f"the workspace must have {value} bytes, {WORKSPACE_ALIGN_BYTES}-byte aligned, on host and device",
    }
    return CallerError(texts[status])


class CpuKernels:
    """Copies in host memory. `threads` is the caller's to grant: batches of a few MiB take fewer."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises ConfigError if there is no library, or not this version of it."""
        missing = "install a C++17 compiler and then kvcore again; until then torch moves the bytes (kvcore[torch])"
        self._library = _load(CPU_LIBRARY, path, missing)
        _check_abi(self._library, "kvcore_abi")

    def gather(self, batch: CopyBatch, threads: int = 1) -> None:
        """Blocks -> chunks; done on return."""
        _call(self._library.kvcore_cpu_gather, batch.pointer, threads)

    def scatter(self, batch: CopyBatch, threads: int = 1) -> None:
        """Chunks -> blocks; done on return."""
        _call(self._library.kvcore_cpu_scatter, batch.pointer, threads)

    def runs(self, batch: CopyBatch, *, scatter: bool) -> Int64s:
        """[runs, 3]: address in the pages, address in the chunk, bytes. The fewest contiguous pieces of the batch."""
        count = ctypes.c_int64()
        _call(self._library.kvcore_runs, batch.pointer, int(scatter), None, ctypes.c_int64(0), ctypes.byref(count))
        runs = np.empty((count.value, 3), np.int64)
        place = ctypes.c_void_p(runs.ctypes.data)
        _call(self._library.kvcore_runs, batch.pointer, int(scatter), place, count, ctypes.byref(count))
        return runs


@dataclass(frozen=True, slots=True)
class CudaCall:
    """Where a CUDA copy runs and what it may use.

    `stream`: the handle, as torch's `stream.cuda_stream`. The workspace is two buffers of `workspace_bytes` each,
    pinned host memory and device memory; nobody may write them before the copy's event is done. `grid_max`: most blocks
    of threads at a time; 0 fills the device, a small number leaves it to the model.
    """

    device: int
    stream: int
    workspace_host: int = 0
    workspace_device: int = 0
    workspace_bytes: int = 0
    grid_max: int = 0

    def _struct(self) -> _CudaCall:
        stream = ctypes.c_void_p(self.stream)
        place = (self.workspace_host, self.workspace_device, self.workspace_bytes)
        return _CudaCall(self.device, self.grid_max, stream, *place)


class CudaKernels:
    """Copies queued on a CUDA stream: they are over when an event that is recorded behind them is done.

    Blocks lie on the device; chunks on it or in pinned host memory. One launch per call, whatever its size.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Raises ConfigError if there is no library, or not this version of it."""
        missing = "install the CUDA toolkit (nvcc) and then kvcore again; until then torch moves the bytes"
        self._library = _load(CUDA_LIBRARY, path, missing)
        _check_abi(self._library, "kvcore_cuda_abi")

    @property
    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that it has code for, as 80, 90, 100."""
        found = (ctypes.c_int32 * 16)()
        return tuple(found[: self._library.kvcore_cuda_architectures(found, len(found))])

    def workspace_bytes(self, batch: CopyBatch) -> int:
        """Of each of the two workspace buffers."""
        needed = ctypes.c_int64()
        _call(self._library.kvcore_cuda_workspace, batch.pointer, ctypes.byref(needed))
        return needed.value

    def gather(self, batch: CopyBatch, call: CudaCall) -> None:
        """Blocks -> chunks, by the kernel."""
        _call(self._library.kvcore_cuda_gather, batch.pointer, ctypes.byref(call._struct()))

    def scatter(self, batch: CopyBatch, call: CudaCall) -> None:
        """Chunks -> blocks, by the kernel."""
        _call(self._library.kvcore_cuda_scatter, batch.pointer, ctypes.byref(call._struct()))

    def direct(self, batch: CopyBatch, call: CudaCall, *, scatter: bool) -> None:
        """The same bytes by the copy engine, one asynchronous copy per run. Needs no workspace."""
        _call(self._library.kvcore_cuda_direct, batch.pointer, int(scatter), ctypes.byref(call._struct()))

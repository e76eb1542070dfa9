"""What `CudaCopyEngine` needs of a CUDA device, and torch's way to it.

The engine's rules about order and completion are in `cuda_engine.py` and are proven against a runtime that is emulated
on the host (`kvcore.ladder.emulated_cuda`); here is only how each of them is said to the driver.

Who holds: an event is the driver's until it is destroyed with its Python object; what a queued copy needs beside the
caller's buffers (the kernels' workspace) is the engine's to keep until the copy is over.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvcore.device.capability import runs_on
from kvcore.device.movers import PlaneTables, batch_of, writable
from kvcore.device.native import CopyBatch, CudaCall, CudaKernels
from kvcore.device.paged import CheckedCopy, Direction
from kvcore.device.reference import gather, import_torch, scatter
from kvcore.errors import ConfigError
from kvcore.ports import Copy

DIRECT_RUN_BYTES = 256 * 1024
"""From this mean run length on, one copy-engine transfer per run is faster than the kernel: a transfer costs about
3.3 us per piece (spec page on reports, cost of DMA against kernels), which at 55 GB/s is 180 KB."""


class CudaRuntime(Protocol):
    """Streams and events are opaque. Only `queue` needs a stream's thread; everything may be called from any thread."""

    compute: Any
    """The engine's compute stream."""

    def new_stream(self) -> Any: ...

    def record(self, stream: Any) -> Any:
        """An event behind everything that has been queued on `stream`."""
        ...

    def finished(self, event: Any) -> bool:
        """Without waiting. Raises what the device has failed with."""
        ...

    def synchronize(self, event: Any) -> None:
        """Block this thread, and not the interpreter, until `event` is done. Raises what the device has failed with."""
        ...

    def queue(self, stream: Any, copy: Copy | CheckedCopy) -> Any:
        """Put the copy on `stream` and return what it needs, for the caller to keep until it is over.

        It is over when an event recorded behind it is done.
        """
        ...


class TorchCudaRuntime:
    """`CudaRuntime` by torch. Made in the thread in which the engine computes: its current stream is the compute
    stream.

    Paged copies go through the compiled kernels, or through torch where they were not built or have no code for this
    device. Chunks should lie in pinned memory (`pin`); pageable ones go through torch, correct and slow.
    """

    def __init__(self, device: int = 0) -> None:
        """Raises ConfigError without a CUDA device."""
        self._torch: Any = import_torch()
        if not self._torch.cuda.is_available():
            raise ConfigError("torch sees no CUDA device here; use the CPU engine, or install a CUDA build of torch")
        self.device = device
        self.compute = self._torch.cuda.current_stream(device)
        self._kernels = _kernels_for(self._torch.cuda.get_device_capability(device))
        self._tables = PlaneTables()

    @property
    def name(self) -> str:
        return "torch" if self._kernels is None else "native"

    def follow(self) -> None:
        """From the engine's thread, before events are recorded: it may compute on another stream by now."""
        self.compute = self._torch.cuda.current_stream(self.device)

    def new_stream(self) -> Any:
        return self._torch.cuda.Stream(self.device)

    def record(self, stream: Any) -> Any:
        event = self._torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def finished(self, event: Any) -> bool:
        return bool(event.query())

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def queue(self, stream: Any, copy: Copy | CheckedCopy) -> Any:
        with self._torch.cuda.stream(stream):
            if isinstance(copy, Copy):
                self._tensor(copy.target).copy_(self._tensor(copy.source), non_blocking=True)
                return None
            if self._kernels is None or not self._pinned(copy):
                return self._by_torch(copy)
            return self._by_kernels(self._kernels, stream, copy)

    def _pinned(self, copy: CheckedCopy) -> bool:
        """The kernels read and write chunks from the device, which sees no other host memory."""
        from_numpy = self._torch.from_numpy
        return all(from_numpy(writable(chunk)).is_pinned() for chunk in copy.chunks)

    def pin(self, buffer: memoryview) -> None:
        """Lock host memory (an L1 arena) in place, so that copies from and to it run at the link's rate."""
        array = self._tensor(buffer)
        code = self._torch.cuda.cudart().cudaHostRegister(array.data_ptr(), array.numel(), 0)
        if int(code):
            raise ConfigError(f"cudaHostRegister refused {array.numel()} bytes with code {int(code)}; see ulimit -l")

    def unpin(self, buffer: memoryview) -> None:
        """Before that memory is given back."""
        self._torch.cuda.cudart().cudaHostUnregister(self._tensor(buffer).data_ptr())

    def _tensor(self, buffer: Any) -> Any:
        if isinstance(buffer, self._torch.Tensor):
            return buffer.view(self._torch.uint8)
        return self._torch.frombuffer(buffer, dtype=self._torch.uint8)

    def _by_torch(self, copy: CheckedCopy) -> Any:
        chunks = [self._torch.from_numpy(writable(chunk)) for chunk in copy.chunks]
        if copy.direction is Direction.GATHER:
            gather(copy.kv, copy.block_ids, chunks)
        else:
            scatter(copy.kv, copy.block_ids, chunks, None if copy.skip_tokens is None else copy.skip_tokens.tolist())
        return chunks

    def _by_kernels(self, kernels: CudaKernels, stream: Any, copy: CheckedCopy) -> Any:
        batch, scattering = batch_of(copy, self._tables.of(copy.kv)), copy.direction is Direction.SCATTER
        if _mean_run_bytes(copy) >= DIRECT_RUN_BYTES:
            kernels.direct(batch, CudaCall(self.device, stream.cuda_stream), scatter=scattering)
            return None
        call, workspace = self._call(kernels, stream, batch)
        (kernels.scatter if scattering else kernels.gather)(batch, call)
        return workspace

    def _call(self, kernels: CudaKernels, stream: Any, batch: CopyBatch) -> tuple[CudaCall, Any]:
        """The call, and its two workspace buffers: of its own, because the next copy may be queued before it runs."""
        needed = kernels.workspace_bytes(batch)
        host = self._torch.empty(needed, dtype=self._torch.uint8, pin_memory=True)
        device = self._torch.empty(needed, dtype=self._torch.uint8, device=f"cuda:{self.device}")
        return CudaCall(self.device, stream.cuda_stream, host.data_ptr(), device.data_ptr(), needed), (host, device)


def _mean_run_bytes(copy: CheckedCopy) -> float:
    planes = copy.kv.planes.simplified().planes
    return sum(plane.share_bytes for plane in planes) / sum(plane.outer_count * plane.tokens for plane in planes)


def _kernels_for(capability: tuple[int, int]) -> CudaKernels | None:
    """The library, if it was built and has code that runs on a device of this capability."""
    try:
        kernels = CudaKernels()
    except ConfigError:
        return None
    return kernels if runs_on(kernels.architectures, capability) else None

"""The device part of the copy kernels, checked and timed on a GPU. Called by `gpu_check.sh`; results as one JSON.

Checks: every layout of `kvcore.device.examples`, gathered and scattered through `CudaCopyEngine` by the kernels and by
torch, compared byte by byte with the reference on the host; a store behind a producer that is still computing; a cancel
behind it; block ids out of range.

Timings: per block size, gather and scatter by kernel, by direct copies and by torch, as GB/s and as a share of one
pinned copy of the same bytes, all in one run and interleaved; how far a gather and a matrix product disturb each
other; the time from the producer's end to the first byte of a store.

`--emulated` does all of it on the host, with an emulated device and small sizes: it shows that the script itself runs,
and no figure of it means anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcore.device.cuda_engine import CudaCopyEngine
from kvcore.device.cuda_runtime import TorchCudaRuntime
from kvcore.device.discover import PagedKV, normalize_kv_and_discover_format
from kvcore.device.examples import EXAMPLES, Shape, build
from kvcore.device.movers import PlaneTables, batch_of
from kvcore.device.native import CpuKernels, CudaCall, CudaKernels
from kvcore.device.paged import CheckedCopy, Direction, PagedCopy, checked
from kvcore.device.reference import gather, scatter
from kvcore.errors import CallerError, ConfigError

SHAPE = Shape(layers=3, blocks=11, tokens=16, heads=4, size=8)
BLOCK_BYTES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]


class Gpu:
    """The device that torch sees, and the sizes that fit it."""

    where = "cuda"
    pins = True
    total_bytes = 256 << 20
    repeats = 7
    side = 8192  # of the square matrices

    def __init__(self) -> None:
        self.runtime: Any = TorchCudaRuntime()
        self.kernels: Any = CudaKernels() if self.runtime.name == "native" else None
        self.paged_copies_by = self.runtime.name
        self.name = torch.cuda.get_device_name(0)
        self.capability = ".".join(map(str, torch.cuda.get_device_capability(0)))

    def new_stream(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def address_of(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream()

    def compute(self, cycles: int, then: Callable[[], None]) -> None:
        """The engine computes for a while, and then this."""
        with torch.cuda.stream(self.runtime.compute):
            torch.cuda._sleep(cycles)
            then()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.empty_cache()


class Emulated:
    """The same on the host: `kvcore.ladder.emulated_cuda`, small sizes, plain memory, and the kernels of the CPU."""

    where = "cpu"
    pins = False
    total_bytes = 256 << 10
    repeats = 1
    side = 64
    name = "emulated"
    capability = "0.0"

    def __init__(self) -> None:
        from kvcore.ladder.emulated_cuda import EmulatedCuda

        torch.set_num_threads(1)  # the script is to be seen running, on however busy a machine
        self.runtime: Any = EmulatedCuda()
        try:
            self.kernels: Any = HostKernels(CpuKernels())
        except ConfigError:
            self.kernels = None
        self.paged_copies_by = "torch" if self.kernels is None else "native"

    def new_stream(self) -> Any:
        return None

    def on(self, _: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def address_of(self, _: Any) -> int:
        return 0

    current_stream = new_stream

    def compute(self, cycles: int, then: Callable[[], None]) -> None:
        self.runtime.compute_on(self.runtime.compute, lambda: time.sleep(cycles / 1e10))
        self.runtime.compute_on(self.runtime.compute, then)

    def synchronize(self) -> None:
        """Everything that is timed here has ended when it returns."""

    def close(self) -> None:
        self.runtime.close()


@dataclass(frozen=True)
class HostKernels:
    """The CPU's kernels, called like those of a device."""

    kernels: CpuKernels

    def gather(self, batch: Any, _: CudaCall) -> None:
        self.kernels.gather(batch, 1)

    def scatter(self, batch: Any, _: CudaCall) -> None:
        self.kernels.scatter(batch, 1)

    def direct(self, batch: Any, _: CudaCall, *, scatter: bool) -> None:
        (self.kernels.scatter if scatter else self.kernels.gather)(batch, 1)


Device = Gpu | Emulated


def on_device(device: Device, name: str) -> tuple[PagedKV, PagedKV]:
    """The same KV on the device and on the host."""
    pair = []
    for where in (device.where, "cpu"):
        example = build(name, replace(SHAPE, device=where))
        pair.append(normalize_kv_and_discover_format(example.kv, example.hints))
    return pair[0], pair[1]


def pinned(device: Device, size: int) -> Any:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.pins).numpy()


# --- checks --------------------------------------------------------------------------------------------------------


def check_layouts(device: Device) -> int:
    """Returns how many layouts were compared. AssertionError names the first that differs."""
    for name in EXAMPLES:
        on_gpu, on_host = on_device(device, name)
        ids = np.array([[7, 2, 9], [0, 10, 4]])
        elsewhere = np.array([[1, 3, 5], [6, 8, 2]])
        size = on_host.planes.chunk_bytes(3)
        chunks, expected = [pinned(device, size) for _ in ids], [torch.zeros(size, dtype=torch.uint8) for _ in ids]
        gather(on_host, ids, expected)
        through_engine(device, [PagedCopy(Direction.GATHER, on_gpu, ids, chunks)])
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(chunks, expected)), f"{name}: gather"
        scatter(on_host, elsewhere, expected)
        through_engine(device, [PagedCopy(Direction.SCATTER, on_gpu, elsewhere, chunks)])
        for ours, theirs in zip(on_gpu.parts, on_host.parts):
            assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8)), f"{name}: scatter"
    return len(EXAMPLES)


def through_engine(device: Device, copies: list[PagedCopy]) -> None:
    async def run() -> None:
        engine = CudaCopyEngine(asyncio.get_running_loop(), device.runtime)
        ticket = engine.submit(copies, stream="check", after=[engine.compute_event()])
        await ticket.wait()
        engine.close()
        if ticket.error is not None:
            raise ticket.error

    asyncio.run(run())


def check_order(device: Device) -> None:
    """A store sees what a slow producer wrote, and a cancelled one moves nothing."""
    kv, _ = on_device(device, "LAYERS_KV_BLOCKS_NHD")
    ids, size = np.array([[1, 2, 3]]), kv.planes.chunk_bytes(3)
    stored, cancelled = pinned(device, size), pinned(device, size)

    def write() -> None:
        for part in kv.parts:
            part.fill_(7)

    async def run() -> None:
        engine = CudaCopyEngine(asyncio.get_running_loop(), device.runtime)
        device.compute(200_000_000, write)
        event = engine.compute_event()
        assert not event.done
        store = engine.submit([PagedCopy(Direction.GATHER, kv, ids, [stored])], stream="store", after=[event])
        never = engine.submit([PagedCopy(Direction.GATHER, kv, ids, [cancelled])], stream="other", after=[event])
        assert never.cancel()
        await store.wait()
        assert event.done
        engine.close()

    asyncio.run(run())
    sevens = torch.from_numpy(stored).view(next(iter(kv.parts)).dtype)
    assert bool((sevens == 7).all()), "the store did not wait for the producer"
    assert not cancelled.any(), "a cancelled batch moved bytes"


def check_refusals(device: Device) -> None:
    kv, _ = on_device(device, "LAYERS_KV_BLOCKS_NHD")
    try:
        checked(PagedCopy(Direction.GATHER, kv, np.array([[0, 99]]), [pinned(device, kv.planes.chunk_bytes(2))]))
    except CallerError:
        return
    raise AssertionError("a block id out of range was not refused")


# --- timings -------------------------------------------------------------------------------------------------------


def seconds(device: Device, work: Callable[[], None]) -> float:
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start


def interleaved(device: Device, works: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each, taken in turns."""
    for work in works.values():
        seconds(device, work)
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(device.repeats):
        for name, work in works.items():
            taken[name].append(seconds(device, work))
    return {name: statistics.median(values) for name, values in taken.items()}


class Bench:
    """KV whose blocks have `block_bytes` in one plane, and chunks of 16 blocks in one pinned buffer."""

    def __init__(self, block_bytes: int, device: Device) -> None:
        self.kernels = device.kernels
        blocks = device.total_bytes // block_bytes
        self.memory = torch.zeros((blocks, 1, 1, block_bytes), dtype=torch.uint8, device=device.where)
        example = build("LAYERS_LATENT", Shape(layers=1, blocks=2))
        hints = replace(
            example.hints, num_layers=1, num_blocks=blocks, block_tokens=1, num_heads=1, head_size=block_bytes
        )
        self.kv = normalize_kv_and_discover_format([self.memory.view(blocks, 1, block_bytes)], hints)
        per_chunk = min(16, blocks)
        self.ids = torch.randperm(blocks).numpy().reshape(-1, per_chunk)
        self.host = torch.zeros(device.total_bytes, dtype=torch.uint8, pin_memory=device.pins)
        self.chunks = [self.host.numpy()[at : at + per_chunk * block_bytes]
                       for at in range(0, device.total_bytes, per_chunk * block_bytes)]  # fmt: skip
        self.tables = PlaneTables()
        stream = device.address_of(device.current_stream())
        self.room = (torch.zeros(1 << 22, dtype=torch.uint8, pin_memory=device.pins),
                     torch.zeros(1 << 22, dtype=torch.uint8, device=device.where))  # fmt: skip
        self.call = CudaCall(0, stream, self.room[0].data_ptr(), self.room[1].data_ptr(), 1 << 22)

    def copy(self, direction: Direction) -> CheckedCopy:
        return checked(PagedCopy(direction, self.kv, self.ids, self.chunks))

    def works(self, direction: Direction) -> dict[str, Callable[[], None]]:
        copy, flat = self.copy(direction), self.memory.view(-1)
        scattering = direction is Direction.SCATTER
        tensors = [torch.from_numpy(chunk) for chunk in self.chunks]
        works: dict[str, Callable[[], None]] = {
            "pinned_copy": (lambda: flat.copy_(self.host, non_blocking=True)) if scattering
            else (lambda: self.host.copy_(flat, non_blocking=True)),
            "torch": (lambda: scatter(self.kv, self.ids, tensors)) if scattering
            else (lambda: gather(self.kv, self.ids, tensors)),
        }  # fmt: skip
        if self.kernels is not None:
            kernels, batch = self.kernels, batch_of(copy, self.tables.of(self.kv))
            run = kernels.scatter if scattering else kernels.gather
            works["kernel"] = lambda: run(batch, self.call)
            works["direct"] = lambda: kernels.direct(batch, self.call, scatter=scattering)
        return works


def time_blocks(device: Device) -> list[dict[str, Any]]:
    rows = []
    for block_bytes in [size for size in BLOCK_BYTES if size <= device.total_bytes]:
        bench = Bench(block_bytes, device)
        for direction in Direction:
            medians = interleaved(device, bench.works(direction))
            plain = medians["pinned_copy"]
            rows.append({"block_bytes": block_bytes, "direction": direction.value, "bytes": device.total_bytes,
                         "gb_per_s": {name: device.total_bytes / taken / 1e9 for name, taken in medians.items()},
                         "share_of_pinned_copy": {name: plain / taken for name, taken in medians.items()}})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        del bench
        if device.pins:
            torch.cuda.empty_cache()
    return rows


def time_overlap(device: Device) -> dict[str, float]:
    """Milliseconds of a matrix product and of gathers, each alone and both at once."""
    bench = Bench(64 << 10, device)
    side = device.new_stream()
    left = torch.randn(device.side, device.side, device=device.where, dtype=torch.bfloat16)
    works = bench.works(Direction.GATHER)
    move = works.get("kernel", works["torch"])
    call = bench.call
    bench.call = replace(call, stream=device.address_of(side))

    def product() -> None:
        for _ in range(20):
            torch.matmul(left, left)

    def copies() -> None:
        with device.on(side):
            for _ in range(4):
                move()

    def both() -> None:
        copies()
        product()

    medians = interleaved(device, {"matmul": product, "copies": copies, "both": both})
    return {f"{name}_ms": taken * 1e3 for name, taken in medians.items()}


def time_to_begin(device: Device) -> float:
    """Microseconds from the end of a producer to the end of a small store behind it, as the loop sees it (median)."""
    kv, _ = on_device(device, "LAYERS_KV_BLOCKS_NHD")
    chunk, ids = pinned(device, kv.planes.chunk_bytes(1)), np.array([[1]])

    async def once(engine: CudaCopyEngine) -> float:
        device.compute(20_000_000, lambda: None)
        event = engine.compute_event()
        ticket = engine.submit([PagedCopy(Direction.GATHER, kv, ids, [chunk])], stream="store", after=[event])
        await event.wait()
        start = time.perf_counter()
        await ticket.wait()
        return (time.perf_counter() - start) * 1e6

    async def run() -> float:
        engine = CudaCopyEngine(asyncio.get_running_loop(), device.runtime)
        taken = [await once(engine) for _ in range(30)]
        engine.close()
        return statistics.median(taken)

    return asyncio.run(run())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="checks only, for running under a sanitizer")
    parser.add_argument("--emulated", action="store_true", help="on the host, to see that the script runs")
    arguments = parser.parse_args()
    device = Emulated() if arguments.emulated else Gpu()
    try:
        result = measured(device, quick=arguments.quick)
    finally:
        device.close()
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.output}")
    return 0


def measured(device: Device, *, quick: bool) -> dict[str, Any]:
    """Everything, as it is written down."""
    result: dict[str, Any] = {
        "schema": 1,
        "device": device.name,
        "capability": device.capability,
        "torch": torch.__version__,
        "paged_copies_by": device.paged_copies_by,
        "layouts_checked": check_layouts(device),
    }
    check_order(device)
    check_refusals(device)
    print(f"{result['layouts_checked']} layouts, order and refusals: good ({device.paged_copies_by})", flush=True)
    if not quick:
        result["blocks"] = time_blocks(device)
        result["overlap"] = time_overlap(device)
        result["producer_to_store_us"] = time_to_begin(device)
    return result


if __name__ == "__main__":
    sys.exit(main())

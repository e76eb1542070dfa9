"""The simulated outside of the cache: one `SimLoop`, stepped from the engine's calls, one seed."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kvcore.connectors.pages import TensorPages
from kvcore.connectors.vllm.moving import Moving, host_arrays
from kvcore.device.cuda_runtime import TorchCudaRuntime
from kvcore.ladder.targets.vllm_scheduler.tokens import Words
from kvcore.ports import Clock, Copy, CopyTicket, DeviceEvent, Executor, Notice
from kvcore.sim.loop import SimLoop
from kvcore.sim.ports.clock import SimClock
from kvcore.sim.ports.copy import SimCopyEngine
from kvcore.sim.ports.executor import SimExecutor
from kvcore.sim.ports.notice import SimNotice

T = TypeVar("T")


class DeviceRefuses(Exception):
    """A device that does not take a copy. The worker reports the cell as not loaded."""


class FlakyDevice:
    """A copy engine that refuses some loads."""

    def __init__(self, inner: SimCopyEngine, rng: random.Random, load_error_rate: float) -> None:
        self._inner = inner
        self._rng = rng
        self._rate = load_error_rate
        self.refused = 0

    def compute_event(self) -> DeviceEvent:
        return self._inner.compute_event()

    def submit(self, copies: Sequence[Copy], *, stream: str, after: Sequence[DeviceEvent] = ()) -> CopyTicket:
        if stream == "load" and self._rng.random() < self._rate:
            self.refused += 1
            raise DeviceRefuses
        return self._inner.submit(copies, stream=stream, after=after)

    def register_pages(self, pages: Sequence[Words]) -> None:
        self._inner.register_pages(pages)

    def close(self) -> None:
        self._inner.close()


class SteppedRunner:
    """`Runner` on a simulated loop: a call runs the loop until its work is done; everything else moves along."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def call_now(self, work: Coroutine[Any, Any, T]) -> T:
        return self.call(work)


class StepPorts:
    """`HostPorts` in simulated time. A page copy lasts about as long as a step, so that stores outlive preemptions."""

    def __init__(self, loop: SimLoop, seed: int, load_error_rate: float) -> None:
        self.clock: Clock = SimClock(loop)
        self._loop = loop
        self._rate = load_error_rate
        self._rng = random.Random(f"load errors/{seed}")
        self.devices: list[FlakyDevice] = []

    def executor(self) -> Executor:
        return SimExecutor(self._loop)

    def notice(self) -> Notice:
        return SimNotice(self._loop)

    def moving(self, pages: TensorPages, cell_bytes: int, runtime: TorchCudaRuntime | None) -> Moving:
        """Plain copies, whatever the size: the simulated device shows what each block goes through."""
        arrays = host_arrays(pages)
        assert arrays is not None
        return Moving(arrays, self._device())

    def _device(self) -> FlakyDevice:
        inner = SimCopyEngine(self._loop, f"device{len(self.devices)}", page_ns=(5_000, 200_000))
        inner.page_ns_of["load"] = (500, 40_000)
        self.devices.append(FlakyDevice(inner, self._rng, self._rate))
        return self.devices[-1]

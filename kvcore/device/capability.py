"""What can move KV here: asked at registration and by people (`python -m kvcore.device.capability`).

Theory of operation
-------------------
Three things can move the bytes of a block: the compiled CPU copies, the CUDA library, and plain torch. All give the
same bytes. `capability` says which of them are there and, for those that are not, why; the engines then take the
fastest: the library where it can serve the device, else torch.

Nothing is held, and nothing here raises for what is missing: who needs it says so in its own words.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcore.device.native import CpuKernels, CudaKernels
from kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Capability:
    """Reasons why something cannot be used; an empty one: it can."""

    native: str
    cuda: str
    torch: str

    def __str__(self) -> str:
        rows = (("compiled CPU copies", self.native), ("CUDA library", self.cuda), ("torch", self.torch))
        return "\n".join(f"{what:<20} {reason or 'ready'}" for what, reason in rows)


def capability() -> Capability:
    """Of this installation on this machine."""
    torch = "" if importlib.util.find_spec("torch") else "missing: pip install 'kvcore[torch]'"
    return Capability(_reason(CpuKernels), _reason(_usable_cuda), torch)


def runs_on(architectures: tuple[int, ...], device: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on a device of this compute capability.

    Machine code runs on the same major version from its minor version on. The newest architecture is also there as
    PTX, which the driver compiles for devices that came later.
    """
    major, minor = device
    same = any(code // 10 == major and code % 10 <= minor for code in architectures)
    return same or (bool(architectures) and major * 10 + minor > max(architectures))


def _reason(check: Callable[[], Any]) -> str:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""


def _usable_cuda() -> None:
    """Raises ConfigError if the library, or a device that it can serve, is missing."""
    architectures = CudaKernels().architectures
    if not importlib.util.find_spec("torch"):
        raise ConfigError("torch is missing, which has the device's memory")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ConfigError("torch sees no CUDA device")
    device = torch.cuda.get_device_capability()
    if not runs_on(architectures, device):
        raise ConfigError(f"the library was built for {architectures}, not for a device of {device[0]}.{device[1]}")


if __name__ == "__main__":
    print(capability())

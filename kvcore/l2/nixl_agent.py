"""A NIXL agent with memory that it knows: what its file and its shared-memory store have in common.

An agent moves bytes only from and into registered memory: regions of the caller (the arena), and one frame of its own
for what lies elsewhere. It is used by one thread at a time.

A transfer is waited for until it ends: giving it up would leave NIXL writing into memory that the caller uses for
something else. The package logs to stdout from INFO on; it is set to WARNING here unless NIXL_LOG_LEVEL says otherwise.

Who holds: the agent its frames, and a view of each region, which stays mapped until `forget_regions`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvcore.errors import ConfigError
from kvcore.runtime.calls import pause

_FRAME_BYTES_MIN = 64 * 1024
_POLL_S = 0.00005


@dataclass(frozen=True, slots=True)
class Span:
    """Registered memory: where it begins and how long it is."""

    first: int
    length: int

    @classmethod
    def of(cls, view: memoryview) -> Span:
        return cls(int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0, len(view))

    def holds(self, other: Span) -> bool:
        return self.first <= other.first and other.first + other.length <= self.first + self.length


class _Known(NamedTuple):
    """A region as an agent knows it. The view keeps it mapped."""

    place: Span
    view: memoryview
    registration: Any


class NixlAgent:
    """See the module text. `threads`: it makes progress by itself, for others who reach into its memory."""

    def __init__(self, name: str, backend: str, parameters: Mapping[str, str], threads: bool = False) -> None:
        api = nixl_api()
        self._native = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=threads, backends=[]))
        self._native.create_backend(backend, dict(parameters))
        self._regions: list[_Known] = []
        self._frames: list[np.ndarray[Any, Any]] = []  # the last one is in use; the others stay mapped

    def registered(self, view: memoryview, regions: Sequence[memoryview]) -> bool:
        """Whether the view lies in one of `regions`, all of which are made known to this agent first."""
        for region in regions[len(self._regions) :]:
            place = Span.of(region)
            known = self._native.register_memory([(place.first, place.length, 0, "")], "DRAM")
            self._regions.append(_Known(place, region, known))
        span = Span.of(view)
        return any(known.place.holds(span) for known in self._regions)

    def forget_regions(self) -> None:
        """No transfer runs, and none begins any more."""
        while self._regions:
            self._native.deregister_memory(self._regions.pop().registration)

    def frame(self, length: int) -> memoryview:
        if not self._frames or len(self._frames[-1]) < length:
            frame = np.ones(max(_FRAME_BYTES_MIN, length), np.uint8)  # ones: touched, not promised
            self._native.register_memory([(frame.__array_interface__["data"][0], len(frame), 0, "")], "DRAM")
            self._frames.append(frame)
        return self._frames[-1].data[:length]

    def transfer(self, operation: str, local: Any, remote: Any, peer: str) -> None:
        """READ or WRITE. OSError, or the package's own types: it did not work."""
        handle = self._native.initialize_xfer(operation, local, remote, peer)
        try:
            self._wait(handle, self._native.transfer(handle))
        finally:
            self._native.release_xfer_handle(handle)

    def _wait(self, handle: Any, state: str) -> None:
        while state == "PROC":
            state = self._native.check_xfer_state(handle)
            if state == "PROC":
                pause(_POLL_S)
        if state != "DONE":
            raise OSError(errno.EIO, f"a NIXL transfer ended as {state}")


def nixl_api() -> Any:
    """The package. Its import sets up logging for the whole process; that is taken back."""
    raises = logging.raiseExceptions
    try:
        import nixl_cu12._api as api
    except ImportError as error:
        raise ConfigError(f"NIXL cannot be loaded ({error}): pip install --no-deps nixl-cu12") from error
    finally:
        logging.raiseExceptions = raises
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return api

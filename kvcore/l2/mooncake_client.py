"""The Mooncake Store client: typed options, codes in our words, registered memory, and an end that waits for its calls.

Mooncake's Python calls never raise: they answer numbers, and negative ones are codes. Traps met:
 1. Set-up retries for 90 s while the master is away. So the master's port is tried first, with a deadline of our own,
    and the tries are cut to two (MC_STORE_CLIENT_SETUP_RETRIES).
 2. A get from a node that hangs blocks for 30 s, a call to a master that hangs as well. `transfer_timeout_s` and
    `rpc_timeout_s` shorten that (MC_TCP_PROGRESS_TIMEOUT_SEC, MC_RPC_TIMEOUT_MS). A call while the master is *dead*
    takes 4 s and nothing shortens that: the deadline wrapper and the breaker are for it. All three are environment
    variables of the library, so they hold for the whole process; one that is set already is left alone.
 3. The native client must not be closed while a call runs in it. The last call out closes it, in a thread of its
    own. It takes about a second and holds the GIL (0.3.13), so close an adapter when the process ends, not before.
 4. Memory that is not registered works over TCP by luck and fails over RDMA. Regions of the caller are registered once
    (`register_region`); for other buffers there are registered frames, at the price of a copy.

Who holds: the frames and the native client belong to this object; a region is the caller's, and this object holds a
view of it, so that it stays mapped, until `close` has let the last call out. Nothing here announces anything. Any
thread may call, several at once; the GIL is released in all native calls.
"""

from __future__ import annotations

import bisect
import os
import re
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import ConfigError, OutOfRoomError, StoreError
from kvcore.runtime.calls import CallGate, in_background

PROTOCOLS = ("tcp", "rdma")

NOT_FOUND = -704
NOT_READY = -703  # somebody is writing it
NO_SPACE = -200
EXISTS = -705
LEASE_ENDED = -707
BAD_PARAMETERS = -600  # the buffer is too small, among others
TRANSFER_FAILED = -800  # the node is gone, or the buffer is too large

_MEANINGS = {
    -1: "internal error",
    -10: "buffer overflow",
    -101: "no segment is mounted",
    NO_SPACE: "no space",
    -400: "bad key",
    -500: "write failed",
    BAD_PARAMETERS: "bad parameters",
    NOT_READY: "the object is being written",
    NOT_FOUND: "not found",
    EXISTS: "it exists",
    -706: "it has a lease",
    LEASE_ENDED: "the lease ended during the transfer",
    -714: "busy",
    TRANSFER_FAILED: "the transfer failed: its node is lost or hangs",
    -801: "checksum mismatch",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
    -1010: "unavailable",
}
_FRAME_BYTES_MIN = 64 * 1024
_PAGE = 4096
_PREFIX = re.compile(r"[\w.-]*", re.ASCII)  # part of a URL in a scan


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """What `mooncake://master:port?...` means. There are no secrets: Mooncake has none.

    `lease_s` must be what the master was started with (--default_kv_lease_ttl, in milliseconds there): it cannot be
    asked. `admin`: the master's HTTP side (--metrics_port), for listing and usage; empty: port 9003 of the same
    host; "off": none. `segment_bytes`: memory that this process gives to the pool. `hostname`: under which nodes reach
    us; empty: our address on the way to the master. `replicas` is best effort, as in Mooncake.
    """

    master: str = "127.0.0.1:50051"
    prefix: str = "kvcore"
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    hostname: str = ""
    tenant: str = "default"
    admin: str = ""
    lease_s: float = 10.0
    replicas: int = 1
    segment_bytes: int = 0
    local_buffer_bytes: int = 16 * 1024 * 1024
    connect_timeout_s: float = 1.0
    transfer_timeout_s: float = 5.0
    rpc_timeout_s: float = 5.0


def check_options(options: MooncakeOptions) -> None:
    """ConfigError for options that can never work. No I/O."""
    if options.protocol not in PROTOCOLS:
        raise ConfigError(f"Mooncake's protocol is one of {', '.join(PROTOCOLS)}, not {options.protocol[:40]!r}")
    address(options.master, "master")
    if options.admin not in ("", "off"):
        address(options.admin, "admin")
    if not _PREFIX.fullmatch(options.prefix):
        raise ConfigError("Mooncake's prefix is one word of letters, digits, '.', '_' and '-'")
    if min(options.lease_s, options.connect_timeout_s, options.rpc_timeout_s) <= 0 or options.transfer_timeout_s < 1:
        raise ConfigError("lease_s, connect_timeout_s and rpc_timeout_s are above 0, transfer_timeout_s is 1 at least")
    if options.replicas < 1 or options.segment_bytes < 0 or options.local_buffer_bytes < 1:
        raise ConfigError("replicas and local_buffer_bytes are 1 at least, segment_bytes is 0 or more")


def address(text: str, what: str) -> tuple[str, int]:
    """(host, port) of "host:port"."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"Mooncake's {what} is host:port, not {text[:80]!r}")
    return host, int(port)


def failure(code: int, doing: str) -> StoreError:
    """What a negative answer means."""
    return StoreError(f"Mooncake did not {doing}: {_MEANINGS.get(code, 'unknown code')} ({code})")


def pointer(view: memoryview) -> int:
    """Where the bytes of a contiguous view lie."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


class MooncakeClient:
    """One native client. Numbers in and out are Mooncake's own."""

    def __init__(self, options: MooncakeOptions) -> None:
        """Connect. ConfigError: the package is missing. StoreError, OSError: the master does not answer."""
        _bound_waits(options)
        module = _module()
        ours = _reach_master(options)
        self._native = module.MooncakeDistributedStore()
        self._config = module.ReplicateConfig()
        self._config.replica_num = options.replicas
        self._gate = CallGate("the Mooncake client", self._end)
        self._regions: list[tuple[int, int]] = []  # (first address, first address behind); replaced, never changed
        self._held: list[memoryview] = []  # what lies there
        self._frames: deque[npt.NDArray[np.uint8]] = deque()  # free ones, the last used last
        self._owned: list[npt.NDArray[np.uint8]] = []  # all frames: they stay mapped until the native end
        self._set_up(options, ours)

    def exist(self, names: list[str]) -> list[int]:
        with self._gate.call():
            return list(self._native.batch_is_exist(names))

    def size(self, name: str) -> int:
        with self._gate.call():
            return int(self._native.get_size(name))

    def put(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Gather each object from its pieces of registered memory. An object that is there stays as it is: 0."""
        with self._gate.call():
            if _are_single(pointers):
                return list(self._native.batch_put_from(names, _firsts(pointers), _firsts(sizes), self._config))
            return list(self._native.batch_put_from_multi_buffers(names, pointers, sizes, self._config))

    def get(self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Scatter each object over its pieces of registered memory: its bytes, or a code."""
        with self._gate.call():
            if _are_single(pointers):
                return list(self._native.batch_get_into(names, _firsts(pointers), _firsts(sizes)))
            return list(self._native.batch_get_into_multi_buffers(names, pointers, sizes))

    def get_start(self, name: str, target: int, length: int) -> int:
        """The object's first bytes alone."""
        with self._gate.call():
            return int(self._native.get_into_ranges([target], [[name]], [[[0]]], [[[0]]], [[[length]]])[0][0][0])

    def remove(self, name: str) -> int:
        """Also while somebody holds a lease on it (all who found or read it do, for seconds)."""
        with self._gate.call():
            return int(self._native.remove(name, True))

    # --- memory --------------------------------------------------------------------------------------------------

    def register_region(self, region: memoryview) -> None:
        """By one thread at a time. A region that is known already is fine. It is held until the native end."""
        first, length = pointer(region), region.nbytes
        if self.is_registered(first, length):
            return
        with self._gate.call():
            code = self._native.register_buffer(first, length)
            if code != 0:
                raise failure(code, f"register {length} bytes of memory")
            self._held.append(region)
            self._regions = sorted([*self._regions, (first, first + length)])

    def is_registered(self, first: int, length: int) -> bool:
        regions = self._regions
        at = bisect.bisect_right(regions, (first, 2**64)) - 1
        return at >= 0 and first + length <= regions[at][1]

    @contextmanager
    def frame(self, length: int) -> Iterator[npt.NDArray[np.uint8]]:
        """`length` bytes of registered, touched memory, for the time of the block."""
        frame = self._take_frame(length)
        try:
            yield frame[:length]
        finally:
            self._frames.append(frame)

    def _take_frame(self, length: int) -> npt.NDArray[np.uint8]:
        with suppress(IndexError):
            frame = self._frames.pop()
            if len(frame) >= length:
                return frame
            self._frames.appendleft(frame)
        return self._new_frame(length)

    def _new_frame(self, length: int) -> npt.NDArray[np.uint8]:
        try:
            frame = np.ones(max(_FRAME_BYTES_MIN, -(-length // _PAGE) * _PAGE), np.uint8)  # ones: touched, not promised
        except MemoryError as error:
            raise OutOfRoomError(f"no memory for {length} bytes between the caller and Mooncake") from error
        with self._gate.call():
            code = self._native.register_buffer(frame.__array_interface__["data"][0], len(frame))
        if code != 0:
            raise failure(code, f"register {len(frame)} bytes of memory")
        self._owned.append(frame)
        return frame

    # --- begin and end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._gate.close()

    def _set_up(self, options: MooncakeOptions, ours: str) -> None:
        code = self._native.setup(
            options.hostname or ours,
            options.metadata,
            options.segment_bytes,
            options.local_buffer_bytes,
            options.protocol,
            options.devices,
            options.master,
            tenant_id=options.tenant,
        )
        if code != 0:
            raise failure(code, "set up its client")

    def _end(self) -> None:
        in_background(self._end_native, "kvcore-mooncake-end")

    def _end_native(self) -> None:
        """After the last call: the client forgets the regions, and only then may they be unmapped."""
        regions, self._regions = self._regions, []
        for first, _ in regions:
            self._native.unregister_buffer(first)
        self._native.close()
        self._held.clear()
        self._owned.clear()


def _are_single(pieces: list[list[int]]) -> bool:
    """Each object lies in one piece: Mooncake has calls for that, which cost it up to 20 us less for each (0.3.13)."""
    return all(len(one) == 1 for one in pieces)


def _firsts(pieces: list[list[int]]) -> list[int]:
    return [one[0] for one in pieces]


def _module() -> Any:
    try:
        import mooncake.store
    except ImportError as error:
        raise ConfigError(
            f"Mooncake cannot be loaded ({error}): pip install 'kvcore[mooncake]', and on Debian "
            "apt-get install libibverbs1 libnuma1 libcurl4"
        ) from error
    return mooncake.store


def _bound_waits(options: MooncakeOptions) -> None:
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "2")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(round(options.transfer_timeout_s)))
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(round(options.rpc_timeout_s * 1000)))


def _reach_master(options: MooncakeOptions) -> str:
    """Our own address on the way to the master. OSError: nobody listens there."""
    with socket.create_connection(address(options.master, "master"), options.connect_timeout_s) as connection:
        return str(connection.getsockname()[0])

"""A real Mooncake cluster for tests: `mooncake_master` and store nodes from the PyPI wheel, in a network namespace.

Mooncake's nodes and clients listen on all addresses. So a session has a network namespace of its own with nothing in it
but `lo`: the fixture's thread enters it for the time of a test, and what is started meanwhile (servers, the client's
threads, the executor's) lives there. That takes root; without it the tests are skipped loudly, and fail where CI=true.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcore.l2.mooncake import MooncakeBackend, MooncakeOptions

LEASE_MS = 5000
TRANSFER_TIMEOUT_S, RPC_TIMEOUT_S = 2.0, 3.0
NODE_BYTES = 256 * 1024 * 1024
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41
_READY_S = 60.0  # takes 0.1 s on an idle machine
_PAUSE_S = 0.02
_NOTE = "KVCORE_TESTS_MOONCAKE_NAMESPACE"

_NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
size, master = int(sys.argv[1]), sys.argv[2]
code = store.setup("127.0.0.1", "P2PHANDSHAKE", size, 16 << 20, "tcp", "", master)
print("ready", code, flush=True)
sys.stdin.read()
store.close()
"""


class Namespace:
    """The network namespace of this process's Mooncake tests, held by a file descriptor.

    There is one per process, whoever asks for it: Mooncake's client has threads that live as long as the process, and
    they stay in the namespace in which they began. This file may be loaded under several names, so the note of
    the first one is in the environment.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        process, _, first = os.environ.get(_NOTE, "").partition(":")
        if process == str(os.getpid()):
            self._inside = os.dup(int(first))
            return
        self._check(self._libc.unshare(_CLONE_NEWNET))
        try:
            _loopback_up()
            self._inside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        finally:
            self.leave()
        os.environ[_NOTE] = f"{os.getpid()}:{os.dup(self._inside)}"

    def enter(self) -> None:
        self._check(self._libc.setns(self._inside, _CLONE_NEWNET))

    def leave(self) -> None:
        self._check(self._libc.setns(self._outside, _CLONE_NEWNET))

    def close(self) -> None:
        os.close(self._inside)
        os.close(self._outside)

    def _check(self, code: int) -> None:
        if code != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _loopback_up() -> None:
    with socket.socket() as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP_RUNNING))


class Cluster:
    """One master and its nodes. Everything is ended by its own pid."""

    def __init__(self, directory: Path, master_port: int, admin_port: int) -> None:
        self.directory = directory
        self.master_port, self.admin_port = master_port, admin_port
        self.master: subprocess.Popen[bytes] | None = None
        self.nodes: list[subprocess.Popen[str]] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.master_port}"

    def options(self, **changes: object) -> MooncakeOptions:
        fields: dict[str, object] = {"master": self.address, "admin": f"127.0.0.1:{self.admin_port}"}
        fields |= {"lease_s": LEASE_MS / 1000, "transfer_timeout_s": TRANSFER_TIMEOUT_S, "rpc_timeout_s": RPC_TIMEOUT_S}
        return MooncakeOptions(**(fields | changes))  # type: ignore[arg-type]

    def start(self, nodes: int = 1, lease_ms: int = LEASE_MS, client_ttl_s: int = 2) -> None:
        self.start_master(lease_ms, client_ttl_s)
        for _ in range(nodes):
            self.start_node()

    def start_master(self, lease_ms: int = LEASE_MS, client_ttl_s: int = 2) -> None:
        """`client_ttl_s`: after so much silence the master drops a node and its objects."""
        program = Path(sys.executable).parent / "mooncake_master"
        words = [str(program), f"--rpc_port={self.master_port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        words += [
            f"--metrics_port={self.admin_port}",
            f"--default_kv_lease_ttl={lease_ms}",
            f"--client_ttl={client_ttl_s}",
        ]
        with (self.directory / "master.log").open("ab") as log:
            self.master = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        for port in (self.master_port, self.admin_port):
            self._wait_for(port)

    def start_node(self, size: int = NODE_BYTES) -> subprocess.Popen[str]:
        with (self.directory / "node.log").open("ab") as log:
            node = subprocess.Popen(
                [sys.executable, "-c", _NODE, str(size), self.address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.nodes.append(node)
        assert node.stdout is not None
        while not (line := node.stdout.readline()).startswith("ready"):  # the library may say something first
            assert line, f"a Mooncake node has ended: {(self.directory / 'node.log').read_text()[-2000:]}"
        assert line.split() == ["ready", "0"]
        return node

    def kill_master(self) -> None:
        _kill(self.master)
        self.master = None

    def kill_node(self, node: subprocess.Popen[str]) -> None:
        self.nodes.remove(node)
        _kill(node)

    def pause(self, process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
        """Stopped for certain, with all threads: the signal alone is on its way for a while."""
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def stop(self) -> None:
        for node in list(self.nodes):
            self.kill_node(node)
        self.kill_master()

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                assert self.master is not None
                log = (self.directory / "master.log").read_text(errors="replace")[-2000:]
                assert self.master.poll() is None, f"the Mooncake master has ended: {log}"
                assert time.monotonic() < deadline, f"the Mooncake master is not ready: {log}"
            time.sleep(_PAUSE_S)  # a foreign process announces nothing; the deadline above bounds this


def _kill(process: subprocess.Popen[str] | subprocess.Popen[bytes] | None) -> None:
    if process is None:
        return
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.fixture(scope="session")
def namespace(needs, absent):
    """And the time-outs of the native client: they are the process's, and those of its first client stay in force,
    whichever test a worker begins with."""
    needs("mooncake")
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(round(TRANSFER_TIMEOUT_S)))
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(round(RPC_TIMEOUT_S * 1000)))
    try:
        namespace = Namespace()
    except OSError as error:
        absent(f"no network namespace ({error}), so no Mooncake test runs: its nodes listen on all addresses")
    yield namespace
    namespace.close()


@pytest.fixture
def inside(namespace):
    """The test runs inside the namespace."""
    namespace.enter()
    yield namespace
    namespace.leave()


@pytest.fixture(scope="session")
def shared_cluster(namespace, tmp_path_factory):
    """One cluster for the tests that do it no harm."""
    # No other cluster has these ports; nor is any given to whoever asks the system for one (from 32768 upwards).
    cluster = Cluster(tmp_path_factory.mktemp("mooncake"), 21041, 8993)
    namespace.enter()
    try:
        cluster.start(client_ttl_s=60)  # a busy machine keeps a node silent for a while
    finally:
        namespace.leave()
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(inside, tmp_path):
    """A cluster of the test's own, not started, to do harm to."""
    cluster = Cluster(tmp_path, 21061, 9013)
    yield cluster
    cluster.stop()


@pytest.fixture
def connect(inside):
    """Opens backends and closes them after the test."""
    opened = []

    def open_one(options):
        backend = MooncakeBackend(options)
        opened.append(backend)
        backend.open()
        return backend

    yield open_one
    for backend in opened:
        backend.close()

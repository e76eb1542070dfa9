"""The whole stack that a URL builds, before a real store: `Cache` (storage, prefetch, pump), guards, adapter, store.

    stack(url, chunk_bytes=..., request_s=...)     a `Stack` with `CHUNKS` chunks in the store and nothing in L1
    valkey, proxy, needs                           as for the other stores (`tests/stores/conftest.py`)
    s3_url(port)                                   a URL for a bucket of a real S3 server, reached through `port`
    pool                                           a memory pool of NIXL, to do harm to
    mounts                                         mounts of the disk's tests, with the layer that fails and delays

After each test the stack comes to rest, and nothing may be held: no lock, no lease, no hold, no running work.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcore.inprocess import Cache
from kvcore.l2.guards import guard_statistics

CHUNKS = 4
CHUNK_TOKENS = 16
TOKENS = list(range(CHUNKS * CHUNK_TOKENS))
REST_S = 60.0  # a hung call drains when its store goes on, a busy machine takes its time
OPEN_S = 1
"""The breaker's pause in these tests. Everything else that guards a store has its default."""


def load(name, *path):
    full_name = f"kvcore_stack_tests_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).parents[1].joinpath(*path))
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


pause = load("servers", "servers.py").pause


@dataclass(frozen=True)
class Reply:
    """What a request got: chunks of the prefix that are byte for byte right, and how long it took."""

    chunks: int
    seconds: float


class Stack:
    def __init__(self, url, chunk_bytes, request_s):
        separator = "&" if "?" in url else "?"
        self.cache = Cache.open(
            namespace="m",
            chunk_tokens=CHUNK_TOKENS,
            chunk_bytes=chunk_bytes,
            l1_bytes=4 * CHUNKS * chunk_bytes,
            l2=f"{url}{separator}breaker_open_s={OPEN_S}",
            timeout_s=request_s,
        )
        self.chunks = [bytes([number + 1]) * (chunk_bytes - 8) + number.to_bytes(8, "big") for number in range(CHUNKS)]

    def fill(self):
        """Store everything, until L2 has it all."""
        end_s = time.monotonic() + REST_S
        while self.request().chunks < CHUNKS:
            assert time.monotonic() < end_s, "the store never took the chunks"
            self.cache.store(TOKENS, self.chunks)
            assert self.cache.flush(REST_S)

    def request(self):
        """Ask for everything, from L2: L1 forgets what it can before."""
        self.cache.drop_l1()
        begun = time.monotonic()
        got = self.cache.retrieve(TOKENS)
        seconds = time.monotonic() - begun
        assert got == self.chunks[: len(got)], "wrong bytes were served"
        return Reply(len(got), seconds)

    def until(self, good):
        """Requests, one after the other, until one is `good`; the longest that one of them took."""
        end_s = time.monotonic() + REST_S
        longest_s = 0.0
        while True:
            reply = self.request()
            longest_s = max(longest_s, reply.seconds)
            if good(reply):
                return longest_s
            assert time.monotonic() < end_s, f"it never came: {self.guards()}, {self.counts()}"
            pause()  # an open breaker refuses at once, and time is all that it waits for

    @property
    def adapter(self):
        [pump] = self.cache._inner._storage._pumps
        return pump.adapter

    def guards(self):
        return self._on_loop(lambda: guard_statistics(self.adapter))

    def counts(self):
        return self._on_loop(lambda: self.adapter.statistics())

    def at_rest(self):
        """Wait until nothing goes on. Then nothing may be held."""
        end_s = time.monotonic() + REST_S
        while not self._on_loop(self._is_idle):
            assert time.monotonic() < end_s, f"it never came to rest: {self._on_loop(self._held)}"
            pause()  # the end of blocking work is announced to the adapter alone

    def _is_idle(self):
        return not any(self._held().values())

    def _held(self):
        storage = self.cache._inner._storage.statistics()
        l1, usage = storage.l1, self.adapter.usage()
        return {
            "locks": usage.locked,
            "work": self.adapter.work_inflight,
            "outstanding": sum(pump.outstanding for pump in storage.adapters),
            "leases": l1.leases,
            "bytes staging": l1.bytes_staging,
            "bytes draining": l1.bytes_draining,
            "jobs": storage.prefetch.jobs,
            "stagings": storage.stagings,
            "readings": storage.readings,
            "writes": storage.writeback.bytes_inflight,
        }

    def _on_loop(self, look):
        async def looked():
            return look()

        return self.cache._thread.call(looked())


@pytest.fixture
def stack():
    made = []

    def build(url, chunk_bytes=64 << 10, request_s=30.0):
        made.append(Stack(url, chunk_bytes, request_s))
        made[-1].fill()
        made[-1].at_rest()
        return made[-1]

    yield build
    for one in made:
        try:
            one.at_rest()
        finally:
            one.cache.close()


@pytest.fixture
def pool(tmp_path, needs):
    needs("nixl_cu12")
    made = load("nixl", "nixl", "conftest.py").Pool(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def mounts(tmp_path, needs):
    made = load("disk", "disk", "conftest.py").Mounts(tmp_path, needs)
    yield made
    for undo in reversed(made.undo):
        undo()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory, needs):
    module = load("objectstore", "objectstore", "conftest.py")
    if module.weed_program() is None:
        needs("program_weed")
    server = module.Seaweed(tmp_path_factory.mktemp("seaweed"))
    server.create_bucket("kvcore-stack")
    yield server
    server.close()


@pytest.fixture
def s3_url(seaweed, request, monkeypatch):
    module = load("objectstore", "objectstore", "conftest.py")
    prefix = hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
    user = f"{module.ACCESS}:{module.SECRET}"
    return lambda port: f"s3://{user}@kvcore-stack/{prefix}?endpoint=http://127.0.0.1:{port}"

"""A Redis store under test: the real adapter on a real loop with real threads, driven by plain calls."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time

import pytest

from kvcore.keys import ObjectKey
from kvcore.l2.redis import RedisOptions, open_backend
from kvcore.l2.shared import SharedAdapter
from kvcore.runtime.clock import SystemClock
from kvcore.runtime.executor import ThreadExecutor
from kvcore.runtime.notice import EventfdNotice

PATIENT = {"timeout_s": 20.0, "connect_timeout_s": 20.0}  # where no fault is meant, a busy machine shall be none
HANG_S = 60  # nothing may take so long; a hang ends here


class Session:
    """`seconds` is what the last call took. Calls wait for the adapter's own notice."""

    def __init__(self, threads=3, capacity_bytes=None, quota=None, **options):
        self.runner = asyncio.Runner()
        self.loop = self.runner.get_loop()
        self.bells = {}
        self.seconds = 0.0
        options = {**PATIENT, **options}
        self.backend = open_backend(RedisOptions(**options))
        self.run(self._open(threads, capacity_bytes, quota))

    async def _open(self, threads, capacity_bytes, quota):
        self.executor = ThreadExecutor(self.loop, threads)
        self.adapter = SharedAdapter(
            "redis", self.backend, self.executor, lambda: EventfdNotice(self.loop), SystemClock(), capacity_bytes, quota
        )
        for kind in ("store", "lookup", "load"):
            self.bells[kind] = asyncio.Event()
            getattr(self.adapter, f"{kind}_notice").subscribe(self.bells[kind].set)

    def run(self, scenario):
        async def bounded():
            async with asyncio.timeout(HANG_S):
                return await scenario

        begun = time.monotonic()
        try:
            return self.runner.run(bounded())
        finally:
            self.seconds = time.monotonic() - begun

    def store(self, keys, payloads):
        async def scenario():
            task = self.adapter.submit_store(keys, [memoryview(payload) for payload in payloads])
            done = {}
            while task not in done:
                await self._rings("store")
                done.update(self.adapter.pop_completed_stores())
            return [answer.value for answer in done[task]]

        return self.run(scenario())

    def lookup(self, keys):
        return self.run(self._lookup(keys))

    async def _lookup(self, keys):
        task = self.adapter.submit_lookup_and_lock(keys)
        return await self._taken("lookup", lambda: self.adapter.take_lookup(task))

    def load(self, keys, sizes):
        """The bits, and the buffers whose bit is set."""
        buffers = [bytearray(b"\xee" * size) for size in sizes]

        async def scenario():
            task = self.adapter.submit_load(keys, [memoryview(buffer) for buffer in buffers])
            return await self._taken("load", lambda: self.adapter.take_load(task))

        bits = self.run(scenario())
        return bits, [buffer for position, buffer in enumerate(buffers) if bits >> position & 1]

    def unlock(self, keys):
        async def scenario():
            self.adapter.submit_unlock(keys)

        self.run(scenario())

    def delete(self, keys):
        async def scenario():
            self.adapter.delete(keys)

        self.run(scenario())

    def at_rest(self):
        async def scenario():
            while self.adapter.work_inflight:
                ended = asyncio.Event()
                self.executor.submit(lambda: None, lambda outcome, ended=ended: ended.set())
                await ended.wait()

        self.run(scenario())

    async def _taken(self, kind, take):
        while (result := take()) is None:
            await self._rings(kind)
        return result

    async def _rings(self, kind):
        await self.bells[kind].wait()
        self.bells[kind].clear()

    def close(self):
        """And nothing may be left behind."""
        self.at_rest()
        self.adapter.check()
        assert self.adapter.usage().locked == 0

        async def scenario():
            self.adapter.close()
            self.executor.close()

        self.run(scenario())
        self.runner.close()


@pytest.fixture
def session():
    sessions = []

    def begin(**options):
        sessions.append(Session(**options))
        sessions[-1].at_rest()  # the scan
        return sessions[-1]

    yield begin
    for opened in sessions:
        opened.close()


@pytest.fixture
def opened():
    """A backend alone, opened and closed."""
    backends = []

    def begin(**options):
        backends.append(open_backend(RedisOptions(**{**PATIENT, **options})))
        backends[-1].open()
        return backends[-1]

    yield begin
    for backend in backends:
        backend.close()


@pytest.fixture
def key():
    return lambda number, salt="": ObjectKey(b"%032d" % number, "model", 0, 0, salt)


@pytest.fixture
def many(key):
    def make(count, size=100):
        return [key(number) for number in range(count)], [bytes([number % 251]) * size for number in range(count)]

    return make


@pytest.fixture(scope="session")
def self_signed(needs_program):
    needs_program("openssl")

    def make(folder):
        """(certificate, private key) of localhost."""
        certificate, private_key = folder / "certificate.pem", folder / "key.pem"
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                 "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
                 "-keyout", str(private_key), "-out", str(certificate)]  # fmt: skip
        subprocess.run(words, check=True, capture_output=True, timeout=HANG_S)
        return certificate, private_key

    return make


@pytest.fixture(scope="session")
def tls_files(tmp_path_factory, self_signed):
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="session")
def needs_program(needs):
    def check(program):
        if shutil.which(program) is None:
            needs(f"program_{program}")

    return check


@pytest.fixture
def tls_server(tls_files):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls_files)
    return context

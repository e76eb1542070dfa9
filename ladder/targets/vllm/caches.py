"""The caches that target `vllm` puts behind the engine: kvcore inside it, kvcore as a server, anybody's connector.

Each says what vLLM is configured with, and what the ladder may do to it between passes. Only the kinds of kvcore can be
told to forget their fast tier, and count for themselves.

Who holds: a cache its directory and server process until `close`, which tells what was wrong with the end.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kvcore.errors import InternalError
from kvcore.ladder.admissions import refusals, settings_for
from kvcore.ladder.options import LadderOptions
from kvcore.ladder.targets.vllm.engine import BLOCK_TOKENS, TinyEngine
from kvcore.runtime.child import ENDS_IN_S, ServerChild
from kvcore.service import protocol as wire
from kvcore.service.operator import ask

L1_BYTES = 64 << 20
CONNECTOR = "KvcoreConnector"
MODULE = "kvcore.connectors.vllm"
SETTLES_IN_S = 120.0
_ASKS_FOR_S = 60.0
_LOOKS_EVERY_S = 0.02


class CacheKind(Protocol):
    """`chunk_tokens`: a hit ends at a multiple of this."""

    chunk_tokens: int
    has_l2: bool

    def transfer(self) -> dict[str, Any]:
        """Arguments of `KVTransferConfig`."""
        ...

    def settle(self, engine: TinyEngine) -> str:
        """Come to rest after a pass; what is left behind."""
        ...

    def drop_l1(self, engine: TinyEngine) -> None: ...

    def counters(self, engine: TinyEngine) -> dict[str, int]:
        """Counters that only grow."""
        ...

    def close(self) -> list[str]: ...


class _Kvcore:
    """What both kinds of kvcore have in common. A directory of files is L2."""

    has_l2 = True

    def __init__(self, chunk_tokens: int, load_async: bool, several_groups: bool, admission: dict[str, Any]) -> None:
        self.chunk_tokens = chunk_tokens
        self._admission = admission
        self.directory = Path(tempfile.mkdtemp(prefix="kvv-"))  # short: an ipc path has about 100 bytes at most
        self._load_async = load_async
        # A failed synchronous load stops an engine with several groups; that must be said (see the connector).
        self._policy = "fail" if several_groups and not load_async else "recompute"

    @property
    def l2(self) -> str:
        return f"file://{self.directory}/l2"

    def transfer(self) -> dict[str, Any]:
        extra = {"chunk_tokens": self.chunk_tokens, "load_async": self._load_async}
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_load_failure_policy": self._policy,
            "kv_connector_extra_config": extra | self._admission | self.settings(),
        }

    def settings(self) -> dict[str, Any]:
        """What this kind of cache adds to the connector's configuration."""
        return {}

    def counters(self, engine: TinyEngine) -> dict[str, int]:
        worker = engine.worker_connector._side.worker.statistics()
        return {
            "stores_verified": worker.cells_stored,
            "fences_waited": worker.fences_waited,
            "stores_cancelled": worker.stores_cancelled,
            "refusals": refusals(engine.connector._side.scheduler.admission),
        }

    def close(self) -> list[str]:
        shutil.rmtree(self.directory, ignore_errors=True)
        return []


class InProcess(_Kvcore):
    """The cache lives in the engine; its files outlive it."""

    def settings(self) -> dict[str, Any]:
        return {"l1_bytes": L1_BYTES, "l2": self.l2}

    def settle(self, engine: TinyEngine) -> str:
        attached = engine.worker_connector._attached
        left: str = attached.runner.call(_settled(attached.host))
        return left

    def drop_l1(self, engine: TinyEngine) -> None:
        attached = engine.worker_connector._attached
        attached.runner.call(_dropped(attached.host.storage))


async def _settled(host: Any) -> str:
    end = time.monotonic() + SETTLES_IN_S
    left = ""
    while time.monotonic() < end:
        idle = await host.storage.drain(int(SETTLES_IN_S * 1e9))
        l1, server = host.l1.statistics(), host.server.statistics()
        busy = {"leases": l1.leases, "holds": l1.holds, "staging": l1.objects_staging, "stores": server.stores_open}
        left = ", ".join(f"{name} {count}" for name, count in busy.items() if count)
        if idle and not left:
            return ""
        await asyncio.sleep(_LOOKS_EVERY_S)
    return left or "its storage is not idle"


async def _dropped(storage: Any) -> None:
    storage.drop_l1()


class Served(_Kvcore):
    """One `kvcore serve`, with files behind its L1."""

    def __init__(self, chunk_tokens: int, load_async: bool, several_groups: bool, admission: dict[str, Any]) -> None:
        super().__init__(chunk_tokens, load_async, several_groups, admission)
        self.address = f"ipc://{self.directory}/server.sock"
        arguments = ["--listen", self.address, "--l1", str(L1_BYTES), "--l2", self.l2]
        arguments += ["--chunk-tokens", str(chunk_tokens), "--log-level", "warning"]
        self._server = ServerChild(self.directory / "server.log", *arguments)
        self._server.started()

    def settings(self) -> dict[str, Any]:
        return {"servers": self.address}

    def settle(self, engine: TinyEngine) -> str:
        end = time.monotonic() + SETTLES_IN_S
        while left := _left(self._status()):
            if time.monotonic() > end:
                return left
            time.sleep(_LOOKS_EVERY_S)
        return ""

    def _status(self) -> dict[str, Any]:
        with urllib.request.urlopen(self._server.http + "/status", timeout=_ASKS_FOR_S) as reply:
            found: dict[str, Any] = json.loads(reply.read())
        return found

    def drop_l1(self, engine: TinyEngine) -> None:
        asyncio.run(ask(self.address, wire.Clear(), timeout_s=_ASKS_FOR_S))

    def close(self) -> list[str]:
        try:
            status = self._server.stop(ENDS_IN_S)
            problems = [f"[liveness] the server ended with {status}"] if status else []
        except InternalError as error:
            problems = [f"[liveness] {error}"]
        return problems + super().close()


def _left(state: dict[str, Any]) -> str:
    """What a server still holds or does; empty at rest."""
    server, storage = state["server"], state["storage"]
    if server is None:
        return ""  # no engine has come yet
    l1, writeback = storage["l1"], storage["writeback"]
    busy = {name: server[name] for name in ("lookups_open", "stores_open", "reads_open")}
    busy |= {name: l1[name] for name in ("leases", "holds", "objects_staging")}
    busy |= {name: writeback[name] for name in ("queued", "backing_off", "inflight")}
    return ", ".join(f"{name} {count}" for name, count in busy.items() if count)


class Foreign:
    """Anybody's connector, by its class. `{directory}` in the texts of its configuration is a directory of its own."""

    has_l2 = False

    def __init__(self, connector: str, extra: Mapping[str, Any]) -> None:
        self.chunk_tokens = BLOCK_TOKENS
        self.directory = Path(tempfile.mkdtemp(prefix="kvv-"))
        self._module, _, self._name = connector.partition(":")
        self._extra = {name: self._placed(value) for name, value in extra.items()}

    def _placed(self, value: Any) -> Any:
        return value.replace("{directory}", str(self.directory)) if isinstance(value, str) else value

    def transfer(self) -> dict[str, Any]:
        return {
            "kv_connector": self._name,
            "kv_connector_module_path": self._module,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": self._extra,
        }

    def settle(self, engine: TinyEngine) -> str:
        return ""

    def drop_l1(self, engine: TinyEngine) -> None:
        raise AssertionError("a foreign connector is not told to forget")

    def counters(self, engine: TinyEngine) -> dict[str, int]:
        return {}

    def close(self) -> list[str]:
        shutil.rmtree(self.directory, ignore_errors=True)
        return []


def cache_for(
    options: LadderOptions, servers: int, load_async: bool, several_groups: bool, floor_tokens: int
) -> CacheKind:
    """The cache that this configuration is about. `floor_tokens`: of an admission that loads only what pays."""
    if options.connector is not None:
        return Foreign(options.connector, options.connector_config)
    kind = Served if servers else InProcess
    admission = settings_for(options.admission, seed=options.seed, floor_tokens=floor_tokens)
    return kind(options.chunk_tokens, load_async, several_groups, admission)

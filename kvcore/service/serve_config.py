"""What `kvcore serve` is told: one frozen struct per component, units in the names.

Defaults suit one engine on the same machine. Nothing here is started; `host.py` builds the server from it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.config import sources
from kvcore.config.sources import Loaded
from kvcore.config.values import redact_url
from kvcore.errors import ConfigError
from kvcore.service.protocol import ServerLimits
from kvcore.service.server import ServerConfig
from kvcore.storage import StorageConfig

_POLICIES = ("lru", "s3fifo")
_LOG_FORMATS = ("text", "json")
_TRANSFERS = ("both", "worker")
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class L1Config:
    """`capacity_bytes` of shared memory, reserved when the first engine has come. `tenant_bytes`: each salt's limit."""

    capacity_bytes: int = 1 << 30
    policy: str = "lru"
    tenant_bytes: int | None = None

    def __post_init__(self) -> None:
        _one_of("l1.policy", self.policy, _POLICIES)
        if self.capacity_bytes < 1 << 16:
            raise ConfigError(f"l1.capacity_bytes = {self.capacity_bytes} is too little; 64KiB is the least")


@dataclass(frozen=True, slots=True)
class CurveConfig:
    """Key files of a server that listens beyond this machine: its own secret, and a directory of clients' keys."""

    secret_file: str = ""
    clients_directory: str = ""

    def __post_init__(self) -> None:
        if bool(self.secret_file) != bool(self.clients_directory):
            raise ConfigError("curve.secret_file and curve.clients_directory are needed together")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """/healthz, /status and /metrics, read-only, on loopback. Port 0: any free one. Empty `listen`: none."""

    listen: str = "127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class LogConfig:
    """To standard error, one line per event. `otlp_endpoint`: where request spans go (needs OpenTelemetry)."""

    format: str = "text"
    level: str = "info"
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        _one_of("log.format", self.format, _LOG_FORMATS)
        _one_of("log.level", self.level, _LOG_LEVELS)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`listen`: where engines connect. `l2`: URLs, in order of preference.

    `transfer`: with "both", a worker chooses whether it copies or the server; with "worker", it always does.
    `shutdown_ns`: how long the end waits for what is outstanding. The default leaves the process a second of five for
    the rest.
    """

    listen: str = ""
    chunk_tokens: int = 256
    l2: tuple[str, ...] = field(default=(), repr=False)  # URLs hold passwords; `render` redacts them
    transfer: str = "both"
    shutdown_ns: int = 4_000_000_000
    l1: L1Config = field(default_factory=L1Config)
    storage: StorageConfig = field(default_factory=StorageConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: ServerLimits = field(default_factory=ServerLimits)
    curve: CurveConfig = field(default_factory=CurveConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _one_of("transfer", self.transfer, _TRANSFERS)
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens = {self.chunk_tokens} must be at least 1")
        if self.shutdown_ns < 1:
            raise ConfigError("shutdown_ns must be positive")
        if len(set(self.l2)) != len(self.l2):
            raise ConfigError(f"the store {redact_url(_first_twice(self.l2))} is named twice; each store once")

    @property
    def address(self) -> str:
        return self.listen or f"ipc://{default_directory() / 'server.sock'}"


def default_directory() -> Path:
    """Where this user's server has its socket: private, and the same for servers and clients on this machine."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvcore" if runtime else Path(tempfile.gettempdir()) / f"kvcore-{os.getuid()}"


def load_serve_config(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None = None
) -> Loaded[ServeConfig]:
    """From all sources. Raises `ConfigError`; nothing was started."""
    return sources.load(ServeConfig, flags=flags, environ=environ, file=file)


def _one_of(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ConfigError(f"{name} = {given!r}; known are {', '.join(known)}")


def _first_twice(urls: tuple[str, ...]) -> str:
    return next(url for position, url in enumerate(urls) if url in urls[:position])
